"""Which pages each sequence owns, and the host's view of them for one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import indices

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.base import KVAllocator
    from anyattn.mem_cache.indices import Int32s, Int64s
else:
    np = lazy_import("numpy")

_ROW_BITS = 20  # a handle is generation << 20 | row, so a freed handle never comes back for another sequence
_MAX_ROWS = 1 << _ROW_BITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepView:
    """The page table as one step sees it, on the host; later changes of the table do not reach it.

    table: whose step it is. seqs: [num_seqs], handles.
    prefix_lens, lengths: [num_seqs], tokens before and after the step's new ones.
    rows: [num_seqs, max_pages], int32, padded with the null page. num_pages: [num_seqs].
    """

    table: PageTable
    page_size: int
    seqs: Int64s
    prefix_lens: Int64s
    lengths: Int64s
    rows: Int32s
    num_pages: Int64s


class PageTable:
    """Sequences, their lengths and their pages. Bookkeeping only: no KV data and no device.

    Sequences are known by integer handles, which `new_sequences` gives and `free` ends.
    """

    def __init__(self, allocator: KVAllocator, page_size: int, *, debug: bool = False) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.num_frees = 0
        """How often `free` was called; a batch made before the last call may hold sequences that are gone."""
        self._debug = debug
        self._free_rows: list[int] = []
        self._generation = np.zeros(1, dtype=np.int64)  # row 0 is never used, so that no valid handle is small
        self._alive = np.zeros(1, dtype=np.bool_)
        self._lengths = np.zeros(1, dtype=np.int64)
        self._num_pages = np.zeros(1, dtype=np.int64)
        self._pages = np.zeros((1, 8), dtype=np.int32)

    def new_sequences(self, count: int) -> list[int]:
        """Handles of `count` new sequences without tokens or pages."""
        if not isinstance(count, int) or count < 0:
            raise ContractError(f"cannot make {count!r} sequences.")
        while len(self._free_rows) < count:
            self._add_rows()
        rows = [self._free_rows.pop() for _ in range(count)]
        self._generation[rows] += 1
        self._alive[rows] = True
        handles: list[int] = (self._generation[rows] << _ROW_BITS | np.asarray(rows, dtype=np.int64)).tolist()
        return handles

    def extend(self, seqs: Sequence[int], num_new_tokens: Sequence[int]) -> StepView:
        """Reserves room for new tokens, all or nothing, and returns the view of the step that will write them.

        Raises ContractError for a freed or repeated sequence or a negative count, OutOfPagesError when the pages
        do not suffice; the table and the free list are then as before.
        """
        rows = self._rows(seqs)
        new = _counts(num_new_tokens, len(rows))
        self._refuse_overlong(new)
        prefix_lens = self._lengths[rows]
        lengths = prefix_lens + new.astype(np.int64)
        have = self._num_pages[rows]
        needed = -(-lengths // self.page_size) - have
        num_pages = have + needed
        if int(needed.sum()) <= self.allocator.num_free_pages:  # otherwise alloc refuses
            self._fit_columns(int(num_pages.max(initial=0)))  # before alloc, as it may find no memory
        pages = self.allocator.alloc(int(needed.sum()))
        owner, column = indices.token_positions(have, num_pages)  # the same arithmetic, pages instead of tokens
        self._pages[rows[owner], column] = pages
        self._num_pages[rows] = num_pages
        self._lengths[rows] = lengths
        if self._debug:
            self.check()
        return StepView(
            table=self,
            page_size=self.page_size,
            seqs=np.array(seqs, dtype=np.int64),
            prefix_lens=prefix_lens,
            lengths=lengths,
            rows=self._pages[rows, : int(num_pages.max(initial=0))],
            num_pages=num_pages,
        )

    def free(self, seqs: Sequence[int]) -> None:
        """Ends sequences and gives their pages back. Raises ContractError, and frees none, as `extend` does."""
        rows = self._rows(seqs)
        self.allocator.free(indices.kv_indices(self._pages[rows], self._num_pages[rows]))
        self.num_frees += 1
        self._pages[rows] = 0
        self._num_pages[rows] = 0
        self._lengths[rows] = 0
        self._alive[rows] = False
        self._free_rows.extend(reversed(rows.tolist()))
        if self._debug:
            self.check()

    def lengths(self, seqs: Sequence[int]) -> list[int]:
        """Tokens of each sequence."""
        result: list[int] = self._lengths[self._rows(seqs)].tolist()
        return result

    def pages(self, seq: int) -> list[int]:
        """Page ids of one sequence, in order."""
        row = self._rows([seq])[0]
        result: list[int] = self._pages[row, : self._num_pages[row]].tolist()
        return result

    def require_alive(self, seqs: Int64s) -> None:
        """Raises ContractError when one of the handles has been freed."""
        self._rows(seqs)

    def check(self) -> None:
        """Proves the books of table and allocator together. Raises ContractError."""
        self.allocator.check()
        owned = indices.kv_indices(self._pages, self._num_pages)
        if np.unique(owned).size != owned.size:
            raise ContractError("two sequences own the same page.")
        if owned.size + self.allocator.num_free_pages != self.allocator.num_pages:
            raise ContractError(
                f"{owned.size} pages in the table and {self.allocator.num_free_pages} free ones do not make "
                f"{self.allocator.num_pages}."
            )
        if (self._num_pages != -(-self._lengths // self.page_size)).any():
            raise ContractError("a sequence owns more or fewer pages than its length needs.")

    def _rows(self, seqs: Sequence[int] | Int64s) -> npt.NDArray[np.int64]:
        handles = _array("sequences", seqs)
        if handles.size == 0:
            return np.zeros(0, dtype=np.int64)
        if handles.ndim != 1 or handles.dtype.kind not in "iu":
            raise ContractError("sequences must be a flat list of the handles that new_sequences returned.")
        handles = handles.astype(np.int64)
        rows = handles & (_MAX_ROWS - 1)
        rows = np.where(rows < self._alive.size, rows, 0)  # row 0 is never alive
        valid = self._alive[rows] & (self._generation[rows] == handles >> _ROW_BITS)
        if not valid.all():
            raise ContractError(
                f"sequence {handles[~valid][0]} was freed or is not of this runtime; new_sequences gives new ones."
            )
        if np.unique(rows).size != rows.size:
            raise ContractError("a sequence is named twice in one call.")
        return rows

    def _refuse_overlong(self, new: npt.NDArray[np.integer]) -> None:
        """Counts that no pool could hold are refused in Python's integers, before int64 can overflow."""
        allocator = self.allocator
        if new.size and int(new.max()) > allocator.num_pages * self.page_size:
            needed = sum(-(-count // self.page_size) for count in new.tolist())
            raise OutOfPagesError(needed, allocator.num_free_pages, allocator.num_pages)

    def _add_rows(self) -> None:
        old = self._alive.size
        new = min(max(2 * old, 16), _MAX_ROWS)
        if new == old:
            raise ContractError(f"{_MAX_ROWS} sequences are alive, which is the most; free some first.")
        more = new - old
        self._pages = np.pad(self._pages, ((0, more), (0, 0)))  # the large one first: it may find no memory
        self._generation = np.pad(self._generation, (0, more))
        self._alive = np.pad(self._alive, (0, more))
        self._lengths = np.pad(self._lengths, (0, more))
        self._num_pages = np.pad(self._num_pages, (0, more))
        self._free_rows = list(range(new - 1, old - 1, -1)) + self._free_rows

    def _fit_columns(self, columns: int) -> None:
        if columns > self._pages.shape[1]:
            more = max(columns, 2 * self._pages.shape[1]) - self._pages.shape[1]
            self._pages = np.pad(self._pages, ((0, 0), (0, more)))


def _counts(num_new_tokens: Any, num_seqs: int) -> npt.NDArray[np.integer]:
    counts = _array("num_new_tokens", num_new_tokens)
    if counts.shape != (num_seqs,):
        raise ContractError(f"num_new_tokens must hold one number for each of the {num_seqs} sequences.")
    if counts.size and counts.dtype.kind not in "iu":
        raise ContractError(f"num_new_tokens must be integers, not {counts.dtype}.")
    if counts.size and counts.min() < 0:
        raise ContractError(f"num_new_tokens must not be negative: {int(counts.min())} given.")
    return counts


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of other devices
        raise ContractError(f"{name} must be a flat list of integers on the host: {error}") from error
