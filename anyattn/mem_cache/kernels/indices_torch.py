"""Slots, CSR and block table of a step in vectorised torch; kernels/indices.py says what each function does.

No size depends on what the tensors hold, so nothing is read back from the device. Temporaries are allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


def step_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    page_size: int,
    *,
    kv_indices: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    mapping: torch.Tensor | None = None,
) -> None:
    if rows.shape[0] == 0 or page_table.numel() == 0:  # nobody has pages or tokens
        for output in (kv_indices, block_table, out_slots, positions):
            if output is not None:
                output.zero_()
        return
    tokens = out_slots if out_slots is not None else positions
    if tokens is not None:
        token, owner, owned = _owners(qo_indptr, tokens.shape[0])
        position = torch.where(owned, prefix_lens[owner] + token - qo_indptr[owner], 0)
        if positions is not None:
            positions.copy_(position)
        if out_slots is not None:
            page = _pages(page_table, rows[owner], position // page_size, owned, mapping)
            out_slots.copy_(page.long() * page_size + position % page_size)
    if block_table is not None and block_table.shape[1]:
        column = torch.arange(block_table.shape[1], device=rows.device)
        owned = column < (kv_lens[:, None] + (page_size - 1)) // page_size
        block_table.copy_(_pages(page_table, rows[:, None], column, owned, mapping))
    if kv_indices is not None:
        index, owner, owned = _owners(kv_indptr, kv_indices.shape[0])
        kv_indices.copy_(_pages(page_table, rows[owner], index - kv_indptr[owner], owned, mapping))


def step_lengths(
    prefix_lens: torch.Tensor,
    lengths: torch.Tensor,
    num_seqs: torch.Tensor | int,
    page_size: int,
    *,
    kv_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    alive = torch.arange(lengths.shape[0], device=lengths.device) < num_seqs
    length = torch.where(alive, lengths, 0)
    new = torch.where(alive, lengths - prefix_lens, 0)
    pages = (length + (page_size - 1)) // page_size
    kv_lens.copy_(length)
    kv_last_page_len.copy_(torch.where(length > 0, (length - 1) % page_size + 1, 0))
    for indptr, counts in ((qo_indptr, new), (kv_indptr, pages)):
        indptr[:1].zero_()
        indptr[1:].copy_(torch.cumsum(counts, 0))


def write_new_pages(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    first_columns: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    if pages.shape[0] == 0 or rows.shape[0] == 0 or page_table.numel() == 0:
        return
    index, owner, owned = _owners(indptr, pages.shape[0])
    # Entries past the end say once more what the last one says, as a scatter has no mask and its order is not fixed.
    # Without any, they put back what is in the table's corner.
    last = (indptr[-1:] - 1).clamp(min=0, max=pages.shape[0] - 1)
    index, owner = torch.where(owned, index, last), torch.where(owned, owner, owner[last])
    some = indptr[-1:] > 0
    row = torch.where(some, rows[owner], 0).long()
    column = torch.where(some, first_columns[owner] + index - indptr[owner], 0).long()
    page_table.index_put_((row, column), torch.where(some, pages[index], page_table[0, 0]))


def _owners(indptr: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The elements 0 to count - 1, the sequence that owns each by `indptr`, and whether there is one (else any)."""
    element = torch.arange(count, dtype=indptr.dtype, device=indptr.device)
    owner = torch.searchsorted(indptr[1:], element, right=True)
    return element, owner.clamp(max=indptr.shape[0] - 2), element < indptr[-1]


def _pages(
    page_table: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    owned: torch.Tensor,
    mapping: torch.Tensor | None,
) -> torch.Tensor:
    """The page ids in some places of the page table, mapped; the null page where nobody owns the place."""
    pages = page_table[torch.where(owned, row, 0).long(), torch.where(owned, column, 0).long()]
    if mapping is not None:
        pages = mapping[torch.where(owned, pages, 0).long()]
    return torch.where(owned, pages, 0)
