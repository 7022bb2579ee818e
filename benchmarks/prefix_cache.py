"""Match and insert of a 4096-token prompt in a full prefix cache: `python benchmarks/prefix_cache.py [--json FILE]`.

Beside it, in the same run and with the same prompts, a cache as engines' block-hash caches work, written with the
standard library only: a dict of chained hashes, `hash((parent's hash, the page's tokens)) -> page`. It does the least
that such a cache can do: no verification of the tokens behind a hash, no record of when a page was used, no checks of
what it is given, no locks. Ours does all of that.

A prompt is an int32 array, and its 256 pages of 16 tokens are an int32 array, or a list of integers for the dict. Every
measured prompt is fresh: its own array, its own tokens behind what it shares. Insert puts 256 pages into the cache of
which, by shape, none or some are there already; what it put there is evicted again, unmeasured.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.prefix_cache import PrefixCache

PAGE_SIZE = 16
PROMPT_PAGES = 256
LIMIT_US = 50.0

rng = np.random.default_rng()


class WrongResult(Exception):
    """A cache did not do what is measured."""


def require(condition: bool, what: str) -> None:
    """Raises WrongResult."""
    if not condition:
        raise WrongResult(what)


class ChainedHashCache:
    """Pages by the chained hash of the tokens up to their ends."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}

    def match(self, tokens: Any) -> list[int]:
        """Pages of the longest cached prefix."""
        data, size, pages, found, chained = tokens.tobytes(), 4 * PAGE_SIZE, self.pages, [], 0
        for start in range(0, len(data) - size + 1, size):
            chained = hash((chained, data[start : start + size]))
            page = pages.get(chained)
            if page is None:
                break
            found.append(page)
        return found

    def insert(self, tokens: Any, new_pages: list[int]) -> None:
        """Enters the pages of all whole pages of tokens that are not there yet."""
        data, size, pages, chained, start = tokens.tobytes(), 4 * PAGE_SIZE, self.pages, 0, 0
        for page in new_pages:
            chained = hash((chained, data[start : start + size]))
            start += size
            if chained not in pages:
                pages[chained] = page

    def remove(self, tokens: Any, kept: int) -> None:
        """Forgets the pages of a prompt behind the first `kept` ones."""
        data, size, chained = tokens.tobytes(), 4 * PAGE_SIZE, 0
        for i, start in enumerate(range(0, len(data) - size + 1, size)):
            chained = hash((chained, data[start : start + size]))
            if i >= kept:
                self.pages.pop(chained, None)


def fresh(num_pages: int) -> Any:
    """Tokens of so many pages that no other prompt has."""
    return rng.integers(0, 128_000, num_pages * PAGE_SIZE, dtype=np.int32)


Shape = Callable[[int], Iterator[tuple[Any, int]]]
"""Gives prompts to fill a cache of so many pages with, and how many pages of each are cached before it is."""


def nothing_shared(num_pages: int) -> Iterator[tuple[Any, int]]:
    """Prompts of 256 pages with nothing in common."""
    for _ in range(num_pages // PROMPT_PAGES):
        yield fresh(PROMPT_PAGES), 0


def system_prompts(num_pages: int) -> Iterator[tuple[Any, int]]:
    """Prompts of 256 pages, each behind one of 8 system prompts of 64 pages."""
    systems, begun = [fresh(64) for _ in range(8)], set()
    while num_pages >= PROMPT_PAGES:
        i = int(rng.integers(8))
        shared = 64 if i in begun else 0
        begun.add(i)
        yield np.concatenate([systems[i], fresh(PROMPT_PAGES - 64)]), shared
        num_pages -= PROMPT_PAGES - shared


def growing_conversations(num_pages: int) -> Iterator[tuple[Any, int]]:
    """Conversations that grow to 256 pages in turns of one page, inserted after every turn."""
    for _ in range(num_pages // PROMPT_PAGES):
        tokens = fresh(PROMPT_PAGES)
        for pages in range(1, PROMPT_PAGES + 1):
            yield tokens[: pages * PAGE_SIZE], pages - 1


def regenerated_conversations(num_pages: int) -> Iterator[tuple[Any, int]]:
    """Conversations of 256 pages in turns of 4 pages, each of which was answered twice: a branch at every turn."""
    while num_pages >= PROMPT_PAGES + PROMPT_PAGES // 4:
        tokens = fresh(PROMPT_PAGES)
        for pages in range(4, PROMPT_PAGES + 1, 4):
            yield np.concatenate([tokens[: (pages - 1) * PAGE_SIZE], fresh(1)]), pages - 4
            yield tokens[: pages * PAGE_SIZE], pages - 1
        num_pages -= PROMPT_PAGES + PROMPT_PAGES // 4


def branch_at_every_page(num_pages: int) -> Iterator[tuple[Any, int]]:
    """The worst tree there is: prompts of 256 pages, at each page of which another one branches off."""
    while num_pages >= 2 * PROMPT_PAGES:
        tokens = fresh(PROMPT_PAGES)
        yield tokens, 0
        for pages in range(1, PROMPT_PAGES):
            yield np.concatenate([tokens[: pages * PAGE_SIZE], fresh(1)]), pages
        num_pages -= 2 * PROMPT_PAGES


SHAPES: tuple[tuple[Shape, int], ...] = (
    (nothing_shared, 0),
    (system_prompts, 64),
    (growing_conversations, 192),
    (regenerated_conversations, 192),
    (branch_at_every_page, 128),
)
"""With each: how many pages of a measured insert's prompt are cached."""


class Rig:
    """Both caches with the same prompts."""

    def __init__(self, shape: Shape, num_pages: int, policy: Any) -> None:
        self.table = PageTable(PagedAllocator(num_pages + 2 * PROMPT_PAGES, PAGE_SIZE), PAGE_SIZE)
        self.ours = PrefixCache(self.table, policy=policy)
        self.chained = ChainedHashCache()
        prompts = []
        for tokens, shared in shape(num_pages):
            pages = self.insert(tokens, shared)[0]
            self.table.release(pages)
            if tokens.size == PROMPT_PAGES * PAGE_SIZE:
                prompts.append(tokens)
        self.prompts = prompts
        self.ours.check()

    def pages_for(self, tokens: Any, shared: int) -> Any:
        """Pages as a sequence of these tokens would have them: what is cached, then its own."""
        own = self.table.take(tokens.size // PAGE_SIZE - shared)
        return np.concatenate([self.ours.match(tokens[: shared * PAGE_SIZE]).pages, own]), own

    def insert(self, tokens: Any, shared: int) -> tuple[Any, float, float]:
        """The pages that were taken for it, and how long each insert took, in us."""
        pages, own = self.pages_for(tokens, shared)
        listed = pages.tolist()
        start = time.perf_counter_ns()
        cached = self.ours.insert(tokens, pages)
        between = time.perf_counter_ns()
        self.chained.insert(tokens, listed)
        end = time.perf_counter_ns()
        require(cached == shared * PAGE_SIZE, f"{cached} tokens were cached, not {shared * PAGE_SIZE}")
        return own, (between - start) / 1e3, (end - between) / 1e3

    def measured_match(self) -> tuple[float, float]:
        """All 256 pages of a prompt are found."""
        tokens = self.prompts[rng.integers(len(self.prompts))].copy()
        start = time.perf_counter_ns()
        match = self.ours.match(tokens)
        between = time.perf_counter_ns()
        pages = self.chained.match(tokens)
        end = time.perf_counter_ns()
        require(match.pages.tolist() == pages, "the two caches find different pages")
        require(len(pages) == PROMPT_PAGES, f"{len(pages)} pages of {PROMPT_PAGES} were found")
        return (between - start) / 1e3, (end - between) / 1e3

    def measured_insert(self, shared: int) -> tuple[float, float]:
        """A prompt of which so many pages are cached is inserted, and its own pages leave again."""
        known = self.prompts[rng.integers(len(self.prompts))][: shared * PAGE_SIZE]
        tokens = np.concatenate([known, fresh(PROMPT_PAGES - shared)])
        own, ours, chained = self.insert(tokens, shared)
        self.table.release(own)
        self.forget(tokens, own)
        self.chained.remove(tokens, shared)
        return ours, chained

    def forget(self, tokens: Any, own: Any) -> None:
        """Evicts what was inserted last, though it is what eviction by use would take last."""
        queue = self.ours._cached.queue
        queue.rank[own] = queue.stamp[own] = -1
        queue.add(self.ours._cached.tree.walk(None, tokens.tobytes())[0][-1])
        evicted = self.ours.evict(own.size)
        require(evicted == own.size, f"{evicted} pages were evicted, not the {own.size} that were inserted")


def measured(shape: Shape, shared: int, policy: str, num_pages: int, repeats: int) -> list[dict[str, Any]]:
    """Medians of one tree shape."""
    rig = Rig(shape, num_pages, policy)
    nodes = sum(1 for _ in rig.ours._cached.tree.nodes())
    rows = []
    for what, action in (("match", rig.measured_match), ("insert", lambda: rig.measured_insert(shared))):
        gc.collect()
        gc.disable()
        times = [action() for _ in range(repeats)][repeats // 10 :]
        gc.enable()
        ours, chained = (statistics.median(column) for column in zip(*times, strict=True))
        within = ours <= LIMIT_US and ours <= 2 * chained
        rows.append({
            "shape": shape.__name__, "policy": policy, "what": what, "ours_us": round(ours, 2),
            "chained_hash_us": round(chained, 2), "ratio": round(ours / chained, 3), "pages": rig.ours.num_pages,
            "nodes": nodes, "cached_pages": PROMPT_PAGES if what == "match" else shared,
            "ours_90th_percentile_us": round(statistics.quantiles([time for time, _ in times], n=10)[-1], 2),
            "within": "yes" if within else "no",
        })  # fmt: skip
    return rows


def main() -> int:
    """Prints one row a tree shape and action; the exit code is 1 when one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and without limits: to see that it runs")
    parser.add_argument("--pages", type=int, help="pages that the cache holds (100000)")
    parser.add_argument("--repeats", type=int, help="fresh prompts for each figure (400)")
    parser.add_argument("--policies", nargs="+", default=["lru", "lfu"], choices=["lru", "lfu", "priority"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    num_pages = options.pages or (2_000 if options.quick else 100_000)
    repeats = options.repeats or (20 if options.quick else 400)
    if num_pages < 2 * PROMPT_PAGES or repeats < 10:
        parser.error(f"at least {2 * PROMPT_PAGES} pages and 10 repeats are needed")
    print(f"{PROMPT_PAGES} pages of {PAGE_SIZE} tokens in {num_pages} pages; Python {platform.python_version()}, "
          f"numpy {np.__version__}, {platform.processor() or platform.machine()}")  # fmt: skip
    head = ("shape", "policy", "nodes", "what", "cached", "ours, us", "90th pct.", "chained, us", "ratio", "within")
    widths = (26, 9, 7, 7, 7, 9, 10, 12, 6, 7)
    print("".join(f"{name:>{width}}" for name, width in zip(head, widths, strict=True)))
    rows = []
    for shape, shared in SHAPES:
        for policy in options.policies:
            for row in measured(shape, shared, policy, num_pages, repeats):
                rows.append(row)
                cells = [row[key] for key in ("shape", "policy", "nodes", "what", "cached_pages", "ours_us",
                         "ours_90th_percentile_us", "chained_hash_us", "ratio", "within")]  # fmt: skip
                print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)
    print(f"within: at most {LIMIT_US:.0f} us and twice the chained hash cache")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "limit_us": LIMIT_US}, indent=1))
    return int(not options.quick and any(row["within"] == "no" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
