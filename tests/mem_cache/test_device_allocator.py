"""The allocator whose books live on the device, beside the host's and a plain Python model: pages, refusals, waits."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.device_allocator import DeviceAllocator
from anyattn.mem_cache.kernels.books import NO_FAULT, Word

PAGE_SIZES = [1, 2, 3, 16, 64, 1000, 1024]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
INT = torch.int64


class Model:
    """The books in plain Python: one page after the other."""

    def __init__(self, num_pages, page_size):
        self.page_size = page_size
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages, 0, -1))  # the last one is the next to be used
        self.counts = [0] * (num_pages + 1)

    def needed(self, batch):
        """batch: prefix length, length and last slot of each sequence."""
        return [
            -(-length // self.page_size) - -(-prefix // self.page_size) + self.copies(prefix, length, slot)
            for prefix, length, slot in batch
        ]

    def copies(self, prefix, length, slot):
        return length > prefix and prefix % self.page_size > 0 and self.counts[slot // self.page_size] > 1

    def alloc(self, count):
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.counts[page] = 1
        return pages

    def extend(self, batch):
        copied_from = [slot // self.page_size if self.copies(*each) else 0 for each in batch for slot in each[2:]]
        pages = [self.alloc(count) for count in self.needed(batch)]
        self.free(copied_from)
        return pages, copied_from

    def share(self, pages):
        for page in pages:
            self.counts[page] += page > 0

    def free(self, pages):
        """Pages that are free now go on the stack such that the first one named is on top."""
        for page in pages:
            self.counts[page] -= page > 0
        self.free_pages += [page for page in reversed(dict.fromkeys(pages)) if page and self.counts[page] == 0]


def books(allocator):
    """Everything that a refusal must leave as it was."""
    kept = allocator._books
    words = kept.words.tolist()
    return (
        kept.stack[: words[Word.NUM_FREE]].tolist(),
        kept.counts.tolist(),
        kept.marks.tolist(),
        words[: Word.TOP] + words[Word.FAULTS : Word.FOUND],
    )


def extend(allocator, batch, *, slack=0, dtypes=(INT, INT)):
    """Extends by a batch of (prefix length, length, last slot). Returns pages of each sequence and copied_from."""
    device = allocator._books.device
    columns = [list(column) for column in zip(*batch, strict=True)] or [[], [], []]
    parts = [
        torch.tensor(part, dtype=dtype, device=device) for part, dtype in zip(columns, (*dtypes, INT), strict=True)
    ]
    most = sum(max(length - prefix, 0) for prefix, length, _ in batch) + slack
    return lists(allocator.extend(*parts, most_new_tokens=most))


def lists(extension):
    assert {part.dtype for part in (extension.indptr, extension.pages, extension.copied_from)} == {torch.int32}
    indptr, pages = extension.indptr.tolist(), extension.pages.tolist()
    assert not any(pages[indptr[-1] :])
    return [pages[start:end] for start, end in itertools.pairwise(indptr)], extension.copied_from.tolist()


def test_more_sequences_than_pages_are_refused_though_each_needs_few():
    allocator = DeviceAllocator(1, 1)
    for call in (
        lambda: allocator.decode(torch.tensor([1, 1]), torch.zeros(2, dtype=INT)),
        lambda: extend(allocator, [(0, 1, 0), (0, 2, 0)]),
    ):
        before = books(allocator)
        with pytest.raises(OutOfPagesError):
            call()
        assert books(allocator) == before


class Machine(RuleBasedStateMachine):
    """Sequences that grow, are forked and end, in the device's books, the host's and the model's."""

    device = "cpu"

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES), num_pages=st.integers(1, 40), debug=st.booleans(), data=st.data()
    )
    def begin(self, page_size, num_pages, debug, data):
        self.model = Model(num_pages, page_size)
        self.host = PagedAllocator(num_pages, page_size, debug=True)
        self.allocator = DeviceAllocator(num_pages, page_size, self.device, debug=debug)
        self.page_size = page_size
        self.sequences = []  # [length, pages]
        self.loose = []  # pages that alloc gave

    def ids(self, pages):
        return torch.tensor(pages, dtype=torch.int32, device=self.device)

    def refuses(self, needed, *calls):
        """Asserts that each call is refused, and leaves everything as it was, when the pages are short."""
        free = len(self.model.free_pages)
        if needed <= free:
            return False
        before = books(self.allocator)
        for call in calls:
            with pytest.raises(OutOfPagesError) as refusal:
                call()
            # Of a sequence that needs more than there are the device counts one more than there are: no sum overflows.
            least = min(needed, self.model.num_pages + 1)
            assert least <= refusal.value.pages_needed <= needed
            assert refusal.value.pages_free == free
        assert books(self.allocator) == before
        return True

    def grow(self, chosen, growth, call):
        """Extends in all three books, by what `call` does with the device's."""
        p = self.page_size
        batch = [
            (length, length + new, pages[-1] * p + (length - 1) % p if length else 0)
            for (length, pages), new in zip(chosen, growth, strict=True)
        ]
        by_column = [np.array(column, dtype=np.int64) for column in zip(*batch, strict=True)]
        if self.refuses(sum(self.model.needed(batch)), lambda: call(batch), lambda: self.host.extend(*by_column)):
            return
        new_pages, copied_from = self.model.extend(batch)
        assert call(batch) == (new_pages, copied_from)
        on_host = self.host.extend(*by_column)
        assert on_host.pages.tolist() == list(itertools.chain(*new_pages))
        assert on_host.copied_from.tolist() == copied_from
        for sequence, new, pages, copied in zip(chosen, growth, new_pages, copied_from, strict=True):
            sequence[0] += new
            sequence[1] = sequence[1][: -1 if copied else None] + pages

    def choose(self, data):
        while len(self.sequences) < 3:
            self.sequences.append([0, []])
        indices = st.lists(st.sampled_from(range(len(self.sequences))), min_size=1, unique=True)
        return [self.sequences[i] for i in data.draw(indices)]

    @rule(
        data=st.data(), dtypes=st.tuples(*[st.sampled_from([torch.int32, INT])] * 2), slack=st.sampled_from([0, 0, 9])
    )
    def extend(self, data, dtypes, slack):
        chosen = self.choose(data)
        most = max(5 * self.page_size // 2, 4)
        growth = data.draw(st.lists(st.integers(0, most), min_size=len(chosen), max_size=len(chosen)))
        self.grow(chosen, growth, lambda batch: extend(self.allocator, batch, dtypes=dtypes, slack=slack))

    @rule(data=st.data())
    def decode(self, data):
        chosen = self.choose(data)

        def decode(batch):
            lengths = torch.tensor([length for _, length, _ in batch], dtype=torch.int32, device=self.device)
            return lists(self.allocator.decode(lengths, torch.tensor([slot for *_, slot in batch], device=self.device)))

        self.grow(chosen, [1] * len(chosen), decode)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        length, pages = data.draw(st.sampled_from(self.sequences))
        for each, arrays in ((self.model, pages), (self.host, np.array(pages)), (self.allocator, self.ids(pages))):
            each.share(arrays)
        self.sequences.append([length, pages])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        """Frees several sequences in one call, which may name a page more than once."""
        chosen = self.choose(data)
        pages = data.draw(st.permutations([page for _, pages in chosen for page in pages] + [0]))
        self.sequences = [each for each in self.sequences if not any(each is one for one in chosen)]
        self.free(pages)

    def free(self, pages):
        self.model.free(pages)
        self.host.free(np.array(pages))
        assert self.allocator.free(self.ids(pages)) is None

    @rule(count=st.integers(0, 12))
    def alloc(self, count):
        if not self.refuses(count, lambda: self.allocator.alloc(count), lambda: self.host.alloc(count)):
            pages = self.model.alloc(count)
            assert self.allocator.alloc(count).tolist() == self.host.alloc(count).tolist() == pages
            self.loose += pages

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def free_loose(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.loose), unique=True))
        self.loose = [page for page in self.loose if page not in pages]
        self.free(pages)

    @invariant()
    def all_books_agree(self):
        if hasattr(self, "model"):
            self.allocator.check()
            self.host.check()
            free, counts, *_ = books(self.allocator)
            assert free == self.model.free_pages == self.host._free[: self.host.num_free_pages].tolist()
            assert counts == self.model.counts
            every = torch.arange(-1, len(counts) + 1, device=self.device)
            assert self.allocator.ref_counts(every).tolist() == [0, *counts, 0]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


class GpuMachine(Machine):
    device = "cuda:0"


TestGpuMachine = pytest.mark.cuda(GpuMachine.TestCase)
TestGpuMachine.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


def with_page(page_size, device, count=1):
    """An allocator of 8 pages in debug mode, one page held, a length with which it is the last, and its last slot."""
    allocator = DeviceAllocator(8, page_size, device, debug=True)
    (page,) = allocator.alloc(1).tolist()
    for _ in range(count - 1):
        allocator.share(torch.tensor([page], device=device))
    length = max(page_size - 1, 1)
    return allocator, page, length, page * page_size + length - 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_debug_mode_finds_misuse_before_anything_is_changed(page_size, device):
    allocator, page, length, slot = with_page(page_size, device)
    (gone,) = allocator.alloc(1).tolist()
    allocator.free(torch.tensor([gone], device=device))

    def refused(message, call, *arguments):
        before = books(allocator)
        with pytest.raises(ContractError, match=message):
            call(*arguments)
        assert books(allocator) == before
        allocator.check()

    def ids(*pages):
        return torch.tensor(pages, device=device)

    def batch(*sequences):
        return lambda: extend(allocator, sequences)

    refused(rf"page {page} is freed more often .*entry 0\)", allocator.free, ids(page, page))
    refused(rf"page {gone} is freed more often .*entry 2\)", allocator.free, ids(page, 0, gone))
    for foreign in (-1, 9, 2**31 - 1):
        refused(rf"page {foreign} is not one of .* 1 to 8 \(entry 1\)", allocator.free, ids(page, foreign))
        refused(rf"page {foreign} is not one of .* 1 to 8 \(entry 1\)", allocator.share, ids(page, foreign))
    refused("page 9 is not one of", batch((length, length + 1, slot + (9 - page) * page_size)))
    refused("page -1 is not one of", batch((length, length + 1, -1)))
    refused(rf"page {gone} is used after it was freed .*entry 1\)", allocator.share, ids(page, gone))
    refused(rf"page {gone} is used after", batch((0, 5, 0), (length, length, slot + (gone - page) * page_size)))
    refused("does not fit its prefix length", batch((length, length + 1, 0)))
    refused("does not fit its prefix length", batch((0, 1, slot)))
    refused("a length is below its prefix", batch((length + page_size, 1, slot)))
    refused("a length is below its prefix", batch((0, -1, 0)))
    if page_size > 1:
        refused("does not fit its prefix length", batch((length, length + 1, slot + 1)))
    if length % page_size:
        refused(f"more sequences would write to page {page}", batch(*[(length, length + 1, slot)] * 2))
        allocator.share(ids(page))
        refused(f"more sequences would write to page {page}", batch(*[(length, length + 1, slot)] * 3))
    with pytest.raises(ContractError, match="grow by 9 tokens in sum, and most_new_tokens is 8"):
        extend(allocator, [(0, 9, 0)], slack=-1)
    assert extend(allocator, [(length, length, slot)] * 3) == ([[], [], []], [0, 0, 0])  # nobody writes


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_without_debug_mode_check_tells_what_the_device_met(page_size):
    def allocator():
        made = DeviceAllocator(8, page_size, "cpu")
        made.alloc(2)
        return made

    for message, misuse in (
        ("page 2 is freed more often", lambda a: a.free(torch.tensor([1, 2, 2]))),
        ("page 3 is used after", lambda a: a.share(torch.tensor([1, 3]))),
        ("page 9 is not one of", lambda a: a.free(torch.tensor([9]))),
        ("does not fit its prefix", lambda a: extend(a, [(0, 1, page_size)])),
        ("below its prefix", lambda a: extend(a, [(page_size, 0, 2 * page_size - 1)])),
        ("5 pages were needed, more than the bound", lambda a: extend(a, [(0, 5 * page_size, 0)], slack=-page_size)),
    ):
        books_of = allocator()
        misuse(books_of)
        with pytest.raises(ContractError, match=f"in an earlier call: .*{message}"):
            books_of.check()


@pytest.mark.parametrize("device", DEVICES)
def test_two_sharers_of_a_partial_page_both_copy_it_and_it_goes_to_the_free_list_last(device):
    allocator, page, length, slot = with_page(16, device, count=2)
    pages, copied_from = extend(allocator, [(length, 40, slot)] * 2)
    assert copied_from == [page, page]
    assert [len(each) for each in pages] == [3, 3]
    assert page not in itertools.chain(*pages)
    assert allocator.ref_counts(torch.tensor([page], device=device)).tolist() == [0]
    assert allocator.alloc(1).tolist() == [page]


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_freed_as_often_as_it_is_held_in_one_call_returns_once_where_it_is_named_first(device):
    allocator = DeviceAllocator(9, 16, device, debug=True)
    allocator.alloc(4)
    allocator.share(torch.tensor([2, 2, 4], device=device))
    allocator.free(torch.tensor([2, 3, 0, 2, 4, 2, 1], device=device))
    assert allocator.num_free_pages == 8
    assert allocator.alloc(4).tolist() == [2, 3, 1, 5]


def test_the_bound_on_pages_is_reached_by_some_batch_and_exceeded_by_none():
    for page_size, num_seqs, most, shares in itertools.product((1, 2, 3, 4), (1, 2, 3), range(10), (False, True)):
        allocator = DeviceAllocator(1, page_size, "cpu")
        allocator._shares = shares
        needs = [
            max(
                -(-(used + new) // page_size) - (used > 0) + (shares and used > 0 and new > 0)
                for used in range(page_size)
            )
            for new in range(most + 1)
        ]
        batches = itertools.product(range(most + 1), repeat=num_seqs)
        worst = max(sum(needs[new] for new in batch) for batch in batches if sum(batch) <= most)
        assert allocator._most_pages(most, num_seqs) == worst


def test_the_torch_formulation_needs_no_value_from_the_device():
    """Meta tensors have shapes and no values: what a host would have to wait for cannot be read from them."""
    allocator = DeviceAllocator(300, 4, "meta")
    lengths, zeros = (torch.zeros(3, dtype=INT, device="meta") for _ in range(2))
    first = allocator.extend(zeros, lengths, zeros, most_new_tokens=14)
    allocator.share(first.pages)
    second = allocator.extend(lengths, lengths + 3, zeros, most_new_tokens=9)
    assert allocator.decode(lengths + 1, zeros).pages.shape == (3,)
    allocator.free(second.pages)
    allocator.free(first.pages)
    allocator.free(allocator.alloc(2))
    assert allocator.ref_counts(first.pages).shape == (3 + 11 // 4,)
    assert allocator.num_syncs == 0
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        allocator.check()


def test_the_host_waits_only_when_its_bound_does_not_cover_a_call():
    allocator = DeviceAllocator(100, 16, "cpu")
    zeros = torch.zeros(10, dtype=INT)
    tokens = torch.full((10,), 2, dtype=INT)
    for _ in range(2):  # each takes 10 pages, and 50 at most as far as the host knows
        allocator.extend(zeros, tokens, zeros, most_new_tokens=650)
    assert allocator.num_syncs == 0
    allocator.extend(zeros, tokens, zeros, most_new_tokens=650)
    assert allocator.num_syncs == 1
    allocator.extend(zeros, tokens, zeros, most_new_tokens=650)  # it now knows that 70 are free
    assert allocator.num_syncs == 1
    allocator.alloc(61 - 10)
    assert allocator.num_syncs == 2
    assert allocator.num_free_pages == 9
    assert allocator.num_syncs == 3
    with pytest.raises(OutOfPagesError, match="10 pages needed, 9 of 100 free"):
        allocator.extend(zeros, tokens, zeros, most_new_tokens=650)
    with pytest.raises(OutOfPagesError, match="10 pages needed, 9 of 100 free"):
        allocator.alloc(10)
    allocator.check()


class SlowEvent:
    """An event of a device that answers when the test says so."""

    def __init__(self):
        self.answers, self.recorded = True, 0

    def record(self):
        self.recorded += 1

    def query(self):
        return self.answers


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), max_size=30))
@settings(max_examples=50, deadline=None)
def test_news_that_come_late_never_raise_the_bound_above_what_is_free(steps):
    allocator = DeviceAllocator(60, 4, "cpu")
    news = allocator._news
    news._runs_ahead, news._copy, news._event = True, torch.zeros(1, dtype=INT), SlowEvent()
    held = []
    for count, frees, news._event.answers in steps:
        zeros = torch.zeros(count, dtype=INT)
        if count > int(allocator._books.words[Word.NUM_FREE]):
            with pytest.raises(OutOfPagesError, match=f"{count} pages needed"):
                allocator.decode(zeros + 1, zeros)
        else:
            held.append(allocator.extend(zeros, zeros + 1, zeros, most_new_tokens=2 * count).pages)
        if frees and held:
            allocator.free(held.pop(0))
        allocator.check()  # the host's bound among the rest


def test_a_device_that_answers_in_time_is_never_waited_for():
    allocator = DeviceAllocator(600, 4, "cpu")
    news = allocator._news
    news._runs_ahead, news._copy, news._event = True, torch.zeros(1, dtype=INT), SlowEvent()
    zeros = torch.zeros(10, dtype=INT)
    for _ in range(100):
        allocator.free(allocator.extend(zeros, zeros + 1, zeros, most_new_tokens=50).pages)
    assert allocator.num_syncs == 0
    assert news._event.recorded > 1


def test_requests_that_do_not_fit_the_contract_say_what_does():
    for num_pages, page_size, message in ((0, 16, "num_pages"), (2**31 - 1, 16, "num_pages"), (4, 1025, "page_size")):
        with pytest.raises(ContractError, match=message):
            DeviceAllocator(num_pages, page_size, "cpu")
    allocator = DeviceAllocator(4, 16, "cpu")
    one = torch.tensor([1])
    for message, call in (
        ("needs most_new_tokens", lambda: allocator.extend(one, one, one)),
        ("not -1", lambda: allocator.extend(one, one, one, most_new_tokens=-1)),
        (
            "prefix_lens has 2 entries, and lengths 1",
            lambda: allocator.extend(one.repeat(2), one, one, most_new_tokens=1),
        ),
        ("last_slots must be a flat tensor of torch.int64", lambda: allocator.decode(one, one.int())),
        ("lengths must be a flat tensor .* not list", lambda: allocator.decode([1], one)),
        ("on cpu, where the books are, not on meta", lambda: allocator.free(one.to("meta"))),
        ("not torch.float32 of shape", lambda: allocator.share(one.float())),
        ("not torch.int64 of shape", lambda: allocator.ref_counts(one[None])),
        ("cannot allocate -1", lambda: allocator.alloc(-1)),
    ):
        with pytest.raises(ContractError, match=message):
            call()
    allocator.check()
    assert allocator.num_syncs == 2


def test_nothing_asked_for_is_nothing_done():
    allocator = DeviceAllocator(4, 16, "cpu", debug=True)
    nothing = torch.zeros(0, dtype=INT)
    assert extend(allocator, []) == ([], [])
    assert lists(allocator.decode(nothing, nothing)) == ([], [])
    assert allocator.alloc(0).tolist() == []
    allocator.share(nothing)
    allocator.free(nothing)
    assert extend(allocator, [(0, 0, 0)] * 2) == ([[], []], [0, 0])
    assert allocator.num_free_pages == 4
    assert allocator._books.words[Word.FOUND] == NO_FAULT


def test_books_made_in_inference_mode_are_changed_outside_of_it():
    with torch.inference_mode():
        allocator = DeviceAllocator(4, 16)
        pages = allocator.alloc(2)
    allocator.share(pages.clone())
    assert allocator.ref_counts(pages).tolist() == [2, 2]


def test_strided_arrays_are_read_as_they_are():
    allocator = DeviceAllocator(20, 4, "cpu")
    lengths = torch.tensor([[5, -9], [9, -9]])[:, 0]
    pages, _ = lists(
        allocator.extend(torch.zeros(2, dtype=INT), lengths, torch.zeros(2, dtype=INT), most_new_tokens=14)
    )
    assert [len(each) for each in pages] == [2, 3]
    allocator.free(torch.tensor([[1, -9], [2, -9]])[:, 0])
    allocator.check()
    assert allocator.num_free_pages == 17


def run_steps(allocator, batches):
    """Steps as an engine makes them, for batches of these sizes, cut from memory at changing alignments."""
    for num_seqs in batches:
        memory = torch.zeros(num_seqs + 3, dtype=INT, device=allocator._books.device)
        zeros = memory[num_seqs % 3 :][:num_seqs]
        first = allocator.extend(zeros, zeros + 70, zeros, most_new_tokens=70 * num_seqs)
        allocator.share(first.pages)
        last_slots = first.pages[first.indptr[1:] - 1].long() * 64 + 5
        second = allocator.decode(zeros + 71, last_slots)  # copies each sequence's second page
        full_pages = first.pages[: 2 * num_seqs : 2]
        for pages in (first.pages, second.pages[1:], full_pages, second.pages[:1]):
            allocator.free(pages)


def test_the_steps_that_the_gpu_is_tried_with_leave_nothing_behind():
    allocator = DeviceAllocator(300, 64, "cpu", debug=True)
    run_steps(allocator, [1, 2, 5, 60])
    assert allocator.num_free_pages == 300


@pytest.mark.cuda
def test_steps_on_the_gpu_make_no_sync_and_compile_nothing_new():
    from anyattn.mem_cache.kernels import books_triton

    launched = [getattr(books_triton, name) for name in dir(books_triton) if name.endswith("_kernel")]
    launched = [kernel for kernel in launched if hasattr(kernel, "device_caches")]

    def compiled():
        return sum(len(cache[0]) for kernel in launched for cache in kernel.device_caches.values())

    allocator = DeviceAllocator(200_000, 64, "cuda:0")
    run_steps(allocator, [5, 6000])  # both ways to free
    before = compiled()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(allocator, [1, 2, 3, 16, 100, 257, 1023, 1024, 1025, 4097, 8193])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert before > 0
    assert compiled() == before
    assert allocator.num_syncs == 0
    allocator.check()
    assert allocator.num_free_pages == 200_000


@pytest.mark.cuda
def test_a_step_on_the_gpu_allocates_one_tensor_and_a_free_none():
    allocator = DeviceAllocator(50_000, 64, "cuda:0")
    zeros = torch.zeros(256, dtype=INT, device="cuda")
    lengths = zeros + 1000

    def step():
        extension = yield lambda: allocator.extend(zeros, lengths, zeros, most_new_tokens=256_000)
        yield lambda: allocator.decode(zeros, zeros)
        yield lambda: allocator.share(extension.pages)
        yield lambda: allocator.free(extension.pages)
        yield lambda: allocator.free(extension.pages)

    for _ in range(2):  # kernels are compiled the first time
        counts, calls, result = [], step(), None
        for _ in range(5):
            call = calls.send(result)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = call()
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert counts == [1, 1, 0, 0, 0]
