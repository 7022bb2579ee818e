"""An allocator that hands out the pages that have been free the longest."""

# A frozen copy of a plugin as it was written against contract version 1. It is never edited: should it stop working,
# the contract has broken plugins that are out there, and its version has to be raised.

from collections import deque

from anyattn import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator
from anyattn.types import IntSet

np = lazy_import("numpy")


class FrozenAllocator(KVAllocator):
    capabilities = AllocatorCapabilities(page_sizes=IntSet(maximum=256), priority=-1)

    def __init__(self, num_pages, page_size, device=None, *, debug=False):
        self.capabilities.require(num_pages, page_size)
        self.page_size = page_size
        self.debug = debug
        self._num_pages = num_pages
        self._free = deque(range(1, num_pages + 1))
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
        pages = np.array([self._free.popleft() for _ in range(num_pages)], dtype=np.int32)
        self._refs[pages] = 1
        return pages

    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        if self.debug:
            self._check_extend(*(np.asarray(each, dtype=np.int64) for each in (prefix_lens, lengths, last_slots)))
        return super().extend(prefix_lens, lengths, last_slots, most_new_tokens=most_new_tokens)

    def share(self, pages):
        pages = self._real(pages)
        if self.debug and (self._refs[pages] < 1).any():
            raise ContractError("a page is shared after it was freed.")
        np.add.at(self._refs, pages, 1)

    def free(self, pages):
        pages = self._real(pages)
        named, times = np.unique(pages, return_counts=True)
        if self.debug and (self._refs[named] < times).any():
            raise ContractError("a page is freed more often than it is referenced.")
        self._refs[named] -= times.astype(np.int32)
        unused = named[self._refs[named] == 0]
        self._free.extend(unused.tolist())
        return int(unused.size)

    def ref_counts(self, pages):
        return self._refs[np.asarray(pages, dtype=np.int64)]

    def check(self):
        free = np.array(self._free, dtype=np.int64)
        if np.unique(free).size != free.size or (free < 1).any() or self._refs[free].any():
            raise ContractError("the free list holds a page twice, the null page or one that is referenced.")
        if np.count_nonzero(self._refs) + free.size != self._num_pages or (self._refs < 0).any():
            raise ContractError("free and referenced pages are not all pages.")

    def _check_extend(self, prefix_lens, lengths, last_slots):
        if (lengths < prefix_lens).any() or (prefix_lens < 0).any():
            raise ContractError("a sequence is extended to less than it has.")
        old = prefix_lens > 0
        if (last_slots[old] % self.page_size != (prefix_lens[old] - 1) % self.page_size).any():
            raise ContractError("a last slot does not fit its prefix.")
        pages = last_slots // self.page_size
        if pages[~old].any() or (pages[old] < 1).any() or (pages[old] > self._num_pages).any():
            raise ContractError("a last slot is not in a page of this allocator's.")
        if (self._refs[pages[old]] < 1).any():
            raise ContractError("a sequence is extended in a page that is free.")
        written = pages[old & (prefix_lens % self.page_size != 0) & (lengths > prefix_lens)]
        named, times = np.unique(written, return_counts=True)
        if ((times > 1) & (self._refs[named] < times)).any():
            raise ContractError("two sequences would write to one page.")

    def _real(self, pages):
        """Without the null page. Foreign pages are found in debug mode."""
        pages = np.asarray(pages, dtype=np.int64).reshape(-1)
        if self.debug and ((pages < 0) | (pages > self._num_pages)).any():
            raise ContractError("a page is not one of this allocator's.")
        return pages[pages != 0]
