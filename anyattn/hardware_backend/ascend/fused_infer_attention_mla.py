"""torch-npu's fused infer attention, second version, for MLA on Atlas A2 and A3: latents and rope parts in layout NZ.

A call takes 1 to 16 new tokens of a sequence. Longer prompts are divided: 16 tokens and the keys up to the last of them
are to the operator a sequence of its own, whose pages are those of the whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.errors import ContractError
from anyattn.hardware_backend.ascend.fused_infer import (
    MOST_SEQS,
    V2,
    Call,
    GraphTasks,
    Plan,
    graph_kv_lens,
    require_addressable,
)
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import token_positions
from anyattn.types import GraphLevel, ints

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
_MOST_QO_LEN = 16


class FusedInferAttentionMLABackend(AttentionBackend):
    """Absorbed MLA in every phase. Layout NZ wants pages of 128 tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=_ARCHS,
        packages=("torch>=2.9", "torch-npu>=2.9"),
        extra="ascend",
        dtypes=frozenset({"bfloat16", "float16"}),
        mla_dims=frozenset({(512, 64)}),
        group_sizes=ints(1, 2, 4, 8, 16, 32, 64, 128),
        page_sizes=ints(128),
        layouts=("NZ",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        decode_qo_len=_MOST_QO_LEN,
        lse=True,
        graph=GraphLevel.UNIFORM,
        allocates_out=True,
        needs_finite_tails=True,
        priority=60,
        contract_tested_on=_ARCHS,
        contract_tested_with="torch-npu 2.14.0",
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._rank = spec.vo_head_dim
        self._views = LayerViews(_latents_and_rope)
        self._fixed = {
            V2.num_qo_heads: spec.num_qo_heads,
            "num_key_value_heads": 1,
            V2.scale: spec.scale,
            "block_size": cache.page_size,
            V2.return_lse: spec.return_lse,
            "input_layout": "TND",
        }

    def plan(self, batch: Batch) -> Plan:
        return Plan(calls=list(self._calls(batch)), num_tokens=batch.num_tokens)

    def _calls(self, batch: Batch) -> Iterator[Call]:
        """Of pieces of 1 to 16 new tokens."""
        host, table = batch.host, batch.block_table
        qo_lens, kv_lens = host.qo_lens, host.kv_lens
        if batch.max_qo_len > _MOST_QO_LEN or not qo_lens.all():
            owner, number = token_positions(np.zeros_like(qo_lens), -(-qo_lens // _MOST_QO_LEN))
            end = np.minimum((number + 1) * _MOST_QO_LEN, qo_lens[owner])
            qo_lens, kv_lens = end - number * _MOST_QO_LEN, host.prefix_lens[owner] + end
            (rows,) = to_device([owner], table.device, wide=1)
            table = table.index_select(0, rows)
        ends = np.cumsum(qo_lens)
        for first in range(0, qo_lens.size, MOST_SEQS):
            each = qo_lens[first : first + MOST_SEQS]
            stop, begin = first + each.size, int(ends[first] - each[0])
            yield Call(
                rows=slice(begin, int(ends[stop - 1])),
                block_table=table[first:stop],
                q_lens=(ends[first:stop] - begin).tolist(),
                kv_lens=kv_lens[first:stop].tolist(),
                qo_len=None,
                masked=int(each.max()) > 1,
            )

    def init_graph(self, batch: Batch) -> Plan:
        each = batch.max_qo_len
        if each > _MOST_QO_LEN:
            raise ContractError(
                f"a graph of MLA on Ascend serves up to {_MOST_QO_LEN} new tokens for each sequence, not {each}: "
                "capture one for fewer."
            )
        call = Call(
            rows=slice(0, batch.num_tokens),
            block_table=batch.block_table,
            q_lens=list(range(each, batch.num_tokens + 1, each)),
            kv_lens=graph_kv_lens([0] * batch.num_seqs, each),
            qo_len=each,
            masked=each > 1,
        )
        tasks = GraphTasks(operator=V2, device=batch.block_table.device)
        return Plan(calls=[call], num_tokens=batch.num_tokens, tasks=tasks)

    def refresh_graph(self, plan: Any, batch: Batch) -> None:
        (call,) = plan.calls
        call.kv_lens[:] = graph_kv_lens(batch.host.kv_lens.tolist(), call.qo_len)
        plan.tasks.update(list(call.kv_lens))

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
        latents, rope = self._views.of(kv)
        results, lses = [], []
        for call in plan.calls:
            query, query_rope = q[call.rows].split_with_sizes([self._rank, q.shape[2] - self._rank], dim=2)
            arguments = {
                "query": query.contiguous(),
                "key": latents,
                "value": latents,
                "query_rope": query_rope.contiguous(),
                "key_rope": rope,
                **self._fixed,
                **call.arguments(V2, q),
            }
            if plan.tasks is not None:
                shapes = (list(query.shape), [*query.shape[:2], 1] if self.spec.return_lse else [1])
                result, lse = plan.tasks.run(kv, arguments, shapes)
            else:
                result, lse = V2(arguments)
            results.append(result)
            lses.append(lse)
        result = results[0] if len(results) == 1 else torch.cat(results)
        if not self.spec.return_lse:
            return result, None
        return result, (lses[0] if len(lses) == 1 else torch.cat(lses)).squeeze(2)


def _latents_and_rope(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_pages, 1, dim / 16, page_size, 16] each."""
    require_addressable(kv)
    assert kv.rope is not None  # in layout NZ
    return kv.k, kv.rope
