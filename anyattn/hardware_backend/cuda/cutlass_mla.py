"""FlashInfer's MLA decode from CUTLASS, for Blackwell's data centre GPUs and 128 heads.

What is declared was read in flashinfer-python 0.7.4. Earlier releases copy the whole cache at every call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.whole_pages import WholePages
from anyattn.lazy import lazy_import
from anyattn.types import KV_LAYOUTS, GraphLevel, ints

if TYPE_CHECKING:
    import flashinfer
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    flashinfer = lazy_import("flashinfer")

_WORKSPACE_BYTES = 128 << 20
_TILE = 128  # tokens: the rows of the page table must hold whole tiles
_BUILT_IN_SCALE = (128 + 64) ** -0.5
"""What the kernel multiplies scores with, whatever the model: 1/sqrt of DeepSeek-V2's heads before absorption."""


@dataclass(eq=False, kw_only=True)
class _Plan:
    """A wrapper, which holds the sizes that it was planned for, and the tensors that each run passes."""

    wrapper: Any
    pages: WholePages


class CutlassMLABackend(AttentionBackend):
    """Decode of one token each. A model's own scale goes into q, as the kernel's is built in.

    The kernel loads whole tiles, whatever lies behind a sequence's end: see `whole_pages`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm100", "sm103"}),
        packages=("torch>=2.9", "flashinfer-python>=0.7.4"),
        dtypes=frozenset({"bfloat16", "float16"}),
        mla_dims=frozenset({(512, 64)}),
        group_sizes=ints(128),
        page_sizes=ints(1, 2, 4, 8, 16, 32, 64, 128),
        preferred_page_size=64,
        layouts=KV_LAYOUTS,  # of one KV head, so that both are the same bytes
        phases=frozenset({"decode"}),
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=75,
        contract_tested_on=frozenset({"sm100", "sm103"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=platform.torch_device)
        factor = spec.scale / _BUILT_IN_SCALE
        self._q_factor = None if math.isclose(factor, 1.0, rel_tol=1e-6) else factor

    def plan(self, batch: Batch) -> _Plan:
        return self._planned(batch, WholePages(batch, None, _TILE))

    def init_graph(self, batch: Batch) -> _Plan:
        return self._planned(batch, WholePages(batch, None, _TILE, for_graph=True))

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        plan.pages.refresh(batch)

    def _planned(self, batch: Batch, pages: WholePages) -> _Plan:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="cutlass")
        metadata = flashinfer.mla.MLAPlanMetadata.dense(
            cum_seq_lens_q=torch.arange(batch.num_seqs + 1, dtype=torch.int32),
            block_tables=pages.block_table,
            seq_lens=torch.from_numpy(batch.host.kv_lens.astype(np.int32)),
        )
        wrapper.plan(
            metadata=metadata,
            num_heads=self.spec.num_qo_heads,
            head_dim_ckv=self.spec.vo_head_dim,
            head_dim_kpe=self.spec.head_dim - self.spec.vo_head_dim,
            page_size=batch.page_size,
            causal=True,
            sm_scale=_BUILT_IN_SCALE,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return _Plan(wrapper=wrapper, pages=pages)

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
        plan.wrapper.run(
            query=q if self._q_factor is None else q * self._q_factor,
            kv_cache=kv.nhd()[0].squeeze(2),
            out=out,
            kv_len=plan.pages.kv_lens,
            page_table=plan.pages.block_table,
        )
        return None
