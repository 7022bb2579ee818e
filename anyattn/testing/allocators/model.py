"""The books of pages in plain Python, which an allocator is compared with, and what must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anyattn.testing.allocators.books import Books, Grown, Growth, State, failed
from anyattn.types import NULL_PAGE


class Model:
    """The books in plain Python. Which page is handed out is the allocator's choice; all else follows."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.refs: Counter[int] = Counter()

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - len(self.refs)

    def take(self, pages: Sequence[int]) -> None:
        """Pages that were handed out. Fails for those that could not be."""
        for page in pages:
            if page == NULL_PAGE:
                failed("page 0, the null page, was handed out.")
            if not 1 <= page <= self.num_pages:
                failed(f"page {page} was handed out; there are 1 to {self.num_pages}.")
            if page in self.refs:
                failed(f"page {page} was handed out while it has {self.refs[page]} references: it is in use twice.")
            self.refs[page] = 1

    def share(self, pages: Sequence[int]) -> None:
        self.refs.update(page for page in pages if page != NULL_PAGE)

    def free(self, pages: Sequence[int]) -> int:
        """How many became free."""
        before = len(self.refs)
        self.refs.subtract(page for page in pages if page != NULL_PAGE)
        self.refs = +self.refs
        return before - len(self.refs)

    def copied(self, batch: Sequence[Growth]) -> list[int]:
        """For each sequence the page that `extend` copies from, or the null page."""
        return [
            growth.last_slot // self.page_size
            if growth.length > growth.prefix_len
            and growth.prefix_len % self.page_size
            and self.refs[growth.last_slot // self.page_size] > 1
            else NULL_PAGE
            for growth in batch
        ]

    def needed(self, batch: Sequence[Growth]) -> list[int]:
        """For each sequence how many pages `extend` takes."""
        return [
            self.pages_for(growth.length) - self.pages_for(growth.prefix_len) + (page != NULL_PAGE)
            for growth, page in zip(batch, self.copied(batch), strict=True)
        ]

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def grow(self, batch: Sequence[Growth], grown: Grown) -> None:
        """What `extend` returned for a batch. Fails where that is not what it must be."""
        must_need(self, batch, grown)
        must_copy(self, batch, grown)
        copied = self.copied(batch)
        for pages in grown.pages:
            self.take(pages)
        self.free(copied)

    def must_agree(self, books: Books) -> None:
        """Fails where the allocator says something else."""
        state = books.state()
        if state.num_free_pages != self.num_free_pages:
            failed(
                f"num_free_pages is {state.num_free_pages}, where {len(self.refs)} of {self.num_pages} pages are held "
                f"and {self.num_free_pages} are free."
            )
        must_have_refs(self, state)
        books.allocator.check()


def must_have_refs(model: Model, state: State) -> None:
    """Fails where a page's references are not those that it was given."""
    for page, count in enumerate(state.refs):
        if count != model.refs[page]:
            failed(f"ref_counts says {count} for page {page}, which is held {model.refs[page]} times.")


def must_need(model: Model, batch: Sequence[Growth], grown: Grown) -> None:
    """Fails where a sequence got more or fewer pages than its growth needs."""
    for growth, pages, copied, needed in zip(batch, grown.pages, model.copied(batch), model.needed(batch), strict=True):
        if len(pages) != needed:
            copy = f", one of them for the copy of page {copied}" if copied else ""
            failed(
                f"extend from {growth.prefix_len} to {growth.length} tokens at page size {model.page_size} gave "
                f"{len(pages)} pages; it takes {needed}{copy}."
            )


def must_copy(model: Model, batch: Sequence[Growth], grown: Grown) -> None:
    """Fails where a shared partial last page is not copied, or another one is."""
    for growth, got, wanted in zip(batch, grown.copied_from, model.copied(batch), strict=True):
        if got != wanted:
            page = growth.last_slot // model.page_size
            failed(
                f"extend from {growth.prefix_len} to {growth.length} tokens at page size {model.page_size}, whose last "
                f"page is {page} with {model.refs[page]} references, returned copied_from {got} instead of {wanted}: "
                "what is copied is a partial last page that is written to and has more than one reference, no other."
            )
