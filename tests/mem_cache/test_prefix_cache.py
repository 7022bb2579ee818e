"""The prefix cache by examples: what matches, how the tree divides, what goes first, what is refused and told."""

import subprocess
import sys

import numpy as np
import pytest

from anyattn.errors import ContractError, OutOfPagesError, StorageError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.host_tier import HostTier
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool
from anyattn.mem_cache.prefix_cache import PrefixCache
from anyattn.mem_cache.prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, block_hashes
from anyattn.mem_cache.spec import CacheSpec
from anyattn.mem_cache.windows import WindowPages


def new_cache(num_pages=64, page_size=4, *, windows=(), **options):
    table = PageTable(
        PagedAllocator(num_pages, page_size, debug=True), page_size, windows=windows, debug=True
    )
    return PrefixCache(table, debug=True, **options)


def served(cache, tokens, *, keep=False, **how):
    """A sequence of these tokens, without looking for its prefix, is inserted and ends; its pages, cached or not."""
    (seq,) = cache.table.new_sequences(1)
    cache.table.extend([seq], [len(tokens)])
    pages = cache.table.pages(seq)[: len(tokens) // cache.page_size]
    cache.insert(tokens, pages, **how)
    if keep:
        return seq
    cache.table.free([seq])
    return pages


def letters(text, page_size=4):
    """One page of tokens for each letter."""
    return [ord(letter) for letter in text for _ in range(page_size)]


def cached(cache, *texts):
    """How many pages of each text are found, without being used by that."""
    return [cache._cached.tree.walk(None, np.array(letters(text), dtype=np.int32).tobytes())[1] for text in texts]


def edges(cache):
    """The tree's runs of pages, as texts."""
    tokens = [np.frombuffer(node.tokens, np.int32)[::4].tolist() for node in cache._cached.tree.nodes()]
    return sorted("".join(map(chr, letter)) for letter in tokens)


# What matches


def test_a_prefix_of_100_tokens_hits_96_at_page_size_16():
    cache = new_cache(page_size=16)
    tokens = np.random.default_rng().integers(0, 1 << 31, 200, dtype=np.int32)
    pages = served(cache, tokens)
    assert pages.size == 12
    match = cache.match(np.concatenate([tokens[:100], tokens[:60] ^ 1]))
    assert match.num_tokens == 96
    assert match.pages.tolist() == pages[:6].tolist()


@pytest.mark.parametrize("given", [np.int32, np.int64, list], ids=["int32", "int64", "list"])
def test_tokens_match_whatever_holds_them(given):
    cache = new_cache()
    tokens = np.array([3, -2, 2**31 - 1, -(2**31)] * 3, dtype=np.int64)
    pages = served(cache, tokens.tolist() if given is list else tokens.astype(given))
    for other in (tokens, tokens.astype(np.int32), tokens.tolist(), np.repeat(tokens, 2)[::2]):
        assert cache.match(other).pages.tolist() == pages.tolist()


def test_the_last_token_can_be_left_to_compute():
    cache = new_cache()
    served(cache, letters("abc"))
    assert cache.match(letters("abc")).num_tokens == 12
    assert cache.match(letters("abc"), most_tokens=11).num_tokens == 8
    assert cache.match(letters("abc"), most_tokens=0).num_tokens == 0
    assert cache.match([]).num_tokens == 0


def test_prompts_with_different_extra_keys_have_nothing_in_common():
    cache = new_cache()
    plain, salted = served(cache, letters("ab")), served(cache, letters("ab"), extra_key=("salt", 1))
    assert cache.match(letters("ab")).pages.tolist() == plain.tolist()
    assert cache.match(letters("ab"), ("salt", 1)).pages.tolist() == salted.tolist()
    assert cache.match(letters("ab"), "another").num_tokens == 0


def test_a_sequence_begins_with_what_matched_and_keeps_it_from_being_evicted():
    cache = new_cache(num_pages=8)
    served(cache, letters("abcdefgh"))
    match = cache.match(letters("abcX"))
    (seq,) = cache.table.new_sequences(1)
    cache.table.adopt(seq, match.pages)
    assert cache.num_evictable_pages == 5
    assert cache.evict(8) == 5
    assert cached(cache, "abcdefgh") == [3]
    cache.table.free([seq])
    assert cache.evict(8) == 3
    assert cache.table.allocator.num_free_pages == 8


def test_a_window_limits_the_match_to_where_its_pages_are():
    window = WindowPages(6, PagedAllocator(20, 4), num_pages=20, page_size=4)
    cache = new_cache(20, 4, windows=[window])
    (seq,) = cache.table.new_sequences(1)
    for _ in range(24):
        cache.table.extend([seq], [1])
    cache.insert(letters("abcdef"), cache.table.pages(seq))
    cache.table.free([seq])
    assert cache.match(letters("abcdef")).num_tokens == 24
    assert cache.match(letters("abcdeX")).num_tokens == 0  # position 20 sees tokens 15 to 20; those before 16 are gone
    served(cache, letters("abcd"))  # all at once, so that it still has every page of the window, which the cache takes
    assert cache.match(letters("abcX")).num_tokens == 12
    assert cache.match(letters("abcdef")).num_tokens == 24


# Where the tree divides


@pytest.mark.parametrize(
    ("texts", "tree"),
    [
        (["abcd"], ["abcd"]),
        (["abcd", "ab"], ["abcd"]),
        (["ab", "abcd"], ["abcd"]),
        (["abcd", "abxy"], ["ab", "cd", "xy"]),
        (["abcd", "abxy", "abcz"], ["ab", "c", "d", "xy", "z"]),
        (["abcd", "abxy", "abcde"], ["ab", "cde", "xy"]),
        (["abcd", "xy"], ["abcd", "xy"]),
    ],
    ids=["one", "shorter", "longer", "divided", "divided twice", "one branch longer", "nothing shared"],
)
def test_nodes_divide_where_prompts_do_and_nowhere_else(texts, tree):
    cache = new_cache()
    for text in texts:
        served(cache, letters(text))
    assert edges(cache) == tree
    assert cached(cache, *texts) == [len(text) for text in texts]


def test_a_conversation_that_grows_a_page_at_a_time_is_one_node():
    for policy in ("lru", "lfu", "priority"):
        cache = new_cache(policy=policy)
        (seq,) = cache.table.new_sequences(1)
        for turn in range(1, 30):
            cache.table.extend([seq], [4])
            cache.match(letters("abc" * 10)[: 4 * turn])
            assert cache.insert(letters("abc" * 10)[: 4 * turn], cache.table.pages(seq)) == 4 * (turn - 1)
        assert edges(cache) == [("abc" * 10)[:29]]


def test_a_page_that_differs_in_its_last_token_is_another_page():
    cache = new_cache()
    served(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 9]).num_tokens == 4
    assert cache.match([1, 2, 3, 5, 5, 6, 7, 8]).num_tokens == 0


def test_what_was_cached_already_stays_the_sequences_own():
    cache = new_cache(num_pages=16)
    first = served(cache, letters("abcd"))
    seq = served(cache, letters("abxy"), keep=True)
    pages = cache.table.pages(seq)
    assert cache.insert(letters("abxy"), pages) == 16
    assert cache.num_pages == 6
    assert cache.match(letters("abxy")).pages.tolist() == [*first[:2], *pages[2:]]
    cache.table.free([seq])
    assert cache.table.allocator.num_free_pages == 16 - 6


def test_branches_that_are_evicted_leave_one_node_behind():
    cache = new_cache()
    for text in ("abcd", "abxy", "abcde"):
        served(cache, letters(text))
    assert cache.evict(2) == 2  # x and y, which were not used again
    assert edges(cache) == ["abcde"]


# What goes first


def test_lru_gives_up_what_was_used_longest_ago_from_the_end():
    cache = new_cache()
    for text in ("sab", "scd", "tef"):
        served(cache, letters(text))
    cache.match(letters("sa"))
    texts, gone = ("sab", "scd", "tef"), []
    while cache.num_pages:
        before = cached(cache, *texts)
        assert cache.evict(1) == 1
        after = cached(cache, *texts)
        gone.append("".join(texts[i][before[i] - 1] for i in range(3) if after[i] < before[i]))
    assert gone == ["b", "d", "c", "f", "e", "t", "a", "ss"]


def test_lfu_gives_up_what_the_fewest_matches_found():
    cache = new_cache(policy="lfu")
    for text in ("aa", "bb", "cc"):
        served(cache, letters(text))
    for text in ("aa", "aa", "bb", "cc", "b"):
        cache.match(letters(text))
    cache.evict(1)
    assert cached(cache, "aa", "bb", "cc") == [2, 1, 2]  # the second b was found once, before the last c
    cache.evict(2)
    assert cached(cache, "aa", "bb", "cc") == [2, 1, 0]
    cache.evict(2)
    assert cached(cache, "aa", "bb", "cc") == [0, 1, 0]  # the first b was found twice as well, and later


def test_lfu_gives_up_new_pages_at_the_end_of_an_old_favourite_before_others_that_were_found():
    cache = new_cache(policy="lfu")
    served(cache, letters("a"))
    served(cache, letters("b"))
    for text in "abaaa":
        cache.match(letters(text))
    cache.evict(0)
    served(cache, letters("ax"))
    assert edges(cache) == ["ax", "b"]
    cache.evict(1)
    assert cached(cache, "ax", "b") == [1, 1]
    cache.evict(1)
    assert cached(cache, "ax", "b") == [1, 0]


def test_priority_gives_up_the_lowest_first_and_pages_keep_the_highest_they_were_inserted_with():
    cache = new_cache(policy="priority")
    served(cache, letters("aa"), priority=5)
    served(cache, letters("bb"), priority=-3)
    served(cache, letters("cc"), priority=0)
    served(cache, letters("bx"), priority=7)
    served(cache, letters("aa"), priority=1)
    order = []
    for _ in range(7):
        before = cached(cache, "aa", "bb", "cc", "bx")
        cache.evict(1)
        order.append([b - a for a, b in zip(cached(cache, "aa", "bb", "cc", "bx"), before, strict=True)])
    assert order == [
        [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1],
    ]  # fmt: skip


def test_just_the_end_of_a_long_prompt_goes_when_little_is_wanted():
    cache = new_cache(num_pages=300)
    served(cache, list(range(1024)))
    assert cache.evict(3) == 3
    assert cache.match(list(range(1024))).num_tokens == 1024 - 12


def test_pages_that_lead_to_one_in_use_stay_though_nobody_holds_them():
    cache = new_cache()
    served(cache, letters("ab"))
    seq = served(cache, letters("abcd"), keep=True)  # holds its own pages for a and b
    served(cache, letters("abx"))
    assert cache.num_evictable_pages == 1
    assert cache.evict(10) == 1
    assert cached(cache, "abcd", "abx") == [4, 2]
    cache.table.free([seq])
    assert cache.evict(10) == 4


def test_the_heap_does_not_grow_with_matches_inserts_and_evictions():
    cache = new_cache(num_pages=16)
    rng = np.random.default_rng()
    for _ in range(1000):
        tokens = rng.integers(0, 2, 4 * rng.integers(1, 5)).repeat(4)[: 4 * 4]
        cache.match(tokens)
        if cache.table.allocator.num_free_pages < 4:
            assert cache.evict(4) == 4
        served(cache, tokens)
        assert len(cache._cached.queue._heap) <= 2 * 16 + 64 + 1
    heap = list(cache._cached.queue._heap)
    for _ in range(100):
        cache.match(rng.integers(0, 2, 4).repeat(4))
    assert cache._cached.queue._heap == heap


# What is refused


def everything(cache):
    nodes = [(node.tokens, node.pages, node.in_host) for node in cache._cached.tree.nodes()]
    refs = cache.table.allocator.ref_counts(np.arange(cache.table.allocator.num_pages + 1)).tolist()
    roots, held = list(cache._cached.tree.roots), cache._cached.held.tolist()
    return nodes, roots, refs, held, cache.num_pages, cache.num_host_pages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pages: [*pages[:2], 0], "0 to"),
        (lambda pages: [*pages[:2], -1], "-1 to"),
        (lambda pages: [*pages[:2], 65], "to 65"),
        (lambda pages: [*pages[:2], 2**40], "given"),
        (lambda pages: [*pages[:2], pages[0]], "named twice"),
        (lambda pages: [pages[0], pages[0], pages[1]], "named twice"),
        (lambda pages: [*pages[:2], 60], "is free"),
        (lambda pages: [*pages, 60], "4 pages of 4 tokens given, and the tokens fill 3"),
        (lambda pages: [float(page) for page in pages], "flat list of page ids"),
        (lambda pages: [list(pages)], "flat list of page ids"),
        (lambda pages: pages[::-1], "cached already"),
        (lambda pages: [*pages[1:], pages[0]], "cached already"),
    ],
    ids=[
        "null", "negative", "foreign", "huge", "twice", "twice within what is cached", "free", "too many", "floats",
        "nested", "those of other tokens", "shifted",
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", ["ab", "xy"])
def test_pages_that_do_not_fit_are_refused_and_change_nothing(change, message, first):
    cache = new_cache()
    served(cache, letters(first))
    seq = served(cache, letters("abq"), keep=True)
    before = everything(cache)
    pages = cache.table.pages(seq).tolist()
    with pytest.raises(ContractError, match=message):
        cache.insert(letters("abc"), change(pages), "another" if "cached" in message else None)
    assert everything(cache) == before
    cache.check()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0, 2.0, 3.0, 4.0], "int32 or int64, not float64"),
        ([True] * 4, "not bool"),
        ([[1, 2, 3, 4]], "2 dimensions"),
        (np.arange(4, dtype=np.int16), "not int16"),
        (np.arange(4, dtype=np.uint32), "not uint32"),
        ([1, 2, 3, 2**31], "token 2147483648 does not fit"),
        ([1, 2, 3, -(2**31) - 1], "does not fit"),
        ([1, 2, 3, 2**70], "not object"),
        (["a", "b", "c", "d"], "not <U1"),
        ([[1], [2, 3]], "flat list"),
        (7, "0 dimensions"),
    ],
    ids=["floats", "bools", "nested", "int16", "uint32", "above", "below", "huge", "strings", "ragged", "a number"],
)
def test_tokens_that_are_none_are_refused(tokens, message):
    cache = new_cache()
    pages = cache.table.take(1)
    with pytest.raises(ContractError, match=message):
        cache.match(tokens)
    with pytest.raises(ContractError, match=message):
        cache.insert(tokens, pages)
    assert cache.num_pages == 0


def test_arguments_that_mean_nothing_are_refused():
    cache = new_cache(policy="priority")
    pages = cache.table.take(1)
    for call, message in [
        (lambda: new_cache(policy="fifo"), "lru, lfu, priority"),
        (lambda: new_cache(tiers=[None, None]), "2 host tiers given, and 1 are wanted"),
        (lambda: cache.match([1], ["a", "list"]), "extra key must be"),
        (lambda: cache.match([1], True), "extra key must be"),
        (lambda: cache.match([1], (1, 1.0)), "extra key must be"),
        (lambda: cache.insert([1] * 4, pages, {}), "extra key must be"),
        (lambda: cache.match([1], most_tokens=-1), "negative"),
        (lambda: cache.match([1], most_tokens=1.5), "integer"),
        (lambda: cache.insert([1] * 4, pages, priority="high"), "integer"),
        (lambda: cache.insert([1] * 4, pages, priority=2**63), "between"),
        (lambda: cache.evict(-1), "takes a number of pages"),
        (lambda: cache.evict(1, [1]), "one for each of 0 windows"),
        (lambda: cache.evict(None), "integer"),
        (lambda: cache.take_events(), "events=True"),
        (lambda: new_cache(events=True).insert([1] * 4, pages, frozenset()), "same in every process"),
    ]:
        with pytest.raises(ContractError, match=message):
            call()
    assert cache.num_pages == 0
    cache.check()


# The host tier


def new_cache_with_host(num_pages=8, host_pages=8, **options):
    """A cache whose pages hold one number each, and a function that reads them."""
    spec = CacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, v_head_dim=8, kv_dtype="float32", page_size=4)
    pool = MHAPool(spec, num_pages, "cpu")
    cache = new_cache(num_pages, 4, tiers=[HostTier(pool, host_pages)], **options)

    def write(pages, numbers):
        data = pool.read_pages(pages)
        data[:] = data.new_tensor(numbers)[:, None]
        pool.write_pages(pages, data)

    def read(pages):
        data = pool.read_pages(pages)
        assert (data == data[:, :1]).all()
        return data[:, 0].tolist()

    return cache, write, read


def test_evicted_pages_come_back_from_the_host_with_what_they_held():
    cache, write, read = new_cache_with_host()
    write(served(cache, letters("abcd")), [1, 2, 3, 4])
    write(served(cache, letters("abxy"))[2:], [5, 6])
    assert cache.evict(5) == 5
    assert (cache.num_pages, cache.num_host_pages) == (1, 5)
    write(cache.table.take(7), [9] * 7)
    cache.table.release(np.setdiff1d(np.arange(1, 9), cache.match(letters("a")).pages))
    match = cache.match(letters("abcdX"))
    assert (match.num_tokens, match.num_host_tokens) == (4, 12)
    match = cache.restore(match)
    assert (match.num_tokens, match.num_host_tokens) == (16, 0)
    assert read(match.pages) == [1, 2, 3, 4]
    assert (cache.num_pages, cache.num_host_pages) == (4, 2)
    assert cache.restore(match).pages.tolist() == match.pages.tolist()
    assert read(cache.restore(cache.match(letters("abxy"))).pages) == [1, 2, 5, 6]


def test_what_is_worth_least_in_the_host_makes_room():
    cache, _, _ = new_cache_with_host(host_pages=3)
    for text in ("ab", "cd"):
        served(cache, letters(text))
    cache.evict(3)
    assert cached(cache, "ab", "cd") == [2, 2]
    cache.evict(1)
    assert (cache.num_pages, cache.num_host_pages) == (0, 3)
    assert cached(cache, "ab", "cd") == [1, 2]
    served(cache, letters("efghij"))
    cache.evict(6)
    assert cached(cache, "ab", "cd", "efghij") == [0, 0, 3]


def test_what_remains_in_the_host_stays_apart_from_the_device_pages_that_lead_there():
    cache, _, _ = new_cache_with_host(host_pages=2)
    for text in ("abc", "abd", "xy"):
        served(cache, letters(text))
    cache.evict(2)
    cache.match(letters("abd"))
    cache.evict(1)  # y goes to the host, where it takes the place of c
    assert edges(cache) == ["ab", "d", "x", "y"]
    assert cached(cache, "abc", "abd", "xy") == [2, 3, 2]
    assert cache.match(letters("abd")).num_host_tokens == 4


def test_a_restore_without_room_is_refused_and_changes_nothing():
    cache, write, read = new_cache_with_host(num_pages=8)
    write(served(cache, letters("abcd")), [1, 2, 3, 4])
    cache.evict(4)
    served(cache, letters("xyz"))
    served(cache, letters("xq"))
    others = cache.table.take(4)
    seq = served_on(cache, letters("x"))
    match = cache.match(letters("abcd"))
    before = everything(cache)
    for _ in range(2):
        with pytest.raises(OutOfPagesError, match=r"4 pages needed, 0 of 8 free.*do without the restore.*num_pages"):
            cache.restore(match)
        assert everything(cache) == before
        assert cache.num_evictable_pages == 3
        cache.check()
    cache.table.free([seq])
    match = cache.restore(match)
    assert read(match.pages) == [1, 2, 3, 4]
    assert (cache.num_pages, cache.num_host_pages) == (4, 4)
    cache.table.release(others)


def served_on(cache, tokens):
    """A sequence that begins with what is cached of its tokens."""
    (seq,) = cache.table.new_sequences(1)
    cache.table.adopt(seq, cache.match(tokens).pages)
    return seq


def test_a_restore_evicts_others_but_never_what_it_restores():
    cache, write, read = new_cache_with_host(num_pages=6, host_pages=4)
    write(served(cache, letters("abcd")), [1, 2, 3, 4])
    cache.evict(2)
    write(served(cache, letters("wxyz")), [5, 6, 7, 8])
    assert (cache.num_pages, cache.num_host_pages) == (6, 2)
    match = cache.restore(cache.match(letters("abcd")))
    assert read(match.pages) == [1, 2, 3, 4]
    assert cached(cache, "wxyz") == [4]
    assert read(cache.restore(cache.match(letters("wxyz"))).pages) == [5, 6, 7, 8]


def test_pages_that_a_sequence_computed_again_take_the_place_of_those_in_the_host():
    cache, write, read = new_cache_with_host()
    write(served(cache, letters("abcd")), [1, 2, 3, 4])
    cache.evict(4)
    assert cache.num_host_pages == 4
    seq = served(cache, letters("abc"), keep=True)
    write(cache.table.pages(seq), [5, 6, 7])
    assert (cache.num_pages, cache.num_host_pages) == (3, 1)
    cache.table.free([seq])
    assert read(cache.restore(cache.match(letters("abcd"))).pages) == [5, 6, 7, 4]


class FailingTier:
    """A tier that has room and whose copies fail."""

    num_pages = num_free_pages = 8

    def save(self, pages):
        raise RuntimeError("the bus is gone")


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_a_save_that_fails_leaves_the_cache_as_it_was(num_pages):
    cache = new_cache(8, tiers=[FailingTier()])
    served(cache, letters("abc"))
    served(cache, letters("abx"))
    before = everything(cache)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the bus is gone"):
            cache.evict(num_pages)
        assert everything(cache) == before
        cache.check()


def test_a_load_that_fails_leaves_the_cache_as_it_was():
    cache, write, read = new_cache_with_host()
    write(served(cache, letters("abcd")), [1, 2, 3, 4])
    cache.evict(3)
    tier = cache._cached.host.tiers[0]
    load, tier.load = tier.load, lambda host_pages, pages: 1 / 0
    match = cache.match(letters("abcd"))
    with pytest.raises(ZeroDivisionError):
        cache.restore(match)
    cache.check()
    assert (cache.num_pages, cache.num_host_pages, cache.table.allocator.num_free_pages) == (1, 3, 7)
    tier.load = load
    assert read(cache.restore(match).pages) == [1, 2, 3, 4]


# Clearing, and what routers are told


def test_clear_forgets_what_is_not_in_use_and_all_when_told_so():
    cache, _, _ = new_cache_with_host(events=True)
    served(cache, letters("abcd"))
    cache.evict(2)
    seq = served_on(cache, letters("a"))
    cache.take_events()
    assert cache.clear() == 1
    assert (cache.num_pages, cache.num_host_pages) == (1, 0)
    assert {type(event) for event in cache.take_events()} == {BlockRemoved}
    assert cache.clear(in_use=True) == 0
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.clear() == 0
    assert cache.take_events() == []
    assert cache.table.lengths([seq]) == [4]
    cache.table.free([seq])
    assert cache.table.allocator.num_free_pages == 8
    served(cache, letters("ab"))
    served(cache, letters("ax"))
    cache.evict(1)
    assert cache.match(letters("ax")).num_tokens == 8
    cache.take_events()
    assert cache.clear() == 2
    assert cache.take_events() == [AllBlocksCleared()]


def test_events_say_what_is_stored_behind_which_block_and_where():
    cache, _, _ = new_cache_with_host(events=True)
    served(cache, letters("ab"), extra_key=7)
    served(cache, letters("abcd"), extra_key=7)
    a, b, c, d = block_hashes(letters("abcd"), 4, 7)

    def stored(hashes, parent, text, medium):
        return BlockStored(
            block_hashes=hashes, parent_block_hash=parent, token_ids=tuple(letters(text)), block_size=4, extra_key=7,
            medium=medium,
        )  # fmt: skip

    assert cache.take_events() == [stored((a, b), None, "ab", "device"), stored((c, d), b, "cd", "device")]
    cache.evict(1)
    assert cache.take_events() == [stored((d,), c, "d", "host"), BlockRemoved(block_hashes=(d,), medium="device")]
    assert cache.take_events() == []


def test_block_hashes_are_the_same_in_every_process():
    program = (
        "import numpy as np; from anyattn.mem_cache.prefix_cache.events import block_hashes;"
        "print([h.hex() for h in block_hashes(np.arange(10), 4, ('lora', 3, b'salt', None))])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([h.hex() for h in block_hashes(list(range(10)), 4, ("lora", 3, b"salt", None))])
    # computed once by hashlib from what the docstring says
    assert [h.hex() for h in block_hashes([1, 2, -3, 4], 2)] == [
        "9f72dadd45ba5334de07412cd1b67246",
        "bbf760a53802762a981b5c4cdb847e0f",
    ]
    assert block_hashes([1, 2], 2, "None") != block_hashes([1, 2], 2, None)


# Proofs


def _node(cache, text):
    return next(node for node in cache._cached.tree.nodes() if chr(np.frombuffer(node.tokens, np.int32)[0]) == text)


def test_check_finds_what_is_damaged():
    def tokens(cache):
        _node(cache, "c").tokens = b"\\1" * 32

    def lost_page(cache):
        _node(cache, "c").pages = _node(cache, "c").pages[:4]

    def twice(cache):
        _node(cache, "c").pages = _node(cache, "x").pages

    def children(cache):
        _node(cache, "a").num_device_children = 1

    def parent(cache):
        _node(cache, "c").parent = _node(cache, "x")

    def held(cache):
        cache._cached.held[:] = True

    def freed(cache):
        cache.table.release(np.frombuffer(_node(cache, "c").pages, np.int32))

    def counted(cache):
        cache._cached.num_held_pages += 1

    def valued(cache):
        cache._cached.queue.stamp[np.frombuffer(_node(cache, "a").pages, np.int32)] = 0

    def forgotten(cache):
        cache._cached.queue.discard(_node(cache, "c"))

    def overrated(cache):
        cache._cached.queue.stamp[:] = 0

    def root(cache):
        cache._cached.tree.roots["empty"] = type(next(iter(cache._cached.tree.roots.values())))("empty", b"")

    def hashes(cache):
        _node(cache, "x").hashes = bytes(32)

    def divided(cache):
        cache._cached.tree.split(_node(cache, "c"), 1)

    def pinned(cache):
        cache._cached.host.pinned[1] = True

    def host_twice(cache):
        _node(cache, "h").pages = _node(cache, "h").pages[:4] * 2

    for harm in (
        tokens, lost_page, twice, children, parent, held, freed, counted, valued, forgotten, overrated, root, hashes,
        divided, pinned, host_twice,
    ):  # fmt: skip
        cache, _, _ = new_cache_with_host(num_pages=64, events=True)
        served(cache, letters("hh"))
        cache.evict(2)
        for text in ("abcd", "abxy"):
            served(cache, letters(text))
        cache.check()
        harm(cache)
        with pytest.raises(ContractError):
            cache.check()


def test_restoring_a_match_whose_pages_were_evicted_since_never_gives_what_another_sequence_has():
    table = PageTable(PagedAllocator(4, 4, debug=True), 4, debug=True)
    cache = PrefixCache(table, debug=True)
    (seq, other, third) = table.new_sequences(3)
    table.extend([seq], [16])
    cache.insert(list(range(16)), table.pages(seq))
    table.free([seq])
    match = cache.match(list(range(16)))
    assert match.num_tokens == 16
    cache.evict(3)
    table.extend([other], [12])
    again = cache.restore(match)
    assert not set(again.pages.tolist()) & set(table.pages(other).tolist())
    table.adopt(third, again.pages)
    assert table.lengths([third]) == [4]


def test_what_a_failing_tier_cannot_take_is_dropped_with_a_warning():
    class Full:
        num_pages = num_free_pages = 8

        def save(self, pages):
            raise StorageError("no room on the disk")

        def free(self, host_pages):
            pass

    table = PageTable(PagedAllocator(4, 4, debug=True), 4, debug=True)
    cache = PrefixCache(table, tiers=[Full()])
    (seq,) = table.new_sequences(1)
    table.extend([seq], [16])
    cache.insert(list(range(16)), table.pages(seq))
    table.free([seq])
    with pytest.warns(UserWarning, match="no room on the disk"):
        assert cache.evict(2) == 2
    assert (cache.num_pages, cache.num_host_pages) == (2, 0)
    assert cache.match(list(range(16))).num_tokens == 8
