"""What debug mode of an allocator finds, told from its reference counts alone; for books on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np

    from anyattn.mem_cache.base import KVAllocator
else:
    np = lazy_import("numpy")


def check_share(allocator: KVAllocator, pages: Any) -> None:
    """pages: [n], integers, the null page not among them.

    Raises ContractError for pages that are not the allocator's, or free.
    """
    _check_foreign(allocator, pages, "shared")
    gone = allocator.ref_counts(pages) < 1
    if gone.any():
        raise ContractError(f"page {pages[gone][0]} is shared after it was freed.")


def check_free(allocator: KVAllocator, pages: Any) -> None:
    """pages: [n], integers, the null page not among them.

    Raises ContractError for pages that are not the allocator's, or that have fewer references than are given back.
    """
    _check_foreign(allocator, pages, "freed")
    named, times = np.unique(pages, return_counts=True)
    refs = allocator.ref_counts(named)
    short = refs < times
    if short.any():
        raise ContractError(
            f"page {named[short][0]} is freed {times[short][0]} times in one call and has {refs[short][0]} references: "
            "it was freed before, or belongs to somebody else."
        )


def check_extend(allocator: KVAllocator, prefix_lens: Any, lengths: Any, last_slots: Any) -> None:
    """The arguments of `KVAllocator.extend`.

    Raises ContractError for a last page that is free (use after free), for one that two sequences would write to
    (aliasing), for a slot that does not fit its prefix (misalignment) and for a length below its prefix.
    """
    prefix_lens, lengths, last_slots = (np.asarray(array, np.int64) for array in (prefix_lens, lengths, last_slots))
    page_size = allocator.page_size
    last_pages = last_slots // page_size
    if (lengths < prefix_lens).any() or (prefix_lens < 0).any():
        raise ContractError("extend makes sequences longer: a length is below its prefix, or negative.")
    has_prefix = prefix_lens > 0
    _check_foreign(allocator, last_pages[has_prefix], "extended")
    if last_pages[~has_prefix].any():
        raise ContractError("a sequence without tokens has a last slot outside of the null page.")
    wrong = has_prefix & (last_slots % page_size != (prefix_lens - 1) % page_size)
    if wrong.any():
        raise ContractError(
            f"slot {last_slots[wrong][0]} cannot hold token {prefix_lens[wrong][0] - 1} of its sequence at page size "
            f"{page_size}: the last slots do not fit the prefix lengths."
        )
    gone = has_prefix & (allocator.ref_counts(last_pages) < 1)
    if gone.any():
        raise ContractError(f"page {last_pages[gone][0]} is extended after it was freed.")
    partial = has_prefix & (prefix_lens % page_size != 0) & (lengths > prefix_lens)
    named, times = np.unique(last_pages[partial], return_counts=True)
    aliased = (times > 1) & (allocator.ref_counts(named) < times)
    if aliased.any():
        raise ContractError(f"two sequences would write to page {named[aliased][0]}, which only one of them holds.")


def _check_foreign(allocator: KVAllocator, pages: Any, what: str) -> None:
    foreign = (pages < 1) | (pages > allocator.num_pages)
    if foreign.any():
        raise ContractError(
            f"page {pages[foreign][0]} is {what}, and this allocator's are 1 to {allocator.num_pages}."
        )
