"""Slots, CSR and block table of a step, built on the device from the page table: checks, and the choice of kernels.

Nothing here waits for the device. Sizes come from the tensors' shapes, which are capacities, and counts are read on the
device, so that a captured graph serves every batch that fits. With Triton nothing is allocated either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels import triton_runs_on
from anyattn.mem_cache.kernels.launch import on

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
    """Fills every output that is given, in one launch. int32 where nothing is said, all on one device.

    page_table: [max_rows, max_columns], page ids of each row in order; rows may be strided.
    rows: [max_seqs], the batch's rows of the page table.
    kv_lens, prefix_lens: [max_seqs], tokens with and without the step's new ones; kv_lens 0 for rows of padding.
    qo_indptr, kv_indptr: [max_seqs + 1], new tokens and pages before each sequence; flat over rows of padding.
    kv_indices: [max_pages], the sequences' page ids one after the other, then the null page.
    block_table: [max_seqs, columns], page ids, the null page after each sequence's own; rows may be strided.
    out_slots, positions: [max_tokens], int64, of each new token, then 0.
    mapping: [num_pages + 1], what stands for a page id in tables and slots (a windowed layer's pages).

    Rows of padding may hold anything in `rows` and `prefix_lens`. An output that is too small holds the beginning.
    Raises ContractError for another shape, dtype or device.
    """
    check_page_table(page_table, page_size, mapping)
    check_step(
        page_table.device, rows, kv_lens, prefix_lens, qo_indptr, kv_indptr, kv_indices=kv_indices,
        block_table=block_table, out_slots=out_slots, positions=positions,
    )  # fmt: skip
    step_indices_unchecked(
        page_table, rows, kv_lens, prefix_lens, qo_indptr, kv_indptr, page_size, kv_indices=kv_indices,
        block_table=block_table, out_slots=out_slots, positions=positions, mapping=mapping,
    )  # fmt: skip


def check_page_table(page_table: torch.Tensor, page_size: int, mapping: torch.Tensor | None) -> None:
    """Raises ContractError for a page table, page size or mapping that `step_indices` cannot read."""
    _check_page_size(page_size)
    _check_rows("page_table", page_table, page_table.device)
    if mapping is not None:
        _check("mapping", mapping, page_table.device)


def check_step(
    device: torch.device,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    kv_indices: torch.Tensor | None,
    block_table: torch.Tensor | None,
    out_slots: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> None:
    """Raises ContractError for a batch or outputs that do not fit `step_indices` or one another."""
    num_seqs = _check("rows", rows, device)
    _check("kv_lens", kv_lens, device, num_seqs)
    _check("prefix_lens", prefix_lens, device, num_seqs)
    _check("qo_indptr", qo_indptr, device, num_seqs + 1)
    _check("kv_indptr", kv_indptr, device, num_seqs + 1)
    if kv_indices is not None:
        _check("kv_indices", kv_indices, device)
    if block_table is not None:
        _check_rows("block_table", block_table, device, num_seqs)
    num_tokens = None if out_slots is None else _check("out_slots", out_slots, device, dtype=torch.int64)
    if positions is not None:
        _check("positions", positions, device, num_tokens, torch.int64)


def step_indices_unchecked(page_table: torch.Tensor, *batch: Any, **outputs: Any) -> None:
    """`step_indices` for tensors that were checked before, as those of buffers are when they are made."""
    with on(page_table.device):
        _kernels(page_table.device).step_indices(page_table, *batch, **outputs)


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
    """What `step_indices` and kernels read, from lengths that live on the device, in one launch. All int32.

    prefix_lens, lengths: [max_seqs], tokens before and after the step; what is past num_seqs is not read.
    num_seqs: how many sequences the batch has; an int, or a tensor of one element on the device.
    kv_lens, kv_last_page_len: [max_seqs], tokens of each sequence and of its last page, then 0.
    qo_indptr, kv_indptr: [max_seqs + 1], new tokens and pages before each sequence, then flat.

    Raises ContractError for another shape, dtype or device.
    """
    device = lengths.device
    _check_page_size(page_size)
    max_seqs = _check("lengths", lengths, device)
    _check("prefix_lens", prefix_lens, device, max_seqs)
    _check("kv_lens", kv_lens, device, max_seqs)
    _check("qo_indptr", qo_indptr, device, max_seqs + 1)
    _check("kv_indptr", kv_indptr, device, max_seqs + 1)
    _check("kv_last_page_len", kv_last_page_len, device, max_seqs)
    if isinstance(num_seqs, int):
        if not 0 <= num_seqs <= max_seqs:
            raise ContractError(f"num_seqs must be 0 to {max_seqs}, the size of lengths, not {num_seqs}.")
    elif num_seqs.dtype != torch.int32 or num_seqs.numel() != 1 or num_seqs.device != device:
        raise ContractError(f"num_seqs must be an int or an int32 tensor of one element on {device}.")
    with on(device):
        _kernels(device).step_lengths(
            prefix_lens, lengths, num_seqs, page_size, kv_lens=kv_lens, qo_indptr=qo_indptr, kv_indptr=kv_indptr,
            kv_last_page_len=kv_last_page_len,
        )  # fmt: skip


def write_new_pages(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    first_columns: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """`page_table[rows[i], first_columns[i] + j] = pages[indptr[i] + j]`, in one launch. All int32.

    page_table: [max_rows, max_columns]; rows may be strided.
    rows, first_columns: [max_seqs], which row grows, and from which column on. No row is named twice.
    indptr: [max_seqs + 1], new pages before each sequence; flat over rows of padding.
    pages: [max_new_pages], new page ids; what is past indptr[max_seqs] is not read.

    Raises ContractError for another shape, dtype or device.
    """
    device = page_table.device
    _check_rows("page_table", page_table, device)
    max_seqs = _check("rows", rows, device)
    _check("first_columns", first_columns, device, max_seqs)
    _check("indptr", indptr, device, max_seqs + 1)
    _check("pages", pages, device)
    with on(device):
        _kernels(device).write_new_pages(page_table, rows, first_columns, indptr, pages)


def _kernels(device: torch.device) -> Any:
    """The module that works on a device."""
    if triton_runs_on(device):
        from anyattn.mem_cache.kernels import indices_triton

        return indices_triton
    from anyattn.mem_cache.kernels import indices_torch

    return indices_torch


def _check_page_size(page_size: int) -> None:
    if not isinstance(page_size, int) or page_size < 1:
        raise ContractError(f"page_size must be an int of at least 1, not {page_size!r}.")


def _check(
    name: str, tensor: torch.Tensor, device: torch.device, size: int | None = None, dtype: torch.dtype | None = None
) -> int:
    """The size of a contiguous tensor of one dimension, int32 unless said. Raises ContractError for any other."""
    wanted = dtype or torch.int32
    shape = tensor.shape
    if len(shape) != 1 or (size is not None and shape[0] != size) or tensor.dtype != wanted or tensor.device != device:
        length = "" if size is None else f" of {size} elements"
        _refuse(name, tensor, f"a {wanted} tensor of one dimension{length} on {device}")
    if not tensor.is_contiguous():
        raise ContractError(f"{name} must be contiguous; its stride is {tensor.stride(0)}.")
    return int(shape[0])


def _check_rows(name: str, tensor: torch.Tensor, device: torch.device, num_rows: int | None = None) -> None:
    """Raises ContractError for all but int32 tables whose columns are contiguous."""
    shape = tensor.shape
    wrong_rows = num_rows is not None and len(shape) == 2 and shape[0] != num_rows
    if len(shape) != 2 or wrong_rows or tensor.dtype != torch.int32 or tensor.device != device:
        size = "" if num_rows is None else f" with {num_rows} rows"
        _refuse(name, tensor, f"a torch.int32 tensor of two dimensions{size} on {device}")
    if tensor.stride(1) != 1 and shape[1] > 1:
        raise ContractError(f"the columns of {name} must be contiguous; their stride is {tensor.stride(1)}.")


def _refuse(name: str, tensor: torch.Tensor, wanted: str) -> None:
    raise ContractError(f"{name} must be {wanted}, not {tensor.dtype} {list(tensor.shape)} on {tensor.device}.")
