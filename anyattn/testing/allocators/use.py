"""An engine's use of an allocator, beside the model: sequences that grow, fork and end, and pages that others hold."""

from __future__ import annotations

from collections.abc import Sequence

from anyattn.testing.allocators.books import Books, Growth, Lab, LabCheck, failed
from anyattn.testing.allocators.model import Model
from anyattn.types import NULL_PAGE

_OPERATIONS = 300


class Tokens:
    """Tokens and their pages."""

    def __init__(self, length: int = 0, pages: Sequence[int] = ()) -> None:
        self.length = length
        self.pages = list(pages)

    def growth(self, new_tokens: int, page_size: int) -> Growth:
        last_slot = self.pages[-1] * page_size + (self.length - 1) % page_size if self.length else NULL_PAGE
        return Growth(self.length, self.length + new_tokens, last_slot)

    def grow(self, new_tokens: int, pages: Sequence[int], copied_from: int) -> None:
        self.length += new_tokens
        self.pages = self.pages[: -1 if copied_from else None] + list(pages)


class Engine:
    """An allocator and its model, with sequences: what both see of an engine."""

    def __init__(self, lab: Lab, num_pages: int, *, debug: bool = False) -> None:
        self.lab, self.rng, self.page_size = lab, lab.rng, lab.page_size
        self.books: Books = lab.books(num_pages, debug=debug)
        self.model = Model(num_pages, lab.page_size)
        self.sequences: list[Tokens] = []
        self.loose: list[int] = []
        """Pages that `alloc` gave or `share` named, once for each reference."""

    def new_tokens(self) -> int:
        """Often few, which may fit into the last page, and often none or more than pages hold."""
        return self.rng.choice([0, 1, 1, self.rng.randint(0, 3), self.rng.randint(0, 2 * self.page_size + 1)])

    def begin(self, lengths: Sequence[int]) -> None:
        """New sequences, each on pages of its own."""
        batch = [Growth(0, length, 0) for length in lengths]
        grown = self.books.extend(batch)
        self.model.grow(batch, grown)
        new = zip(lengths, grown.pages, strict=True)
        self.sequences += [Tokens(length, pages) for length, pages in new]

    def share(self, pages: Sequence[int]) -> None:
        self.books.share(pages)
        self.model.share(pages)

    def free(self, pages: Sequence[int]) -> None:
        freed, wanted = self.books.free(pages), self.model.free(pages)
        if freed is not None and freed != wanted:
            failed(f"free({list(pages)}) returned {freed}, and {wanted} pages became free.")

    # What a random run is made of

    def alloc(self) -> None:
        count = self.rng.randint(0, 4)
        if count > self.model.num_free_pages:
            self.books.must_be_short(lambda: self.books.allocator.alloc(count), f"alloc({count})", count)
            return
        pages = self.books.alloc(count)
        self.model.take(pages)
        self.loose += pages

    def share_loose(self) -> None:
        named = self.rng.choices(self.loose, k=self.rng.randint(1, 3)) if self.loose else []
        self.share([*named, NULL_PAGE])
        self.loose += named

    def free_loose(self) -> None:
        self.rng.shuffle(self.loose)
        count = self.rng.randint(0, len(self.loose))
        given, self.loose = self.loose[:count], self.loose[count:]
        self.free(self.lab.shuffled([*given, NULL_PAGE]))

    def fork(self) -> None:
        if self.sequences:
            sequence = self.rng.choice(self.sequences)
            self.share(sequence.pages)
            self.sequences.append(Tokens(sequence.length, sequence.pages))

    def end(self) -> None:
        """Ends several in one call, which may name a page more than once."""
        self.rng.shuffle(self.sequences)
        count = self.rng.randint(0, min(len(self.sequences), 4))
        ended, self.sequences = self.sequences[:count], self.sequences[count:]
        self.free(self.lab.shuffled([NULL_PAGE, *(page for sequence in ended for page in sequence.pages)]))

    def extend(self) -> None:
        while len(self.sequences) < 3:
            self.sequences.append(Tokens())
        chosen = self.rng.sample(self.sequences, self.rng.randint(1, min(len(self.sequences), 6)))
        new = [self.new_tokens() for _ in chosen]
        batch = [sequence.growth(count, self.page_size) for sequence, count in zip(chosen, new, strict=True)]
        slack, dtype = self.rng.choice([0, 0, 1, 3 * self.page_size]), self.rng.choice(["int32", "int64"])
        needed = sum(self.model.needed(batch))
        if needed > self.model.num_free_pages:
            call = f"extend by {new} tokens"
            self.books.must_be_short(lambda: self.books.extend(batch, slack=slack, dtype=dtype), call, needed)
            return
        grown = self.books.extend(batch, slack=slack, dtype=dtype)
        self.model.grow(batch, grown)
        for sequence, count, pages, copied in zip(chosen, new, *grown, strict=True):
            sequence.grow(count, pages, copied)


def _random(lab: Lab, *, debug: bool) -> None:
    state = Engine(lab, lab.rng.randint(20, 45), debug=debug)
    operations = (state.extend,) * 4 + (state.alloc, state.share_loose, state.free_loose, state.fork, state.end)
    for number in range(_OPERATIONS):
        lab.rng.choice(operations)()
        # Not after each: an allocator may keep bounds that it corrects when it is asked.
        if number % 7 == 0 or debug:
            state.model.must_agree(state.books)
    state.free([page for sequence in state.sequences for page in sequence.pages])
    state.free(state.loose)
    state.model.must_agree(state.books)
    if len(set(state.books.alloc(state.model.num_pages))) != state.model.num_pages:
        failed("after all pages were given back they cannot all be taken again, each once.")


USE_CHECKS: dict[str, LabCheck] = {
    "random use agrees with a model of the books": lambda lab: _random(lab, debug=False),
    "random use agrees with a model of the books, in debug mode": lambda lab: _random(lab, debug=True),
}
"""By name; for each page size."""
