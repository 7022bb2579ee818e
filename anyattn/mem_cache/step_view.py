"""The page table as one step sees it, and the tensors that kernels want of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import indices
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.kernels.indices import step_indices_unchecked

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.indices import Int32s, Int64s
    from anyattn.mem_cache.page_table import PageTable
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


class PageCopies(NamedTuple):
    """Pages whose KV data has to be copied before the step stores anything.

    pool: 0 for the full layers' pool, 1 + i for that of the table's i-th window. sources, targets: page ids of it.
    """

    pool: int
    sources: Int32s
    targets: Int32s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTensors:
    """One step on the device. All int32.

    page_table: [max_rows, max_columns]. mappings: of each window, full page -> window page. Both are the table's own:
        later steps change them in stream order, on the CPU at once.
    rows, prefix_lens, kv_lens, kv_last_page_len: [num_seqs]. qo_indptr, kv_indptr: [num_seqs + 1].
    """

    page_table: torch.Tensor
    mappings: list[torch.Tensor]
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    kv_lens: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
    """One step on the host, as `PageTable.extend` returns it. Its tensors are to be asked for before the next change.

    seqs: [num_seqs], handles. rows: [num_seqs], their rows in the table.
    prefix_lens, kv_lens: [num_seqs], tokens before and after the step's new ones. num_pages: [num_seqs].
    last_slots: [num_seqs], slot of each sequence's last token; 0 where it has none.
    one_each: whether every sequence has just one new token.
    copies: what copy-on-write asks for, for each pool.
    tails: [n], int64, places in the batch of sequences whose last page may hold stale data behind the end: what an
        earlier owner left, as the page is new or restored, or what the sequence itself was shortened by. None where no
        sequence was looked for.
    """

    table: PageTable
    version: int
    seqs: Int64s
    rows: Int64s
    prefix_lens: Int64s
    kv_lens: Int64s
    num_pages: Int64s
    last_slots: Int64s
    one_each: bool
    copies: tuple[PageCopies, ...] = ()
    tails: Int64s | None = None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.table.page_size

    @cached_property
    def qo_lens(self) -> Int64s:
        """[num_seqs], new tokens of each sequence."""
        return self.kv_lens - self.prefix_lens

    @cached_property
    def qo_indptr(self) -> Int32s:
        """[num_seqs + 1], where each sequence's new tokens begin."""
        if self.one_each:
            return np.arange(self.rows.size + 1, dtype=np.int32)
        return indices.indptr(self.qo_lens)

    @cached_property
    def kv_indptr(self) -> Int32s:
        """[num_seqs + 1], where each sequence's pages begin."""
        return indices.indptr(self.num_pages)

    @cached_property
    def kv_last_page_len(self) -> Int32s:
        """[num_seqs], tokens in each sequence's last page, 0 where it has none."""
        return indices.last_page_len(self.kv_lens, self.page_size)

    def tail_pages(self, pool: int) -> tuple[Int64s, Int64s]:
        """The last pages of `tails` that are not full: page ids in a pool, numbered as in `PageCopies`, and tokens."""
        last_slots = self.last_slots[[] if self.tails is None else self.tails]
        last_slots = last_slots[(last_slots + 1) % self.page_size != 0]
        pages, offsets = np.divmod(last_slots, self.page_size)
        if pool:
            pages = self.table.windows[pool - 1].page_of[pages].astype(np.int64)
        return pages, offsets + 1

    def page_rows(self) -> Int32s:
        """Page ids of each sequence on the host: [num_seqs, max_pages], padded with the null page."""
        self.require_current()
        return self.table.page_rows(self.rows, self.num_pages)

    def out_slots(self) -> torch.Tensor:
        """[num_new_tokens], int64, on the device: where each new token is stored."""
        self.require_current()
        if self.one_each:  # 8 bytes a sequence: less than a kernel's launch
            return to_device([self.last_slots.copy()], self.table.device_table.device, wide=1)[0]
        device = self.table.device_table.device
        slots = torch.empty(int(self.qo_indptr[-1]), dtype=torch.int64, device=device)
        if slots.shape[0]:
            page_table, _, (rows, prefix_lens, indptr) = self.table.send([self.rows, self.prefix_lens, self.qo_indptr])
            step_indices_unchecked(  # what it takes besides is for tables, of which none is asked for
                page_table, rows, prefix_lens, prefix_lens, indptr, indptr, self.page_size, out_slots=slots
            )
        return slots

    def tensors(self) -> StepTensors:
        """The step on the device, in one asynchronous copy, which also brings the table there up to date."""
        self.require_current()
        page_table, mappings, arrays = self.table.send(
            [self.rows, self.prefix_lens, self.kv_lens, self.qo_indptr, self.kv_indptr, self.kv_last_page_len]
        )
        return StepTensors(
            page_table=page_table,
            mappings=mappings,
            rows=arrays[0],
            prefix_lens=arrays[1],
            kv_lens=arrays[2],
            qo_indptr=arrays[3],
            kv_indptr=arrays[4],
            kv_last_page_len=arrays[5],
        )

    def require_current(self) -> None:
        """Raises ContractError when the table has changed since."""
        if self.version != self.table.version:
            raise ContractError("the table has changed since this step: ask for a step's tensors right after extend.")
