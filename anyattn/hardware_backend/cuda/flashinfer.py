"""FlashInfer's paged prefill and tensor-core decode for heads of keys and values (flashinfer-python 0.6 and 0.7).

Which kernel serves a step is said to FlashInfer, never left to its "auto", which answers otherwise in every version:
decode, short new parts, tree masks and fp8 caches go to the fa2 kernels, longer prefill on Hopper to the fa3 ones.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.errors import ContractError
from anyattn.hardware_backend.cuda.flashinfer_workspace import (
    RECOMMENDED_BYTES,
    PlannerStep,
    WrapperPlan,
    Wrappers,
    most_mask_words,
    packed_tree_masks,
)
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, KV_LAYOUTS, GraphLevel, Load, Role, ints

if TYPE_CHECKING:
    import flashinfer
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")
    flashinfer = lazy_import("flashinfer")

_ARCHS = frozenset({"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"})
_LN_2 = math.log(2.0)  # FlashInfer's LSE is in base 2
_SEES_NOTHING = -4.9e4
"""In base 2: the kernels' minus infinity is -5e4, plus the logarithm of how many keys were masked (math.cuh)."""
_SHORT_QO_LEN, _FA3_TILE = 64, 128
"""The fa3 kernels' tiles are of 128 or 192 rows of one head, and the fa2 ones' of all heads of a group, so that these
are faster for short new parts: 3.5 times on an H200 at four tokens. The bound is that of FlashInfer 0.7's "auto"."""
_MOST_CORES = 192  # of the devices that are declared; where the device does not tell


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """As measured on an H200: the fastest decode, and FlashAttention 3 is the faster prefill on Hopper."""
    if role == "decode":
        return 85
    return 70 if platform.arch == "sm90" else 80


class FlashInferBackend(AttentionBackend):
    """One FlashInfer wrapper a live plan, so that planning one step leaves the plan of another as it is.

    Sinks are applied to the kernels' outputs by their LSE. A scale that is a tensor cannot be folded into sm_scale, as
    that is passed from the host: for keys q is multiplied with it, and rounded once more, for values the output is.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=_ARCHS,
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        head_dims=ints(64, 128, 256),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"prefill", "decode", "mixed", "verify"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        tree_mask=True,
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        priority=_priority,
        run_on=frozenset({"sm90"}),
        contract_tested_on=_ARCHS,
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._is_fp8 = spec.storage_dtype != spec.dtype
        self._is_plain = not (self._is_fp8 or spec.sinks or spec.return_lse)
        window = spec.sliding_window
        self._heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, cache.page_size)
        self._options = {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": spec.logits_soft_cap,
            "q_data_type": getattr(torch, spec.dtype),
            "kv_data_type": getattr(torch, spec.storage_dtype),
            "sm_scale": spec.scale,
        }
        tile = 128 if spec.head_dim < 256 else 64
        self._wrappers = Wrappers(platform.torch_device, max(RECOMMENDED_BYTES, self._partial_bytes(tile)))

    def plan(self, batch: Batch) -> WrapperPlan:
        step = PlannerStep.of(batch, self.spec.sliding_window)
        if batch.phase == "decode":
            plan = self._wrappers.take("decode", functools.partial(self._decode_wrapper, self._wrappers.workspace()))
            self._plan_decode(plan, step)
            return plan
        kernel = self._prefill_kernel(batch)
        plan = self._wrappers.take(
            kernel, functools.partial(self._prefill_wrapper, self._wrappers.workspace(), backend=kernel)
        )
        if batch.tree_masks is None:
            self._plan_prefill(plan, step, batch.max_qo_len)
            return plan
        words, starts = packed_tree_masks(step, batch.tree_masks, batch.kv_indices.device)
        self._plan_prefill(plan, step, batch.max_qo_len, packed_custom_mask=words.view(torch.uint8))
        if not hasattr(plan.wrapper, "_mask_indptr_buf"):
            raise ContractError("this FlashInfer keeps custom masks in a way that is not known here: use 0.6 or 0.7.")
        # With masks that are packed already, `plan` takes where each begins for a number of bits, and kernels of bytes.
        plan.wrapper._mask_indptr_buf = starts
        return plan

    def init_graph(self, batch: Batch) -> WrapperPlan:
        decode = batch.phase == "decode"
        workspace = self._wrappers.workspace(self._graph_bytes(batch.num_seqs, batch.num_tokens))
        with torch.inference_mode(False):  # what is made here may be written in inference mode and outside of it
            suffix = "buffer" if decode else "buf"
            reserved = {
                f"paged_kv_indptr_{suffix}": torch.zeros_like(batch.kv_indptr),
                f"paged_kv_indices_{suffix}": torch.zeros_like(batch.kv_indices),
                f"paged_kv_last_page_len_{suffix}": torch.zeros_like(batch.kv_last_page_len),
            }
            plan = self._wrappers.graph_plan()
            if not decode:
                reserved["qo_indptr_buf"] = torch.zeros_like(batch.qo_indptr)
            if batch.tree_masks is not None:
                num_words = most_mask_words(batch.num_seqs, batch.max_qo_len, batch.max_kv_len)
                plan.words = torch.zeros(num_words, dtype=torch.int32, device=batch.kv_indices.device)
                plan.starts = torch.zeros_like(batch.qo_indptr)
                reserved |= {"custom_mask_buf": plan.words.view(torch.uint8), "mask_indptr_buf": plan.starts}
            make = self._decode_wrapper if decode else functools.partial(self._prefill_wrapper, backend="fa2")
            plan.wrapper = make(workspace, use_cuda_graph=True, **reserved)
        self.refresh_graph(plan, batch)
        return plan

    def refresh_graph(self, plan: WrapperPlan, batch: Batch) -> None:
        step = PlannerStep.of_graph(batch, self.spec.sliding_window)
        if batch.phase == "decode":
            self._plan_decode(plan, step)
            return
        self._plan_prefill(plan, step, batch.max_qo_len)
        if batch.tree_masks is not None and plan.words is not None and plan.starts is not None:
            _, starts = packed_tree_masks(step, batch.tree_masks, batch.kv_indices.device, plan.words)
            plan.starts.copy_(starts)

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
        if self._is_plain:
            plan.wrapper.run(q, (kv.k, kv.v), out=out)
            return None
        k_scale: float | None = None
        if isinstance(kv.k_scale, torch.Tensor):
            q = torch.mul(q.detach(), kv.k_scale.view(1), out=torch.empty_like(q))
        elif self._is_fp8:
            k_scale = kv.k_scale
        wants_lse = self.spec.return_lse or sinks is not None
        result = plan.wrapper.run(q, (kv.k, kv.v), k_scale=k_scale, out=out, return_lse=wants_lse)
        lse: torch.Tensor | None = None
        if wants_lse:
            lse = result[1]
            if self.spec.tree_mask:
                torch.threshold_(lse, _SEES_NOTHING, -math.inf)
            lse.mul_(_LN_2)
        self._rescale(out, kv.v_scale, lse, sinks)
        return lse if self.spec.return_lse else None

    def _rescale(
        self, out: torch.Tensor, v_scale: float | torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> None:
        """Multiplies the output with the values' scale, and with the keys' part of the softmax beside the sinks'."""
        factor: float | torch.Tensor = v_scale.view(1) if isinstance(v_scale, torch.Tensor) else v_scale
        if sinks is not None and lse is not None:
            of_keys = torch.sub(lse, sinks).sigmoid_()
            factor = (of_keys if isinstance(factor, float) and factor == 1.0 else of_keys.mul_(factor)).unsqueeze(-1)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            out.mul_(factor)  # in float32, also where it is a tensor

    def _prefill_kernel(self, batch: Batch) -> str:
        """What FlashInfer calls a backend. The fa3 kernels take no masks, and an fp8 cache only with q in fp8.

        They are for steps where most keys are read by tiles of long new parts.
        """
        if self.platform.arch != "sm90" or self._is_fp8 or batch.tree_masks is not None:
            return "fa2"
        qo_lens = batch.host.qo_lens
        keys = -(-qo_lens // _FA3_TILE) * batch.host.kv_lens
        return "fa3" if 2 * keys[qo_lens > _SHORT_QO_LEN].sum() > keys.sum() else "fa2"

    def _decode_wrapper(self, workspace: torch.Tensor, **options: Any) -> Any:
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, self.cache.layout, use_tensor_cores=True, backend="fa2", **options
        )

    def _prefill_wrapper(self, workspace: torch.Tensor, **options: Any) -> Any:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, self.cache.layout, **options)

    def _plan_decode(self, plan: WrapperPlan, step: PlannerStep) -> None:
        paged = (step.kv_indptr, step.kv_indices, step.last_page_len)
        plan.plan(*paged, *self._heads, seq_lens=step.kv_lens, **self._options)

    def _plan_prefill(self, plan: WrapperPlan, step: PlannerStep, max_qo_len: int, **mask: Any) -> None:
        paged = (step.qo_indptr, step.kv_indptr, step.kv_indices, step.last_page_len)
        plan.plan(
            *paged,
            *self._heads,
            causal=self.spec.causal,
            seq_lens=step.kv_lens,
            max_token_per_sequence=max_qo_len,
            **self._options,
            **mask,
        )

    def _partial_bytes(self, tile: int, num_tiles: int = 0) -> int:
        """What the fa2 planner takes of the workspace for the partial outputs and LSEs of split keys, at most.

        tile: rows of a query tile. num_tiles: of a graph, which has room for each; otherwise keys are split only where
        that gives no more than two tiles for each core (`PrefillPlan` in scheduler.cuh, 0.6.13; 0.7 takes less).
        """
        spec = self.spec
        num_blocks = max(2 * (self.platform.num_cores or _MOST_CORES) // spec.num_kv_heads, num_tiles)
        return spec.num_qo_heads * num_blocks * tile * (spec.head_dim + 1) * 4 + 32

    def _graph_bytes(self, num_seqs: int, num_tokens: int) -> int:
        """Likewise for a graph, whose tiles are chosen as if all rows but one of each sequence were one sequence's."""
        group_size = self.spec.group_size
        longest = (num_tokens - num_seqs + 1) * group_size
        tile = 16 if longest <= 16 else 64 if longest <= 64 or self.spec.head_dim >= 256 else 128
        return self._partial_bytes(tile, -(-num_tokens * group_size // tile) + num_seqs - 1)
