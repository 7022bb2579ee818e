"""Allocator, page table, prefix cache, copy-on-write, windows and host tier together, against a plain Python model.

Every token is stored as a number that stands for all of its prefix. So a page shared with the wrong prefix, copied too
late, let go too early, handed out twice or brought back to the wrong place shows as a wrong number somewhere.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.empty_pool import EmptyPool
from anyattn.mem_cache.host_tier import HostTier
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool
from anyattn.mem_cache.prefix_cache import PrefixCache
from anyattn.mem_cache.spec import CacheSpec
from anyattn.mem_cache.transfer import export_sequence, import_sequence
from anyattn.mem_cache.windows import WindowPages

pytestmark = pytest.mark.slow

TEXTS = st.integers(0, 2)  # few, so that prefixes meet
EXTRA_KEYS = st.sampled_from([None, None, "lora"])
MOST_SEQUENCES = 6  # few, so that they grow long enough to be cached and to leave pages behind their windows


def text_of(text, first, count):
    """Tokens of one of the texts, at positions from `first` on."""
    return tuple(position * (text + 1) // 2 % 3 for position in range(first, first + count))


@lru_cache(maxsize=4096)
def stored(tokens):
    """What is stored for each token: a number, exact in float32, that stands for all up to it."""
    numbers = []
    number = 1
    for token in tokens:
        number = (number * 31 + token + 7) % 8388593
        numbers.append(float(number))
    return numbers


def has_sequences(machine):
    return bool(machine.model)


def has_room(machine):
    return len(machine.model) < MOST_SEQUENCES


class MemoryMachine(RuleBasedStateMachine):
    """model: the tokens of each living sequence; keys: its extra key. past: what was inserted, with its extra key.

    All else is looked up in what is tested. The first pool is that of the layers that see everything, where there are
    some; each window has a pool of its own.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 16]),
        num_pages=st.integers(4, 40),
        windows=st.permutations([1, 2, 3, 5, 9, 40]),
        num_windows=st.sampled_from([0, 1, 1, 2]),
        shares=st.tuples(st.floats(0.3, 1.0), st.floats(0.3, 1.0)),
        full_layers=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["lru", "lfu", "priority"]),
        num_host_pages=st.sampled_from([0, 3, 30]),
    )
    def make(self, page_size, num_pages, windows, num_windows, shares, full_layers, policy, num_host_pages):
        self.page_size = page_size
        windows = windows[:num_windows]
        pages = [num_pages, *(max(int(share * num_pages), 2) for share in shares[:num_windows])]
        allocators = [PagedAllocator(count, page_size, debug=True) for count in pages]
        sizes = {"num_kv_heads": 1, "head_dim": 1, "v_head_dim": 1, "kv_dtype": "float32", "page_size": page_size}
        self.pools = [MHAPool(CacheSpec(num_layers=1, **sizes), count, "cpu") for count in pages]
        if windows and not full_layers:
            self.pools[0] = EmptyPool(CacheSpec(num_layers=0, **sizes), num_pages, "cpu")
        for pool in self.pools:  # whatever is read and was not stored shows
            for kv in pool.layers:
                kv.k.fill_(float("nan"))
                kv.v.fill_(float("nan"))
        self.windows = [
            WindowPages(window, allocator, num_pages=num_pages, page_size=page_size)
            for window, allocator in zip(windows, allocators[1:], strict=True)
        ]
        self.table = PageTable(allocators[0], page_size, windows=self.windows, debug=True)
        self.tiers = [HostTier(pool, num_host_pages) for pool in self.pools] if num_host_pages else []
        self.cache = PrefixCache(self.table, policy=policy, tiers=self.tiers, events=True)
        self.model, self.keys, self.past = {}, {}, []

    def books(self):
        """What a refusal must leave as it was."""
        return (
            [self.table.pages(seq).tolist() for seq in self.model],
            self.table.lengths(list(self.model)),
            self.table.allocator.num_free_pages,
            self.table.allocator.ref_counts(np.arange(self.table.allocator.num_pages + 1)).tolist(),
            [(window.page_of.tolist(), window.allocator.num_free_pages) for window in self.windows],
            [tier.num_free_pages for tier in self.tiers],
            (self.cache.num_pages, self.cache.num_host_pages),
        )

    def write(self, view, new):
        """Copies what the step asks for and stores its tokens in all pools. new: the tokens of each sequence."""
        for copy in view.copies:
            self.pools[copy.pool].copy_pages(copy.sources, copy.targets)
        slots = view.out_slots()
        values = []
        for seq, tokens in zip(view.seqs.tolist(), new, strict=True):
            first = len(self.model[seq])
            self.model[seq] += tokens
            values += stored(self.model[seq])[first:]
        data = torch.tensor(values).reshape(-1, 1, 1)
        if self.pools[0].layers:
            self.pools[0].store(0, data, -data, slots)
        for pool, window in zip(self.pools[1:], self.windows, strict=True):
            pages = torch.from_numpy(window.page_of)[slots // self.page_size].long()
            pool.store(0, data, -data, pages * self.page_size + slots % self.page_size)

    def some(self, data):
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1, max_size=4))

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    def with_pages(self):
        return [seq for seq in sorted(self.model) if len(self.model[seq]) >= self.page_size]

    def next_tokens(self, seq, text, count):
        return text_of(text, len(self.model[seq]), count)

    def grow(self, seqs, new):
        """One step. new: the tokens of each sequence."""
        before = self.books()
        try:
            view = self.table.extend(seqs, [len(tokens) for tokens in new])
        except OutOfPagesError:
            assert self.books() == before
            return
        self.write(view, new)

    def begin(self, seqs, tokens, extra_key):
        for seq in seqs:
            assert seq not in self.keys
            self.model[seq], self.keys[seq] = tokens, extra_key

    def end(self, seqs):
        self.table.free(seqs)
        for seq in seqs:
            del self.model[seq]

    @rule(count=st.integers(1, 3), extra_key=EXTRA_KEYS, text=TEXTS, num_pages=st.integers(0, 5))
    @precondition(has_room)
    def new(self, count, extra_key, text, num_pages):
        seqs = self.table.new_sequences(count)
        self.begin(seqs, (), extra_key)
        for num_new in (num_pages * self.page_size, 1):  # a prompt, and a step that leaves pages behind windows
            self.grow(seqs[:1], [self.next_tokens(seqs[0], text, num_new)])

    @rule(data=st.data())
    @precondition(has_sequences)
    def extend(self, data):
        seqs = self.some(data)
        most = 2 * self.page_size + 2
        self.grow(seqs, [self.next_tokens(seq, data.draw(TEXTS), data.draw(st.integers(0, most))) for seq in seqs])

    @rule(data=st.data(), text=TEXTS, num_steps=st.integers(1, 4))
    @precondition(has_sequences)
    def decode(self, data, text, num_steps):
        seqs = self.some(data)
        for _ in range(num_steps):
            self.grow(seqs, [self.next_tokens(seq, text, 1) for seq in seqs])

    @rule(data=st.data(), count=st.integers(1, 3))
    @precondition(lambda self: has_sequences(self) and has_room(self))
    def fork(self, data, count):
        seq = self.one(data)
        self.begin(self.table.fork(seq, count), self.model[seq], self.keys[seq])

    @rule(data=st.data())
    @precondition(has_sequences)
    def truncate(self, data):
        seq = self.one(data)
        kept = max(len(self.model[seq]) - data.draw(st.integers(0, 2 * self.page_size)), 0)
        before = self.books()
        try:
            self.table.truncate([seq], [kept])
        except ContractError:
            assert self.windows  # only a window's pages can be missing
            assert self.books() == before
            return
        self.model[seq] = self.model[seq][:kept]

    @rule(data=st.data())
    @precondition(has_sequences)
    def free(self, data):
        self.end(self.some(data))

    @rule(data=st.data(), ends=st.booleans())
    @precondition(lambda self: self.with_pages())
    def insert(self, data, ends):
        seq = data.draw(st.sampled_from(self.with_pages()))
        tokens = self.model[seq]
        whole = len(tokens) // self.page_size
        priority = data.draw(st.integers(0, 2))
        self.cache.insert(tokens, self.table.pages(seq)[:whole], self.keys[seq], priority=priority)
        self.past.append((tokens, self.keys[seq]))
        if ends:
            self.end([seq])

    @rule(data=st.data(), restores=st.booleans(), goes_on=st.booleans(), extra_key=EXTRA_KEYS, text=TEXTS)
    @precondition(has_room)
    def begin_with_a_cached_prefix(self, data, restores, goes_on, extra_key, text):
        begin = ()
        if self.past and data.draw(st.booleans()):  # cut off within what is cached, where windows may lack pages
            begin, extra_key = data.draw(st.sampled_from(self.past))
            begin = begin[: data.draw(st.integers(0, len(begin)))]
        elif self.model and data.draw(st.booleans()):
            begin = self.model[self.one(data)]
        prompt = begin + text_of(text, len(begin), data.draw(st.integers(0, 2 * self.page_size)))
        self.begin_with(prompt, extra_key, restores=restores, goes_on=goes_on)

    @rule(data=st.data(), num_pages=st.integers(1, 3))
    @precondition(lambda self: has_room(self) and self.past and self.tiers)
    def begin_with_a_past_prompt_that_was_moved_to_the_host(self, data, num_pages):
        prompt, extra_key = data.draw(st.sampled_from(self.past))
        self.cache.evict(num_pages)
        self.begin_with(prompt, extra_key, restores=True, goes_on=False)

    def begin_with(self, prompt, extra_key, *, restores, goes_on):
        """A sequence that has of the prompt what is cached; restores: in the host's memory too; goes_on: all of it."""
        match = self.cache.match(prompt, extra_key)
        if restores and match.num_host_tokens:
            before = self.books()
            try:
                match = self.cache.restore(match)
            except OutOfPagesError:
                assert self.books() == before
                return
        assert match.num_tokens % self.page_size == 0
        assert match.num_tokens == len(match.pages) * self.page_size <= len(prompt)
        (seq,) = self.table.new_sequences(1)
        self.table.adopt(seq, match.pages)
        self.begin([seq], prompt[: match.num_tokens], extra_key)
        if goes_on:
            self.grow([seq], [prompt[match.num_tokens :]])

    @rule(data=st.data())
    @precondition(lambda self: self.past)
    def begin_at_every_page_of_a_past_prompt(self, data):
        tokens, extra_key = data.draw(st.sampled_from(self.past))
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            match = self.cache.match(tokens[:end], extra_key)
            (seq,) = self.table.new_sequences(1)
            self.table.adopt(seq, match.pages)  # in debug mode it proves the windows' pages
            self.begin([seq], tokens[: match.num_tokens], extra_key)
            self.end([seq])

    @rule(data=st.data(), num_pages=st.integers(0, 6))
    def evict(self, data, num_pages):
        counts = st.lists(st.integers(0, 6), min_size=len(self.windows), max_size=len(self.windows))
        window_pages = data.draw(st.none() | counts)
        free = self.table.allocator.num_free_pages
        free_in_windows = [window.allocator.num_free_pages for window in self.windows]
        freed = self.cache.evict(num_pages, window_pages)
        assert self.table.allocator.num_free_pages == free + freed
        gained = [w.allocator.num_free_pages - f for w, f in zip(self.windows, free_in_windows, strict=True)]
        wanted = [num_pages, *(window_pages or [0] * len(gained))]
        enough = [there >= least for there, least in zip([freed, *gained], wanted, strict=True)]
        assert min(gained, default=0) >= 0
        assert all(enough) or not self.cache.num_evictable_pages

    @rule()
    @precondition(lambda self: len(self.past) > 5)
    def clear(self):
        self.cache.clear()
        self.past.clear()

    @rule(data=st.data())
    @precondition(lambda self: has_sequences(self) and has_room(self))
    def move_elsewhere_and_back(self, data):
        seq = self.one(data)
        exported = export_sequence(self.table, self.pools, seq)
        before = self.books()
        try:
            twin = import_sequence(self.table, self.pools, exported)
        except OutOfPagesError:
            assert self.books() == before
            return
        self.begin([twin], self.model[seq], None)

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "table"):
            return
        self.table.check()
        self.cache.check()
        for tier in self.tiers:
            tier.check()

    @invariant()
    def every_sequence_reads_what_was_stored_for_it(self):
        if not hasattr(self, "table"):
            return
        for seq, tokens in self.model.items():
            assert self.table.lengths([seq]) == [len(tokens)]
            pages = self.table.pages(seq)
            assert pages.size == -(-len(tokens) // self.page_size)
            if self.pools[0].layers:
                self.read(self.pools[0], pages, tokens, 0)
            for pool, window in zip(self.pools[1:], self.windows, strict=True):
                self.read(pool, window.page_of[pages], tokens, max(len(tokens) - window.window + 1, 0))

    def read(self, pool, pages, tokens, first):
        """Compares what lies in the pages, from position `first` on, with what was stored for the tokens."""
        index = torch.from_numpy(pages).long()
        k, v = (part[index].reshape(-1)[first : len(tokens)].tolist() for part in pool.layers[0].nhd())
        assert k == stored(tokens)[first:]
        assert v == [-value for value in k]


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
