"""FlashMLA's dense MLA decode on Hopper, for one or several new tokens of each sequence.

Its kernels divide a batch's keys among the multiprocessors by metadata that are right for one step's lengths, and give
whatever they like with those of another. How metadata are made is the providers'; when, is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.hardware_backend.cuda import flashmla_providers
from anyattn.lazy import lazy_import
from anyattn.types import KV_LAYOUTS, GraphLevel, IntSet, ints

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.hardware_backend.cuda.flashmla_providers import Provider
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")

_ALIGNMENT_BYTES = 16  # of what the tensor memory accelerator reads and writes


@dataclass(eq=False, kw_only=True)
class _Plan:
    """One step, whose lengths stay what they are: all its layers share the metadata.

    block_table: [num_seqs, max_pages], int32. kv_lens: [num_seqs], int32. qo_len: new tokens of each sequence.
    metadata: as `Provider.new_metadata` makes it.
    """

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    qo_len: int
    metadata: Any

    def metadata_of(self, layer: int) -> Any:
        """What a layer runs with. layer: the address of its pages."""
        return self.metadata


@dataclass(eq=False, kw_only=True)
class _SelfFillingGraph(_Plan):
    """A graph's steps, with metadata that each replay computes from the lengths that it finds.

    What a call computes is in the graph only where that call is captured: metadata that a run before the capture has
    filled would serve every replay as they are. Hence every run of the layers begins with new ones. The layer that ran
    first with this plan leads, and the others follow, but not with metadata of before the capture, or of after it.

    Padding has length 0: its rows become 0, the first page of its table is read and not used.

    leader: the layer that leads. is_stale: whether the step has changed since the metadata were made. in_graphs: all
        metadata that graphs read, as another graph of the same memory pool would otherwise be given their memory.
    """

    leader: int | None = None
    is_stale: bool = True
    is_captured: bool = False
    in_graphs: list[Any] = field(default_factory=list)
    provider: Provider
    num_rows: int

    def metadata_of(self, layer: int) -> Any:
        is_captured = torch.cuda.is_current_stream_capturing()
        self.leader = layer if self.leader is None else self.leader
        if layer == self.leader or self.is_stale or is_captured != self.is_captured:
            self.metadata = self.provider.new_metadata(self.kv_lens, self.num_rows)
            self.is_stale, self.is_captured = False, is_captured
            if is_captured:
                self.in_graphs.append(self.metadata)
        return self.metadata


class FlashMLABackend(AttentionBackend):
    """Decode over pages of 64 tokens, and verification of speculated chains, as many tokens for each sequence."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        packages=("torch>=2.9", "module:flash_mla | module:vllm.third_party.flashmla.flash_mla_interface"),
        extra="flashmla",
        dtypes=frozenset({"bfloat16", "float16"}),
        mla_dims=frozenset({(512, 64)}),
        group_sizes=IntSet(maximum=128),
        page_sizes=ints(64),
        layouts=KV_LAYOUTS,  # of one KV head, so that both are the same bytes
        strided_pages=True,
        phases=frozenset({"decode"}),
        decode_qo_len=8,
        causal=frozenset({True, False}),
        lse=True,
        allocates_out=True,
        graph=GraphLevel.UNIFORM,
        priority=60,  # as measured on an H200: level with FlashInfer where much is computed, behind elsewhere
        run_on=frozenset({"sm90"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._provider = flashmla_providers.find_provider()
        self._fixed = {"head_dim_v": spec.vo_head_dim, "softmax_scale": spec.scale, "causal": spec.causal}
        self._vo_head_dim, self._returns_lse = spec.vo_head_dim, spec.return_lse
        self._views = LayerViews(lambda kv: kv.nhd()[0])

    def plan(self, batch: Batch) -> _Plan:
        metadata = self._provider.new_metadata(batch.kv_lens, self._num_rows(batch))
        return _Plan(block_table=batch.block_table, kv_lens=batch.kv_lens, qo_len=batch.max_qo_len, metadata=metadata)

    def init_graph(self, batch: Batch) -> _Plan:
        table, qo_len, num_rows = batch.block_table, batch.max_qo_len, self._num_rows(batch)
        if not self._provider.precomputes:
            return _SelfFillingGraph(
                block_table=table, kv_lens=batch.kv_lens, qo_len=qo_len, metadata=None, provider=self._provider,
                num_rows=num_rows,
            )  # fmt: skip
        # Older kernels read what lies in front of the page table where a sequence has length 0, as padding has. With
        # length 1 they read the null page, which reaches rows of padding alone.
        with torch.inference_mode(False):  # steps may come outside of inference mode
            kv_lens = batch.kv_lens.clamp(min=1)
            metadata = self._provider.new_metadata(kv_lens, num_rows)
        return _Plan(block_table=table, kv_lens=kv_lens, qo_len=qo_len, metadata=metadata)

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        if isinstance(plan, _SelfFillingGraph):
            plan.is_stale = True
            return
        torch.clamp(batch.kv_lens, min=1, out=plan.kv_lens)
        metadata = self._provider.new_metadata(plan.kv_lens, self._num_rows(batch))
        for kept, now in zip(plan.metadata, metadata, strict=True):
            kept.copy_(now)

    def _num_rows(self, batch: Batch) -> int:
        """Rows of one sequence, which the kernels divide into blocks of 64."""
        return batch.max_qo_len * self.spec.num_qo_heads

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: None,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_tokens, num_heads, head_dim = q.shape
        if not _is_aligned(q):
            q = q.clone(memory_format=torch.contiguous_format)
        result, lse = self._provider.decode(
            q.view(-1, plan.qo_len, num_heads, head_dim),
            plan.metadata_of(kv.k.data_ptr()),
            k_cache=self._views.of(kv),
            block_table=plan.block_table,
            cache_seqlens=plan.kv_lens,
            **self._fixed,
        )
        result = result.view(num_tokens, num_heads, self._vo_head_dim)
        if not self._returns_lse:
            return result, None
        # [num_seqs, num_qo_heads, qo_len], and +inf for a row that sees nothing
        lse = lse.transpose(1, 2).flatten(0, 1)
        return result, lse.nan_to_num(nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row of [num_tokens, num_qo_heads, head_dim] begins at such an address."""
    token, head, _ = x.stride()
    return not (x.data_ptr() | (token | head) * x.element_size()) % _ALIGNMENT_BYTES
