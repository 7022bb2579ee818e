"""Checks of how a pool stores new tokens: where, from which strides, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyattn.mem_cache.base import KVPool
from anyattn.mem_cache.spec import CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError
from anyattn.testing.pools.bench import Bench, Tokens, apart
from anyattn.testing.pools.shapes import PoolCheck

_COUNT = 11


def _stored(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int, *, parts_apart: bool = False) -> None:
    bench = Bench(tested, device, cache, seed)
    bench.fill()  # so that what is not written to has something to lose
    for layer in (*range(cache.num_layers), 0):
        slots = bench.slots(_COUNT)
        tokens, before = bench.tokens(len(slots)), bench.picture()
        bench.store(layer, apart(tokens, cache.v_head_dim) if parts_apart else tokens, slots)
        bench.must_have_stored(before, layer, tokens, slots)


def _stored_apart(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    _stored(tested, device, cache, seed, parts_apart=True)


def _part_of_wider(x: torch.Tensor) -> torch.Tensor:
    """As a fused projection gives it."""
    memory = x.new_full([x.shape[0], *(size + 16 for size in x.shape[1:])], torch.nan)
    view = memory[(slice(None), *(slice(8, 8 + size) for size in x.shape[1:]))]
    return view.copy_(x)


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    return x.new_full([*x.shape[:-1], x.shape[-1] + 1], torch.nan)[..., 1:].copy_(x)


def _every_second(x: torch.Tensor) -> torch.Tensor:
    return x.new_full([2 * size for size in x.shape], torch.nan)[(slice(None, None, 2),) * x.ndim].copy_(x)


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Heads before tokens, or dims before tokens where there are no heads."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _reversed(x: torch.Tensor) -> torch.Tensor:
    axes = list(range(x.ndim))[::-1]
    return x.permute(axes).contiguous().permute(axes)


def _one_for_all(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


_STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a part of a wider tensor": _part_of_wider,
    "rows that begin at an odd element": _unaligned,
    "every second element": _every_second,
    "axes swapped": _swapped,
    "axes in reverse": _reversed,
    "one token's memory for all": _one_for_all,
}
"""What lies between the elements is NaN."""


def _strided(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    ways = list(_STRIDES.items())
    for number, (name, change) in enumerate(ways):
        slots, drawn = bench.slots(_COUNT), bench.tokens(_COUNT)
        k, v = change(drawn.k.to(bench.device)), None
        if drawn.v is not None:  # keys and values need not have the same strides
            v = ways[(number + 2) % len(ways)][1](drawn.v.to(bench.device))
        with_gaps = torch.zeros(2 * len(slots), dtype=torch.int64, device=bench.device)
        with_gaps[::2] = slots.to(bench.device)
        before = bench.picture()
        bench.pool.store(0, k, v, with_gaps[::2])
        try:
            bench.must_have_stored(before, 0, Tokens(k=k.cpu(), v=None if v is None else v.cpu()), slots)
        except CheckFailedError as error:
            raise CheckFailedError(f"k with strides {k.stride()} ({name}), slots with stride 2: {error}") from error


def _null_page(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    for all_of_them in (False, True):
        bench = Bench(tested, device, cache, seed)
        slots = bench.slots(_COUNT)
        padding = torch.arange(_COUNT) % 2 == 0 if not all_of_them else torch.ones(_COUNT, dtype=torch.bool)
        slots[padding] = torch.arange(int(padding.sum())) % min(cache.page_size, 3)  # several in one slot
        tokens, before = bench.tokens(_COUNT), bench.picture()
        for part in tokens.parts():
            part[padding] = torch.nan
        bench.store(0, tokens, slots)
        bench.must_have_stored(before, 0, tokens, slots)


def _nothing(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    bench.fill()
    before, nothing, no_slots = bench.picture(), bench.tokens(0), torch.empty(0, dtype=torch.int64)
    bench.store(0, nothing, no_slots)
    bench.must_have_stored(before, 0, nothing, no_slots)


def _nan(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    bench.fill()
    spoilt = bench.slots(max(cache.page_size // 2, 1), pages=[3])
    tokens, before = bench.tokens(len(spoilt)), bench.picture()
    for part in tokens.parts():
        part.fill_(torch.nan)
    bench.store(1, tokens, spoilt)
    bench.must_have_stored(before, 1, tokens, spoilt)
    # Later stores take nothing over, to pages beside it and to the page itself.
    beside = [slot for slot in range(2 * cache.page_size, 5 * cache.page_size) if slot not in spoilt.tolist()]
    for layer in range(cache.num_layers):
        slots = torch.tensor(beside)[bench.order(len(beside))][:_COUNT]
        tokens, before = bench.tokens(len(slots)), bench.picture()
        bench.store(layer, tokens, slots)
        bench.must_have_stored(before, layer, tokens, slots)


def _converted(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        slots = bench.slots(_COUNT)
        tokens, before = bench.tokens(_COUNT, dtype=dtype), bench.picture()
        bench.store(0, tokens, slots)
        bench.must_have_stored(before, 0, tokens, slots)


STORE_CHECKS: dict[str, PoolCheck] = {"store writes tokens to their slots and nothing else": _stored}
"""By name; for each case."""

THOROUGH_STORE_CHECKS: dict[str, PoolCheck] = {
    "store reads inputs of any strides": _strided,
    "store keeps tokens of the null page's slots out of it": _null_page,
    "store of no tokens changes nothing": _nothing,
    "NaN stays in the slots that it was stored to": _nan,
    "store converts other dtypes": _converted,
}
"""By name; for the thorough cases."""

APART_CHECKS: dict[str, PoolCheck] = {"store takes latents and rope parts apart": _stored_apart}
"""By name; for each case of kinds mla and dsa whose keys have a rope part."""
