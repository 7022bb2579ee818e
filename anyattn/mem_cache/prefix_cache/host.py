"""The prefix cache's pages in host memory: which are there, what they hold of windows, and how they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.prefix_cache.eviction import EvictionQueue

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.host_tier import PageTier
    from anyattn.mem_cache.indices import Int32s
    from anyattn.mem_cache.windows import WindowPages
else:
    np = lazy_import("numpy")


class HostPages:
    """A full page's host page is its id in the first tier; its windows' pages, where it had some, are in the others.

    A host page may be freed as soon as `load` has been called, as a tier carries out what it is asked in order.

    window_pages: for each window [num_pages + 1], int32: full host page -> the window's host page, 0 for none.
    pinned: [num_pages + 1], bool: pages that are about to be loaded, which must not be dropped.
    """

    def __init__(self, tiers: Sequence[PageTier], windows: Sequence[WindowPages], page_size: int) -> None:
        if len(tiers) != 1 + len(windows):
            raise ContractError(
                f"{len(tiers)} host tiers given, and {1 + len(windows)} are wanted: one for the full pages and one for "
                f"each of {len(windows)} windows."
            )
        num_pages = tiers[0].num_pages
        self.num_held_pages = 0
        self.pinned = np.zeros(num_pages + 1, dtype=np.bool_)
        self.window_pages = [np.zeros(num_pages + 1, dtype=np.int32) for _ in windows]
        self.queue = EvictionQueue(num_pages, lambda pages: self.pinned[pages], in_host=True)
        self.tiers = tuple(tiers)
        self._windows = tuple(windows)
        self._page_size = page_size

    def wanted(self, pages: Int32s) -> list[int]:
        """Host pages of each tier that device pages would take."""
        return [pages.size] + [int(np.count_nonzero(window.page_of[pages])) for window in self._windows]

    def missing(self, wanted: Sequence[int]) -> list[int]:
        """How many of the wanted pages are not free, for each tier."""
        return [amount - tier.num_free_pages for amount, tier in zip(wanted, self.tiers, strict=True)]

    def how_many_fit(self, pages: Int32s) -> int:
        """The most of these device pages, from the last one back, that all tiers have room for."""
        fit = min(pages.size, self.tiers[0].num_free_pages)
        for window, tier in zip(self._windows, self.tiers[1:], strict=True):
            taken = np.cumsum(window.page_of[pages[::-1]] != 0)
            fit = min(fit, int(np.searchsorted(taken, tier.num_free_pages, side="right")))
        return fit

    def usable_prefix(self, pages: Int32s, host_pages: Int32s) -> int:
        """`PageTable.usable_prefix` of pages on the device and the host pages that follow them, were they loaded."""
        count = pages.size + host_pages.size
        ends = np.arange(count + 1)
        usable = np.ones(count + 1, dtype=np.bool_)
        for window, of_window in zip(self._windows, self.window_pages, strict=True):
            gaps = np.concatenate([window.page_of[pages] == 0, of_window[host_pages] == 0])
            gaps_before = np.concatenate([[0], np.cumsum(gaps)])
            usable &= gaps_before == gaps_before[window.first_column(ends * self._page_size)]
        return int(np.flatnonzero(usable)[-1])

    def save(self, pages: Int32s, queue: EvictionQueue) -> Int32s:
        """Copies device pages, with their value in the device's queue, and returns their host pages."""
        saved: list[Int32s] = []
        try:
            saved.append(self.tiers[0].save(pages))
            for window, tier in zip(self._windows, self.tiers[1:], strict=True):
                saved.append(tier.save(window.page_of[pages]))
        except BaseException:
            for tier, host_pages in zip(self.tiers, saved, strict=False):
                tier.free(host_pages)
            raise
        full = saved[0]
        for of_window, host_pages in zip(self.window_pages, saved[1:], strict=True):
            of_window[full] = host_pages
        self.queue.rank[full] = queue.rank[pages]
        self.queue.stamp[full] = queue.stamp[pages]
        self.num_held_pages += full.size
        return full

    def in_windows(self, host_pages: Int32s) -> list[npt.NDArray[np.bool_]]:
        """For each window, which of the pages hold something of it."""
        return [of_window[host_pages] != 0 for of_window in self.window_pages]

    def load(self, host_pages: Int32s, pages: Int32s) -> None:
        """Copies host pages to device pages, which have window pages where the host pages do."""
        self.tiers[0].load(host_pages, pages)
        for window, tier, of_window in zip(self._windows, self.tiers[1:], self.window_pages, strict=True):
            tier.load(of_window[host_pages], window.page_of[pages])

    def free(self, host_pages: Int32s) -> None:
        """Gives host pages back, those of the windows too."""
        self.tiers[0].free(host_pages)
        for tier, of_window in zip(self.tiers[1:], self.window_pages, strict=True):
            tier.free(of_window[host_pages])
            of_window[host_pages] = 0
        self.num_held_pages -= host_pages.size
