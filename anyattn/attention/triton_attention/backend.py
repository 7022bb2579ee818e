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
from anyattn.attention.triton_attention import tuning
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.kernels.launch import BoundKernel, on
from anyattn.types import ANY_INT, FP8_DTYPES, KV_LAYOUTS, PHASES, GraphLevel, IntSet, Load, Role

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.attention.triton_attention import attend, work
    from anyattn.attention.triton_attention.tuning import Tile
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    attend = lazy_import("anyattn.attention.triton_attention.attend")
    work = lazy_import("anyattn.attention.triton_attention.work")

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_MANY = (1 << 31) - 1
_OVERHEAD = 1  # blocks that a sequence costs beside its own
_MOST_ROWS = 64  # of a tile of a short step
_MOST_TILES = 16  # of a sequence in a short step
_SPREAD = 4  # times as many tiles as programs at a time need not be divided
_LEAST_PART, _MOST_PARTS = 2048, 8
"""In deterministic mode: keys of a part, and parts of a sequence."""
_LOG2_E = 1.4426950408889634
_MERGED_PARTS, _MERGED_WIDTH = 32, 128


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    return 50


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Division:
    """The work of one kernel in a step.

    tile: what it works with. ranges: which of the ways to divide. qo_lens: least and most new tokens of the sequences
    that it serves. tiles: of each sequence, that are in the grid. records, merges: see `work`.
    """

    tile: Tile
    ranges: bool
    qo_lens: tuple[int, int]
    tiles: int
    num_programs: int
    num_merges: int
    most_parts: int
    slots: int
    records: torch.Tensor
    merges: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """One step. tree_bits, tree_starts: of all masks one behind the other, and where each sequence's begins, or -1."""

    batch: Batch
    divisions: tuple[_Division, ...]
    tree_bits: torch.Tensor | None
    tree_starts: torch.Tensor | None


class TritonBackend(AttentionBackend):
    """On every GPU that Triton compiles for."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda", "rocm", "xpu"}),
        archs=frozenset(tuning.TUNINGS),
        packages=("torch>=2.9", "triton>=3.5"),
        extra="cuda",
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
    )
    uses_gluon: ClassVar[bool] = True
    """Whether kernels in Gluon serve what they are written for, and plain Triton only the rest."""

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._device = torch.device(platform.torch_device)
        self._tuning = tuning.TUNINGS[platform.arch]
        self._num_cores = platform.num_cores or 1
        self._is_fp8 = spec.storage_dtype in FP8_DTYPES
        self._dims = _divided(spec)
        self._fp8 = ""
        if self._is_fp8:
            self._fp8 = "native" if self._tuning.native_fp8 else spec.storage_dtype[7:11]
        self._ones: torch.Tensor | None = None
        if self._is_fp8:
            self._ones = torch.ones(1, dtype=torch.float32, device=self._device)
        capped = spec.logits_soft_cap is not None
        self._scale = spec.scale * (1.0 if capped else _LOG2_E)
        self._launch_attend = BoundKernel(attend.attend_kernel)
        self._launch_merge = BoundKernel(attend.merge_kernel)
        self._launch_ranges = BoundKernel(work.ranges_kernel)
        self._launch_parts = BoundKernel(work.parts_kernel)
        self._workspace: tuple[torch.Tensor, torch.Tensor] | None = None
        self._layers: dict[int, Any] = {}

    def _choice(self, rows: int) -> Tile:
        """The tile for steps with at most so many rows a sequence; 0 for steps of many."""
        widths = [self._dims[name] for name in ("D1", "D2", "DV1", "DV2")]
        table: dict[int, Any] = self._tuning.long if not rows else self._tuning.short
        found = table[min(most for most in table if most >= min(self.spec.head_dim, max(table)))]
        tile: Tile = found if not rows else found[(rows > 16) + (rows > 32)]
        item = getattr(torch, self.spec.dtype).itemsize
        values = 0 if self._dims["V_IN_K"] else widths[2] + widths[3]
        return tuning.fitted(tile, self._tuning, (widths[0] + widths[1] + values) * item, (widths[0] + widths[1]) * item)

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
        head_tile, _ = self._head_tiles(_MOST_ROWS)
        short = 1 if self.spec.deterministic else _MOST_TILES * _MOST_ROWS // head_tile
        if largest <= min(short, 16):
            divisions.append(self._division(batch, short=True, qo_lens=(1, largest)))
        else:
            if ones:
                divisions.append(self._division(batch, short=True, qo_lens=(1, 1)))
            divisions.append(self._division(batch, short=False, qo_lens=(2, _MANY)))
        bits, starts = self._trees(batch)
        plan = _Plan(batch=batch, divisions=tuple(divisions), tree_bits=bits, tree_starts=starts)
        self.refresh_graph(plan, batch)
        return plan

    def _head_tiles(self, block_m: int) -> tuple[int, int]:
        """Query heads of a group that are rows of one tile, and how many such parts the groups have together."""
        parts = -(-self.spec.group_size // block_m)
        return -(-self.spec.group_size // parts), parts * self.spec.num_kv_heads

    def _division(self, batch: Batch, *, short: bool, qo_lens: tuple[int, int]) -> _Division:
        spec = self.spec
        largest = min(qo_lens[1], batch.max_qo_len)
        tile = self._choice(min(largest * spec.group_size, _MOST_ROWS) if short else 0)
        head_tile, heads = self._head_tiles(tile.block_m)
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
        return _Division(
            tile=tile,
            ranges=ranges,
            qo_lens=qo_lens,
            tiles=tiles if ranges else 1,
            num_programs=num_programs,
            num_merges=num_merges,
            most_parts=most_parts,
            slots=slots,
            records=new(max(num_programs, 1), work.RECORD),
            merges=new(max(num_merges, 1), work.RECORD),
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

    def _divide(self, division: _Division, batch: Batch) -> None:
        if not division.num_programs:
            return
        tile, window = division.tile, self.spec.sliding_window
        least = -(-(_LEAST_PART if self.spec.deterministic else tile.least_keys) // tile.block_n)
        common = (
            batch.qo_indptr, batch.kv_lens, batch.num_seqs, division.num_programs, *division.qo_lens, window, least
        )  # fmt: skip
        programs = -(-division.num_programs // work.PROGRAMS)
        with on(self._device):
            if division.ranges:
                self._launch_ranges(
                    tile, (programs, 1, 1), *common, division.records, division.merges, tile.block_n, _OVERHEAD,
                    work.SEQS, work.PROGRAMS,
                )  # fmt: skip
            else:
                head_tile, _ = self._head_tiles(tile.block_m)
                self._launch_parts(
                    tile, (programs, 1, 1), *common, division.most_parts, division.slots, division.records,
                    division.merges, division.num_merges, tile.block_n, tile.block_m, head_tile, work.SEQS,
                    work.PROGRAMS,
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
        spec, step = self.spec, plan
        batch = step.batch
        lse = None
        if spec.return_lse:
            lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        layer = self._layer(kv)
        aligned = not (q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8 or out.data_ptr() % 16)
        unit = 8 if aligned else 1
        chained = self._tuning.chained
        sink_dtype = None if sinks is None else sinks.dtype
        with on(self._device):
            for division in step.divisions:
                if not division.num_programs:
                    continue
                tile = division.tile
                head_tile, heads = self._head_tiles(tile.block_m)
                descs = layer.descriptors(tile)
                self._launch_attend(
                    (tile, division.ranges, aligned, layer.key, descs[0] is None, sink_dtype),
                    (division.num_programs * division.tiles * heads, 1, 1),
                    q, layer.k, layer.v, out, lse, *descs, division.records, batch.block_table,
                    batch.block_table.stride(0), batch.qo_indptr, batch.kv_lens, division.partial_out,
                    division.partial_lse, q.stride(0) // unit, q.stride(1) // unit, out.stride(0), self._scale,
                    spec.logits_soft_cap, spec.sliding_window, *layer.scales, sinks, alibi_slopes, step.tree_bits,
                    step.tree_starts, *division.qo_lens, division.tiles,
                    spec.num_qo_heads, spec.group_size, head_tile, *self._dims.values(), *layer.strides, unit,
                    self.cache.page_size, self._fp8, self._precision, spec.causal, division.ranges, _OVERHEAD,
                    not division.ranges, tile.block_m, tile.block_n, tile.stages, chained,
                    num_warps=tile.num_warps, num_stages=tile.stages,
                )  # fmt: skip
                if division.num_merges:
                    rows = min(tile.block_m, head_tile * batch.max_qo_len)
                    self._launch_merge(
                        (division.ranges, tile.block_m, sink_dtype, aligned),
                        (division.num_merges * division.tiles * heads, rows, -(-spec.vo_head_dim // _MERGED_WIDTH)),
                        out, lse, division.merges, batch.qo_indptr, division.partial_out, division.partial_lse,
                        out.stride(0), *layer.scales[2:], sinks, division.tiles,
                        spec.num_qo_heads, spec.group_size, head_tile, spec.vo_head_dim, division.ranges,
                        tile.block_m, _MERGED_PARTS, _MERGED_WIDTH, chained,
                        **({"launch_pdl": True} if chained else {}),
                    )  # fmt: skip
        return lse

    @property
    def _precision(self) -> str:
        return "ieee"

    def _layer(self, kv: LayerKV) -> _Layer:
        kept = self._layers.get(id(kv))
        if kept is None or kept.kv is not kv:
            kept = self._layers[id(kv)] = _Layer(kv, self)
        return kept


def _divided(spec: AttentionSpec) -> dict[str, Any]:
    """The sizes of heads as kernels want them: two powers of two, of which the second is padded, or 0."""
    shares = spec.is_mla and spec.vo_head_dim == _power_of_two(spec.vo_head_dim) >= 16
    first = spec.vo_head_dim if shares else _power_of_two(spec.head_dim + 1) // 2
    v_first = _power_of_two(spec.vo_head_dim + 1) // 2
    if spec.vo_head_dim < 16:
        v_first = 16
    return {
        "D": spec.head_dim,
        "D1": first,
        "D2": _padded(spec.head_dim - first),
        "DV": spec.vo_head_dim,
        "DV1": v_first,
        "DV2": _padded(spec.vo_head_dim - v_first),
        "V_IN_K": shares,
    }


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _padded(width: int) -> int:
    """To what tensor cores multiply; 0 stays."""
    return max(_power_of_two(width), 16) if width > 0 else 0


class _Layer:
    """A layer's pages as the kernels take them.

    strides: of pages, tokens and heads of keys, then of values, in elements. scales: keys' and values', each with how
    far a head's is from the one before. key: what differs from layer to layer and is compiled in.
    """

    def __init__(self, kv: LayerKV, backend: TritonBackend) -> None:
        self.kv = kv
        k, v = kv.nhd()
        self.strides = (*k.stride()[:3], *v.stride()[:3])
        self.key = (self.strides, k.data_ptr() % 16, v.data_ptr() % 16)
        self._shape = k.shape
        bits = backend._is_fp8 and backend._fp8 != "native"
        self.k, self.v = (k.view(torch.int8), v.view(torch.int8)) if bits else (k, v)
        self.scales: tuple[Any, ...] = (None, 0, None, 0)
        if backend._is_fp8:
            k_scale, v_scale = (self._on_device(scale, k.device) for scale in (kv.k_scale, kv.v_scale))
            self.scales = (k_scale, int(k_scale.ndim > 0), v_scale, int(v_scale.ndim > 0))
        self._backend = backend
        self._descriptors: dict[int, Any] = {}

    @staticmethod
    def _on_device(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale
        return torch.full((), scale, dtype=torch.float32, device=device)

    def descriptors(self, tile: Tile) -> tuple[Any, ...]:
        """Of both parts of keys and of values, for blocks that lie within a page; otherwise none."""
        kept = self._descriptors.get(tile.block_n)
        if kept is None:
            kept = self._descriptors[tile.block_n] = self._new_descriptors(tile.block_n)
        return kept

    def _new_descriptors(self, block_n: int) -> tuple[Any, ...]:
        backend = self._backend
        item = self.k.element_size()
        steps = [stride * item % 16 for stride in self.strides] + [self.k.data_ptr() % 16, self.v.data_ptr() % 16]
        if not backend._tuning.descriptors or backend.cache.page_size % block_n or any(steps):
            return (None,) * 4
        from triton.tools.tensor_descriptor import TensorDescriptor

        dims = backend._dims

        def of(pages: torch.Tensor, width: int) -> Any:
            if not width:
                return None
            by_head = pages.transpose(1, 2)  # [num_pages, num_kv_heads, page_size, dim]
            return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), [1, 1, block_n, width])

        of_v = (None, None) if dims["V_IN_K"] else (of(self.v, dims["DV1"]), of(self.v, dims["DV2"]))
        return of(self.k, dims["D1"]), of(self.k, dims["D2"]), *of_v
