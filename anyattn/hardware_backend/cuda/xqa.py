"""TensorRT-LLM's XQA kernels for decode, which FlashInfer compiles at their first use.

What is declared was read in the sources of flashinfer-python 0.6.13, which 0.7.4 calls alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.whole_pages import WholePages
from anyattn.lazy import lazy_import
from anyattn.types import KV_LAYOUTS, GraphLevel, IntSet, Load, Role, ints

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

_WORKSPACE_BYTES = 128 << 20  # of which the first 8 MiB are counters


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """Where there is no other kernel of its kind, before FlashInfer's generic ones only on consumer Blackwell."""
    return 60 if platform.arch in ("sm120", "sm121") else 40


class XQABackend(AttentionBackend):
    """Decode of one token each, on the generic kernel but for fp8 on Hopper, which has one of its own.

    The generic kernel fills what lies behind a sequence's end with zeros. Hopper's reads whole pages, and computes in
    fp8, so that it rounds q and the softmax's numerators. Both have one scale for keys and values, the values'; the
    rest of the keys' goes into q's.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90", "sm100", "sm103", "sm120", "sm121"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        quantizes_q=True,
        quantizes_probs=True,
        head_dims=ints(64, 128, 256),
        group_sizes=IntSet(maximum=16),
        page_sizes=ints(16, 32, 64, 128),
        preferred_page_size=64,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"decode"}),
        sliding_window=True,
        sinks=True,
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=_priority,
        run_on=frozenset({"sm90"}),
        contract_tested_on=frozenset({"sm100", "sm103", "sm120", "sm121"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        # Its counters must be 0 at first; each launch leaves them so.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=platform.torch_device)

    def plan(self, batch: Batch) -> WholePages:
        return WholePages(batch, self.spec.sliding_window, batch.page_size)

    def init_graph(self, batch: Batch) -> WholePages:
        return WholePages(batch, self.spec.sliding_window, batch.page_size, for_graph=True)

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
        spec = self.spec
        flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query=q,
            kv_cache=(kv.k, kv.v),
            workspace_buffer=self._workspace,
            block_tables=plan.block_table,
            seq_lens=plan.kv_lens.view(torch.uint32),
            max_seq_len=plan.max_kv_len,
            bmm1_scale=kv.k_scale * spec.scale,
            bmm2_scale=kv.v_scale,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            out=out,
            sinks=None if sinks is None else sinks.float(),
            kv_layout=self.cache.layout,
        )
        return None
