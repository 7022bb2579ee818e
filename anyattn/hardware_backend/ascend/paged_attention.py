"""torch-npu's `_npu_paged_attention` for the Ascend 310P, for which there is no fused infer attention; layout NZ.

The operator gives each row of the query the keys of a sequence of its own. So does every new token of a prompt get
here what it sees: its sequence's pages, up to its own position.

Sources: torch-npu 2.14.0 (op_plugin/atb/_atb_api_docs.py, `_npu_paged_attention_v2`, which passes the same operation);
CANN, "ATB", PagedAttentionOperation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import token_positions
from anyattn.types import IntSet

if TYPE_CHECKING:
    import torch
    import torch_npu

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")
    torch_npu = lazy_import("torch_npu")

_MOST_TOKENS = 2000
"""In one call; torch-npu's documentation has 2048, CANN's for the same operation 2000."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """rows: of q. block_table: [num_tokens, max_pages], int32. kv_lens: [num_tokens], int32, keys that each sees."""

    rows: slice
    block_table: torch.Tensor
    kv_lens: torch.Tensor


class NPUPagedAttentionBackend(AttentionBackend):
    """Every token by itself: made for decode, and slow for long prompts, each of whose tokens reads all keys anew."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=frozenset({"ascend310p"}),
        packages=("torch>=2.9", "torch-npu>=2.9"),
        extra="ascend",
        dtypes=frozenset({"float16"}),
        head_dims=IntSet(multiple_of=16, maximum=128),
        page_sizes=IntSet(multiple_of=16, maximum=128),
        preferred_page_size=128,
        layouts=("NZ",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        decode_qo_len=16,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=60,
        contract_tested_on=frozenset({"ascend310p"}),
        contract_tested_with="torch-npu 2.14.0",
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._views = LayerViews(_pieces_of_all_heads)

    def plan(self, batch: Batch) -> list[_Call]:
        table, kv_lens = batch.block_table, batch.kv_lens
        if batch.num_tokens != batch.num_seqs or batch.max_qo_len != 1:
            owner, position = token_positions(batch.host.prefix_lens, batch.host.kv_lens)
            kv_lens, rows = to_device([position + 1, owner], table.device, wide=1)
            table = table.index_select(0, rows)
        return [
            _Call(
                rows=slice(first, first + _MOST_TOKENS),
                block_table=table[first : first + _MOST_TOKENS],
                kv_lens=kv_lens[first : first + _MOST_TOKENS],
            )
            for first in range(0, batch.num_tokens, _MOST_TOKENS)
        ]

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
        k, v = self._views.of(kv)
        for call in plan:
            torch_npu._npu_paged_attention(
                query=q[call.rows],
                key_cache=k,
                value_cache=v,
                num_kv_heads=self.spec.num_kv_heads,
                num_heads=self.spec.num_qo_heads,
                scale_value=self.spec.scale,
                block_table=call.block_table,
                context_lens=call.kv_lens,
                out=out[call.rows],
            )


def _pieces_of_all_heads(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_pages, num_kv_heads * head_dim / 16, page_size, 16] each."""
    return kv.k.flatten(1, 2), kv.v.flatten(1, 2)
