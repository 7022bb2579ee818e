"""Allocator and page table: hand-written refusals, and a state machine against a plain Python model."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable


def new_table(num_pages=8, page_size=4):
    return PageTable(PagedAllocator(num_pages, page_size), page_size, debug=True)


def state(table):
    """Everything that a refused call must leave as it was."""
    allocator = table.allocator
    return (
        allocator._free[: allocator.num_free_pages].tolist(),
        table._pages.tolist(),
        table._lengths.tolist(),
        table._alive.tolist(),
    )


def test_the_null_page_is_never_handed_out_and_every_other_page_is():
    assert sorted(PagedAllocator(8, 4).alloc(8).tolist()) == list(range(1, 9))


def test_a_refused_request_names_pages_needed_and_free_and_changes_nothing():
    table = new_table(num_pages=4, page_size=4)
    seqs = table.new_sequences(2)
    table.extend(seqs, [5, 1])
    before = state(table)
    with pytest.raises(OutOfPagesError, match=r"3 pages needed, 1 of 4 free") as caught:
        table.extend(seqs, [7, 8])
    assert (caught.value.pages_needed, caught.value.pages_free) == (3, 1)
    assert state(table) == before
    table.check()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, -1], "negative"),
        ([1], "one number for each"),
        ([1, 2, 3], "one number for each"),
        ([1.0, 2.0], "integers"),
        ([True, False], "integers"),
        ([[1, 2]], "one number for each"),
    ],
)
def test_counts_that_mean_nothing_are_refused_and_change_nothing(counts, message):
    table = new_table()
    seqs = table.new_sequences(2)
    before = state(table)
    with pytest.raises(ContractError, match=message):
        table.extend(seqs, counts)
    assert state(table) == before


def test_an_overlong_length_is_refused_without_overflow():
    table = new_table()
    seqs = table.new_sequences(1)
    for count in (2**31, 2**40, 2**62):
        with pytest.raises(OutOfPagesError):
            table.extend(seqs, [count])
    table.check()


def test_a_freed_sequence_is_refused_even_when_its_row_has_a_new_owner():
    table = new_table()
    (old,) = table.new_sequences(1)
    table.extend([old], [3])
    table.free([old])
    new = table.new_sequences(20)
    assert old not in new
    for call in (lambda: table.extend([old], [1]), lambda: table.free([old]), lambda: table.lengths([old])):
        with pytest.raises(ContractError, match="was freed"):
            call()
    assert table.lengths(new) == [0] * 20


@pytest.mark.parametrize("handle", [0, 1, -1, 2**40, 2**62])
def test_a_handle_that_was_never_given_is_refused(handle):
    table = new_table()
    table.new_sequences(3)
    with pytest.raises(ContractError, match="not of this runtime"):
        table.extend([handle], [1])


def test_a_sequence_named_twice_is_refused():
    table = new_table()
    (seq,) = table.new_sequences(1)
    for call in (lambda: table.extend([seq, seq], [1, 1]), lambda: table.free([seq, seq])):
        with pytest.raises(ContractError, match="twice"):
            call()
    assert table.lengths([seq]) == [0]


def test_freeing_a_page_twice_a_foreign_page_or_the_null_page_is_refused_at_every_page_size():
    for page_size in (1, 16):
        allocator = PagedAllocator(8, page_size)
        pages = allocator.alloc(3)
        for wrong in ([pages[0], pages[0]], [0], [9], [-1], [pages[0], 8]):
            with pytest.raises(ContractError):
                allocator.free(np.array(wrong, dtype=np.int32))
            assert allocator.num_free_pages == 5
            allocator.check()
        allocator.free(pages)
        with pytest.raises(ContractError, match="not allocated"):
            allocator.free(pages)
        allocator.check()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (-1, 1), (4, 0), (4, 1025)])
def test_an_allocator_of_no_pages_or_an_unsupported_page_size_is_refused(num_pages, page_size):
    with pytest.raises(ContractError):
        PagedAllocator(num_pages, page_size)


def test_an_empty_batch_and_an_empty_sequence_are_fine():
    table = new_table()
    assert table.new_sequences(0) == []
    view = table.extend([], [])
    assert view.rows.shape[0] == 0
    (seq,) = table.new_sequences(1)
    assert table.extend([seq], [0]).num_pages.tolist() == [0]
    assert table.pages(seq) == []
    table.free([seq])
    table.free([])


def test_a_step_view_does_not_change_when_the_table_does():
    table = new_table()
    seqs = table.new_sequences(2)
    view = table.extend(seqs, [3, 9])
    rows = view.rows.copy()
    table.extend(seqs, [8, 0])
    table.free(seqs)
    assert np.array_equal(view.rows, rows)


class PageTableMachine(RuleBasedStateMachine):
    """The table against a dictionary of lengths and a count of pages."""

    sequences = Bundle("sequences")

    @initialize(page_size=st.sampled_from([1, 2, 3, 16, 64]), num_pages=st.integers(1, 60))
    def make(self, page_size, num_pages):
        self.page_size, self.num_pages = page_size, num_pages
        self.table = new_table(num_pages, page_size)
        self.lengths = {}

    def pages_for(self, tokens):
        return -(-tokens // self.page_size)

    @rule(target=sequences)
    def new(self):
        (seq,) = self.table.new_sequences(1)
        assert seq not in self.lengths
        self.lengths[seq] = 0
        return seq

    @rule(data=st.data())
    def extend(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True)) if self.lengths else []
        counts = [data.draw(st.integers(0, 3 * self.page_size)) for _ in chosen]
        owned = {seq: self.table.pages(seq) for seq in chosen}
        needed = sum(
            self.pages_for(self.lengths[seq] + count) - self.pages_for(self.lengths[seq])
            for seq, count in zip(chosen, counts, strict=True)
        )
        free = self.num_pages - sum(map(self.pages_for, self.lengths.values()))
        before = state(self.table)
        if needed > free:
            with pytest.raises(OutOfPagesError):
                self.table.extend(chosen, counts)
            assert state(self.table) == before
            return
        view = self.table.extend(chosen, counts)
        for i, (seq, count) in enumerate(zip(chosen, counts, strict=True)):
            assert view.prefix_lens[i] == self.lengths[seq]
            self.lengths[seq] += count
            assert self.table.pages(seq)[: len(owned[seq])] == owned[seq]
            assert view.rows[i, : view.num_pages[i]].tolist() == self.table.pages(seq)
            assert not view.rows[i, view.num_pages[i] :].any()

    @rule(seq=consumes(sequences))
    def free(self, seq):
        self.table.free([seq])
        del self.lengths[seq]
        with pytest.raises(ContractError):
            self.table.lengths([seq])

    @invariant()
    def books_are_right(self):
        if hasattr(self, "table"):
            self.table.check()
            for seq, length in self.lengths.items():
                assert self.table.lengths([seq]) == [length]
                assert len(self.table.pages(seq)) == self.pages_for(length)


TestPageTableMachine = PageTableMachine.TestCase
TestPageTableMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
