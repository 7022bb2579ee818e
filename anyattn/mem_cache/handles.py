"""Handles of sequences: integers that never come back, so that a freed one is told from every later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.indices import Int64s
else:
    np = lazy_import("numpy")

_ROW_BITS = 20  # a handle is generation << 20 | row
_MAX_ROWS = 1 << _ROW_BITS


class Handles:
    """Which row of the page table each living sequence has."""

    def __init__(self) -> None:
        self.num_rows = 1
        """Rows there are, row 0 counted, which no sequence has: so no valid handle is small."""
        self._free_rows: list[int] = []
        self._generation = np.zeros(1, dtype=np.int64)
        self._living = np.full(1, -1, dtype=np.int64)  # the handle of the sequence that has the row; 0 for none
        self._order = np.zeros(1, dtype=np.int64)  # scratch, to find repeats without sorting
        self._nothing = np.zeros(0, dtype=np.int64)
        self._last: tuple[bytes | list[Any], Int64s, Int64s] = ([], self._nothing, self._nothing)
        """The last batch as it was given, its rows and its handles: a decode batch comes again and again."""

    def new(self, count: int) -> list[int]:
        """Handles of `count` new sequences."""
        if not isinstance(count, int) or count < 0:
            raise ContractError(f"cannot make {count!r} sequences.")
        if count - len(self._free_rows) > _MAX_ROWS - self.num_rows:
            alive = self.num_rows - 1 - len(self._free_rows)
            raise ContractError(f"{_MAX_ROWS - 1} sequences can be alive, and {alive} are: no room for {count} more.")
        while len(self._free_rows) < count:
            self._add_rows()
        rows = np.array([self._free_rows.pop() for _ in range(count)], dtype=np.int64)
        self._generation[rows] += 1
        handles = self._generation[rows] << _ROW_BITS | rows
        self._living[rows] = handles
        result: list[int] = handles.tolist()
        return result

    def rows(self, seqs: Sequence[int] | Int64s) -> Int64s:
        """Their rows. Raises ContractError for a handle that was freed or never given, and for one named twice."""
        key = _key(seqs)
        if key is not None and _same(key, self._last[0]):
            return self._last[1]
        handles = array("sequences", seqs)
        if handles.size == 0:
            return self._nothing
        if handles.ndim != 1 or handles.dtype.kind not in "iu":
            raise ContractError("sequences must be a flat list of the handles that new_sequences returned.")
        handles = handles.astype(np.int64)
        rows = handles & (_MAX_ROWS - 1)
        living = (self._living.take(rows, mode="clip") == handles) & (rows < self.num_rows)
        if np.count_nonzero(living) != rows.size:
            raise ContractError(
                f"sequence {handles[~living][0]} was freed or is not of this runtime; new_sequences gives new ones."
            )
        order = np.arange(rows.size)
        self._order[rows] = order  # the last one that has a row wins
        if np.count_nonzero(self._order.take(rows) != order):
            raise ContractError("a sequence is named twice in one call.")
        if key is not None:
            self._last = (key, rows, handles)
        return rows

    def of(self, rows: Int64s) -> Int64s:
        """The handles of the sequences in these rows."""
        return self._last[2] if rows is self._last[1] else self._living[rows]

    def end(self, rows: Int64s) -> None:
        """The sequences of these rows are no more."""
        self._living[rows] = 0
        self._free_rows.extend(reversed(rows.tolist()))
        self._last = ([], self._nothing, self._nothing)

    def living_rows(self) -> Int64s:
        """Rows that sequences have."""
        return np.flatnonzero(self._living > 0)

    def _add_rows(self) -> None:
        old = self.num_rows
        new = min(max(2 * old, 16), _MAX_ROWS)
        self._generation = np.pad(self._generation, (0, new - old))
        self._living = np.pad(self._living, (0, new - old))
        self._order = np.pad(self._order, (0, new - old))
        self._free_rows = list(range(new - 1, old - 1, -1)) + self._free_rows
        self.num_rows = new


def _key(seqs: Any) -> bytes | list[Any] | None:
    """What a batch is known by when it comes again; None for what is given in another form than handles come in."""
    if type(seqs) is np.ndarray and seqs.dtype == np.int64 and seqs.ndim == 1:
        return bytes(seqs.tobytes())
    return seqs.copy() if type(seqs) is list else None


def _same(key: bytes | list[Any], other: bytes | list[Any]) -> bool:
    try:
        return key == other
    except (ValueError, RuntimeError):  # a list of arrays, which will be refused for what it is
        return False


def array(name: str, values: Any) -> npt.NDArray[Any]:
    """What a caller gave, as an array; ContractError where it is none."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of other devices
        raise ContractError(f"{name} must be a flat list of integers on the host: {error}") from error
