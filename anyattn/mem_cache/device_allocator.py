"""The paged allocator whose books live on the device, for engines whose lengths do: nothing waits for the device.

Speculative decoding and overlapped scheduling know a step's lengths on the device before the host does. Here the host
knows bounds only: how many pages a call may take, and how many are free at least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import AllocatorCapabilities, Extension, KVAllocator
from anyattn.mem_cache.kernels import books as kernels
from anyattn.mem_cache.kernels.books import NO_FAULT, Fault, Word
from anyattn.types import IntSet

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

_EARLY = 8
"""The host asks for news when its bound does not cover as many more calls like the last one."""


class DeviceAllocator(KVAllocator):
    """`PagedAllocator`'s books, page ids included, as tensors on a device.

    Arrays given and returned are tensors on that device, and work is enqueued on its current stream. No call waits for
    it, as long as the host's bound on free pages covers what the call may take at most. Each call lowers the bound by
    as much; it rises again when the host hears from the device, which it asks early, without waiting, when the bound
    runs low. For a call that the bound does not cover the host waits once, and then knows exactly: what is short is
    refused, and nothing else is. `num_syncs` counts how often the host has waited.

    Calls may not be captured in a graph, as the host's bound knows nothing of replays.
    """

    capabilities: ClassVar[AllocatorCapabilities] = AllocatorCapabilities(page_sizes=IntSet(maximum=1024))

    def __init__(self, num_pages: int, page_size: int, device: Any = None, *, debug: bool = False) -> None:
        """device: where the books live; None for torch's default. debug: prove the books in every call, which waits."""
        self.capabilities.require(num_pages, page_size)
        self.page_size = page_size
        self.debug = debug
        self.num_syncs = 0
        """How often the host has waited for the device."""
        self._books = kernels.new_books(num_pages, page_size, device)
        self._num_pages = num_pages
        self._at_least_free = num_pages
        self._news = _News(self._books.words)
        self._shares = False  # whether a page ever had two references, without which nothing is copied on a write

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that are free now; waits for the device."""
        self._at_least_free = self._words()[Word.NUM_FREE]
        return self._at_least_free

    def alloc(self, num_pages: int) -> torch.Tensor:
        if num_pages < 0:
            raise ContractError(f"cannot allocate {num_pages} pages.")
        if num_pages > self._known_free() and num_pages > (free := self.num_free_pages):
            raise OutOfPagesError(num_pages, free, self._num_pages)
        if num_pages == 0:
            return torch.zeros(0, dtype=torch.int32, device=self._books.device)
        pages = kernels.alloc(self._books, num_pages)
        self._taken(num_pages)
        return pages

    def extend(
        self,
        prefix_lens: torch.Tensor,
        lengths: torch.Tensor,
        last_slots: torch.Tensor,
        *,
        most_new_tokens: int | None = None,
    ) -> Extension:
        """See `KVAllocator.extend`. `pages` is as long as `most_new_tokens` allows, and ends in null pages.

        Raises ContractError without `most_new_tokens`, and, where the host had to wait, when the lengths grow by more.
        """
        if not isinstance(most_new_tokens, int) or most_new_tokens < 0:
            raise ContractError(
                "lengths live on the device, so extend needs most_new_tokens: by how many tokens they grow in sum, at "
                f"most; not {most_new_tokens!r}."
            )
        num_seqs = self._check_batch(prefix_lens=prefix_lens, lengths=lengths, last_slots=last_slots)
        most_pages = self._most_pages(most_new_tokens, num_seqs)
        return self._extend(prefix_lens, lengths, last_slots, most_new_tokens, most_pages)

    def decode(self, lengths: torch.Tensor, last_slots: torch.Tensor) -> Extension:
        """`extend` of each sequence by one token.

        lengths: [num_seqs], int32 or int64, with the new token; 0 for a padded row, which takes nothing.
        last_slots: [num_seqs], int64, slot of the token before the new one, 0 where there is none.
        """
        num_seqs = self._check_batch(lengths=lengths, last_slots=last_slots)
        return self._extend(None, lengths, last_slots, num_seqs, num_seqs)

    def share(self, pages: torch.Tensor) -> None:
        pages = self._check_pages(pages)
        if pages.numel() == 0:
            return
        if self.debug:
            kernels.inspect_share(self._books, pages)
            self._raise_found(self._words())
        kernels.share(self._books, pages)
        self._shares = True
        self._check_debug()

    def free(self, pages: torch.Tensor) -> None:
        pages = self._check_pages(pages)
        if pages.numel() == 0:
            return
        if self.debug:
            kernels.inspect_free(self._books, pages)
            self._raise_found(self._words())
        kernels.free(self._books, pages)
        self._check_debug()

    def ref_counts(self, pages: torch.Tensor) -> torch.Tensor:
        return kernels.ref_counts(self._books, self._check_pages(pages))

    def check(self) -> None:
        """Proves the books, and that no call since they were made met a fault; waits for the device."""
        words = self._words()
        self._raise_faults(words, Word.FAULTS, "the device met a fault in an earlier call: ")
        num_free = words[Word.NUM_FREE]
        if not 0 <= num_free <= self._num_pages or words[Word.ARRIVALS]:
            raise ContractError(f"{num_free} of {self._num_pages} pages cannot be free.")
        if self._at_least_free > num_free:
            raise ContractError(f"{num_free} pages are free, where the host counts on {self._at_least_free}.")
        self.num_syncs += 1
        stack, counts, marks = (array.cpu() for array in (self._books.stack, self._books.counts, self._books.marks))
        free = stack[:num_free].long()
        if ((free < 1) | (free > self._num_pages)).any() or torch.bincount(free, minlength=1).max() > 1:
            raise ContractError("the free list holds a page twice, or what is no page.")
        if counts[free].any():
            raise ContractError(f"page {int(free[counts[free] != 0][0])} is in the free list and has references.")
        if counts[0] or (counts < 0).any() or marks.any():
            raise ContractError("a page has fewer than no references, the null page has some, or scratch is not clear.")
        held = int(counts.count_nonzero())
        if held + num_free != self._num_pages:
            raise ContractError(f"{held} allocated and {num_free} free pages do not make {self._num_pages}.")

    def _extend(
        self,
        prefix_lens: torch.Tensor | None,
        lengths: torch.Tensor,
        last_slots: torch.Tensor,
        most_new_tokens: int,
        most_pages: int,
    ) -> Extension:
        if lengths.numel() == 0:
            nothing = torch.zeros(1, dtype=torch.int32, device=self._books.device)
            return Extension(indptr=nothing, pages=nothing[:0], copied_from=nothing[:0])
        lengths, last_slots = lengths.contiguous(), last_slots.contiguous()
        prefix_lens = None if prefix_lens is None else prefix_lens.contiguous()
        taken = most_pages
        if self.debug or most_pages > self._known_free():
            taken = self._exactly(prefix_lens, lengths, last_slots, most_new_tokens)
        room = min(most_pages, self._num_pages)
        indptr, pages, copied_from = kernels.extend(self._books, prefix_lens, lengths, last_slots, room)
        self._taken(taken)
        return Extension(indptr=indptr, pages=pages, copied_from=copied_from)

    def _exactly(
        self, prefix_lens: torch.Tensor | None, lengths: torch.Tensor, last_slots: torch.Tensor, most_new_tokens: int
    ) -> int:
        """Pages that the batch needs, for which the host waits. Raises what there is to raise against it."""
        kernels.inspect_extend(self._books, prefix_lens, lengths, last_slots)
        words = self._words()
        self._raise_found(words)
        if words[Word.NEW_TOKENS] > most_new_tokens:
            raise ContractError(
                f"the lengths grow by {words[Word.NEW_TOKENS]} tokens in sum, and most_new_tokens is {most_new_tokens}."
            )
        self._at_least_free = words[Word.NUM_FREE]
        if words[Word.NEEDED] > self._at_least_free:
            raise OutOfPagesError(words[Word.NEEDED], self._at_least_free, self._num_pages)
        return words[Word.NEEDED]

    def _most_pages(self, most_new_tokens: int, num_seqs: int) -> int:
        """Pages that a batch takes at most.

        A sequence's first token can open a page, and one more page comes with each `page_size` tokens after it. Where
        the first page is the copy of a shared one with room for just one token, its second token can open a page too.
        """
        opening = num_seqs * (2 if self._shares else 1)
        return min(most_new_tokens, opening) + max(most_new_tokens - opening, 0) // self.page_size

    def _known_free(self) -> int:
        """Pages that are free at least, without waiting."""
        if (free := self._news.poll()) is not None:
            self._at_least_free = max(self._at_least_free, free)
        return self._at_least_free

    def _taken(self, most_pages: int) -> None:
        self._at_least_free -= most_pages
        self._news.taken(most_pages)
        if self._at_least_free < _EARLY * most_pages:
            self._news.ask()
        self._check_debug()

    def _words(self) -> list[int]:
        self.num_syncs += 1
        words: list[int] = self._books.words.tolist()
        return words

    def _check_debug(self) -> None:
        if self.debug:
            self.check()

    def _raise_found(self, words: list[int]) -> None:
        self._raise_faults(words, Word.FOUND, "")

    def _raise_faults(self, words: list[int], first: Word, where: str) -> None:
        for fault in Fault:
            if (note := words[first + fault]) != NO_FAULT:
                raise ContractError(f"{where}{kernels.fault_text(self._books, fault, note)}.")

    def _check_batch(self, **arrays: torch.Tensor) -> int:
        size = arrays["lengths"].numel() if isinstance(arrays["lengths"], torch.Tensor) else -1
        for name, array in arrays.items():
            allowed = (torch.int64,) if name == "last_slots" else (torch.int32, torch.int64)
            self._check_tensor(name, array, allowed)
            if array.numel() != size:
                raise ContractError(f"{name} has {array.numel()} entries, and lengths {size}.")
        return size

    def _check_pages(self, pages: torch.Tensor) -> torch.Tensor:
        self._check_tensor("pages", pages, (torch.int32, torch.int64))
        return pages.contiguous()

    def _check_tensor(self, name: str, array: Any, dtypes: tuple[torch.dtype, ...]) -> None:
        device = self._books.device
        if not isinstance(array, torch.Tensor) or array.ndim != 1 or array.dtype not in dtypes:
            given = (
                f"{array.dtype} of shape {list(array.shape)}"
                if isinstance(array, torch.Tensor)
                else type(array).__name__
            )
            raise ContractError(f"{name} must be a flat tensor of {' or '.join(map(str, dtypes))}, not {given}.")
        if array.device != device:
            raise ContractError(f"{name} must be on {device}, where the books are, not on {array.device}.")


class _News:
    """How many pages are free, as the device tells without being waited for: a copy to pinned memory, and an event."""

    def __init__(self, words: torch.Tensor) -> None:
        self._source = words[Word.NUM_FREE : Word.NUM_FREE + 1]
        accelerator = torch.accelerator.current_accelerator()
        self._runs_ahead = accelerator is not None and accelerator.type == words.device.type
        self._asked = False
        self._taken = 0
        if self._runs_ahead:
            self._copy = torch.empty(1, dtype=torch.int64, pin_memory=True)
            self._event = torch.Event(words.device)

    def ask(self) -> None:
        """Has the device send its number of free pages, unless it is about to."""
        if self._runs_ahead and not self._asked:
            self._copy.copy_(self._source, non_blocking=True)
            self._event.record()
            self._asked, self._taken = True, 0

    def taken(self, most_pages: int) -> None:
        """Tells that a call took at most so many pages."""
        self._taken += most_pages

    def poll(self) -> int | None:
        """Pages that are free at least, if the device has answered since the last time."""
        if not self._asked or not self._event.query():
            return None
        self._asked = False
        return int(self._copy.item()) - self._taken
