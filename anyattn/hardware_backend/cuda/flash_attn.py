"""FlashAttention 2, which is built on the user's machine, for GPUs from Ampere on.

Its calls were written from the documentation and interface of its repository (2.8), as no wheel of it was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.sinks import join_sinks
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import indptr
from anyattn.types import GraphLevel, IntSet, Load, Role

if TYPE_CHECKING:
    import flash_attn
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")
    flash_attn = lazy_import("flash_attn")


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    return 50 if role == "prefill" else 45


@dataclass(eq=False, kw_only=True)
class _Plan:
    """kv_indptr: [num_seqs + 1], int32, where each sequence's tokens would begin were they not in pages; prefill's."""

    batch: Batch
    kv_indptr: torch.Tensor | None


class FlashAttnBackend(AttentionBackend):
    """Decode of one token each, which splits a sequence's keys among multiprocessors, and prefill.

    The kernels fill what lies behind a sequence's end with zeros. Their tiles divide pages of 256 tokens, so that none
    of them is both within a window and in a page wholly behind it. Their causal ALiBi adds slope * key position, which
    softmax cannot tell from a distance, but the LSE can.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm80", "sm86", "sm89", "sm90"}),
        packages=("torch>=2.9", "flash-attn>=2.8"),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=IntSet(minimum=8, maximum=256, multiple_of=8),
        page_sizes=IntSet(minimum=256, multiple_of=256),
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        alibi=True,
        lse=True,
        allocates_out=True,
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        not_together=(("alibi", "return_lse"), ("alibi", "sinks"), ("alibi", "non_causal")),
        priority=_priority,
        contract_tested_on=frozenset({"sm80", "sm86", "sm89", "sm90"}),
    )

    def plan(self, batch: Batch) -> _Plan:
        if batch.phase == "decode":
            return _Plan(batch=batch, kv_indptr=None)
        (kv_indptr,) = to_device([indptr(batch.host.kv_lens)], batch.kv_lens.device)
        return _Plan(batch=batch, kv_indptr=kv_indptr)

    def init_graph(self, batch: Batch) -> _Plan:
        return _Plan(batch=batch, kv_indptr=None)

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        """The kernel reads nothing but the batch's tensors, which hold the step already."""

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
        spec, batch = self.spec, plan.batch
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        arguments = {
            "softmax_scale": spec.scale,
            "causal": spec.causal,
            "window_size": (left, 0 if spec.causal else -1),
            "softcap": spec.logits_soft_cap or 0.0,
            "alibi_slopes": alibi_slopes,
            "block_table": batch.block_table,
        }
        if plan.kv_indptr is None:
            result, lse = flash_attn.flash_attn_with_kvcache(
                q.unsqueeze(1), kv.k, kv.v, cache_seqlens=batch.kv_lens, return_softmax_lse=True, **arguments
            )
            result, lse = result.squeeze(1), lse.squeeze(2)
        else:
            result, lse, _ = flash_attn.flash_attn_varlen_func(
                q,
                kv.k,
                kv.v,
                batch.qo_indptr,
                plan.kv_indptr,
                batch.max_qo_len,
                batch.max_kv_len,
                return_attn_probs=True,  # with it comes the LSE; there are no probabilities without dropout
                **arguments,
            )
            lse = lse.T
        if sinks is not None:
            join_sinks(result, lse, sinks)
        return result, lse if spec.return_lse else None
