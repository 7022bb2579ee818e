"""Slots, CSR and block table of a step as Triton kernels; kernels/indices.py says what each function does."""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from anyattn.mem_cache.kernels.launch import BoundKernel

if TYPE_CHECKING:
    import torch

# Elements that one program writes. Four warps have eight of a thousand each, and a million are one wave of programs:
# everything is in flight at once, and what is left to wait for is the chain indptr, page table, output.
_INDICES = 1024
_TOKENS = 256
_TABLE_ROWS, _TABLE_COLUMNS = 8, 128
_SEARCH_WIDTH = 512
_LENGTHS = 1024


@triton.jit
def _first_owner(indptr, rows, num_seqs, element, WIDTH: tl.constexpr):
    """The sequence that owns `element`, and its row: the last s with indptr[s] <= element; num_seqs, 0 past the end.

    All threads look at WIDTH sequences at a time, so that a batch of fewer takes one load, of two vectors, and no
    batch takes a chain as long as that of a binary search. Reads WIDTH elements of indptr and of rows.
    """
    lanes = tl.arange(0, WIDTH)
    low = tl.full((), 0, tl.int32)
    high = low + num_seqs
    while high - low >= WIDTH:
        stride = tl.cdiv(high - low, WIDTH)
        at = low + lanes * stride
        starts = tl.load(indptr + at, mask=at < high, other=2147483647)
        low += (tl.sum((starts <= element).to(tl.int32)) - 1) * stride
        high = tl.minimum(low + stride, high)
    at = low + lanes
    starts = tl.load(indptr + at, mask=at <= high, other=2147483647)
    row = tl.load(rows + at, mask=at < high, other=0)
    # Sequence and row in one number, so that one reduction finds both.
    found = tl.max(tl.where(starts <= element, (at.to(tl.int64) << 32) | row, 0))
    return (found >> 32).to(tl.int32), (found & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _owners(indptr, elements, first, last):
    """For each element its owner, of the sequences first to last: a binary search, all elements in step."""
    owner = tl.zeros_like(elements) + first
    count = last - first + 1
    while count > 1:
        half = count // 2
        owner = tl.where(tl.load(indptr + owner + half) <= elements, owner + half, owner)
        count -= half
    return owner


@triton.jit
def _block_owners(indptr, rows, num_seqs, elements, start, stop, WIDTH: tl.constexpr):
    """For each of the elements from start to stop its owner, its owner's row, and whether it has one."""
    first, _ = _first_owner(indptr, rows, num_seqs, start, WIDTH)
    last, _ = _first_owner(indptr, rows, num_seqs, stop - 1, WIDTH)
    owner = _owners(indptr, elements, first, last)
    owned = (elements < stop) & (owner < num_seqs)
    return owner, tl.load(rows + owner, mask=owned, other=0), owned


@triton.jit
def _page(page_table, row_stride, row, column, owned, mapping):
    """The page ids in some places of the page table, mapped; the null page where nobody owns the place."""
    page = tl.load(page_table + row.to(tl.int64) * row_stride + column, mask=owned, other=0)
    if mapping is not None:
        page = tl.load(mapping + page, mask=owned, other=0)
    return page


@triton.jit
def _fill_slots(
    program, page_table, row_stride, rows, prefix_lens, qo_indptr, num_seqs, mapping, out_slots, positions, num_tokens,
    PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Slots and positions of TOKENS new tokens."""
    start = program * TOKENS
    token = start + tl.arange(0, TOKENS)
    stop = tl.minimum(start + TOKENS, num_tokens)
    owner, row, owned = _block_owners(qo_indptr, rows, num_seqs, token, start, stop, WIDTH)
    prefix = tl.load(prefix_lens + owner, mask=owned, other=0)
    position = tl.where(owned, prefix + token - tl.load(qo_indptr + owner), 0)
    if positions is not None:
        tl.store(positions + token, position.to(tl.int64), mask=token < stop)
    if out_slots is not None:
        page = _page(page_table, row_stride, row, position // PAGE_SIZE, owned, mapping)
        tl.store(out_slots + token, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=token < stop)


@triton.jit
def _fill_table(
    program, page_table, row_stride, rows, kv_lens, num_seqs, mapping, block_table, table_stride, columns,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS page ids of the dense table."""
    tiles = tl.cdiv(columns, COLUMNS)
    seq = program // tiles * ROWS + tl.arange(0, ROWS)
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.load(rows + seq, mask=seq < num_seqs, other=0)[:, None]
    kv_len = tl.load(kv_lens + seq, mask=seq < num_seqs, other=0)[:, None]
    owned = (column < columns) & (column < tl.cdiv(kv_len, PAGE_SIZE))
    page = _page(page_table, row_stride, row, column, owned, mapping)
    place = block_table + seq[:, None].to(tl.int64) * table_stride + column
    tl.store(place, page, mask=(seq[:, None] < num_seqs) & (column < columns))


@triton.jit
def _fill_indices(
    program, page_table, row_stride, rows, kv_indptr, num_seqs, mapping, kv_indices, num_indices,
    INDICES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """INDICES page ids of the joined lists. Where they are all of one sequence, which is found first, a plain copy."""
    start = program * INDICES
    lanes = tl.arange(0, INDICES)
    stop = tl.minimum(start + INDICES, num_indices)
    first, row = _first_owner(kv_indptr, rows, num_seqs, start, WIDTH)
    begin = tl.load(kv_indptr + first)
    end = tl.load(kv_indptr + first + 1, mask=first < num_seqs, other=0)
    if (start + INDICES <= end) & (stop == start + INDICES):
        source = page_table + row.to(tl.int64) * row_stride + (start - begin)
        target = kv_indices + start
        if mapping is not None:
            tl.store(target + lanes, tl.load(mapping + tl.load(source + lanes)))
        elif (source.to(tl.int64) | target.to(tl.int64)) % 16 == 0:
            # The compiler learns the alignment here, at run time: as a property of the arguments it would compile
            # a kernel for each. Masking makes new values, so that the hint stays in this branch.
            wide_source = tl.multiple_of((source.to(tl.int64) & -16).to(tl.pointer_type(tl.int32)), 16)
            wide_target = tl.multiple_of((target.to(tl.int64) & -16).to(tl.pointer_type(tl.int32)), 16)
            tl.store(wide_target + lanes, tl.load(wide_source + lanes))
        else:
            tl.store(target + lanes, tl.load(source + lanes))
    else:
        index = start + lanes
        owner, row_of, owned = _block_owners(kv_indptr, rows, num_seqs, index, start, stop, WIDTH)
        page = _page(page_table, row_stride, row_of, index - tl.load(kv_indptr + owner), owned, mapping)
        tl.store(kv_indices + index, page, mask=index < stop)


@triton.jit(
    do_not_specialize=[
        "page_table", "row_stride", "rows", "kv_lens", "prefix_lens", "qo_indptr", "kv_indptr", "num_seqs", "mapping",
        "out_slots", "positions", "num_tokens", "block_table", "table_stride", "columns", "kv_indices", "num_indices",
    ]
)  # fmt: skip
def step_indices_kernel(
    page_table, row_stride, rows, kv_lens, prefix_lens, qo_indptr, kv_indptr, num_seqs, mapping,
    out_slots, positions, num_tokens, block_table, table_stride, columns, kv_indices, num_indices,
    PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDICES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One program writes TOKENS slots and positions, or ROWS x COLUMNS of the dense table, or INDICES of the CSR one.

    Tokens come first, as theirs is the longest chain of loads. Every program reads what it writes, from the page
    table, besides the batch's lengths and pointers: 4 bytes for each page id, 4 for each token.
    An output that is None takes no programs; its count is 0.
    """
    program = tl.program_id(0)
    token_programs = tl.cdiv(num_tokens, TOKENS)
    table_programs = tl.cdiv(num_seqs, ROWS) * tl.cdiv(columns, COLUMNS)
    if program < token_programs:
        _fill_slots(
            program, page_table, row_stride, rows, prefix_lens, qo_indptr, num_seqs, mapping, out_slots, positions,
            num_tokens, PAGE_SIZE, TOKENS, WIDTH,
        )  # fmt: skip
    elif program < token_programs + table_programs:
        if block_table is not None:
            _fill_table(
                program - token_programs, page_table, row_stride, rows, kv_lens, num_seqs, mapping, block_table,
                table_stride, columns, PAGE_SIZE, ROWS, COLUMNS,
            )  # fmt: skip
    else:
        if kv_indices is not None:
            _fill_indices(
                program - token_programs - table_programs, page_table, row_stride, rows, kv_indptr, num_seqs, mapping,
                kv_indices, num_indices, INDICES, WIDTH,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "prefix_lens", "lengths", "num_seqs", "capacity", "kv_lens", "qo_indptr", "kv_indptr", "kv_last_page_len"
    ]
)  # fmt: skip
def step_lengths_kernel(
    prefix_lens, lengths, num_seqs, capacity, kv_lens, qo_indptr, kv_indptr, kv_last_page_len,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The one program does everything, BLOCK sequences at a time: reads 8 and writes 16 bytes for each sequence.

    num_seqs is an int, or a pointer to one.
    """
    alive = tl.load(num_seqs) if num_seqs.dtype.is_ptr() else num_seqs
    tokens = tl.full((), 0, tl.int32)
    pages = tl.full((), 0, tl.int32)
    tl.store(qo_indptr, tokens)
    tl.store(kv_indptr, pages)
    for first in range(0, capacity, BLOCK):
        seq = first + tl.arange(0, BLOCK)
        inside = seq < capacity
        length = tl.load(lengths + seq, mask=inside & (seq < alive), other=0)
        new_tokens = length - tl.load(prefix_lens + seq, mask=inside & (seq < alive), other=0)
        new_pages = tl.cdiv(length, PAGE_SIZE)
        tl.store(kv_lens + seq, length, mask=inside)
        last_page_len = length - (new_pages - 1) * PAGE_SIZE
        tl.store(kv_last_page_len + seq, tl.where(length > 0, last_page_len, 0), mask=inside)
        tl.store(qo_indptr + 1 + seq, tokens + tl.cumsum(new_tokens), mask=inside)
        tl.store(kv_indptr + 1 + seq, pages + tl.cumsum(new_pages), mask=inside)
        tokens += tl.sum(new_tokens)
        pages += tl.sum(new_pages)


@triton.jit(
    do_not_specialize=["page_table", "row_stride", "rows", "first_columns", "indptr", "num_seqs", "pages", "num_pages"]
)
def write_new_pages_kernel(
    page_table, row_stride, rows, first_columns, indptr, num_seqs, pages, num_pages,
    PAGES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program moves PAGES page ids to where the page table has them: reads and writes 4 bytes for each."""
    start = tl.program_id(0) * PAGES
    index = start + tl.arange(0, PAGES)
    stop = tl.minimum(start + PAGES, num_pages)
    owner, row, owned = _block_owners(indptr, rows, num_seqs, index, start, stop, WIDTH)
    column = tl.load(first_columns + owner, mask=owned, other=0) + index - tl.load(indptr + owner)
    page = tl.load(pages + index, mask=owned, other=0)
    tl.store(page_table + row.to(tl.int64) * row_stride + column, page, mask=owned)


_step_indices = BoundKernel(step_indices_kernel)
_step_lengths = BoundKernel(step_lengths_kernel)
_write_new_pages = BoundKernel(write_new_pages_kernel)


def _programs(count: int, block: int) -> int:
    """How many blocks cover a count; triton.cdiv says the same and takes microseconds on the host."""
    return -(-count // block)


def step_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    page_size: int,
    *,
    kv_indices: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    mapping: torch.Tensor | None = None,
) -> None:
    num_seqs = rows.shape[0]
    tokens = out_slots if out_slots is not None else positions
    num_tokens = 0 if tokens is None else tokens.shape[0]
    num_indices = 0 if kv_indices is None else kv_indices.shape[0]
    table_stride, columns = (0, 0) if block_table is None else (block_table.stride(0), block_table.shape[1])
    programs = (
        _programs(num_tokens, _TOKENS)
        + _programs(num_seqs, _TABLE_ROWS) * _programs(columns, _TABLE_COLUMNS)
        + _programs(num_indices, _INDICES)
    )
    if programs:
        key = (
            page_table.device.index, page_size, mapping is None, out_slots is None, positions is None,
            block_table is None, kv_indices is None,
        )  # fmt: skip
        _step_indices(
            key, (programs, 1, 1),
            page_table, page_table.stride(0), rows, kv_lens, prefix_lens, qo_indptr, kv_indptr, num_seqs, mapping,
            out_slots, positions, num_tokens, block_table, table_stride, columns, kv_indices, num_indices,
            page_size, _TOKENS, _TABLE_ROWS, _TABLE_COLUMNS, _INDICES, _SEARCH_WIDTH,
        )  # fmt: skip


def step_lengths(
    prefix_lens: torch.Tensor,
    lengths: torch.Tensor,
    num_seqs: torch.Tensor | int,
    page_size: int,
    *,
    kv_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    key = (lengths.device.index, page_size, isinstance(num_seqs, int))
    _step_lengths(
        key, (1, 1, 1),
        prefix_lens, lengths, num_seqs, lengths.shape[0], kv_lens, qo_indptr, kv_indptr, kv_last_page_len,
        page_size, _LENGTHS,
    )  # fmt: skip


def write_new_pages(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    first_columns: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    num_pages = pages.shape[0]
    if num_pages:
        _write_new_pages(
            page_table.device.index, (_programs(num_pages, _TOKENS), 1, 1),
            page_table, page_table.stride(0), rows, first_columns, indptr, rows.shape[0], pages, num_pages,
            _TOKENS, _SEARCH_WIDTH,
        )  # fmt: skip
