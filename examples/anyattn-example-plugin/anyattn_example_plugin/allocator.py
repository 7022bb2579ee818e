"""An allocator that hands out the lowest free pages first: what is in use stays together at the front of the pool."""

import heapq

from anyattn import AllocatorCapabilities, ContractError, KVAllocator, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import misuse
from anyattn.types import NULL_PAGE, IntSet

np = lazy_import("numpy")


class LowestFirstAllocator(KVAllocator):
    """Free pages in a heap, reference counts in an array. A page costs O(log n), where a stack's costs O(1)."""

    capabilities = AllocatorCapabilities(
        device_kinds=frozenset({"example"}), page_sizes=IntSet(maximum=1024), priority=10
    )

    def __init__(self, num_pages, page_size, device=None, *, debug=False):
        self.capabilities.require(num_pages, page_size)
        self.page_size = page_size
        self._num_pages = num_pages
        self.debug = debug
        self._free = list(range(1, num_pages + 1))  # what is sorted is a heap
        self._refs = np.zeros(num_pages + 1, dtype=np.int32)

    @property
    def num_pages(self):
        return self._num_pages

    @property
    def num_free_pages(self):
        return len(self._free)

    def alloc(self, num_pages):
        if num_pages < 0:
            raise ContractError(f"cannot allocate {num_pages} pages.")
        if num_pages > len(self._free):
            raise OutOfPagesError(num_pages, len(self._free), self._num_pages)
        pages = np.array([heapq.heappop(self._free) for _ in range(num_pages)], dtype=np.int32)
        self._refs[pages] = 1
        return pages

    def share(self, pages):
        pages = self._real(pages)
        if self.debug:
            misuse.check_share(self, pages)
        np.add.at(self._refs, pages, 1)  # counts a page named twice twice, which += would not

    def free(self, pages):
        pages = self._real(pages)
        if self.debug:
            misuse.check_free(self, pages)
        np.subtract.at(self._refs, pages, 1)
        unused = np.unique(pages[self._refs[pages] == 0]).tolist()
        for page in unused:
            heapq.heappush(self._free, page)
        return len(unused)

    def ref_counts(self, pages):
        return self._refs[np.asarray(pages, dtype=np.intp)]

    def check(self):
        free = np.array(self._free, dtype=np.intp)
        held = np.flatnonzero(self._refs)
        if not np.array_equal(np.sort(np.concatenate([free, held])), np.arange(1, self._num_pages + 1)):
            raise ContractError("a page is neither free nor held, or both, or the null page is one of them.")
        if (self._refs < 0).any():
            raise ContractError(f"page {np.argmin(self._refs)} has fewer than no references.")

    def _real(self, pages):
        """Without the null page, which is padding; as numpy wants indices."""
        pages = np.asarray(pages, dtype=np.intp)
        return pages[pages != NULL_PAGE]
