"""Whole pages moved by one launch for all layers: a table on the device says where their parts are."""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

READ, WRITE, COPY = 0, 1, 2
_READ, _WRITE = tl.constexpr(READ), tl.constexpr(WRITE)

_LARGEST_CHUNK_BYTES = 8192
"""Of four warps, each thread then has four vectors of 16 bytes in flight."""
_SMALLEST_CHUNK_BYTES = 512


@triton.jit
def _address(number, VECTOR: tl.constexpr):
    """An address as a pointer to bytes, or to pairs of which the compiler knows that they are aligned."""
    if VECTOR:
        return tl.multiple_of((number & -16).to(tl.pointer_type(tl.int64)), 16)
    else:
        return number.to(tl.pointer_type(tl.uint8))


@triton.jit(do_not_specialize=["chunks", "num_chunks", "pages", "targets", "records", "record_stride"])
def move_pages_kernel(
    chunks, num_chunks, pages, targets, records, record_stride,
    MODE: tl.constexpr, VECTOR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program moves one chunk, at most CHUNK bytes, of one page: page to record, record to page, or page to page.

    chunks: [num_chunks, 4], int64: address in page 0, bytes from page to page, place in a record, bytes.
    pages: of page i the record is `records + i * record_stride`; for a copy the page is `targets[i]`. Nothing is
    written to the null page. Reads and writes the chunk once.
    """
    program = tl.program_id(0).to(tl.int64)
    index = program // num_chunks
    chunk = chunks + program % num_chunks * 4
    base = tl.load(chunk)
    page_stride = tl.load(chunk + 1)
    record = records.to(tl.int64) + index * record_stride + tl.load(chunk + 2)
    page = tl.load(pages + index).to(tl.int64)
    source = base + page * page_stride
    if MODE == _READ:
        target = record
        wanted = page >= 0
    elif MODE == _WRITE:
        target = source
        source = record
        wanted = page > 0
    else:
        other = tl.load(targets + index).to(tl.int64)
        target = base + other * page_stride
        wanted = other > 0
    ELEMENT: tl.constexpr = 8 if VECTOR else 1
    lane = tl.arange(0, CHUNK // ELEMENT)
    count = tl.where(wanted, tl.load(chunk + 3) // ELEMENT, 0)
    if VECTOR:
        count = count // 2 * 2  # it is even, which the compiler learns here
    mask = lane < count
    moved = tl.load(_address(source, VECTOR) + lane, mask=mask)
    tl.store(_address(target, VECTOR) + lane, moved, mask=mask)


class TritonMover:
    """The chunks of a pool's parts, on the device, and what launches the kernel on them.

    parts: each [num_pages + 1, bytes], uint8, kept alive by their owner.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        largest = max(part.shape[1] for part in parts)
        self._chunk_bytes = min(max(triton.next_power_of_2(largest), _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        chunks = []
        record = 0
        for part in parts:
            for first in range(0, part.shape[1], self._chunk_bytes):
                num_bytes = min(part.shape[1] - first, self._chunk_bytes)
                chunks.append((part.data_ptr() + first, part.stride(0), record + first, num_bytes))
            record += part.shape[1]
        table = torch.tensor(chunks, dtype=torch.int64)
        self._aligned = not bool((table % 16).any())
        self._chunks = table.to(parts[0].device)

    def read(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        self._move(READ, pages, pages, out)

    def write(self, pages: torch.Tensor, data: torch.Tensor) -> None:
        self._move(WRITE, pages, pages, data)

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._move(COPY, src, dst, self._chunks)

    def _move(self, mode: int, pages: torch.Tensor, targets: torch.Tensor, records: torch.Tensor) -> None:
        if pages.shape[0] == 0:
            return
        num_chunks = self._chunks.shape[0]
        record_stride = 0 if mode == COPY else records.stride(0)
        vector = self._aligned and (records.data_ptr() | record_stride) % 16 == 0
        move_pages_kernel[(pages.shape[0] * num_chunks,)](
            self._chunks, num_chunks, pages, targets, records, record_stride,
            mode, vector, self._chunk_bytes,
        )  # fmt: skip
