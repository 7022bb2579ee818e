"""MLA's queries where `TokenSlots` has guards: no sequence may be without a query there, so that guards have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch

    from anyattn.attention.spec import AttentionSpec
else:
    torch = lazy_import("torch")

GUARD = 128
"""Keys of a guard, as many as the largest tile has: `get_meta_param` in aiter's `mla.py` names tiles of 32 to 128."""


class GuardedQueries:
    """One step's queries and outputs with a row more for each guard, or those of a graph's steps. Layers share them.

    qo_indptr: [2 * num_seqs], int32, of sequences and guards in turn.
    """

    def __init__(self, spec: AttentionSpec, qo_indptr: torch.Tensor, num_tokens: int) -> None:
        """qo_indptr: [num_seqs + 1], int32, of the sequences alone, which does not change."""
        num_seqs, device = qo_indptr.shape[0] - 1, qo_indptr.device
        with torch.inference_mode(False):  # what is written outside of that mode must not be made in it
            seq = torch.arange(num_seqs, dtype=torch.int32, device=device)
            self.qo_indptr = torch.zeros(2 * num_seqs, dtype=torch.int32, device=device)
            self.qo_indptr[0::2] = qo_indptr[:-1] + seq
            self.qo_indptr[1::2] = qo_indptr[1:] + seq
            self._rows: torch.Tensor | None = None
            if num_seqs == 1:  # no guard is there
                return
            seq_of_token = torch.repeat_interleave(seq, qo_indptr.diff(), output_size=num_tokens)
            self._rows = torch.arange(num_tokens, device=device) + seq_of_token
            rows, dtype = num_tokens + num_seqs - 1, getattr(torch, spec.dtype)
            self._q = torch.zeros(rows, spec.num_qo_heads, spec.head_dim, dtype=dtype, device=device)
            self._out = torch.zeros(rows, spec.num_qo_heads, spec.vo_head_dim, dtype=dtype, device=device)

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, attention: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        """Has `attention(q, out)` write to its second argument; what is no guard's ends up in `out`."""
        if self._rows is None:
            attention(q, out)
            return
        self._q.index_copy_(0, self._rows, q)
        attention(self._q, self._out)
        torch.index_select(self._out, 0, self._rows, out=out)
