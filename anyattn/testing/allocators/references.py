"""Checks of an allocator's reference counts: what share adds, what free takes, when a page comes back."""

from __future__ import annotations

from anyattn.testing.allocators.books import Books, Lab, LabCheck, failed
from anyattn.testing.allocators.model import Model, must_have_refs
from anyattn.types import NULL_PAGE

_NUM_PAGES = 23


def _references(lab: Lab) -> None:
    books, model = lab.books(_NUM_PAGES), Model(_NUM_PAGES, lab.page_size)
    model.refs.update(dict.fromkeys(books.alloc(6), 1))
    state = books.state()
    if state.refs[NULL_PAGE]:
        failed(f"ref_counts says {state.refs[NULL_PAGE]} for page 0, which nobody holds: it is never handed out.")
    must_have_refs(model, state)


def _padding_freed(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    first, second = books.alloc(2)
    books.free([NULL_PAGE, NULL_PAGE])
    _must_be(books, {first: 1, second: 1, NULL_PAGE: 0}, "page 0 was freed twice")
    books.free([NULL_PAGE, first, NULL_PAGE, second])
    _must_be(books, {first: 0, second: 0, NULL_PAGE: 0}, "two pages were freed among padding")
    _must_count(books, _NUM_PAGES, "two pages were freed among padding")


def _padding_shared(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    first, second = books.alloc(2)
    books.share([NULL_PAGE, first, NULL_PAGE])
    _must_be(books, {first: 2, second: 1, NULL_PAGE: 0}, "one page was shared among padding")
    _must_count(books, _NUM_PAGES - 2, "one page was shared among padding")


def _last_reference(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    pages = books.alloc(4)
    books.share(pages[:2])
    books.share(pages[:1])
    for left in ((2, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)):
        books.free([page for page in pages if books.refs([page])[0]])
        _must_be(books, dict(zip(pages, left, strict=True)), "each of its holders but the last gave a page back")
        _must_count(books, _NUM_PAGES - sum(count > 0 for count in left), "a page's references were given back")


def _shared_twice(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    first, second = books.alloc(2)
    books.share([first, second, first, first])
    _must_be(books, {first: 4, second: 2}, "one call of share named a page three times and another once")


def _freed_twice(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    first, second, third = books.alloc(3)
    books.share([first, first, second])
    books.free([first, third, first])
    _must_be(books, {first: 1, second: 2, third: 0}, "one call of free named a page twice and another once")
    books.free([second, first, second])
    _must_be(books, {first: 0, second: 0}, "one call of free gave both references of a page back")
    _must_count(books, _NUM_PAGES, "all references were given back")


def _freed_count(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    pages = books.alloc(8)
    books.share([*pages[:3], pages[0]])
    for given, wanted in (
        ([pages[3], NULL_PAGE, pages[4]], 2),
        (pages[:3], 0),
        ([pages[1], pages[5], pages[0]], 2),
        ([pages[0], pages[2], pages[6], pages[7]], 4),
    ):
        freed = books.free(given)
        if freed is not None and (freed != wanted or isinstance(freed, bool)):
            failed(f"free({given}) returned {freed!r}, and {wanted} pages became free; None is for books without sync.")


def _free_once(lab: Lab) -> None:
    for _ in range(4):
        books = lab.books(_NUM_PAGES)
        pages = books.alloc(_NUM_PAGES)
        shared = lab.rng.sample(pages, 9)
        books.share(shared)
        given = lab.shuffled(pages + shared)
        for piece in lab.pieces(given, most=12):
            books.free(piece)
        found = [page for piece in lab.pieces(range(_NUM_PAGES)) for page in books.alloc(len(piece))]
        twice = sorted({page for page in found if found.count(page) > 1})
        if twice:
            failed(f"page {twice[0]} was shared and freed by all its holders, and is now handed out twice.")
        missing = sorted(set(range(1, _NUM_PAGES + 1)).difference(found))
        if missing:
            failed(f"page {missing[0]} was freed by all its holders, and never comes back.")


def _may_share(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    pages = books.alloc(3)
    for shared in (pages[:1], pages, pages[1:]):
        books.share(shared)
        if not books.allocator.may_share:
            failed("may_share is False while a page has several references: extend would write to what others read.")
    books.free(pages)  # some still have more than one
    if not books.allocator.may_share:
        failed("may_share is False while a page has several references: extend would write to what others read.")


def _must_be(books: Books, refs: dict[int, int], after: str) -> None:
    for (page, wanted), got in zip(refs.items(), books.refs(list(refs)), strict=True):
        if got != wanted:
            failed(f"{after}, and page {page} has {got} references instead of {wanted}.")


def _must_count(books: Books, num_free: int, after: str) -> None:
    if books.num_free_pages != num_free:
        failed(f"{after}, and num_free_pages is {books.num_free_pages} instead of {num_free}.")
    books.allocator.check()


REFERENCE_CHECKS: dict[str, LabCheck] = {
    "a page has one reference when it is handed out, free ones and page 0 have none": _references,
    "free skips page 0, which is padding": _padding_freed,
    "share skips page 0, which is padding": _padding_shared,
    "a page is free when its last reference was given back, and not before": _last_reference,
    "a page named twice in one share gets two references": _shared_twice,
    "a page named twice in one free loses two references": _freed_twice,
    "free returns how many pages became free, or None": _freed_count,
    "a page that was shared comes back once": _free_once,
    "may_share is true while a page has several references": _may_share,
}
"""By name; for any page size."""
