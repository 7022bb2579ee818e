"""torch-npu's fused infer attention, second version, for MLA on Atlas A2 and A3: latents and rope parts in layout NZ.

A call takes 1 to 16 new tokens of a sequence. Longer prompts are divided: 16 tokens and the keys up to the last of them
are to the operator a sequence of its own, whose pages are those of the whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.capabilities import Capabilities
from anyattn.errors import ContractError
from anyattn.hardware_backend.ascend import SERVERS
from anyattn.hardware_backend.ascend.fused_infer import (
    MOST_SEQS,
    V2,
    Call,
    FusedInferBackend,
    Plan,
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
    from anyattn.mem_cache.base import LayerKV
else:
    np = lazy_import("numpy")

_MOST_QO_LEN = 16


class FusedInferAttentionMLABackend(FusedInferBackend):
    """Absorbed MLA in every phase. Layout NZ wants pages of 128 tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=SERVERS,
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
        not_together=(("graph", "return_lse"),),
        allocates_out=True,
        needs_finite_tails=True,
        priority=60,
        contract_tested_on=SERVERS,
        contract_tested_with="torch-npu 2.14.0",
    )

    operator = V2
    layout = "TND"

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
                max_qo_len=int(each.max()),
                mask=self._mask(batch, int(each.max())),
            )

    def init_graph(self, batch: Batch) -> Plan:
        each = batch.max_qo_len
        if each > _MOST_QO_LEN:
            raise ContractError(
                f"a graph of MLA on Ascend serves up to {_MOST_QO_LEN} new tokens for each sequence, not {each}: "
                "capture one for fewer."
            )
        return super().init_graph(batch)

    @staticmethod
    def _pages(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rope parts, [num_pages, 1, dim / 16, page_size, 16] each."""
        require_addressable(kv)
        assert kv.rope is not None  # in layout NZ
        return kv.k, kv.rope

    def _tensors(self, q: torch.Tensor, call: Call, pages: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        rank = self.spec.vo_head_dim
        query, query_rope = q.split_with_sizes([rank, q.shape[2] - rank], dim=2)
        rope = {"query_rope": query_rope.contiguous(), "key_rope": pages[1]}
        return {"query": query.contiguous(), "key": pages[0], "value": pages[0], **rope}
