"""The tokens of many sequences in one row of a model's batch, attended by one plan."""

from __future__ import annotations

import torch

from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.errors import ContractError
from anyattn.integrations.transformers.probe import ModelLayout
from anyattn.integrations.transformers.specs import AttentionCall


class PackedStep:
    """Hands the step's plan to every layer. Travels through the model's forward as a keyword argument."""

    def __init__(self, runtime: AttentionRuntime, layout: ModelLayout, plan: Plan) -> None:
        self._runtime = runtime
        self._layout = layout
        self._plan = plan
        self._attended: set[int] = set()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._layout.layer(call)
        if call.q.shape[0] != 1:
            raise ContractError(f"{call.name} splits a packed step into {call.q.shape[0]} rows.")
        if layer.index in self._attended:
            raise ContractError(f"{call.name} attends twice in a step.")
        self._attended.add(layer.index)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (call.q, call.k, call.v))
        out: torch.Tensor = self._runtime.run(layer.index, q, k, v, self._plan, sinks=call.sinks)
        return out.unsqueeze(0)

    def require_attended(self) -> None:
        """Raises ContractError when a layer attended in another way, as if all tokens were of one sequence."""
        if len(self._attended) != len(self._layout.layers):
            raise ContractError(
                f"{len(self._layout.layers) - len(self._attended)} layers did not attend through this generator: "
                "the model's attention implementation was changed while its stream was open."
            )
