"""Checks of fp8 in a pool whose scales can be set: division, saturation, scales of tensors and heads, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from anyattn.errors import ContractError
from anyattn.mem_cache.base import KVPool
from anyattn.mem_cache.spec import CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError
from anyattn.testing.pools.bench import Bench, Tokens
from anyattn.testing.pools.shapes import PoolCheck
from anyattn.types import FP8_DTYPES

_COUNT = 11
_K_SCALE, _V_SCALE = 0.37, 0.0625
"""So far from 1 and from each other that no rounding makes up for one that was left out or taken for the other."""

_ScaleKind = Literal["float", "tensor", "per head"]


def _scales(cache: CacheSpec, kind: _ScaleKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and values, float32 on the CPU; for MLA one for both."""
    k, v = torch.tensor([_K_SCALE]), torch.tensor([_V_SCALE])
    if kind == "per head":
        factors = 2.0 ** (torch.arange(cache.num_kv_heads) % 4)
        k, v = k * factors, v * factors.flip(0)
    return (k, k) if cache.kind == "mla" else (k, v)


def _quantised(kind: _ScaleKind, tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    bench.fill()
    scales = _scales(cache, kind)
    _set(bench, 1, scales, kind)
    for name, wanted in zip(("k_scale", "v_scale"), scales, strict=True):
        got = torch.as_tensor(getattr(bench.pool.layers[1], name)).float().cpu()
        if not torch.equal(got.reshape(-1).expand(wanted.shape), wanted):
            raise CheckFailedError(f"{name} of the layer is {got.tolist()} after set_scales with {wanted.tolist()}.")
        for layer in (0, 2):
            if torch.as_tensor(getattr(bench.pool.layers[layer], name)).float().ne(1.0).any():
                raise CheckFailedError(f"set_scales of layer 1 changed {name} of layer {layer}.")
    for layer, used in ((1, scales), (0, (1.0, 1.0)), (1, scales)):
        slots = bench.slots(_COUNT)
        tokens, before = bench.tokens(len(slots), size=9.0), bench.picture()
        bench.store(layer, tokens, slots)
        bench.must_have_stored(before, layer, tokens, slots, used)


def _set(bench: Bench, layer: int, scales: tuple[torch.Tensor, torch.Tensor], kind: _ScaleKind) -> None:
    given: list[Any] = [float(scale[0]) if kind == "float" else scale.to(bench.device) for scale in scales]
    if scales[0] is scales[1]:
        given[1] = given[0]  # one for both
    bench.pool.set_scales(layer, *given)


def _saturated(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    dtype: torch.dtype = getattr(torch, cache.kv_dtype)
    largest = torch.finfo(dtype).max
    scales = _scales(cache, "float")
    for layer, used in ((0, (1.0, 1.0)), (1, tuple(map(float, scales)))):
        if layer:
            _set(bench, layer, scales, "float")
        slots = bench.slots(_COUNT)
        drawn = bench.tokens(len(slots))
        signs = [torch.where(part > 0, 1.0, -1.0) for part in drawn.parts()]
        sizes = torch.tensor([2.0, 1.5, 100.0, 1e6, 1e30])[torch.arange(len(slots)) % 5].reshape(-1, 1, 1)
        over = [(sign * sizes * largest).to(bench.dtype) for sign in signs]
        v = None if drawn.v is None else over[1]
        bench.store(layer, Tokens(k=over[0].reshape(drawn.k.shape), v=v), slots)
        pages = torch.arange(bench.num_pages + 1, device=bench.device)
        for rows, sign, name in zip(bench.rows(layer, pages), signs, ("keys", "values"), strict=False):
            stored = rows.flatten(0, 1)[slots].view(dtype).float()
            wrong = stored != sign * largest
            if wrong.any():
                place = tuple(wrong.nonzero()[0].tolist())
                value = float(over[0 if name == "keys" else 1][place])
                raise CheckFailedError(
                    f"layer {layer}'s {name}: {value:.3g} with scale {used[0]} is stored as {float(stored[place])}; "
                    f"{cache.kv_dtype} saturates at {largest}, and never becomes NaN or infinite."
                )


def _refused(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    heads = cache.num_kv_heads
    fitting = torch.ones(1, device=bench.device)
    wrong: dict[str, Any] = {
        f"a tensor of {heads + 1} elements for {heads} heads": torch.ones(heads + 1, device=bench.device),
        "a float64 tensor": torch.ones(1, dtype=torch.float64, device=bench.device),
        "a tensor on another device": torch.ones(1, device="meta"),
        "a string": "0.5",
    }
    if heads > 1 and not tested.capabilities.per_head_scales:
        wrong["a scale for each head, where per_head_scales is not declared"] = torch.ones(heads, device=bench.device)
    for what, scale in wrong.items():
        _must_refuse(bench, what, scale, scale)
        _must_refuse(bench, what, fitting, scale)
    if cache.kind == "mla":
        _must_refuse(bench, "two scales, where keys and values are stored once,", 0.5, 0.25)


def _none_to_set(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    what = f"a scale, where {cache.kv_dtype} has none"
    if cache.kv_dtype in FP8_DTYPES:
        what = f"a scale, where kind {cache.kind} makes its own"
    _must_refuse(bench, what, 0.5, 0.5)


def _must_refuse(bench: Bench, what: str, k_scale: Any, v_scale: Any) -> None:
    def scales() -> list[Any]:
        return [torch.as_tensor(scale).tolist() for kv in bench.pool.layers for scale in (kv.k_scale, kv.v_scale)]

    before = scales()
    try:
        bench.pool.set_scales(0, k_scale, v_scale)
    except ContractError:
        if scales() != before:
            raise CheckFailedError(f"set_scales refused {what}, and changed the scales.") from None
        return
    raise CheckFailedError(f"set_scales took {what}; the contract wants ContractError.")


FLOAT_SCALE_CHECKS: dict[str, PoolCheck] = {
    "fp8 is stored as value / scale, a float": partial(_quantised, "float"),
    "fp8 is stored as value / scale, a tensor": partial(_quantised, "tensor"),
    "fp8 saturates": _saturated,
}
"""By name; for each fp8 dtype in each layout."""

PER_HEAD_CHECKS: dict[str, PoolCheck] = {
    "fp8 is stored as value / scale, one for each head": partial(_quantised, "per head")
}
"""By name; likewise, where `per_head_scales` is declared."""

REFUSAL_CHECKS: dict[str, PoolCheck] = {"set_scales refuses what cannot be a scale": _refused}
"""By name; for an fp8 cache."""

NO_SCALE_CHECKS: dict[str, PoolCheck] = {"set_scales refuses where there are no scales": _none_to_set}
"""By name; for a cache without."""
