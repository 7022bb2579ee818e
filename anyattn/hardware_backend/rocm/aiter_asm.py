"""AMD's aiter on pages in layout 5D: `pa_fwd_asm` for decode, and batch prefill over copies of the pages.

The kernels are binaries that amd-aiter ships, one for each line of its `hsa/gfx942/pa/pa_asm.csv` and of gfx950's,
which say for what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.hardware_backend.rocm.batch_prefill import BatchPrefill
from anyattn.hardware_backend.rocm.single_token import SingleToken
from anyattn.hardware_backend.rocm.token_slots import countable, rows_of
from anyattn.hardware_backend.rocm.wheel import ARCHS, CONTRACT_TESTED_WITH, PACKAGES
from anyattn.lazy import lazy_import
from anyattn.types import GraphLevel, IntSet, Load, Role, ints

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


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """Behind aiter's kernels for plain pages, as prefill has to copy; chosen where layout 5D is asked for."""
    return 45 if role == "prefill" else 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decode:
    """q: [num_seqs, num_qo_heads, head_dim], where layers one after the other put their scaled queries; None where the
    kernels' scale is the spec's."""

    step: SingleToken
    q: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prefill:
    """pages: [n], int32, of all sequences, in the order in which their copies lie."""

    pages: torch.Tensor
    step: BatchPrefill


class AiterAsmBackend(AttentionBackend):
    """The decode kernels scale by 1/sqrt(128), what that differs by goes into q.

    They read whole pages; whether what lies behind a sequence's end is left out or multiplied by 0 is not told.
    Those for fp8 want a scale for each token of each head, which no pool here has.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"rocm"}),
        archs=ARCHS,
        packages=PACKAGES,
        extra="rocm",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=ints(128),
        group_sizes=IntSet(maximum=16),
        page_sizes=ints(16),
        layouts=("5D",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=_priority,
        contract_tested_on=ARCHS,
        contract_tested_with=CONTRACT_TESTED_WITH,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._factor = spec.scale * spec.head_dim**0.5
        self._views = LayerViews(lambda kv: (countable(kv.k), countable(kv.v)))

    def plan(self, batch: Batch) -> _Decode | _Prefill:
        if batch.phase == "decode":
            return self._decode(SingleToken(batch, None))
        column = torch.arange(batch.block_table.shape[1], dtype=torch.int32, device=batch.kv_indptr.device)
        # Where a sequence's pages lie among the copies; of one without tokens, any.
        copies = (batch.kv_indptr[:-1, None] + column).clamp_(max=batch.kv_indices.shape[0] - 1)
        return _Prefill(pages=batch.kv_indices, step=BatchPrefill(batch, block_table=copies))

    def init_graph(self, batch: Batch) -> _Decode:
        return self._decode(SingleToken(batch, None, for_graph=True))

    def refresh_graph(self, plan: _Decode, batch: Batch) -> None:
        plan.step.refresh(batch)

    def _decode(self, step: SingleToken) -> _Decode:
        is_scaled = abs(self._factor - 1.0) >= 1e-6
        return _Decode(step=step, q=step.buffer_like_q(self.spec) if is_scaled else None)

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
        spec = self.spec
        if isinstance(plan, _Prefill):
            k, v = (rows_of(copied) for copied in kv.gather(plan.pages))
            plan.step.attend(spec, q, k, v, out)
            return None
        k, v = self._views.of(kv)
        table = plan.step.block_table
        aiter.pa_fwd_asm(
            Q=q if plan.q is None else torch.mul(q, self._factor, out=plan.q),
            K=k,
            V=v,
            block_tables=table,
            context_lens=plan.step.kv_lens,
            block_tables_stride0=table.stride(0),
            out_=out,
        )
        return None
