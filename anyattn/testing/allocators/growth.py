"""Checks of how an allocator extends a batch: pages taken, shared partial pages copied, refusals."""

from __future__ import annotations

from anyattn.errors import OutOfPagesError
from anyattn.testing.allocators.books import Growth, Lab, LabCheck, failed
from anyattn.testing.allocators.model import must_copy, must_have_refs, must_need
from anyattn.testing.allocators.use import Engine, Tokens
from anyattn.types import NULL_PAGE


def _grown(lab: Lab) -> tuple[Engine, list[Growth]]:
    """Sequences of random lengths, some of whose last pages have other holders; the batch by which they grow."""
    state = Engine(lab, 200)
    lengths = [lab.rng.choice([0, lab.page_size, lab.rng.randint(1, 3 * lab.page_size)]) for _ in range(9)]
    state.begin([*lengths, lab.page_size + 1])
    sequences = state.sequences
    for sequence in lab.rng.sample(sequences, 5):
        state.share(sequence.pages[-1:] * lab.rng.randint(1, 2))
    shared = sequences[-1]
    state.share(shared.pages)
    sequences.append(Tokens(shared.length, shared.pages))  # both are in the batch
    new = [1 if sequence is shared else state.new_tokens() for sequence in sequences[:-1]]
    return state, [sequence.growth(count, lab.page_size) for sequence, count in zip(sequences, [*new, 1], strict=True)]


def _extend_needs(lab: Lab) -> None:
    for slack in (0, 1, 5 * lab.page_size):
        for dtype in ("int32", "int64"):
            state, batch = _grown(lab)
            before = state.books.num_free_pages
            grown = state.books.extend(batch, slack=slack, dtype=dtype)
            must_need(state.model, batch, grown)
            pages = [page for row in grown.pages for page in row]
            held = sorted({page for page in pages if page in state.model.refs or pages.count(page) > 1})
            if held:
                failed(f"extend handed out page {held[0]}, which was handed out before.")
            freed = [page for page in set(grown.copied_from) if page and not state.books.refs([page])[0]]
            if state.books.num_free_pages != before - len(pages) + len(freed):
                failed(
                    f"extend took {len(pages)} pages and gave {len(freed)} back, and num_free_pages went from {before} "
                    f"to {state.books.num_free_pages}, with most_new_tokens {slack} above what was needed."
                )


def _extend_copies(lab: Lab) -> None:
    for _ in range(8):
        state, batch = _grown(lab)
        must_copy(state.model, batch, state.books.extend(batch))


def _extend_drops(lab: Lab) -> None:
    for _ in range(8):
        state, batch = _grown(lab)
        copied = state.model.copied(batch)
        grown = state.books.extend(batch)
        pages = [page for row in grown.pages for page in row]
        reused = sorted(set(pages).intersection(copied) - {NULL_PAGE})
        if reused:
            failed(f"extend copies from page {reused[0]} and hands it out in the same call, before it is copied.")
        state.model.refs.update(dict.fromkeys(pages, 1))
        state.model.free(copied)
        must_have_refs(state.model, state.books.state())
        state.model.must_agree(state.books)


def _extend_nothing(lab: Lab) -> None:
    state, _ = _grown(lab)
    before = state.books.state()
    grown = state.books.extend([sequence.growth(0, lab.page_size) for sequence in state.sequences])
    if any(grown.pages) or any(grown.copied_from) or state.books.state() != before:
        failed(f"extend by no tokens took pages {grown.pages} and copies from {grown.copied_from}.")


def _short(lab: Lab) -> tuple[Engine, list[Growth], int]:
    """A batch that needs one page too many, one of them for a copy where that can be; and how many it needs."""
    state = Engine(lab, 12)
    length = 2 * lab.page_size - 1 if lab.page_size > 1 else 1
    state.begin([length, 3 * lab.page_size])
    state.share(state.sequences[0].pages)
    more = (12 - len(state.model.refs)) * lab.page_size + (0 if lab.page_size > 1 else 1)
    sequences = [*state.sequences, Tokens()]
    new = [1 if lab.page_size > 1 else 0, more // 2, more - more // 2]
    batch = [sequence.growth(count, lab.page_size) for sequence, count in zip(sequences, new, strict=True)]
    return state, batch, sum(state.model.needed(batch))


def _extend_short(lab: Lab) -> None:
    state, batch, _ = _short(lab)
    books = state.books
    for slack in (0, lab.page_size):
        books.must_refuse(lambda slack=slack: books.extend(batch, slack=slack), "extend", OutOfPagesError)
    far = [Growth(0, 2**32, 0), Growth(0, 2**31, 0)]
    books.must_refuse(lambda: books.extend(far), f"extend to {2**32} and {2**31} tokens", OutOfPagesError)
    rest = books.alloc(state.model.num_free_pages)  # what the books count is one thing, what they still have another
    state.model.take(rest)
    grown = [sequence.growth(1, lab.page_size) for sequence in state.sequences[:1]]
    if lab.page_size > 1:
        books.must_refuse(lambda: books.extend(grown), "extend of a shared partial page", OutOfPagesError)
    state.model.must_agree(books)


def _extend_numbers(lab: Lab) -> None:
    state, batch, needed = _short(lab)
    state.books.must_be_short(lambda: state.books.extend(batch), "extend", needed)
    state.books.must_be_short(lambda: state.books.extend(batch, slack=9), "extend", needed)


GROWTH_CHECKS: dict[str, LabCheck] = {
    "extend takes what the growth of each sequence needs": _extend_needs,
    "extend copies a partial last page that is shared, and no other": _extend_copies,
    "extend gives its reference to a copied page back": _extend_drops,
    "extend by no tokens takes nothing": _extend_nothing,
    "extend refuses when pages are short, and takes nothing": _extend_short,
    "a refused extend says how many pages were needed and free": _extend_numbers,
}
"""By name; for each page size."""
