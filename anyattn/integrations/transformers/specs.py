"""One layer's call of the attention function, and the spec that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from anyattn.attention.spec import AttentionSpec
from anyattn.errors import ContractError
from anyattn.integrations.transformers.masks import StepMask
from anyattn.types import dtype_name

_CHANGES_THE_RESULT = {
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "indices": "a selection of keys",
    "block_indices": "a selection of key blocks",
    "sinks": "sink keys",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
}
"""Keyword arguments of attention functions that no spec stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What a layer says of its attention beside the shapes; the same in every call.

    states_window: whether the layer names a window at all; most leave it to the mask.
    """

    scaling: float | None
    soft_cap: float | None
    sliding_window: int | None
    states_window: bool
    has_sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """What transformers passes to an attention function, checked.

    layer: the module's layer_idx; None where it has none.
    q: [batch_size, num_qo_heads, q_length, head_dim]. k: [batch_size, num_kv_heads, kv_length, head_dim].
    v: [batch_size, num_kv_heads, kv_length, v_head_dim]. sinks: [num_qo_heads].
    """

    module: torch.nn.Module
    layer: int | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: StepMask | None
    facts: LayerFacts
    sinks: torch.Tensor | None

    @property
    def name(self) -> str:
        """For messages."""
        return f"{type(self.module).__name__} of layer {self.layer}"

    def spec(self, *, causal: bool, sliding_window: int | None) -> AttentionSpec:
        """The spec of this layer with a pattern from its mask. Raises SpecError for shapes that mean nothing."""
        head_dim, v_head_dim = self.q.shape[-1], self.v.shape[-1]
        return AttentionSpec(
            num_qo_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[1],
            head_dim=head_dim,
            v_head_dim=None if v_head_dim == head_dim else v_head_dim,
            dtype=dtype_name(self.q.dtype),
            sm_scale=self.facts.scaling,
            causal=causal,
            sliding_window=sliding_window,
            logits_soft_cap=self.facts.soft_cap,
            sinks=self.facts.has_sinks,
        )

    def require_mask(self) -> StepMask:
        """The mask. Without one, what transformers' sdpa takes that to mean, where it is clear.

        Raises ContractError where it is not.
        """
        if self.mask is not None:
            return self.mask
        q_length, kv_length = self.q.shape[2], self.k.shape[2]
        causal = bool(getattr(self.module, "is_causal", True))
        if causal and q_length not in (1, kv_length):
            raise ContractError(
                f"{self.name} passes no mask for {q_length} queries and {kv_length} keys, so what each sees is open."
            )
        if self.facts.sliding_window is not None and self.facts.sliding_window < kv_length:
            raise ContractError(f"{self.name} names a sliding window and passes no mask that has it.")
        return StepMask.unpadded(self.q.shape[0], q_length, kv_length, causal=causal)

    def checked_window(self, mask: StepMask) -> int | None:
        """The window to compute with. Raises ContractError when the layer and its mask disagree on it."""
        facts = self.facts
        if not mask.causal or not facts.states_window:
            return mask.sliding_window
        if not mask.agrees_with(causal=True, sliding_window=facts.sliding_window):
            raise ContractError(
                f"{self.name} names sliding_window={facts.sliding_window}, and its mask hides with "
                f"{mask.sliding_window} at {mask.num_visible_keys} keys: one of them is wrong."
            )
        return facts.sliding_window


class Step(Protocol):
    """Who serves a call: a step of the paged generator, a `PagedCache`, a probe, or a scratch runtime."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[batch_size, q_length, num_qo_heads, v_head_dim]; 0 for queries that are padding."""


def checked_call(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    *,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """The arguments of an attention function, as transformers passes them.

    Raises ContractError for what anyattn does not compute.
    """
    layer = getattr(module, "layer_idx", None)
    name = f"{type(module).__name__} of layer {layer}"
    if mask is not None and not isinstance(mask, StepMask):
        raise ContractError(
            f"{name} got a mask of type {type(mask).__name__}{list(getattr(mask, 'shape', []))}. anyattn takes padding "
            "as a 2D attention_mask; whole (4D) masks are not served: use attn_implementation='sdpa' for them."
        )
    if dropout:
        raise ContractError(f"{name} asks for dropout {dropout}: anyattn does not train. Call model.eval().")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise ContractError("anyattn computes no gradients: call the model under torch.no_grad().")
    for keyword, meaning in _CHANGES_THE_RESULT.items():
        if kwargs.get(keyword) is not None:
            raise ContractError(
                f"{name} passes {meaning} ({keyword}), which anyattn does not compute: "
                "use attn_implementation='sdpa' or 'eager' for this model."
            )
    if k.shape[2] != v.shape[2] or k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0]:
        raise ContractError(
            f"{name} passes q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, which do not fit together."
        )
    window, soft_cap, sinks = (kwargs.get(keyword) for keyword in ("sliding_window", "softcap", "s_aux"))
    return AttentionCall(
        module=module,
        layer=layer if isinstance(layer, int) else None,
        q=q,
        k=k,
        v=v,
        mask=mask,
        facts=LayerFacts(
            scaling=None if scaling is None else float(scaling),
            soft_cap=None if soft_cap is None else float(soft_cap),
            sliding_window=None if window is None else int(window),
            states_window="sliding_window" in kwargs,
            has_sinks=sinks is not None,
        ),
        sinks=sinks,
    )
