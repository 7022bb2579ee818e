"""Books of pages that live on a device: free list, reference counts and faults, and the functions that change them.

Every function here enqueues work and returns; none waits for the device. Triton does it where it runs, torch elsewhere,
with the same books and the same page ids as `PagedAllocator` keeps on the host.

- The free list is a stack: a page just freed is the next to be used. `pages[0]` of an allocation is its top.
- Freed pages go on it so that the first one named is on top; a page that is named more than once counts where it is
  named first. Nothing depends on the order in which a device's threads arrive.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels import triton_runs_on
from anyattn.mem_cache.kernels.launch import on

if TYPE_CHECKING:

    import torch
else:
    torch = lazy_import("torch")

NO_FAULT = 2**63 - 1


class Fault(enum.IntEnum):
    """What can be wrong with a request, as the device finds it; the last two are what the host must not let pass."""

    DOUBLE_FREE = 0
    FOREIGN = 1
    USE_AFTER_FREE = 2
    ALIASED = 3
    MISALIGNED = 4
    SHRUNK = 5
    SHORT = 6
    OVER_BOUND = 7


FAULT_TEXTS = {
    Fault.DOUBLE_FREE: "page {page} is freed more often than it has references (entry {index})",
    Fault.FOREIGN: "page {page} is not one of this allocator's, 1 to {num_pages} (entry {index})",
    Fault.USE_AFTER_FREE: "page {page} is used after it was freed (entry {index})",
    Fault.ALIASED: "more sequences would write to page {page} than hold it (the first is sequence {index})",
    Fault.MISALIGNED: "a last slot, in page {page}, does not fit its prefix length at page size {page_size} "
    "(sequence {index})",
    Fault.SHRUNK: "extend makes sequences longer: a length is below its prefix, or negative (sequence {index})",
    Fault.SHORT: "{page} pages were needed and fewer were free, which the host did not know",
    Fault.OVER_BOUND: "{page} pages were needed, more than the bound on new tokens allows",
}


class Word(enum.IntEnum):
    """Where things are in `Books.words`."""

    NUM_FREE = 0
    ARRIVALS = 1
    """Programs of the running kernel that are done; 0 between kernels."""
    TOP = 2
    """The number of free pages before a free that takes several kernels."""
    NEEDED = 3
    """What `inspect_extend` found: pages needed ..."""
    NEW_TOKENS = 4
    """... and the sum of new tokens."""
    FAULTS = 5
    """First of one word a fault: what operations met since the books were made."""
    FOUND = 5 + len(Fault)
    """First of one word a fault: what the last inspection found."""
    SIZE = 5 + 2 * len(Fault)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Books:
    """The books of `num_pages` pages, on one device.

    stack: [num_pages + 1], int32, free page ids, top at NUM_FREE - 1. The last entry is scratch.
    counts: [num_pages + 1], int32, references of each page; 0 for free ones and the null page.
    marks: [num_pages + 1], int32, scratch of one operation, zero between them.
    words: [Word.SIZE], int64. A fault is `index << 32 | page`, the lowest index met; NO_FAULT where there is none.
    totals: [MOST_FREE_PROGRAMS], int32, scratch of frees that take several kernels.
    engine: the module that does the work.
    """

    num_pages: int
    page_size: int
    device: torch.device
    stack: torch.Tensor
    counts: torch.Tensor
    marks: torch.Tensor
    words: torch.Tensor
    totals: torch.Tensor
    engine: Any


MOST_FREE_PROGRAMS = 128


def new_books(num_pages: int, page_size: int, device: Any) -> Books:
    """All pages free, page 1 on top. device: a torch device, or None for torch's default."""
    with torch.inference_mode(False):  # books may be made in inference mode and be changed outside of it
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type == "cpu":
            device = torch.device("cpu")  # without an index, as its tensors have none
        words = torch.full((Word.SIZE,), NO_FAULT, dtype=torch.int64, device=device)
        words[: Word.FAULTS] = 0
        words[Word.NUM_FREE] = num_pages
        device = words.device  # with its index
        stack = torch.arange(num_pages, -1, -1, dtype=torch.int32, device=device)
        counts, marks = (torch.zeros(num_pages + 1, dtype=torch.int32, device=device) for _ in range(2))
        totals = torch.zeros(MOST_FREE_PROGRAMS, dtype=torch.int32, device=device)
    return Books(
        num_pages=num_pages,
        page_size=page_size,
        device=device,
        stack=stack,
        counts=counts,
        marks=marks,
        words=words,
        totals=totals,
        engine=_engine(device),
    )


def alloc(books: Books, num_pages: int) -> torch.Tensor:
    """`num_pages` (at least 1) page ids, int32, with one reference each.

    Where fewer are free: null pages, nothing taken, and Fault.SHORT.
    """
    with on(books.device):
        pages: torch.Tensor = books.engine.alloc(books, num_pages)
    return pages


def extend(
    books: Books, prefix_lens: torch.Tensor | None, lengths: torch.Tensor, last_slots: torch.Tensor, most_pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`KVAllocator.extend` for a batch of at least one: `indptr`, `pages` and `copied_from` of its Extension.

    prefix_lens: [num_seqs], int32 or int64; None for decode: each length but 0 has grown by one.
    most_pages: how many the batch may take; `pages` has as many entries, null pages beyond the last new one.

    Where the batch needs more pages than that, or than are free: nothing is taken, `indptr`, `pages` and `copied_from`
    are zeros, and Fault.OVER_BOUND or Fault.SHORT is met. A length below its prefix counts as no new tokens.
    """
    with on(books.device):
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = books.engine.extend(
            books, prefix_lens, lengths, last_slots, most_pages
        )
    return result


def share(books: Books, pages: torch.Tensor) -> None:
    """Adds a reference to each page of at least one, once for each time it is named; free ones are left as they are."""
    with on(books.device):
        books.engine.share(books, pages)


def free(books: Books, pages: torch.Tensor) -> None:
    """Takes a reference from each page of at least one; those without any return to the free list."""
    with on(books.device):
        books.engine.free(books, pages)


def inspect_extend(
    books: Books, prefix_lens: torch.Tensor | None, lengths: torch.Tensor, last_slots: torch.Tensor
) -> None:
    """Sets NEEDED, NEW_TOKENS and FOUND to what `extend` with these arguments would take and meet. Changes no more."""
    with on(books.device):
        books.engine.inspect_extend(books, prefix_lens, lengths, last_slots)


def inspect_share(books: Books, pages: torch.Tensor) -> None:
    """Sets FOUND to what `share` would meet."""
    with on(books.device):
        books.engine.inspect_share(books, pages)


def inspect_free(books: Books, pages: torch.Tensor) -> None:
    """Sets FOUND to what `free` would meet."""
    with on(books.device):
        books.engine.inspect_free(books, pages)


def ref_counts(books: Books, pages: torch.Tensor) -> torch.Tensor:
    """[num_pages], int32, references of each page; 0 for the null page and for ids that are not the pool's."""
    known = (pages > 0) & (pages <= books.num_pages)
    return books.counts[torch.where(known, pages, 0)]


def fault_text(books: Books, fault: Fault, note: int) -> str:
    """What a fault's word says, for people."""
    page = (note & 0xFFFFFFFF) - ((note & 0x80000000) << 1)  # the low half is an int32
    return FAULT_TEXTS[fault].format(page=page, index=note >> 32, num_pages=books.num_pages, page_size=books.page_size)


def _engine(device: torch.device) -> Any:
    if triton_runs_on(device):
        from anyattn.mem_cache.kernels import books_triton

        return books_triton
    from anyattn.mem_cache.kernels import books_torch

    return books_torch
