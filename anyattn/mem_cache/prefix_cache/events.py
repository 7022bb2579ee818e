"""What a prefix cache tells routers, so that they know which prompt finds its prefix where: blocks stored and removed.

The fields are those of vLLM's KV cache events (vllm/distributed/kv_events.py); a block is a page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from anyattn.lazy import lazy_import
from anyattn.mem_cache.handles import array
from anyattn.mem_cache.prefix_cache.radix_tree import HASH_BYTES, TOKEN_BYTES, Node, Root

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

Medium = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks that follow each other are now in a medium.

    block_hashes: as `block_hashes` computes them. parent_block_hash: of the block before them, None at the beginning.
    token_ids: of all these blocks, `block_size` for each.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_key: Hashable
    medium: Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that are in a medium no longer."""

    block_hashes: tuple[bytes, ...]
    medium: Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing is cached any more, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def block_hashes(tokens: Any, page_size: int, extra_key: Hashable = None) -> list[bytes]:
    """The hash of each whole page of a prompt, which stands for all tokens up to the page's end.

    The same in every process and on every machine: BLAKE2b of 16 bytes over the hash before it and the page's tokens as
    little-endian int32; before the first page, over repr(extra_key) in UTF-8.
    """
    ids = array("tokens", tokens)
    ids = ids[: len(ids) // page_size * page_size].astype("<i4")
    hashes = _chain(_seed(extra_key), ids.tobytes(), page_size * TOKEN_BYTES)
    return list(_divided(hashes))


class EventLog:
    """Collects events. Hashes are kept in the nodes, so that each page is hashed once."""

    def __init__(self, page_size: int) -> None:
        self.events: list[Event] = []
        self._page_size = page_size

    def seed(self, extra_key: Hashable) -> bytes:
        """What the first page's hash goes on from."""
        return _seed(extra_key)

    def hashes(self, parent: bytes, tokens: bytes) -> bytes:
        """Hashes of pages that follow those of `parent`, joined."""
        return _chain(parent[-HASH_BYTES:], tokens, self._page_size * TOKEN_BYTES)

    def stored(self, node: Node, first_page: int = 0) -> None:
        """A node's pages from the first one on are in the node's tier now."""
        parent, root = node.parent, node.parent
        assert parent is not None
        while root is not None and not isinstance(root, Root):
            root = root.parent
        assert root is not None
        before = node.hashes[: first_page * HASH_BYTES] or (b"" if parent is root else parent.hashes)
        tokens = np.frombuffer(node.tokens, dtype="<i4")[first_page * self._page_size :]
        self.events.append(
            BlockStored(
                block_hashes=_divided(node.hashes[first_page * HASH_BYTES :]),
                parent_block_hash=before[-HASH_BYTES:] or None,
                token_ids=tuple(tokens.tolist()),
                block_size=self._page_size,
                extra_key=root.extra_key,
                medium=_medium(node.in_host),
            )
        )

    def removed(self, hashes: bytes, *, from_host: bool) -> None:
        """Pages with these hashes, joined, are no longer in a tier."""
        self.events.append(BlockRemoved(block_hashes=_divided(hashes), medium=_medium(from_host)))


def _medium(in_host: bool) -> Medium:
    return "host" if in_host else "device"


def _divided(hashes: bytes) -> tuple[bytes, ...]:
    return tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))


def _seed(extra_key: Hashable) -> bytes:
    return hashlib.blake2b(repr(extra_key).encode(), digest_size=HASH_BYTES).digest()


def _chain(parent: bytes, tokens: bytes, page_bytes: int) -> bytes:
    hashes = []
    for start in range(0, len(tokens), page_bytes):
        parent = hashlib.blake2b(parent + tokens[start : start + page_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return b"".join(hashes)
