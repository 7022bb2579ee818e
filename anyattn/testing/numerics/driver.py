"""Drives one case through a backend: a runtime around it, and steps that run as an engine's do.

What other checks use: `build_runtime`, `set_scales`, `store` and `run_step` here, with `PerHead` and `Step` of
`inputs`; `Case` and `cases_for` of `cases`; `Oracle` and `compare` of `oracle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.batch import Batch
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.attention.select import select
from anyattn.attention.selection import BackendCandidate, Candidates, Preference, Selection
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.mem_cache.sparse_pools import DSAPool
from anyattn.mem_cache.windows import WindowPages
from anyattn.platforms.base import Platform
from anyattn.testing.numerics.cases import Case
from anyattn.testing.numerics.inputs import PerHead, Step, at_odd_strides, part_of_fused
from anyattn.types import FP8_DTYPES, NULL_PAGE

__all__ = ["POISONS", "PerHead", "ShuffledAllocator", "Step", "build_runtime", "run_step", "set_scales", "store"]

POISONS = {
    "null page": "the null page was read, which stands for pages behind the window and for padding",
    "pages": "what lies beyond a sequence's length was read, or pages of others",
    "gaps": "what lies between the rows or heads of a strided q was read",
    "out": "it was not written there",
}
"""What is filled with NaN, and what it means that a result is NaN because of it."""


class ShuffledAllocator(PagedAllocator):
    """Hands out pages in random order, so that no kernel gets away with assuming consecutive ones."""

    def __init__(
        self, num_pages: int, page_size: int, device: Any = None, *, debug: bool = False, seed: int = 0
    ) -> None:
        super().__init__(num_pages, page_size, device, debug=debug)
        self._free = np.random.default_rng(seed).permutation(self._free)


class PoisonedMHAPool(MHAPool):
    """Keeps what its null page holds, be it NaN; `MHAPool` may make it zero whenever it stores."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        with _null_page_kept(self.layers[layer]):
            super().store(layer, k, v, slots)


class PoisonedMLAPool(MLAPool):
    """As `PoisonedMHAPool`, for MLA."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        with _null_page_kept(self.layers[layer]):
            super().store(layer, k, v, slots)


class PoisonedDSAPool(DSAPool):
    """As `PoisonedMHAPool`, for sparse MLA."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        with _null_page_kept(self.layers[layer]):
            super().store(layer, k, v, slots)


def nan_for(part: torch.Tensor) -> float:
    """What pages are filled with to be NaN: bytes of 255 are that as fp8, float32 and bfloat16, as rows have them."""
    return 255 if part.dtype == torch.uint8 else float("nan")


@contextmanager
def _null_page_kept(kv: LayerKV) -> Iterator[None]:
    pages = [part[NULL_PAGE] for part in kv.stored]
    before = [page.clone() for page in pages]
    yield
    for page, value in zip(pages, before, strict=True):
        page.copy_(value)


def choose(backend: type[AttentionBackend], case: Case, platform: Platform) -> Selection:
    """The tested backend in the roles whose phases it declares, the reference in the other one."""
    spec = case.spec
    prefill = {"prefill", "mixed"} | ({"verify"} if spec.tree_mask else set())
    pool = _pool_class(case)
    candidates = Candidates(
        backends=[
            BackendCandidate(name=name, distribution="anyattn", capabilities=each.capabilities)
            for name, each in _classes(backend).items()
        ],
        allocators={"shuffled": ShuffledAllocator.capabilities},
        pools={"torch": pool.capabilities},
    )
    phases = backend.capabilities.phases
    preference = Preference(
        prefill_backend="tested" if prefill <= phases else "reference",
        decode_backends=("tested" if "decode" in phases else "reference",),
        page_size=case.page_size,
        layout=case.layout,
        joined_layers=case.joined_layers,
    )
    return select(spec, platform, candidates, preference)


def build_runtime(
    backend: type[AttentionBackend],
    case: Case,
    platform: Platform,
    seed: int,
    *,
    poison: frozenset[str] = frozenset(POISONS),
) -> AttentionRuntime:
    """A runtime around one backend, its pools full of NaN and its pages in random order.

    A role whose phases the backend does not declare is filled by the reference.

    poison: of "null page" and "pages", what is NaN; the rest is 0.
    """
    spec, page_size = case.spec, case.page_size
    longest = [
        stored + sum(step[i] for step in case.steps)
        for i, stored in enumerate(case.stored_before or (0,) * len(case.steps[0]))
    ]
    num_pages = sum(-(-tokens // page_size) for tokens in longest) + 3
    windows = []
    if spec.sliding_window is not None and case.window_pages:
        pages = ShuffledAllocator(num_pages, page_size, debug=True, seed=seed + 1)
        windows = [WindowPages(spec.sliding_window, pages, num_pages=num_pages, page_size=page_size)]
    table = PageTable(
        ShuffledAllocator(num_pages, page_size, debug=True, seed=seed),
        page_size,
        device=platform.torch_device,
        windows=windows,
        debug=True,
    )
    rt = runtime_around(backend, case, platform, table)
    for kv in (kv for pool in rt.pools for kv in pool.layers):
        for part in kv.stored:
            part.fill_(nan_for(part) if "pages" in poison else 0.0)
            part[NULL_PAGE].fill_(nan_for(part) if "null page" in poison else 0.0)
    return rt


def runtime_around(
    backend: type[AttentionBackend], case: Case, platform: Platform, table: PageTable
) -> AttentionRuntime:
    """A runtime with the table's pages, in pools of zeros."""
    spec, choice = case.spec, choose(backend, case, platform)
    first_layer, more_layers = (1, 2) if case.joined_layers else (0, 0)  # joined with one before and one behind
    cache = spec.cache_spec(
        num_layers=case.num_layers + more_layers,
        page_size=case.page_size,
        layout=case.layout,
        joined_layers=case.joined_layers,
    )
    num_pools = 1 + len(table.windows)
    pools = [_pool_class(case)(cache, table.allocator.num_pages, platform.torch_device) for _ in range(num_pools)]
    classes = _classes(backend)
    instances = {name: classes[name](spec, cache, platform) for name in {choice.prefill, choice.decode}}
    return AttentionRuntime(
        [spec] * case.num_layers,
        {spec: choice},
        {spec: HybridBackend(choice, instances)},
        pools,
        table,
        [(num_pools - 1, first_layer + layer) for layer in range(case.num_layers)],
    )


def _classes(backend: type[AttentionBackend]) -> dict[str, type[AttentionBackend]]:
    return {"tested": backend, "reference": ReferenceBackend}


def _pool_class(case: Case) -> type[PoisonedMHAPool] | type[PoisonedMLAPool] | type[PoisonedDSAPool]:
    if case.spec.topk is not None:
        return PoisonedDSAPool
    return PoisonedMLAPool if case.spec.is_mla else PoisonedMHAPool


def set_scales(rt: AttentionRuntime, case: Case) -> list[tuple[float | torch.Tensor, float | torch.Tensor]]:
    """Gives each layer of an fp8 pool scales other than 1, and than another layer's.

    Returns k's and v's of each as the pool will use them: float32, [1, 1] or [num_kv_heads, 1], on the CPU; 1.0 where
    there are none to set.
    """
    spec, layers = case.spec, range(len(rt.layer_specs))
    if spec.storage_dtype not in FP8_DTYPES or spec.topk is not None:
        return [(1.0, 1.0) for _ in layers]
    k_scale, v_scale = torch.tensor([0.05]), torch.tensor([0.05 if spec.is_mla else 0.07])
    if spec.kv_scale_per_head:  # so far apart that another head's scale is out of every tolerance
        factors = 2.0 ** (torch.arange(spec.num_kv_heads) % 4)
        k_scale, v_scale = k_scale * factors, v_scale * factors.flip(0)
    scales: list[tuple[float | torch.Tensor, float | torch.Tensor]] = []
    for layer in layers:
        k_given, v_given = (scale * 1.5**layer for scale in (k_scale, v_scale))
        scales.append((k_given[:, None], v_given[:, None]))
        if case.scale_as_tensor:
            k_there = k_given.to(rt.device)
            rt.set_scales(layer, k_there, k_there if spec.is_mla else v_given.to(rt.device))
        else:
            rt.set_scales(layer, float(k_given), float(v_given))
    return scales


def indices_on(rt: AttentionRuntime, step: Step, batch: Batch) -> torch.Tensor | None:
    """The positions that the step's tokens see, on the device; None where the spec has no topk."""
    indices = step.indices(batch.host.prefix_lens.tolist())
    return None if indices is None else indices.to(rt.device)


def layer_kv(rt: AttentionRuntime, layer: int) -> LayerKV:
    """The pages that a layer's backend reads."""
    pool, place = rt.places[layer]
    return rt.pools[pool].layers[place]


def store(rt: AttentionRuntime, step: Step, batch: Batch, layer: int = 0) -> None:
    """Stores a step's keys and values, as `run` does before it attends."""
    pool, place = rt.places[layer]
    is_mla = rt.layer_specs[layer].is_mla
    k, v = step.k.to(rt.device), step.v.to(rt.device)
    rt.pools[pool].store(place, k[:, 0] if is_mla else k, None if is_mla else v, batch.of_pool(pool).out_slots)


def run_step(
    rt: AttentionRuntime,
    step: Step,
    plan: Plan,
    per_head: PerHead,
    layer: int = 0,
    *,
    odd_strides: bool = False,
    poison: frozenset[str] = frozenset(POISONS),
) -> tuple[Any, ...]:
    """Output, and LSE where there is one, on the CPU.

    The inputs are strided views, as fused projections give them, and the output is written into a larger tensor.

    poison: of "gaps" and "out", what is NaN before; the rest is 0.
    """
    spec, device = rt.layer_specs[layer], rt.device
    laid_out = at_odd_strides if odd_strides else part_of_fused
    gap = float("nan") if "gaps" in poison else 0.0
    q, k, v = (laid_out(x, device, gap=gap) for x in (step.q, step.k, step.v))
    tokens, before = q.shape[0], float("nan") if "out" in poison else 0.0
    out = torch.full((tokens + 2, spec.num_qo_heads, spec.vo_head_dim), before, dtype=q.dtype, device=device)
    result = rt.run(
        layer,
        q,
        k[:, 0] if spec.is_mla else k,
        None if spec.is_mla else v,
        plan,
        sinks=None if per_head.sinks is None else per_head.sinks.to(device),
        alibi_slopes=None if per_head.alibi_slopes is None else per_head.alibi_slopes.to(device),
        indices=indices_on(rt, step, plan.batch),
        out=out[1 : tokens + 1],
    )
    written = out[1 : tokens + 1].cpu()  # whatever was returned
    return (written, result[1].cpu()) if spec.return_lse else (written,)
