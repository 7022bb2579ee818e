"""How a page table's rows become what kernels read: CSR, dense block table and slots. Pure functions on the host.

A row holds a sequence's page ids in order; only its first `num_pages` entries count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32s = npt.NDArray[np.int32]
    Int64s = npt.NDArray[np.int64]
else:
    np = lazy_import("numpy")


def indptr(lengths: npt.NDArray[np.integer]) -> Int32s:
    """Exclusive prefix sum with the total at the end: [3, 5, 2] -> [0, 3, 8, 10]."""
    out = np.zeros(lengths.size + 1, dtype=np.int32)
    np.cumsum(lengths, out=out[1:])
    return out


def pages_for(lengths: Int64s, page_size: int) -> Int64s:
    """Pages that hold so many tokens."""
    if page_size & (page_size - 1) == 0:  # a shift takes half the time of a division
        return (lengths + (page_size - 1)) >> (page_size.bit_length() - 1)
    return -(-lengths // page_size)


def kv_indices(rows: Int32s, num_pages: npt.NDArray[np.integer]) -> Int32s:
    """The page ids of all sequences one after the other, which `indptr(num_pages)` divides.

    rows: [num_seqs, max_pages]. num_pages: [num_seqs].
    """
    return rows[np.arange(rows.shape[1]) < num_pages[:, None]]


def last_page_len(lengths: Int64s, page_size: int) -> Int32s:
    """Tokens in each sequence's last page, 1 to page_size; 0 for a sequence without tokens."""
    in_pages_before = (pages_for(lengths, page_size) - 1) * page_size
    tokens: Int64s = np.minimum(lengths, lengths - in_pages_before)
    return tokens.astype(np.int32)


def token_positions(prefix_lens: Int64s, lengths: Int64s) -> tuple[npt.NDArray[np.intp], Int64s]:
    """For every new token, in order: which sequence of the batch it belongs to, and its position there.

    prefix_lens, lengths: [num_seqs], tokens before and after the step.
    """
    new = lengths - prefix_lens
    sequence = np.repeat(np.arange(new.size), new)
    first_token = np.cumsum(new) - new
    return sequence, np.arange(sequence.size) - (first_token - prefix_lens)[sequence]


def ranges(starts: npt.NDArray[np.integer], lengths: Int64s) -> Int64s:
    """[start, start + length) of each, one behind the other: [4, 9], [2, 1] -> [4, 5, 9]."""
    before = np.cumsum(lengths) - lengths
    found: Int64s = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return found


def slots(rows: Int32s, sequence: npt.NDArray[np.intp], positions: Int64s, page_size: int) -> Int64s:
    """Where tokens lie: `page_id * page_size + offset`, int64, for each pair of sequence and position."""
    pages = rows[sequence, positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size
