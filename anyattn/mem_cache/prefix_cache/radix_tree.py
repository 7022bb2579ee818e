"""The prefix cache's radix tree, with pages of tokens on its edges, as bytes. Structure alone: it holds no page."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

PAGE_ID_BYTES = 4
TOKEN_BYTES = 4
HASH_BYTES = 16


class Node:
    """A run of pages that nothing branches off from, all of them in one tier.

    tokens: int32, little-endian, page after page. pages: int32 ids in the node's tier. hashes: HASH_BYTES for each
    page, or nothing where no events are wanted. All in bytes, which are compared, cut and joined at next to no cost.
    ticket: which of its entries in an eviction queue is valid, 0 for none.
    """

    __slots__ = ("children", "hashes", "in_host", "num_device_children", "pages", "parent", "ticket", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, pages: bytes, hashes: bytes, in_host: bool) -> None:
        self.parent = parent  # None for a root, and for a node that is no longer in the tree
        self.tokens = tokens
        self.pages = pages
        self.hashes = hashes
        self.in_host = in_host
        self.children: dict[bytes, Node] = {}  # by the tokens of the child's first page
        self.num_device_children = 0
        self.ticket = 0

    @property
    def num_pages(self) -> int:
        return len(self.pages) // PAGE_ID_BYTES


class Root(Node):
    """Where the prompts of one extra key begin; it has no pages. hashes: what the first page's hash goes on from."""

    __slots__ = ("extra_key",)

    def __init__(self, extra_key: Hashable, hashes: bytes) -> None:
        super().__init__(None, b"", b"", hashes, in_host=False)
        self.extra_key = extra_key


class RadixTree:
    """Trees of pages, one for each extra key, in the shortest form: no node could be one with its only child."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.roots: dict[Hashable, Root] = {}

    def nodes(self) -> Iterator[Node]:
        """Every node that has pages, parents first."""
        waiting = [child for root in self.roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def walk(self, extra_key: Hashable, tokens: bytes) -> tuple[list[Node], int, int]:
        """The nodes that whole pages of tokens lead through, how many pages that is, and how many of the last node."""
        path: list[Node] = []
        root = self.roots.get(extra_key)
        if root is None:
            return path, 0, 0
        page_bytes = self.page_bytes
        add = path.append
        children = root.children
        start = 0
        while True:
            end = start + page_bytes
            node = children.get(tokens[start:end])
            if node is None:
                return path, start // page_bytes, path[-1].num_pages if path else 0
            add(node)
            edge = node.tokens
            if len(edge) == page_bytes:  # the lookup has compared it already
                start = end
            elif tokens.startswith(edge, start):
                start += len(edge)
            else:
                common = self._common_pages(edge, tokens, start)
                return path, start // page_bytes + common, common
            children = node.children

    def _common_pages(self, edge: bytes, tokens: bytes, start: int) -> int:
        """Whole pages at the beginning of an edge that are those at `start`, where one at least is."""
        left = np.frombuffer(edge, dtype=np.int32)
        right = np.frombuffer(tokens, dtype=np.int32, offset=start)
        size = min(left.size, right.size)
        differ = left[:size] != right[:size]
        first = int(differ.argmax())
        return (first if differ[first] else size) * TOKEN_BYTES // self.page_bytes

    def add(self, parent: Node, tokens: bytes, pages: bytes, hashes: bytes) -> Node:
        """A new device node below `parent`, none of whose children begins with the same page."""
        node = Node(parent, tokens, pages, hashes, in_host=False)
        parent.children[tokens[: self.page_bytes]] = node
        parent.num_device_children += 1
        return node

    def split(self, node: Node, num_pages: int) -> Node:
        """Divides a node: the new one gets its first pages, and it keeps the rest, its children and its ticket."""
        tokens, pages, hashes = (num_pages * size for size in (self.page_bytes, PAGE_ID_BYTES, HASH_BYTES))
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[:tokens], node.pages[:pages], node.hashes[:hashes], node.in_host)
        parent.children[node.tokens[: self.page_bytes]] = upper
        node.tokens, node.pages, node.hashes = node.tokens[tokens:], node.pages[pages:], node.hashes[hashes:]
        node.parent = upper
        upper.children[node.tokens[: self.page_bytes]] = node
        upper.num_device_children = int(not node.in_host)
        return upper

    def cut(self, node: Node, num_pages: int) -> None:
        """Leaves a node without children its first pages; without any it leaves the tree, as an empty root does."""
        if num_pages:
            node.tokens = node.tokens[: num_pages * self.page_bytes]
            node.pages = node.pages[: num_pages * PAGE_ID_BYTES]
            node.hashes = node.hashes[: num_pages * HASH_BYTES]
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[: self.page_bytes]]
        parent.num_device_children -= not node.in_host
        node.parent = None
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.extra_key]

    def move(self, node: Node, pages: bytes, *, to_host: bool) -> None:
        """A node's pages are in the other tier now, under these ids."""
        assert node.parent is not None
        node.parent.num_device_children += -1 if to_host else 1
        node.in_host = to_host
        node.pages = pages

    def join(self, node: Node) -> None:
        """Makes a node one with its only child, which remains, where both are in one tier. No leaf ends by that."""
        parent = node.parent
        if parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.in_host != node.in_host:
            return
        parent.children[node.tokens[: self.page_bytes]] = child
        child.parent = parent
        child.tokens = node.tokens + child.tokens
        child.pages = node.pages + child.pages
        child.hashes = node.hashes + child.hashes
        node.parent = None
