"""An allocator that hands out the lowest free pages first: what is in use stays together at the front of the pool."""

import heapq

from anyattn import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator
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
        self._debug = debug
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

    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        """The base class's, made of `alloc`, `ref_counts` and `free`; debug mode looks at the arguments first."""
        if self._debug:
            self._check_extend(*(np.asarray(array, dtype=np.int64) for array in (prefix_lens, lengths, last_slots)))
        return super().extend(prefix_lens, lengths, last_slots)

    def share(self, pages):
        pages = self._real(pages)
        if self._debug and (self._refs[pages] < 1).any():
            raise ContractError(f"page {pages[self._refs[pages] < 1][0]} is shared after it was freed.")
        np.add.at(self._refs, pages, 1)  # counts a page named twice twice, which += would not

    def free(self, pages):
        pages = self._real(pages)
        if self._debug:
            named, times = np.unique(pages, return_counts=True)
            if (short := self._refs[named] < times).any():
                raise ContractError(f"page {named[short][0]} is freed more often than it is held (double free).")
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
        if self._debug and ((pages < 0) | (pages > self._num_pages)).any():
            raise ContractError(f"a page is not one of 1 to {self._num_pages} (foreign page): {pages}.")
        return pages[pages != NULL_PAGE]

    def _check_extend(self, prefix_lens, lengths, last_slots):
        """Use after free, aliasing and misalignment; see `KVAllocator.extend`."""
        pages, offsets = np.divmod(last_slots, self.page_size)
        begun = prefix_lens > 0
        if (prefix_lens < 0).any() or (lengths < prefix_lens).any():
            raise ContractError("extend makes sequences longer: a length is negative, or below its prefix.")
        if pages[~begun].any() or (offsets != (prefix_lens - 1) % self.page_size)[begun].any():
            raise ContractError("a last slot does not fit the prefix length of its sequence (misalignment).")
        if (pages[begun] < 1).any() or (pages[begun] > self._num_pages).any() or (self._refs[pages[begun]] < 1).any():
            raise ContractError("a sequence's last page is not held by anyone (use after free), or foreign.")
        written, times = np.unique(
            pages[(prefix_lens % self.page_size != 0) & (lengths > prefix_lens)], return_counts=True
        )
        if (aliased := self._refs[written] < times).any():
            raise ContractError(f"two sequences would write to page {written[aliased][0]}, held once (aliasing).")
