"""Which pages each sequence owns: the host's books, in which every change is all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import indices
from anyattn.mem_cache.device_table import DeviceTable
from anyattn.mem_cache.handles import Handles, array
from anyattn.mem_cache.step_view import PageCopies, StepView
from anyattn.types import NULL_PAGE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.base import KVAllocator
    from anyattn.mem_cache.indices import Int32s, Int64s
    from anyattn.mem_cache.windows import WindowPages
else:
    np = lazy_import("numpy")


class PageTable:
    """Sequences, their lengths and their pages. Bookkeeping only: KV data is the pools'.

    Sequences are known by integer handles, which `new_sequences` gives and `free` ends. A page may be in several
    sequences (`fork`, `adopt`) and with other holders (`hold`, for a prefix cache): the allocator counts its
    references. Layers with a sliding window have pages of their own beside the full ones (`windows`).

    device: where kernels read the table; its copy there is brought up to date when a step's tensors are asked for.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        page_size: int,
        *,
        device: Any = "cpu",
        windows: Sequence[WindowPages] = (),
        debug: bool = False,
    ) -> None:
        sizes = {page_size, allocator.page_size, *(window.page_size for window in windows)}
        if len(sizes) > 1:
            raise ContractError(f"page table, allocator and windows must have one page_size, not {sorted(sizes)}.")
        self.allocator = allocator
        self.page_size = page_size
        self.windows = tuple(windows)
        self.device_table = DeviceTable(device)
        self.version = 0
        """Counts changes, so that a step's view can tell whether the table is still as it saw it."""
        self.num_frees = 0
        """How often pages of sequences were given back; a batch made before the last time may still write to them."""
        self._debug = debug
        self._handles = Handles()
        self._lengths = np.zeros(1, dtype=np.int64)
        self._num_pages = np.zeros(1, dtype=np.int64)
        self._last_slots = np.zeros(1, dtype=np.int64)
        self._shortened = np.zeros(1, dtype=np.int64)  # version at which the sequence was last truncated
        self._stale = np.zeros(1, dtype=np.bool_)  # whether its last page may hold tokens that it no longer has
        self._some_stale = False
        self._first_columns = [np.zeros(1, dtype=np.int64) for _ in self.windows]  # of the window pages still held
        self._pages = np.zeros((1, 8), dtype=np.int32)
        self._nothing: Int64s = np.zeros(0, dtype=np.int64)
        self._last_batch = (-1, self._nothing, self._nothing, self._nothing, self._nothing)
        self._longest = 0  # no sequence has more tokens
        self._held = np.zeros(allocator.num_pages + 1, dtype=np.int32)  # references of holders beside sequences

    def new_sequences(self, count: int) -> list[int]:
        """Handles of `count` new sequences without tokens or pages."""
        handles = self._handles.new(count)
        if self._handles.num_rows > self._lengths.size:
            self._add_rows(self._handles.num_rows)
        return handles

    def extend(self, seqs: Sequence[int], num_new_tokens: Sequence[int] | int) -> StepView:
        """Reserves room for new tokens, all or nothing, and returns the view of the step that will write them.

        num_new_tokens: one number for each sequence, or one for all.

        Raises ContractError for a freed or repeated sequence or a negative count, OutOfPagesError when the pages
        do not suffice; table and free lists are then as before. A shared partial last page is replaced by one of the
        sequence's own: what to copy is in the view (`StepView.copies`), and has to be done before anything is stored.
        So has what some kernels want zeroed (`StepView.tails`); it is named in no later step again.
        """
        rows, prefix_lens, have, last_slots = self._state(seqs)
        new = _counts(num_new_tokens, rows.size) if rows.size else np.zeros(0, dtype=np.int64)
        most_new = new if isinstance(new, int) else int(new.max(initial=0))
        self._fit(prefix_lens, new, most_new)
        if not isinstance(new, int):
            new = new.astype(np.int64)  # only now, as what is refused may not fit
        lengths = prefix_lens + new
        leaving = self._leaving(rows, prefix_lens, lengths, last_slots) if self.windows else []
        extension = self.allocator.extend(prefix_lens, lengths, last_slots)  # the last that can be refused
        pages = extension.pages
        num_pages, last_slots = have, last_slots + new
        copies: tuple[PageCopies, ...] = ()
        tails: Int64s | None = None
        if pages.size:
            needed = extension.indptr[1:] - extension.indptr[:-1]
            first_columns = have
            if np.count_nonzero(extension.copied_from):
                first_columns = have - (extension.copied_from != 0)
            num_pages = first_columns + needed
            (grown,) = needed.nonzero()
            tails, counts = grown, needed[grown]
            self._write(rows[grown], first_columns[grown], counts, pages)
            last_pages = pages if pages.size == grown.size else pages[counts.cumsum() - 1]
            last_slots[grown] = (last_pages - num_pages[grown] + 1) * self.page_size + lengths[grown] - 1
            self._num_pages[rows[grown]] = num_pages[grown]
            if first_columns is not have:
                (replaced,) = extension.copied_from.nonzero()
                targets = self._pages[rows[replaced], first_columns[replaced]]
                copies = (PageCopies(0, extension.copied_from[replaced], targets),)
        for i, window in enumerate(self.windows):
            first_columns = np.maximum(self._first_columns[i][rows], window.first_column(prefix_lens))
            if leaving[i].unused.size:  # an earlier step of the sequences that let go may not run any more
                self._shortened[rows[first_columns > self._first_columns[i][rows]]] = self.version + 1
                self.num_frees += 1
            window.let_go(leaving[i])
            self._first_columns[i][rows] = first_columns
            window.alloc(pages)
            if copies:
                sources, targets = copies[0].sources, copies[0].targets
                copies += (PageCopies(1 + i, window.page_of[sources], window.page_of[targets]),)
                window.let_go(window.leaving(sources))
        if self._some_stale:
            touched = self._stale[rows] & (lengths > prefix_lens)  # only then the page is the sequence's own for sure
            self._stale[rows[touched]] = False
            self._some_stale = bool(self._stale.any())
            if tails is not None:
                touched[tails] = True
            (tails,) = touched.nonzero()
        self._lengths[rows] = lengths
        self._last_slots[rows] = last_slots
        self._changed()
        self._last_batch = (self.version, rows, lengths, num_pages, last_slots)
        return StepView(
            table=self,
            version=self.version,
            seqs=self._handles.of(rows),
            rows=rows,
            prefix_lens=prefix_lens,
            kv_lens=lengths,
            num_pages=num_pages,
            last_slots=last_slots,
            one_each=most_new == 1 and (isinstance(new, int) or int(new.min()) == 1),
            copies=copies,
            tails=tails,
        )

    def truncate(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Shortens sequences, as after rejected speculation, and gives the pages back that they no longer reach.

        lengths: tokens that each keeps. Raises ContractError, and changes nothing, for a length that is negative or
        above the sequence's own, and where a window would need pages that were let go: a sequence with windows can
        be shortened to what it had before its last `extend`, and to nothing.
        """
        rows = self._handles.rows(seqs)
        wanted = _counts(lengths, rows.size, name="lengths")
        present = self._lengths[rows]
        most = wanted if isinstance(wanted, int) else int(wanted.max(initial=0))
        if most > present.max(initial=0):  # in Python's integers, as it may not fit int64
            raise ContractError(f"truncate shortens: no sequence here has {most} tokens to keep.")
        kept = np.broadcast_to(np.asarray(wanted, dtype=np.int64), rows.shape)
        if (kept > present).any():
            i = np.flatnonzero(kept > present)[0]
            raise ContractError(f"truncate shortens: a sequence of {present[i]} tokens cannot keep {kept[i]}.")
        for i, window in enumerate(self.windows):
            lost = (kept > 0) & (self._first_columns[i][rows] > window.first_column(kept))
            if lost.any():
                first = self._first_columns[i][rows[lost][0]] * self.page_size
                raise ContractError(
                    f"a sequence cannot be shortened to {kept[lost][0]} tokens: window {window.window} has let go of "
                    f"the pages before token {first}."
                )
        num_pages = -(-kept // self.page_size)
        self._give_back(rows, num_pages)
        self._num_pages[rows] = num_pages
        self._lengths[rows] = kept
        self._set_last_slots(rows)
        for first in self._first_columns:
            first[rows[kept == 0]] = 0
        self._shortened[rows] = self.version + 1
        self._stale[rows] |= (kept < present) & (kept % self.page_size != 0)
        self._some_stale = bool(self._stale.any())
        self.num_frees += 1
        self._changed()

    def fork(self, seq: int, count: int = 1) -> list[int]:
        """New sequences that begin as `seq` is now, on the same pages.

        A partial last page is shared too; whoever writes to it first gets a copy.
        """
        (row,) = self._handles.rows([seq])
        handles = self.new_sequences(count)
        rows = self._handles.rows(handles)
        self._begin(rows, self._pages[row, : self._num_pages[row]], int(self._lengths[row]))
        self._stale[rows] = self._stale[row]
        for i, window in enumerate(self.windows):
            first = self._first_columns[i][row]
            window.hold(np.tile(self._pages[row, first : self._num_pages[row]], count))
            self._first_columns[i][rows] = first
        self.allocator.share(np.tile(self._pages[row, : self._num_pages[row]], count))
        self._changed()
        return handles

    def adopt(self, seq: int, pages: Sequence[int] | Int32s) -> None:
        """An empty sequence begins with whole pages that others hold, such as a prefix cache's; it shares them.

        Raises ContractError, and changes nothing, when it is not empty, a page is free or named twice, or a window's
        pages are no longer there (`usable_prefix`).
        """
        (row,) = self._handles.rows([seq])
        pages = self._allocated(pages)
        if self._lengths[row]:
            raise ContractError(f"only an empty sequence can adopt pages; this one has {self._lengths[row]} tokens.")
        if self.usable_prefix(pages) < pages.size:
            raise ContractError("a window's pages of this prefix were let go: adopt what usable_prefix says.")
        self._fit_columns(pages.size)
        self.allocator.share(pages)
        for i, window in enumerate(self.windows):
            first = int(window.first_column(np.array(pages.size * self.page_size)))
            window.hold(pages[first:])
            self._first_columns[i][row] = first
        self._begin(np.array([row]), pages, pages.size * self.page_size)
        self._changed()

    def usable_prefix(self, pages: Int32s) -> int:
        """The most of these pages, from the first one on, that a sequence can adopt: all, but for windows."""
        usable = len(pages)
        while self.windows:
            least = min(window.usable_prefix(np.asarray(pages)[:usable]) for window in self.windows)
            if least == usable:
                break
            usable = least
        return usable

    def hold(self, pages: Sequence[int] | Int32s) -> None:
        """A holder beside the sequences takes a reference to each page, and to the window pages that they have now."""
        pages = self._allocated(pages)
        self.allocator.share(pages)
        self._held[pages] += 1
        for window in self.windows:
            window.hold(pages)
        self._changed()

    def release(self, pages: Sequence[int] | Int32s) -> int:
        """Gives such references back. Returns how many pages became free. Raises ContractError for pages not held."""
        pages = self._allocated(pages)
        if (self._held[pages] < 1).any():
            raise ContractError(f"page {pages[self._held[pages] < 1][0]} is released and nobody holds it.")
        self._held[pages] -= 1
        for window in self.windows:
            window.let_go(window.leaving(pages))
        freed = self.allocator.free(pages)
        self._changed()
        return int(freed or 0)

    def take(self, num_pages: int, in_windows: Sequence[npt.NDArray[np.bool_]] = ()) -> Int32s:
        """Fresh pages held by the caller, all or nothing; `release` or `restore_sequence` ends that.

        in_windows: for each window [num_pages], bool: which of them get a page of the window's layers too.
        Raises OutOfPagesError, and takes none, where pages of either kind are short.
        """
        if len(in_windows) != len(self.windows) or any(len(mask) != num_pages for mask in in_windows):
            raise ContractError(f"in_windows must hold {num_pages} booleans for each of {len(self.windows)} windows.")
        if num_pages > self.allocator.num_free_pages:
            free, total = self.allocator.num_free_pages, self.allocator.num_pages
            raise OutOfPagesError(num_pages, free, total, request="restore")
        for window, mask in zip(self.windows, in_windows, strict=True):
            window.refuse_shortage(int(np.count_nonzero(mask)), request="restore")
        pages: Int32s = self.allocator.alloc(num_pages)
        self._held[pages] += 1
        for window, mask in zip(self.windows, in_windows, strict=True):
            window.alloc(pages[np.asarray(mask, dtype=np.bool_)])
        self._changed()
        return pages

    def restore_sequence(self, pages: Int32s, num_tokens: int) -> int:
        """A new sequence of `num_tokens` tokens on pages that the caller holds (`take`), and no longer does then."""
        pages = self._allocated(pages)
        if not isinstance(num_tokens, int) or num_tokens < 0 or -(-num_tokens // self.page_size) != pages.size:
            raise ContractError(f"{num_tokens} tokens are not what {pages.size} pages of {self.page_size} are for.")
        if (self._held[pages] < 1).any():
            raise ContractError(f"page {pages[self._held[pages] < 1][0]} is not held by the caller: see take.")
        firsts = [int(window.first_column(np.array(num_tokens))) for window in self.windows]
        for window, first in zip(self.windows, firsts, strict=True):
            if (window.page_of[pages[first:]] == 0).any():
                raise ContractError(f"pages that window {window.window} reaches have none of its layers' pages.")
        self._fit_columns(pages.size)
        (handle,) = self.new_sequences(1)
        rows = self._handles.rows([handle])
        self._held[pages] -= 1
        for i, (window, first) in enumerate(zip(self.windows, firsts, strict=True)):
            window.let_go(window.leaving(pages[:first]))
            self._first_columns[i][rows] = first
        self._begin(rows, pages, num_tokens)
        self._stale[rows] = self._some_stale = True  # nothing is known of where the data came from
        self._changed()
        return handle

    def free(self, seqs: Sequence[int]) -> None:
        """Ends sequences and gives their pages back. Raises ContractError, and frees none, as `extend` does."""
        rows = self._handles.rows(seqs)
        self._give_back(rows, np.zeros(rows.size, dtype=np.int64))
        self._num_pages[rows] = 0
        self._lengths[rows] = 0
        self._last_slots[rows] = 0
        self._stale[rows] = False
        for first in self._first_columns:
            first[rows] = 0
        self._handles.end(rows)
        self.num_frees += 1
        self._changed()

    def lengths(self, seqs: Sequence[int]) -> list[int]:
        """Tokens of each sequence."""
        result: list[int] = self._lengths[self._handles.rows(seqs)].tolist()
        return result

    def pages(self, seq: int) -> Int32s:
        """Page ids of one sequence, in order; a copy."""
        (row,) = self._handles.rows([seq])
        pages: Int32s = self._pages[row, : self._num_pages[row]].copy()
        return pages

    def page_rows(self, rows: Int64s, num_pages: Int64s) -> Int32s:
        """Page ids in rows of the table: [len(rows), max_pages], padded with the null page."""
        columns = np.arange(int(num_pages.max(initial=0)))
        return np.where(columns < num_pages[:, None], self._pages[rows, : columns.size], 0)

    def require_whole(self, view: StepView) -> None:
        """Raises ContractError when a sequence of the step was freed or truncated since: its slots may be another's."""
        rows = self._handles.rows(view.seqs)
        shortened = self._shortened[rows] > view.version
        if shortened.any():
            raise ContractError(
                f"sequence {view.seqs[shortened][0]} was truncated after this step was made, or extended so far that a "
                "window's pages were let go: run a step before the next one of its sequences is made."
            )

    def send(self, arrays: Sequence[Int32s | Int64s]) -> Any:
        """See `DeviceTable.send`."""
        return self.device_table.send(self._pages, self.windows, arrays)

    def check(self) -> None:
        """Proves the books of table, windows and allocators together. Raises ContractError."""
        self.allocator.check()
        rows = self._handles.living_rows()
        owned = indices.kv_indices(self._pages[rows], self._num_pages[rows])
        refs = np.bincount(owned, minlength=self._held.size) + self._held
        counted = self.allocator.ref_counts(np.arange(self._held.size))
        if (refs != counted).any():
            page = np.flatnonzero(refs != counted)[0]
            raise ContractError(f"page {page} is held {refs[page]} times, and its reference count is {counted[page]}.")
        if (self._num_pages != -(-self._lengths // self.page_size)).any():
            raise ContractError("a sequence owns more or fewer pages than its length needs.")
        last = np.flatnonzero(self._lengths)
        pages = self._pages[last, self._num_pages[last] - 1].astype(np.int64)
        if (self._last_slots[last] != pages * self.page_size + (self._lengths[last] - 1) % self.page_size).any():
            raise ContractError("a sequence's last slot is not where its last token lies.")
        for window, first in zip(self.windows, self._first_columns, strict=True):
            window.check(self._pages[rows], self._num_pages[rows], first[rows], self._held)

    def _state(self, seqs: Sequence[int]) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Rows, lengths, numbers of pages and last slots; a batch that comes again finds those that its step left."""
        rows = self._handles.rows(seqs)
        version, last_rows, lengths, num_pages, last_slots = self._last_batch
        if rows is last_rows and version == self.version:
            return rows, lengths, num_pages, last_slots
        return rows, self._lengths.take(rows), self._num_pages.take(rows), self._last_slots.take(rows)

    def _fit(self, prefix_lens: Int64s, new: Any, most: int) -> None:
        """Makes columns for so many new tokens. Refuses what no pool could hold."""
        if most > self.allocator.num_pages * self.page_size:  # in Python's integers, before int64 can overflow
            counts = [new] * prefix_lens.size if isinstance(new, int) else new.tolist()
            if counts:
                needed = sum(-(-count // self.page_size) for count in counts)
                raise OutOfPagesError(needed, self.allocator.num_free_pages, self.allocator.num_pages)
        if self._longest + most > self._pages.shape[1] * self.page_size:
            self._longest = int(self._lengths.max())
            columns = -(-int((prefix_lens + new).max(initial=0)) // self.page_size)
            if columns <= self.allocator.num_pages:  # more than that, and the allocator refuses
                self._fit_columns(columns)  # before pages are taken, as it may find no memory
        self._longest += most

    def _leaving(self, rows: Int64s, prefix_lens: Int64s, lengths: Int64s, last_slots: Int64s) -> list[Any]:
        """For each window what its sequences let go of; raises OutOfPagesError where its pages will not do."""
        leaving = []
        for first, window in zip(self._first_columns, self.windows, strict=True):
            end = np.maximum(first[rows], window.first_column(prefix_lens))
            owner, column = indices.token_positions(first[rows], end)
            leaving.append(window.leaving(self._pages[rows[owner], column]))
        needed = indices.pages_for(lengths, self.page_size) - indices.pages_for(prefix_lens, self.page_size)
        written = (lengths > prefix_lens) & (prefix_lens % self.page_size != 0)
        last_pages = np.where(written, last_slots // self.page_size, NULL_PAGE)
        total = int(needed.sum()) + int(np.count_nonzero(self.allocator.ref_counts(last_pages) > 1))
        if total <= self.allocator.num_free_pages:  # otherwise the full pages' allocator refuses
            for window, left in zip(self.windows, leaving, strict=True):
                window.refuse_shortage(total, left)
        return leaving

    def _give_back(self, rows: Int64s, kept: Int64s) -> None:
        """Takes the references of these rows from their pages after the first `kept` ones."""
        num_pages = self._num_pages[rows]
        for first, window in zip(self._first_columns, self.windows, strict=True):
            begin = np.maximum(first[rows], kept)
            owner, column = indices.token_positions(begin, np.maximum(num_pages, begin))
            window.let_go(window.leaving(self._pages[rows[owner], column]))
        self.allocator.free(self._pages.reshape(-1).take(self._places(rows, kept, num_pages - kept)))

    def _begin(self, rows: Int64s, pages: Int32s, num_tokens: int) -> None:
        """Puts the same pages into rows that are empty."""
        nothing = np.zeros(rows.size, dtype=np.int64)
        self._write(rows, nothing, nothing + pages.size, np.tile(pages, rows.size))
        self._num_pages[rows] = pages.size
        self._lengths[rows] = num_tokens
        self._longest = max(self._longest, num_tokens)
        self._set_last_slots(rows)

    def _write(self, rows: Int64s, first_columns: Int64s, counts: Int64s, pages: Int32s) -> None:
        """Enters new pages into rows, `counts` in each from its first column on."""
        places = self._places(rows, first_columns, counts)
        self._pages.reshape(-1)[places] = pages
        self.device_table.note(places, pages)

    def _places(self, rows: Int64s, first_columns: Int64s, counts: Int64s) -> npt.NDArray[np.intp]:
        """Where in the flat table `counts` entries lie that begin at each row's first column, row by row."""
        first = rows * self._pages.shape[1] + first_columns
        ends = counts.cumsum()
        if ends.size == 0 or ends[-1] == ends.size == np.count_nonzero(counts):  # one in each row: a decode's
            return first
        places: npt.NDArray[np.intp] = (first - ends + counts).repeat(counts)
        places += np.arange(places.size)
        return places

    def _set_last_slots(self, rows: Int64s) -> None:
        lengths, num_pages = self._lengths[rows], self._num_pages[rows]
        pages = self._pages[rows, np.maximum(num_pages - 1, 0)].astype(np.int64)
        self._last_slots[rows] = np.where(lengths > 0, pages * self.page_size + (lengths - 1) % self.page_size, 0)

    def _allocated(self, given: Any) -> Int32s:
        given = array("pages", given)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ContractError("pages must be a flat list of page ids.")
        if given.size == 0:
            return self._nothing.astype(np.int32)
        in_order = np.sort(given)
        if in_order[0] < 1 or in_order[-1] > self.allocator.num_pages:
            raise ContractError(f"page ids are 1 to {self.allocator.num_pages}: {in_order[0]} to {in_order[-1]} given.")
        if np.count_nonzero(in_order[1:] == in_order[:-1]):
            raise ContractError("a page is named twice in one call.")
        pages: Int32s = given.astype(np.int32)
        counts = self.allocator.ref_counts(pages)
        if np.count_nonzero(counts) < pages.size:
            raise ContractError(f"page {pages[counts < 1][0]} is free: nobody holds it any more.")
        return pages

    def _changed(self) -> None:
        self.version += 1
        if self._debug:
            self.check()

    def _add_rows(self, num_rows: int) -> None:
        more = num_rows - self._lengths.size
        self._pages = np.pad(self._pages, ((0, more), (0, 0)))  # the large one first: it may find no memory
        self._lengths = np.pad(self._lengths, (0, more))
        self._num_pages = np.pad(self._num_pages, (0, more))
        self._last_slots = np.pad(self._last_slots, (0, more))
        self._shortened = np.pad(self._shortened, (0, more))
        self._stale = np.pad(self._stale, (0, more))
        self._first_columns = [np.pad(first, (0, more)) for first in self._first_columns]
        self.device_table.forget()

    def _fit_columns(self, columns: int) -> None:
        if columns > self._pages.shape[1]:
            more = max(columns, 2 * self._pages.shape[1]) - self._pages.shape[1]
            self._pages = np.pad(self._pages, ((0, 0), (0, more)))
            self.device_table.forget()


def _counts(values: Any, num_seqs: int, *, name: str = "num_new_tokens") -> Any:
    """An array of [num_seqs], or one int for all. Raises ContractError for what is neither, or negative."""
    if type(values) is int and values >= 0:
        return values
    counts = array(name, values)
    if counts.shape not in ((num_seqs,), ()):
        raise ContractError(f"{name} must hold one number for each of the {num_seqs} sequences.")
    if counts.size and counts.dtype.kind not in "iu":
        raise ContractError(f"{name} must be integers, not {counts.dtype}.")
    if counts.size and counts.min() < 0:
        raise ContractError(f"{name} must not be negative: {int(counts.min())} given.")
    return int(counts) if counts.ndim == 0 else counts
