"""A step's keys as pages of one token each, for kernels of aiter that know no other: made on the device, for any pages.

Such a kernel finds a sequence's keys by `kv_indices[kv_indptr[i] : kv_indptr[i + 1]]`, each the slot of one token. It
may load whole tiles of them, past a sequence's end too, and multiply the values there by 0. So a guard stands between
every two sequences, a sequence itself, whose keys are the last one's again: what is loaded is then the sequence's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
else:
    torch = lazy_import("torch")

READ_BEHIND = 256
"""Entries of `kv_indices` that kernels may read behind a sequence's last: tiles of 128 keys and what they prefetch."""
_MOST_ELEMENTS = 1 << 31


class TokenSlots:
    """One step's slots, or those of a graph's steps: its tensors stay where they are.

    kv_indptr: [2 * num_seqs], int32, where sequences and the guards between them begin in turn, and the last one ends.
    kv_lens: [num_seqs], int32; 1 for sequences without tokens, whose slot is then any of the null page.
    kv_indices: int32; behind a sequence's slots its last one again, as often as what may be read there wants.
    last_page_lens: [2 * num_seqs - 1], int32, ones.
    """

    def __init__(
        self, batch: Batch, *, guard: int, block_table: torch.Tensor | None = None, for_graph: bool = False
    ) -> None:
        """guard: entries of each.

        block_table: another than the batch's, as of pages that were copied. for_graph: whether `batch` is the one that
        `AttentionBackend.init_graph` is given; `refresh` then follows it.
        """
        self._page_size, self._guard = batch.page_size, guard
        table = batch.block_table if block_table is None else block_table
        num_seqs, device = batch.num_seqs, table.device
        num_keys = num_seqs * max(batch.max_kv_len, 1) if for_graph else int(batch.host.kv_lens.clip(min=1).sum())
        with torch.inference_mode(False):  # what is refreshed outside of that mode must not be made in it
            self._starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
            self.kv_indptr = torch.zeros(2 * num_seqs, dtype=torch.int32, device=device)
            self.kv_lens = torch.ones(num_seqs, dtype=torch.int32, device=device)
            self.kv_indices = torch.zeros(num_keys + num_seqs * guard + READ_BEHIND, dtype=torch.int32, device=device)
            self.last_page_lens = torch.ones(2 * num_seqs - 1, dtype=torch.int32, device=device)
        self._fill(table, batch.kv_lens)

    def refresh(self, batch: Batch) -> None:
        """Follows the graph's batch, on the device alone."""
        self._fill(batch.block_table, batch.kv_lens)

    def _fill(self, table: torch.Tensor, kv_lens: torch.Tensor) -> None:
        starts = self._starts
        torch.clamp(kv_lens, min=1, out=self.kv_lens)
        torch.cumsum(self.kv_lens + self._guard, 0, dtype=torch.int32, out=starts[1:])
        self.kv_indptr[0::2] = starts[:-1]
        self.kv_indptr[1::2] = starts[:-1] + self.kv_lens
        entry = torch.arange(self.kv_indices.shape[0], dtype=torch.int32, device=table.device)
        seq = torch.searchsorted(starts[1:], entry, right=True).clamp_(max=kv_lens.shape[0] - 1)
        position = torch.minimum(entry - starts[seq], self.kv_lens[seq] - 1)
        page = table[seq, (position // self._page_size).clamp_(max=table.shape[1] - 1)]
        torch.add(page * self._page_size, position % self._page_size, out=self.kv_indices)


def rows_of(pages: torch.Tensor) -> torch.Tensor:
    """Pages [num_pages, page_size, ...] as tokens, [num_pages * page_size, ...]: a view. See `countable`."""
    return countable(pages).view(-1, *pages.shape[2:])


def countable(pages: torch.Tensor) -> torch.Tensor:
    """The pages. Raises ContractError where places of elements do not fit 32 bits, as kernels have or may have them."""
    if pages.numel() >= _MOST_ELEMENTS:
        most = (_MOST_ELEMENTS - 1) // pages[0].numel() - 1  # but for the null page
        raise ContractError(
            f"aiter counts the elements of a layer's keys in 32 bits, and these pages hold {pages.numel()}: give "
            f"num_pages={most} or fewer, or backend='triton'."
        )
    return pages
