"""torch-npu's fused infer attention for heads of keys and values: prompts, their chunks and decode, on Atlas A2 and A3.

The first version takes sequences with as many new tokens each in one call (its layout BSND), heads of any size; the
second one all sequences of a step in one (TND), heads of 128 in bfloat16. What each takes is from torch-npu's own
documentation; where that contradicts itself, docs/ascend.md says which sentence holds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.capabilities import Capabilities
from anyattn.errors import ContractError
from anyattn.hardware_backend.ascend import SERVERS
from anyattn.hardware_backend.ascend.fused_infer import MOST_SEQS, MOST_TOKENS, V1, V2, Call, FusedInferBackend
from anyattn.lazy import lazy_import
from anyattn.types import GraphLevel, IntSet, ints

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
else:
    np = lazy_import("numpy")

_PAGE_SIZES = ints(128, 256, 384, 512)
_GROUP_SIZES = IntSet(maximum=64)


class FusedInferAttentionBackend(FusedInferBackend):
    """The first version: a call for each run of neighbours with as many new tokens, which decode is one of.

    For one new token it is documented to disregard windows; so none is declared. The heads of a query's token may have
    65534 elements together in layout BSND: as many heads are declared as fit at any size.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=SERVERS,
        packages=("torch>=2.9", "torch-npu>=2.9"),
        extra="ascend",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=IntSet(multiple_of=16, maximum=512),
        num_qo_heads=IntSet(maximum=127),
        group_sizes=_GROUP_SIZES,
        page_sizes=_PAGE_SIZES,
        preferred_page_size=128,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sinks=True,
        lse=True,
        graph=GraphLevel.DECODE,
        not_together=(("graph", "sinks"), ("graph", "return_lse")),
        contiguous_q=True,
        allocates_out=True,
        needs_finite_tails=True,
        priority=50,
        contract_tested_on=SERVERS,
        contract_tested_with="torch-npu 2.14.0",
    )
    operator = V1
    layout = "BSND"

    def _calls(self, batch: Batch) -> Iterator[Call]:
        host, qo_lens = batch.host, batch.host.qo_lens
        bounds = [0, *(np.flatnonzero(np.diff(qo_lens)) + 1).tolist(), batch.num_seqs]
        for first, stop in itertools.pairwise(bounds):
            each = int(qo_lens[first])
            if each:
                yield Call(
                    rows=slice(int(host.qo_indptr[first]), int(host.qo_indptr[stop])),
                    block_table=batch.block_table[first:stop],
                    q_lens=[each] * (stop - first),
                    kv_lens=host.kv_lens[first:stop].tolist(),
                    max_qo_len=each,
                    mask=self._mask(batch, each),
                )

    def _q_lens(self, qo_lens: list[int]) -> list[int]:
        return qo_lens

    def _tensors(self, q: torch.Tensor, call: Call, pages: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        return super()._tensors(q.view(len(call.kv_lens), -1, *q.shape[1:]), call, pages)

    def _by_token(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.squeeze(3).transpose(1, 2).flatten(0, 1)


class FusedInferAttentionV2Backend(FusedInferBackend):
    """The second version: all sequences of a step in one call, whatever their lengths.

    Layout TND is documented to be without graphs for heads other than MLA's.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"ascend"}),
        archs=SERVERS,
        packages=("torch>=2.9", "torch-npu>=2.9"),
        extra="ascend",
        dtypes=frozenset({"bfloat16"}),
        head_dims=ints(128),
        num_qo_heads=IntSet(maximum=256),
        group_sizes=_GROUP_SIZES,
        page_sizes=_PAGE_SIZES,
        preferred_page_size=128,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        decode_qo_len=16,
        causal=frozenset({True, False}),
        sinks=True,
        lse=True,
        contiguous_q=True,
        allocates_out=True,
        needs_finite_tails=True,
        priority=60,
        contract_tested_on=SERVERS,
        contract_tested_with="torch-npu 2.14.0",
    )
    operator = V2
    layout = "TND"

    def _calls(self, batch: Batch) -> Iterator[Call]:
        host, first = batch.host, 0
        while first < batch.num_seqs:
            most = int(np.searchsorted(host.qo_indptr, host.qo_indptr[first] + MOST_TOKENS, side="right")) - 1
            stop = min(first + MOST_SEQS, batch.num_seqs, most)
            if stop == first:
                raise ContractError(
                    f"fused infer attention takes up to {MOST_TOKENS} new tokens of a sequence in a step, not "
                    f"{host.qo_lens[first]}: divide its prompt among more steps."
                )
            qo_lens = host.qo_lens[first:stop]
            if longest := int(qo_lens.max()):
                yield Call(
                    rows=slice(int(host.qo_indptr[first]), int(host.qo_indptr[stop])),
                    block_table=batch.block_table[first:stop],
                    q_lens=self._q_lens(qo_lens.tolist()),
                    kv_lens=host.kv_lens[first:stop].tolist(),
                    max_qo_len=longest,
                    mask=self._mask(batch, longest),
                )
            first = stop
