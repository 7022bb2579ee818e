"""Attention through torch's flex_attention: one compiled kernel for a ragged batch, with every mask and score term.

A step's queries are cut into tiles, each of one sequence; the query heads of a group are rows of one tile, so that a
KV head is read once for all of them. The keys and values that the step sees are gathered from their pages into one
packed buffer, in which each sequence begins a block of its own: a kernel multiplies what its mask hides by zero, so no
block may hold what lies beyond a sequence or belongs to another. Which blocks a tile visits, and in which of them the
mask must be looked at, follows from the lengths on the host.

A kernel is compiled when a step first needs it, for all numbers of tiles and blocks at once.
"""

from __future__ import annotations

import functools
import math
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.pool import dequantize
from anyattn.types import ANY_INT, KV_LAYOUTS, OCP_FP8_DTYPES, PHASES, IntSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    import torch.nn.attention.flex_attention as flex

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.mem_cache.step_view import StepView
    from anyattn.platforms.base import Platform

    Ints = npt.NDArray[np.integer[Any]]
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    flex = lazy_import("torch.nn.attention.flex_attention")

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_BLOCK = 128  # keys in a block
_TILES, _TREE_BITS = 4096, 1 << 16
"""Least sizes of what masks index: each size is a kernel of its own, so it doubles where a step has more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """One step, on the device. Rows are int64, and count single heads of single tokens.

    q_rows: [num_kv_heads * rows of all tiles], in q. out_rows: [num_tokens * num_qo_heads], in the kernel's output.
    pages, rows_in_page: [num_packed] and [num_kv_heads, num_packed], where the packed keys and values are in the pool.
    kv_rows: the rows in a layer's pages that follow from these, by the numbers in which pages differ; made when first
        needed, and the same for layers whose pages lie alike.
    masks: what the kernel takes besides q, k, v and the slopes.
    """

    kernel: Callable[..., Any]
    q_rows: torch.Tensor
    pages: torch.Tensor
    rows_in_page: torch.Tensor
    kv_rows: dict[tuple[int, ...], torch.Tensor]
    out_rows: torch.Tensor
    masks: tuple[torch.Tensor | None, ...]


class FlexAttentionBackend(AttentionBackend):
    """On GPUs, where Triton compiles it."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm80", "sm90", "sm100"}),  # MLA in float32 takes 128 KiB of shared memory, which others lack
        packages=("torch>=2.9", "triton>=3.5"),
        extra="cuda",
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES | OCP_FP8_DTYPES,
        per_head_scales=True,
        head_dims=IntSet(minimum=16, maximum=256),  # torch refuses less: _inductor/kernel/flex/flex_attention.py
        head_dim_pairs=frozenset({(192, 128)}),
        mla_dims=frozenset({(512, 64)}),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset(PHASES),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        alibi=True,
        tree_mask=True,
        lse=True,
        contiguous_q=True,
        priority=20,  # once compiled, faster than torch_native on an H200: benchmarks/portable.py
        run_on=frozenset({"sm90"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._kernel_spec = spec.replace(kv_dtype="auto", kv_scale_per_head=False)  # what is gathered has q's dtype
        self._device = torch.device(platform.torch_device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._buffers: dict[str, torch.Tensor] = {}

    def _rows_per_tile(self, max_qo_len: int) -> int:
        """One size for steps of few tokens a sequence, one for all others; powers of two, as Triton's tiles are."""
        few = max(16, _power_of_two(self.spec.group_size))
        return few if max_qo_len * self.spec.group_size <= few else max(128, few)

    def plan(self, batch: Batch) -> _Plan:
        rows = self._rows_per_tile(batch.max_qo_len)
        tree_lens, tree_starts, tree_bits = self._trees(batch)
        cut = _cut(self.spec, batch.host, rows // self.spec.group_size, tree_lens, tree_starts)
        with torch.inference_mode():  # whatever the caller's mode, as each would be a kernel of its own
            return self._expand(batch, rows, _to_device(cut, self._device), tree_bits)

    def _trees(self, batch: Batch) -> tuple[Ints, Ints, torch.Tensor | None]:
        """For each sequence its tree mask's size, 0 without one, and where it starts in the third, all masks' bits."""
        masks = batch.tree_masks or (None,) * batch.num_seqs
        lens = np.array([0 if mask is None else mask.shape[0] for mask in masks])
        starts = np.cumsum(lens**2) - lens**2
        if not self.spec.tree_mask:
            return lens, starts, None
        total = int((lens**2).sum())
        with torch.inference_mode():
            bits = torch.zeros(_power_of_two(total, _TREE_BITS), dtype=torch.bool, device=self._device)
            if total:
                torch.cat([mask.flatten() for mask in masks if mask is not None], out=bits[:total])
        return lens, starts, bits

    def _expand(self, batch: Batch, rows: int, cut: list[torch.Tensor], tree_bits: torch.Tensor | None) -> _Plan:
        """cut: the tiles and blocks that `_cut` made."""
        tiles, blocks = cut
        heads, group, page_size = self.spec.num_kv_heads, self.spec.group_size, batch.page_size
        arange = functools.partial(torch.arange, device=self._device)
        table = tiles.new_zeros(6, _power_of_two(tiles.shape[1], _TILES))
        table[:, : tiles.shape[1]] = tiles[:6]
        sizes = rows, table.shape[1], 0 if tree_bits is None else tree_bits.numel()
        first_token, count, num_partial, num_full, begin, full_begin = tiles[6:].unsqueeze(-1).unbind()
        block = arange(blocks.shape[1], dtype=torch.int32)
        partial = begin + block + torch.where(block < full_begin - begin, 0, num_full)

        seq, key, last_key = blocks.long().unsqueeze(-1).unbind()
        key = torch.minimum(key + arange(_BLOCK), last_key)  # what a sequence leaves of its last block repeats its end
        page, offset = batch.block_table[seq, key // page_size].long().flatten(), (key % page_size).flatten()
        kv_head = arange(heads).unsqueeze(-1)
        nhd = self.cache.layout == "NHD"

        row = arange(rows)
        token = first_token + torch.minimum(row // group, count - 1).clamp_(min=0)
        q_rows = (token * heads * group + row % group).flatten() + kv_head * group
        tile = torch.repeat_interleave(count.flatten(), output_size=batch.num_tokens)
        token_row = tile * rows + (arange(batch.num_tokens) - first_token.flatten()[tile]) * group
        head = arange(heads * group)
        return _Plan(
            kernel=_kernel(self._kernel_spec, str(self._device), *sizes),
            q_rows=q_rows.flatten(),
            pages=page,
            rows_in_page=offset * heads + kv_head if nhd else kv_head * page_size + offset,
            kv_rows={},
            out_rows=(token_row.unsqueeze(-1) + head // group * q_rows.shape[1] + head % group).flatten(),
            masks=(
                table.flatten(),
                tree_bits,
                num_partial.reshape(1, 1, -1).clone(),
                partial.clamp_(max=block.numel() - 1)[None, None],  # those behind a tile's last are blocks too
                num_full.reshape(1, 1, -1).clone(),
                (full_begin + block).clamp_(max=block.numel() - 1)[None, None],
            ),
        )

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
        spec = self.spec
        with torch.inference_mode():
            packed_q = self._gather("q", q.view(-1, q.shape[-1]), step.q_rows, q.shape[-1])
            k = self._gather_pages("k", kv.k, step, kv.k_scale)
            v = k[..., : spec.vo_head_dim] if spec.is_mla else self._gather_pages("v", kv.v, step, kv.v_scale)
            slopes = None if alibi_slopes is None else alibi_slopes.clone()
            packed, packed_lse = step.kernel(packed_q, k, v, slopes, step.masks)
        torch.index_select(packed.view(-1, spec.vo_head_dim), 0, step.out_rows, out=out.view(-1, spec.vo_head_dim))
        if packed_lse is None:
            return None
        lse: torch.Tensor = packed_lse.view(-1)[step.out_rows].view(out.shape[:2])
        if sinks is not None:
            out *= torch.sigmoid(lse - sinks).unsqueeze(-1)
        return lse if spec.return_lse else None

    def _gather_pages(self, name: str, pages: torch.Tensor, step: _Plan, scale: float | torch.Tensor) -> torch.Tensor:
        """[1, num_kv_heads, num_packed, dim], in q's dtype.

        pages: of one layer; each is packed, and they may lie any number of elements apart.
        """
        dim, apart = pages.shape[-1], pages.stride(0)
        if not pages[0].is_contiguous():
            raise ContractError(f"a page is not packed: shape {list(pages.shape)} with strides {list(pages.stride())}.")
        source = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages  # torch has no gather for fp8
        width = math.gcd(dim, apart)  # the pool as rows of this many elements: a head of a token is one or several
        last = (pages.shape[0] - 1) * apart + pages[0].numel()
        flat = source.as_strided((last // width, width), (width, 1))
        rows = step.kv_rows.get((dim, apart))
        if rows is None:
            rows = step.pages * (apart // width) + step.rows_in_page * (dim // width)
            if width < dim:
                rows = rows.unsqueeze(-1) + torch.arange(dim // width, device=rows.device)
            rows = step.kv_rows[dim, apart] = rows.flatten()
        gathered = self._gather(name, flat, rows, dim).view(pages.dtype)
        if isinstance(scale, torch.Tensor) and scale.ndim:
            scale = scale.view(-1, 1, 1)  # heads come before tokens here
        return dequantize(gathered, scale, self._dtype)

    def _gather(self, name: str, source: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """[1, num_kv_heads, -1, dim], in a buffer that all layers and steps share.

        source: [any, width]. rows: [n * dim / width].
        """
        size = rows.numel() * source.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = source.new_empty(max(size, 0 if buffer is None else 2 * buffer.numel()))
        gathered = torch.index_select(source, 0, rows, out=buffer[:size].view(-1, source.shape[1]))
        return gathered.view(1, self.spec.num_kv_heads, -1, dim)


class FlexAttentionCPUBackend(FlexAttentionBackend):
    """On CPUs, where a C++ compiler does; without an LSE, and so without sinks (_inductor/kernel/flex/flex_cpu.py)."""

    capabilities: ClassVar[Capabilities] = replace(
        FlexAttentionBackend.capabilities,
        device_kinds=frozenset({"cpu"}),
        archs=None,
        features=frozenset({"avx2"}),  # check_cpu_supported in the same file
        packages=("torch>=2.9",),
        extra="cpu",
        programs=("$CXX|cl" if os.name == "nt" else "$CXX|g++",),  # cpp.cxx in _inductor/config.py
        head_dims=None,
        head_dim_pairs=frozenset(),
        any_head_dim_pair=True,
        mla_dims=frozenset(),
        any_mla_dims=True,
        sinks=False,
        lse=False,
        priority=5,
        run_on=frozenset({"x86_64"}),
    )

    def _rows_per_tile(self, max_qo_len: int) -> int:
        group = self.spec.group_size
        return group if max_qo_len == 1 else group * max(32 // group, 1)


def _cut(spec: AttentionSpec, host: StepView, tokens: int, tree_lens: Ints, tree_starts: Ints) -> tuple[Ints, Ints]:
    """The step as tiles of at most `tokens` tokens and blocks of keys: [12, num_tiles] and [3, num_blocks].

    Keys are counted in the packed buffer. A tile is: the key of its first token; the first key of its sequence, the
    one behind its prefix and the one behind its end; its tree mask's size and first row's start; its first token and
    how many; how many blocks it sees in part and as a whole; the first of both kinds, and of the second. A block is:
    its sequence in the batch, the position of its first key, and of the sequence's last.
    """
    window = spec.sliding_window
    seqs = np.flatnonzero(host.qo_lens)
    new, length, prefix = host.qo_lens[seqs], host.kv_lens[seqs], host.prefix_lens[seqs]
    first = np.zeros_like(prefix) if window is None else np.maximum(prefix + 1 - window, 0)  # the position seen first
    num_blocks = -(-(length - first) // _BLOCK)
    base = (np.cumsum(num_blocks) - num_blocks) * _BLOCK
    block_seq, block = _enumerate(num_blocks)

    seq, start = _enumerate(-(-new // tokens))
    start = start * tokens
    count = np.minimum(new[seq] - start, tokens)
    begin_key, prefix_key, end_key = base[seq], (base - first + prefix)[seq], (base - first + length)[seq]
    own = prefix_key + start
    tree_len = tree_lens[seqs][seq]
    # The first token of a tile sees up to `end_of_first`, the last one up to `end_of_last`; they begin likewise.
    end_of_first, end_of_last = (own + 1, own + count) if spec.causal else (end_key, end_key)
    end_of_first = np.where(tree_len > 0, prefix_key, end_of_first)
    end_of_last = np.where(tree_len > 0, end_key, end_of_last)
    begin_of_first = begin_of_last = begin_key
    if window is not None:
        begin_of_first, begin_of_last = (np.maximum(key - window, begin_key) for key in (own + 1, own + count))
    begin, full_begin = begin_of_first // _BLOCK, -(-begin_of_last // _BLOCK)
    num_full = np.maximum(end_of_first // _BLOCK - full_begin, 0)
    num_partial = -(-end_of_last // _BLOCK) - begin - num_full
    tree_start = tree_starts[seqs][seq] + start * tree_len
    first_token = host.qo_indptr[seqs][seq] + start
    tiles = np.stack([own, begin_key, prefix_key, end_key, tree_len, tree_start, first_token, count, num_partial,
                      num_full, begin, full_begin])  # fmt: skip
    blocks = np.stack([seqs[block_seq], first[block_seq] + block * _BLOCK, length[block_seq] - 1])
    # At least two of each, as torch compiles a dimension of one apart: a tile of nothing, a block once more.
    tiles = np.pad(tiles, ((0, 0), (0, max(2 - tiles.shape[1], 0))))
    return tiles, np.pad(blocks, ((0, 0), (0, max(2 - blocks.shape[1], 0))), mode="edge")


@functools.cache
def _kernel(spec: AttentionSpec, device: str, rows: int, table_size: int, num_tree_bits: int) -> Callable[..., Any]:
    """The kernel of one spec, compiled for all numbers of tiles and blocks. The sizes are constants in its code."""
    group, cap, window = spec.group_size, spec.logits_soft_cap, spec.sliding_window
    options: Any = _options(spec, device, rows)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, masks: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q: [1, num_kv_heads, num_rows, head_dim]. k, v: [1, num_kv_heads, num_packed, dim]. slopes: [num_qo_heads].

        Returns output [1, num_kv_heads, num_rows, vo_head_dim] and LSE [1, num_kv_heads, num_rows].
        """
        table, tree_bits, num_partial, partial, num_full, full = masks

        def field(number: int, row: Any) -> Any:
            return table[number * table_size + row // rows]

        def own_key(row: Any) -> Any:
            return field(0, row) + row % rows // group

        def mask(b: Any, h: Any, row: Any, key: Any) -> Any:
            seen = (key >= field(1, row)) & (key < field(3, row))
            if spec.causal:
                seen_causally = key <= own_key(row)
                if window is not None:
                    seen_causally = seen_causally & (key > own_key(row) - window)
                if tree_bits is not None:
                    new, size = key - field(2, row), field(4, row)
                    bit = tree_bits[(field(5, row) + row % rows // group * size + new).clamp(0, num_tree_bits - 1)]
                    seen_causally = torch.where(size > 0, (new < 0) | bit, seen_causally)
                seen = seen & seen_causally
            return seen

        def scored(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                score = score + slopes[h * group + row % rows % group] * (key - own_key(row))
            return score

        blocks = flex.BlockMask.from_kv_blocks(
            num_partial, partial, num_full, full, (rows, _BLOCK), mask, (q.shape[2], k.shape[2]), compute_q_blocks=False
        )
        wanted = flex.AuxRequest(lse=spec.return_lse or spec.sinks)
        out, aux = flex.flex_attention(q, k, v, scored, blocks, spec.scale, kernel_options=options, return_aux=wanted)
        return out, aux.lse

    # A name and code of its own: torch bounds the compilations of one code, and takes what differs between those of
    # one name for variable.
    name = f"flex_attention[{spec}, {device}, {rows}, {table_size}, {num_tree_bits}]"
    code = attend.__code__.replace(co_name=name)
    apart = types.FunctionType(code, attend.__globals__, name, attend.__defaults__, attend.__closure__)
    compiled = torch.compile(apart, fullgraph=True)
    with torch.inference_mode():
        compiled(*_example(spec, device, rows, table_size, num_tree_bits))
    return compiled


def _example(spec: AttentionSpec, device: str, rows: int, table_size: int, num_tree_bits: int) -> tuple[Any, ...]:
    """What a kernel takes, with two tiles and two blocks, their numbers marked as what will change."""
    zeros = functools.partial(torch.zeros, device=device)
    heads, dtype = spec.num_kv_heads, getattr(torch, spec.dtype)
    q = zeros(1, heads, 2 * rows, spec.head_dim, dtype=dtype)
    k = zeros(1, heads, 2 * _BLOCK, spec.head_dim, dtype=dtype)
    v = k[..., : spec.vo_head_dim] if spec.is_mla else zeros(*k.shape[:3], spec.vo_head_dim, dtype=dtype)
    counts, indices = ([zeros(1, 1, 2, *shape, dtype=torch.int32) for _ in range(2)] for shape in ((), (2,)))
    for tensor in (q, k, v, *counts, *indices):
        torch._dynamo.mark_dynamic(tensor, 2)
    for tensor in indices:
        torch._dynamo.mark_dynamic(tensor, 3)
    slopes = zeros(spec.num_qo_heads) if spec.alibi else None
    tree_bits = zeros(num_tree_bits, dtype=torch.bool) if spec.tree_mask else None
    table = zeros(6 * table_size, dtype=torch.int32)
    return q, k, v, slopes, (table, tree_bits, counts[0], indices[0], counts[1], indices[1])


def _options(spec: AttentionSpec, device: str, rows: int) -> dict[str, Any]:
    """How Triton's kernel is cut, so that it fits into shared memory and registers on all `archs`.

    torch's own choice (_inductor/template_heuristics/triton.py) does not for some sizes, and knows no short tiles.
    """
    if device == "cpu":
        return {}
    exact = spec.dtype == "float32"  # not on tensor cores, where a tile takes more registers
    head_bytes = _power_of_two(max(spec.head_dim, spec.vo_head_dim)) * (4 if exact else 2)
    tile_bytes = (16 if exact else 32) << 10
    block_m = min(max(tile_bytes // head_bytes, 16), rows, 128)
    return {
        "FORCE_USE_FLEX_ATTENTION": True,  # and not the kernel for short queries, which is compiled for one batch size
        "BLOCK_M": block_m,
        "BLOCK_N": min(max(tile_bytes // 2 // head_bytes, 16), 64),
        "num_warps": 4 if block_m == 16 and not exact else 8,
        "num_stages": 1 if head_bytes >= 2048 else 2,
    }


def _enumerate(counts: Ints) -> tuple[Ints, Ints]:
    """[2, 0, 3] as [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2]: whose each is, and which of those."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]


def _to_device(arrays: tuple[Ints, ...], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int32, in one copy that the host does not wait for."""
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int32))
    if device.type != "cpu":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _power_of_two(number: int, minimum: int = 1) -> int:
    """The smallest power of two that is neither below `number` nor below `minimum`, itself one."""
    return max(1 << max(number - 1, 0).bit_length(), minimum)

