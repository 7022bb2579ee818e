"""The tensors that a step's kernels read, allocated once, so that captured graphs find every later batch in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels import indices

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexBuffers:
    """Room for the indices of any batch up to the sizes that `empty` was given. int32 where nothing is said.

    The engine writes the first six in place, or has `kernels.indices.step_lengths` write the last five of them, and
    `fill` then writes the others. A smaller batch is padded: rows 0, lengths 0, indptr flat.

    rows: [max_seqs], the batch's rows of the page table.
    prefix_lens, kv_lens: [max_seqs], tokens before and after the step.
    qo_indptr, kv_indptr: [max_seqs + 1], new tokens and pages before each sequence.
    kv_last_page_len: [max_seqs], tokens in each sequence's last page.
    kv_indices: [max_pages], page ids of all sequences one after the other.
    block_table: [max_seqs, max_pages_per_seq], page ids of each sequence.
    out_slots, positions: [max_tokens], int64, of each new token.
    """

    rows: torch.Tensor
    prefix_lens: torch.Tensor
    kv_lens: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    kv_indices: torch.Tensor
    block_table: torch.Tensor
    out_slots: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        """Raises ContractError for tensors that do not fit one another, so that `fill` need not look again."""
        indices.check_step(self.rows.device, *self._batch(), **self._outputs())

    @classmethod
    def empty(
        cls, device: Any, *, max_seqs: int, max_tokens: int, max_pages: int, max_pages_per_seq: int
    ) -> IndexBuffers:
        """Zeroed buffers, which are a batch without sequences. max_pages is that of a whole batch.

        Raises ContractError for sizes below 1.
        """
        sizes = {
            "max_seqs": max_seqs,
            "max_tokens": max_tokens,
            "max_pages": max_pages,
            "max_pages_per_seq": max_pages_per_seq,
        }
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ContractError(f"{name} must be an int of at least 1, not {size!r}.")

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False):  # buffers may be made in inference mode and be written outside of it
            return cls(
                rows=zeros(max_seqs),
                prefix_lens=zeros(max_seqs),
                kv_lens=zeros(max_seqs),
                qo_indptr=zeros(max_seqs + 1),
                kv_indptr=zeros(max_seqs + 1),
                kv_last_page_len=zeros(max_seqs),
                kv_indices=zeros(max_pages),
                block_table=zeros(max_seqs, max_pages_per_seq),
                out_slots=zeros(max_tokens, dtype=torch.int64),
                positions=zeros(max_tokens, dtype=torch.int64),
            )

    def fill(self, page_table: torch.Tensor, page_size: int, mapping: torch.Tensor | None = None) -> None:
        """Writes kv_indices, block_table, out_slots and positions, in one launch and without waiting for the device.

        page_table: [max_rows, max_columns], page ids of each row in order. mapping: [num_pages + 1], what stands for a
        page id (a windowed layer's pages). Raises ContractError where they do not fit these buffers.
        """
        indices.check_page_table(page_table, page_size, mapping)
        if page_table.device != self.rows.device:
            raise ContractError(f"page_table is on {page_table.device}, and these buffers are on {self.rows.device}.")
        indices.step_indices_unchecked(page_table, *self._batch(), page_size, **self._outputs(), mapping=mapping)

    def _batch(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.kv_lens, self.prefix_lens, self.qo_indptr, self.kv_indptr

    def _outputs(self) -> dict[str, torch.Tensor]:
        return {
            "kv_indices": self.kv_indices,
            "block_table": self.block_table,
            "out_slots": self.out_slots,
            "positions": self.positions,
        }
