"""TensorRT-LLM's generated MLA decode kernels for Blackwell's data centre GPUs, as FlashInfer brings them.

What is declared was read in flashinfer-python 0.6.13 and 0.7.4: the signature, and the host code that picks a kernel.
The kernels themselves are cubins, which FlashInfer fetches, or finds in the package flashinfer-cubin.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.whole_pages import WholePages
from anyattn.lazy import lazy_import
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, GraphLevel, ints

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
_TILE = 128  # tokens: the rows of the page table must hold whole tiles
_LN_2 = math.log(2.0)  # the LSE is in base 2
_QK_NOPE_HEAD_DIM = {512: 128, 256: 64}
"""By latent rank: the sizes before absorption that the vendor knows. It asks for them and does not use them."""


class TRTLLMMLABackend(AttentionBackend):
    """Decode of one or several tokens each. An fp8 cache is attended in fp8, so that q is rounded to it, unscaled.

    The kernels read whole pages by the tensor memory accelerator: see `whole_pages`. Heads come in blocks of 8, 16, 64
    or 128, which must be whole; these are the numbers that tensor parallelism leaves of a model's 128, 64 or 32.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm100", "sm103"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16"}),  # of the output, always
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        quantizes_q=True,
        quantizes_probs=True,
        mla_dims=frozenset({(512, 64), (256, 64)}),
        group_sizes=ints(8, 16, 32, 64, 128),
        page_sizes=ints(32, 64),
        preferred_page_size=64,
        layouts=KV_LAYOUTS,  # of one KV head, so that both are the same bytes
        phases=frozenset({"decode"}),
        decode_qo_len=8,
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=95,
        contract_tested_on=frozenset({"sm100", "sm103"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        # It begins with counters, which must be 0 at first; each launch leaves them so.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=platform.torch_device)
        self._fp8 = spec.storage_dtype in FP8_DTYPES

    def plan(self, batch: Batch) -> WholePages:
        return WholePages(batch, None, _TILE)

    def init_graph(self, batch: Batch) -> WholePages:
        return WholePages(batch, None, _TILE, for_graph=True)

    def refresh_graph(self, plan: WholePages, batch: Batch) -> None:
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
        spec, num_seqs = self.spec, plan.kv_lens.shape[0]
        if self._fp8:
            most = torch.finfo(kv.k.dtype).max
            q = q.clamp(-most, most).to(kv.k.dtype)
        rank = spec.vo_head_dim
        result = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
            query=q.view(num_seqs, -1, *q.shape[1:]),
            kv_cache=kv.nhd()[0].squeeze(2),
            workspace_buffer=self._workspace,
            qk_nope_head_dim=_QK_NOPE_HEAD_DIM[rank],
            kv_lora_rank=rank,
            qk_rope_head_dim=spec.head_dim - rank,
            block_tables=plan.block_table,
            seq_lens=plan.kv_lens,
            max_seq_len=plan.max_kv_len,
            out=out.view(num_seqs, -1, *out.shape[1:]),
            bmm1_scale=kv.k_scale * spec.scale,
            bmm2_scale=kv.v_scale,
            backend="trtllm-gen",
            return_lse=spec.return_lse,
        )
        return result[1] * _LN_2 if spec.return_lse else None
