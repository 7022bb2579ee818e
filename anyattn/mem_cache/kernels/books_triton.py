"""The books of pages as Triton kernels: one launch for alloc, extend and share, one or three for free.

No launch depends on a number that only the device knows: grids cover the most pages that a call may take, and each
program finds out what is there. Where programs of one launch must not change what others still read, the last one to
arrive makes the change. Offsets into stack and counts fit 32 bits, as page ids do.
"""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from anyattn.mem_cache.kernels.books import MOST_FREE_PROGRAMS, NO_FAULT, Fault, Word
from anyattn.mem_cache.kernels.launch import BoundKernel

if TYPE_CHECKING:
    from anyattn.mem_cache.kernels.books import Books

_NUM_FREE = tl.constexpr(int(Word.NUM_FREE))
_ARRIVALS = tl.constexpr(int(Word.ARRIVALS))
_TOP = tl.constexpr(int(Word.TOP))
_NEEDED = tl.constexpr(int(Word.NEEDED))
_NEW_TOKENS = tl.constexpr(int(Word.NEW_TOKENS))
_FAULTS = tl.constexpr(int(Word.FAULTS))
_FOUND = tl.constexpr(int(Word.FOUND))
_NO_FAULT = tl.constexpr(NO_FAULT)
_DOUBLE_FREE = tl.constexpr(int(Fault.DOUBLE_FREE))
_FOREIGN = tl.constexpr(int(Fault.FOREIGN))
_USE_AFTER_FREE = tl.constexpr(int(Fault.USE_AFTER_FREE))
_ALIASED = tl.constexpr(int(Fault.ALIASED))
_MISALIGNED = tl.constexpr(int(Fault.MISALIGNED))
_SHRUNK = tl.constexpr(int(Fault.SHRUNK))
_SHORT = tl.constexpr(int(Fault.SHORT))
_OVER_BOUND = tl.constexpr(int(Fault.OVER_BOUND))
_NUM_FAULTS = tl.constexpr(len(Fault))
_MOST_PROGRAMS = tl.constexpr(MOST_FREE_PROGRAMS)

BLOCK_SEQS = 1024
BLOCK_PAGES = 1024
BLOCK_FREE = 2048
MOST_IN_ONE_PROGRAM = 8192
"""Pages that one program frees by itself; for more, three launches of many programs are faster."""
_NUM_WARPS = 8

_POINTERS = ["prefix_lens_ptr", "lengths_ptr", "last_slots_ptr", "indptr_ptr", "pages_ptr", "copied_from_ptr"]
_POINTERS += ["stack_ptr", "counts_ptr", "marks_ptr", "words_ptr", "totals_ptr"]
_SIZES = ["num_seqs", "most_pages", "num_taken", "num_named", "num_pages", "chunk"]


def _kernel(function: Any) -> Any:
    """A kernel that is compiled once: no size and no pointer's alignment is built into it."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(
        function,
        do_not_specialize=[name for name in names if name in _SIZES],
        do_not_specialize_on_alignment=[name for name in names if name in _POINTERS],
    )


@triton.jit
def _note(words_ptr, first, fault, where, index, value):
    """Lowers a fault's word to the lowest index at which it is met, and keeps the value met there."""
    note = (index.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_min(words_ptr + first + fault + index * 0, note, mask=where, sem="relaxed")


@triton.jit
def _batch_lengths(prefix_lens_ptr, lengths_ptr, seq, num_seqs, DECODE: tl.constexpr):
    """int64 prefix lengths and lengths of a block of sequences, 0 beyond the batch."""
    length = tl.load(lengths_ptr + seq, mask=seq < num_seqs, other=0).to(tl.int64)
    if DECODE:
        prefix = tl.maximum(length - 1, 0)
    else:
        prefix = tl.load(prefix_lens_ptr + seq, mask=seq < num_seqs, other=0).to(tl.int64)
    return prefix, length


@triton.jit
def _last_pages(last_slots_ptr, counts_ptr, seq, num_seqs, num_pages, PAGE_SIZE: tl.constexpr):
    """Last slots, their pages, whether those are the pool's, and their reference counts."""
    slot = tl.load(last_slots_ptr + seq, mask=seq < num_seqs, other=0)
    page = tl.where(slot < 0, -1, slot // PAGE_SIZE)
    known = (page > 0) & (page <= num_pages)
    count = tl.load(counts_ptr + page, mask=known, other=0)
    return slot, page, known, count


@triton.jit
def _needs(prefix, length, known, count, num_pages, PAGE_SIZE: tl.constexpr):
    """Pages that each sequence needs, int64, and whether the first of them replaces a shared partial page."""
    grows = (length > prefix) & (prefix >= 0)
    copies = grows & (prefix % PAGE_SIZE != 0) & known & (count > 1)
    whole = (length + PAGE_SIZE - 1) // PAGE_SIZE - (prefix + PAGE_SIZE - 1) // PAGE_SIZE
    whole = tl.minimum(tl.maximum(whole, 0), num_pages.to(tl.int64) + 1)  # so that no sum overflows
    return tl.where(grows, whole, 0) + copies.to(tl.int64), copies


@triton.jit
def _note_batch_faults(words_ptr, first, seq, prefix, length, slot, page, known, count, PAGE_SIZE: tl.constexpr):
    has_prefix = prefix > 0
    foreign = (page != 0) & ~known
    expected = (prefix - 1) % PAGE_SIZE
    fits = ((page > 0) == has_prefix) & (~has_prefix | (slot % PAGE_SIZE == expected))
    shrunk = (length < prefix) | (prefix < 0) | (length < 0)
    _note(words_ptr, first, _SHRUNK, shrunk, seq, page)
    _note(words_ptr, first, _FOREIGN, foreign, seq, page)
    _note(words_ptr, first, _USE_AFTER_FREE, known & (count < 1), seq, page)
    _note(words_ptr, first, _MISALIGNED, ~fits & ~foreign, seq, page)


@triton.jit
def _mentioned(pages_ptr, rank, last, num_named, num_pages):
    """A block of the pages named, int64, and which ones are the pool's; rank 0 is the page that was named last.

    Read past the first-level cache, as another program of the launch may have written them.
    """
    page = tl.load(pages_ptr + (num_named - 1 - rank), mask=rank < last, other=0, volatile=True).to(tl.int64)
    return page, (page > 0) & (page <= num_pages)


@triton.jit
def _give_back(pages_ptr, num_named, first, last, counts_ptr, marks_ptr, words_ptr, num_pages, BLOCK: tl.constexpr):
    """Takes a reference from each page named and marks it with the highest rank, which is the first mention's.

    A mention of a page that has no reference left is a double free, and is as if it were not there.
    """
    for start in range(first, last, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        page, known = _mentioned(pages_ptr, rank, last, num_named, num_pages)
        before = tl.atomic_add(counts_ptr + page, -1, mask=known, sem="relaxed")
        held = known & (before > 0)
        excess = known & (before <= 0)
        tl.atomic_add(counts_ptr + page, 1, mask=excess, sem="relaxed")
        tl.atomic_max(marks_ptr + page, rank + 1, mask=held, sem="relaxed")
        _note(words_ptr, _FAULTS, _DOUBLE_FREE, excess, num_named - 1 - rank, page)
        _note(words_ptr, _FAULTS, _FOREIGN, (page != 0) & ~known, num_named - 1 - rank, page)


@triton.jit
def _freed(pages_ptr, rank, last, num_named, counts_ptr, marks_ptr, num_pages):
    """Of a block of the pages named: the pages, whether this mention speaks for its page, and whether that is free."""
    page, known = _mentioned(pages_ptr, rank, last, num_named, num_pages)
    speaks = known & (tl.load(marks_ptr + page, mask=known, other=0, volatile=True) == rank + 1)
    count = tl.load(counts_ptr + page, mask=speaks, other=1, volatile=True)
    return page, speaks, speaks & (count == 0)


@triton.jit
def _push(pages_ptr, num_named, first, last, top, stack_ptr, counts_ptr, marks_ptr, num_pages, BLOCK: tl.constexpr):
    """Puts the freed pages of these ranks on the stack, from `top`, and clears their marks. Returns the new top."""
    for start in range(first, last, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        page, speaks, freed = _freed(pages_ptr, rank, last, num_named, counts_ptr, marks_ptr, num_pages)
        # A later mention of the page may find the mark cleared, which is not its own rank either.
        tl.store(marks_ptr + page, 0, mask=speaks)
        flags = freed.to(tl.int32)
        place = top + tl.cumsum(flags, 0) - 1
        tl.store(stack_ptr + place, page.to(tl.int32), mask=freed & (place < num_pages))
        top += tl.sum(flags, 0)
    return top


@triton.jit
def _hand_out(block, total, top, pages_ptr, most_pages, stack_ptr, counts_ptr, BLOCK_PAGES: tl.constexpr):
    """One block of the new pages, from the top of the stack down; null pages where there are no more."""
    rank = block * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    mine = rank < total
    page = tl.load(stack_ptr + (top - 1 - rank), mask=mine, other=0)
    tl.store(pages_ptr + rank, page, mask=rank < most_pages)
    tl.store(counts_ptr + page, 1, mask=mine)


@triton.jit
def _is_last(words_ptr):
    """Whether all other programs of the launch are done: what they wrote can be read, and what they read be changed."""
    tl.debug_barrier()  # all threads of this program are done
    last = tl.atomic_add(words_ptr + _ARRIVALS, 1, sem="acq_rel") == tl.num_programs(0) - 1
    tl.debug_barrier()
    return last


@_kernel
def alloc_kernel(num_taken, pages_ptr, stack_ptr, counts_ptr, words_ptr, BLOCK_PAGES: tl.constexpr):
    """One program hands out one block of pages.

    Reads that many ids from the top of the stack, writes them to `pages` and 1 to their reference counts. The last
    program lowers NUM_FREE.
    """
    block = tl.program_id(0)
    top = tl.load(words_ptr + _NUM_FREE)
    total = tl.where(num_taken <= top, num_taken, 0)
    _hand_out(block, total, top, pages_ptr, num_taken, stack_ptr, counts_ptr, BLOCK_PAGES)
    if block == 0:
        _note(words_ptr, _FAULTS, _SHORT, num_taken > top, block * 0, num_taken)
    if _is_last(words_ptr):
        tl.store(words_ptr + _ARRIVALS, 0)
        tl.store(words_ptr + _NUM_FREE, top - total)


@_kernel
def extend_kernel(
    prefix_lens_ptr,
    lengths_ptr,
    last_slots_ptr,
    num_seqs,
    indptr_ptr,
    pages_ptr,
    copied_from_ptr,
    most_pages,
    stack_ptr,
    counts_ptr,
    marks_ptr,
    words_ptr,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_FREE: tl.constexpr,
):
    """One program hands out one block of pages, after adding up by itself what the batch needs.

    Each reads the batch's lengths, last slots and the counts of its last pages, then its block from the stack, and
    writes its block of `pages` and of counts. Program 0 writes `indptr`, `copied_from` and the faults too. The last one
    gives back what is copied from, which all others have read by then, and writes NUM_FREE.
    """
    block = tl.program_id(0)
    total = tl.zeros((), dtype=tl.int64)
    num_copies = tl.zeros((), dtype=tl.int32)
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        prefix, length = _batch_lengths(prefix_lens_ptr, lengths_ptr, seq, num_seqs, DECODE)
        slot, page, known, count = _last_pages(last_slots_ptr, counts_ptr, seq, num_seqs, num_pages, PAGE_SIZE)
        needed, copies = _needs(prefix, length, known, count, num_pages, PAGE_SIZE)
        total += tl.sum(needed, 0)
        num_copies += tl.sum(copies.to(tl.int32), 0)
    top = tl.load(words_ptr + _NUM_FREE)
    fits = (total <= top) & (total <= most_pages)
    if block == 0:
        _note(words_ptr, _FAULTS, _SHORT, total > top, block * 0, total)
        _note(words_ptr, _FAULTS, _OVER_BOUND, (total <= top) & (total > most_pages), block * 0, total)
        tl.store(indptr_ptr, 0)
        before = tl.zeros((), dtype=tl.int64)
        for start in range(0, num_seqs, BLOCK_SEQS):
            seq = start + tl.arange(0, BLOCK_SEQS)
            prefix, length = _batch_lengths(prefix_lens_ptr, lengths_ptr, seq, num_seqs, DECODE)
            slot, page, known, count = _last_pages(last_slots_ptr, counts_ptr, seq, num_seqs, num_pages, PAGE_SIZE)
            needed, copies = _needs(prefix, length, known, count, num_pages, PAGE_SIZE)
            _note_batch_faults(words_ptr, _FAULTS, seq, prefix, length, slot, page, known, count, PAGE_SIZE)
            end = before + tl.cumsum(needed, 0)
            before += tl.sum(needed, 0)
            inside = seq < num_seqs
            tl.store(indptr_ptr + 1 + seq, tl.where(fits, end, 0).to(tl.int32), mask=inside)
            tl.store(copied_from_ptr + seq, tl.where(copies & fits, page, 0).to(tl.int32), mask=inside)
    _hand_out(block, tl.where(fits, total, 0), top, pages_ptr, most_pages, stack_ptr, counts_ptr, BLOCK_PAGES)
    if _is_last(words_ptr):
        tl.store(words_ptr + _ARRIVALS, 0)
        if fits:
            top -= total
            if num_copies > 0:
                _give_back(
                    copied_from_ptr, num_seqs, 0, num_seqs, counts_ptr, marks_ptr, words_ptr, num_pages, BLOCK_FREE
                )
                tl.debug_barrier()
                top = _push(
                    copied_from_ptr, num_seqs, 0, num_seqs, top, stack_ptr, counts_ptr, marks_ptr, num_pages, BLOCK_FREE
                )
            tl.store(words_ptr + _NUM_FREE, top)


@_kernel
def share_kernel(pages_ptr, num_named, counts_ptr, words_ptr, num_pages, BLOCK: tl.constexpr):
    """One program adds a reference to each of a block of pages: reads the ids, adds 1 to their counts."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + index, mask=index < num_named, other=0).to(tl.int64)
    known = (page > 0) & (page <= num_pages)
    alive = known & (tl.load(counts_ptr + page, mask=known, other=0) > 0)
    tl.atomic_add(counts_ptr + page, 1, mask=alive, sem="relaxed")
    _note(words_ptr, _FAULTS, _FOREIGN, (page != 0) & ~known, index, page)
    _note(words_ptr, _FAULTS, _USE_AFTER_FREE, known & ~alive, index, page)


@_kernel
def free_kernel(pages_ptr, num_named, stack_ptr, counts_ptr, marks_ptr, words_ptr, num_pages, BLOCK: tl.constexpr):
    """The only program takes a reference from each page named, and puts those without any on the stack.

    Reads the ids twice, changes a count and a mark for each, and writes freed ids above the stack's top, and NUM_FREE.
    """
    _give_back(pages_ptr, num_named, 0, num_named, counts_ptr, marks_ptr, words_ptr, num_pages, BLOCK)
    tl.debug_barrier()
    top = tl.load(words_ptr + _NUM_FREE)
    top = _push(pages_ptr, num_named, 0, num_named, top, stack_ptr, counts_ptr, marks_ptr, num_pages, BLOCK)
    tl.store(words_ptr + _NUM_FREE, top)


@_kernel
def give_back_kernel(pages_ptr, num_named, chunk, counts_ptr, marks_ptr, words_ptr, num_pages, BLOCK: tl.constexpr):
    """First of three launches of a large free: one program takes a reference from each of `chunk` pages named."""
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, num_named)
    _give_back(pages_ptr, num_named, first, last, counts_ptr, marks_ptr, words_ptr, num_pages, BLOCK)


@_kernel
def count_freed_kernel(
    pages_ptr, num_named, chunk, counts_ptr, marks_ptr, words_ptr, totals_ptr, num_pages, BLOCK: tl.constexpr
):
    """Second of three: one program counts how many of its `chunk` mentions free their page, into its entry of `totals`.

    Program 0 also keeps NUM_FREE as TOP, since the third launch changes it while it is read.
    """
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, num_named)
    total = tl.zeros((), dtype=tl.int32)
    for start in range(first, last, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        _, _, freed = _freed(pages_ptr, rank, last, num_named, counts_ptr, marks_ptr, num_pages)
        total += tl.sum(freed.to(tl.int32), 0)
    tl.store(totals_ptr + tl.program_id(0), total)
    if tl.program_id(0) == 0:
        tl.store(words_ptr + _TOP, tl.load(words_ptr + _NUM_FREE))


@_kernel
def push_kernel(
    pages_ptr,
    num_named,
    chunk,
    stack_ptr,
    counts_ptr,
    marks_ptr,
    words_ptr,
    totals_ptr,
    num_pages,
    BLOCK: tl.constexpr,
):
    """Third of three: one program puts the pages that its `chunk` mentions freed on the stack, above earlier programs'.

    Reads all totals; the program of the last chunk writes NUM_FREE.
    """
    program = tl.program_id(0)
    first = program * chunk
    last = tl.minimum(first + chunk, num_named)
    earlier = tl.arange(0, _MOST_PROGRAMS)
    top = tl.load(words_ptr + _TOP) + tl.sum(tl.load(totals_ptr + earlier, mask=earlier < program, other=0), 0)
    top = _push(pages_ptr, num_named, first, last, top, stack_ptr, counts_ptr, marks_ptr, num_pages, BLOCK)
    if program == tl.num_programs(0) - 1:
        tl.store(words_ptr + _NUM_FREE, top)


@triton.jit
def _forget(words_ptr, NUM_WORDS: tl.constexpr):
    word = tl.arange(0, NUM_WORDS)
    tl.store(words_ptr + _FOUND + word, tl.full((NUM_WORDS,), _NO_FAULT, dtype=tl.int64), mask=word < _NUM_FAULTS)
    tl.debug_barrier()


@_kernel
def inspect_pages_kernel(
    pages_ptr, num_named, counts_ptr, marks_ptr, words_ptr, num_pages, FREE: tl.constexpr, BLOCK: tl.constexpr
):
    """The only program finds what is wrong with pages to share, or to free.

    Reads ids and counts; to free, it counts in the marks how often each page is named, and clears them again.
    """
    _forget(words_ptr, 16)
    if FREE:
        for start in range(0, num_named, BLOCK):
            index = start + tl.arange(0, BLOCK)
            page = tl.load(pages_ptr + index, mask=index < num_named, other=0).to(tl.int64)
            tl.atomic_add(marks_ptr + page, 1, mask=(page > 0) & (page <= num_pages), sem="relaxed")
        tl.debug_barrier()
    for start in range(0, num_named, BLOCK):
        index = start + tl.arange(0, BLOCK)
        page = tl.load(pages_ptr + index, mask=index < num_named, other=0).to(tl.int64)
        known = (page > 0) & (page <= num_pages)
        count = tl.load(counts_ptr + page, mask=known, other=0)
        _note(words_ptr, _FOUND, _FOREIGN, (page != 0) & ~known, index, page)
        if FREE:
            times = tl.load(marks_ptr + page, mask=known, other=0, volatile=True)
            _note(words_ptr, _FOUND, _DOUBLE_FREE, times > count, index, page)
        else:
            _note(words_ptr, _FOUND, _USE_AFTER_FREE, known & (count < 1), index, page)
    if FREE:
        tl.debug_barrier()
        for start in range(0, num_named, BLOCK):
            index = start + tl.arange(0, BLOCK)
            page = tl.load(pages_ptr + index, mask=index < num_named, other=0).to(tl.int64)
            tl.store(marks_ptr + page, 0, mask=(page > 0) & (page <= num_pages))


@_kernel
def inspect_extend_kernel(
    prefix_lens_ptr,
    lengths_ptr,
    last_slots_ptr,
    num_seqs,
    counts_ptr,
    marks_ptr,
    words_ptr,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """The only program adds up what a batch needs and finds what is wrong with it.

    Reads lengths, last slots and counts; counts in the marks who writes to each last page, and clears them again.
    """
    _forget(words_ptr, 16)
    total = tl.zeros((), dtype=tl.int64)
    new_tokens = tl.zeros((), dtype=tl.int64)
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        prefix, length = _batch_lengths(prefix_lens_ptr, lengths_ptr, seq, num_seqs, DECODE)
        slot, page, known, count = _last_pages(last_slots_ptr, counts_ptr, seq, num_seqs, num_pages, PAGE_SIZE)
        needed, _ = _needs(prefix, length, known, count, num_pages, PAGE_SIZE)
        _note_batch_faults(words_ptr, _FOUND, seq, prefix, length, slot, page, known, count, PAGE_SIZE)
        total += tl.sum(needed, 0)
        new_tokens += tl.sum(tl.maximum(length - prefix, 0), 0)
        writes = known & (length > prefix) & (prefix % PAGE_SIZE != 0)
        tl.atomic_add(marks_ptr + page, 1, mask=writes, sem="relaxed")
    tl.store(words_ptr + _NEEDED, total)
    tl.store(words_ptr + _NEW_TOKENS, new_tokens)
    tl.debug_barrier()
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        prefix, length = _batch_lengths(prefix_lens_ptr, lengths_ptr, seq, num_seqs, DECODE)
        slot, page, known, count = _last_pages(last_slots_ptr, counts_ptr, seq, num_seqs, num_pages, PAGE_SIZE)
        writes = known & (length > prefix) & (prefix % PAGE_SIZE != 0)
        times = tl.load(marks_ptr + page, mask=writes, other=0, volatile=True)
        _note(words_ptr, _FOUND, _ALIASED, (times > 1) & (times > count), seq, page)
    tl.debug_barrier()
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        slot, page, known, count = _last_pages(last_slots_ptr, counts_ptr, seq, num_seqs, num_pages, PAGE_SIZE)
        tl.store(marks_ptr + page, 0, mask=known)


_alloc = BoundKernel(alloc_kernel)
_extend = BoundKernel(extend_kernel)
_share = BoundKernel(share_kernel)
_free = BoundKernel(free_kernel)
_give_back_chunks = BoundKernel(give_back_kernel)
_count_freed = BoundKernel(count_freed_kernel)
_push_chunks = BoundKernel(push_kernel)


def alloc(books: Books, num_pages: int) -> torch.Tensor:
    pages = torch.empty(num_pages, dtype=torch.int32, device=books.device)
    _alloc(
        books.device.index, (-(-num_pages // BLOCK_PAGES), 1, 1),
        num_pages, pages, books.stack, books.counts, books.words, BLOCK_PAGES, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return pages


def extend(
    books: Books, prefix_lens: torch.Tensor | None, lengths: torch.Tensor, last_slots: torch.Tensor, most_pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_seqs = lengths.numel()
    buffer = torch.empty(2 * num_seqs + 1 + most_pages, dtype=torch.int32, device=books.device)
    indptr, copied_from, pages = buffer.split((num_seqs + 1, num_seqs, most_pages))
    _extend(
        (books.device.index, lengths.dtype, None if prefix_lens is None else prefix_lens.dtype, books.page_size),
        (max(-(-most_pages // BLOCK_PAGES), 1), 1, 1),
        lengths if prefix_lens is None else prefix_lens,
        lengths,
        last_slots,
        num_seqs,
        indptr,
        pages,
        copied_from,
        most_pages,
        books.stack,
        books.counts,
        books.marks,
        books.words,
        books.num_pages,
        books.page_size,
        prefix_lens is None,
        BLOCK_SEQS,
        BLOCK_PAGES,
        BLOCK_FREE,
        num_warps=_NUM_WARPS,
    )
    return indptr, pages, copied_from


def share(books: Books, pages: torch.Tensor) -> None:
    _share(
        (books.device.index, pages.dtype), (-(-pages.numel() // BLOCK_PAGES), 1, 1),
        pages, pages.numel(), books.counts, books.words, books.num_pages, BLOCK_PAGES, num_warps=_NUM_WARPS,
    )  # fmt: skip


def free(books: Books, pages: torch.Tensor) -> None:
    num_named = pages.numel()
    stack, counts, marks, words, totals = books.stack, books.counts, books.marks, books.words, books.totals
    key, last, options = (books.device.index, pages.dtype), (books.num_pages, BLOCK_FREE), {"num_warps": _NUM_WARPS}
    if num_named <= MOST_IN_ONE_PROGRAM:
        _free(key, (1, 1, 1), pages, num_named, stack, counts, marks, words, *last, **options)
        return
    chunk = -(-num_named // (BLOCK_FREE * MOST_FREE_PROGRAMS)) * BLOCK_FREE
    grid = (-(-num_named // chunk), 1, 1)
    _give_back_chunks(key, grid, pages, num_named, chunk, counts, marks, words, *last, **options)
    _count_freed(key, grid, pages, num_named, chunk, counts, marks, words, totals, *last, **options)
    _push_chunks(key, grid, pages, num_named, chunk, stack, counts, marks, words, totals, *last, **options)


def inspect_extend(
    books: Books, prefix_lens: torch.Tensor | None, lengths: torch.Tensor, last_slots: torch.Tensor
) -> None:
    inspect_extend_kernel[(1,)](
        lengths if prefix_lens is None else prefix_lens,
        lengths,
        last_slots,
        lengths.numel(),
        books.counts,
        books.marks,
        books.words,
        books.num_pages,
        PAGE_SIZE=books.page_size,
        DECODE=prefix_lens is None,
        BLOCK_SEQS=BLOCK_SEQS,
        num_warps=_NUM_WARPS,
    )


def inspect_share(books: Books, pages: torch.Tensor) -> None:
    _inspect_pages(books, pages, free=False)


def inspect_free(books: Books, pages: torch.Tensor) -> None:
    _inspect_pages(books, pages, free=True)


def _inspect_pages(books: Books, pages: torch.Tensor, *, free: bool) -> None:
    inspect_pages_kernel[(1,)](
        pages,
        pages.numel(),
        books.counts,
        books.marks,
        books.words,
        books.num_pages,
        FREE=free,
        BLOCK=BLOCK_FREE,
        num_warps=_NUM_WARPS,
    )
