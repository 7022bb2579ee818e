"""AMD's aiter for decode over whole pages: `paged_attention_v1`, whose kernels are compiled at their first use.

What is declared was read in the sources that amd-aiter 0.1.7.post2 ships (`csrc/cpp_itfs/pa`) and in the tests of its
repository, `op_tests/test_pa_v1.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.hardware_backend.rocm.scales import scale_on_device
from anyattn.hardware_backend.rocm.single_token import SingleToken
from anyattn.hardware_backend.rocm.wheel import CDNA3, CDNA4, CONTRACT_TESTED_WITH, PACKAGES
from anyattn.lazy import lazy_import
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, GraphLevel, IntSet, ints

if TYPE_CHECKING:
    import aiter
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")
    aiter = lazy_import("aiter")

_PARTITION = 256
"""Keys that are attended together; the results are merged by a second kernel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What layers use one after the other. workspace: uint8, of the partitions' outputs, sums and largest scores.
    q: [num_seqs, num_qo_heads, head_dim], for queries within the range of fp8; None where the cache has none."""

    step: SingleToken
    workspace: torch.Tensor
    q: torch.Tensor | None


class AiterPagedBackend(AttentionBackend):
    """On CDNA3, whose fp8 is float8_e4m3fnuz. With an fp8 cache q and the softmax's numerators are rounded to fp8.

    The kernel loads whole tiles, of a sequence's last page all of it, and multiplies what is masked by 0. It masks
    before the soft cap, and adds ALiBi's bias before it, so that neither goes together with one. Groups of more than 16
    query heads are computed in halves, which it addresses as if there were one KV head.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"rocm"}),
        archs=CDNA3,
        packages=PACKAGES,
        extra="rocm",
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"float8_e4m3fnuz"}),
        quantizes_q=True,
        quantizes_probs=True,
        head_dims=ints(64, 128),
        group_sizes=IntSet(maximum=16),
        page_sizes=ints(1, 16, 32),
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"decode"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        alibi=True,
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        needs_finite_tails=True,
        not_together=(("logits_soft_cap", "sliding_window"), ("logits_soft_cap", "alibi")),
        priority=70,
        contract_tested_on=CDNA3,
        contract_tested_with=CONTRACT_TESTED_WITH,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._is_fp8 = spec.storage_dtype in FP8_DTYPES
        self._scales = LayerViews(lambda kv: tuple(scale_on_device(scale, kv) for scale in (kv.k_scale, kv.v_scale)))

    def plan(self, batch: Batch) -> _Plan:
        return self._planned(batch, for_graph=False)

    def init_graph(self, batch: Batch) -> _Plan:
        return self._planned(batch, for_graph=True)

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        plan.step.refresh(batch)

    def _planned(self, batch: Batch, *, for_graph: bool) -> _Plan:
        spec = self.spec
        step = SingleToken(batch, spec.sliding_window, for_graph=for_graph)
        parts = batch.num_seqs * spec.num_qo_heads * -(-step.max_kv_len // _PARTITION)
        part_bytes = spec.head_dim * 2 + 2 * 4  # an output of the query's dtype, two numbers of float32
        workspace = torch.empty(parts * part_bytes, dtype=torch.uint8, device=step.kv_lens.device)
        return _Plan(step=step, workspace=workspace, q=step.buffer_like_q(spec) if self._is_fp8 else None)

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
        spec, step = self.spec, plan.step
        k_scale, v_scale = self._scales.of(kv)
        if plan.q is not None:  # the instruction that rounds q makes NaN of what is beyond the largest value
            largest = torch.finfo(kv.k.dtype).max
            q = torch.clamp(q, -largest, largest, out=plan.q)
        aiter.paged_attention_v1(
            out=out,
            workspace_buffer=plan.workspace,
            query=q,
            key_cache=kv.k,
            value_cache=kv.v,
            scale=spec.scale,
            block_tables=step.block_table,
            cu_query_lens=None,
            context_lens=step.kv_lens,
            max_context_len=step.max_kv_len,
            alibi_slopes=alibi_slopes,
            kv_cache_dtype="fp8" if self._is_fp8 else "auto",
            kv_cache_layout=self.cache.layout,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            k_scale=k_scale,
            v_scale=v_scale,
            partition_size=_PARTITION,
            sliding_window=spec.sliding_window or 0,
        )
        return None


class AiterPagedOCPBackend(AiterPagedBackend):
    """On CDNA4, whose fp8 is the Open Compute Project's."""

    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        AiterPagedBackend.capabilities,
        archs=CDNA4,
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        contract_tested_on=CDNA4,
    )
