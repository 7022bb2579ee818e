"""An allocator as the kit drives it: in lists of Python, whatever its arrays are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import KVAllocator
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


def failed(text: str) -> NoReturn:
    """Ends a check that does not hold."""
    raise CheckFailedError(text)


class Growth(NamedTuple):
    """One sequence of a batch that `extend` is called for; last_slot is 0 where the prefix is."""

    prefix_len: int
    length: int
    last_slot: int


class Grown(NamedTuple):
    """What `extend` returned: new pages of each sequence, and the page that its first one is a copy of, or 0."""

    pages: list[list[int]]
    copied_from: list[int]


class State(NamedTuple):
    """What a refusal must leave as it was. refs: of pages 0 to num_pages."""

    num_free_pages: int
    refs: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """What a check works with: the tested class, where and with which page size, and the seed's random numbers."""

    tested: type[KVAllocator]
    device: Platform
    page_size: int
    rng: random.Random

    def books(self, num_pages: int, *, debug: bool = False) -> Books:
        """A fresh allocator."""
        return Books(self, num_pages, debug=debug)

    def make(self, num_pages: int, page_size: int, *, debug: bool = False) -> KVAllocator:
        return self.tested(num_pages, page_size, self.device.torch_device, debug=debug)

    def shuffled(self, pages: Iterable[int]) -> list[int]:
        pages = list(pages)
        self.rng.shuffle(pages)
        return pages

    def pieces(self, pages: Sequence[int], most: int = 5) -> list[list[int]]:
        """The pages in runs of random length."""
        found: list[list[int]] = []
        while len(pages):
            count = self.rng.randint(1, most)
            found.append(list(pages[:count]))
            pages = pages[count:]
        return found


LabCheck = Callable[[Lab], None]


class Books:
    """One allocator under test."""

    def __init__(self, lab: Lab, num_pages: int, *, debug: bool) -> None:
        self.num_pages, self.page_size = num_pages, lab.page_size
        self.allocator = lab.make(num_pages, lab.page_size, debug=debug)
        example = lab.make(9, lab.page_size).alloc(1)  # of another one, so that this one is as it was made
        self.in_numpy = isinstance(example, np.ndarray)
        """Whether the allocator's arrays are numpy's; otherwise they are tensors."""
        if not self.in_numpy and not isinstance(example, torch.Tensor):
            failed(f"alloc returned a {type(example).__name__}; arrays are numpy's or torch's.")
        self._device = None if self.in_numpy else example.device

    @property
    def num_free_pages(self) -> int:
        return int(self.allocator.num_free_pages)

    def array(self, numbers: Sequence[int], dtype: str = "int32") -> Any:
        """Numbers as the allocator takes them."""
        if self.in_numpy:
            return np.array(numbers, dtype=dtype)
        return torch.tensor(numbers, dtype=getattr(torch, dtype), device=self._device)

    def alloc(self, count: int) -> list[int]:
        """Where that many pages are free."""
        try:
            pages = self.numbers(self.allocator.alloc(count), f"alloc({count})")
        except OutOfPagesError as error:
            failed(f"alloc({count}) was refused, and at least so many pages are free: {error}")
        if len(pages) != count:
            failed(f"alloc({count}) returned {len(pages)} page ids: {pages}.")
        return pages

    def share(self, pages: Sequence[int]) -> None:
        self.allocator.share(self.array(pages))

    def free(self, pages: Sequence[int]) -> int | None:
        return self.allocator.free(self.array(pages))

    def refs(self, pages: Sequence[int]) -> list[int]:
        counts = self.numbers(self.allocator.ref_counts(self.array(pages)), "ref_counts")
        if len(counts) != len(pages):
            failed(f"ref_counts of {len(pages)} pages returned {len(counts)} numbers.")
        return counts

    def state(self) -> State:
        every = self.array(range(self.num_pages + 1), "int64")
        return State(self.num_free_pages, self.numbers(self.allocator.ref_counts(every), "ref_counts"))

    def extend(self, batch: Sequence[Growth], *, slack: int = 0, dtype: str = "int64") -> Grown:
        """slack: by how much the bound on new tokens is above their number. dtype: of the lengths."""
        prefix_lens, lengths, last_slots = list(zip(*batch, strict=True)) or [(), (), ()]
        most = sum(max(growth.length - growth.prefix_len, 0) for growth in batch) + slack
        # The page table, whose lengths are on the host, gives no bound.
        bound = {} if self.in_numpy and not slack else {"most_new_tokens": most}
        arrays = (self.array(prefix_lens, dtype), self.array(lengths, dtype), self.array(last_slots, "int64"))
        extension = self.allocator.extend(*arrays, **bound)
        call = f"extend from {list(prefix_lens)} to {list(lengths)} tokens at page size {self.page_size}"
        indptr, pages, copied_from = (
            self.numbers(getattr(extension, name), f"{name} of {call}") for name in ("indptr", "pages", "copied_from")
        )
        if len(indptr) != len(batch) + 1 or indptr[0] != 0 or any(b < a for a, b in pairwise(indptr)):
            failed(f"{call} returned indptr {indptr}: it has num_seqs + 1 entries, begins with 0 and never falls.")
        if len(pages) < indptr[-1] or len(copied_from) != len(batch):
            failed(
                f"{call} returned {len(pages)} pages where indptr ends in {indptr[-1]}, and {len(copied_from)} entries "
                f"of copied_from for {len(batch)} sequences."
            )
        return Grown([pages[start:end] for start, end in pairwise(indptr)], copied_from)

    def numbers(self, given: Any, what: str) -> list[int]:
        """The entries of an int32 array of one axis, of the kind that this allocator has."""
        kind = np.ndarray if self.in_numpy else torch.Tensor
        if not isinstance(given, kind) or given.ndim != 1 or str(given.dtype).removeprefix("torch.") != "int32":
            shape = f"{given.dtype} of shape {list(given.shape)}" if isinstance(given, kind) else type(given).__name__
            failed(f"{what} is to be {kind.__name__} of int32 with one axis, not {shape}.")
        return [int(number) for number in given.tolist()]

    def must_refuse(self, call: Any, what: str, error: type[Exception] = ContractError) -> Any:
        """The error that a call raises; it must be of this type, and leave everything as it was."""
        before = self.state()
        try:
            call()
        except error as refusal:
            after = self.state()
            if after.num_free_pages != before.num_free_pages:
                failed(
                    f"{what} was refused, and num_free_pages went from {before.num_free_pages} to "
                    f"{after.num_free_pages}; a refusal changes nothing."
                )
            for page, (was, now) in enumerate(zip(before.refs, after.refs, strict=True)):
                if was != now:
                    failed(f"{what} was refused, and page {page} now has {now} references instead of {was}.")
            self.allocator.check()
            return refusal
        return failed(f"{what} was not refused; the contract wants {error.__name__}.")

    def must_be_short(self, call: Any, what: str, needed: int) -> None:
        """A call that needs more pages than are free: refused with both numbers, and nothing taken."""
        free = self.num_free_pages
        refusal: OutOfPagesError = self.must_refuse(call, what, OutOfPagesError)
        if (refusal.pages_needed, refusal.pages_free) != (needed, free):
            failed(
                f"{what} needs {needed} pages where {free} are free, and OutOfPagesError says pages_needed="
                f"{refusal.pages_needed}, pages_free={refusal.pages_free}."
            )
