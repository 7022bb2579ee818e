"""AMD's aiter for heads of keys and values in plain pages: batch prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.hardware_backend.rocm.batch_prefill import BatchPrefill
from anyattn.hardware_backend.rocm.token_slots import rows_of
from anyattn.hardware_backend.rocm.wheel import ARCHS, CONTRACT_TESTED_WITH, PACKAGES
from anyattn.types import ANY_INT, GraphLevel, Load, Role, ints

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """Its tiles are of 64 queries and more: of one, `triton` and aiter's own kernels for decode waste less."""
    return 70 if role == "prefill" else 40


class AiterBackend(AttentionBackend):
    """Prefill, chunked and mixed, and decode where the LSE is wanted.

    What amd-aiter 0.1.7.post2 has besides does not work there, and is refused: windows (tiles behind one are skipped
    without skipping their indices) and ALiBi (slopes are handed on in the place of a bias).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"rocm"}),
        archs=ARCHS,
        packages=PACKAGES,
        extra="rocm",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=ints(128),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        logits_soft_cap=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
        priority=_priority,
        contract_tested_on=ARCHS,
        contract_tested_with=CONTRACT_TESTED_WITH,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._views = LayerViews(lambda kv: (rows_of(kv.k), rows_of(kv.v)))

    def plan(self, batch: Batch) -> BatchPrefill:
        return BatchPrefill(batch)

    def init_graph(self, batch: Batch) -> BatchPrefill:
        return BatchPrefill(batch, for_graph=True)

    def refresh_graph(self, plan: BatchPrefill, batch: Batch) -> None:
        plan.refresh(batch)

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
        k, v = self._views.of(kv)
        lse: torch.Tensor | None = plan.attend(self.spec, q, k, v, out)
        return lse
