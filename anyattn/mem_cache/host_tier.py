"""Pages kept in host memory, pinned where the device has that, which come and go without the host waiting for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.handles import array
from anyattn.mem_cache.staging import PageStaging

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.base import KVPool
    from anyattn.mem_cache.indices import Int32s
else:
    np = lazy_import("numpy")

STAGING_BYTES = 128 << 20
_SEGMENT_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two, which one buffer could double


class PageTier(ABC):
    """A second place for the pages of one pool, with page ids of its own: 1 to `num_pages`, and 0 for none.

    A tier belongs to one pool, so a model with window layers has one for each of its pools. It keeps what its pages
    held when they were saved; who saved what, and when it may go, is the caller's to know.
    """

    def __init__(self, pool: KVPool, num_pages: int) -> None:
        self.pool = pool
        self._allocator = PagedAllocator(num_pages, page_size=1)  # in whole records, whatever a page holds

    @property
    def num_pages(self) -> int:
        """Pages that the tier has room for."""
        return self._allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that `save` can still take."""
        return self._allocator.num_free_pages

    def save(self, pages: Int32s) -> Int32s:
        """Keeps what these pages of the pool hold, in all layers. All or nothing.

        pages: [n], ids of the pool's pages; the null page may be among them, for window pages that were let go.
        They may be written again as soon as this returns. What is read is what the current stream's kernels leave.

        Returns [n], int32, ids in the tier, 0 for the null page. Raises OutOfPagesError, and keeps nothing, when too
        few are free, ContractError for ids that the pool does not have.
        """
        pages = self._of_pool(pages)
        real = pages != 0
        wanted, free = int(np.count_nonzero(real)), self.num_free_pages
        if wanted > free:
            raise OutOfPagesError(wanted, free, self.num_pages, request="save")
        # In ascending order, as neighbours in host memory are copied in one go.
        taken = np.sort(self._allocator.alloc(wanted))
        try:
            self._save(pages[real], taken)
        except BaseException:
            self._allocator.free(taken)
            raise
        host_pages: Int32s = np.zeros(pages.size, dtype=np.int32)
        host_pages[real] = taken
        return host_pages

    def load(self, host_pages: Int32s, pages: Int32s) -> None:
        """Writes what was saved into pages of the pool, in the order of the current stream. The tier keeps it too.

        host_pages: [n], ids that `save` gave. pages: [n], where each goes; the null page takes nothing.
        Raises ContractError, and writes nothing, for ids that hold nothing or pages that are named twice.
        """
        host_pages, pages = self._saved(host_pages), self._of_pool(pages)
        if host_pages.size != pages.size:
            raise ContractError(f"{host_pages.size} pages of the tier cannot go into {pages.size} pages of the pool.")
        wanted = pages != 0
        host_pages, pages = host_pages[wanted], pages[wanted]
        if not host_pages.all():
            raise ContractError(f"page {pages[host_pages == 0][0]} is to be loaded from 0, where nothing was saved.")
        if np.unique(pages).size != pages.size:
            raise ContractError("a page of the pool is to be loaded twice in one call.")
        order = np.argsort(host_pages, kind="stable")
        if order.size:
            self._load(host_pages[order], pages[order])

    def free(self, host_pages: Int32s) -> None:
        """Forgets saved pages. Raises ContractError, and forgets none, for ids that hold nothing or come twice."""
        host_pages = self._saved(host_pages)
        host_pages = host_pages[host_pages != 0]
        if np.unique(host_pages).size != host_pages.size:
            raise ContractError("a page of the tier is freed twice in one call.")
        self._allocator.free(host_pages)

    def check(self) -> None:
        """Proves the books. Raises ContractError."""
        self._allocator.check()

    @abstractmethod
    def synchronize(self) -> None:
        """Waits on the host until all that was saved is where it is kept."""

    @abstractmethod
    def _save(self, pages: Int32s, host_pages: Int32s) -> None:
        """host_pages: ascending."""

    @abstractmethod
    def _load(self, host_pages: Int32s, pages: Int32s) -> None:
        """host_pages: ascending, a page may come more than once."""

    def _of_pool(self, pages: Any) -> Int32s:
        return _page_ids(pages, self.pool.num_pages, "the pool")

    def _saved(self, host_pages: Any) -> Int32s:
        ids = _page_ids(host_pages, self.num_pages, "the tier")
        free = (ids != 0) & (self._allocator.ref_counts(ids) == 0)
        if free.any():
            raise ContractError(f"page {ids[free][0]} of the tier is free: nothing was saved, or it was freed.")
        return ids


class HostTier(PageTier):
    """Pages in host memory. Neither `save` nor `load` waits on the host.

    num_pages: pages that host memory is reserved for. staging_bytes: device memory that pages on their way take at
    most; a larger save or load has the device, not the host, wait for the bus. Raises ContractError where the memory
    cannot be pinned.
    """

    def __init__(self, pool: KVPool, num_pages: int, *, staging_bytes: int = STAGING_BYTES) -> None:
        super().__init__(pool, num_pages)
        self._staging = PageStaging(pool, staging_bytes)
        self._segment_pages = max(_SEGMENT_BYTES // max(pool.cache.bytes_per_page, 1), 1)
        self._segments: list[torch.Tensor] = [
            self._staging.empty(min(self._segment_pages, num_pages - first))
            for first in range(0, num_pages, self._segment_pages)
        ]

    def synchronize(self) -> None:
        self._staging.synchronize()

    # A page of the tier may be freed, and given to the next save, while the copy to or from it has yet to run: the next
    # copy that touches it is enqueued behind on the same side stream.

    def _save(self, pages: Int32s, host_pages: Int32s) -> None:
        for part in self._staging.chunks(pages.size):
            self._staging.save(pages[part], self._pieces(host_pages[part]))

    def _load(self, host_pages: Int32s, pages: Int32s) -> None:
        for part in self._staging.chunks(pages.size):
            self._staging.load(pages[part], self._pieces(host_pages[part]))

    def _pieces(self, host_pages: Int32s) -> list[torch.Tensor]:
        """Records of these pages as few pieces of the host's memory, one after the other."""
        rows = host_pages.astype(np.int64) - 1
        breaks = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % self._segment_pages == 0)) + 1
        pieces = []
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), rows.size], strict=True):
            segment, first = divmod(int(rows[begin]), self._segment_pages)
            pieces.append(self._segments[segment][first : first + end - begin])
        return pieces


def _page_ids(pages: Any, num_pages: int, whose: str) -> Int32s:
    pages = array("pages", pages)
    if pages.ndim != 1 or (pages.size and pages.dtype.kind not in "iu"):
        raise ContractError(f"pages of {whose} must be a flat list of page ids.")
    if pages.size and (pages.min() < 0 or pages.max() > num_pages):
        raise ContractError(f"pages of {whose} are 0 to {num_pages}: {pages.min()} to {pages.max()} given.")
    ids: Int32s = pages.astype(np.int32)
    return ids
