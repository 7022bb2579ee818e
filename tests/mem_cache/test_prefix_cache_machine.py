"""The prefix cache against a plain Python model: what is found, what goes first, what moves to the host and back.

Pages hold the tokens that lead to them instead of KV, so that a page that was mixed up is seen when it is found.
"""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anyattn.errors import OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.prefix_cache import PrefixCache
from anyattn.mem_cache.prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, block_hashes
from anyattn.mem_cache.windows import WindowPages


class DictTier:
    """A host tier that keeps what the entries of a list, the device's pages, held."""

    def __init__(self, device, num_pages, seed):
        self.device, self.num_pages, self.kept = device, num_pages, {}
        self.free_ids = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self.free_ids)

    @property
    def num_free_pages(self):
        return len(self.free_ids)

    def save(self, pages):
        if np.count_nonzero(pages) > len(self.free_ids):
            raise OutOfPagesError(np.count_nonzero(pages), len(self.free_ids), self.num_pages)
        ids = [self.free_ids.pop() if page else 0 for page in pages.tolist()]
        self.kept |= {i: self.device[page] for i, page in zip(ids, pages.tolist(), strict=True) if i}
        return np.array(ids, dtype=np.int32)

    def load(self, host_pages, pages):
        for i, page in zip(host_pages.tolist(), pages.tolist(), strict=True):
            assert (i == 0) == (page == 0)
            if i:
                self.device[page] = self.kept[i]

    def free(self, host_pages):
        for i in host_pages.tolist():
            if i:
                del self.kept[i]
                self.free_ids.append(i)


class Router:
    """Knows what is cached from events alone."""

    def __init__(self):
        self.media = {"device": set(), "host": set()}

    def apply(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.__init__()
            elif isinstance(event, BlockRemoved):
                assert self.media[event.medium] >= set(event.block_hashes)
                self.media[event.medium] -= set(event.block_hashes)
            else:
                assert isinstance(event, BlockStored)
                known = self.media["device"] | self.media["host"]
                assert event.parent_block_hash is None or event.parent_block_hash in known
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                if event.parent_block_hash is None:
                    assert event.block_hashes == tuple(
                        block_hashes(event.token_ids, event.block_size, event.extra_key)
                    )
                assert not self.media[event.medium] & set(event.block_hashes)
                self.media[event.medium] |= set(event.block_hashes)


class Entry:
    def __init__(self, page, rank=0):
        self.page, self.rank, self.stamp, self.host_windows = page, rank, 0, None

    @property
    def in_host(self):
        return self.host_windows is not None


class PrefixCacheMachine(RuleBasedStateMachine):
    """Keys of the model are (extra key, all tokens up to a page's end)."""

    @initialize(
        page_size=st.sampled_from([1, 3, 16]),
        policy=st.sampled_from(["lru", "lfu", "priority"]),
        num_pages=st.integers(8, 24),
        windows=st.sampled_from([(4,), (), (1,), (20, 2), (40,), ()]),
        tier_pages=st.sampled_from([5, None, 1, 30]),
        seed=st.integers(0, 2**16),
    )
    def begin(self, page_size, policy, num_pages, windows, tier_pages, seed):
        self.page_size, self.policy = page_size, policy
        pages = [num_pages, *(max(num_pages * 2 // 3, 1) for _ in windows)]
        self.windows = [
            WindowPages(window, PagedAllocator(count, page_size), num_pages=num_pages, page_size=page_size)
            for window, count in zip(windows, pages[1:], strict=True)
        ]
        allocator = PagedAllocator(num_pages, page_size, debug=True)
        self.table = PageTable(allocator, page_size, windows=self.windows, debug=True)
        self.memory = [[None] * (count + 1) for count in pages]
        tiers = []
        if tier_pages:
            tiers = [DictTier(memory, max(tier_pages - i, 1), seed) for i, memory in enumerate(self.memory)]
        self.tiers = tiers
        self.cache = PrefixCache(self.table, policy=policy, tiers=tiers, events=True, debug=True)
        self.router = Router()
        self.clock = 0
        self.entries = {}
        self.seqs = []  # (handle, extra key, tokens)

    # What the model says

    def keys(self, extra_key, tokens):
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(extra_key, tuple(tokens[:end])) for end in ends]

    def path(self, extra_key, tokens):
        path = []
        for key in self.keys(extra_key, tokens):
            if key not in self.entries:
                break
            path.append(key)
        return path

    def parent(self, key):
        return key[0], key[1][: -self.page_size]

    def has_window(self, i, key):
        entry = self.entries[key]
        return entry.host_windows[i] if entry.in_host else self.windows[i].page_of[entry.page] != 0

    def usable(self, path):
        for count in range(len(path), -1, -1):
            if all(
                self.has_window(i, path[j])
                for i, window in enumerate(self.windows)
                for j in range(max(count * self.page_size - window.window + 1, 0) // self.page_size, count)
            ):
                return count
        raise AssertionError

    def use(self, keys):
        for key in keys:
            self.entries[key].stamp = self.clock
            if self.policy == "lfu":
                self.entries[key].rank += 1

    def first_to_go(self, in_host, gone, stays):
        left = [key for key, entry in self.entries.items() if key not in gone and (in_host or not entry.in_host)]
        parents = {self.parent(key) for key in left}
        candidates = [
            key
            for key, entry in self.entries.items()
            if entry.in_host == in_host and key not in gone and key not in parents and key not in stays
        ]
        return min(candidates, key=lambda key: (self.entries[key].rank, self.entries[key].stamp), default=None)

    def victims(self, wanted, in_host=False, stays=()):
        used = {page for seq, _, _ in self.seqs for page in self.table.pages(seq).tolist()}
        stays = set(stays) | {key for key, entry in self.entries.items() if not entry.in_host and entry.page in used}
        wanted, victims = list(wanted), []
        while max(wanted) > 0:
            key = self.first_to_go(in_host, set(victims), stays)
            if key is None:
                break
            victims.append(key)
            wanted[0] -= 1
            for i in range(len(self.windows)):
                wanted[1 + i] -= bool(self.has_window(i, key))
        return victims

    def needs(self, keys):
        return [len(keys), *(sum(bool(self.has_window(i, key)) for key in keys) for i in range(len(self.windows)))]

    def give_up(self, victims, stays=(), to_host=True):
        saved = []
        if self.tiers and to_host:
            taken = self.needs([key for key, entry in self.entries.items() if entry.in_host])
            room = [tier.num_pages - count for tier, count in zip(self.tiers, taken, strict=True)]
            missing = [need - free for need, free in zip(self.needs(victims), room, strict=True)]
            dropped = self.victims(missing, in_host=True, stays=stays)
            room = [free + count for free, count in zip(room, self.needs(dropped), strict=True)]
            for key in dropped:
                del self.entries[key]
            for start in range(len(victims) + 1):
                saved = victims[start:]
                if all(need <= free for need, free in zip(self.needs(saved), room, strict=True)):
                    break
        for key in victims:
            if key in saved:
                self.entries[key].host_windows = [self.has_window(i, key) for i in range(len(self.windows))]
            else:
                del self.entries[key]

    def cached(self):
        """What the cache's tree holds: {key: (in host, page)}."""
        found = {}
        roots = self.cache._cached.tree.roots.values()
        waiting = [(root, (), node) for root in roots for node in root.children.values()]
        while waiting:
            root, before, node = waiting.pop()
            tokens = np.frombuffer(node.tokens, dtype=np.int32).tolist()
            for i, page in enumerate(np.frombuffer(node.pages, dtype=np.int32).tolist()):
                key = (root.extra_key, (*before, *tokens[: (i + 1) * self.page_size]))
                found[key] = (node.in_host, page)
            waiting.extend((root, (*before, *tokens), child) for child in node.children.values())
        return found

    # What is done to both

    def evict(self, wanted):
        victims = self.victims(wanted)
        self.give_up(victims)
        assert self.cache.evict(wanted[0], wanted[1:]) == len(victims)

    def match(self, tokens, extra_key, most_tokens=None):
        limit = len(tokens) if most_tokens is None else most_tokens
        path = self.path(extra_key, tokens[:limit])
        device = [key for key in path if not self.entries[key].in_host]
        usable = self.usable(device)
        restored = max(self.usable(path), usable)
        match = self.cache.match(tokens, extra_key, most_tokens=most_tokens)
        assert match.pages.dtype == np.int32
        assert match.pages.tolist() == [self.entries[key].page for key in device[:usable]]
        assert match.num_tokens == usable * self.page_size
        assert match.num_host_tokens == (restored - usable) * self.page_size
        self.clock += 1
        self.use(path[:restored])
        self.check_contents(device[:usable])
        return match

    def check_contents(self, path):
        """The pages of a prefix, and those of windows that its next token sees, hold what leads to them."""
        for j, key in enumerate(path):
            page = self.entries[key].page
            assert self.memory[0][page] == key
            for window, memory in zip(self.windows, self.memory[1:], strict=True):
                if j >= max(len(path) * self.page_size - window.window + 1, 0) // self.page_size:
                    assert memory[window.page_of[page]] == key

    def restore(self, tokens, extra_key, match):
        end = match.num_tokens + match.num_host_tokens
        path = self.path(extra_key, list(tokens)[:end])
        host = [key for key in path if self.entries[key].in_host]
        allocators = [self.table.allocator, *(window.allocator for window in self.windows)]
        missing = [need - a.num_free_pages for need, a in zip(self.needs(host), allocators, strict=True)]
        victims = self.victims(missing, stays=path)
        if any(found < wanted for found, wanted in zip(self.needs(victims), missing, strict=True)):
            before = self.cached()
            try:
                self.cache.restore(match)
            except OutOfPagesError:
                assert self.cached() == before
                return None
            raise AssertionError("restored without room")
        self.give_up(victims, stays=path)
        match = self.cache.restore(match)
        found = self.cached()
        for key in host:
            self.entries[key].host_windows = None
            self.entries[key].page = found[key][1]
        usable = self.usable(path)
        assert (match.num_tokens, match.num_host_tokens) == (usable * self.page_size, 0)
        assert match.pages.tolist() == [self.entries[key].page for key in path[:usable]]
        self.check_contents(path[:usable])
        return match

    def extend(self, seq, extra_key, tokens):
        """True when the pages sufficed, after eviction where they did not at first."""
        start = self.table.lengths([seq])[0]
        while True:
            try:
                self.table.extend([seq], [len(tokens) - start])
                break
            except OutOfPagesError as error:
                wanted = [0] * (1 + len(self.windows))
                sizes = [window.window for window in self.windows]
                which = 0 if error.window is None else 1 + sizes.index(error.window)
                wanted[which] = error.pages_needed - error.pages_free
                before = self.cache.num_pages
                self.evict(wanted)
                if self.cache.num_pages == before:
                    return False
        for j in range(start // self.page_size, -(-len(tokens) // self.page_size)):
            page = self.table.pages(seq)[j]
            key = (extra_key, tuple(tokens[: (j + 1) * self.page_size]))
            self.memory[0][page] = key
            for window, memory in zip(self.windows, self.memory[1:], strict=True):
                if window.page_of[page]:
                    memory[window.page_of[page]] = key
        return True

    prompts = st.tuples(
        st.lists(st.sampled_from([0, 1, 0, 1, 2]), min_size=3, max_size=8),
        st.integers(0, 2),
        st.sampled_from([None] * 6 + ["salt", (7, "lora")]),
    )

    def tokens(self, prompt):
        letters, rest, _ = prompt
        size = self.page_size  # pages of kinds 0 and 2 differ in their last token alone
        pages = {0: [5] * size, 1: [6] * size, 2: [5] * (size - 1) + [-7]}
        return [token for letter in letters for token in pages[letter]] + [9] * min(rest, size - 1)

    @rule(
        prompt=prompts,
        leave_one=st.booleans(),
        restore=st.sampled_from([True, True, False]),
        wait=st.sampled_from([False, False, True]),
        first=st.integers(1, 40),
    )
    def start_a_sequence(self, prompt, **how):
        self.start(prompt, **how)

    def start(self, prompt, leave_one, restore, wait, first):
        """Returns whether there was room for it."""
        if len(self.seqs) == 4:
            self.table.free([self.seqs.pop(0)[0]])
        tokens, extra_key = self.tokens(prompt), prompt[2]
        most_tokens = len(tokens) - 1 if leave_one else None
        match = self.match(np.array(tokens, dtype=np.int64), extra_key, most_tokens)
        if wait:  # what was matched may go meanwhile
            self.evict([3] + [0] * len(self.windows))
        restored = self.restore(tokens, extra_key, match) if restore and match.num_host_tokens else None
        if restored is not None:
            match = restored
        elif wait:
            match = self.match(tokens, extra_key, most_tokens)
        (seq,) = self.table.new_sequences(1)
        self.table.adopt(seq, match.pages)
        self.seqs.append((seq, extra_key, tokens))
        for end in (min(match.num_tokens + first, len(tokens)), len(tokens)):
            if not self.extend(seq, extra_key, tokens[:end]):
                self.seqs.pop()
                self.table.free([seq])
                return False
        return True

    @rule(
        prompt=prompts,
        leave_one=st.booleans(),
        restore=st.booleans(),
        wait=st.just(False),
        first=st.integers(1, 40),
        priority=st.integers(-1, 2),
        free=st.sampled_from([True, True, True, False]),
    )
    def serve_a_request(self, prompt, priority, free, **how):
        if self.start(prompt, **how):
            self.insert_pages(self.seqs[-1], len(prompt[0]), np.int32, priority)
            if free:
                self.table.free([self.seqs.pop()[0]])

    @precondition(lambda self: self.seqs)
    @rule(
        which=st.integers(0, 3),
        num_pages=st.integers(0, 15),
        priority=st.integers(-1, 2),
        dtype=st.sampled_from([np.int32, np.int64, list]),
    )
    def insert(self, which, num_pages, priority, dtype):
        seq = self.seqs[which % len(self.seqs)]
        self.insert_pages(seq, min(num_pages, len(seq[2]) // self.page_size), dtype, priority)

    def insert_pages(self, seq, num_pages, dtype, priority):
        seq, extra_key, tokens = seq
        pages = self.table.pages(seq)[:num_pages]
        keys = self.keys(extra_key, tokens)[:num_pages]
        path = self.path(extra_key, tokens)[:num_pages]
        on_device = sum(not self.entries[key].in_host for key in path)
        held = {entry.page for entry in self.entries.values() if not entry.in_host}
        self.clock += bool(keys)
        for j, (key, page) in enumerate(zip(keys, pages.tolist(), strict=True)):
            if key not in self.entries:
                self.entries[key] = Entry(page, priority if self.policy == "priority" else 0)
            entry = self.entries[key]
            if j < on_device and page not in held:
                there = [window.page_of[entry.page] != 0 for window in self.windows]
                offered = [window.page_of[page] != 0 for window in self.windows]
                if there != offered and all(a <= b for a, b in zip(there, offered, strict=True)):
                    entry.page = page
            elif j >= on_device:
                entry.host_windows, entry.page = None, page
            entry.stamp = self.clock
            if self.policy == "priority":
                entry.rank = max(entry.rank, priority)
        given = list(tokens) if dtype is list else np.array(tokens, dtype=dtype)
        assert self.cache.insert(given, pages, extra_key, priority) == on_device * self.page_size

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0, 3))
    def free_a_sequence(self, which):
        self.table.free([self.seqs.pop(which % len(self.seqs))[0]])

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0, 3), prompt=prompts)
    def continue_a_sequence(self, which, prompt):
        which %= len(self.seqs)
        seq, extra_key, tokens = self.seqs[which]
        if len(tokens) < 12 * self.page_size:
            tokens = tokens + self.tokens(prompt)
            if self.extend(seq, extra_key, tokens):
                self.seqs[which] = (seq, extra_key, tokens)

    @rule(prompt=prompts)
    def only_match(self, prompt):
        self.match(self.tokens(prompt), prompt[2])

    @rule(num_pages=st.integers(0, 8), window_pages=st.integers(0, 2))
    def evict_some(self, num_pages, window_pages):
        self.evict([num_pages] + [window_pages] * len(self.windows))

    @rule(in_use=st.booleans(), really=st.sampled_from([1, 1, 1, 0]))
    def clear(self, in_use, really):
        if really:  # otherwise there would be little to see
            return
        host = [key for key, entry in self.entries.items() if entry.in_host]
        for key in host:
            del self.entries[key]
        used = {page for seq, _, _ in self.seqs for page in self.table.pages(seq).tolist()}
        unused = [key for key, entry in self.entries.items() if entry.page not in used]
        victims = self.victims([1000] + [0] * len(self.windows))
        assert self.cache.clear(in_use=in_use) == len(unused if in_use else victims)
        for key in list(self.entries) if in_use else victims:
            del self.entries[key]

    @invariant()
    def the_cache_holds_what_the_model_says(self):
        found = self.cached()
        assert found.keys() == self.entries.keys()
        for key, (in_host, page) in found.items():
            assert self.entries[key].in_host == in_host
            assert in_host or self.entries[key].page == page
        for tier in self.tiers[:1]:
            assert {tier.kept[page]: page for in_host, page in found.values() if in_host} == {
                key: page for key, (in_host, page) in found.items() if in_host
            }
            assert len(tier.kept) == self.cache.num_host_pages
        assert self.cache.num_pages == sum(not in_host for in_host, _ in found.values())
        assert self.cache.num_host_pages == sum(in_host for in_host, _ in found.values())
        assert self.cache.num_evictable_pages == len(self.victims([1000] + [0] * len(self.windows)))

    @invariant()
    def a_router_that_applies_the_events_knows_what_is_cached(self):
        self.router.apply(self.cache.take_events())
        media = {"device": set(), "host": set()}
        for (extra_key, tokens), entry in self.entries.items():
            media["host" if entry.in_host else "device"].add(block_hashes(tokens, self.page_size, extra_key)[-1])
        assert self.router.media == media


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("tier_pages", [None, 1, 5, 30])
@pytest.mark.parametrize("windows", [(), (1,), (20, 2)], ids=["no windows", "one window", "two windows"])
def test_a_long_life_is_as_the_model_says(windows, tier_pages):
    """Hypothesis finds the short failures; these lives get to states that take many steps."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    machine = PrefixCacheMachine()
    machine.begin(
        page_size=draw.choice([1, 3, 16]), policy=draw.choice(["lru", "lfu", "priority"]), seed=seed,
        num_pages=draw.randint(8, 24), windows=windows, tier_pages=tier_pages,
    )  # fmt: skip

    def prompt():
        letters = [draw.choice([0, 1, 0, 1, 2]) for _ in range(draw.randint(3, 8))]
        return letters, draw.randint(0, 2), draw.choice([None] * 6 + ["salt", (7, "lora")])

    def how():
        return {
            "prompt": prompt(), "leave_one": draw.random() < 0.5, "restore": draw.random() < 0.7,
            "wait": draw.random() < 0.3, "first": draw.randint(1, 40),
        }  # fmt: skip

    steps = {
        lambda: machine.serve_a_request(priority=draw.randint(-1, 2), free=draw.random() < 0.8, **how()): 6,
        lambda: machine.start_a_sequence(**how()): 1,
        lambda: machine.insert(draw.randint(0, 3), draw.randint(0, 15), draw.randint(-1, 2), np.int32): 2,
        lambda: machine.free_a_sequence(draw.randint(0, 3)): 2,
        lambda: machine.continue_a_sequence(draw.randint(0, 3), prompt()): 1,
        lambda: machine.only_match(prompt()): 2,
        lambda: machine.evict_some(draw.randint(0, 6), draw.randint(0, 2)): 2,
        lambda: machine.clear(draw.random() < 0.5, draw.randint(0, 9)): 1,
    }
    for step in draw.choices(list(steps), list(steps.values()), k=400):
        if not machine.seqs:
            machine.start_a_sequence(**how())
        if machine.seqs:
            step()
        machine.the_cache_holds_what_the_model_says()
        machine.a_router_that_applies_the_events_knows_what_is_cached()
