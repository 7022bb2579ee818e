"""The worked values of the contract, and the index functions against loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anyattn.mem_cache import indices
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable


def padded(page_lists):
    rows = np.zeros((len(page_lists), max(map(len, page_lists), default=0)), dtype=np.int32)
    for row, pages in zip(rows, page_lists, strict=True):
        row[: len(pages)] = pages
    return rows, np.array([len(pages) for pages in page_lists], dtype=np.int64)


def test_lengths_8_10_7_with_prefixes_5_5_5_at_page_size_1_give_the_documented_indptr():
    table = PageTable(PagedAllocator(64, 1), 1)
    seqs = table.new_sequences(3)
    table.extend(seqs, [5, 5, 5])
    view = table.extend(seqs, [3, 5, 2])
    assert view.kv_lens.tolist() == [8, 10, 7]
    assert indices.indptr(view.num_pages).tolist() == [0, 8, 18, 25]
    assert indices.indptr(view.kv_lens - view.prefix_lens).tolist() == [0, 3, 8, 10]


def test_page_lists_give_the_documented_csr():
    rows, num_pages = padded([[5, 6, 8], [2, 3], [10, 11, 15, 18]])
    assert indices.kv_indices(rows, num_pages).tolist() == [5, 6, 8, 2, 3, 10, 11, 15, 18]
    assert indices.indptr(num_pages).tolist() == [0, 3, 5, 9]


def test_a_token_in_page_p_at_offset_o_has_slot_p_times_page_size_plus_o():
    for page_size in (1, 7, 16, 64):
        rows, _ = padded([[9, 4], [2, 3]])
        owner, positions = indices.token_positions(np.array([0, 0]), np.array([2 * page_size, page_size + 1]))
        expected = [
            rows[sequence][position // page_size] * page_size + position % page_size
            for sequence, length in enumerate([2 * page_size, page_size + 1])
            for position in range(length)
        ]
        slots = indices.slots(rows, owner, positions, page_size)
        assert slots.tolist() == expected
        assert slots.dtype == np.int64


def test_slots_past_two_to_the_31_are_right():
    rows = np.array([[2**31 - 1]], dtype=np.int32)
    assert indices.slots(rows, np.array([0]), np.array([63]), 64).tolist() == [(2**31 - 1) * 64 + 63]


def test_last_page_len_is_1_to_page_size_and_0_without_tokens():
    lengths = np.array([0, 1, 15, 16, 17, 32])
    assert indices.last_page_len(lengths, 16).tolist() == [0, 1, 15, 16, 1, 16]
    assert indices.last_page_len(lengths, 1).tolist() == [0, 1, 1, 1, 1, 1]


@given(st.lists(st.lists(st.integers(1, 999), max_size=9), max_size=6))
def test_kv_indices_is_the_page_lists_one_after_the_other(page_lists):
    rows, num_pages = padded(page_lists)
    assert indices.kv_indices(rows, num_pages).tolist() == [page for pages in page_lists for page in pages]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6))
def test_token_positions_count_on_from_each_prefix(pairs):
    prefixes = np.array([prefix for prefix, _ in pairs], dtype=np.int64)
    lengths = prefixes + np.array([new for _, new in pairs], dtype=np.int64)
    owner, positions = indices.token_positions(prefixes, lengths)
    expected = [(i, prefix + j) for i, (prefix, new) in enumerate(pairs) for j in range(new)]
    assert list(zip(owner.tolist(), positions.tolist(), strict=True)) == expected
