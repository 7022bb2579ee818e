"""Sliding-window layers' pages: a second pool, in which a sequence keeps only the pages that its window reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import indices

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.base import KVAllocator
    from anyattn.mem_cache.indices import Int32s, Int64s

    Ints = npt.NDArray[np.integer[Any]]
else:
    np = lazy_import("numpy")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leaving:
    """Full pages whose holders let go of their window pages. pages: without repeats. holders: how many let go of each.

    unused: those of `pages` that nobody holds any more.
    """

    pages: Ints
    holders: Ints
    unused: Ints


class WindowPages:
    """Maps each full page to a page of the window layers' pool, as long as somebody's window reaches it.

    The full page's table row stays the only list of a sequence's pages: window layers read it through `page_of`, in
    which a page that was let go is the null page. A page is held once by each sequence whose window reaches it, and
    once by each holder beside sequences (`PageTable.hold`) that took it while it was there.

    window: tokens that a token sees, itself counted. page_of: [num_pages + 1], int32, full page -> window page.
    """

    def __init__(self, window: int, allocator: KVAllocator, *, num_pages: int, page_size: int) -> None:
        self.window = window
        self.allocator = allocator
        self.page_of = np.zeros(num_pages + 1, dtype=np.int32)
        self.changed: list[Ints] = []
        """Full pages whose entry changed since the device's copy of the mapping was brought up to date."""
        self._num_changed = 0
        self._holders = np.zeros(num_pages + 1, dtype=np.int32)
        self.page_size = page_size

    def first_column(self, lengths: Ints) -> Int64s:
        """The first page that sequences of these lengths still need: the next token sees (length - window, length]."""
        first: Int64s = np.maximum(lengths - (self.window - 1), 0) // self.page_size
        return first

    def leaving(self, pages: Ints) -> _Leaving:
        """What becomes of window pages when each of these full pages, repeats counted, loses a holder."""
        pages, holders = np.unique(pages[self.page_of[pages] != 0], return_counts=True)
        return _Leaving(pages=pages, holders=holders, unused=pages[self._holders[pages] == holders])

    def let_go(self, leaving: _Leaving) -> None:
        """Carries out what `leaving` found; the pages that nobody holds return to the free list."""
        self._holders[leaving.pages] -= leaving.holders
        if leaving.unused.size:
            self.allocator.free(self.page_of[leaving.unused])
            self.page_of[leaving.unused] = 0
            self._note(leaving.unused)

    def refuse_shortage(
        self, num_pages: int, leaving: _Leaving | None = None, *, request: Literal["extend", "restore"] = "extend"
    ) -> None:
        """Raises OutOfPagesError when so many window pages are not free, nor become free by what is leaving."""
        free = self.allocator.num_free_pages + (0 if leaving is None else leaving.unused.size)
        if num_pages > free:
            raise OutOfPagesError(num_pages, free, self.allocator.num_pages, window=self.window, request=request)

    def alloc(self, pages: Ints) -> None:
        """Gives fresh full pages a window page each, with one holder."""
        if pages.size:
            self.page_of[pages] = self.allocator.alloc(pages.size)
            self._holders[pages] = 1
            self._note(pages)

    def _note(self, pages: Ints) -> None:
        """Remembers that these pages' entries changed; of more than there are, that all did."""
        self._num_changed = self._num_changed + pages.size if self.changed else pages.size
        self.changed.append(pages)
        if self._num_changed > self.page_of.size:
            self.changed = [np.arange(self.page_of.size)]

    def hold(self, pages: Ints) -> None:
        """One more holder for those of the full pages that have a window page; a page named twice gets two."""
        np.add.at(self._holders, pages[self.page_of[pages] != 0], 1)

    def usable_prefix(self, pages: Ints) -> int:
        """The largest k for which pages[:k] hold all that the window of the next token reaches."""
        gaps = np.flatnonzero(self.page_of[pages] == 0)
        ends = np.arange(1, pages.size + 1)
        last_gap = np.full(pages.size + 1, -1)
        last_gap[gaps + 1] = gaps
        last_gap = np.maximum.accumulate(last_gap)[1:]  # for each k = ends: the last page before it that is missing
        usable = np.flatnonzero(last_gap < self.first_column(ends * self.page_size))
        return int(usable[-1]) + 1 if usable.size else 0

    def check(self, rows: Int32s, num_pages: Int64s, first_columns: Int64s, held: Ints) -> None:
        """Proves these books. rows, num_pages, first_columns: of all sequences. held: of each full page, by others."""
        self.allocator.check()
        mapped = self.page_of[self.page_of != 0]
        if np.unique(mapped).size != mapped.size:
            raise ContractError(f"two full pages have the same page of window {self.window}.")
        if mapped.size + self.allocator.num_free_pages != self.allocator.num_pages:
            raise ContractError(
                f"{mapped.size} mapped and {self.allocator.num_free_pages} free pages of window {self.window} do not "
                f"make {self.allocator.num_pages}."
            )
        owner, column = indices.token_positions(first_columns, np.maximum(num_pages, first_columns))
        reached = rows[owner, column]
        if (self.page_of[reached] == 0).any():
            raise ContractError(f"a sequence lacks a page that its window of {self.window} reaches.")
        holders = np.bincount(reached, minlength=self.page_of.size) + np.where(self.page_of != 0, held, 0)
        if (holders != self._holders).any():
            page = np.flatnonzero(holders != self._holders)[0]
            raise ContractError(
                f"page {page} has {holders[page]} holders of its page of window {self.window}, and the books say "
                f"{self._holders[page]}."
            )
        if ((self._holders == 0) & (self.page_of != 0)).any():
            raise ContractError(f"a page of window {self.window} is kept that nobody holds.")
