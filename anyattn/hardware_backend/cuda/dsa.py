"""Sparse MLA on Hopper: FlashMLA's sparse decode over the fp8 rows of a DSAPool, for decode and prompts alike.

Every new token is a sequence of its own to it, as each has its own keys. Its metadata say how rows and keys are divided
among multiprocessors, and depend on shapes alone (flash_mla_interface.py: reused "only when the tensor shapes and the
values of topk_length and extra_topk_length remain the same", neither of which is passed here).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda import flashmla_providers
from anyattn.lazy import lazy_import
from anyattn.types import GraphLevel, IntSet, ints

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")

_HEADS = (64, 128)
"""Numbers of heads that the kernel is compiled for; others are filled up to one of these."""

_MOST_ROWS = 2048
"""Of one call. Its metadata are computed in shared memory, of which more rows take more than every launch is given."""

_ALIGNMENT_BYTES = 16  # of what the tensor memory accelerator reads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """calls: the tokens of each, from the first to behind the last, and metadata, which those of one size share."""

    calls: tuple[tuple[int, int, Any], ...]


class DSABackend(AttentionBackend):
    """Whole steps of any kind, over pages of 64 tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        packages=("torch>=2.9", "module:flash_mla | module:vllm.third_party.flashmla.flash_mla_interface"),
        extra="flashmla",
        dtypes=frozenset({"bfloat16"}),
        topk=IntSet(multiple_of=64),
        group_sizes=IntSet(maximum=_HEADS[-1]),
        page_sizes=ints(64),
        layouts=("NHD",),
        phases=frozenset({"prefill", "mixed", "decode"}),
        sinks=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
        priority=80,
        run_on=frozenset({"sm90"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._provider = flashmla_providers.find_sparse_provider()
        self._num_heads = next(heads for heads in _HEADS if spec.num_qo_heads <= heads)

    def plan(self, batch: Batch) -> _Plan:
        ends = [*range(_MOST_ROWS, batch.num_tokens, _MOST_ROWS), batch.num_tokens]
        starts = [0, *ends[:-1]]
        metadata = {end - start: self._provider.new_sparse_metadata() for start, end in zip(starts, ends, strict=True)}
        return _Plan(calls=tuple((start, end, metadata[end - start]) for start, end in zip(starts, ends, strict=True)))

    def init_graph(self, batch: Batch) -> _Plan:
        """With metadata that are there before the capture: what is computed within one, other graphs do not have."""
        plan, device = self.plan(batch), batch.block_table.device
        with torch.inference_mode(False):  # steps may come outside of inference mode
            page = torch.zeros(1, *self.cache.page_shapes()[0], dtype=torch.uint8, device=device)
            for num_rows, metadata in {end - start: metadata for start, end, metadata in plan.calls}.items():
                q = torch.zeros(num_rows, self._num_heads, self.spec.head_dim, dtype=torch.bfloat16, device=device)
                slots = torch.full((num_rows, self.spec.topk or 0), -1, dtype=torch.int32, device=device)
                self._decode(q, page, slots, metadata, None)
        return plan

    def refresh_graph(self, plan: _Plan, batch: Batch) -> None:
        """The slots are an argument of `run`, made within the graph from the batch's tensors."""

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        assert indices is not None  # as it serves nothing but sparse attention
        heads, q = q.shape[1], self._filled_up(q)
        if sinks is not None:
            sinks = torch.nn.functional.pad(sinks.float(), (0, self._num_heads - heads))
        lses = []
        for start, end, metadata in plan.calls:
            result, lse = self._decode(q[start:end], kv.k, indices[start:end], metadata, sinks)
            out[start:end] = result[:, 0, :heads]
            lses.append(lse[:, :heads, 0])
        if not self.spec.return_lse:
            return None
        # +inf for a row that sees nothing
        return torch.cat(lses).nan_to_num(nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, slots: torch.Tensor, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._provider.decode_sparse(
            q.unsqueeze(1), k_cache, slots.unsqueeze(1), metadata, softmax_scale=self.spec.scale, attn_sink=sinks
        )

    def _filled_up(self, q: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 64 or 128, 576], contiguous and aligned; heads of zeros behind the others."""
        if q.shape[1] == self._num_heads and q.is_contiguous() and q.data_ptr() % _ALIGNMENT_BYTES == 0:
            return q
        filled = q.new_zeros(q.shape[0], self._num_heads, q.shape[2])
        filled[:, : q.shape[1]] = q
        return filled
