"""FlashAttention 4, written in the CuTe DSL, on Hopper and on Blackwell's data centre GPUs.

What is declared was read in flash-attn-4 4.0.0b36, which compiles at its first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.sinks import join_sinks
from anyattn.attention.window import table_within_window
from anyattn.lazy import lazy_import
from anyattn.types import IntSet, Load, Role, ints

if TYPE_CHECKING:
    import flash_attn.cute as flash_attn_cute
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")
    flash_attn_cute = lazy_import("flash_attn.cute")


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """On Hopper it does not split a sequence's keys among multiprocessors, which decode of few sequences needs."""
    if platform.arch == "sm90":
        return 60 if role == "prefill" else 20
    return 90 if role == "prefill" else 60


@dataclass(eq=False, kw_only=True)
class _Plan:
    """block_table: [num_seqs, max_pages], int32. kv_lens: [num_seqs], int32. max_kv_len: of them."""

    batch: Batch
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    max_kv_len: int


class FA4Backend(AttentionBackend):
    """Prefill and decode by one call, over pages that are smaller than the kernels' tiles.

    Such pages are loaded row by row, and what lies behind a sequence's end is filled with zeros. A page as large as a
    tile would be loaded whole, with whatever an earlier sequence left behind the end; tiles have 64 to 144 tokens, by
    device and head dims. A tile at the edge of a window reads what is behind it: pages wholly behind are left out.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90", "sm100", "sm103", "sm110"}),
        packages=("torch>=2.9", "flash-attn-4>=4.0.0b36"),
        extra="fa4",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=ints(*range(16, 129, 16), 256),  # paged keys want multiples of 16, Blackwell no more than 128 or 256
        head_dim_pairs=frozenset({(192, 128)}),
        group_sizes=IntSet(maximum=16),
        page_sizes=ints(16, 32),
        preferred_page_size=32,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        lse=True,
        allocates_out=True,
        contiguous_q=True,
        priority=_priority,
        contract_tested_on=frozenset({"sm90", "sm100", "sm103", "sm110"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._num_splits = 1 if platform.arch == "sm90" else 0  # 0: as many as it sees fit
        # The vendor's LSE has the sink in it, ours has not: with both, the sink joins afterwards.
        self._passes_sinks = spec.sinks and not spec.return_lse

    def plan(self, batch: Batch) -> _Plan:
        table, kv_lens, max_kv_len = table_within_window(batch, self.spec.sliding_window)
        return _Plan(batch=batch, block_table=table, kv_lens=kv_lens, max_kv_len=max_kv_len)

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
        spec = self.spec
        result, lse = flash_attn_cute.flash_attn_varlen_func(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=plan.batch.qo_indptr,
            max_seqlen_q=plan.batch.max_qo_len,
            max_seqlen_k=plan.max_kv_len,
            seqused_k=plan.kv_lens,
            page_table=plan.block_table,
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size=(None, None) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
            learnable_sink=sinks if self._passes_sinks else None,
            softcap=spec.logits_soft_cap or 0.0,
            num_splits=self._num_splits,
            return_lse=spec.return_lse,
        )
        if not spec.return_lse:
            return result, None
        by_token: torch.Tensor = lse.T  # [num_qo_heads, num_tokens]
        if sinks is not None:
            join_sinks(result, by_token, sinks)
        return result, by_token
