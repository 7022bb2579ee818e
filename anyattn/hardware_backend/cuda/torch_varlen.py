"""torch's own attention over pages, which is FlashAttention 2 (torch 2.13 and later)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.sinks import join_sinks
from anyattn.lazy import lazy_import
from anyattn.types import IntSet

if TYPE_CHECKING:
    import torch
    from torch.nn.attention import varlen

    from anyattn.attention.batch import Batch
    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")
    varlen = lazy_import("torch.nn.attention.varlen")


class TorchVarlenBackend(AttentionBackend):
    """Prefill and decode by one call, with nothing to install beside torch.

    FlashAttention 2 fills what lies behind a sequence's end with zeros. Its tiles divide pages of 256 tokens, so that
    none of them is both within a window and in a page wholly behind it.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"}),
        packages=("torch>=2.13",),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=IntSet(minimum=8, maximum=256, multiple_of=8),
        page_sizes=IntSet(minimum=256, multiple_of=256),
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        sinks=True,
        lse=True,
        allocates_out=True,
        contiguous_q=True,
        priority=8,  # behind what has run on such hardware, and comes with torch as this does
        contract_tested_on=frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"}),
    )

    def plan(self, batch: Batch) -> Batch:
        return batch

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
        spec, batch = self.spec, plan
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        result, lse = varlen.varlen_attn(
            q,
            kv.k,
            kv.v,
            batch.qo_indptr,
            None,
            batch.max_qo_len,
            batch.max_kv_len,
            return_aux=varlen.AuxRequest(lse=True),  # computed in any case
            scale=spec.scale,
            window_size=(left, 0 if spec.causal else -1),
            enable_gqa=spec.group_size > 1,
            seqused_k=batch.kv_lens,
            block_table=batch.block_table,
        )
        lse = lse.T  # [num_qo_heads, num_tokens], whatever its documentation says
        if sinks is not None:
            join_sinks(result, lse, sinks)
        return result, lse if spec.return_lse else None
