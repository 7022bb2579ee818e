"""FlashInfer's function for MLA decode (flashinfer-python 0.6 and 0.7): kernels of several makers are behind it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.hardware_backend.cuda.whole_pages import WholePages
from anyattn.lazy import lazy_import
from anyattn.types import FP8_DTYPES

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

LN_2 = math.log(2.0)
_TILE = 128  # tokens: the rows of the page table must hold whole tiles
_QK_NOPE_HEAD_DIM = {512: 128, 256: 64}
"""By latent rank: the sizes before absorption that the vendor knows. It asks for them and does not use them."""


class MLADecodeBackend(AttentionBackend):
    """What its users share.

    kernels: FlashInfer's name for them. lse_unit: what their LSE is multiplied with to be natural. workspace_dtype,
    workspace_bytes: zeroed when it is made.
    """

    kernels: ClassVar[str]
    lse_unit: ClassVar[float]
    workspace_dtype: ClassVar[str]
    workspace_bytes: ClassVar[int]

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        dtype: torch.dtype = getattr(torch, self.workspace_dtype)
        self._workspace = torch.zeros(self.workspace_bytes, dtype=dtype, device=platform.torch_device)
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
            backend=self.kernels,
            return_lse=spec.return_lse,
        )
        if not spec.return_lse:
            return None
        lse: torch.Tensor = result[1]
        return lse if self.lse_unit == 1.0 else lse * self.lse_unit
