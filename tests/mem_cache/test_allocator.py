"""The host allocator: reference counts, batches of extensions, and what debug mode catches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator

PAGE_SIZES = [1, 2, 3, 16, 64, 1000, 1024]


def books(allocator):
    return allocator._free[: allocator.num_free_pages].tolist(), allocator._refs.tolist(), allocator._extra_refs


def refused(allocator, call, message):
    before = books(allocator)
    with pytest.raises(ContractError, match=message):
        call()
    assert books(allocator) == before
    allocator.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_debug_mode_catches_double_and_foreign_frees(page_size):
    allocator = PagedAllocator(8, page_size, debug=True)
    pages = allocator.alloc(3)
    refused(allocator, lambda: allocator.free(np.array([pages[0], pages[0]])), "freed before")
    refused(allocator, lambda: allocator.free(np.array([9])), "1 to 8")
    refused(allocator, lambda: allocator.free(np.array([-1])), "1 to 8")
    refused(allocator, lambda: allocator.free(np.array([pages[0], 8])), "freed before, or belongs")
    assert allocator.free(np.array([0, 0])) == 0  # padding
    assert allocator.free(pages) == 3
    refused(allocator, lambda: allocator.free(pages), "freed before")
    refused(allocator, lambda: allocator.share(pages), "after it was freed")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_debug_mode_catches_use_after_free_aliasing_and_misalignment(page_size):
    allocator = PagedAllocator(8, page_size, debug=True)
    (page,) = allocator.alloc(1).tolist()
    length = page_size - 1 or 1
    slot = page * page_size + length - 1
    refused(allocator, lambda: allocator.extend([length], [length + 1], [0]), "extended, and")
    refused(allocator, lambda: allocator.extend([0], [1], [slot]), "outside of the null page")
    refused(allocator, lambda: allocator.extend([2], [1], [slot]), "below its prefix")
    if page_size > 1:
        refused(allocator, lambda: allocator.extend([length], [length + 1], [slot + 1]), "cannot hold token")
        refused(allocator, lambda: allocator.extend([length] * 2, [length + 1] * 2, [slot] * 2), "two sequences")
    allocator.free(np.array([page]))
    refused(allocator, lambda: allocator.extend([length], [length + 1], [slot]), "after it was freed")


def test_a_page_freed_as_often_as_it_is_held_in_one_call_returns_once():
    allocator = PagedAllocator(4, 16)
    pages = allocator.alloc(2)
    allocator.share(pages)
    allocator.share(pages[:1])
    assert allocator.free(np.concatenate([pages, pages, pages[:1]])) == 2
    allocator.check()
    assert allocator.num_free_pages == 4


@pytest.mark.parametrize("lengths", [[2**32], [2**31, 3], [2**32 + 2, 3]])
def test_lengths_beyond_int32_are_refused_and_change_nothing(lengths):
    allocator = PagedAllocator(10, 1)
    nothing = [0] * len(lengths)
    with pytest.raises(OutOfPagesError, match=f"{sum(lengths)} pages needed"):
        allocator.extend(nothing, lengths, nothing)
    assert books(allocator) == books(PagedAllocator(10, 1))


def test_a_page_just_freed_is_the_next_to_be_used():
    allocator = PagedAllocator(8, 16)
    pages = allocator.alloc(5)
    allocator.free(pages[2:4])
    assert allocator.alloc(2).tolist() == pages[2:4].tolist()


@given(data=st.data(), page_size=st.sampled_from(PAGE_SIZES), num_pages=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_an_extension_fills_the_last_page_then_takes_whole_pages_then_the_tail(data, page_size, num_pages):
    allocator = PagedAllocator(num_pages, page_size, debug=True)
    prefixes = data.draw(st.lists(st.integers(0, 3 * page_size), min_size=1, max_size=5))
    new = [data.draw(st.integers(0, 3 * page_size)) for _ in prefixes]
    nothing, total = [0] * len(prefixes), sum(-(-length // page_size) for length in prefixes)
    if total > num_pages:
        with pytest.raises(OutOfPagesError, match=f"{total} pages needed, {num_pages} of"):
            allocator.extend(nothing, prefixes, nothing)
        assert books(allocator) == books(PagedAllocator(num_pages, page_size))
        return
    first = allocator.extend(nothing, prefixes, nothing)
    rows = [first.pages[a:b].tolist() for a, b in zip(first.indptr[:-1], first.indptr[1:], strict=True)]
    assert [len(row) for row in rows] == [-(-length // page_size) for length in prefixes]
    shared = [data.draw(st.booleans()) if row else False for row in rows]
    tails = [row[-1] for row, is_shared in zip(rows, shared, strict=True) if is_shared]
    allocator.share(np.array(tails, dtype=np.int32))
    last = [row[-1] * page_size + (p - 1) % page_size if row else 0 for row, p in zip(rows, prefixes, strict=True)]
    lengths = [p + n for p, n in zip(prefixes, new, strict=True)]
    copied = [s and n > 0 and p % page_size != 0 for s, n, p in zip(shared, new, prefixes, strict=True)]
    needed = [
        -(-length // page_size) - -(-p // page_size) + copy
        for length, p, copy in zip(lengths, prefixes, copied, strict=True)
    ]
    before = books(allocator)
    if sum(needed) > allocator.num_free_pages:
        with pytest.raises(OutOfPagesError):
            allocator.extend(prefixes, lengths, last)
        assert books(allocator) == before
        return
    second = allocator.extend(prefixes, lengths, last)
    assert np.diff(second.indptr).tolist() == needed
    assert second.copied_from.tolist() == [row[-1] if copy else 0 for row, copy in zip(rows, copied, strict=True)]
    assert len(set(second.pages.tolist())) == sum(needed)
    assert not set(second.pages.tolist()) & set(first.pages.tolist())
    allocator.check()
