"""The paged allocator that bookkeeps on the host: a stack of free page ids and reference counts, no device work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import misuse
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator
from anyattn.types import NULL_PAGE, IntSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.indices import Int32s
else:
    np = lazy_import("numpy")


class PagedAllocator(KVAllocator):
    """Pages from a stack, so that a page just freed is the next to be used, while caches still hold it."""

    capabilities: ClassVar[AllocatorCapabilities] = AllocatorCapabilities(page_sizes=IntSet(maximum=1024))

    def __init__(self, num_pages: int, page_size: int, device: Any = None, *, debug: bool = False) -> None:
        self.capabilities.require(num_pages, page_size)
        self.page_size = page_size
        self.debug = debug
        self._num_pages = num_pages
        self._num_free = num_pages
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)  # the stack's top is at [_num_free - 1]
        self._refs = np.zeros(num_pages + 1, dtype=np.int32)
        self._extra_refs = 0  # references beyond the first of each page: 0 tells that nothing is shared

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    def alloc(self, num_pages: int) -> Int32s:
        if num_pages < 0:
            raise ContractError(f"cannot allocate {num_pages} pages.")
        if num_pages > self._num_free:
            raise OutOfPagesError(num_pages, self._num_free, self._num_pages)
        pages = self._free[self._num_free - num_pages : self._num_free][::-1].copy()
        self._num_free -= num_pages
        self._refs[_places(pages)] = 1
        return pages

    @property
    def may_share(self) -> bool:  # type: ignore[override]
        return self._extra_refs > 0

    def share(self, pages: Any) -> None:
        pages = _real(pages)
        if self.debug:
            misuse.check_share(self, pages)
        np.add.at(self._refs, _places(pages), np.int32(1))
        self._extra_refs += pages.size

    def free(self, pages: Any) -> int:
        unused = pages = _real(pages)
        if self.debug:
            misuse.check_free(self, pages)
        places = _places(pages)
        if not self._extra_refs:  # every page has one reference: nothing to count
            self._refs[places] = 0
        else:
            np.subtract.at(self._refs, places, np.int32(1))
            unused = pages[self._refs[places] == 0]
            if unused.size > 1:  # a page whose last two references went is named twice
                unused = unused[np.sort(np.unique(unused, return_index=True)[1])]
            self._extra_refs -= pages.size - unused.size
        self._free[self._num_free : self._num_free + unused.size] = unused[::-1]
        self._num_free += unused.size
        return int(unused.size)

    def ref_counts(self, pages: Any) -> Int32s:
        counts: Int32s = self._refs[np.asarray(pages, dtype=np.intp)]
        return counts

    def check(self) -> None:
        free = self._free[: self._num_free]
        if np.unique(free).size != free.size or (free < 1).any():
            raise ContractError("the free list holds a page twice, or the null page.")
        if self._refs[free].any():
            raise ContractError(f"page {free[self._refs[free] != 0][0]} is in the free list and has references.")
        if self._refs[0] or (self._refs < 0).any():
            raise ContractError("a page has fewer than no references, or the null page has some.")
        held = int(np.count_nonzero(self._refs))
        if held + self._num_free != self._num_pages:
            raise ContractError(f"{held} allocated and {self._num_free} free pages do not make {self._num_pages}.")
        if int(self._refs.sum()) - held != self._extra_refs:
            raise ContractError("the number of shared references is not the sum over the pages.")


def _real(pages: Any) -> npt.NDArray[np.integer]:
    """Without the null page, which is padding."""
    given: npt.NDArray[np.integer] = np.asarray(pages)
    if given.size == 0:
        return np.zeros(0, dtype=np.int32)
    return given if given.min() != NULL_PAGE else given[given != NULL_PAGE]


def _places(pages: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
    """For indexing: numpy takes three times as long where it has to convert the indices itself."""
    return pages.astype(np.intp)
