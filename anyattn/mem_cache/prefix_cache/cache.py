"""The prefix cache: finds the pages of prompts that begin alike, keeps them, and gives up the least valuable ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.prefix_cache import books
from anyattn.mem_cache.prefix_cache.arguments import integer, is_extra_key, page_ids, token_bytes
from anyattn.mem_cache.prefix_cache.events import AllBlocksCleared, Event
from anyattn.mem_cache.prefix_cache.eviction import EvictionQueue
from anyattn.mem_cache.prefix_cache.pages import CachedPages
from anyattn.mem_cache.prefix_cache.radix_tree import Node

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.mem_cache.host_tier import PageTier
    from anyattn.mem_cache.indices import Int32s
    from anyattn.mem_cache.page_table import PageTable
else:
    np = lazy_import("numpy")

Policy = Literal["lru", "lfu", "priority"]
_POLICIES = ("lru", "lfu", "priority")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """What of a prompt is cached.

    num_tokens: tokens, in whole pages, that a sequence has on the device when it adopts `pages` (int32, full page ids).
    num_host_tokens: further ones that `PrefixCache.restore` would bring there.
    tokens, extra_key: what `restore` finds them by.
    """

    num_tokens: int
    pages: Int32s
    num_host_tokens: int = 0
    tokens: bytes = b""
    extra_key: Hashable = None


class PrefixCache:
    """Pages of the prompts that were inserted, in a radix tree. For one thread at a time.

    table: whose pages they are; the cache holds them (`PageTable.hold`) beside the sequences. What a sequence holds too
        is in use, and is never evicted. There are no other locks: adopt what `match` gave before pages are evicted.
    policy: what is evicted first. "lru": what was used longest ago. "lfu": what the fewest matches found, then as lru.
        "priority": what was inserted with the lowest priority, then as lru; the others take no notice of priorities. A
        page is used when a match returns it and when a prompt is inserted that begins with it. Pages are evicted one by
        one, from the ends of prompts.
    tiers: where evicted pages go (`PageTier`): one for the full pages, one for each of the table's windows. A page is
        in one tier at a time, and whatever leads to a page on the device is on the device.
    events: collect what routers want to know, see `take_events`.
    debug: prove the books after every change.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        policy: Policy = "lru",
        tiers: Sequence[PageTier] = (),
        events: bool = False,
        debug: bool = False,
    ) -> None:
        if policy not in _POLICIES:
            raise ContractError(f"policy must be one of {', '.join(_POLICIES)}, not {policy!r}.")
        self.table = table
        self.policy = policy
        self.page_size = table.page_size
        self._cached = CachedPages(table, tiers, events=events)
        self._clock = 0
        self._debug = debug

    @property
    def num_pages(self) -> int:
        """Pages that the cache holds on the device."""
        return self._cached.num_held_pages

    @property
    def num_host_pages(self) -> int:
        """Pages that it keeps in the host tier."""
        return self._cached.host.num_held_pages if self._cached.host else 0

    @property
    def num_evictable_pages(self) -> int:
        """Device pages that `evict` could free now. Walks the tree: to be asked now and then, not for every token."""
        return books.num_evictable_pages(self._cached)

    def match(self, tokens: Any, extra_key: Hashable = None, *, most_tokens: int | None = None) -> Match:
        """The longest cached prefix of a prompt, in whole pages, as far as windows allow (`PageTable.usable_prefix`).

        tokens: [num_tokens], int32 or int64 array, or a list. extra_key: what else must be the same, such as a LoRA id
        or a salt. most_tokens: match no more than so many, so that one is left to compute.
        """
        data = token_bytes(tokens, self.page_size, most_tokens)
        path, num_pages, _ = self._walk(extra_key, data)
        self._clock += 1
        if path and path[-1].in_host:
            return self._match_with_host(path, num_pages, data, extra_key)
        pages = _pages_of(path)[:num_pages]
        num_pages = self.table.usable_prefix(pages)
        pages = pages[:num_pages]
        self._use(self._cached.queue, pages)
        found = data[: num_pages * self._cached.tree.page_bytes]
        return Match(num_tokens=num_pages * self.page_size, pages=pages, tokens=found, extra_key=extra_key)

    def insert(self, tokens: Any, pages: Sequence[int] | Int32s, extra_key: Hashable = None, priority: int = 0) -> int:
        """Caches a sequence's whole pages, whose KV is stored, or will be before anyone reads what is inserted here.

        pages: [n], ids, of the first n * page_size tokens. priority: pages keep the highest they were inserted with.

        Returns how many tokens were on the device already. The pages of these stay the sequence's own, and are freed
        with it; the cache holds the others from now on. What was in the host tier alone is on the device again, and its
        host copy is freed. Where cached pages lack window pages that the sequence's have, the sequence's take their
        place, as nobody could begin with the cached ones.

        Raises ContractError, and changes nothing, for pages that are null, free, foreign, named twice, cached as those
        of other tokens, or more than the tokens fill.
        """
        cached = self._cached
        ids = page_ids(pages, self.table.allocator.num_pages)
        data = token_bytes(tokens, self.page_size, ids.size * self.page_size)
        page_bytes = cached.tree.page_bytes
        if len(data) < ids.size * page_bytes:
            raise ContractError(
                f"{ids.size} pages of {self.page_size} tokens given, and the tokens fill {len(data) // page_bytes}."
            )
        priority = integer("priority", priority) if self.policy == "priority" else 0
        path, num_pages, on_last = self._walk(extra_key, data)
        if not ids.size:
            return 0
        nodes = [node for node in path if not node.in_host]
        old = _pages_of(nodes)[:num_pages]
        new, own = ids[old.size :], ids[: old.size]
        places = ids.astype(np.intp)  # what numpy indexes with: it would convert ids each time
        if np.count_nonzero(cached.held[places[old.size :]]):
            raise ContractError(f"page {new[cached.held[new]][0]} is cached already, as that of other tokens.")
        better = self._better(old, own)
        self.table.hold(np.concatenate([new, own[better]]) if better.size else new)
        if better.size:
            replaced, old = old, old.copy()
            old[better] = own[better]
            cached.replace(nodes, replaced, old)
        cached.hold(places[old.size :])
        places[: old.size] = old
        rank, stamp = cached.queue.rank, cached.queue.stamp
        rank[places[old.size :]] = priority
        if num_pages > old.size:
            path = [cached.bring(path, on_last, ids[old.size : num_pages])]
            on_last = path[0].num_pages
        self._clock += 1
        stamp[places] = self._clock
        if self.policy == "priority":
            rank[places] = np.maximum(rank[places], priority)
        if num_pages < ids.size:
            cached.grow(extra_key, path[-1] if path else None, on_last, data[num_pages * page_bytes :], ids[num_pages:])
        self._changed()
        return int(old.size) * self.page_size

    def evict(self, num_pages: int, window_pages: Sequence[int] | None = None) -> int:
        """Frees so many full pages at least, or as many as are not in use, the least valuable first.

        window_pages: so many pages of each of the table's windows, too. With tiers, what is evicted is copied to the
        host in the order of the current stream, and the least valuable pages there make room. What a tier cannot take
        (StorageError, of which a warning tells) is dropped.

        Returns how many full pages became free.
        """
        windows = self.table.windows
        if window_pages is None:
            window_pages = [0] * len(windows)
        wanted = [integer("a number of pages", count) for count in (num_pages, *window_pages)]
        if min(wanted) < 0 or len(wanted) != 1 + len(windows):
            raise ContractError(f"evict takes a number of pages, and one for each of {len(windows)} windows: {wanted}.")
        freed = self._cached.give_up(self._cached.select(wanted), to_host=True)
        self._changed()
        return freed

    def restore(self, match: Match) -> Match:
        """Brings what a match found in the host tier back to the device, in the order of the current stream.

        Where pages are short, others are evicted, never what the match holds. The host copies are freed. What was
        evicted since the match was made is brought back as well, and what was dropped since is missing.

        Raises OutOfPagesError, and changes nothing, where too few pages could be evicted.
        """
        cached, host = self._cached, self._cached.host
        path, num_pages, _ = self._walk(match.extra_key, match.tokens)
        pages = _pages_of([node for node in path if not node.in_host])[:num_pages]
        host_pages = _pages_of([node for node in path if node.in_host])[: num_pages - pages.size]
        if host_pages.size and host:
            in_windows = host.in_windows(host_pages)
            self.table.hold(pages)
            host.pinned[host_pages] = True
            try:
                cached.make_room(host_pages.size, [int(np.count_nonzero(there)) for there in in_windows])
                loaded = self.table.take(host_pages.size, in_windows)
                try:
                    host.load(host_pages, loaded)
                except BaseException:
                    self.table.release(loaded)
                    raise
            finally:
                host.pinned[host_pages] = False
                self.table.release(pages)
            cached.hold(loaded.astype(np.intp))
            path, _, on_last = self._walk(match.extra_key, match.tokens)  # making room may have divided or joined nodes
            cached.bring(path, on_last, loaded)
            pages = np.concatenate([pages, loaded])
            self._changed()
        usable = self.table.usable_prefix(pages)
        found = match.tokens[: usable * cached.tree.page_bytes]
        return Match(
            num_tokens=usable * self.page_size, pages=pages[:usable], tokens=found, extra_key=match.extra_key
        )

    def clear(self, *, in_use: bool = False) -> int:
        """Forgets everything that is not in use, in both tiers. Returns how many full pages became free.

        in_use: forget what sequences hold too, as is right when the model's weights changed; they keep their pages.
        """
        cached = self._cached
        anything = self.num_pages + self.num_host_pages > 0
        num_events = len(cached.log.events) if cached.log else 0
        freed = cached.clear(in_use=in_use)
        if cached.log and anything and not cached.tree.roots:
            cached.log.events[num_events:] = [AllBlocksCleared()]
        self._changed()
        return freed

    def take_events(self) -> list[Event]:
        """What happened since the last call, oldest first. A router that applies all events knows what is cached.

        Raises ContractError where no events are collected.
        """
        if not self._cached.log:
            raise ContractError("this cache collects no events: create it with events=True.")
        events, self._cached.log.events = self._cached.log.events, []
        return events

    def check(self) -> None:
        """Proves the books of tree, queues and tiers. Raises ContractError."""
        books.check(self._cached)

    def _match_with_host(self, path: list[Node], num_pages: int, data: bytes, extra_key: Hashable) -> Match:
        host = self._cached.host
        assert host is not None
        pages = _pages_of([node for node in path if not node.in_host])
        host_pages = _pages_of([node for node in path if node.in_host])[: num_pages - pages.size]
        usable = self.table.usable_prefix(pages)
        restored = max(host.usable_prefix(pages, host_pages), usable)
        self._use(self._cached.queue, pages[:restored])
        self._use(host.queue, host_pages[: max(restored - pages.size, 0)])
        return Match(
            num_tokens=usable * self.page_size,
            pages=pages[:usable],
            num_host_tokens=(restored - usable) * self.page_size,
            tokens=data[: restored * self._cached.tree.page_bytes],
            extra_key=extra_key,
        )

    def _use(self, queue: EvictionQueue, pages: Int32s) -> None:
        places = pages.astype(np.intp)
        queue.stamp[places] = self._clock
        if self.policy == "lfu":
            queue.rank[places] += 1

    def _walk(self, extra_key: Hashable, data: bytes) -> tuple[list[Node], int, int]:
        if not is_extra_key(extra_key):
            raise ContractError(
                "an extra key must be None, an int, a str, bytes or a tuple of such, as none of these equals one of "
                f"another type and all read the same in every process; not {extra_key!r}."
            )
        return self._cached.tree.walk(extra_key, data)

    def _better(self, old: Int32s, own: Int32s) -> npt.NDArray[np.intp]:
        """Where a sequence's pages have pages of windows that the cached ones lack, and lack none that these have."""
        if not self.table.windows:
            return np.zeros(0, dtype=np.intp)
        more = np.zeros(old.size, dtype=np.bool_)
        fewer = self._cached.held[own]
        for window in self.table.windows:
            there, offered = window.page_of[old] != 0, window.page_of[own] != 0
            more |= offered & ~there
            fewer |= there & ~offered
        return np.flatnonzero(more & ~fewer)

    def _changed(self) -> None:
        if self._debug:
            self.check()


def _pages_of(nodes: list[Node]) -> Int32s:
    """The pages of nodes, one after the other, in an array of its own."""
    return np.frombuffer(bytearray().join([node.pages for node in nodes]), dtype=np.int32)
