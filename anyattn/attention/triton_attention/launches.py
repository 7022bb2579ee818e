"""What launches the attention kernels: a layer's pages as kernels take them, and each kernel's arguments in order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.attention.triton_attention import tuning
from anyattn.attention.triton_attention.tuning import Tile, Tuning
from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels.launch import BoundKernel
from anyattn.types import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.attention.triton_attention import attend, hopper_extend, hopper_mla
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
else:
    torch = lazy_import("torch")
    attend = lazy_import("anyattn.attention.triton_attention.attend")
    hopper_extend = lazy_import("anyattn.attention.triton_attention.hopper_extend")
    hopper_mla = lazy_import("anyattn.attention.triton_attention.hopper_mla")

OVERHEAD = 1  # blocks that a sequence costs beside its own, where work is divided in ranges
_LOG2_E = 1.4426950408889634
_FP8_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz"}
"""As `attend.decoded` calls them."""
_WIDEST = 256  # elements of keys and values of which tiles of many rows are computed
_WIDE, _NARROW, _FEW_PARTS = 512, 64, 12
"""Elements of a row that a program merges where rows have about so many parts at most, and where they have more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """The work of one kernel in a step.

    ranges: which of the ways to divide. qo_lens: least and most new tokens of the sequences that it serves. tiles: of
    each sequence, that are in the grid. most_parts, slots: what `work.parts_kernel` takes. records, merges: see `work`.
    partial_out, partial_lse: [rows, vo_head_dim] and [rows], float32, for what is to be merged.
    """

    kernel: AttendKernel
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
class Call:
    """One layer's call of `run`. tree_bits, tree_starts: of all masks one behind the other, and where each sequence's
    begins, or -1."""

    batch: Batch
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    tree_bits: torch.Tensor | None
    tree_starts: torch.Tensor | None


class Layer:
    """A layer's pages as the kernels take them.

    strides: of pages, tokens and heads of keys, then of values, in elements. scales: keys' and values', each with how
    far a head's is from the one before. key: what may differ from layer to layer and is compiled in.
    """

    def __init__(self, kv: LayerKV, fp8: str) -> None:
        """fp8: as `attend.decoded` takes it."""
        k, v = kv.nhd()
        self.strides = (*k.stride()[:3], *v.stride()[:3])
        self.k, self.v = (k.view(torch.int8), v.view(torch.int8)) if fp8 else (k, v)
        self.scales: tuple[Any, ...] = (None, 0, None, 0)
        if fp8:
            k_scale, v_scale = (self._on_device(scale, k.device) for scale in (kv.k_scale, kv.v_scale))
            self.scales = (k_scale, int(k_scale.ndim > 0), v_scale, int(v_scale.ndim > 0))
        self.is_aligned = not any(
            stride * k.element_size() % 16 for stride in self.strides if stride > 1
        ) and not (k.data_ptr() % 16 or v.data_ptr() % 16)
        self.key = (self.strides, k.data_ptr() % 16, v.data_ptr() % 16)
        self.kept: dict[Any, Any] = {}
        """What kernels make of it, by kernel: descriptors."""

    @staticmethod
    def _on_device(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale
        return torch.full((), scale, dtype=torch.float32, device=device)


def _alignment(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Whether each begins where 16 bytes can be moved at once, which is compiled in."""
    return tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)


class AttendKernel:
    """One of the attention kernels, with the tile that it works with."""

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, tuned: Tuning, tile: Tile) -> None:
        self.spec, self.cache, self.tuned, self.tile = spec, cache, tuned, tile
        parts = -(-spec.group_size // tile.block_m)
        self.head_tile = -(-spec.group_size // parts)
        """Query heads of a group that are rows of one tile."""
        self.heads = parts * spec.num_kv_heads
        """How many such parts the groups have together."""
        self._merge = BoundKernel(attend.merge_kernel)

    def attend(self, division: Division, layer: Layer, call: Call) -> None:
        """Launches the kernel."""
        raise NotImplementedError

    def merge(self, division: Division, layer: Layer, call: Call) -> None:
        """Launches what merges its parts."""
        spec, tile, sinks = self.spec, self.tile, call.sinks
        rows = min(tile.block_m, self.head_tile * call.batch.max_qo_len)
        lanes = division.num_merges * division.tiles * self.heads
        widest = min(_power_of_two(spec.vo_head_dim), _WIDE)
        wide = not division.ranges or division.num_programs <= _FEW_PARTS * call.batch.num_seqs
        grid = (lanes, rows, -(-spec.vo_head_dim // (widest if wide else _NARROW)))
        chained = self.tuned.chained
        self._merge(
            (division.ranges, None if sinks is None else sinks.dtype, _alignment(call.out)),
            grid,
            call.out, call.lse, division.merges, call.batch.qo_indptr, division.partial_out, division.partial_lse,
            *layer.scales[2:], sinks, division.tiles, int(wide),
            spec.num_qo_heads, spec.group_size, self.head_tile, spec.vo_head_dim, division.ranges, tile.block_m,
            widest, _NARROW, chained,
            **({"launch_pdl": True} if chained else {}),
        )  # fmt: skip


class PlainKernel(AttendKernel):
    """Plain Triton: everything, everywhere."""

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, tuned: Tuning, *, rows: int) -> None:
        """rows: of a sequence, at most; 0 for steps of many."""
        self._dims = dims = head_dims(spec)
        if spec.dtype == "float32" or (max(spec.head_dim, spec.vo_head_dim) > _WIDEST and not dims["V_IN_K"]):
            rows = 16  # larger tiles, of two such accumulators or off tensor cores, are more than registers hold
        elif tuned.shared_products and spec.storage_dtype != spec.dtype and dims["DV2"]:
            # Triton 3.6 gives wrong results where tensor cores read two converted parts of values from shared memory.
            rows = 32
        tile = _tile_of(tuned.short if rows else {most: (each,) for most, each in tuned.long.items()}, spec, rows)
        item = max(DTYPE_BYTES[spec.dtype], DTYPE_BYTES[spec.storage_dtype])
        keys = dims["D1"] + dims["D2"]
        values = 0 if dims["V_IN_K"] else dims["DV1"] + dims["DV2"]
        exact = spec.dtype == "float32"
        tile = tuning.fitted(tile, tuned, (keys + values) * item, keys * item, exact=exact)
        super().__init__(spec, cache, tuned, tile)
        self.fp8 = _FP8_FORMATS.get(spec.storage_dtype, "")
        self._scale = spec.scale * (1.0 if spec.logits_soft_cap is not None else _LOG2_E)
        self._attend = BoundKernel(attend.attend_kernel)

    def attend(self, division: Division, layer: Layer, call: Call) -> None:
        spec, tile, batch, q, out = self.spec, self.tile, call.batch, call.q, call.out
        aligned = not (q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8 or out.data_ptr() % 16)
        unit = 8 if aligned else 1
        descs = self._descriptors(layer)
        self._attend(
            (division.ranges, _alignment(q, out), unit, layer.key, None if call.sinks is None else call.sinks.dtype),
            (division.num_programs * division.tiles * self.heads, 1, 1),
            q, layer.k, layer.v, out, call.lse, *descs, division.records, batch.block_table,
            batch.block_table.stride(0), batch.qo_indptr, batch.kv_lens, division.partial_out, division.partial_lse,
            q.stride(0) // unit, q.stride(1) // unit, self._scale, spec.logits_soft_cap,
            spec.sliding_window, *layer.scales, call.sinks, call.slopes, call.tree_bits, call.tree_starts,
            *division.qo_lens, division.tiles,
            spec.num_qo_heads, spec.group_size, self.head_tile, *self._dims.values(), *layer.strides, unit,
            self.cache.page_size, self.fp8, self.tuned.native_fp8, "ieee", spec.causal, division.ranges, OVERHEAD,
            not division.ranges,
            tile.block_m, tile.block_n, tile.stages, self.tuned.chained,
            num_warps=tile.num_warps, num_stages=tile.stages,
        )  # fmt: skip

    def _descriptors(self, layer: Layer) -> tuple[Any, ...]:
        """Of both parts of keys and of values, for blocks that lie within a page; otherwise none."""
        kept: tuple[Any, ...] | None = layer.kept.get(self)
        if kept is None:
            kept = (None,) * 4
            if self.tuned.descriptors and not self.cache.page_size % self.tile.block_n and layer.is_aligned:
                of, dims = functools.partial(_block_descriptor, block_n=self.tile.block_n), self._dims
                of_v = (None, None) if dims["V_IN_K"] else (of(layer.v, dims["DV1"]), of(layer.v, dims["DV2"]))
                kept = (of(layer.k, dims["D1"]), of(layer.k, dims["D2"]), *of_v)
            layer.kept[self] = kept
        return kept


def _tile_of(table: Mapping[int, tuple[Tile, ...]], spec: AttentionSpec, rows: int) -> Tile:
    """table: of `Tuning`, by the most elements of a key or value; rows: of a sequence, 0 for many."""
    largest = min(max(spec.head_dim, spec.vo_head_dim), max(table))
    return table[min(most for most in table if most >= largest)][(rows > 16) + (rows > 32)]


def head_dims(spec: AttentionSpec) -> dict[str, Any]:
    """The sizes of heads as `attend_kernel` wants them: each as two powers of two, of which the last may reach beyond.

    The second is 0 where the first is enough. MLA's values are the keys' first part, where that is one.
    """
    shares = spec.is_mla and spec.vo_head_dim == _power_of_two(spec.vo_head_dim) >= 16
    first = spec.vo_head_dim if shares else max(_power_of_two(spec.head_dim + 1) // 2, 16)
    v_first = max(_power_of_two(spec.vo_head_dim + 1) // 2, 16)
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


def _block_descriptor(pages: torch.Tensor, width: int, *, block_n: int) -> Any:
    """Of [num_pages, num_kv_heads, page_size, dim], by `block_n` tokens of a head, `width` elements of each."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not width:
        return None
    by_head = pages.transpose(1, 2)
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), [1, 1, block_n, width])


class _HopperKernel(AttendKernel):
    """What both Gluon kernels share: pages and queries as rows of one token each, by 64 of them."""

    def _row_descriptor(self, tensor: torch.Tensor, width: int) -> Any:
        """tensor: [rows, at least width]."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [64, width], layout)

    @staticmethod
    def _rows(pages: torch.Tensor) -> torch.Tensor:
        """[num_pages, page_size, num_kv_heads, dim] as rows of a token each, in which heads lie beside each other.

        Where pages are [num_kv_heads, page_size, dim], as rows of a head's token each.
        """
        num_pages, page_size, heads, dim = pages.shape
        page, token, head, _ = pages.stride()
        beside = head < token
        last = ((num_pages - 1) * page + (0 if beside else (heads - 1) * head)) // token + page_size
        return pages.as_strided((last, (heads - 1) * head + dim if beside else dim), (token, 1))

    @staticmethod
    def takes(layer: Layer) -> bool:
        """Whether its pages are rows of a token each."""
        k_page, k_token, k_head, v_page, v_token, v_head = layer.strides
        return layer.is_aligned and not any(
            page % token or (head > token and head % token)
            for page, token, head in ((k_page, k_token, k_head), (v_page, v_token, v_head))
        )


class HopperMLAKernel(_HopperKernel):
    """Gluon's MLA."""

    TILE = Tile(block_m=64, block_n=64, num_warps=4, stages=2)

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, tuned: Tuning) -> None:
        super().__init__(spec, cache, tuned, self.TILE)
        self._attend = BoundKernel(hopper_mla.hopper_mla_kernel)
        self._gathers = cache.page_size % self.tile.block_n != 0

    @staticmethod
    def serves(spec: AttentionSpec) -> bool:
        """Whether it computes this; for 16 rows and less plain Triton is faster."""
        dims = (spec.kv_lora_rank, spec.qk_rope_head_dim) == (512, 64)
        heads = spec.num_qo_heads <= 64 or spec.num_qo_heads % 64 == 0
        return dims and heads and _is_plain(spec) and spec.sliding_window is None

    def attend(self, division: Division, layer: Layer, call: Call) -> None:
        spec, batch, out = self.spec, call.batch, call.out
        q = call.q
        if not q.is_contiguous() or q.data_ptr() % 16:
            q = q.clone(memory_format=torch.contiguous_format)
        rows = q.view(-1, spec.head_dim)
        parts = (spec.vo_head_dim, spec.head_dim - spec.vo_head_dim)
        latent, rope = rows.split_with_sizes(parts, -1)
        q_descs = self._row_descriptor(latent, 256), self._row_descriptor(rope, 64)
        k_page, k_token = layer.strides[:2]
        self._attend(
            (division.ranges, layer.key, _alignment(out), None if call.sinks is None else call.sinks.dtype),
            (division.num_programs * division.tiles * self.heads, 1, 1),
            *q_descs, *self._descriptors(layer), layer.k, out, call.lse, division.records, batch.block_table,
            batch.block_table.stride(0), batch.qo_indptr, batch.kv_lens, division.partial_out, division.partial_lse,
            self.spec.scale * _LOG2_E, call.sinks, *division.qo_lens, division.tiles,
            spec.num_qo_heads, self.head_tile, self.cache.page_size, k_page // k_token, k_token, spec.causal,
            division.ranges, OVERHEAD, self._gathers, call.lse is not None, call.sinks is not None,
            num_warps=4,
        )  # fmt: skip

    def _descriptors(self, layer: Layer) -> tuple[Any, Any]:
        if self._gathers:
            return None, None
        kept: tuple[Any, Any] | None = layer.kept.get(self)
        if kept is None:
            rows, rank = self._rows(layer.k), self.spec.vo_head_dim
            kept = self._row_descriptor(rows[:, :rank], 256), self._row_descriptor(rows[:, rank:], 64)
            layer.kept[self] = kept
        return kept


class HopperExtendKernel(_HopperKernel):
    """Gluon's attention of long new parts."""

    TILE = Tile(block_m=128, block_n=128, num_warps=4, stages=2)

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, tuned: Tuning) -> None:
        super().__init__(spec, cache, tuned, self.TILE)
        self._attend = BoundKernel(hopper_extend.hopper_extend_kernel)
        self._gathers = cache.page_size % 64 != 0
        self._widths = (min(spec.head_dim, 128), max(spec.head_dim - 128, 0), spec.vo_head_dim)

    @staticmethod
    def serves(spec: AttentionSpec) -> bool:
        """Whether it computes this."""
        dims = (spec.head_dim, spec.vo_head_dim) in ((64, 64), (128, 128), (192, 128))
        return not spec.is_mla and dims and _is_plain(spec) and spec.group_size <= 128

    def attend(self, division: Division, layer: Layer, call: Call) -> None:
        spec, batch, q, out = self.spec, call.batch, call.q, call.out
        aligned = not (q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8 or out.data_ptr() % 16)
        unit = 8 if aligned else 1
        descs = self._descriptors(layer)
        self._attend(
            (_alignment(q, out), unit, layer.key, None if call.sinks is None else call.sinks.dtype),
            (division.num_programs * self.heads, 1, 1),
            q, layer.k, layer.v, out, call.lse, *descs, division.records, batch.block_table,
            batch.block_table.stride(0), division.partial_out, division.partial_lse, q.stride(0) // unit,
            q.stride(1) // unit, spec.scale * _LOG2_E, spec.sliding_window, call.sinks,
            spec.num_qo_heads, spec.group_size, *self._widths, *layer.strides, unit, self.cache.page_size, spec.causal,
            spec.sliding_window is not None, descs[0] is None, call.lse is not None, call.sinks is not None,
            num_warps=4,
        )  # fmt: skip

    def _descriptors(self, layer: Layer) -> tuple[Any, ...]:
        if self._gathers or not self.takes(layer):
            return (None,) * 3
        kept: tuple[Any, ...] | None = layer.kept.get(self)
        if kept is None:
            keys, (first, second, of_v) = self._rows(layer.k), self._widths
            kept = (
                self._row_descriptor(keys, first),
                self._row_descriptor(keys, second) if second else None,
                self._row_descriptor(self._rows(layer.v), of_v),
            )
            layer.kept[self] = kept
        return kept


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether a spec wants nothing that the Gluon kernels do not compute."""
    return (
        spec.dtype != "float32"
        and spec.storage_dtype == spec.dtype
        and not (spec.alibi or spec.tree_mask)
        and spec.logits_soft_cap is None
    )
