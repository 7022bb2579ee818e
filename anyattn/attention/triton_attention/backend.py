"""The `triton` backend: what it serves, the host work of a step, and the launches.

A step is planned by one kernel, which divides it from the lengths on the device (see `work`), and attended by one or
two: one for sequences of few rows, one for all others. Where something was divided, one more merges.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.attention.triton_attention import tuning
from anyattn.attention.triton_attention.launches import (
    OVERHEAD,
    AttendKernel,
    Call,
    Division,
    HopperExtendKernel,
    HopperMLAKernel,
    Layer,
    PlainKernel,
)
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.kernels.launch import BoundKernel, on
from anyattn.types import ANY_INT, FP8_DTYPES, KV_LAYOUTS, PHASES, GraphLevel, IntSet, Load, Role

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.attention.triton_attention import work
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    work = lazy_import("anyattn.attention.triton_attention.work")

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_MANY = (1 << 31) - 1
_FEW_ROWS, _MOST_ROWS = 32, 64  # of a short step's tile
_SPREAD = 4  # times as many tiles as programs at a time need not be divided
_LEAST_PART, _MOST_PARTS = 2048, 8
"""In deterministic mode: keys of a part, and parts of a sequence."""
_GLUON_SINCE = "3.6"


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """Before what is not written for the device, behind what is, but where it was measured to be faster on an H200."""
    if platform.arch == "sm90" and role == "decode":
        if not spec.is_mla:
            return 88
        if spec.num_qo_heads <= 16 and load.num_seqs <= 4:
            return 88
    return 50


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """One step. tree_bits, tree_starts: of all masks one behind the other, and where each sequence's begins, or -1."""

    batch: Batch
    divisions: tuple[Division, ...]
    tree_bits: torch.Tensor | None
    tree_starts: torch.Tensor | None


class TritonBackend(AttentionBackend):
    """On every GPU that Triton compiles for."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda", "rocm", "xpu"}),
        archs=frozenset(tuning.TUNINGS),
        packages=("torch>=2.9", "triton>=3.5 | module:triton"),
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES | FP8_DTYPES,
        per_head_scales=True,
        head_dims=IntSet(minimum=16, maximum=576),
        any_head_dim_pair=True,
        any_mla_dims=True,
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset(PHASES),
        decode_qo_len=16,
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        alibi=True,
        tree_mask=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
        deterministic=True,
        needs_finite_tails=True,
        priority=_priority,
        run_on=frozenset({"sm90"}),
        # Interpreted, and compiled.
        contract_tested_on=frozenset(tuning.TUNINGS) - {"sm90", "pvc", "bmg_g21", "bmg_g31"},
    )
    uses_gluon: ClassVar[bool] = True
    """Whether kernels in Gluon serve what they are written for, and plain Triton only the rest."""

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._device = torch.device(platform.torch_device)
        self._tuned = tuning.TUNINGS[platform.arch]
        self._num_cores = platform.num_cores or 1
        gluon = self.uses_gluon and platform.arch == "sm90" and _has_gluon()
        self._hopper_mla = HopperMLAKernel(spec, cache, self._tuned) if gluon and HopperMLAKernel.serves(spec) else None
        self._hopper_extend = (
            HopperExtendKernel(spec, cache, self._tuned) if gluon and HopperExtendKernel.serves(spec) else None
        )
        self._plain: dict[int, PlainKernel] = {}
        self._long: AttendKernel = self._hopper_mla or self._hopper_extend or self._plain_kernel(0)
        self._divide_ranges = BoundKernel(work.ranges_kernel)
        self._divide_parts = BoundKernel(work.parts_kernel)
        self._workspace: tuple[torch.Tensor, torch.Tensor] | None = None
        self._layers = LayerViews(functools.partial(Layer, fp8=self._plain_kernel(0).fp8))

    def _plain_kernel(self, rows: int) -> PlainKernel:
        """rows: of a sequence, at most; 0 for steps of many."""
        bucket = rows and next(size for size in (16, 32, _MOST_ROWS) if rows <= size)
        if bucket not in self._plain:
            self._plain[bucket] = PlainKernel(self.spec, self.cache, self._tuned, rows=bucket)
        return self._plain[bucket]

    def _short(self, rows: int) -> AttendKernel:
        """For steps with so many rows a sequence."""
        if self._hopper_mla is not None and rows > _FEW_ROWS:
            return self._hopper_mla
        return self._plain_kernel(min(rows, _MOST_ROWS))

    def plan(self, batch: Batch) -> _Plan:
        lens = batch.host.qo_lens
        return self._planned(batch, ones=int((lens == 1).sum()), largest=batch.max_qo_len)

    def init_graph(self, batch: Batch) -> _Plan:
        with torch.inference_mode(False):  # what is refreshed outside of that mode must not be made in it
            ones = batch.num_seqs if batch.max_qo_len > 1 and batch.phase == "mixed" else 0
            return self._planned(batch, ones=ones, largest=batch.max_qo_len)

    def refresh_graph(self, plan: Any, batch: Batch) -> None:
        for division in plan.divisions:
            self._divide(division, batch)

    def _planned(self, batch: Batch, *, ones: int, largest: int) -> _Plan:
        """ones: sequences that may have one new token, where others may have more. largest: most new tokens of any."""
        divisions = []
        most = 1 if self.spec.deterministic else self.capabilities.decode_qo_len
        if largest <= most:
            divisions.append(self._division(batch, short=True, qo_lens=(1, largest)))
        else:
            if ones:
                divisions.append(self._division(batch, short=True, qo_lens=(1, 1)))
            divisions.append(self._division(batch, short=False, qo_lens=(2, _MANY)))
        bits, starts = self._trees(batch)
        plan = _Plan(batch=batch, divisions=tuple(divisions), tree_bits=bits, tree_starts=starts)
        self.refresh_graph(plan, batch)
        return plan

    def _division(self, batch: Batch, *, short: bool, qo_lens: tuple[int, int]) -> Division:
        spec = self.spec
        largest = min(qo_lens[1], batch.max_qo_len)
        kernel = self._short(largest * spec.group_size) if short else self._long
        tile, head_tile, heads = kernel.tile, kernel.head_tile, kernel.heads
        deterministic = spec.deterministic
        slots = max(self._num_cores * tile.per_core, 1)
        tiles = -(-largest * head_tile // tile.block_m) if short else 1
        most_parts = _MOST_PARTS if deterministic else _MANY
        ranges = short and not deterministic
        if ranges:
            lanes = heads * tiles
            # Where there are more heads than programs at a time, several rounds even out what each has.
            num_programs = max(slots // lanes, 1) if 4 * lanes <= slots else max(4 * slots // lanes, 1)
            num_merges = min(batch.num_seqs, num_programs)
            num_partials = 2 * num_programs * lanes
            slots = 0
        else:
            num_tiles = self._num_tiles(batch, qo_lens, head_tile, tile.block_m)
            slots = 0 if deterministic else max(slots // heads, 1)
            if not deterministic and num_tiles >= _SPREAD * slots:
                most_parts = 1
            num_programs = num_tiles
            if deterministic:
                longest = -(-batch.max_kv_len // _LEAST_PART)
                most_parts = max(min(_MOST_PARTS, longest), 1)
                num_programs = num_tiles * most_parts
            elif most_parts > 1:
                num_programs += 2 * slots
            num_merges = num_tiles if most_parts > 1 else 0
            num_partials = num_programs * heads if most_parts > 1 else 0
        new = functools.partial(torch.empty, dtype=torch.int32, device=self._device)
        partial_out, partial_lse = self._partials(num_partials * tile.block_m)
        return Division(
            kernel=kernel,
            ranges=ranges,
            qo_lens=qo_lens,
            tiles=tiles if ranges else 1,
            num_programs=num_programs,
            num_merges=num_merges,
            most_parts=most_parts,
            slots=slots,
            records=new(max(num_programs, 1), work.RECORD),
            merges=new(max(num_merges, 1), work.MERGE),
            partial_out=partial_out,
            partial_lse=partial_lse,
        )

    def _num_tiles(self, batch: Batch, qo_lens: tuple[int, int], head_tile: int, block_m: int) -> int:
        """Of all sequences that are served; the most there can be, in a graph."""
        lens = batch.host.qo_lens
        if lens.sum() != batch.num_tokens or not lens.size:  # a graph's step is empty at first
            return batch.num_tokens * head_tile // block_m + min(batch.num_seqs, batch.num_tokens)
        lens = lens[(lens >= qo_lens[0]) & (lens <= qo_lens[1])]
        return int((-(-lens * head_tile // block_m)).sum())

    def _partials(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for results that are to be merged; all plans share the largest, as they run one after the other."""
        if self._workspace is None or self._workspace[1].shape[0] < rows:
            new = functools.partial(torch.empty, dtype=torch.float32, device=self._device)
            with torch.inference_mode(False):
                self._workspace = new(rows, self.spec.vo_head_dim), new(rows)
        return self._workspace

    def _trees(self, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.spec.tree_mask:
            return None, None
        masks = batch.tree_masks or (None,) * batch.num_seqs
        sizes = np.array([0 if mask is None else mask.numel() for mask in masks], dtype=np.int64)
        starts = np.where(sizes > 0, np.cumsum(sizes) - sizes, -1)
        there = [mask for mask in masks if mask is not None]
        if not there:
            bits = torch.zeros(1, dtype=torch.int8, device=self._device)
        elif there[0]._base is not None and there[0]._base.numel() == sizes.sum():
            bits = there[0]._base.view(-1).view(torch.int8)  # a graph's, which are refreshed in place
        else:
            bits = torch.cat([mask.reshape(-1) for mask in there]).view(torch.int8)
        (starts_there,) = to_device([starts], self._device, wide=1)
        return bits, starts_there

    def _divide(self, division: Division, batch: Batch) -> None:
        if not division.num_programs:
            return
        tile, window = division.kernel.tile, self.spec.sliding_window
        least = -(-(_LEAST_PART if self.spec.deterministic else tile.least_keys) // tile.block_n)
        common = (
            batch.qo_indptr, batch.kv_lens, batch.num_seqs, division.num_programs, *division.qo_lens, window, least
        )  # fmt: skip
        programs = -(-division.num_programs // work.PROGRAMS)
        with on(self._device):
            if division.ranges:
                self._divide_ranges(
                    tile, (programs, 1, 1), *common, division.records, division.merges, tile.block_n, OVERHEAD,
                    work.SEQS, work.PROGRAMS,
                )  # fmt: skip
            else:
                self._divide_parts(
                    tile, (programs, 1, 1), *common, division.most_parts, division.slots, division.records,
                    division.merges, division.num_merges, tile.block_n, tile.block_m, division.kernel.head_tile,
                    work.SEQS, work.PROGRAMS,
                )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        step: _Plan = plan
        lse = None
        if self.spec.return_lse:
            lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        layer = self._layers.of(kv)
        call = Call(
            batch=step.batch, q=q, out=out, lse=lse, sinks=sinks, slopes=alibi_slopes, tree_bits=step.tree_bits,
            tree_starts=step.tree_starts,
        )  # fmt: skip
        with on(self._device):
            for division in step.divisions:
                if division.num_programs:
                    division.kernel.attend(division, layer, call)
                    if division.num_merges:
                        division.kernel.merge(division, layer, call)
        return lse


def _has_gluon() -> bool:
    """Whether the installed Triton has Gluon as the kernels want it."""
    import triton
    from packaging.version import Version

    return Version(triton.__version__) >= Version(_GLUON_SINCE)
