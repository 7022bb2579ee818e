"""The page table: refusals that change nothing, shared pages, and windows. The state machine is test_machine.py's."""

import pickle

import numpy as np
import pytest
import torch

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.windows import WindowPages


def new_table(num_pages=8, page_size=4, window=None, num_window_pages=None):
    windows = []
    if window is not None:
        allocator = PagedAllocator(num_window_pages or num_pages, page_size, debug=True)
        windows = [WindowPages(window, allocator, num_pages=num_pages, page_size=page_size)]
    return PageTable(PagedAllocator(num_pages, page_size, debug=True), page_size, windows=windows, debug=True)


def state(table):
    """Everything that a refused call must leave as it was."""
    allocators = [table.allocator, *(window.allocator for window in table.windows)]
    return (
        [allocator._free[: allocator.num_free_pages].tolist() for allocator in allocators],
        [allocator._refs.tolist() for allocator in allocators],
        [table._pages[row, :count].tolist() for row, count in enumerate(table._num_pages)],
        table._lengths.tolist(),
        table._last_slots.tolist(),
        table._held.tolist(),
        table._handles._living.tolist(),
        [(window.page_of.tolist(), window._holders.tolist()) for window in table.windows],
        [first.tolist() for first in table._first_columns],
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


def test_the_refusal_crosses_processes_with_all_that_it_says():
    error = OutOfPagesError(3, 1, 4, window=7, request="restore")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


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


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (-1, 1), (4, 0), (4, 1025)])
def test_an_allocator_of_no_pages_or_an_unsupported_page_size_is_refused(num_pages, page_size):
    with pytest.raises(ContractError):
        PagedAllocator(num_pages, page_size)


def test_an_empty_batch_and_an_empty_sequence_are_fine():
    table = new_table()
    assert table.new_sequences(0) == []
    view = table.extend([], [])
    assert view.page_rows().shape == (0, 0)
    assert view.out_slots().shape == (0,)
    (seq,) = table.new_sequences(1)
    assert table.extend([seq], [0]).num_pages.tolist() == [0]
    assert table.pages(seq).tolist() == []
    table.free([seq])
    table.free([])


def test_a_step_view_keeps_its_numbers_and_refuses_tensors_once_the_table_has_changed():
    table = new_table()
    seqs = table.new_sequences(2)
    view = table.extend(seqs, [3, 1])
    kept = [array.copy() for array in (view.prefix_lens, view.kv_lens, view.num_pages, view.last_slots)]
    table.extend(seqs, [8, 0])
    for call in (view.out_slots, view.tensors, view.page_rows):
        with pytest.raises(ContractError, match="right after extend"):
            call()
    for array, before in zip((view.prefix_lens, view.kv_lens, view.num_pages, view.last_slots), kept, strict=True):
        assert np.array_equal(array, before)


def test_one_number_of_new_tokens_serves_all_sequences():
    table = new_table()
    seqs = table.new_sequences(3)
    assert table.extend(seqs, 2).kv_lens.tolist() == [2, 2, 2]
    assert table.extend(np.array(seqs), 0).kv_lens.tolist() == [2, 2, 2]


@pytest.mark.parametrize("form", ["list", "tuple", "int32", "uint64", "tensor"])
def test_handles_come_in_any_form_of_integers_again_and_again(form):
    table = new_table(num_pages=40)
    seqs = table.new_sequences(2)
    forms = {"list": list, "tuple": tuple, "tensor": torch.tensor}
    for _ in range(3):
        table.extend(forms.get(form, lambda handles: np.array(handles, dtype=form))(seqs), 1)
        table.extend(seqs, [1, 1])
        assert table.extend([], []).kv_lens.size == 0
    assert table.lengths(seqs) == [6, 6]


def test_an_array_of_handles_that_was_changed_in_place_is_another_batch():
    table = new_table(num_pages=40)
    handles = np.array(table.new_sequences(2))
    table.extend(handles, 1)
    handles[0] = 0
    with pytest.raises(ContractError, match="not of this runtime"):
        table.extend(handles, 1)


TOO_LONG = [np.array([2**64 - 1], dtype=np.uint64), 2**70, [2**63 + 5]]


@pytest.mark.parametrize("kept", TOO_LONG, ids=["uint64", "int", "list"])
def test_lengths_that_no_integer_of_the_table_holds_are_refused_and_change_nothing(kept):
    table = new_table(window=5)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [5])
    before = state(table)
    with pytest.raises(ContractError, match="no sequence here has"):
        table.truncate([seq], kept)
    assert state(table) == before
    assert table.extend([], 2**70).kv_lens.size == 0


def test_more_sequences_than_there_can_be_are_refused_before_the_table_grows():
    table = new_table()
    table.new_sequences(2)
    with pytest.raises(ContractError, match=r"1048575 sequences can be alive, and 2 are"):
        table.new_sequences(10**9)
    assert table._lengths.size == table._handles.num_rows == 16


def test_a_sequence_of_fewer_than_no_tokens_is_refused():
    table = new_table()
    with pytest.raises(ContractError, match="-3 tokens"):
        table.restore_sequence(np.zeros(0, dtype=np.int32), -3)


def test_slots_are_the_caller_s_own():
    table = new_table()
    seqs = table.new_sequences(2)
    table.extend(seqs, 1).out_slots().zero_()
    table.check()
    table.extend(seqs, 1)


def test_a_step_whose_window_pages_were_let_go_by_a_later_one_is_refused():
    table = new_table(num_pages=64, page_size=1, window=4)
    first, second = table.new_sequences(2)
    table.extend([first, second], 8)
    earlier, other = table.extend([first], [3]), table.extend([second], [3])
    later = table.extend([first], [1])
    with pytest.raises(ContractError, match="a window's pages were let go"):
        table.require_whole(earlier)
    table.require_whole(later)
    table.require_whole(other)


def test_a_page_size_that_is_not_the_allocator_s_is_refused():
    with pytest.raises(ContractError, match=r"one page_size, not \[4, 8\]"):
        PageTable(PagedAllocator(8, 4), 8)


def test_what_the_device_is_to_be_told_stays_bounded_while_nobody_asks():
    table = new_table(num_pages=64, page_size=1, window=3)
    (seq,) = table.new_sequences(1)
    for _ in range(300):
        table.extend([seq], 40).out_slots()
        table.truncate([seq], [0])
    assert sum(pages.size for pages in table.windows[0].changed) <= 2 * 65


def test_the_table_has_columns_for_all_pages_that_the_allocator_gives():
    table = new_table(num_pages=120, page_size=1)
    long, short = table.new_sequences(2)
    table.extend([long], [60])
    table.extend([long, short], [0, 50])
    table.extend([long, short], [10, 0])
    pages = [*table.pages(long).tolist(), *table.pages(short).tolist()]
    assert len(set(pages)) == 120
    assert 0 not in pages


def test_counts_of_any_integer_dtype_and_of_none_leave_integers_behind():
    table = new_table()
    seqs = table.new_sequences(2)
    table.extend([], [])
    for dtype in (np.uint64, np.int8, np.uint8):
        view = table.extend(seqs, np.array([1, 2], dtype=dtype))
        assert view.last_slots.dtype == view.kv_lens.dtype == np.int64
    assert table.extend([], 1).out_slots().dtype == torch.int64
    assert table.lengths(seqs) == [3, 6]


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_slots_of_one_new_token_each_are_those_of_many(page_size):
    table = new_table(num_pages=200, page_size=page_size)
    seqs = table.new_sequences(3)
    many = table.extend(seqs, [5, 0, 7]).out_slots().tolist()
    rows = [table.pages(seq).tolist() for seq in seqs]
    expected = [
        pages[position // page_size] * page_size + position % page_size
        for pages, count in zip(rows, [5, 0, 7], strict=True)
        for position in range(count)
    ]
    assert many == expected
    for step in range(2 * page_size):
        slots = table.extend(seqs, 1).out_slots().tolist()
        for seq, before, slot in zip(seqs, [5, 0, 7], slots, strict=True):
            page, offset = divmod(before + step, page_size)
            assert slot == table.pages(seq)[page] * page_size + offset


def test_a_truncated_sequence_gives_back_what_it_no_longer_reaches():
    table = new_table(num_pages=8, page_size=4)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [14])
    first = table.pages(seq)
    table.truncate([seq], [5])
    assert table.lengths([seq]) == [5]
    assert table.pages(seq).tolist() == first[:2].tolist()
    assert table.allocator.num_free_pages == 6
    assert table.extend([seq], [1]).out_slots().tolist() == [int(first[1]) * 4 + 1]
    table.truncate([seq], [0])
    assert table.allocator.num_free_pages == 8


def test_a_step_names_the_last_pages_in_which_others_may_have_left_something():
    """New ones and copies, and after truncate those that hold what was cut off; full ones are of no interest."""
    table = new_table(num_pages=16, page_size=4)
    first, second = table.new_sequences(2)

    def tails(view):
        return [list(map(int, pair)) for pair in zip(*view.tail_pages(0), strict=True)]

    assert tails(table.extend([first, second], [6, 8])) == [[table.pages(first)[1], 2]]
    assert table.extend([first, second], [1, 0]).tails is None
    assert tails(table.extend([first, second], [0, 1])) == [[table.pages(second)[2], 1]]
    (twin,) = table.fork(first)
    assert tails(table.extend([first, twin], [1, 0])) == []  # a copy, and full
    table.truncate([first, second], [6, 0])
    assert table.extend([second], [0]).tails.tolist() == []
    (cut,) = table.fork(first)
    assert tails(table.extend([first, second, cut], [1, 0, 0])) == [[table.pages(first)[1], 3]]
    assert tails(table.extend([cut, second], [1, 1])) == [[table.pages(cut)[1], 3], [table.pages(second)[0], 1]]
    assert table.extend([cut, second, first], [0, 1, 0]).tails is None
    table.free([second])
    (fresh,) = table.new_sequences(1)
    assert table.extend([fresh], [0]).tails is None


def test_what_was_cut_off_is_remembered_while_the_table_grows_and_what_was_not_is_not():
    table = new_table(num_pages=16, page_size=4)
    first, second, third = table.new_sequences(3)
    table.extend([first, second, third], [7, 8, 6])
    table.truncate([first, second, third], [5, 4, 6])  # the second's page is full, the third loses nothing
    table.new_sequences(100)
    assert table.extend([second, third], [0, 1]).tails is not None
    assert table.extend([first, second], [1, 0]).tail_pages(0)[0].tolist() == [table.pages(first)[1]]
    assert not table._some_stale


def test_nothing_is_known_of_a_restored_sequence_s_last_page():
    table = new_table(num_pages=8, page_size=4)
    seq = table.restore_sequence(table.take(2), 6)
    assert table.extend([seq], [0]).tail_pages(0)[0].size == 0
    pages, used = table.extend([seq], [1]).tail_pages(0)
    assert (pages.tolist(), used.tolist()) == ([table.pages(seq)[1]], [7 - 4])


def test_a_refused_step_forgets_nothing_of_what_was_cut_off():
    table = new_table(num_pages=4, page_size=4)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [7])
    table.truncate([seq], [5])
    with pytest.raises(OutOfPagesError):
        table.extend([seq], [100])
    assert table.extend([seq], [1]).tail_pages(0)[1].tolist() == [2]


@pytest.mark.parametrize(("kept", "message"), [([6], "here has 6 tokens"), ([-1], "negative"), ([1, 2], "one number")])
def test_lengths_that_truncate_cannot_give_are_refused_and_change_nothing(kept, message):
    table = new_table()
    (seq,) = table.new_sequences(1)
    table.extend([seq], [5])
    before = state(table)
    with pytest.raises(ContractError, match=message):
        table.truncate([seq], kept)
    assert state(table) == before


def test_a_step_of_a_sequence_that_was_truncated_since_is_refused_even_at_its_old_length():
    table = new_table()
    (seq, other) = table.new_sequences(2)
    view, untouched = table.extend([seq], [9]), table.extend([other], [3])
    table.truncate([seq], [2])
    table.extend([seq], [7])
    with pytest.raises(ContractError, match="truncated after"):
        table.require_whole(view)
    table.require_whole(untouched)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_fork_shares_pages_and_the_first_writer_gets_a_copy_of_a_partial_one(page_size):
    table = new_table(num_pages=20, page_size=page_size)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [6])
    before = table.pages(seq)
    twin, other = table.fork(seq, 2)
    assert table.lengths([twin, other]) == [6, 6]
    assert table.allocator.num_free_pages == 20 - before.size
    assert table.extend([seq, twin], [0, 0]).copies == ()
    view = table.extend([twin], [1])
    if page_size == 1:
        assert view.copies == ()
        assert table.pages(twin)[:-1].tolist() == before.tolist()
    else:
        ((pool, sources, targets),) = view.copies
        assert (pool, sources.tolist(), targets.tolist()) == (0, [before[1]], [table.pages(twin)[1]])
        assert table.pages(twin)[0] == before[0]
        assert table.pages(twin)[1] not in before
    assert table.pages(seq).tolist() == table.pages(other).tolist() == before.tolist()
    table.free([seq])
    assert table.extend([other], [1]).copies == ()  # the last one that has the page writes into it


def test_twins_that_write_in_one_step_get_a_copy_each_and_the_copied_page_is_not_handed_out_in_it():
    table = new_table(num_pages=8, page_size=4)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [6])
    (shared,) = table.pages(seq)[1:]
    (twin,) = table.fork(seq)
    (copies,) = table.extend([seq, twin], [1, 1]).copies
    assert copies.sources.tolist() == [shared, shared]
    assert shared not in copies.targets
    assert len(set(copies.targets.tolist())) == 2


def test_a_copy_counts_as_a_page_needed_when_pages_are_short():
    table = new_table(num_pages=2, page_size=4)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [6])
    table.fork(seq)
    before = state(table)
    with pytest.raises(OutOfPagesError, match="1 pages needed, 0 of 2 free"):
        table.extend([seq], [1])
    assert state(table) == before


def test_an_adopted_prefix_is_shared_with_its_holder_until_both_let_go():
    table = new_table(num_pages=8, page_size=4)
    (seq, empty) = table.new_sequences(2)
    table.extend([seq], [9])
    pages = table.pages(seq)[:2]
    table.hold(pages)
    table.free([seq])
    assert table.allocator.num_free_pages == 6
    table.adopt(empty, pages)
    assert table.lengths([empty]) == [8]
    assert table.release(pages) == 0
    table.free([empty])
    assert table.allocator.num_free_pages == 8


def test_pages_that_nobody_holds_are_refused_by_name_and_nothing_changes():
    table = new_table(num_pages=8, page_size=4)
    (seq, full) = table.new_sequences(2)
    table.extend([full], [8])
    own = table.pages(full)
    before = state(table)
    for call, message in [
        (lambda: table.adopt(seq, [3]), "is free"),
        (lambda: table.adopt(seq, [0]), "1 to 8"),
        (lambda: table.adopt(seq, [9]), "1 to 8"),
        (lambda: table.adopt(seq, [int(own[0])] * 2), "twice"),
        (lambda: table.adopt(full, own), "only an empty"),
        (lambda: table.hold([3]), "is free"),
        (lambda: table.hold([1.5]), "page ids"),
        (lambda: table.release(own), "nobody holds"),
        (lambda: table.restore_sequence(own, 8), "not held by the caller"),
        (lambda: table.restore_sequence(own, 9), "not what 2 pages"),
        (lambda: table.take(2, [np.ones(2, dtype=bool)]), "0 windows"),
        (lambda: table.fork(full, -1), "cannot make"),
    ]:
        with pytest.raises(ContractError, match=message):
            call()
        assert state(table) == before
    with pytest.raises(OutOfPagesError):
        table.take(7)
    assert state(table) == before


def test_pages_taken_become_a_sequence_or_go_back():
    table = new_table(num_pages=8, page_size=4)
    pages = table.take(3)
    seq = table.restore_sequence(pages, 10)
    assert table.pages(seq).tolist() == pages.tolist()
    assert table.extend([seq], [2]).out_slots().tolist() == [int(pages[2]) * 4 + 2, int(pages[2]) * 4 + 3]
    assert table.release(table.take(2)) == 2


def test_pages_behind_the_window_return_to_the_free_list_while_the_sequence_runs():
    table = new_table(num_pages=64, page_size=4, window=6, num_window_pages=4)
    (window,) = table.windows
    (seq,) = table.new_sequences(1)
    for length in range(1, 200):
        table.extend([seq], 1)
        kept = np.flatnonzero(window.page_of[table.pages(seq)])
        first_visible = max(length - 1 - (6 - 1), 0)  # what the newest token sees begins here
        assert kept.tolist() == list(range(first_visible // 4, -(-length // 4)))
    table.free([seq])
    assert window.allocator.num_free_pages == 4


def test_a_prompt_takes_window_pages_for_all_of_its_step_and_keeps_those_of_the_window():
    table = new_table(num_pages=64, page_size=4, window=6, num_window_pages=20)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [80])
    assert table.windows[0].allocator.num_free_pages == 0
    table.extend([seq], [1])
    assert table.windows[0].allocator.num_free_pages == 20 - 3


def test_short_window_pages_are_refused_by_name_and_pages_that_the_step_lets_go_count_as_free():
    table = new_table(num_pages=64, page_size=4, window=4, num_window_pages=2)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [8])
    table.extend([seq], [4])  # takes one page, lets one go
    before = state(table)
    with pytest.raises(OutOfPagesError, match="window 4") as caught:
        table.extend([seq], [9])
    assert (caught.value.pages_needed, caught.value.pages_free, caught.value.window) == (3, 1, 4)
    assert state(table) == before


def test_twins_keep_a_window_page_until_both_are_past_it():
    table = new_table(num_pages=64, page_size=4, window=4)
    (window,) = table.windows
    (seq,) = table.new_sequences(1)
    table.extend([seq], [8])
    (twin,) = table.fork(seq)
    page = table.pages(seq)[1]
    table.extend([seq], [8])
    table.extend([seq], [1])
    assert window.page_of[page] != 0
    table.extend([twin], [8])
    table.extend([twin], [1])
    assert window.page_of[page] == 0


def test_both_pools_copy_a_shared_partial_page():
    table = new_table(num_pages=16, page_size=4, window=9)
    (window,) = table.windows
    (seq,) = table.new_sequences(1)
    table.extend([seq], [6])
    (twin,) = table.fork(seq)
    full, windowed = table.extend([twin], [1]).copies
    assert (full.pool, windowed.pool) == (0, 1)
    assert windowed.sources.tolist() == window.page_of[full.sources].tolist() != [0]
    assert windowed.targets.tolist() == window.page_of[full.targets].tolist() != [0]


def test_a_sequence_with_windows_shrinks_to_where_its_last_step_began_and_no_further():
    table = new_table(num_pages=64, page_size=4, window=5)
    (seq,) = table.new_sequences(1)
    table.extend([seq], [20])
    table.extend([seq], [7])
    table.truncate([seq], [20])
    before = state(table)
    with pytest.raises(ContractError, match="let go of the pages before"):
        table.truncate([seq], [8])
    assert state(table) == before
    table.truncate([seq], [0])
    table.extend([seq], [3])


def test_a_prefix_is_usable_as_far_as_the_window_pages_before_its_end_are_there():
    table = new_table(num_pages=64, page_size=4, window=6)
    (seq, other) = table.new_sequences(2)
    table.extend([seq], [32])
    pages = table.pages(seq)
    assert table.usable_prefix(pages) == 8
    table.hold(pages[:3])  # the cache took the beginning while its window pages were there
    table.extend([seq], [1])
    assert table.windows[0].page_of[pages].astype(bool).tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert table.usable_prefix(pages) == 8
    assert table.usable_prefix(pages[:7]) == 3
    table.hold(pages[3:])
    with pytest.raises(ContractError, match="were let go"):
        table.adopt(other, pages[:5])
    table.adopt(other, pages[:3])
    assert table.release(pages) == 0
    table.free([seq, other])
    table.check()
