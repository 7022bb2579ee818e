"""MLX's fast attention on Apple silicon, over pages that torch gathers.

torch and MLX share Apple's one memory: tensors of MPS become arrays of MLX by DLPack, and results tensors, without a
copy. Each has a queue of its own, so that torch's work is waited for before MLX begins, and MLX's before torch goes on:
twice for each layer, and once more for every further 256 MiB of keys and values. On the CPU, where MLX runs too, it
copies what it imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.window import csr_within_window
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, DTYPE_BYTES, KV_LAYOUTS, PHASES

if TYPE_CHECKING:
    import mlx.core as mx
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.indices import Int32s, Int64s
else:
    mx = lazy_import("mlx.core")
    torch = lazy_import("torch")

_GATHERED_BYTES = 256 << 20  # of keys and values at a time
_SCORE_ELEMENTS = 1 << 26
"""Of one call: where MLX has no fused kernel, it keeps the scores."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """One sequence's new tokens, and its keys among those that are gathered.

    first: its first key. num_keys, num_queries: without the pages behind its window. tree_mask: [num_queries,
    num_queries], bool.
    """

    first: int
    num_keys: int
    num_queries: int
    tree_mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Sequences that follow each other. pages: [num_pages], int32, of all of them. rows: their tokens in q and out."""

    pages: torch.Tensor
    rows: slice
    sequences: list[_Sequence]


class MLXBackend(AttentionBackend):
    """`mx.fast.scaled_dot_product_attention`, one sequence at a time."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"apple"}),
        packages=("torch>=2.9", "mlx>=0.32.4"),
        extra="apple",
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        any_head_dim_pair=True,
        any_mla_dims=True,
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset(PHASES),
        causal=frozenset({True, False}),
        sliding_window=True,
        sinks=True,
        tree_mask=True,
        deterministic=True,
        priority=20,
        contract_tested_on=frozenset({"apple"}),
        contract_tested_with="mlx 0.32.4",
    )

    def plan(self, batch: Batch) -> list[_Group]:
        spec = self.spec
        kv_indptr, pages, kv_lens = csr_within_window(batch, spec.sliding_window)
        elements = spec.head_dim if spec.is_mla else spec.num_kv_heads * (spec.head_dim + spec.vo_head_dim)
        most_pages = _GATHERED_BYTES // (elements * batch.page_size * DTYPE_BYTES[spec.storage_dtype])
        groups, first = [], 0
        for i in range(1, batch.num_seqs + 1):
            if i == batch.num_seqs or kv_indptr[i + 1] - kv_indptr[first] > most_pages:
                groups.append(self._group(batch, range(first, i), kv_indptr, pages, kv_lens))
                first = i
        return [group for group in groups if group.sequences]

    def _group(
        self, batch: Batch, members: range, kv_indptr: Int32s, pages: torch.Tensor, kv_lens: Int64s
    ) -> _Group:
        """Of the sequences `members`. kv_indptr, pages, kv_lens: from `csr_within_window`."""
        start, host, masks = int(kv_indptr[members.start]), batch.host, batch.tree_masks
        sequences = [
            _Sequence(
                first=(int(kv_indptr[i]) - start) * batch.page_size,
                num_keys=int(kv_lens[i]),
                num_queries=int(host.qo_lens[i]),
                tree_mask=None if masks is None else masks[i],
            )
            for i in members
            if host.qo_lens[i]
        ]
        rows = slice(int(host.qo_indptr[members.start]), int(host.qo_indptr[members.stop]))
        return _Group(pages=pages[start : int(kv_indptr[members.stop])], rows=rows, sequences=sequences)

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        k_pages, v_pages = kv.nhd()
        groups: list[_Group] = plan
        for group in groups:
            k = k_pages.index_select(0, group.pages).flatten(0, 1)
            v = k if self.spec.is_mla else v_pages.index_select(0, group.pages).flatten(0, 1)
            given = [q[group.rows], k, v, *([] if sinks is None else [sinks])]
            if sinks is not None and sinks.dtype != q.dtype:  # MLX takes no sinks that it would have to round
                given = [each.float() for each in given]
            if q.device.type == "mps":
                torch.mps.synchronize()
            imported = [mx.from_dlpack(each) for each in given]
            results = mx.concatenate([*self._attended(group, *imported)])
            mx.eval(results)
            out[group.rows] = torch.utils.dlpack.from_dlpack(results)

    def _attended(self, group: _Group, q: mx.array, k: mx.array, v: mx.array, *sinks: mx.array) -> Iterator[mx.array]:
        """Of some of a sequence's new tokens, one after the other: [num_queries, num_qo_heads, vo_head_dim]."""
        spec, row = self.spec, 0
        v = v[..., : spec.vo_head_dim]
        for sequence in group.sequences:
            step = max(_SCORE_ELEMENTS // (spec.num_qo_heads * sequence.num_keys), 1)
            for start in range(0, sequence.num_queries, step):
                stop = min(start + step, sequence.num_queries)
                keys, mask = self._seen(sequence, start, stop)
                result = mx.fast.scaled_dot_product_attention(
                    _heads_first(q[row + start : row + stop]),
                    _heads_first(k[sequence.first + keys.start : sequence.first + keys.stop]),
                    _heads_first(v[sequence.first + keys.start : sequence.first + keys.stop]),
                    scale=spec.scale,
                    mask=mask,
                    sinks=sinks[0] if sinks else None,
                )
                if sequence.tree_mask is not None and isinstance(mask, mx.array):  # its rows may see nothing
                    result = mx.where(mask.any(axis=-1, keepdims=True), result, 0)
                yield result[0].transpose(1, 0, 2)
            row += sequence.num_queries

    def _seen(self, sequence: _Sequence, start: int, stop: int) -> tuple[range, mx.array | str | None]:
        """The keys that new tokens `start` to `stop` see between them, and which of them each sees."""
        window, prefix = self.spec.sliding_window, sequence.num_keys - sequence.num_queries
        if sequence.tree_mask is not None:
            mask = mx.from_dlpack(sequence.tree_mask[start:stop].view(torch.uint8)) != 0
            return range(sequence.num_keys), mx.pad(mask, [(0, 0), (prefix, 0)], constant_values=True)
        if not self.spec.causal:
            return range(sequence.num_keys), None
        first = 0 if window is None else max(prefix + start + 1 - window, 0)
        keys = range(first, prefix + stop)
        if stop - start == 1:
            return keys, None
        if window is None:
            return keys, "causal"  # aligned with the last key
        key, query = mx.arange(len(keys)), mx.arange(stop - start)[:, None] + (prefix + start - first)
        return keys, (key <= query) & (key > query - window)


def _heads_first(x: mx.array) -> mx.array:
    """[num_tokens, num_heads, dim] as [1, num_heads, num_tokens, dim]."""
    return x.transpose(1, 0, 2)[None]
