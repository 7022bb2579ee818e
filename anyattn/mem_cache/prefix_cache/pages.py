"""What a prefix cache holds, on the device and in the host tier: where tree, queues, tiers and log change together."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from anyattn.errors import OutOfPagesError, StorageError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.prefix_cache.events import EventLog
from anyattn.mem_cache.prefix_cache.eviction import EvictionQueue, Piece
from anyattn.mem_cache.prefix_cache.host import HostPages
from anyattn.mem_cache.prefix_cache.radix_tree import HASH_BYTES, Node, RadixTree, Root

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.host_tier import PageTier
    from anyattn.mem_cache.indices import Int32s
    from anyattn.mem_cache.page_table import PageTable
else:
    np = lazy_import("numpy")


class CachedPages:
    """Pages by the tokens that lead to them. The nodes below a host node are host nodes too.

    held: [num_pages + 1], bool, by full page id: what the cache holds. queue: of the device's pages.
    """

    def __init__(self, table: PageTable, tiers: Sequence[PageTier], *, events: bool) -> None:
        num_pages = table.allocator.num_pages
        self.table = table
        self.tree = RadixTree(table.page_size)
        self.queue = EvictionQueue(num_pages, self.in_use, in_host=False)
        self.host = HostPages(tiers, table.windows, table.page_size) if tiers else None
        self.log = EventLog(table.page_size) if events else None
        self.held = np.zeros(num_pages + 1, dtype=np.bool_)
        self.num_held_pages = 0
        self._host_page_of = np.zeros(num_pages + 1, dtype=np.int32)  # scratch of `give_up`
        self._shortened: list[Node] = []  # nodes that may be one with an only child now

    def in_use(self, pages: Int32s) -> npt.NDArray[np.bool_]:
        """Which of the cache's pages somebody else holds too."""
        used: npt.NDArray[np.bool_] = self.table.allocator.ref_counts(pages) > 1
        return used

    def select(self, wanted: Sequence[int]) -> list[Piece]:
        """What to give up for so many full pages, and pages of each window, to become free."""
        return self.queue.select(wanted, [None, *(window.page_of for window in self.table.windows)])

    def make_room(self, num_pages: int, window_pages: Sequence[int]) -> None:
        """Gives up what is missing to restore so many pages. Raises OutOfPagesError, and keeps all, otherwise."""
        windows = self.table.windows
        allocators = [self.table.allocator, *(window.allocator for window in windows)]
        wanted = [num_pages, *window_pages]
        missing = [amount - allocator.num_free_pages for amount, allocator in zip(wanted, allocators, strict=True)]
        pieces = self.select(missing)
        victims = _victims(pieces)
        found = [victims.size, *(int(np.count_nonzero(window.page_of[victims])) for window in windows)]
        for i, allocator in enumerate(allocators):
            if found[i] < missing[i]:
                self.queue.put_back(pieces)
                free, window = allocator.num_free_pages, windows[i - 1].window if i else None
                raise OutOfPagesError(wanted[i], free, allocator.num_pages, window=window, request="restore")
        self.give_up(pieces, to_host=True)

    def grow(self, extra_key: Hashable, last: Node | None, on_last: int, tokens: bytes, pages: Int32s) -> None:
        """Enters pages that the cache holds, behind the first `on_last` pages of a device node or at the beginning."""
        if last is None:
            seed = self.log.seed(extra_key) if self.log else b""
            last = self.tree.roots.setdefault(extra_key, Root(extra_key, seed))
        elif on_last < last.num_pages:
            last = self.tree.split(last, on_last)
        hashes = self.log.hashes(last.hashes, tokens) if self.log else b""
        first = 0
        if last.pages and not last.children:
            first = last.num_pages
            last.tokens += tokens
            last.pages += pages.tobytes()
            last.hashes += hashes
        else:
            self.queue.discard(last)
            last = self.tree.add(last, tokens, pages.tobytes(), hashes)
        self.queue.add(last)
        if self.log:
            self.log.stored(last, first)

    def replace(self, nodes: Iterable[Node], old: Int32s, new: Int32s) -> None:
        """Device nodes have other pages from now on, which the cache holds now; values are the old ones'."""
        changed = old != new
        self.queue.rank[new] = self.queue.rank[old]
        self.queue.stamp[new] = self.queue.stamp[old]
        self.held[old[changed]] = False
        self.held[new[changed]] = True
        data, start = new.tobytes(), 0
        for node in nodes:
            rest = node.pages[len(data) - start :]  # of the last node, behind the path's end
            node.pages = data[start : start + len(node.pages)] + rest
            start += len(node.pages)
        self.table.release(old[changed])

    def hold(self, pages: npt.NDArray[np.intp]) -> None:
        """Books pages to which the cache has a reference now."""
        self.held[pages] = True
        self.num_held_pages += pages.size

    def bring(self, path: list[Node], on_last: int, pages: Int32s) -> Node:
        """The host nodes of a path, as far as it goes, become device nodes with pages that the cache holds now.

        Returns the path's last node, which ends where the path ends.
        """
        assert self.host is not None
        if on_last < path[-1].num_pages:
            path[-1] = self.tree.split(path[-1], on_last)
        freed, start = [], 0
        for node in path:
            parent = node.parent
            if not node.in_host or parent is None:
                continue
            host_pages = np.frombuffer(node.pages, dtype=np.int32)
            ids = pages[start : start + host_pages.size]
            start += host_pages.size
            self.queue.rank[ids] = self.host.queue.rank[host_pages]
            self.queue.stamp[ids] = self.host.queue.stamp[host_pages]
            self.host.queue.discard(node)
            self.queue.discard(parent)
            self.tree.move(node, ids.tobytes(), to_host=False)
            self._shortened.append(parent)
            freed.append(host_pages)
            if self.log:
                self.log.stored(node)
                self.log.removed(node.hashes, from_host=True)
        self.queue.add(path[-1])
        self.host.free(np.concatenate(freed))
        self._join()
        return path[-1]

    def give_up(self, pieces: Sequence[Piece], *, to_host: bool) -> int:
        """Carries out what `select` found: as many of the pages as fit go to the host. Returns how many became free."""
        victims = _victims(pieces)
        if not victims.size:
            return 0
        num_dropped = victims.size
        if to_host and self.host:
            try:
                num_dropped -= self._save(self.host, victims)
            except StorageError as error:
                warnings.warn(f"evicted pages are dropped, as their tier failed: {error}", stacklevel=3)
            except BaseException:
                self.queue.put_back(pieces)
                self._join()
                raise
        left = num_dropped
        dropped: dict[Node, int] = {}  # the first to go: what lies behind what is saved
        taken: dict[Node, int] = {}  # in the order of the pieces, so children come before their parents
        for node, count in pieces:
            taken[node] = taken.get(node, 0) + count
            dropped[node] = dropped.get(node, 0) + min(count, left)
            left -= min(count, left)
        for node, count in taken.items():
            kept = node.num_pages - count
            if dropped[node]:
                self._drop(node, dropped[node])
            if dropped[node] < count:
                self._move_to_host(node, kept)
        self.held[victims] = False
        self.num_held_pages -= victims.size
        self._join()
        return self.table.release(victims)

    def drop_host(self, wanted: Sequence[int]) -> None:
        """Drops host pages until so many of each tier became free, or nothing is left to drop."""
        if self.host and max(wanted) > 0:
            pieces = self.host.queue.select(wanted, [None, *self.host.window_pages])
            victims = _victims(pieces)
            for node, count in pieces:
                self._drop(node, count)
            self.host.free(victims)

    def clear(self, *, in_use: bool) -> int:
        """Drops all pages of both tiers, those in use only if told so. Returns how many full pages became free."""
        others = [0] * len(self.table.windows)
        if self.host:
            self.drop_host([self.host.num_held_pages, *others])
        if not in_use:
            freed = self.give_up(self.select([self.num_held_pages, *others]), to_host=False)
            self._join()
            return freed
        pages = np.flatnonzero(self.held).astype(np.int32)
        self.tree.roots.clear()
        self.queue.clear()
        self.held[:] = False
        self.num_held_pages = 0
        self._shortened.clear()
        return self.table.release(pages)

    def _save(self, host: HostPages, victims: Int32s) -> int:
        """Copies the last to go to the host, as many as fit once room was made, and returns how many these are."""
        self.drop_host(host.missing(host.wanted(victims)))
        count = host.how_many_fit(victims)
        saved = victims[victims.size - count :][::-1]  # neighbours in order
        self._host_page_of[saved] = host.save(saved, self.queue)
        return count

    def _drop(self, node: Node, num_pages: int) -> None:
        """Cuts pages off the end of a node that has no children, or none any more."""
        if self.log:
            self.log.removed(node.hashes[-num_pages * HASH_BYTES :], from_host=node.in_host)
        parent = node.parent
        assert parent is not None
        if num_pages == node.num_pages:
            self._shortened.append(parent)
        self.tree.cut(node, node.num_pages - num_pages)

    def _move_to_host(self, node: Node, kept: int) -> None:
        """The pages of a device node behind the first `kept` ones are in the host tier now: see `_host_page_of`."""
        assert self.host is not None
        self.queue.discard(node)
        if kept:
            self.queue.add(self.tree.split(node, kept))
        pages = self._host_page_of[np.frombuffer(node.pages, dtype=np.int32)]
        self.tree.move(node, pages.tobytes(), to_host=True)
        if not node.children:
            self.host.queue.add(node)
        self._shortened.append(node)
        if self.log:
            self.log.stored(node)
            self.log.removed(node.hashes, from_host=False)

    def _join(self) -> None:
        """Brings the tree back to its shortest form, last of all, as whoever changes it holds on to nodes."""
        for node in self._shortened:
            self.tree.join(node)
        self._shortened.clear()


def _victims(pieces: Iterable[Piece]) -> Int32s:
    """The page ids of pieces in the order in which they go: each node's from the end."""
    taken: dict[Node, int] = {}
    parts = [np.zeros(0, dtype=np.int32)]
    for node, count in pieces:
        end = node.num_pages - taken.get(node, 0)
        parts.append(np.frombuffer(node.pages, dtype=np.int32)[end - count : end][::-1])
        taken[node] = taken.get(node, 0) + count
    return np.concatenate(parts)
