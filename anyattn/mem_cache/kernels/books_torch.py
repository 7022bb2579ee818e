"""The books of pages in vectorised torch, for devices where Triton does not run. No call here waits for the device.

That rules out every operator whose result's shape depends on values: masks become weights, and what a lane must not
write goes to a scratch entry (the last one of the stack, the null page's of the counts and marks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels.books import NO_FAULT, Fault, Word

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.kernels.books import Books

    Tensor = torch.Tensor
else:
    torch = lazy_import("torch")


def alloc(books: Books, num_pages: int) -> Tensor:
    total = torch.full((), num_pages, dtype=torch.int64, device=books.device)
    return _take(books, total, num_pages)[0]


def extend(
    books: Books, prefix_lens: Tensor | None, lengths: Tensor, last_slots: Tensor, most_pages: int
) -> tuple[Tensor, Tensor, Tensor]:
    prefix_lens, lengths, faults, last_pages = _read(books, prefix_lens, lengths, last_slots)
    _report(books, Word.FAULTS, faults, last_pages)
    needed, copies = _needs(books, prefix_lens, lengths, last_pages)
    ends = needed.cumsum(0)
    pages, taken = _take(books, ends[-1], most_pages)
    indptr = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=books.device)
    indptr[1:] = ends * taken
    copied_from = (last_pages * (copies & taken)).int()
    free(books, copied_from)  # after the new pages were taken, so that their data outlive this call
    return indptr, pages, copied_from


def share(books: Books, pages: Tensor) -> None:
    index, known = _known(books, pages)
    alive = known & (books.counts[index] > 0)
    books.counts.index_add_(0, index, alive.int())
    _report(books, Word.FAULTS, _share_faults(pages, known, alive), pages)


def free(books: Books, pages: Tensor) -> None:
    index, known = _known(books, pages)
    held = known & (books.counts[index] > 0)
    books.counts.index_add_(0, index, -held.int())
    left = books.counts[index]
    books.counts.scatter_(0, index, left.clamp_min(0))
    excess = (known & ~held) | (left < 0)
    _report(books, Word.FAULTS, {Fault.FOREIGN: ~known & (pages != 0), Fault.DOUBLE_FREE: excess}, pages)
    # Where a page is named more than once, the first mention speaks for it: marks keep the highest rank.
    rank = torch.arange(pages.numel(), 0, -1, dtype=torch.int32, device=books.device)
    books.marks.scatter_reduce_(0, index, rank * held, "amax")
    freed = held & (left <= 0) & (books.marks[index] == rank)
    books.marks.scatter_(0, index, torch.zeros_like(rank))
    top, num_freed = books.words[Word.NUM_FREE], freed.sum()
    place = top + num_freed - freed.cumsum(0)  # reversed: the first page freed is on top
    scratch = torch.full_like(place, books.num_pages)
    books.stack.scatter_(0, torch.where(freed, place, scratch), index.int())
    top += num_freed  # a view: this is the books' own word


def inspect_extend(books: Books, prefix_lens: Tensor | None, lengths: Tensor, last_slots: Tensor) -> None:
    prefix_lens, lengths, faults, last_pages = _read(books, prefix_lens, lengths, last_slots)
    needed, _ = _needs(books, prefix_lens, lengths, last_pages)
    books.words[Word.NEEDED] = needed.sum()
    books.words[Word.NEW_TOKENS] = (lengths - prefix_lens).clamp_min(0).sum()
    index, known = _known(books, last_pages)
    writes = known & (lengths > prefix_lens) & (prefix_lens % books.page_size != 0)
    times = _mentions(books, index, writes)
    faults[Fault.ALIASED] = writes & (times > 1) & (times > books.counts[index])
    _forget(books)
    _report(books, Word.FOUND, faults, last_pages)


def inspect_share(books: Books, pages: Tensor) -> None:
    index, known = _known(books, pages)
    _forget(books)
    _report(books, Word.FOUND, _share_faults(pages, known, known & (books.counts[index] > 0)), pages)


def inspect_free(books: Books, pages: Tensor) -> None:
    index, known = _known(books, pages)
    excess = known & (_mentions(books, index, known) > books.counts[index])
    _forget(books)
    _report(books, Word.FOUND, {Fault.FOREIGN: ~known & (pages != 0), Fault.DOUBLE_FREE: excess}, pages)


def _take(books: Books, total: Tensor, most_pages: int) -> tuple[Tensor, Tensor]:
    """Pages from the stack's top, [most_pages], null pages after the first `total`; and whether they were there.

    total: [], int64. All or nothing.
    """
    top = books.words[Word.NUM_FREE]
    short = total > top
    over = ~short & (total > most_pages)
    taken = ~short & ~over
    faults = {Fault.SHORT: short.unsqueeze(0), Fault.OVER_BOUND: over.unsqueeze(0)}
    _report(books, Word.FAULTS, faults, total.unsqueeze(0))
    total = total * taken
    rank = torch.arange(most_pages, device=books.device)
    mine = rank < total
    pages = books.stack[torch.where(mine, top - 1 - rank, books.num_pages)] * mine
    books.counts.scatter_(0, pages.long(), mine.int())  # the null page's count becomes the 0 that it is
    top -= total
    return pages, taken


def _read(
    books: Books, prefix_lens: Tensor | None, lengths: Tensor, last_slots: Tensor
) -> tuple[Tensor, Tensor, dict[Fault, Tensor], Tensor]:
    """int64 prefix lengths and lengths, faults of each sequence, and last pages: [num_seqs] each."""
    lengths = lengths.long()
    prefix_lens = (lengths - 1).clamp_min(0) if prefix_lens is None else prefix_lens.long()
    last_pages = last_slots // books.page_size
    index, known = _known(books, last_pages)
    has_prefix = prefix_lens > 0
    expected = torch.where(has_prefix, (prefix_lens - 1) % books.page_size, 0)
    fits = ((last_pages > 0) == has_prefix) & (~has_prefix | (last_slots % books.page_size == expected))
    foreign = ~known & (last_pages != 0)
    faults = {
        Fault.SHRUNK: (lengths < prefix_lens) | (prefix_lens < 0) | (lengths < 0),
        Fault.FOREIGN: foreign,
        Fault.USE_AFTER_FREE: known & (books.counts[index] < 1),
        Fault.MISALIGNED: ~fits & ~foreign,
    }
    return prefix_lens, lengths, faults, last_pages


def _needs(books: Books, prefix_lens: Tensor, lengths: Tensor, last_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Pages that each sequence needs, int64, and whether the first of them replaces a shared one: [num_seqs] each."""
    page_size = books.page_size
    index, known = _known(books, last_pages)
    grows = (lengths > prefix_lens) & (prefix_lens >= 0)
    copies = grows & (prefix_lens % page_size != 0) & known & (books.counts[index] > 1)
    whole = (lengths + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size
    return whole.clamp(0, books.num_pages + 1) * grows + copies, copies  # clamped, so that no sum overflows


def _known(books: Books, pages: Tensor) -> tuple[Tensor, Tensor]:
    """What to index counts and marks with, int64, the null page for what is not the pool's; and which ones are."""
    known = (pages > 0) & (pages <= books.num_pages)
    return torch.where(known, pages, 0).long(), known


def _mentions(books: Books, index: Tensor, counted: Tensor) -> Tensor:
    """How often each lane's page is named by the lanes that count."""
    books.marks.index_add_(0, index, counted.int())
    times = books.marks[index]
    books.marks.scatter_(0, index, torch.zeros_like(times))
    return times


def _share_faults(pages: Tensor, known: Tensor, alive: Tensor) -> dict[Fault, Tensor]:
    return {Fault.FOREIGN: ~known & (pages != 0), Fault.USE_AFTER_FREE: known & ~alive}


def _forget(books: Books) -> None:
    books.words[Word.FOUND : Word.FOUND + len(Fault)] = NO_FAULT


def _report(books: Books, first: Word, faults: dict[Fault, Tensor], values: Tensor) -> None:
    """Notes the lowest index of each fault, and the value there, where it is below what is noted."""
    index = torch.arange(values.numel(), device=books.device)
    notes = (index << 32) | (values.long() & 0xFFFFFFFF)
    for fault, where in faults.items():
        word = books.words[first + fault]
        torch.minimum(word, torch.where(where, notes, NO_FAULT).amin(), out=word)
