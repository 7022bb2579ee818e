"""aiter's `mha_batch_prefill_func`: attention over keys that lie anywhere, one slot for each.

Its kernels (Composable Kernel's `fmha_batch_prefill`, in the sources that amd-aiter 0.1.7.post2 ships) load tiles of
128 keys by `kv_page_indices`, past a sequence's end too, and multiply the values there by 0. Guards without a query
stand between the sequences (see `token_slots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.hardware_backend.rocm.token_slots import READ_BEHIND, TokenSlots
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import aiter
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
else:
    torch = lazy_import("torch")
    aiter = lazy_import("aiter")


class BatchPrefill:
    """One step of it, or a graph's steps."""

    def __init__(self, batch: Batch, *, block_table: torch.Tensor | None = None, for_graph: bool = False) -> None:
        """See `TokenSlots`."""
        self._slots = TokenSlots(batch, guard=READ_BEHIND, block_table=block_table, for_graph=for_graph)
        self._max_qo_len, self._max_kv_len = batch.max_qo_len, max(batch.max_kv_len, 1)
        with torch.inference_mode(False):
            self._qo_indptr = torch.zeros_like(self._slots.kv_indptr)
        self._fill(batch.qo_indptr)

    def refresh(self, batch: Batch) -> None:
        """Follows the graph's batch, on the device alone."""
        self._slots.refresh(batch)
        self._fill(batch.qo_indptr)

    def _fill(self, qo_indptr: torch.Tensor) -> None:
        self._qo_indptr[0::2] = qo_indptr[:-1]
        self._qo_indptr[1::2] = qo_indptr[1:]

    def attend(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor | None:
        """k, v: [num_slots, num_kv_heads, dim], contiguous heads. Returns the LSE where the spec wants it."""
        result = aiter.mha_batch_prefill_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=self._qo_indptr,
            kv_indptr=self._slots.kv_indptr,
            kv_page_indices=self._slots.kv_indices,
            max_seqlen_q=self._max_qo_len,
            max_seqlen_k=self._max_kv_len,
            softmax_scale=spec.scale,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            causal=spec.causal,
            return_lse=spec.return_lse,
            out=out,
        )
        if not spec.return_lse:
            return None
        lse: torch.Tensor = result[1].T  # [num_qo_heads, num_tokens], natural
        return lse
