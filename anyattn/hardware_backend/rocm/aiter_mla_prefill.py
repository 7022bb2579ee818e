"""AMD's aiter for prefill of MLA over latents: `mla_prefill_fwd`, over slots of single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.hardware_backend.rocm.guarded_queries import GUARD, GuardedQueries
from anyattn.hardware_backend.rocm.token_slots import TokenSlots, rows_of
from anyattn.hardware_backend.rocm.wheel import ARCHS, CONTRACT_TESTED_WITH, PACKAGES
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, KV_LAYOUTS, ints

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    max_qo_len: int
    slots: TokenSlots
    queries: GuardedQueries


class AiterMLAPrefillBackend(AttentionBackend):
    """For 16 heads and for 128, which it has kernels for; all of them are causal, and none is told to read fp8.

    Not in graphs: what these binaries do with sequences without tokens is not told. Nor is whether they load keys
    behind a sequence's end, so that a guard stands there, of `GUARD` keys and a query whose result is thrown away.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"rocm"}),
        archs=ARCHS,
        packages=PACKAGES,
        extra="rocm",
        dtypes=frozenset({"bfloat16"}),
        mla_dims=frozenset({(512, 64)}),
        group_sizes=ints(16, 128),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        phases=frozenset({"prefill", "mixed"}),
        contiguous_q=True,
        priority=70,
        contract_tested_on=ARCHS,
        contract_tested_with=CONTRACT_TESTED_WITH,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._views = LayerViews(lambda kv: rows_of(kv.nhd()[0]).unsqueeze(1))

    def plan(self, batch: Batch) -> _Plan:
        if bool((batch.host.qo_lens == 0).any()):  # they have nothing to compute
            batch, _ = batch.of_sequences(batch.host.qo_lens.nonzero()[0])
        queries = GuardedQueries(self.spec, batch.qo_indptr, batch.num_tokens)
        return _Plan(max_qo_len=batch.max_qo_len, slots=TokenSlots(batch, guard=GUARD), queries=queries)

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
        rows = self._views.of(kv)

        def prefill(q: torch.Tensor, o: torch.Tensor) -> None:
            aiter.mla.mla_prefill_fwd(
                q=q,
                kv_buffer=rows,
                o=o,
                qo_indptr=plan.queries.qo_indptr,
                kv_indptr=plan.slots.kv_indptr,
                kv_indices=plan.slots.kv_indices,
                kv_last_page_lens=plan.slots.last_page_lens,
                max_seqlen_q=plan.max_qo_len,
                sm_scale=self.spec.scale,
            )

        plan.queries.attend(q, out, prefill)
        return None
