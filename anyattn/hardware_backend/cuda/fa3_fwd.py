"""FlashAttention 3 as PyPI's fa3-fwd brings it: prefill in bfloat16, of keys and values that lie one behind the other.

That build has neither paged KV, nor sliding windows, nor float16, nor MLA. A step's keys and values are gathered from
their pages, in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.fa3_providers import is_aligned
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import indptr
from anyattn.types import ANY_INT, KV_LAYOUTS, IntSet

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.mem_cache.base import LayerKV
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

fa3_fwd_interface = lazy_import("fa3_fwd_interface")

_WIDEST_TILE = 256
"""Keys that no tile of the kernels exceeds. A sequence's last tile reads beyond its end, and multiplies what is there
by 0: its last token once more, where it would otherwise be another sequence's first, which may be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """pages, offsets: [num_gathered], int64, where keys and values lie. arguments: of the step's calls."""

    pages: torch.Tensor
    offsets: torch.Tensor
    arguments: dict[str, Any]


class FA3FwdBackend(AttentionBackend):
    """Prefill and mixed steps; decode, which would copy all of the cache for a token of each sequence, is others'."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        packages=("torch>=2.10", "fa3-fwd>=0.0.3 | module:fa3_fwd_interface"),
        dtypes=frozenset({"bfloat16"}),
        head_dims=IntSet(multiple_of=16, maximum=256),
        head_dim_pairs=frozenset({(192, 128)}),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"prefill", "mixed"}),
        causal=frozenset({True, False}),
        logits_soft_cap=True,
        lse=True,
        allocates_out=True,
        priority=40,
        contract_tested_on=frozenset({"sm90"}),
    )

    def plan(self, batch: Batch) -> _Plan:
        host, page_size = batch.host, batch.page_size
        lens = np.where(host.qo_lens > 0, host.kv_lens, 0)
        begins = indptr(np.where(lens > 0, lens + (_WIDEST_TILE - 1), 0))
        cu_seqlens_k, seqused_k = to_device([begins, lens], batch.kv_indices.device)
        row = torch.arange(int(begins[-1]), dtype=torch.int32, device=batch.kv_indices.device)
        owner = torch.searchsorted(cu_seqlens_k[1:], row, right=True)
        position = torch.minimum(row - cu_seqlens_k[owner], seqused_k[owner] - 1)
        return _Plan(
            pages=batch.kv_indices[batch.kv_indptr[owner] + position // page_size].long(),
            offsets=(position % page_size).long(),
            arguments={
                "cu_seqlens_q": batch.qo_indptr,
                "cu_seqlens_k": cu_seqlens_k,
                "seqused_k": seqused_k,
                "max_seqlen_q": batch.max_qo_len,
                "max_seqlen_k": batch.max_kv_len,
                "softmax_scale": self.spec.scale,
                "causal": self.spec.causal,
                "softcap": self.spec.logits_soft_cap or 0.0,
                "return_attn_probs": True,  # which stands for the LSE
            },
        )

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: None,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not is_aligned(q):
            q = q.clone(memory_format=torch.contiguous_format)
        k, v = (part[plan.pages, plan.offsets] for part in kv.nhd())
        result, lse = fa3_fwd_interface.flash_attn_varlen_func(q, k, v, **plan.arguments)
        return result, lse.T if self.spec.return_lse else None
