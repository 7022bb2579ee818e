"""The device allocator's books: what the Triton kernels make of them is what vectorised torch makes of them."""

import dataclasses
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from anyattn.mem_cache.kernels import books as kernels
from anyattn.mem_cache.kernels import books_torch
from anyattn.mem_cache.kernels.books import NO_FAULT, Fault, Word

books_triton = pytest.importorskip("anyattn.mem_cache.kernels.books_triton")
_spec = importlib.util.spec_from_file_location("kernel_keys", Path(__file__).parents[1] / "kernel_keys.py")
kernel_keys = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernel_keys)

PAGE_SIZES = [1, 2, 3, 16, 64, 1000, 1024]
UNREAD = -(2**30)  # surrounds what kernels read: as a page it is foreign, as a length it has shrunk
BATCHES = [1, 5, books_triton.BLOCK_SEQS - 1, books_triton.BLOCK_SEQS, books_triton.BLOCK_SEQS + 1]


def books_on_cpu(num_pages, *, page_size, shift=0):
    """Books as they are made, every tensor of them `shift` elements into its memory."""
    made = kernels.new_books(num_pages, page_size, "cpu")
    names = ("stack", "counts", "marks", "words", "totals")
    return dataclasses.replace(made, **{
        name: torch.cat([getattr(made, name)[:1].repeat(shift), getattr(made, name)])[shift:] for name in names
    })  # fmt: skip


class Pair:
    """The same books twice, kept by Triton and by torch. Pages are free or held one to three times, in random order."""

    def __init__(self, rng, device, *, num_pages, page_size, num_free):
        self.rng, self.device = rng, device
        order = torch.from_numpy(rng.permutation(num_pages) + 1)
        free, self.held = order[:num_free], order[num_free:]
        made = kernels.new_books(num_pages, page_size, device)
        assert made.engine is books_triton
        made.stack.fill_(UNREAD)
        made.stack[:num_free] = free.to(device, torch.int32)
        made.counts[self.held.to(device)] = self.on_device(rng.integers(1, 4, len(self.held)), torch.int32)
        made.words[Word.NUM_FREE] = num_free
        copies = {name: getattr(made, name).clone() for name in ("stack", "counts", "marks", "words", "totals")}
        self.triton, self.torch = made, dataclasses.replace(made, engine=books_torch, **copies)

    @property
    def page_size(self):
        return self.triton.page_size

    def counts(self):
        return self.torch.counts.cpu()

    def num_free(self):
        return int(self.torch.words[Word.NUM_FREE])

    def on_device(self, values, dtype):
        """A tensor whose memory begins at an odd element and goes on with what must not be read."""
        values = torch.as_tensor(values).to(dtype)
        shift = int(self.rng.integers(0, 5))
        memory = torch.full((shift + values.numel() + 7,), UNREAD, dtype=dtype)
        memory[shift : shift + values.numel()] = values
        return memory.to(self.device)[shift : shift + values.numel()]

    def mentions(self, pages):
        """Pages as a call names them: a dtype drawn afresh, null pages between, in random order."""
        padding = int(self.rng.integers(1, 4))
        pages = np.concatenate([np.asarray(pages), np.zeros(padding, dtype=np.int64)])
        return self.on_device(self.rng.permutation(pages), self.rng.choice([torch.int32, torch.int64]))

    def batch(self, num_seqs, most_new):
        """prefix_lens, lengths and last_slots of a valid batch: no page has more writers than references."""
        rng, page_size, counts = self.rng, self.page_size, self.counts()
        places = np.repeat(self.held.numpy(), counts[self.held].numpy())
        rng.shuffle(places)
        pages = np.resize(places, num_seqs) * (np.arange(num_seqs) < len(places)) * rng.integers(0, 2, num_seqs)
        in_last = rng.integers(1, page_size + 1, num_seqs)
        prefix_lens = (rng.integers(0, 5, num_seqs) * page_size + in_last) * (pages > 0)
        last_slots = (pages * page_size + in_last - 1) * (pages > 0)
        lengths = prefix_lens + rng.integers(0, most_new + 1, num_seqs)
        first, second = rng.choice([torch.int32, torch.int64], 2)
        return (
            self.on_device(prefix_lens, first),
            self.on_device(lengths, second),
            self.on_device(last_slots, torch.int64),
        )

    def both(self, name, *arguments):
        """Calls both engines, and asserts that results and books are the same. Returns the result on the CPU."""
        results = [getattr(kernels, name)(books, *arguments) for books in (self.triton, self.torch)]
        flat = [result if isinstance(result, tuple) else (result,) for result in results]
        for triton, torch_ in zip(*flat, strict=True):
            if triton is not None:
                assert triton.dtype == torch_.dtype == torch.int32
                assert triton.tolist() == torch_.tolist()
        self.check_same()
        return tuple(part.cpu() for part in flat[1] if part is not None)

    def check_same(self, *, ordered=True):
        num_free = self.num_free()
        free, other = (books.stack[:num_free].tolist() for books in (self.triton, self.torch))
        assert free == other if ordered else sorted(free) == sorted(other)
        assert self.triton.counts.tolist() == self.torch.counts.tolist()
        assert not self.triton.marks.any()
        assert not self.torch.marks.any()
        words, other = self.triton.words.tolist(), self.torch.words.tolist()
        words[Word.TOP] = other[Word.TOP] = 0  # scratch
        assert words == other
        assert set(words[Word.FAULTS : Word.FOUND]) == {NO_FAULT}


@pytest.mark.parametrize("num_seqs", BATCHES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extend_takes_the_same_pages(rng, device, page_size, num_seqs):
    pair = Pair(rng, device, num_pages=4000, page_size=page_size, num_free=3000)
    batch = pair.batch(num_seqs, 3 if page_size == 1 else page_size)
    pair.both("inspect_extend", *batch)
    needed = int(pair.torch.words[Word.NEEDED])
    assert needed <= 3000
    indptr, pages, copied_from = pair.both("extend", *batch, needed + int(rng.integers(0, 3)))
    assert indptr[-1] == needed
    assert pages[needed:].tolist() == [0] * (len(pages) - needed)
    assert len(set(pages[:needed].tolist())) == needed
    assert (copied_from > 0).sum() == 0 or page_size > 1


@pytest.mark.parametrize("num_seqs", BATCHES)
def test_decode_is_extend_by_one_and_leaves_padded_rows_alone(rng, device, num_seqs):
    pair = Pair(rng, device, num_pages=3000, page_size=int(rng.integers(1, 5)), num_free=1500)
    _, lengths, last_slots = pair.batch(num_seqs, 0)
    padded = torch.from_numpy(rng.random(num_seqs) < 0.3).to(device)
    lengths = lengths + 1
    lengths[padded], last_slots[padded] = 0, 0
    one = pair.on_device(lengths.cpu(), torch.int32)
    twin = Pair(np.random.default_rng(0), device, num_pages=1, page_size=1, num_free=1)
    for mine, other in ((twin.triton, pair.triton), (twin.torch, pair.torch)):
        for field in dataclasses.fields(mine):
            value = getattr(other, field.name)
            object.__setattr__(mine, field.name, value.clone() if isinstance(value, torch.Tensor) else value)
    decoded = pair.both("extend", None, one, last_slots, num_seqs)
    extended = twin.both("extend", (lengths - 1).clamp_min(0), lengths, last_slots, num_seqs)
    assert [part.tolist() for part in decoded] == [part.tolist() for part in extended]
    needed = decoded[0].diff()
    assert needed.max() <= 1
    assert not needed[padded.cpu()].any()


def test_all_sharers_of_a_partial_page_copy_it_and_it_is_free_afterwards(rng, device):
    pair = Pair(rng, device, num_pages=20, page_size=4, num_free=12)
    page = int(pair.held[0])
    for books in (pair.triton, pair.torch):
        books.counts[page] = 3
    top = int(pair.torch.stack[11])
    batch = [torch.full((3,), 5), torch.tensor([6, 7, 9]), torch.full((3,), page * 4)]
    indptr, pages, copied_from = pair.both("extend", *(part.to(device) for part in batch), 6)
    assert indptr.tolist() == [0, 1, 2, 4]
    assert pages[0] == top
    assert copied_from.tolist() == [page] * 3
    assert page not in pages
    assert pair.num_free() == 12 - 4 + 1
    assert pair.torch.stack[8] == page  # on top: the next to be used
    assert pair.counts()[page] == 0


@pytest.mark.parametrize("count", [1, 7, books_triton.BLOCK_PAGES, 2 * books_triton.BLOCK_PAGES + 1])
def test_alloc_takes_the_same_pages(rng, device, count):
    pair = Pair(rng, device, num_pages=2500, page_size=16, num_free=2400)
    top = pair.torch.stack[:2400].flip(0)[:count].tolist()
    assert pair.both("alloc", count)[0].tolist() == top
    assert pair.num_free() == 2400 - count


@pytest.mark.parametrize("num_pages", [1, 600, books_triton.BLOCK_FREE + 100, books_triton.MOST_IN_ONE_PROGRAM + 900])
def test_share_and_free_change_the_same_books(rng, device, num_pages):
    pair = Pair(rng, device, num_pages=num_pages, page_size=16, num_free=0)
    some = rng.choice(pair.held.numpy(), max(num_pages // 3, 1))  # some of them more than once
    pair.both("share", pair.mentions(some))
    for part in (0.4, 1.0):  # first some of the references, then what is left, in one call: pages are named repeatedly
        left = np.repeat(np.arange(num_pages + 1), pair.counts().numpy())
        names = pair.mentions(rng.choice(left, int(part * len(left)), replace=False))
        expected = [page for page in dict.fromkeys(names.tolist()) if page]
        before = pair.num_free()
        pair.both("inspect_free", names)
        pair.both("free", names)
        counts = pair.counts()
        freed = [page for page in expected if counts[page] == 0]
        assert pair.torch.stack[before : before + len(freed)].tolist() == freed[::-1]
        assert pair.num_free() == before + len(freed)
    assert pair.num_free() == num_pages


def test_a_free_of_several_launches_is_the_same_when_a_program_takes_several_blocks(rng, device, monkeypatch):
    monkeypatch.setattr(books_triton, "MOST_FREE_PROGRAMS", 3)
    pair = Pair(rng, device, num_pages=9000, page_size=1, num_free=0)
    pair.both("free", pair.mentions(np.repeat(np.arange(9001), pair.counts().numpy())))
    assert pair.num_free() == 9000


def test_a_request_beyond_what_is_free_or_beyond_its_bound_takes_nothing(rng, device):
    pair = Pair(rng, device, num_pages=30, page_size=4, num_free=9)
    books = {name: getattr(pair.torch, name).clone() for name in ("stack", "counts")}
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    for lengths, most_pages, fault in (
        ((36, 4), 40, Fault.SHORT),
        ((8, 8), 3, Fault.OVER_BOUND),
        (None, 10, Fault.SHORT),
    ):
        for engine in (pair.triton, pair.torch):
            if lengths is None:
                results = [kernels.alloc(engine, most_pages)]
            else:
                results = kernels.extend(engine, zeros, torch.tensor(lengths, device=device), zeros, most_pages)
            assert not any(part.any() for part in results)
            assert torch.equal(engine.stack[:9], books["stack"][:9])
            assert torch.equal(engine.counts, books["counts"])
            words = engine.words.tolist()
            assert words[Word.NUM_FREE] == 9
            met = words[Word.FAULTS : Word.FOUND]
            assert met[fault] == (10 if fault == Fault.SHORT else 4)  # the pages that were needed
            assert met.count(NO_FAULT) == len(Fault) - 1
            engine.words[Word.FAULTS : Word.FOUND] = NO_FAULT


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_inspection_finds_the_same_faults(rng, device, page_size):
    pair = Pair(rng, device, num_pages=300, page_size=page_size, num_free=150)
    batch = [part.cpu().long() for part in pair.batch(40, 2 * page_size)]
    for part, wrong in zip(batch, (page_size + 1, 0, 5), strict=True):
        part[rng.integers(0, 40, 2)] += wrong
    batch[1][rng.integers(0, 40)] = -1
    slots = batch[2]
    slots[rng.integers(0, 40, 6)] = int(pair.held[0]) * page_size
    free, foreign = rng.choice(40, 2, replace=False)
    slots[free] = int(pair.torch.stack[0]) * page_size
    slots[foreign] = rng.choice([-1, 301 * page_size, 2**40])
    pair.both("inspect_extend", *(pair.on_device(part, torch.int64) for part in batch))
    found = pair.torch.words.tolist()[Word.FOUND :]
    assert NO_FAULT not in {found[Fault.FOREIGN], found[Fault.USE_AFTER_FREE], found[Fault.SHRUNK]}

    names = pair.mentions([*pair.held[:9].repeat(4), -1, 301, *pair.torch.stack[:3].tolist()])
    for name, fault in (("inspect_share", Fault.USE_AFTER_FREE), ("inspect_free", Fault.DOUBLE_FREE)):
        pair.both(name, names)
        found = pair.torch.words.tolist()[Word.FOUND :]
        assert NO_FAULT not in {found[fault], found[Fault.FOREIGN]}
        assert found.count(NO_FAULT) == len(Fault) - 2


def test_what_is_wrong_is_noted_and_not_done(rng, device):
    pair = Pair(rng, device, num_pages=50, page_size=4, num_free=20)
    free, (once, twice) = pair.torch.stack[:3].tolist(), pair.held[:2].tolist()
    for books in (pair.triton, pair.torch):
        books.counts[[once, twice]] = torch.tensor([1, 2], dtype=torch.int32, device=device)
        expected = books.counts.tolist()
        kernels.share(books, torch.tensor([free[0], -5, 51, 2**31 - 1], device=device))
        kernels.free(books, torch.tensor([free[1], once, -1, twice, once, 70, twice, twice], device=device))
        expected[once] = expected[twice] = 0
        assert books.counts.tolist() == expected
        assert sorted(books.stack[20:22].tolist()) == sorted([once, twice])
        words = books.words.tolist()
        assert words[Word.NUM_FREE] == 22
        met = {fault for fault in Fault if words[Word.FAULTS + fault] != NO_FAULT}
        assert met == {Fault.USE_AFTER_FREE, Fault.FOREIGN, Fault.DOUBLE_FREE}
        assert words[Word.FAULTS + Fault.USE_AFTER_FREE] == free[0]  # entry 0
        assert words[Word.FAULTS + Fault.FOREIGN] == (1 << 32 | (-5 & 0xFFFFFFFF))
    pair.triton.words[Word.FAULTS : Word.FOUND] = pair.torch.words[Word.FAULTS : Word.FOUND] = NO_FAULT
    pair.check_same(ordered=False)


def test_lengths_that_no_pool_could_hold_need_more_pages_than_there_are(rng, device):
    pair = Pair(rng, device, num_pages=50, page_size=1, num_free=20)
    lengths = torch.full((300,), 2**62, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(lengths)
    pair.both("inspect_extend", zeros, lengths, zeros)
    assert pair.torch.words[Word.NEEDED] == 300 * 51


SIZES = (1, 7, 8, 16, 255, 1024)


@pytest.mark.parametrize("target", kernel_keys.TARGETS, ids=kernel_keys.TARGET_IDS)
def test_no_kernel_is_compiled_anew_for_a_size_or_an_alignment(monkeypatch, target):
    """Launched kernels are one for each pair of dtypes and page size, whatever the batch, the pool and its place."""
    kernel_keys.compiler()
    recorders = kernel_keys.record(monkeypatch, books_triton, target)
    for size, num_pages, shift in itertools.product(SIZES, (1, 15, 16, 30_000), (0, 1, 2, 4)):
        books = books_on_cpu(num_pages, page_size=16, shift=shift)
        for first, second in itertools.product((torch.int32, torch.int64), repeat=2):
            prefix_lens, lengths = (torch.zeros(size + shift, dtype=dtype)[shift:] for dtype in (first, second))
            last_slots = torch.zeros(size + shift, dtype=torch.int64)[shift:]
            for given in (prefix_lens, None):
                books_triton.extend(books, given, lengths, last_slots, size)
                books_triton.inspect_extend(books, given, lengths, last_slots)
        books_triton.alloc(books, size)
        for dtype, many in itertools.product((torch.int32, torch.int64), (0, books_triton.MOST_IN_ONE_PROGRAM)):
            pages = torch.zeros(many + size + shift, dtype=dtype)[shift:]
            books_triton.free(books, pages)
            books_triton.inspect_free(books, pages)
            books_triton.share(books, pages)
            books_triton.inspect_share(books, pages)
    assert {name: len(recorder.keys) for name, recorder in recorders.items()} == {
        "alloc_kernel": 1,
        "extend_kernel": 4 + 2,  # a decode has no prefixes
        "inspect_extend_kernel": 4 + 2,
        "share_kernel": 2,
        "free_kernel": 2,
        "give_back_kernel": 2,
        "count_freed_kernel": 2,
        "push_kernel": 2,
        "inspect_pages_kernel": 4,  # to share and to free
    }
    for recorder in recorders.values():
        assert all(len(keys) == 1 for keys in getattr(recorder, "variants", {}).values())


def test_page_sizes_have_kernels_of_their_own_and_no_other_s_is_launched(monkeypatch):
    kernel_keys.compiler()
    recorders = kernel_keys.record(monkeypatch, books_triton, kernel_keys.TARGETS[0])
    for page_size in PAGE_SIZES:
        zeros = torch.zeros(3, dtype=torch.int64)
        for given in (zeros, None):
            books_triton.extend(books_on_cpu(50, page_size=page_size), given, zeros, zeros, 4)
    variants = recorders["extend_kernel"].variants
    assert len(variants) == 2 * len(PAGE_SIZES)
    assert all(len(keys) == 1 for keys in variants.values())
