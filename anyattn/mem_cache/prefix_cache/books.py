"""Proofs over all that a prefix cache holds, and what of it can be evicted: walks through the whole tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.prefix_cache.radix_tree import HASH_BYTES, Node, Root

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.indices import Int32s
    from anyattn.mem_cache.prefix_cache.pages import CachedPages
else:
    np = lazy_import("numpy")


def num_evictable_pages(cached: CachedPages) -> int:
    """Device pages that neither are in use nor lead to one that is."""
    nodes = [node for node in cached.tree.nodes() if not node.in_host]
    pages = _pages_of(nodes, in_host=False)
    used = np.flatnonzero(cached.in_use(pages))
    starts = np.cumsum([0] + [node.num_pages for node in nodes])
    stays: dict[Node, int] = {}  # of each node that leads to pages in use: how many of its pages do
    for place, index in zip(used.tolist(), (np.searchsorted(starts, used, side="right") - 1).tolist(), strict=True):
        node: Node | None = nodes[index]
        count = place - int(starts[index]) + 1
        while node is not None and stays.get(node, 0) < count:
            stays[node] = count
            node = node.parent
            count = node.num_pages if node else 0
    return int(pages.size) - sum(stays.values())


def check(cached: CachedPages) -> None:
    """Raises ContractError for the first thing that is wrong with a prefix cache's books."""
    nodes = list(cached.tree.nodes())
    for root in cached.tree.roots.values():
        _require(bool(root.children), "a root without pages is kept.")
        _check_children(cached, root)
    for node in nodes:
        _check_node(cached, node)
        _check_children(cached, node)
    tiers = [(cached.queue, _pages_of(nodes, in_host=False), cached.num_held_pages)]
    if cached.host:
        tiers.append((cached.host.queue, _pages_of(nodes, in_host=True), cached.host.num_held_pages))
    for queue, pages, num_pages in tiers:
        _require(np.unique(pages).size == pages.size, "a page is in the tree twice.")
        _require(pages.size == num_pages, f"{pages.size} pages of a tier are in the tree, and {num_pages} are counted.")
        _require(pages.size == 0 or 0 < pages.min() <= pages.max() < queue.rank.size, "a page is not of its tier.")
    pages = tiers[0][1]
    held = np.flatnonzero(cached.held)
    _require(np.array_equal(held, np.sort(pages)), "what is marked as held is not what is in the tree.")
    _require(bool((cached.table.allocator.ref_counts(pages) >= 1).all()), "a page in the tree is free.")
    if cached.host:
        _require(not cached.host.pinned.any(), "a host page is still marked as about to be loaded.")
        for of_window in cached.host.window_pages:
            _require(not np.delete(of_window, tiers[1][1]).any(), "a host page of a window is kept for no full page.")
            taken = of_window[of_window != 0]
            _require(np.unique(taken).size == taken.size, "a host page of a window is named twice.")
    cached.queue.check([node for node in nodes if not node.in_host and not node.num_device_children])
    if cached.host:
        cached.host.queue.check([node for node in nodes if node.in_host and not node.children])


def _check_node(cached: CachedPages, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    _require(node.num_pages > 0, "a node has no pages.")
    _require(len(node.tokens) == node.num_pages * cached.tree.page_bytes, "a node's tokens do not fill its pages.")
    _require(not (parent.in_host and not node.in_host), "a device page comes after a host page.")
    if len(parent.children) == 1 and not isinstance(parent, Root):
        _require(parent.in_host != node.in_host, "two nodes could be one.")
    if cached.log:
        before = parent.hashes[-HASH_BYTES:]
        _require(node.hashes == cached.log.hashes(before, node.tokens), "a node's hashes are not those of its tokens.")
    values = _values(cached, node)
    if parent.pages:
        values = np.concatenate([_values(cached, parent)[:, -1:], values], axis=1)
    _require(not (np.diff(values) > 0).any(), "a page is worth more than one that leads to it.")


def _values(cached: CachedPages, node: Node) -> npt.NDArray[np.int64]:
    """Rank and stamp of a node's pages: [2, num_pages]."""
    queue = cached.host.queue if cached.host and node.in_host else cached.queue
    pages = _pages_of([node], in_host=node.in_host)
    return np.stack([queue.rank[pages], queue.stamp[pages]])


def _pages_of(nodes: list[Node], *, in_host: bool) -> Int32s:
    return np.frombuffer(b"".join([node.pages for node in nodes if node.in_host == in_host]), dtype=np.int32)


def _check_children(cached: CachedPages, node: Node) -> None:
    for key, child in node.children.items():
        _require(child.parent is node, "a node does not know its parent.")
        _require(child.tokens[: cached.tree.page_bytes] == key, "a node is found by other tokens than its own.")
    on_device = sum(not child.in_host for child in node.children.values())
    _require(on_device == node.num_device_children, "a node's children on the device are not as many as it counts.")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractError(otherwise)
