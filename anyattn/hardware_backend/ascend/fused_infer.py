"""torch-npu's fused infer attention, in its two versions: what is passed of a step, its mask, and its calls in graphs.

The operators take lengths as lists on the host, which a device graph has in it for good. torch-npu lets a captured
operator be given others: it is captured as a task group, and `GraphTasks` writes its arguments anew before a replay.

Sources: torch-npu 2.14.0 (_op_plugin_docs.py, npu/graphs.py); Ascend/op-plugin, docs/context (graph_task_update_begin).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anyattn.attention.layer_views import LayerViews
from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    import torch_npu

    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")
    torch_npu = lazy_import("torch_npu")

_MASK_SIZE = 2048
_CAUSAL, _NO_MASK = 3, 0  # sparse_mode: aligned bottom-right, with the mask of that size; nothing masked
_MOST_ELEMENTS = (1 << 31) - 1
_MOST_KV_WIDTH = 65535
_MOST_QO_HEADS = 256
MOST_SEQS = 4096
"""In one call with queries of several lengths: elements of its lists of lengths."""


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
    wants them. qo_len: new tokens of each sequence, where all have as many. masked: whether causality hides a key.
    """

    rows: slice
    block_table: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    qo_len: int | None
    masked: bool

    def arguments(self, operator: Operator, query: torch.Tensor) -> dict[str, Any]:
        """Those of the step; `query` is there for its device."""
        return {
            operator.q_lens: self.q_lens,
            operator.kv_lens: self.kv_lens,
            "block_table": self.block_table,
            "sparse_mode": _CAUSAL if self.masked else _NO_MASK,
            "atten_mask": _causal_mask(query.device) if self.masked else None,
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """One step's calls. tasks: of a graph, whose step is one call."""

    calls: list[Call]
    num_tokens: int
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

    def run(
        self, kv: LayerKV, arguments: dict[str, Any], shapes: tuple[list[int], list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's call, which is updated from now on where it is captured. shapes: of output and LSE.

        kv: the layer's pages, by which a second capture takes the place of the first.
        """
        npu, query = torch_npu.npu, arguments["query"]
        if not npu.is_current_stream_capturing():
            return self.operator(arguments)
        with torch.inference_mode(False):  # what is made in that mode could not be written in an update outside of it
            out = torch.empty(shapes[0], dtype=query.dtype, device=query.device)
            lse = torch.empty(shapes[1], dtype=torch.float32, device=query.device)
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


def graph_kv_lens(kv_lens: list[int], qo_len: int) -> list[int]:
    """A graph's step: sequences of padding see as many tokens of the null page as they have new ones."""
    return [max(length, qo_len) for length in kv_lens]


def paged_views() -> LayerViews:
    """A layer's keys and values as [num_pages, page_size, num_kv_heads * dim], as the operators take NHD."""
    return LayerViews(_joined_heads)


def _joined_heads(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    require_addressable(kv)
    return kv.k.flatten(2), kv.v.flatten(2)


def require_addressable(kv: LayerKV) -> None:
    """Raises ContractError for a pool that is too large for the operators."""
    if kv.k.numel() > _MOST_ELEMENTS:
        raise ContractError(
            f"fused infer attention takes up to {_MOST_ELEMENTS} elements of a layer's keys, and the pool has "
            f"{kv.k.numel()}: give num_pages={_MOST_ELEMENTS // kv.k[0].numel() - 1} or fewer."
        )


def require_heads(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ContractError for more heads than the operators take."""
    if num_qo_heads > _MOST_QO_HEADS or num_kv_heads * head_dim > _MOST_KV_WIDTH:
        raise ContractError(
            f"fused infer attention takes up to {_MOST_QO_HEADS} query heads, and {_MOST_KV_WIDTH} elements of all KV "
            f"heads, not {num_qo_heads} and {num_kv_heads} of {head_dim}: divide the heads among more devices."
        )
