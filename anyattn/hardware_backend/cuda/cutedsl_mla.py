"""FlashInfer's MLA decode in the CuTe DSL, for Blackwell's data centre GPUs.

What is declared was read in flashinfer-python 0.6.13 and 0.7.4, where it is a backend of the function that has
TensorRT-LLM's kernels too. It compiles at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.whole_pages import WholePages
from anyattn.lazy import lazy_import
from anyattn.types import KV_LAYOUTS, GraphLevel, IntSet, ints

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

_WORKSPACE_BYTES = 128 << 20  # more than any batch takes, by the function's documentation
_TILE = 128  # tokens: the rows of the page table must hold whole tiles


class CuteDSLMLABackend(AttentionBackend):
    """Decode of one or several tokens each, bfloat16 throughout.

    Masked keys get a score of -1e6 and their values are multiplied by what that leaves, 0: see `whole_pages`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm100", "sm103"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16"}),  # fp8 would take scales as floats only
        mla_dims=frozenset({(512, 64)}),
        group_sizes=IntSet(maximum=128),
        page_sizes=ints(2, 4, 8, 16, 32, 64, 128),
        preferred_page_size=64,
        layouts=KV_LAYOUTS,  # of one KV head, so that both are the same bytes
        phases=frozenset({"decode"}),
        decode_qo_len=8,
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=80,
        contract_tested_on=frozenset({"sm100", "sm103"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=platform.torch_device)

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
        result = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
            query=q.view(num_seqs, -1, *q.shape[1:]),
            kv_cache=kv.nhd()[0].squeeze(2),
            workspace_buffer=self._workspace,
            qk_nope_head_dim=128,  # asked for and not used
            kv_lora_rank=spec.vo_head_dim,
            qk_rope_head_dim=spec.head_dim - spec.vo_head_dim,
            block_tables=plan.block_table,
            seq_lens=plan.kv_lens,
            max_seq_len=plan.max_kv_len,
            out=out.view(num_seqs, -1, *out.shape[1:]),
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            backend="cute-dsl",
            return_lse=spec.return_lse,
        )
        return result[1] if spec.return_lse else None  # natural log, where TensorRT-LLM's is in base 2
