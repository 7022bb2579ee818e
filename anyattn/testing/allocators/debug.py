"""Checks of what an allocator in debug mode refuses: each misuse when it happens, and without a change."""

from __future__ import annotations

from anyattn.testing.allocators.books import Growth, Lab, LabCheck
from anyattn.types import NULL_PAGE

_NUM_PAGES = 23


def _double_free(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES, debug=True)
    one, two, gone = books.alloc(3)
    books.share([two])
    books.free([gone])
    for given in ([gone], [one, one], [one, gone], [two, two, two], [NULL_PAGE, gone, two]):
        books.must_refuse(lambda given=given: books.free(given), f"free({given}), a double free,")
    books.free([one, two, two])
    books.must_refuse(lambda: books.free([two]), f"free({[two]}), a double free,")


def _foreign_free(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES, debug=True)
    (page,) = books.alloc(1)
    for foreign in (_NUM_PAGES + 1, -1, -_NUM_PAGES, 2**31 - 1):
        for given in ([foreign], [page, foreign]):
            books.must_refuse(lambda given=given: books.free(given), f"free({given}) of 1 to {_NUM_PAGES}")


def _shared_after_free(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES, debug=True)
    page, gone = books.alloc(2)
    books.free([gone])
    for given in ([gone], [page, gone], [NULL_PAGE, gone]):
        books.must_refuse(lambda given=given: books.share(given), f"share({given}) of a page that is free")


def _extended_after_free(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES, debug=True)
    page, gone = books.alloc(2)
    books.free([gone])
    length = max(lab.page_size - 1, 1)
    alive, dead = (Growth(length, length + 1, owned * lab.page_size + length - 1) for owned in (page, gone))
    for batch in ([dead], [alive, dead]):
        what = f"extend of a sequence on page {gone}, which is free,"
        books.must_refuse(lambda batch=batch: books.extend(batch), what)


def _misaligned(lab: Lab) -> None:
    books, size = lab.books(_NUM_PAGES, debug=True), lab.page_size
    (page,) = books.alloc(1)
    for length in {1, size - 1}:
        for slot in (page * size + length % size, page * size + (length - 2) % size):
            if slot == page * size + length - 1:
                continue
            batch = [Growth(length, length + 1, slot)]
            books.must_refuse(
                lambda batch=batch: books.extend(batch),
                f"extend of a sequence of {length} tokens whose last slot is {slot} at page size {size}",
            )


def _aliased(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES, debug=True)
    (page,) = books.alloc(1)
    growth = Growth(1, 2, page * lab.page_size)
    books.must_refuse(lambda: books.extend([growth] * 2), "extend of two sequences into a page of one reference")
    books.share([page])
    books.must_refuse(lambda: books.extend([growth] * 3), "extend of three sequences into a page of two references")


DEBUG_CHECKS: dict[str, LabCheck] = {
    "debug mode refuses a double free, and changes nothing": _double_free,
    "debug mode refuses to free a page that is not the allocator's": _foreign_free,
    "debug mode refuses to share a free page": _shared_after_free,
    "debug mode refuses to extend into a free page": _extended_after_free,
}
"""By name; for any page size."""

PARTIAL_PAGE_CHECKS: dict[str, LabCheck] = {
    "debug mode refuses a last slot that does not fit its prefix": _misaligned,
    "debug mode refuses two writers of one page": _aliased,
}
"""By name; for pages of more than one token."""
