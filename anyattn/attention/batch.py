"""One step's metadata: which tokens are new, where they go and which pages each sequence reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import ranges
from anyattn.mem_cache.kernels.indices import step_indices_unchecked
from anyattn.types import Phase, dtype_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from anyattn.mem_cache.indices import Int64s
    from anyattn.mem_cache.step_view import StepTensors, StepView
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


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
    host: the step on the host (lengths, pointers, handles), so that no planner has to read anything back.
    windows: the same step for each of the table's windows, with the pages of its layers; the null page stands where a
        sequence let go of a page. Lengths and positions are as here.
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
    host: StepView
    windows: tuple[Batch, ...] = ()

    def of_pool(self, number: int) -> Batch:
        """This step with the pages of one of the runtime's pools."""
        return self.windows[number - 1] if number else self

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Slots of tokens that are given by their places in the sequence: what sparse attention reads.

        indices: [num_tokens, topk], int32, for each new token positions in its own sequence. Negative ones, and those
            behind the token itself, are of no token.

        Returns [num_tokens, topk], int32, -1 for no token. Does not wait for the device, and may be captured in a
        graph: whatever the rows of padding hold, their slots are those of pages in the table too.
        """
        token = torch.arange(self.num_tokens, dtype=torch.int32, device=indices.device)
        # The number of sequences that end at the token or before it; padding, behind them all, joins the last.
        seq = torch.searchsorted(self.qo_indptr[1:], token, right=True, out_int32=True).clamp(max=self.num_seqs - 1)
        position = indices.clamp(min=0)
        column = position.div(self.page_size, rounding_mode="floor").clamp(max=self.block_table.shape[1] - 1)
        slots = self.block_table[seq[:, None], column] * self.page_size + position % self.page_size
        return torch.where((indices >= 0) & (indices <= self.positions[:, None]), slots, -1)

    def of_sequences(self, chosen: Int64s) -> tuple[Batch, torch.Tensor]:
        """The step of some of its sequences, and their tokens among this step's: [num_tokens], int64, on the device.

        chosen: [num_chosen], in any order, which is then theirs.
        """
        host, device = self.host, self.kv_lens.device
        per_sequence = ("rows", "prefix_lens", "kv_lens", "num_pages", "last_slots")
        view = replace(
            host, seqs=host.seqs[chosen] if host.seqs.size == self.num_seqs else host.seqs, copies=(), tails=None,
            **{name: getattr(host, name)[chosen] for name in per_sequence},
        )  # fmt: skip
        rows = ranges(host.qo_indptr[chosen], view.qo_lens)
        pages = ranges(host.kv_indptr[chosen], view.num_pages)
        qo_indptr, kv_indptr, index, rows_there, pages_there = to_device(
            [view.qo_indptr, view.kv_indptr, chosen, rows, pages], device, wide=3
        )
        most_pages = int(view.num_pages.max(initial=0))

        def part(batch: Batch) -> Batch:
            masks = batch.tree_masks
            return replace(
                batch,
                num_seqs=int(chosen.size),
                num_tokens=int(rows.size),
                max_qo_len=int(view.qo_lens.max(initial=0)),
                max_kv_len=int(view.kv_lens.max(initial=0)),
                phase=_phase(view.qo_lens, view.prefix_lens, has_tree=masks is not None),
                qo_indptr=qo_indptr,
                kv_lens=batch.kv_lens[index],
                kv_indptr=kv_indptr,
                kv_indices=batch.kv_indices[pages_there],
                kv_last_page_len=batch.kv_last_page_len[index],
                block_table=batch.block_table[index, :most_pages],
                out_slots=batch.out_slots[rows_there],
                positions=batch.positions[rows_there],
                tree_masks=None if masks is None else tuple(masks[i] for i in chosen.tolist()),
                host=view,
                windows=tuple(part(each) for each in batch.windows),
            )

        return part(self), rows_there

    @classmethod
    def from_view(
        cls, view: StepView, tensors: StepTensors, tree_masks: tuple[torch.Tensor | None, ...] | None = None
    ) -> Batch:
        """The batch of one step. tensors: `view.tensors()`. tree_masks: from `checked_tree_masks`."""
        positions = torch.empty(int(view.qo_indptr[-1]), dtype=torch.int64, device=tensors.page_table.device)
        full = cls(
            page_size=view.page_size,
            num_seqs=int(view.seqs.size),
            num_tokens=int(view.qo_indptr[-1]),
            max_qo_len=int(view.qo_lens.max(initial=0)),
            max_kv_len=int(view.kv_lens.max(initial=0)),
            phase=_phase(view.qo_lens, view.prefix_lens, has_tree=tree_masks is not None),
            qo_indptr=tensors.qo_indptr,
            kv_lens=tensors.kv_lens,
            kv_indptr=tensors.kv_indptr,
            kv_last_page_len=tensors.kv_last_page_len,
            positions=positions,
            tree_masks=tree_masks,
            host=view,
            **_page_tensors(view, tensors, positions=positions),
        )
        windows = tuple(replace(full, **_page_tensors(view, tensors, mapping=each)) for each in tensors.mappings)
        return replace(full, windows=windows) if windows else full


def _page_tensors(
    view: StepView,
    tensors: StepTensors,
    *,
    mapping: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The fields of a batch that name pages of one pool, made in one launch, which fills `positions` too where given.

    mapping: from full pages to those of the pool; None for the full ones.
    """
    device = tensors.page_table.device
    pages = {
        "kv_indices": torch.empty(int(view.kv_indptr[-1]), dtype=torch.int32, device=device),
        "block_table": torch.empty(
            (view.seqs.size, int(view.num_pages.max(initial=0))), dtype=torch.int32, device=device
        ),
        "out_slots": torch.empty(int(view.qo_indptr[-1]), dtype=torch.int64, device=device),
    }
    step_indices_unchecked(
        tensors.page_table,
        tensors.rows,
        tensors.kv_lens,
        tensors.prefix_lens,
        tensors.qo_indptr,
        tensors.kv_indptr,
        view.page_size,
        mapping=mapping,
        positions=positions,
        **pages,
    )
    return pages


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
