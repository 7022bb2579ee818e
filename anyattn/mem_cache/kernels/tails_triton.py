"""What lies behind a sequence's end in its last page, zeroed by one launch for all layers; see `tails.TailZeroer`."""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from anyattn.mem_cache.kernels.launch import BoundKernel

_LARGEST_CHUNK_BYTES = 8192
"""Of four warps, each thread then writes four vectors of 16 bytes."""
_SMALLEST_CHUNK_BYTES = 512


@triton.jit(do_not_specialize=["chunks", "num_chunks", "pages", "used"])
def zero_tails_kernel(chunks, num_chunks, pages, used, VECTOR: tl.constexpr, CHUNK: tl.constexpr):
    """One program zeroes one chunk, at most CHUNK bytes, of one page, but for what belongs to its first tokens.

    chunks: [num_chunks, 5], int64: address in page 0, bytes from page to page, bytes of a token, place of the chunk
    among the bytes of all tokens, bytes. pages, used: [n], int64; of page i the first `used[i]` tokens stay. With
    VECTOR, all of a chunk's numbers are multiples of 16.
    """
    program = tl.program_id(0).to(tl.int64)
    index = program // num_chunks
    chunk = chunks + program % num_chunks * 5
    page = tl.load(pages + index)
    address = tl.load(chunk) + page * tl.load(chunk + 1)
    first = tl.load(used + index) * tl.load(chunk + 2) - tl.load(chunk + 3)
    count = tl.load(chunk + 4)
    if VECTOR:  # eight bytes an element, and the compiler learns that they come in pairs
        target = tl.multiple_of((address & -16).to(tl.pointer_type(tl.int64)), 16)
        first, count = first // 16 * 2, count // 16 * 2
        lane = tl.arange(0, CHUNK // 8)
    else:
        target = address.to(tl.pointer_type(tl.uint8))
        lane = tl.arange(0, CHUNK)
    mask = (lane >= first) & (lane < count)
    tl.store(target + lane, tl.zeros_like(lane).to(target.dtype.element_ty), mask=mask)


class TritonZeroer:
    """The chunks of a pool's layers, on the device, and what launches the kernel on them.

    parts: each [num_pages, page_size, num_kv_heads, dim], in order NHD or HND and packed within a page, kept alive by
        their owner.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        runs = [run for part in parts for run in _runs(part)]
        largest = max(num_bytes for *_, num_bytes in runs)
        self._chunk_bytes = min(max(triton.next_power_of_2(largest), _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        table = torch.tensor(
            [
                (address + first, page_bytes, token_bytes, first, min(num_bytes - first, self._chunk_bytes))
                for address, page_bytes, token_bytes, num_bytes in runs
                for first in range(0, num_bytes, self._chunk_bytes)
            ],
            dtype=torch.int64,
        )
        self._vector = not bool((table % 16).any())
        self._chunks = table.to(parts[0].device)
        self._launch = BoundKernel(zero_tails_kernel)

    def __call__(self, pages: torch.Tensor, used: torch.Tensor) -> None:
        num_chunks = self._chunks.shape[0]
        grid = (pages.shape[0] * num_chunks, 1, 1)
        self._launch(None, grid, self._chunks, num_chunks, pages, used, self._vector, self._chunk_bytes)


def _runs(part: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Where all tokens of page 0 lie one behind the other: address, bytes from page to page, of a token, of the run."""
    _, page_size, heads, dim = part.shape
    page, token, head, _ = (stride * part.itemsize for stride in part.stride())
    row = dim * part.itemsize
    if token == heads * row:
        return [(part.data_ptr(), page, token, page_size * token)]
    return [(part.data_ptr() + i * head, page, token, page_size * token) for i in range(heads)]
