"""Stores of new tokens as Triton kernels; kernels/store.py says what each function does."""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from anyattn.mem_cache.kernels.launch import BoundKernel
from anyattn.mem_cache.kernels.store_torch import SMALLEST_SCALE, quantize

if TYPE_CHECKING:
    from anyattn.mem_cache.kernels.store import RowTarget, StoreTarget

_ELEMENTS = 4096
"""Elements that a program moves. Each thread of its four warps has four vectors of 16 bytes in flight, where elements
have two, and 8192 tokens of 8 x 128 are four thousand programs."""
_QUANTISED_ELEMENTS = 2048
"""The same where each tile is read before any of it is written."""
_WIDEST_ROW = 1024
_NARROWEST_ROW = 32
_VECTOR_BYTES = 16

NO_FP8, E4M3, E5M2, E4M3FNUZ = 0, 1, 2, 3
_FP8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float8_e4m3fnuz: E4M3FNUZ}
_E4M3 = tl.constexpr(E4M3)
_E5M2 = tl.constexpr(E5M2)
_E4M3FNUZ = tl.constexpr(E4M3FNUZ)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _fp8_bytes(x, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """float32 as the bytes of an fp8 dtype: to nearest, ties to even, saturated, NaN stays NaN.

    NATIVE leaves it to the device's own cast. Without it integers do it, and the same on every device.
    """
    MANTISSA: tl.constexpr = 2 if FP8 == _E5M2 else 3
    BIAS: tl.constexpr = 15 if FP8 == _E5M2 else (8 if FP8 == _E4M3FNUZ else 7)
    LARGEST: tl.constexpr = 57344.0 if FP8 == _E5M2 else (240.0 if FP8 == _E4M3FNUZ else 448.0)
    if NATIVE:
        clamped = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if FP8 == _E4M3:
            return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        elif FP8 == _E4M3FNUZ:
            return clamped.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
        else:
            return clamped.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        SHIFT: tl.constexpr = 23 - MANTISSA
        SMALLEST_NORMAL_BITS: tl.constexpr = (128 - BIAS) << 23
        LARGEST_BITS: tl.constexpr = (
            0x47600000 if FP8 == _E5M2 else (0x43700000 if FP8 == _E4M3FNUZ else 0x43E00000)
        )
        # Added to a number below the smallest normal one, this leaves float32's last bit on fp8's last bit.
        ALIGNER: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
        ALIGNER_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        is_nan = magnitude > 0x7F800000
        magnitude = tl.minimum(magnitude, LARGEST_BITS)
        odd = (magnitude >> SHIFT) & 1
        normal = (magnitude - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
        small = (magnitude.to(tl.float32, bitcast=True) + ALIGNER).to(tl.int32, bitcast=True) - ALIGNER_BITS
        rounded = tl.where(magnitude < SMALLEST_NORMAL_BITS, small, normal)
        sign = (bits >> 24) & 0x80
        if FP8 == _E4M3FNUZ:  # its one NaN stands where -0 would
            return tl.where(is_nan, 0x80, tl.where(rounded == 0, 0, rounded | sign)).to(tl.uint8)
        return (tl.where(is_nan, 0x7F, rounded) | sign).to(tl.uint8)


@triton.jit
def _slots(slots, token, num_tokens, PAGE_SIZE: tl.constexpr):
    """Slots of some tokens, and whether anything is stored there: not past the last token, not in the null page."""
    slot = tl.load(slots + token, mask=token < num_tokens, other=0)
    return slot.to(tl.int64), slot >= PAGE_SIZE


@triton.jit
def _aligned(pointer):
    """The same pointer, of which the compiler knows that it is a multiple of 16 bytes: of an argument that is not
    specialised on its alignment it believes no hint, and so the hint is on a new value."""
    return tl.multiple_of((pointer.to(tl.int64) & -16).to(pointer.dtype), 16)


@triton.jit
def _store_block(
    source, token_stride, head_stride, dim_stride, pages, scale, slots, num_tokens, block,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, VECTOR: tl.constexpr, FP8: tl.constexpr,
    NATIVE: tl.constexpr, TOKENS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TOKEN_PIECE: tl.constexpr, TOKEN_HI_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DIM_PIECE: tl.constexpr, DIM_HI_STRIDE: tl.constexpr,
    DIM_STRIDE: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens' elements block * ROW to block * ROW + ROW, counted over heads: one part of `store_kernel`."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot, stored = _slots(slots, token, num_tokens, PAGE_SIZE)
    element = block * ROW + tl.arange(0, ROW)
    head = element // DIM
    dim = element % DIM
    token = token.to(tl.int64)
    if VECTOR:  # everything lies at multiples of 16 bytes, in which the strides are then counted
        VECTOR_ELEMENTS: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
        source, pages = _aligned(source), _aligned(pages)
        from_token = token * token_stride * VECTOR_ELEMENTS
        from_element = head.to(tl.int64) * head_stride * VECTOR_ELEMENTS + dim
    else:
        from_token = token * token_stride
        from_element = head.to(tl.int64) * head_stride + dim.to(tl.int64) * dim_stride
    mask = stored[:, None] & (element < NUM_KV_HEADS * DIM)[None, :]
    values = tl.load(source + from_token[:, None] + from_element[None, :], mask=mask)

    if FP8:
        values = values.to(tl.float32)
        if SCALES == 1:
            values = tl.div_rn(values, tl.load(scale))
        elif SCALES > 1:
            values = tl.div_rn(values, tl.load(scale + head, mask=head < NUM_KV_HEADS, other=1.0)[None, :])
        values = _fp8_bytes(values, FP8, NATIVE)

    if TOKEN_PIECE < PAGE_SIZE:
        offset = slot % PAGE_SIZE
        to_token = slot // PAGE_SIZE * PAGE_STRIDE + offset // TOKEN_PIECE * TOKEN_HI_STRIDE
        to_token += offset % TOKEN_PIECE * TOKEN_STRIDE
    elif PAGE_STRIDE == PAGE_SIZE * TOKEN_STRIDE:
        to_token = slot * TOKEN_STRIDE
    else:
        to_token = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * TOKEN_STRIDE
    if DIM_PIECE < DIM:
        piece = element // DIM_PIECE % (DIM // DIM_PIECE)
        to_element = head * HEAD_STRIDE + piece * DIM_HI_STRIDE + element % DIM_PIECE * DIM_STRIDE
    else:
        to_element = head * HEAD_STRIDE + dim * DIM_STRIDE
    tl.store(pages + to_token[:, None] + to_element[None, :], values.to(pages.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "slots", "num_tokens", "source_0", "token_stride_0", "head_stride_0", "dim_stride_0", "pages_0", "scale_0",
        "source_1", "token_stride_1", "head_stride_1", "dim_stride_1", "pages_1", "scale_1",
    ]
)  # fmt: skip
def store_kernel(
    slots, num_tokens,
    source_0, token_stride_0, head_stride_0, dim_stride_0, pages_0, scale_0,
    source_1, token_stride_1, head_stride_1, dim_stride_1, pages_1, scale_1,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, VECTOR: tl.constexpr, FP8: tl.constexpr,
    NATIVE: tl.constexpr, TOKENS: tl.constexpr, ROW: tl.constexpr, BLOCKS_0: tl.constexpr,
    DIM_0: tl.constexpr, SCALES_0: tl.constexpr, PAGE_STRIDE_0: tl.constexpr, TOKEN_PIECE_0: tl.constexpr,
    TOKEN_HI_STRIDE_0: tl.constexpr, TOKEN_STRIDE_0: tl.constexpr, HEAD_STRIDE_0: tl.constexpr,
    DIM_PIECE_0: tl.constexpr, DIM_HI_STRIDE_0: tl.constexpr, DIM_STRIDE_0: tl.constexpr,
    DIM_1: tl.constexpr, SCALES_1: tl.constexpr, PAGE_STRIDE_1: tl.constexpr, TOKEN_PIECE_1: tl.constexpr,
    TOKEN_HI_STRIDE_1: tl.constexpr, TOKEN_STRIDE_1: tl.constexpr, HEAD_STRIDE_1: tl.constexpr,
    DIM_PIECE_1: tl.constexpr, DIM_HI_STRIDE_1: tl.constexpr, DIM_STRIDE_1: tl.constexpr,
):  # fmt: skip
    """Program (t, b) moves a block of TOKENS tokens x ROW elements of source 0, or past BLOCKS_0 of source 1.

    Reads the tokens' slots and the block, writes the block to where `layouts.tokens_view` has it. DIM_1 is 0 where
    there is one source. Pool sizes and strides are constants, as one process has few pools; the sources' are not.
    """
    block = tl.program_id(1)
    if block < BLOCKS_0:
        _store_block(
            source_0, token_stride_0, head_stride_0, dim_stride_0, pages_0, scale_0, slots, num_tokens, block,
            NUM_KV_HEADS, PAGE_SIZE, VECTOR, FP8, NATIVE, TOKENS, ROW, DIM_0, SCALES_0, PAGE_STRIDE_0, TOKEN_PIECE_0,
            TOKEN_HI_STRIDE_0, TOKEN_STRIDE_0, HEAD_STRIDE_0, DIM_PIECE_0, DIM_HI_STRIDE_0, DIM_STRIDE_0,
        )  # fmt: skip
    else:
        if DIM_1:
            _store_block(
                source_1, token_stride_1, head_stride_1, dim_stride_1, pages_1, scale_1, slots, num_tokens,
                block - BLOCKS_0, NUM_KV_HEADS, PAGE_SIZE, VECTOR, FP8, NATIVE, TOKENS, ROW, DIM_1, SCALES_1,
                PAGE_STRIDE_1, TOKEN_PIECE_1, TOKEN_HI_STRIDE_1, TOKEN_STRIDE_1, HEAD_STRIDE_1, DIM_PIECE_1,
                DIM_HI_STRIDE_1, DIM_STRIDE_1,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "slots", "num_tokens", "values", "token_stride", "dim_stride", "tail", "tail_token_stride", "tail_dim_stride",
        "value_pages", "scale_pages", "tail_pages",
    ]
)  # fmt: skip
def store_rows_kernel(
    slots, num_tokens, values, token_stride, dim_stride, tail, tail_token_stride, tail_dim_stride,
    value_pages, scale_pages, tail_pages,
    PAGE_SIZE: tl.constexpr, VECTOR: tl.constexpr, NATIVE: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, TILE_BLOCK: tl.constexpr, TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr,
    VALUE_PAGE_STRIDE: tl.constexpr, VALUE_TOKEN_STRIDE: tl.constexpr, SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_TOKEN_STRIDE: tl.constexpr, TAIL_PAGE_STRIDE: tl.constexpr, TAIL_TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """One program quantises and stores TOKENS tokens: TILES tiles of TILE values each, and TAIL elements as they are.

    Reads slots, values and tails; writes a byte for each value, 4 bytes for each tile, and the tails. TILES and TOKENS
    are powers of two; TAIL 0 is none.
    """
    first = tl.program_id(0) * TOKENS
    tile_of = tl.arange(0, TOKENS * TILES)
    tile = tile_of % TILES
    token = first + tile_of // TILES
    slot, stored = _slots(slots, token, num_tokens, PAGE_SIZE)
    lane = tl.arange(0, TILE_BLOCK)
    if VECTOR:  # strides are then in 16 bytes
        VECTOR_ELEMENTS: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
        values, value_pages = _aligned(values), _aligned(value_pages)
        source = (token.to(tl.int64) * token_stride * VECTOR_ELEMENTS + tile * TILE)[:, None] + lane[None, :]
    else:
        source = token.to(tl.int64)[:, None] * token_stride
        source += (tile[:, None] * TILE + lane[None, :]).to(tl.int64) * dim_stride
    mask = stored[:, None] & (lane < TILE)[None, :]
    x = tl.load(values + source, mask=mask, other=0.0).to(tl.float32)
    # As integers, the magnitudes of floats have the order of the floats, with NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full((TOKENS * TILES,), 448.0, tl.float32)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    smallest = tl.full((TOKENS * TILES,), _SMALLEST_SCALE, tl.float32).to(tl.int32, bitcast=True)
    scale = tl.maximum(scale, smallest).to(tl.float32, bitcast=True)
    fp8 = _fp8_bytes(tl.div_rn(x, scale[:, None]), _E4M3, NATIVE)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    target = page * VALUE_PAGE_STRIDE + offset * VALUE_TOKEN_STRIDE + tile * TILE
    tl.store(value_pages + target[:, None] + lane[None, :], fp8, mask=mask)
    tl.store(scale_pages + page * SCALE_PAGE_STRIDE + offset * SCALE_TOKEN_STRIDE + tile, scale, mask=stored)

    if TAIL:
        token = first + tl.arange(0, TOKENS)
        slot, stored = _slots(slots, token, num_tokens, PAGE_SIZE)
        lane = tl.arange(0, TAIL_BLOCK)
        if VECTOR:
            TAIL_ELEMENTS: tl.constexpr = 128 // tail.dtype.element_ty.primitive_bitwidth
            tail, tail_pages = _aligned(tail), _aligned(tail_pages)
            source = (token.to(tl.int64) * tail_token_stride * TAIL_ELEMENTS)[:, None] + lane[None, :]
        else:
            source = token.to(tl.int64)[:, None] * tail_token_stride + lane.to(tl.int64)[None, :] * tail_dim_stride
        mask = stored[:, None] & (lane < TAIL)[None, :]
        kept = tl.load(tail + source, mask=mask)
        target = slot // PAGE_SIZE * TAIL_PAGE_STRIDE + slot % PAGE_SIZE * TAIL_TOKEN_STRIDE
        tl.store(tail_pages + target[:, None] + lane[None, :], kept.to(tail_pages.dtype.element_ty), mask=mask)


@triton.jit
def cast_kernel(values, result, FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """The one program reads BLOCK float32 and writes them as BLOCK bytes of fp8."""
    lane = tl.arange(0, BLOCK)
    tl.store(result + lane, _fp8_bytes(tl.load(values + lane), FP8, NATIVE))


def store(sources: Sequence[torch.Tensor], targets: Sequence[StoreTarget], slots: torch.Tensor, page_size: int) -> None:
    first, second = targets[0], targets[-1]
    if first.launch is None:
        first.launch = _launch(targets, page_size)
    kernel, tokens, blocks, aligned, constants, more_constants = first.launch
    of_first, of_second = sources[0], sources[-1]
    vector = aligned and _has_vectors(of_first) and (of_first is of_second or _has_vectors(of_second))
    num_tokens = slots.shape[0]
    kernel(
        (vector, of_first.dtype, of_second.dtype), (-(-num_tokens // tokens), blocks, 1),
        slots.contiguous(), num_tokens, of_first, *_strides(of_first, vector), first.pages, first.divisor,
        of_second, *_strides(of_second, vector), second.pages, second.divisor, *constants, vector, *more_constants,
    )  # fmt: skip


def _launch(
    targets: Sequence[StoreTarget], page_size: int
) -> tuple[BoundKernel, int, int, bool, tuple[Any, ...], tuple[Any, ...]]:
    """What launches for these targets have in common: the kernel, its variants to be told apart by vectors and dtypes.

    Tokens in a block, blocks that cover a token, whether the pages are aligned, constants before and after VECTOR.
    """
    heads, dtype = targets[0].num_kv_heads, targets[0].dtype
    row, blocks = _blocks(*(heads * target.dim for target in targets))
    tokens = _ELEMENTS // row
    aligned = all(target.pages.data_ptr() % _VECTOR_BYTES == 0 for target in targets)
    fp8 = _FP8.get(dtype, NO_FP8)
    native = fp8 != NO_FP8 and casts_rightly(targets[0].pages.device, dtype)
    of_targets = [*(target.constants for target in targets), _NO_CONSTANTS]
    constants = (fp8, native, tokens, row, blocks[0], *of_targets[0], *of_targets[1])
    return BoundKernel(store_kernel), tokens, sum(blocks), aligned, (heads, page_size), constants


def store_rows(
    values: torch.Tensor, tail: torch.Tensor | None, target: RowTarget, slots: torch.Tensor, page_size: int
) -> None:
    num_tokens, num_tiles = slots.shape[0], target.num_tiles
    tile = target.values.shape[2] // num_tiles
    tile_block = triton.next_power_of_2(tile)
    tokens = max(_QUANTISED_ELEMENTS // (tile_block * num_tiles), 1)
    tail_pages = target.values if target.tail is None else target.tail
    tail_dim = 0 if target.tail is None else target.tail.shape[2]
    values, tail = values.unsqueeze(1), (values if tail is None else tail).unsqueeze(1)
    aligned = (target.values.data_ptr() | tail_pages.data_ptr()) % _VECTOR_BYTES == 0
    vector = aligned and _has_vectors(values) and _has_vectors(tail)
    token_stride, _, dim_stride = _strides(values, vector)
    tail_token_stride, _, tail_dim_stride = _strides(tail, vector)
    store_rows_kernel[(triton.cdiv(num_tokens, tokens),)](
        slots.contiguous(), num_tokens, values, token_stride, dim_stride, tail, tail_token_stride, tail_dim_stride,
        target.values, target.scales, tail_pages,
        page_size, vector, casts_rightly(slots.device, torch.float8_e4m3fn), tokens, num_tiles, tile, tile_block,
        tail_dim, triton.next_power_of_2(max(tail_dim, 1)), *target.values.stride()[:2], *target.scales.stride()[:2],
        *tail_pages.stride()[:2],
    )  # fmt: skip


@functools.cache
def casts_rightly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's cast from float32 to an fp8 dtype rounds and saturates there as torch does, tried once.

    Where it does, in hardware, it costs far less than integers. Reads the result back, so pools ask as they are made.
    """
    values = _trial_values(dtype)
    wanted = quantize(values, 1.0, dtype)
    result = torch.empty(values.shape, dtype=torch.uint8, device=device)
    try:
        cast_kernel[(1,)](values.to(device), result, _FP8[dtype], True, values.numel())
        found = result.cpu().view(dtype)
    except Exception:  # a target without such a cast fails to compile, each with an error of its own
        return False
    return bool(((found.view(torch.uint8) == wanted.view(torch.uint8)) | (found.isnan() & wanted.isnan())).all())


@functools.cache
def _trial_values(dtype: torch.dtype) -> torch.Tensor:
    """All values of an fp8 dtype, what lies halfway between neighbours, the next float32 on either side, and more."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = values[values.isfinite()].unique()
    halfway = (finite[:-1] + finite[1:]) / 2
    infinity = torch.full((), torch.inf)
    extremes = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e9, -1e9, 1e-9, -1e-9, 1e-42, 0.0, -0.0])
    tried = torch.cat([finite, halfway, halfway.nextafter(infinity), halfway.nextafter(-infinity), extremes])
    return torch.nn.functional.pad(tried, (0, 1024 - len(tried)))


@functools.cache
def _blocks(*widths: int) -> tuple[int, tuple[int, ...]]:
    """Elements of a block's row, and how many blocks cover each source's tokens.

    The widest row, as a power of two, that lets few lanes idle at the sources' ends.
    """
    row = _WIDEST_ROW
    while row > _NARROWEST_ROW and 8 * sum(triton.cdiv(width, row) * row for width in widths) > 9 * sum(widths):
        row //= 2
    return row, tuple(triton.cdiv(width, row) for width in widths)


def _has_vectors(source: torch.Tensor) -> bool:
    """Whether all tokens and heads of a source [num_tokens, num_kv_heads, dim] begin at multiples of 16 bytes."""
    token_stride, head_stride, dim_stride = source.stride()
    sizes = token_stride | head_stride | source.shape[2]
    return dim_stride == 1 and (source.data_ptr() | sizes * source.itemsize) % _VECTOR_BYTES == 0


def _strides(source: torch.Tensor, vector: bool) -> tuple[int, ...]:
    """As the kernels count them, which is in vectors where there are such."""
    strides = source.stride()
    if not vector:
        return strides
    elements = _VECTOR_BYTES // source.itemsize
    return strides[0] // elements, strides[1] // elements, 1


_NO_CONSTANTS = (0, 0, 0, 1, 0, 0, 0, 1, 0, 0)
"""What `StoreTarget.constants` would be for a second source that is not there."""
