"""In which order a prefix cache gives up pages: a heap of the tree's leaves, brought up to date when it is asked."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.prefix_cache.radix_tree import PAGE_ID_BYTES, Node

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.indices import Int32s
else:
    np = lazy_import("numpy")

_tickets = itertools.count(1)  # of all queues, as a node's one ticket tells its valid entry among those of two tiers

Piece = tuple[Node, int]
"""Pages to give up: so many at the end of a node, behind those that earlier pieces of the same node name."""


class EvictionQueue:
    """The pages of one tier by value, the least first: by rank (hits or priority), then by when they were last used.

    Only the end of a leaf can be given up. Whatever uses a page uses those before it, so values never grow along a
    path, and the first to go is the end of some leaf. Values are kept by page id, so that using a path is one write,
    however many nodes it has, and leaves the heap alone: an entry has the value of when it was made, which is never
    above the leaf's own, as a leaf that is made longer is entered anew, and is put right when it comes to the top.

    rank, stamp: [num_pages + 1], int64, by page id.
    in_use: for page ids, which of them must stay.
    """

    def __init__(self, num_pages: int, in_use: Callable[[Int32s], npt.NDArray[np.bool_]], *, in_host: bool) -> None:
        self.rank = np.zeros(num_pages + 1, dtype=np.int64)
        self.stamp = np.zeros(num_pages + 1, dtype=np.int64)
        self._in_use = in_use
        self._in_host = in_host
        self._heap: list[tuple[int, int, int, Node]] = []
        self._num_valid = 0
        self._parked: dict[Node, None] = {}  # leaves whose last page was in use when it was their turn

    def add(self, node: Node) -> None:
        """Enters a leaf, or enters it anew after it was made longer."""
        self._push(node, node.num_pages)

    def discard(self, node: Node) -> None:
        """Leaves a node out that is no leaf any more, or leaves the tier."""
        if node.ticket:
            node.ticket = 0
            self._num_valid -= 1
        else:
            self._parked.pop(node, None)

    def clear(self) -> None:
        """Forgets all leaves, as the tree is empty."""
        self._heap.clear()
        self._parked.clear()
        self._num_valid = 0

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """What was selected is not given up after all."""
        nodes = list(dict.fromkeys(node for node, _ in pieces))
        for node in nodes:
            self.add(node)
        for node in nodes:
            assert node.parent is not None
            self.discard(node.parent)  # which `select` took for a leaf

    def select(self, wanted: Sequence[int], counted: Sequence[npt.NDArray[Any] | None] = (None,)) -> list[Piece]:
        """Which pages to give up, in order; nothing but the queue is changed.

        wanted: how many, and `counted` what of: by page id, those that count are not 0; None for all. Where there are
        several, all are met. Fewer are selected where the pages in use leave no more.
        """
        missing = list(wanted)
        pieces: list[Piece] = []
        taken: dict[Node, int] = {}
        lost_children: dict[Node, int] = {}
        self._unpark()
        heap = self._heap
        while heap and max(missing) > 0:
            rank, stamp, ticket, node = heap[0]
            if node.ticket != ticket:
                heapq.heappop(heap)
                continue
            before = taken.get(node, 0)
            left = node.num_pages - before
            last = _page_at(node, left - 1)
            value = (self.rank.item(last), self.stamp.item(last))
            if value != (rank, stamp):
                node.ticket = next(_tickets)
                heapq.heapreplace(heap, (*value, node.ticket, node))
                continue
            heapq.heappop(heap)
            node.ticket = 0
            self._num_valid -= 1
            count = self._count(node, left, missing, counted)
            if not count:
                self._parked[node] = None
                continue
            pieces.append((node, count))
            taken[node] = before + count
            if count < left:
                self._push(node, left - count)
                continue
            parent = node.parent
            assert parent is not None
            lost_children[parent] = lost_children.get(parent, 0) + 1
            of_tier = bool(parent.pages) and parent.in_host == self._in_host
            if of_tier and self._num_children(parent) == lost_children[parent]:
                self._push(parent, parent.num_pages)
        return pieces

    def check(self, leaves: Sequence[Node]) -> None:
        """Proves that just these leaves are entered, at no more than their value. Raises ContractError."""
        valid = {node: (rank, stamp) for rank, stamp, ticket, node in self._heap if node.ticket == ticket}
        if valid.keys() | self._parked.keys() != set(leaves) or valid.keys() & self._parked.keys():
            raise ContractError("an eviction queue does not hold just the leaves, each once.")
        if len(valid) != self._num_valid:
            raise ContractError(f"an eviction queue counts {self._num_valid} leaves and holds {len(valid)}.")
        for node, value in valid.items():
            last = _page_at(node, node.num_pages - 1)
            if value > (self.rank[last], self.stamp[last]):
                raise ContractError("an eviction queue takes a leaf for more than it is worth.")

    def _count(self, node: Node, left: int, missing: list[int], counted: Sequence[npt.NDArray[Any] | None]) -> int:
        """How many of a node's first `left` pages go now, from the last one on; counts down what is missing.

        They go until another leaf is worth less, a page is in use or nothing is missing.
        """
        look = min(left, missing[0]) if max(missing[1:], default=0) <= 0 and counted[0] is None else left
        pages = np.frombuffer(node.pages, dtype=np.int32)[left - look : left][::-1]
        stays = self._in_use(pages)
        if self._heap and look > 1:  # the last page is worth no more than any leaf
            rank, stamp = self._heap[0][:2]
            ranks = self.rank[pages]
            stays |= (ranks > rank) | ((ranks == rank) & (self.stamp[pages] > stamp))
        first = int(stays.argmax())
        run = first if stays[first] else look
        if not run:
            return 0
        count = 0
        for amount, of in zip(missing, counted, strict=True):
            if amount > 0:
                enough = amount if of is None else int(np.searchsorted(np.cumsum(of[pages[:run]] != 0), amount)) + 1
                count = max(count, min(enough, run))
        for i, of in enumerate(counted):
            missing[i] -= count if of is None else int(np.count_nonzero(of[pages[:count]]))
        return count

    def _num_children(self, node: Node) -> int:
        """Children in this tier or, for the host's, any: there are no others below."""
        return len(node.children) if self._in_host else node.num_device_children

    def _push(self, node: Node, num_pages: int) -> None:
        """Enters a node by the value of the last of its first `num_pages` pages."""
        if node.ticket:
            self._num_valid -= 1
        else:
            self._parked.pop(node, None)
        last = _page_at(node, num_pages - 1)
        node.ticket = next(_tickets)
        self._num_valid += 1
        heapq.heappush(self._heap, (self.rank.item(last), self.stamp.item(last), node.ticket, node))
        if len(self._heap) > 2 * self._num_valid + 64:
            self._heap[:] = [entry for entry in self._heap if entry[3].ticket == entry[2]]
            heapq.heapify(self._heap)

    def _unpark(self) -> None:
        if not self._parked:
            return
        nodes = list(self._parked)
        last = np.array([_page_at(node, node.num_pages - 1) for node in nodes], dtype=np.int32)
        for i in np.flatnonzero(~self._in_use(last)).tolist():
            self._push(nodes[i], nodes[i].num_pages)


def _page_at(node: Node, index: int) -> int:
    start = index * PAGE_ID_BYTES
    return int.from_bytes(node.pages[start : start + PAGE_ID_BYTES], sys.byteorder)
