"""FlashAttention 3 on paged KV: heads of keys and values, and MLA, in prefill and decode.

The builds of it differ in how they are called, which is `fa3_providers`' matter; what is passed is decided here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.attention.window import GraphWindow, table_within_window
from anyattn.hardware_backend.cuda import fa3_providers
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, KV_LAYOUTS, GraphLevel, IntSet, Load, Role

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.hardware_backend.cuda.fa3_providers import Step
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")

_MOST_DECODE_TOKENS = 16
_FP8 = "float8_e4m3fn"
_SMALLEST_DESCALE = 1e-30
_MOST_SINK_HEADS = 64  # what vLLM's build takes
_PINNED_QO_LEN = 1024
"""Beyond this, no build picks another kernel by how many new tokens the longest sequence has."""
_MOST_SPLITS, _MOST_SPLIT_BYTES = 128, 1 << 30
_FEW_SPLITS = 32


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """As measured on an H200: the fastest prefill; for MLA the fastest decode where very little or much is computed."""
    if platform.arch != "sm90":
        return 60 if role == "prefill" else 55
    if role == "prefill":
        return 90
    little = spec.num_qo_heads <= 16 and load.num_seqs <= 2
    much = spec.num_qo_heads >= 64 and load.num_seqs >= 64
    return 85 if spec.is_mla and (little or much) else 75


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """One step.

    options: what `Provider.attend` takes of it. metadata: among them, where its work is divided once for all layers.
    step: what both were made from. rows_each: rows that each sequence has in q, where all have as many. owner:
    otherwise, with an fp8 cache, [num_tokens], int64, each row's sequence. window: a graph's, where layers have one.
    """

    options: dict[str, Any]
    step: Step
    metadata: torch.Tensor | None
    rows_each: int | None
    owner: torch.Tensor | None
    window: GraphWindow | None = None


class FA3Backend(AttentionBackend):
    """Whatever the heads, the batch and the page size; q and the softmax's numerators are rounded for fp8 caches."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        packages=(
            "torch>=2.9",
            "module:flash_attn_interface | module:sgl_kernel.flash_attn | module:vllm.vllm_flash_attn",
        ),
        extra="fa3",
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({_FP8}),
        per_head_scales=True,
        quantizes_q=True,
        quantizes_probs=True,
        head_dims=IntSet(multiple_of=16, maximum=256),
        head_dim_pairs=frozenset({(192, 128)}),
        mla_dims=frozenset({(512, 64)}),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"prefill", "decode", "mixed"}),
        decode_qo_len=_MOST_DECODE_TOKENS,
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
        deterministic=True,
        not_together=(("mla", "fp8"),),
        needs_finite_tails=True,
        priority=_priority,
        run_on=frozenset({"sm90"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._is_fp8 = spec.storage_dtype == _FP8
        self._stored: torch.dtype = getattr(torch, spec.storage_dtype)
        self._written = torch.bfloat16 if self._is_fp8 else self._stored  # what the kernels write
        call = fa3_providers.Call(
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim - spec.vo_head_dim if spec.is_mla else spec.head_dim,
            v_head_dim=spec.vo_head_dim,
            page_size=cache.page_size,
            dtype=self._stored,
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            softcap=spec.logits_soft_cap or 0.0,
            is_mla=spec.is_mla,
        )
        self._provider = fa3_providers.find_provider(call, platform.arch)
        # Kernels take sinks in bfloat16 alone, and count them in their LSE. vLLM's have further limits.
        self._kernel_takes_sinks = (
            self._provider.takes_sinks
            and not spec.return_lse
            and spec.num_qo_heads <= _MOST_SINK_HEADS
            and spec.vo_head_dim == spec.head_dim
            and platform.arch == "sm90"
        )
        self._writes_in_place = self._provider.takes_out and self._written == getattr(torch, spec.dtype)
        self._returns_lse = spec.return_lse
        self._scales: dict[float, torch.Tensor] = {}
        self._parts = (spec.vo_head_dim, spec.head_dim - spec.vo_head_dim)
        self._views = LayerViews(self._rope_and_latent) if spec.is_mla else None

    def _rope_and_latent(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """MLA's keys and values: the latent part of the keys goes with that of q."""
        latent, rope = kv.nhd()[0].split_with_sizes(self._parts, -1)
        return rope, latent

    def plan(self, batch: Batch) -> _Plan:
        table, kv_lens, _ = table_within_window(batch, self.spec.sliding_window)
        each = batch.max_qo_len if batch.num_tokens == batch.num_seqs * batch.max_qo_len else None
        return self._planned(batch, table, kv_lens, rows_each=each)

    def init_graph(self, batch: Batch) -> _Plan:
        with torch.inference_mode(False):  # what is refreshed outside of that mode must not be made in it
            # Whether all sequences of other graphs have as many tokens as each other, the batch does not tell.
            each = 1 if batch.phase == "decode" else None
            if self.spec.sliding_window is None:
                return self._planned(batch, batch.block_table, batch.kv_lens, rows_each=each)
            window = GraphWindow(batch, self.spec.sliding_window)
            return self._planned(batch, window.block_table, window.kv_lens, rows_each=each, window=window)

    def refresh_graph(self, plan: Any, batch: Batch) -> None:
        if plan.window is not None:
            plan.window.refresh(batch)
            table = plan.step.block_table
            if table is not plan.window.block_table:
                table[:, : plan.window.block_table.shape[1]].copy_(plan.window.block_table)
        if plan.owner is not None:
            plan.owner.copy_(_owners(batch))
        if plan.metadata is not None:
            plan.metadata.copy_(self._provider.metadata(plan.step))

    def _planned(
        self,
        batch: Batch,
        block_table: torch.Tensor,
        kv_lens: torch.Tensor,
        *,
        rows_each: int | None,
        window: GraphWindow | None = None,
    ) -> _Plan:
        deterministic, max_qo_len = self.spec.deterministic, batch.max_qo_len
        if deterministic:
            max_qo_len, block_table = max(max_qo_len, _PINNED_QO_LEN), self._wider_than_window(block_table)
        step = fa3_providers.Step(
            cu_seqlens_q=batch.qo_indptr,
            seqused_k=kv_lens,
            block_table=block_table,
            max_seqlen_q=max_qo_len,
            num_splits=1 if deterministic else self._num_splits(batch),
        )
        options, metadata = self._provider.options(step), None
        # Of other batches a build may, from their number of tokens, divide keys into more parts than it then has.
        is_uniform = batch.num_tokens == batch.num_seqs * batch.max_qo_len
        if self._provider.has_metadata and is_uniform and not deterministic:
            metadata = options["scheduler_metadata"] = self._provider.metadata(step)
        owner = _owners(batch) if self._is_fp8 and rows_each is None else None
        return _Plan(options=options, step=step, metadata=metadata, rows_each=rows_each, owner=owner, window=window)

    def _wider_than_window(self, block_table: torch.Tensor) -> torch.Tensor:
        """With as many columns as a window reaches over and one token more.

        Kernels for windows are used where the window is shorter than the table only, and compute in another order.
        """
        columns = -(-((self.spec.sliding_window or 0) + 1) // self.cache.page_size)
        missing = columns - block_table.shape[1]
        return torch.nn.functional.pad(block_table, (0, missing)) if missing > 0 else block_table

    def _num_splits(self, batch: Batch) -> int:
        """0, which leaves it to the kernels, unless these take it for a single sequence that there are many of.

        They then reserve room for every part of every sequence's output, which for many heads would be gigabytes.
        """
        part_bytes = 4 * batch.num_tokens * self.spec.num_qo_heads * self.spec.vo_head_dim
        if batch.max_qo_len > _MOST_DECODE_TOKENS or _MOST_SPLITS * part_bytes <= _MOST_SPLIT_BYTES:
            return 0
        return max(min(_MOST_SPLIT_BYTES // part_bytes, _FEW_SPLITS), 1)

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
        qv = descales = None
        if self._is_fp8:
            q, descales = self._quantized(q, kv, plan)
        elif not fa3_providers.is_aligned(q):
            q = q.clone(memory_format=torch.contiguous_format)
        if self._views is None:
            k, v = kv.nhd()
        else:
            k, v = self._views.of(kv)
            qv, q = q.split_with_sizes(self._parts, -1)
        in_kernel = sinks is not None and self._kernel_takes_sinks and sinks.dtype == torch.bfloat16
        in_place = self._writes_in_place and not out.data_ptr() % 16  # its rows are multiples of that
        result, lse = self._provider.attend(
            q, k, v, plan.options, out if in_place else None, qv, sinks if in_kernel else None, descales
        )
        if sinks is not None and not in_kernel:
            # A sink takes its part of the denominator: exp(lse) / (exp(lse) + exp(sink)) of the output is left.
            kept = torch.sub(lse, sinks[:, None]).sigmoid_()
            torch.mul(result, kept.T[..., None], out=out)
        elif not in_place:
            out.copy_(result)
        return lse.T if self._returns_lse else None

    def _quantized(self, q: torch.Tensor, kv: LayerKV, plan: _Plan) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """q in the cache's dtype, with a scale for each sequence and KV head, and all scales as the kernels take them.

        No row's scale depends on another sequence, nor on padding, which may hold NaN.
        """
        num_seqs, num_kv_heads = plan.step.seqused_k.shape[0], self.spec.num_kv_heads
        heads = q.view(-1, num_kv_heads, self.spec.group_size, self.spec.head_dim)
        most = torch.finfo(self._stored).max
        if plan.rows_each is not None:
            rows = heads.view(num_seqs, plan.rows_each, *heads.shape[1:])
            largest = torch.linalg.vector_norm(rows, math.inf, dim=(1, 3, 4), keepdim=True, dtype=torch.float32)
            q_descale = (largest / most).add_(_SMALLEST_DESCALE)
            quantized, q_descale = (rows / q_descale).to(self._stored), q_descale.reshape(num_seqs, num_kv_heads)
        else:
            assert plan.owner is not None
            of_rows = torch.linalg.vector_norm(heads, math.inf, dim=(2, 3), dtype=torch.float32)
            largest = of_rows.new_zeros(num_seqs + 1, num_kv_heads)
            largest.scatter_reduce_(0, plan.owner[:, None].expand_as(of_rows), of_rows, "amax")
            q_descale = (largest / most).add_(_SMALLEST_DESCALE)
            quantized, q_descale = (heads / q_descale[plan.owner][..., None, None]).to(self._stored), q_descale[:-1]
        k_descale, v_descale = (
            self._on_device(scale).expand(num_seqs, num_kv_heads) for scale in (kv.k_scale, kv.v_scale)
        )
        return quantized.reshape(q.shape), {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}

    def _on_device(self, scale: float | torch.Tensor) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale
        kept = self._scales.get(scale)
        if kept is None:
            kept = torch.full((), scale, dtype=torch.float32, device=self.platform.torch_device)
            if not torch.cuda.is_current_stream_capturing():  # or the graph's memory would be read outside of it
                self._scales[scale] = kept
        return kept


class FA3Sm8xBackend(FA3Backend):
    """Before Hopper: no fp8, no MLA, no values of another size, and not vLLM's build."""

    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        FA3Backend.capabilities,
        archs=frozenset({"sm80", "sm86", "sm89"}),
        packages=("torch>=2.9", "module:flash_attn_interface | module:sgl_kernel.flash_attn"),
        kv_dtypes=frozenset(),
        per_head_scales=False,
        quantizes_q=False,
        quantizes_probs=False,
        head_dim_pairs=frozenset(),
        mla_dims=frozenset(),
        not_together=(),
        needs_finite_tails=False,
        run_on=frozenset(),
        contract_tested_on=frozenset({"sm80", "sm86", "sm89"}),
    )


def _owners(batch: Batch) -> torch.Tensor:
    """[num_tokens], int64: each row's sequence, computed on the device; num_seqs for padding behind the last one."""
    rows = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.qo_indptr.device)
    return torch.searchsorted(batch.qo_indptr[1:], rows, right=True)
