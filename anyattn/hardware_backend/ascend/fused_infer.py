"""torch-npu's fused infer attention, in its two versions: a step's calls, their mask, and those in graphs.

The operators take lengths as lists on the host, which a device graph has in it for good. torch-npu lets a captured
operator be given others: it is captured as a task group, and `GraphTasks` writes its arguments anew before a replay.
In graphs there is no LSE: the form that writes to given tensors has one for later versions only, by its documentation.

Sources: torch-npu 2.14.0 (_op_plugin_docs.py, npu/graphs.py); Ascend/op-plugin, docs/context (graph_task_update_begin).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.layer_views import LayerViews
from anyattn.attention.sinks import join_sinks
from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    from collections.abc import Iterator

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

_MASK_SIZE = 2048
_CAUSAL, _NO_MASK = 3, 0  # sparse_mode: aligned bottom-right, with the mask of that size; nothing masked
_MOST_ELEMENTS = (1 << 31) - 1
_MOST_DECODE_KEYS = 262144
MOST_SEQS = 4096
"""In one call in layout TND: elements of its lists of lengths."""
MOST_TOKENS = 1 << 20
"""In one call in layout TND."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What one version of the operator calls itself and its arguments."""

    name: str
    q_lens: str
    kv_lens: str
    num_qo_heads: str
    scale: str
    return_lse: str

    def __call__(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = getattr(torch_npu, self.name)(**arguments)
        return result

    def write(self, arguments: dict[str, Any], workspace: torch.Tensor, out: list[torch.Tensor]) -> None:
        """Into given tensors: the output and the LSE."""
        getattr(torch_npu, self.name).out(**arguments, workspace=workspace, out=out)

    def workspace(self, arguments: dict[str, Any]) -> torch.Tensor:
        """Large enough for these tensors with any lengths."""
        made: torch.Tensor = getattr(torch_npu, f"_{self.name}_get_max_workspace")(**arguments)
        return made


V1 = Operator(
    name="npu_fused_infer_attention_score",
    q_lens="actual_seq_lengths",
    kv_lens="actual_seq_lengths_kv",
    num_qo_heads="num_heads",
    scale="scale",
    return_lse="softmax_lse_flag",
)
V2 = Operator(
    name="npu_fused_infer_attention_score_v2",
    q_lens="actual_seq_qlen",
    kv_lens="actual_seq_kvlen",
    num_qo_heads="num_query_heads",
    scale="softmax_scale",
    return_lse="return_softmax_lse",
)


@functools.cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """[2048, 2048], bool: True for keys behind the query. The kernels move it to where it is wanted."""
    with torch.inference_mode(False):
        return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call of an operator: some sequences of a step.

    rows: tokens of q. block_table: [num_seqs, max_pages], int32. q_lens, kv_lens: of each sequence, as the operator
    wants them. max_qo_len: the most new tokens of a sequence. mask: where causality hides a key.
    """

    rows: slice
    block_table: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    max_qo_len: int
    mask: torch.Tensor | None

    def arguments(self, operator: Operator) -> dict[str, Any]:
        """Those of the step."""
        return {
            operator.q_lens: self.q_lens,
            operator.kv_lens: self.kv_lens,
            "block_table": self.block_table,
            "sparse_mode": _NO_MASK if self.mask is None else _CAUSAL,
            "atten_mask": self.mask,
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """One step's calls. tasks: of a graph, whose step is one call."""

    calls: list[Call]
    tasks: GraphTasks | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """One layer's call in a graph: its handle, and what it was captured with."""

    kv: LayerKV
    handle: Any
    arguments: dict[str, Any]
    out: list[torch.Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class GraphTasks:
    """An operator's calls in one graph, a layer each; all have the same lengths.

    The tensors of each are kept: an update names all arguments again. Updates are tasks of a stream of their own, which
    waits for the replays before it, and which the replay after it waits for; the host waits for neither.
    """

    operator: Operator
    device: torch.device
    tasks: dict[int, _Task] = field(default_factory=dict)
    workspace: torch.Tensor | None = None
    stream: Any = None

    def run(self, kv: LayerKV, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's call, which is updated from now on where it is captured.

        kv: the layer's pages, by which a second capture takes the place of the first.
        """
        npu, query = torch_npu.npu, arguments["query"]
        if not npu.is_current_stream_capturing():
            return self.operator(arguments)
        with torch.inference_mode(False):  # what is made in that mode could not be written in an update outside of it
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            lse = torch.empty(1, dtype=torch.float32, device=query.device)
            if self.workspace is None:  # shared by the layers, which run one after the other
                self.workspace = self.operator.workspace(arguments)
        stream = npu.current_stream(self.device)
        npu.graph_task_group_begin(stream)
        self.operator.write(arguments, self.workspace, [out, lse])
        handle = npu.graph_task_group_end(stream)
        self.tasks[id(kv)] = _Task(kv=kv, handle=handle, arguments=arguments, out=[out, lse])
        return out, lse

    def update(self, kv_lens: list[int]) -> None:
        """Gives all captured calls these lengths, behind what the current stream was given before."""
        if not self.tasks:
            return
        npu = torch_npu.npu
        if self.stream is None:
            self.stream = npu.Stream(device=self.device)
        current = npu.current_stream(self.device)
        self.stream.wait_stream(current)
        with npu.stream(self.stream):
            for task in self.tasks.values():
                assert self.workspace is not None
                npu.graph_task_update_begin(self.stream, task.handle)
                self.operator.write({**task.arguments, self.operator.kv_lens: kv_lens}, self.workspace, task.out)
                npu.graph_task_update_end(self.stream)
        current.wait_stream(self.stream)


class FusedInferBackend(AttentionBackend):
    """What all that call one of the versions share; in a graph a step is one call. A sink joins the output by the LSE.

    layout: the operator's, of the query.
    """

    operator: ClassVar[Operator]
    layout: ClassVar[str]

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._wants_lse = spec.return_lse or spec.sinks
        self._views = LayerViews(self._pages)
        self._fixed: dict[str, Any] = {
            self.operator.num_qo_heads: spec.num_qo_heads,
            "num_key_value_heads": spec.num_kv_heads,
            self.operator.scale: spec.scale,
            "block_size": cache.page_size,
            self.operator.return_lse: self._wants_lse,
            "input_layout": self.layout,
        }

    def plan(self, batch: Batch) -> Plan:
        calls = list(self._calls(batch))
        for call in calls:
            _require_decode_keys(call.max_qo_len, max(call.kv_lens))
        return Plan(calls=calls)

    def _calls(self, batch: Batch) -> Iterator[Call]:
        raise NotImplementedError

    def init_graph(self, batch: Batch) -> Plan:
        each = batch.max_qo_len
        _require_decode_keys(each, batch.max_kv_len)
        call = Call(
            rows=slice(0, batch.num_tokens),
            block_table=batch.block_table,
            q_lens=self._q_lens([each] * batch.num_seqs),
            kv_lens=_graph_kv_lens([0] * batch.num_seqs, each),
            max_qo_len=each,
            mask=self._mask(batch, each),
        )
        return Plan(calls=[call], tasks=GraphTasks(operator=self.operator, device=batch.block_table.device))

    def refresh_graph(self, plan: Any, batch: Batch) -> None:
        (call,) = plan.calls
        call.kv_lens[:] = _graph_kv_lens(batch.host.kv_lens.tolist(), call.max_qo_len)
        plan.tasks.update(list(call.kv_lens))

    def _q_lens(self, qo_lens: list[int]) -> list[int]:
        """As the operator wants them: in layout TND where each sequence's tokens end."""
        return list(itertools.accumulate(qo_lens))

    def _mask(self, batch: Batch, max_qo_len: int) -> torch.Tensor | None:
        return _causal_mask(batch.block_table.device) if self.spec.causal and max_qo_len > 1 else None

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
        pages = self._views.of(kv)
        results = []
        for call in plan.calls:
            tensors = self._tensors(q[call.rows], call, pages)
            arguments = {**tensors, **self._fixed, **call.arguments(self.operator)}
            result, lse = self.operator(arguments) if plan.tasks is None else plan.tasks.run(kv, arguments)
            result = result.view(-1, *result.shape[-2:])
            results.append((result, self._by_token(lse) if self._wants_lse else None))
        result, lse = results[0] if len(results) == 1 else _joined(results)
        if sinks is not None and lse is not None:
            join_sinks(result, lse, sinks)
        return result, lse if self.spec.return_lse else None

    @staticmethod
    def _pages(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values as [num_pages, page_size, num_kv_heads * dim], as the operators take NHD."""
        require_addressable(kv)
        return kv.k.flatten(2), kv.v.flatten(2)

    def _tensors(self, q: torch.Tensor, call: Call, pages: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        """Of tokens [num_tokens, num_qo_heads, head_dim] the query as the operator wants it, with keys and values."""
        return {"query": q, "key": pages[0], "value": pages[1]}

    def _by_token(self, lse: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_qo_heads]."""
        return lse.squeeze(2)


def _joined(results: list[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([result for result, _ in results]), torch.cat(lses) if lses else None


def _graph_kv_lens(kv_lens: list[int], qo_len: int) -> list[int]:
    """A graph's step: sequences of padding see as many tokens of the null page as they have new ones."""
    return [max(length, qo_len) for length in kv_lens]


def require_addressable(kv: LayerKV) -> None:
    """Raises ContractError for a pool that is too large for the operators."""
    if kv.k.numel() > _MOST_ELEMENTS:
        raise ContractError(
            f"fused infer attention takes up to {_MOST_ELEMENTS} elements of a layer's keys, and the pool has "
            f"{kv.k.numel()}: give num_pages={_MOST_ELEMENTS // kv.k[0].numel() - 1} or fewer."
        )


def _require_decode_keys(max_qo_len: int, max_kv_len: int) -> None:
    if max_qo_len == 1 and max_kv_len > _MOST_DECODE_KEYS:
        raise ContractError(
            f"fused infer attention takes up to {_MOST_DECODE_KEYS} keys of sequences with one new token each, not "
            f"{max_kv_len}: set decode_backend='torch_native'."
        )
