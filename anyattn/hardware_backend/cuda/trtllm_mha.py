"""TensorRT-LLM's generated attention kernels for Blackwell's data centre GPUs, as FlashInfer brings them.

What is declared was read in flashinfer-python 0.6.13 and 0.7.4: the signatures, and the host code that picks a kernel.
The kernels themselves are cubins, which FlashInfer fetches, or finds in the package flashinfer-cubin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.whole_pages import WholePages
from anyattn.lazy import lazy_import
from anyattn.types import FP8_DTYPES, GraphLevel, IntSet, ints

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

_WORKSPACE_BYTES = 256 << 20
_TILE = 128  # tokens: the largest that the kernels load at once
_LN_2 = math.log(2.0)  # the LSE is in base 2


@dataclass(eq=False, kw_only=True)
class _Plan:
    """pages: what is read. prefill: the arguments that prefill's kernels take besides; None for decode."""

    pages: WholePages
    prefill: dict[str, Any] | None


class TRTLLMMHABackend(AttentionBackend):
    """Decode of one token each, and prefill. An fp8 cache is attended in fp8, so that q is rounded to it, unscaled.

    The kernels read whole pages by the tensor memory accelerator: see `whole_pages`. They use the strides of keys for
    values too, so that both must have heads of one size.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm100", "sm103"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        quantizes_q=True,
        quantizes_probs=True,
        head_dims=ints(64, 128, 256),
        group_sizes=IntSet(maximum=16),
        page_sizes=ints(16, 32, 64),
        preferred_page_size=64,
        layouts=("HND", "NHD"),
        strided_pages=True,
        phases=frozenset({"prefill", "decode", "mixed"}),
        sliding_window=True,
        sinks=True,
        lse=True,
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        needs_finite_tails=True,
        not_together=(("sinks", "return_lse"),),  # whether the LSE has the sink in it is not documented
        priority=95,
        contract_tested_on=frozenset({"sm100", "sm103"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        # It begins with counters of decode, which must be 0 at first; each launch leaves them so.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=platform.torch_device)
        self._fp8 = spec.storage_dtype in FP8_DTYPES

    def plan(self, batch: Batch) -> _Plan:
        pages = WholePages(batch, self.spec.sliding_window, _TILE)
        if batch.phase == "decode":
            return _Plan(pages=pages, prefill=None)
        prefill = {
            "max_q_len": batch.max_qo_len,
            "max_kv_len": pages.max_kv_len,
            "batch_size": batch.num_seqs,
            "cum_seq_lens_q": batch.qo_indptr,
            "cum_seq_lens_kv": torch.nn.functional.pad(pages.kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            "workspace_buffer": self._prefill_workspace(batch),
        }
        return _Plan(pages=pages, prefill=prefill)

    def init_graph(self, batch: Batch) -> _Plan:
        return _Plan(pages=WholePages(batch, self.spec.sliding_window, _TILE, for_graph=True), prefill=None)

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        plan.pages.refresh(batch)

    def _prefill_workspace(self, batch: Batch) -> torch.Tensor:
        """One for the statistics that an LSE is made of: 0.6.13 would write them over the counters of decode."""
        if not self.spec.return_lse:
            return self._workspace
        rows = self.spec.num_qo_heads * batch.num_seqs * -(-batch.max_qo_len // 256) * 256
        return self._workspace.new_zeros(8 * rows + (2 << 20))  # two float32 each, and more than the guard behind them

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
        spec, pages = self.spec, plan.pages
        if self._fp8:
            most = torch.finfo(kv.k.dtype).max
            q = q.clamp(-most, most).to(kv.k.dtype)
        arguments = {
            "query": q,
            "kv_cache": (kv.k, kv.v),
            "block_tables": pages.block_table,
            "seq_lens": pages.kv_lens,
            "bmm1_scale": kv.k_scale * spec.scale,
            "bmm2_scale": kv.v_scale,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "out": out,
            "sinks": None if sinks is None else sinks.float(),
            "kv_layout": self.cache.layout,
            "return_lse": spec.return_lse,
        }
        if plan.prefill is None:
            result = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
                workspace_buffer=self._workspace, max_seq_len=pages.max_kv_len, backend="trtllm-gen", **arguments
            )
        else:
            result = flashinfer.prefill.trtllm_batch_context_with_kv_cache(**arguments, **plan.prefill)
        return result[1] * _LN_2 if spec.return_lse else None
