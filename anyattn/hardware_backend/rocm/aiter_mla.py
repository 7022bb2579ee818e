"""AMD's aiter for decode of MLA: `mla_decode_fwd` over slots of single tokens, with its work divided once a step.

Its functions are found with one of two lists of parameters, the wheel's and that of the repository since (checked at
its commit 0056982), and are called by name where that serves both:

- `mla_decode_fwd` takes `sm_scale` behind `max_seqlen_q` in amd-aiter 0.1.7.post2, and `page_size` and `nhead_kv`
  between them in the repository since.
- `get_mla_metadata_v1` takes `kv_last_page_lens` as its third in the repository, which the wheel's has not. What the
  wheel calls `work_indptr` and `work_info` it hands on by position to parameters that are the other way round, so that
  it can be called by position only (as `op_tests/test_mla_persistent.py` does).
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.hardware_backend.rocm.guarded_queries import GUARD, GuardedQueries
from anyattn.hardware_backend.rocm.scales import scale_on_device
from anyattn.hardware_backend.rocm.token_slots import TokenSlots, rows_of
from anyattn.hardware_backend.rocm.wheel import CDNA3, CDNA4, CONTRACT_TESTED_WITH, PACKAGES
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, FP8_DTYPES, KV_LAYOUTS, GraphLevel, IntSet

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

_GRANULARITY = 16
"""Keys by which a sequence is divided, as the vendor's tests have it for pages of one token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """work: `mla_decode_fwd`'s tensors of the division, by its names for them."""

    slots: TokenSlots
    queries: GuardedQueries
    work: dict[str, torch.Tensor]


class AiterMLABackend(AttentionBackend):
    """On CDNA3, whose fp8 is float8_e4m3fnuz; q is not rounded to it.

    Of the vendor's two ways to divide the work it is the persistent one: the other keeps its tensor of the division in
    a cache of one entry, from which the next batch throws what a graph reads. The persistent kernels compute 16 heads
    at a time; 128 they have in fp8 only.

    Whether these binaries load keys behind a sequence's end is not told. The division takes sequences to lie one behind
    the other, so that what separates them is a sequence too, of `GUARD` keys and a query whose result is thrown away.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"rocm"}),
        archs=CDNA3,
        packages=PACKAGES,
        extra="rocm",
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"float8_e4m3fnuz"}),
        mla_dims=frozenset({(512, 64)}),
        group_sizes=IntSet(minimum=16, maximum=112, multiple_of=16),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        phases=frozenset({"decode"}),
        causal=frozenset({True, False}),
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        priority=70,
        contract_tested_on=CDNA3,
        contract_tested_with=CONTRACT_TESTED_WITH,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._stored: torch.dtype = getattr(torch, spec.storage_dtype)
        self._is_fp8 = spec.storage_dtype in FP8_DTYPES
        self._divide = inspect.signature(aiter.get_mla_metadata_v1).parameters.keys()
        self._views = LayerViews(self._view)

    def _view(self, kv: LayerKV) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A layer's latents as pages of one token, [num_slots, 1, 1, rank + rope], and its scale where it has one."""
        rows = rows_of(kv.nhd()[0]).unsqueeze(1)
        if not self._is_fp8:
            return rows, {}
        return rows, {"kv_scale": scale_on_device(kv.k_scale, kv)}

    def plan(self, batch: Batch) -> _Plan:
        return self._planned(batch, for_graph=False)

    def init_graph(self, batch: Batch) -> _Plan:
        with torch.inference_mode(False):  # what is refreshed outside of that mode must not be made in it
            return self._planned(batch, for_graph=True)

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        plan.slots.refresh(batch)
        self._divide_work(plan)

    def _planned(self, batch: Batch, *, for_graph: bool) -> _Plan:
        slots = TokenSlots(batch, guard=GUARD, for_graph=for_graph)
        qo_indptr = torch.arange(batch.num_seqs + 1, dtype=torch.int32, device=slots.kv_lens.device)
        queries = GuardedQueries(self.spec, qo_indptr, batch.num_seqs)
        needed = aiter.get_mla_metadata_info_v1(
            batch_size=slots.last_page_lens.shape[0],
            max_seqlen_qo=1,
            num_head_qo=self.spec.num_qo_heads,
            q_dtype=self._dtype,
            kv_dtype=self._stored,
            is_sparse=False,
            fast_mode=True,
        )
        names = (
            "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map"
        )  # fmt: skip
        work = {
            name: torch.empty(shape, dtype=dtype, device=qo_indptr.device)
            for name, (shape, dtype) in zip(names, needed, strict=True)
        }
        plan = _Plan(slots=slots, queries=queries, work=work)
        self._divide_work(plan)
        return plan

    def _divide_work(self, plan: _Plan) -> None:
        work, further = plan.work, self._divide
        dtypes = {"dtype_q": self._dtype, "dtype_kv": self._stored} if "dtype_q" in further else {}
        aiter.get_mla_metadata_v1(
            plan.queries.qo_indptr,
            plan.slots.kv_indptr,
            *([plan.slots.last_page_lens] if "kv_last_page_lens" in further else []),
            self.spec.num_qo_heads,
            1,
            True,
            work["work_meta_data"],
            work["work_info_set"],
            work["work_indptr"],
            work["reduce_indptr"],
            work["reduce_final_map"],
            work["reduce_partial_map"],
            kv_granularity=_GRANULARITY,
            max_seqlen_qo=1,
            uni_seqlen_qo=1,
            fast_mode=True,
            **dtypes,
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
        rows, scale = self._views.of(kv)

        def decode(q: torch.Tensor, o: torch.Tensor) -> None:
            aiter.mla.mla_decode_fwd(
                q=q,
                kv_buffer=rows,
                o=o,
                qo_indptr=plan.queries.qo_indptr,
                kv_indptr=plan.slots.kv_indptr,
                kv_indices=plan.slots.kv_indices,
                kv_last_page_lens=plan.slots.last_page_lens,
                max_seqlen_q=1,
                sm_scale=self.spec.scale,
                num_kv_splits=0,  # as many as there are compute units; of None, newer ones make another kernel at times
                **plan.work,
                **scale,
            )

        plan.queries.attend(q, out, decode)
        return None


class AiterMLAOCPBackend(AiterMLABackend):
    """On CDNA4, whose fp8 is the Open Compute Project's."""

    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        AiterMLABackend.capabilities,
        archs=CDNA4,
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        contract_tested_on=CDNA4,
    )
