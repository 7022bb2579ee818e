"""FlashInfer's MLA over paged latents, for prefill and decode alike (flashinfer-python 0.6 and 0.7).

It is planned in two ways: with metadata of its own kind where FlashInfer has it (0.7), with flat arguments otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.errors import ContractError
from anyattn.hardware_backend.cuda.flashinfer_workspace import RECOMMENDED_BYTES, PlannerStep, WrapperPlan, Wrappers
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import indptr, kv_indices, token_positions
from anyattn.types import ANY_INT, KV_LAYOUTS, GraphLevel, Load, Role, ints

if TYPE_CHECKING:
    import numpy as np
    import torch
    from flashinfer import mla

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    mla = lazy_import("flashinfer.mla")

_ARCHS = frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"})
_RANK, _ROPE = 512, 64
_MOST_TILES, _MOST_CORES = 16384, 192
"""Pieces of work that a plan has room for (`MLAPlan` in scheduler.cuh): 0.6 writes more behind its end, unchecked."""


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """As measured on an H200."""
    return 80 if role == "decode" else 70


class FlashInferMLABackend(AttentionBackend):
    """One wrapper a live plan, as in `flashinfer`. The kernels read q and the latents in place, cut in two.

    Head counts are those that divide the kernels' tiles of 64 or 128 rows: of a query token that two tiles share,
    causal kernels leave out the last key where that begins a tile of keys (`_fa_common.py` of FlashInfer 0.7).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=_ARCHS,
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16", "float16"}),
        mla_dims=frozenset({(_RANK, _ROPE)}),
        group_sizes=ints(1, 2, 4, 8, 16, 32, 64, 128),
        page_sizes=ANY_INT,
        preferred_page_size=64,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        decode_qo_len=16,
        priority=_priority,
        run_on=frozenset({"sm90"}),
        contract_tested_on=_ARCHS,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._backend = "fa3" if platform.arch == "sm90" else "fa2"
        self._has_metadata = hasattr(mla, "MLAPlanMetadata")
        self._options: dict[str, Any] = {
            "num_heads": spec.num_qo_heads,
            "head_dim_ckv": _RANK,
            "head_dim_kpe": _ROPE,
            "page_size": cache.page_size,
            "causal": spec.causal,
            "sm_scale": spec.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._wrappers = Wrappers(platform.torch_device, RECOMMENDED_BYTES)
        self._views = LayerViews(lambda kv: kv.nhd()[0][:, :, 0].split_with_sizes((_RANK, _ROPE), -1))

    def plan(self, batch: Batch) -> WrapperPlan:
        step = PlannerStep.of(batch)
        if self._has_metadata and batch.host.version == batch.host.table.version:
            step = _with_pages_on_host(step, batch)
        step = _without_resting(step, batch)
        self._require_room(step)
        make = functools.partial(mla.BatchMLAPagedAttentionWrapper, self._wrappers.workspace(), backend=self._backend)
        plan = self._wrappers.take("mla", make)
        self._plan(plan, step)
        return plan

    def init_graph(self, batch: Batch) -> WrapperPlan:
        with torch.inference_mode(False):  # what is made here may be written in inference mode and outside of it
            plan = self._wrappers.graph_plan()
            plan.wrapper = mla.BatchMLAPagedAttentionWrapper(
                self._wrappers.workspace(),
                use_cuda_graph=True,
                qo_indptr=torch.zeros_like(batch.qo_indptr),
                kv_indptr=torch.zeros_like(batch.kv_indptr),
                kv_indices=torch.zeros_like(batch.kv_indices),
                kv_len_arr=torch.zeros_like(batch.kv_lens),
                backend=self._backend,
            )
        self._require_room(PlannerStep.of_graph(batch))
        self.refresh_graph(plan, batch)
        return plan

    def refresh_graph(self, plan: WrapperPlan, batch: Batch) -> None:
        step = PlannerStep.of_graph(batch)
        self._plan(plan, _with_pages_on_host(step, batch) if self._has_metadata else step)

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
        query, pages, with_lse = q.split_with_sizes((_RANK, _ROPE), -1), self._views.of(kv), self.spec.return_lse
        lse = {"return_lse": True, "return_lse_base_on_e": True} if with_lse else {}
        if self._has_metadata:
            result = plan.wrapper.run(query=query, kv_cache=pages, out=out, **lse)
        else:
            result = plan.wrapper.run(*query, *pages, out=out, **lse)
        return result[1] if with_lse else None

    def _plan(self, plan: WrapperPlan, step: PlannerStep) -> None:
        paged = {
            "qo_indptr": step.qo_indptr,
            "kv_indptr": step.kv_indptr,
            "kv_indices": step.kv_indices,
            "kv_len_arr": step.kv_lens,
        }
        if not self._has_metadata:
            plan.plan(**paged, **self._options)
            return
        lse_mode = "basee" if self.spec.return_lse else "none"
        plan.plan(
            metadata=mla.MLAPlanMetadata.csr(**paged),
            query_layout="split",
            kv_cache_layout="split",
            lse_mode=lse_mode,
            **self._options,
        )

    def _require_room(self, step: PlannerStep) -> None:
        """Raises ContractError for a step that is cut into more pieces than a plan has room for."""
        heads, qo_lens = self.spec.num_qo_heads, np.diff(step.qo_indptr.numpy()).astype(np.int64)
        rows = 128 if qo_lens.sum() * heads // qo_lens.size > 64 else 64
        tiles, most = int((-(-qo_lens * heads // rows)).sum()), _MOST_TILES - (self.platform.num_cores or _MOST_CORES)
        if tiles > most:  # splits of keys make no more pieces besides than there are cores
            raise ContractError(
                f"FlashInfer's MLA plans steps of up to {most} tiles of {rows} query rows, and {int(qo_lens.sum())} "
                f"new tokens of {heads} heads are {tiles}: give it fewer new tokens in a step, as in chunked prefill."
            )


def _with_pages_on_host(step: PlannerStep, batch: Batch) -> PlannerStep:
    """With kv_indices on the host: FlashInfer 0.7 looks for the largest page id, and waits for those on the device.

    The table must be as it was when the step was made.
    """
    pages = np.zeros(int(step.kv_indptr[-1]), dtype=np.int32)
    known = kv_indices(batch.host.page_rows(), batch.host.num_pages)
    pages[: known.size] = known
    return dataclasses.replace(step, kv_indices=torch.from_numpy(pages))


def _without_resting(step: PlannerStep, batch: Batch) -> PlannerStep:
    """Without sequences that have no new tokens: the planner makes its tiles for how many there are on average."""
    host = batch.host
    kept = host.qo_lens > 0
    if kept.all():
        return step
    num_pages = host.num_pages[kept]
    owner, column = token_positions(np.zeros_like(num_pages), num_pages)
    (places,) = to_device([host.kv_indptr[:-1][kept][owner] + column], step.kv_indices.device, wide=1)
    return PlannerStep(
        qo_indptr=torch.from_numpy(indptr(host.qo_lens[kept])),
        kv_indptr=torch.from_numpy(indptr(num_pages)),
        kv_indices=step.kv_indices[places],
        kv_lens=step.kv_lens[torch.from_numpy(kept)],
        last_page_len=step.last_page_len[torch.from_numpy(kept)],
    )
