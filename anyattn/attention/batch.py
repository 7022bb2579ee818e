"""One step's metadata: which tokens are new, where they go and which pages each sequence reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import indices
from anyattn.types import Phase, dtype_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from anyattn.mem_cache.page_table import PageTable, StepView
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostBatch:
    """What kernels' planners want on the host, so that none of them has to read it back from the device.

    qo_lens, kv_lens, prefix_lens: [num_seqs], new tokens, all tokens, tokens before the step.
    num_pages, kv_last_page_len: [num_seqs]. qo_indptr, kv_indptr: [num_seqs + 1], in tokens and in pages.
    kv_indices: [kv_indptr[-1]]. table, seqs: whose step it is, and the [num_seqs] handles there.
    """

    table: PageTable
    seqs: npt.NDArray[np.int64]
    qo_lens: npt.NDArray[np.int64]
    kv_lens: npt.NDArray[np.int64]
    prefix_lens: npt.NDArray[np.int64]
    num_pages: npt.NDArray[np.int64]
    kv_last_page_len: npt.NDArray[np.int32]
    qo_indptr: npt.NDArray[np.int32]
    kv_indptr: npt.NDArray[np.int32]
    kv_indices: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step of a batch of sequences; all tensors on the device, in FlashInfer's and FlashAttention's terms.

    qo_indptr: [num_seqs + 1], int32, where each sequence's new tokens begin.
    kv_lens: [num_seqs], int32, tokens of each sequence, the new ones included.
    kv_indptr, kv_indices, kv_last_page_len: the page table as CSR, int32, in pages.
    block_table: [num_seqs, max_pages], int32, the same page table dense, padded with the null page.
    out_slots: [num_tokens], int64, where each new token is stored.
    positions: [num_tokens], int64, each new token's place in its sequence.
    tree_masks: for each sequence None (causal) or [qo_len, qo_len], bool: row i sees new token j. The prefix is seen
        by every row.
    """

    page_size: int
    num_seqs: int
    num_tokens: int
    max_qo_len: int
    max_kv_len: int
    phase: Phase
    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    block_table: torch.Tensor
    out_slots: torch.Tensor
    positions: torch.Tensor
    tree_masks: tuple[torch.Tensor | None, ...] | None
    host: HostBatch

    @classmethod
    def from_view(
        cls, view: StepView, device: torch.device, tree_masks: tuple[torch.Tensor | None, ...] | None = None
    ) -> Batch:
        """The batch of one step, moved to the device in one copy. tree_masks: from `checked_tree_masks`."""
        qo_lens = view.lengths - view.prefix_lens
        owner, positions = indices.token_positions(view.prefix_lens, view.lengths)
        host = HostBatch(
            table=view.table,
            seqs=view.seqs,
            qo_lens=qo_lens,
            kv_lens=view.lengths,
            prefix_lens=view.prefix_lens,
            num_pages=view.num_pages,
            kv_last_page_len=indices.last_page_len(view.lengths, view.page_size),
            qo_indptr=indices.indptr(qo_lens),
            kv_indptr=indices.indptr(view.num_pages),
            kv_indices=indices.kv_indices(view.rows, view.num_pages),
        )
        qo_indptr, kv_lens, kv_indptr, kv_indices, last_page_len, block_table, out_slots, positions_ = _to_device(
            [
                host.qo_indptr,
                host.kv_lens.astype(np.int32),
                host.kv_indptr,
                host.kv_indices,
                host.kv_last_page_len,
                view.rows,
                indices.slots(view.rows, owner, positions, view.page_size),
                positions,
            ],
            device,
        )
        return cls(
            page_size=view.page_size,
            num_seqs=int(view.seqs.size),
            num_tokens=int(positions.size),
            max_qo_len=int(qo_lens.max(initial=0)),
            max_kv_len=int(view.lengths.max(initial=0)),
            phase=_phase(qo_lens, view.prefix_lens, has_tree=tree_masks is not None),
            qo_indptr=qo_indptr,
            kv_lens=kv_lens,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=last_page_len,
            block_table=block_table,
            out_slots=out_slots,
            positions=positions_,
            tree_masks=tree_masks,
            host=host,
        )


def _phase(qo_lens: npt.NDArray[np.int64], prefix_lens: npt.NDArray[np.int64], *, has_tree: bool) -> Phase:
    if has_tree:
        return "verify"
    if qo_lens.size and (qo_lens == 1).all():
        return "decode"
    return "mixed" if ((qo_lens == 1) & (prefix_lens > 0)).any() else "prefill"


def checked_tree_masks(
    tree_masks: Sequence[torch.Tensor | None], num_new_tokens: Sequence[int], device: torch.device
) -> tuple[torch.Tensor | None, ...]:
    """The masks on the device. Raises ContractError when one does not fit its sequence's new tokens."""
    tree_masks, num_new_tokens = list(tree_masks), list(num_new_tokens)
    if len(tree_masks) != len(num_new_tokens):
        raise ContractError(f"tree_masks must hold one mask or None for each of the {len(num_new_tokens)} sequences.")
    for mask, length in zip(tree_masks, num_new_tokens, strict=True):
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise ContractError(f"a tree mask must be a bool tensor or None, not {type(mask).__name__}.")
        if mask is not None and (tuple(mask.shape) != (length, length) or mask.dtype != torch.bool):
            raise ContractError(
                f"a tree mask for {length} new tokens must be bool [{length}, {length}], "
                f"not {dtype_name(mask.dtype)} {list(mask.shape)}."
            )
    return tuple(None if mask is None else mask.to(device, non_blocking=True, copy=True) for mask in tree_masks)


def _to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Tensors with the arrays' contents; on a device they are views of one buffer that travels in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)])  # kernels load 16 bytes at once
    staging = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
    buffer = staging.numpy()
    for array, start in zip(arrays, starts, strict=False):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staging.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]
