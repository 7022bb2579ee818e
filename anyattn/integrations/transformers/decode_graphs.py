"""A model's decode step as device graphs: captured for each of a few batch sizes, replayed for every later step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from anyattn.attention.batch import Batch
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.errors import ContractError
from anyattn.integrations.transformers.attention import plain_tensors
from anyattn.integrations.transformers.packed_step import PackedStep
from anyattn.integrations.transformers.probe import ModelLayout

_WARM_UPS = 2
"""Steps before a capture: kernels are compiled, and libraries allocate what they keep, outside of it."""


_ROPE_ON_THE_HOST = frozenset({"dynamic", "longrope"})


def _rope_types(model: PreTrainedModel) -> set[str]:
    """Of all modules that compute rotary embeddings."""
    return {str(module.rope_type) for module in model.modules() if isinstance(getattr(module, "rope_type", None), str)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Captured:
    """A graph, and the tensors that it reads and writes. ids: [1, num_seqs]. logits: [num_seqs, vocabulary]."""

    graph: torch.cuda.CUDAGraph
    plan: Plan
    ids: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs for 1, 2, 4, ... and `max_num_seqs` sequences, each captured when it is first wanted."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        runtime: AttentionRuntime,
        *,
        step_keyword: str,
        max_num_seqs: int,
        max_kv_len: int,
    ) -> None:
        """step_keyword: by which a `PackedStep` travels through the model. max_kv_len: tokens of the longest sequence.

        Raises ContractError on devices whose graphs torch does not capture, and for models that look at positions on
        the host.
        """
        if kinds := sorted(_rope_types(model) & _ROPE_ON_THE_HOST):
            raise ContractError(
                f"decode graphs cannot be captured with RoPE of type {', '.join(kinds)}, whose frequencies follow from "
                "the longest position, which transformers reads back: leave out decode_graphs."
            )
        if runtime.device.type != "cuda":
            raise ContractError(f"decode graphs are CUDA graphs, and the model is on {runtime.device}.")
        self._model = model
        self._layout = layout
        self._runtime = runtime
        self._step_keyword = step_keyword
        self._max_kv_len = max_kv_len
        sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
        self._sizes = [*sizes, max_num_seqs]
        self._captured: dict[int, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def serves(self, batch: Batch) -> bool:
        """Whether there is or will be a graph for such a step."""
        return batch.phase == "decode" and batch.num_seqs <= self._sizes[-1] and batch.max_kv_len <= self._max_kv_len

    def logits(self, ids: list[int], batch: Batch) -> torch.Tensor:
        """[len(ids), vocabulary], valid until the next call. ids: the one new token of each sequence of the batch."""
        size = self._sizes[bisect_left(self._sizes, len(ids))]
        with torch.cuda.device(self._runtime.device), plain_tensors():  # which are the caller's, and may be others
            if size not in self._captured:
                self._captured[size] = self._capture(size)
            captured = self._captured[size]
            captured.ids[:, : len(ids)] = torch.tensor(ids, pin_memory=True).to(captured.ids.device, non_blocking=True)
            self._runtime.refresh_graph(captured.plan, batch)
            captured.graph.replay()
            return captured.logits[: len(ids)]

    def _capture(self, num_seqs: int) -> _Captured:
        """The graph holds a step without sequences when it is captured: nothing is stored then."""
        plan = self._runtime.init_graph(num_seqs, max_kv_len=self._max_kv_len)
        ids = torch.zeros(1, num_seqs, dtype=torch.int64, device=self._runtime.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward(ids, plan)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._forward(ids, plan)
        return _Captured(graph=graph, plan=plan, ids=ids, logits=logits)

    def _forward(self, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
        step = PackedStep(self._runtime, self._layout, plan)
        keywords: dict[str, Any] = {self._step_keyword: step}
        logits: torch.Tensor = self._model(
            input_ids=ids, position_ids=plan.batch.positions.unsqueeze(0), use_cache=False, **keywords
        ).logits[0]
        step.require_attended()
        return logits
