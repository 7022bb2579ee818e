"""Checks of how an allocator hands out pages and counts the free ones, and of what it refuses."""

from __future__ import annotations

import numpy as np

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.testing.allocators.books import Growth, Lab, LabCheck, failed
from anyattn.testing.allocators.model import Model
from anyattn.types import NULL_PAGE

_NUM_PAGES = 23
_MANY_PAGES = 100_003
"""More than int16 holds, and than one block of any kernel."""


def _ids(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    for count in (1, 5, 0, _NUM_PAGES - 6):
        outside = [page for page in books.alloc(count) if not 1 <= page <= _NUM_PAGES]
        if outside:
            failed(f"alloc handed out {outside}; an allocator of {_NUM_PAGES} pages has 1 to {_NUM_PAGES}.")


def _twice(lab: Lab) -> None:
    books, held = lab.books(_NUM_PAGES), set[int]()
    for _ in range(120):
        if held and lab.rng.random() < 0.5:
            given = lab.rng.sample(sorted(held), lab.rng.randint(1, len(held)))
            books.free(given)
            held -= set(given)
        pages = books.alloc(lab.rng.randint(0, (_NUM_PAGES - len(held)) // 2))
        again = sorted(held.intersection(pages)) or sorted({page for page in pages if pages.count(page) > 1})
        if again:
            failed(f"alloc handed out page {again[0]}, which was handed out before and not freed since.")
        held.update(pages)


def _null_page(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    for _ in range(3):  # padding that was freed must not turn up either
        pages = [page for piece in (4, 1, _NUM_PAGES - 5) for page in books.alloc(piece)]
        if NULL_PAGE in pages:
            failed("alloc handed out page 0, the null page, at which padding points.")
        books.free([NULL_PAGE, *lab.shuffled(pages), NULL_PAGE])


def _all_of_them(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    for _ in range(3):
        pages = [page for piece in lab.pieces(range(_NUM_PAGES)) for page in books.alloc(len(piece))]
        if sorted(pages) != list(range(1, _NUM_PAGES + 1)):
            failed(f"{_NUM_PAGES} pages were taken to the last, and these were handed out: {sorted(pages)}.")
        books.must_refuse(lambda: books.allocator.alloc(1), "alloc(1) where no page is free", OutOfPagesError)
        for piece in lab.pieces(lab.shuffled(pages)):
            books.free(piece)
    books.allocator.check()


def _num_free(lab: Lab) -> None:
    books, model = lab.books(_NUM_PAGES), Model(_NUM_PAGES, lab.page_size)
    if books.allocator.num_pages != _NUM_PAGES:
        failed(f"num_pages is {books.allocator.num_pages} of an allocator that was made with {_NUM_PAGES}.")
    if books.allocator.page_size != lab.page_size:
        failed(f"page_size is {books.allocator.page_size} of an allocator that was made with {lab.page_size}.")

    def compare(after: str) -> None:
        if books.num_free_pages != model.num_free_pages:
            failed(f"num_free_pages is {books.num_free_pages} after {after}; {model.num_free_pages} pages are free.")

    compare("the allocator was made")
    held: list[int] = []
    for _ in range(40):
        pages = books.alloc(lab.rng.randint(0, model.num_free_pages // 2))
        model.refs.update(dict.fromkeys(pages, 1))
        compare("alloc")
        shared = lab.rng.choices(pages, k=3) if pages else []
        books.share(shared)
        model.share(shared)
        held += pages + shared
        compare("share")
        given = lab.rng.sample(held, lab.rng.randint(0, len(held)))
        for page in given:
            held.remove(page)
        books.free(given)
        model.free(given)
        compare("free")


def _alloc_short(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    held = books.alloc(_NUM_PAGES - 5)
    for count in (6, 7, _NUM_PAGES, _NUM_PAGES + 1, 10**6):
        books.must_refuse(
            lambda count=count: books.allocator.alloc(count), f"alloc({count}) where 5 are free", OutOfPagesError
        )
    rest = books.alloc(5)  # what the books count is one thing, what they still have another
    if sorted(held + rest) != list(range(1, _NUM_PAGES + 1)):
        failed(f"after refusals the last 5 pages are {sorted(rest)}; free were all but {sorted(held)}.")


def _alloc_numbers(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    books.alloc(_NUM_PAGES - 5)
    for count in (6, 9, _NUM_PAGES):
        books.must_be_short(lambda count=count: books.allocator.alloc(count), f"alloc({count})", count)


def _nothing(lab: Lab) -> None:
    books = lab.books(_NUM_PAGES)
    held = books.alloc(3)
    before = books.state()
    books.alloc(0)
    books.share([])
    if books.free([]):
        failed("free of no pages says that some became free.")
    if books.refs([]) or books.extend([]).pages or books.state() != before:
        failed(f"alloc(0), share, free and extend of nothing changed the books, where {held} are held.")
    books.alloc(_NUM_PAGES - 3)
    if books.alloc(0):
        failed("alloc(0) returned pages where none is free.")


def _many(lab: Lab) -> None:
    books = lab.books(_MANY_PAGES)
    thirds = [books.alloc(count) for count in (_MANY_PAGES // 3, 40_000, _MANY_PAGES - _MANY_PAGES // 3 - 40_000)]
    pages = np.array([page for third in thirds for page in third])
    if not np.array_equal(np.sort(pages), np.arange(1, _MANY_PAGES + 1)):
        failed(f"{_MANY_PAGES} pages were taken, and they are not 1 to {_MANY_PAGES}, each once.")
    books.share(thirds[1])
    books.free(lab.shuffled(thirds[0] + thirds[1] + thirds[2]))
    if books.num_free_pages != _MANY_PAGES - 40_000:
        failed(f"all pages were freed, 40000 of which have another holder, and {books.num_free_pages} are free.")
    books.free(lab.shuffled(thirds[1]))
    if books.num_free_pages != _MANY_PAGES:
        failed(f"all pages were freed by all their holders, and {books.num_free_pages} of {_MANY_PAGES} are free.")
    long = [Growth(0, _MANY_PAGES // 2 * lab.page_size, 0), Growth(0, 7, 0)]
    needed = Model(_MANY_PAGES, lab.page_size).needed(long)
    grown = books.extend(long)
    if [len(set(row)) for row in grown.pages] != needed:
        failed(f"extend to {long[0].length} and 7 tokens gave {[len(set(row)) for row in grown.pages]} pages.")
    books.allocator.check()


def _wrong_num_pages(lab: Lab) -> None:
    for num_pages in (0, -1):
        try:
            lab.make(num_pages, lab.page_size)
        except ContractError:
            continue
        failed(f"an allocator of {num_pages} pages was made; the contract wants ContractError.")


def _wrong_page_size(lab: Lab) -> None:
    sizes = lab.tested.capabilities.page_sizes
    for page_size in [size for size in range(1, 5000) if size not in sizes][:3] or [0]:
        try:
            lab.make(4, page_size)
        except ContractError:
            continue
        failed(f"an allocator of page size {page_size} was made; {sizes} are declared, so it is a ContractError.")


PAGE_CHECKS: dict[str, LabCheck] = {
    "pages are numbered 1 to num_pages, in int32": _ids,
    "no page is handed out twice": _twice,
    "page 0 is never handed out": _null_page,
    "all pages can be taken, and again after they were freed": _all_of_them,
    "num_free_pages counts the free pages": _num_free,
    "alloc refuses when pages are short, and takes nothing": _alloc_short,
    "a refused alloc says how many pages were needed and free": _alloc_numbers,
    "calls for nothing change nothing": _nothing,
    f"{_MANY_PAGES} pages are taken, shared and freed like few": _many,
    "fewer pages than one are refused": _wrong_num_pages,
}
"""By name; for any page size."""

PAGE_SIZE_CHECKS: dict[str, LabCheck] = {"a page size that is not declared is refused": _wrong_page_size}
"""By name; about the declared page sizes."""
