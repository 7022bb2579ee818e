"""torch-npu's fused infer attention for heads of keys and values: prompts, their chunks and decode, on Atlas A2 and A3.

The first version takes sequences with as many new tokens each in one call (its layout BSND), heads of any size; the
second one all sequences of a step in one (TND), heads of 128 in bfloat16. What each takes is from torch-npu's own
documentation; where that contradicts itself, docs/ascend.md says which sentence holds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.sinks import join_sinks
from anyattn.errors import ContractError
from anyattn.hardware_backend.ascend.fused_infer import (
    MOST_SEQS,
    V1,
    V2,
    Call,
    GraphTasks,
    Operator,
    Plan,
    graph_kv_lens,
    paged_views,
    require_heads,
)
from anyattn.lazy import lazy_import
from anyattn.types import GraphLevel, IntSet, ints

if TYPE_CHECKING:
    from collections.abc import Iterator

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

_ARCHS = frozenset({"ascend910b", "ascend910_93"})
_PAGE_SIZES = ints(128, 256, 384, 512)
_GROUP_SIZES = IntSet(maximum=64)
_MOST_ROW = 65534  # elements of one token's heads, in layout BSND
_MOST_DECODE_KEYS = 262144


class _FusedInfer(AttentionBackend):
    """What both versions share. A sink joins the output by the LSE."""

    operator: ClassVar[Operator]

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        require_heads(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
        self._wants_lse = spec.return_lse or spec.sinks
        self._views = paged_views()
        self._fixed: dict[str, Any] = {
            self.operator.num_qo_heads: spec.num_qo_heads,
            "num_key_value_heads": spec.num_kv_heads,
            self.operator.scale: spec.scale,
            "block_size": cache.page_size,
            self.operator.return_lse: self._wants_lse,
        }

    def plan(self, batch: Batch) -> Plan:
        return Plan(calls=list(self._calls(batch)), num_tokens=batch.num_tokens)

    def _calls(self, batch: Batch) -> Iterator[Call]:
        raise NotImplementedError

    def init_graph(self, batch: Batch) -> Plan:
        each = batch.max_qo_len
        call = Call(
            rows=slice(0, batch.num_tokens),
            block_table=batch.block_table,
            q_lens=self._q_lens([each] * batch.num_seqs),
            kv_lens=graph_kv_lens([0] * batch.num_seqs, each),
            qo_len=each,
            masked=self.spec.causal and each > 1,
        )
        tasks = GraphTasks(operator=self.operator, device=batch.block_table.device)
        return Plan(calls=[call], num_tokens=batch.num_tokens, tasks=tasks)

    def refresh_graph(self, plan: Any, batch: Batch) -> None:
        (call,) = plan.calls
        call.kv_lens[:] = graph_kv_lens(batch.host.kv_lens.tolist(), call.qo_len)
        plan.tasks.update(list(call.kv_lens))

    def _q_lens(self, qo_lens: list[int]) -> list[int]:
        """As the operator wants them."""
        raise NotImplementedError

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
        k, v = self._views.of(kv)
        results = []
        for call in plan.calls:
            query, lse_shape = self._query(q[call.rows], call)
            arguments = {"query": query, "key": k, "value": v, **self._fixed, **call.arguments(self.operator, q)}
            if plan.tasks is not None:
                shapes = (list(query.shape), lse_shape if self._wants_lse else [1])
                result, lse = plan.tasks.run(kv, arguments, shapes)
            else:
                result, lse = self.operator(arguments)
            results.append((result.view(-1, *q.shape[1:]), self._by_token(lse) if self._wants_lse else None))
        result, lse = results[0] if len(results) == 1 else _joined(results)
        if sinks is not None and lse is not None:
            join_sinks(result, lse, sinks)
        return result, lse if self.spec.return_lse else None

    def _query(self, q: torch.Tensor, call: Call) -> tuple[torch.Tensor, list[int]]:
        """Tokens [num_tokens, num_qo_heads, head_dim] as the operator wants them, and the shape of their LSE."""
        raise NotImplementedError

    def _by_token(self, lse: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_qo_heads]."""
        raise NotImplementedError


def _joined(results: list[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([result for result, _ in results]), torch.cat(lses) if lses else None


class FusedInferAttentionBackend(_FusedInfer):
    """The first version: a call for each run of neighbours with as many new tokens, which decode is one of.

    For one new token it is documented to disregard windows; so none is declared.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=_ARCHS,
        packages=("torch>=2.9", "torch-npu>=2.9"),
        extra="ascend",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=IntSet(multiple_of=16, maximum=512),
        group_sizes=_GROUP_SIZES,
        page_sizes=_PAGE_SIZES,
        preferred_page_size=128,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sinks=True,
        lse=True,
        graph=GraphLevel.DECODE,
        contiguous_q=True,
        allocates_out=True,
        needs_finite_tails=True,
        priority=50,
        contract_tested_on=_ARCHS,
        contract_tested_with="torch-npu 2.14.0",
    )
    operator = V1

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        if spec.num_qo_heads * spec.head_dim > _MOST_ROW:
            raise ContractError(
                f"fused infer attention takes up to {_MOST_ROW} elements of a token's query heads, not "
                f"{spec.num_qo_heads} heads of {spec.head_dim}: divide the heads among more devices."
            )
        self._fixed["input_layout"] = "BSND"

    def _calls(self, batch: Batch) -> Iterator[Call]:
        host, qo_lens = batch.host, batch.host.qo_lens
        if batch.max_qo_len == 1:
            _require_decode_keys(batch.max_kv_len)
        bounds = [0, *(np.flatnonzero(np.diff(qo_lens)) + 1).tolist(), batch.num_seqs]
        for first, stop in itertools.pairwise(bounds):
            each = int(qo_lens[first])
            if each:
                yield Call(
                    rows=slice(int(host.qo_indptr[first]), int(host.qo_indptr[stop])),
                    block_table=batch.block_table[first:stop],
                    q_lens=[each] * (stop - first),
                    kv_lens=host.kv_lens[first:stop].tolist(),
                    qo_len=each,
                    masked=self.spec.causal and each > 1,
                )

    def _q_lens(self, qo_lens: list[int]) -> list[int]:
        return qo_lens

    def _query(self, q: torch.Tensor, call: Call) -> tuple[torch.Tensor, list[int]]:
        num_seqs = len(call.kv_lens)
        query = q.view(num_seqs, -1, *q.shape[1:])
        return query, [num_seqs, q.shape[1], query.shape[1], 1]

    def _by_token(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.squeeze(3).transpose(1, 2).flatten(0, 1)


class FusedInferAttentionV2Backend(_FusedInfer):
    """The second version: all sequences of a step in one call, whatever their lengths."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=_ARCHS,
        packages=("torch>=2.9", "torch-npu>=2.9"),
        extra="ascend",
        dtypes=frozenset({"bfloat16"}),
        head_dims=ints(128),
        group_sizes=_GROUP_SIZES,
        page_sizes=_PAGE_SIZES,
        preferred_page_size=128,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        decode_qo_len=16,
        causal=frozenset({True, False}),
        sinks=True,
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        allocates_out=True,
        needs_finite_tails=True,
        priority=60,
        contract_tested_on=_ARCHS,
        contract_tested_with="torch-npu 2.14.0",
    )
    operator = V2

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._fixed["input_layout"] = "TND"

    def _calls(self, batch: Batch) -> Iterator[Call]:
        host = batch.host
        if batch.max_qo_len == 1:
            _require_decode_keys(batch.max_kv_len)
        for first in range(0, batch.num_seqs, MOST_SEQS):
            stop = min(first + MOST_SEQS, batch.num_seqs)
            qo_lens = host.qo_lens[first:stop]
            if qo_lens.any():
                yield Call(
                    rows=slice(int(host.qo_indptr[first]), int(host.qo_indptr[stop])),
                    block_table=batch.block_table[first:stop],
                    q_lens=self._q_lens(qo_lens.tolist()),
                    kv_lens=host.kv_lens[first:stop].tolist(),
                    qo_len=None,
                    masked=self.spec.causal and batch.max_qo_len > 1,
                )

    def _q_lens(self, qo_lens: list[int]) -> list[int]:
        """Where each sequence's tokens end."""
        ends: list[int] = np.cumsum(qo_lens).tolist()
        return ends

    def _query(self, q: torch.Tensor, call: Call) -> tuple[torch.Tensor, list[int]]:
        return q, [*q.shape[:2], 1]

    def _by_token(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.squeeze(2)


def _require_decode_keys(max_kv_len: int) -> None:
    if max_kv_len > _MOST_DECODE_KEYS:
        raise ContractError(
            f"fused infer attention decodes sequences of up to {_MOST_DECODE_KEYS} tokens, and one has {max_kv_len}: "
            "decode them with another backend."
        )
