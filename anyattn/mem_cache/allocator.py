"""The paged allocator that bookkeeps on the host: a stack of free page ids, no device work at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator
from anyattn.types import IntSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = lazy_import("numpy")


class PagedAllocator(KVAllocator):
    """Pages from a stack, so that a page just freed is the next to be used, while caches still hold it."""

    capabilities: ClassVar[AllocatorCapabilities] = AllocatorCapabilities(page_sizes=IntSet(maximum=1024))

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1:
            raise ContractError(f"num_pages must be at least 1, not {num_pages}.")
        if page_size not in self.capabilities.page_sizes:
            raise ContractError(f"page_size must be {self.capabilities.page_sizes}, not {page_size}.")
        self._num_pages = num_pages
        self._num_free = num_pages
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)  # the stack's top is at [_num_free - 1]
        self._allocated = np.zeros(num_pages + 1, dtype=np.bool_)
        self._order = np.empty(num_pages + 1, dtype=np.int32)  # scratch of `free`, to find repeats without sorting

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    def alloc(self, num_pages: int) -> npt.NDArray[np.int32]:
        if num_pages < 0:
            raise ContractError(f"cannot allocate {num_pages} pages.")
        if num_pages > self._num_free:
            raise OutOfPagesError(num_pages, self._num_free, self._num_pages)
        pages = self._free[self._num_free - num_pages : self._num_free][::-1].copy()
        self._num_free -= num_pages
        self._allocated[pages] = True
        return pages

    def free(self, pages: npt.NDArray[np.int32]) -> None:
        if pages.size == 0:
            return
        if pages.min() < 1 or pages.max() > self._num_pages:
            raise ContractError(f"pages to free must be 1 to {self._num_pages}: {pages.min()} to {pages.max()} given.")
        if not self._allocated[pages].all():
            raise ContractError(f"page {pages[~self._allocated[pages]][0]} is freed but not allocated.")
        order = np.arange(pages.size, dtype=np.int32)
        self._order[pages] = order
        repeated = self._order[pages] != order
        if repeated.any():
            raise ContractError(f"page {pages[repeated][0]} is freed twice in one call.")
        self._allocated[pages] = False
        self._free[self._num_free : self._num_free + pages.size] = pages[::-1]
        self._num_free += pages.size

    def check(self) -> None:
        free = self._free[: self._num_free]
        if np.unique(free).size != free.size:
            raise ContractError("the free list holds a page twice.")
        if self._allocated[free].any():
            raise ContractError("the free list holds an allocated page.")
        if int(self._allocated.sum()) + self._num_free != self._num_pages:
            raise ContractError(
                f"{int(self._allocated.sum())} allocated and {self._num_free} free pages do not make {self._num_pages}."
            )
