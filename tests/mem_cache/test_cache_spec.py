"""Cache sizes: bytes a token and a page of real models, and pages for a memory size, exact at the limit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.errors import SpecError
from anyattn.mem_cache.spec import CacheGroup, CacheSpec, memory_needed, pages_for_memory, window_pages

MHA = {
    "num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "v_head_dim": 5, "kv_dtype": "float32", "page_size": 4
}  # fmt: skip
DSA = {
    "num_layers": 61, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "kv_dtype": "float8_e4m3fn",
    "page_size": 64, "kind": "dsa",
}  # fmt: skip
MLA = {**DSA, "kind": "mla", "kv_dtype": "bfloat16"}
INDEX = {**DSA, "kind": "index", "head_dim": 128, "v_head_dim": 0}
LLAMA_3_8B = {
    "num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "kv_dtype": "bfloat16", "page_size": 16
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (MHA, 2 * 3 * (8 + 5) * 4),
        (LLAMA_3_8B, 131072),
        (MLA, 70272),  # DeepSeek-V3
        (DSA, 61 * 656),
        (INDEX, 61 * 132),
    ],
    ids=["mha", "llama-3-8b", "mla", "dsa", "index"],
)
def test_bytes_per_token_count_what_is_stored_once_each(fields, expected):
    cache = CacheSpec(**fields)
    assert cache.bytes_per_token == expected
    assert cache.bytes_per_page == expected * cache.page_size
    pages = cache.pages_for_bytes(1 << 30)
    assert (pages + 1) * cache.bytes_per_page <= 1 << 30 < (pages + 2) * cache.bytes_per_page
    assert cache.pages_for_bytes(0) == 0


@pytest.mark.parametrize("layout", ["NHD", "HND", "NZ", "5D"])
def test_no_layout_adds_padding(layout):
    cache = CacheSpec(**{**LLAMA_3_8B, "layout": layout})
    elements = 0
    for shape in cache.page_shapes():
        size = 1
        for length in shape:
            size *= length
        elements += size
    assert elements * 2 * 32 == cache.bytes_per_page


@pytest.mark.parametrize(
    ("base", "fields", "named"),
    [
        ("mha", {"num_layers": -1}, "num_layers must be at least 0"),
        ("mha", {"page_size": 0}, "page_size must be at least 1"),
        ("mha", {"head_dim": -1}, "head_dim must be at least 1"),
        ("mha", {"v_head_dim": 0}, "v_head_dim must be at least 1"),
        ("mha", {"kv_dtype": "int8"}, "kv_dtype must be one of"),
        ("mha", {"layout": "DNH"}, "layout must be one of NHD, HND, NZ, 5D"),
        ("mha", {"layout": "NZ"}, "keys in pieces of 16, so their dim must be a multiple of 16, as 16; 8 is not"),
        ("mha", {"kind": "mqa"}, "kind must be one of mha, mla, dsa, index"),
        ("mla", {"num_kv_heads": 2}, "num_kv_heads must be 1 where kind is 'mla'"),
        ("mla", {"v_head_dim": 577}, "v_head_dim must be at most head_dim, 576"),
        ("mla", {"layout": "NZ", "v_head_dim": 500}, "dim must be a multiple of 16, as 512; 500 is not"),
        ("dsa", {"head_dim": 512}, "head_dim must be 576 where kind is 'dsa'"),
        ("dsa", {"v_head_dim": 576}, "v_head_dim must be 512"),
        ("dsa", {"kv_dtype": "bfloat16"}, "kv_dtype must be 'float8_e4m3fn'"),
        ("dsa", {"layout": "HND"}, "layout must be 'NHD'"),
        ("index", {"v_head_dim": 128}, "v_head_dim must be 0 where kind is 'index'"),
        ("index", {"head_dim": 126}, "head_dim must be a multiple of 4"),
        ("index", {"num_kv_heads": 4}, "num_kv_heads must be 1"),
    ],
)
def test_a_cache_spec_that_means_nothing_is_refused(base, fields, named):
    with pytest.raises(SpecError, match=named):
        CacheSpec(**{**{"mha": MHA, "mla": MLA, "dsa": DSA, "index": INDEX}[base], **fields})


def most_window_pages(window, page_size, num_seqs, new_tokens):
    """The same by trying every way to share the new tokens, each sequence where in its page it does worst."""

    def span(count):
        last = range(page_size)  # where in its page the last of `window - 1 + count` tokens may lie
        return max(end // page_size - (end - (window - 2 + count)) // page_size + 1 for end in last)

    best = [0] * (new_tokens + 1)  # of the sequences so far, for each number of tokens that they share
    for _ in range(num_seqs):
        best = [
            max(best[tokens - count] + span(max(count, 1)) for count in range(tokens + 1))  # without: as after one
            for tokens in range(new_tokens + 1)
        ]
    return best[new_tokens]


@settings(max_examples=60)
@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 4), st.integers(0, 24))
def test_no_way_to_share_new_tokens_needs_more_window_pages_and_one_needs_as_many(
    window, page_size, num_seqs, new_tokens
):
    pages = window_pages(window, page_size, num_seqs, new_tokens)
    assert pages == most_window_pages(window, page_size, num_seqs, new_tokens)


def test_decoding_needs_the_pages_of_a_window_and_one_more_for_each_sequence():
    assert window_pages(1024, 16, 8, 2) == 8 * (64 + 1)
    assert window_pages(128, 64, 32, 0) == 32 * (2 + 1)
    assert window_pages(128, 64, 32, 32) == 32 * (2 + 1) + 10  # ten sequences with three new tokens each
    assert window_pages(16, 16, 8, 8) == 8 * 2 + 2
    assert window_pages(128, 64, 0, 32) == 0
    for wrong in ((0, 16, 1, 1), (16, 0, 1, 1), (16, 16, -1, 1)):
        with pytest.raises(SpecError, match="at least"):
            window_pages(*wrong)


def group(num_layers, window=None, **fields):
    return CacheGroup(cache=CacheSpec(**{**LLAMA_3_8B, "num_layers": num_layers, **fields}), window=window)


GEMMA_3 = [group(5), group(25, window=1024)]


def test_windows_take_what_they_need_and_full_layers_the_rest():
    budget = 8 << 30
    full, window = pages_for_memory(GEMMA_3, budget, num_seqs=16, max_new_tokens=2048)
    assert window == window_pages(1024, 16, 16, 2048) < full
    assert memory_needed(GEMMA_3, (full, window)) <= budget < memory_needed(GEMMA_3, (full + 1, window))
    everything = group(30).cache.pages_for_bytes(budget)
    assert full > 4 * everything


@settings(max_examples=100)
@given(
    windows=st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=4),
    budget=st.integers(0, 1 << 24),
    num_seqs=st.integers(0, 20),
    max_new_tokens=st.integers(0, 500),
    data=st.data(),
)
def test_the_pages_fit_with_their_null_pages_and_one_more_would_not(windows, budget, num_seqs, max_new_tokens, data):
    groups = [group(data.draw(st.integers(1, 3)), window=window, num_kv_heads=1) for window in windows]
    pages = pages_for_memory(groups, budget, num_seqs=num_seqs, max_new_tokens=max_new_tokens)
    limits = [None if w is None else window_pages(w, 16, num_seqs, max_new_tokens) for w in windows]
    if any(pages):
        assert memory_needed(groups, pages) <= budget
    most = max(pages)
    for count, limit in zip(pages, limits, strict=True):
        assert count == (most if limit is None else min(limit, most))
    more = [most + 1 if limit is None else min(limit, most + 1) for limit in limits]
    assert memory_needed(groups, more) > budget or list(more) == list(pages)


def test_the_limit_is_exact_to_a_byte():
    groups = [group(5), group(25, window=64)]
    needed = memory_needed(groups, (100, window_pages(64, 16, 4, 2)))
    ask = {"num_seqs": 4, "max_new_tokens": 2}
    assert pages_for_memory(groups, needed, **ask) == (100, 20)
    assert pages_for_memory(groups, needed - 1, **ask) == (99, 20)
    assert pages_for_memory(groups, 0, **ask) == (0, 0)


def test_pools_that_share_a_page_table_have_equally_many_pages():
    groups = [CacheGroup(cache=CacheSpec(**DSA)), CacheGroup(cache=CacheSpec(**INDEX))]
    latents, keys = pages_for_memory(groups, 100 << 30, num_seqs=64, max_new_tokens=8192)
    assert latents == keys == (100 << 30) // (61 * 64 * (656 + 132)) - 1


def test_a_group_without_layers_names_pages_and_takes_no_memory():
    groups = [group(0), group(5, window=64)]
    needed = memory_needed(groups, (1000, 20))
    assert needed == 21 * groups[1].cache.bytes_per_page
    ask = {"num_seqs": 4, "max_new_tokens": 2}
    assert pages_for_memory(groups, needed, **ask) == (21, 20)
    assert pages_for_memory(groups, needed - 1, **ask) == (19, 19)
    assert pages_for_memory(groups, 10 * needed, **ask) == (210, 20)
    assert pages_for_memory(groups, 0, **ask) == (0, 0)


def test_groups_that_cannot_share_a_page_table_are_refused():
    with pytest.raises(SpecError, match="one page_size, not 16 and 64"):
        pages_for_memory([group(5), group(5, page_size=64)], 1 << 30, num_seqs=1, max_new_tokens=1)
    for nothing in ([], [group(0)]):
        with pytest.raises(SpecError, match="at least one group with layers"):
            pages_for_memory(nothing, 1 << 30, num_seqs=1, max_new_tokens=1)
    with pytest.raises(SpecError, match="window"):
        group(1, window=0)
