"""Flash attention of vllm-xpu-kernels on Intel GPUs: heads over paged KV, in prefill and decode.

The wheel (0.1.16.2) has kernels for some combinations of head dim, query heads a KV head, page size and features only,
each under its name in libattn_kernels_xe_2.so; where one is missing, its Python runs a reference in torch, which waits
for the device. What is declared here has its kernels: for pages of 64 tokens and multiples of it, which all kernels of
pages of 64 read, on Ponte Vecchio and Battlemage, which the library has machine code for. Soft caps and ALiBi are
taken by the call, but reach no kernel.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.attention.sinks import join_sinks
from anyattn.attention.window import table_within_window
from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.types import OCP_FP8_DTYPES, IntSet, ints

if TYPE_CHECKING:
    import numpy as np
    import torch
    import vllm_xpu_kernels.flash_attn_interface as flash_attn

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    flash_attn = lazy_import("vllm_xpu_kernels.flash_attn_interface")

_ARCHS = frozenset({"pvc", "bmg_g21", "bmg_g31"})
_MOST_POOL_TOKENS = 1 << 24
"""Rows of a surface that Xe2's block loads address; one layer's pages are one surface."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """One step: the arguments of its calls. Sequences without new tokens are left out, and pages behind the window."""

    arguments: dict[str, Any]


class IntelXPUBackend(AttentionBackend):
    """Heads of the usual sizes, up to eight query heads a KV head, with a window or an LSE.

    Sinks join by the LSE: kernels take them rounded to q's dtype, and just for some of these heads.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"xpu"}),
        archs=_ARCHS,
        packages=("torch>=2.9", "vllm-xpu-kernels>=0.1.16.2"),
        extra="xpu",
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=OCP_FP8_DTYPES,
        head_dims=ints(64, 96, 128, 256),
        group_sizes=IntSet(maximum=8),
        page_sizes=IntSet(minimum=64, multiple_of=64),
        preferred_page_size=64,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        decode_qo_len=16,  # up to here the package itself makes decodes of several tokens each
        sliding_window=True,
        sinks=True,
        lse=True,
        not_together=(("sliding_window", "return_lse"), ("sliding_window", "sinks")),
        contiguous_q=True,  # Xe2's block loads want rows that begin at multiples of 16 bytes
        needs_finite_tails=True,
        priority=60,
        contract_tested_on=_ARCHS,
        contract_tested_with="vllm-xpu-kernels 0.1.16.2",
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": [left, -1 if left < 0 else 0],
            "return_softmax_lse": spec.return_lse or spec.sinks,
        }
        self._is_fp8 = spec.storage_dtype in OCP_FP8_DTYPES
        self._views = LayerViews(self._pages)

    def _pages(self, kv: LayerKV) -> dict[str, Any]:
        """A layer's pages, and scales as the kernels read them. Raises ContractError for too large a pool."""
        tokens = kv.k.shape[0] * kv.k.shape[1]
        if tokens > _MOST_POOL_TOKENS:
            most = _MOST_POOL_TOKENS // kv.k.shape[1] - 1  # but for the null page
            raise ContractError(
                f"{type(self).__name__} reads pools of up to {_MOST_POOL_TOKENS} tokens, not of {tokens}: give "
                f"num_pages={most} or fewer, or backend='triton'."
            )
        pages: dict[str, Any] = {"k": kv.k, "v": kv.v}
        if self._is_fp8:
            pages["k_descale"] = _own_element(kv.k_scale, kv.k.device)
            pages["v_descale"] = _own_element(kv.v_scale, kv.k.device)
        return pages

    def plan(self, batch: Batch) -> _Plan:
        with_tokens = np.flatnonzero(batch.host.qo_lens)
        if with_tokens.size < batch.num_seqs:  # a kernel of decode would write a row for them all the same
            batch, _ = batch.of_sequences(with_tokens)
        table, kv_lens, max_kv_len = table_within_window(batch, self.spec.sliding_window)
        return _Plan(
            arguments={
                "max_seqlen_q": batch.max_qo_len,
                "cu_seqlens_q": batch.qo_indptr,
                "max_seqlen_k": max_kv_len,
                "seqused_k": kv_lens,
                "block_table": table,
                "is_mix_batch": batch.phase == "mixed",  # whether one-token sequences are left to a kernel of decode
            }
        )

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        result = flash_attn.flash_attn_varlen_func(
            q=q, out=out, **self._views.of(kv), **plan.arguments, **self._options
        )
        if not self._options["return_softmax_lse"]:
            return None
        lse: torch.Tensor = result[1].T  # [num_qo_heads, num_tokens]
        if sinks is not None:
            join_sinks(out, lse, sinks)
        return lse if self.spec.return_lse else None


class IntelXPUGroupedBackend(IntelXPUBackend):
    """More query heads a KV head than eight, without windows."""

    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        IntelXPUBackend.capabilities,
        head_dims=ints(64, 128, 256),
        group_sizes=IntSet(minimum=9),
        sliding_window=False,
        not_together=(),
    )


def _own_element(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A float32 scalar whose storage has nothing else, which is what the package wants of a scale."""
    if isinstance(scale, torch.Tensor):
        return scale if scale.untyped_storage().nbytes() == scale.element_size() else scale.clone()
    return torch.full((), scale, dtype=torch.float32, device=device)
