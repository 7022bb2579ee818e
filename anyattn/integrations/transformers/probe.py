"""What a model's attention layers are, found by running two tokens through it with attention that only takes notes.

Shapes, scales, windows and sinks then come from the calls that the model makes, not from names in its config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from anyattn.attention.spec import AttentionSpec
from anyattn.errors import AnyattnError, ContractError
from anyattn.integrations.transformers.attention import NAME, STEP_KEYWORD, mark, register
from anyattn.integrations.transformers.cache_layer import HollowLayer
from anyattn.integrations.transformers.patterns import Pattern
from anyattn.integrations.transformers.specs import AttentionCall, LayerFacts

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention layer. index: its place in a runtime, where layers without attention are left out."""

    index: int
    facts: LayerFacts
    spec: AttentionSpec

    def check(self, call: AttentionCall) -> None:
        """Raises ContractError when a call says something else than the probe's did."""
        if call.facts != self.facts:
            raise ContractError(
                f"{call.name} says {call.facts}, and said {self.facts} when its runtime was made: make it anew."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model's attention layers by their layer_idx, in order. max_positions: tokens of the longest sequence."""

    layers: Mapping[int, Layer]
    max_positions: int

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """For `create_runtime`."""
        return tuple(layer.spec for layer in self.layers.values())

    def layer(self, call: AttentionCall) -> Layer:
        """The layer that a call is of. Raises ContractError when there is none or it has changed."""
        layer = None if call.layer is None else self.layers.get(call.layer)
        if layer is None:
            raise ContractError(f"{call.name} did not attend when its runtime was made: make it anew.")
        layer.check(call)
        return layer


class _Probe:
    """Takes notes of every call, and answers with zeros."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.handed_out: int | None = None  # the layer whose keys a cache handed out and nobody has attended to

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer is None:
            raise ContractError(f"{call.name} has no layer_idx, so its keys have no place in a runtime.")
        if call.layer in self.calls:
            raise ContractError(f"{call.name} attends twice in a forward: a runtime has one place for its keys.")
        if call.q.shape[2] != call.k.shape[2]:
            raise ContractError(f"{call.name} attends to other tokens than its own, as cross-attention does.")
        self.calls[call.layer] = call
        self.handed_out = None
        return call.q.new_zeros(call.q.shape[0], call.q.shape[2], call.q.shape[1], call.v.shape[-1])

    def require_attended(self) -> None:
        if self.handed_out is not None:
            raise ContractError(
                f"layer {self.handed_out} does not attend to the keys and values that its cache hands out: the model "
                "changes them in between (as DeepSeek's MLA does), or does not use the attention function. Leave the "
                "PagedCache out, as the default cache serves such models, or use PagedGenerator."
            )


class _ProbeCache(Cache):
    """Hands out marked keys and values as `PagedCache` does."""

    def __init__(self, probe: _Probe, num_layers: int) -> None:
        super().__init__(layers=[HollowLayer() for _ in range(num_layers)])
        self._probe = probe

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._probe.require_attended()
        self._probe.handed_out = layer_idx
        mark(self._probe, key_states, value_states)
        return key_states, value_states


def probe_layout(model: PreTrainedModel, *, cached: bool) -> ModelLayout:
    """The attention layers of a model.

    cached: whether its keys and values go through a cache, or its steps are handed over by keyword.

    Raises ContractError when the model cannot be driven so: it does not use transformers' AttentionInterface, tokens
    meet elsewhere than in attention, or a layer attends in a way that no runtime serves.
    """
    _require_interface(model)
    probe = _Probe()
    keywords: dict[str, Any] = {"use_cache": False, STEP_KEYWORD: probe}
    if cached:
        cache = _ProbeCache(probe, model.config.get_text_config().num_hidden_layers)
        keywords = {"use_cache": True, cache_keyword(model): cache}
    # The second token follows another one in each row: its logits agree unless they meet elsewhere than in attention.
    ids = torch.tensor([[1, 0], [2, 0]], device=model.device)
    with attention_implementation(model, NAME), torch.no_grad():
        try:
            logits = model(input_ids=ids, **keywords).logits
        except AnyattnError:
            raise
        except Exception as error:
            raise ContractError(
                f"{_name(model)} could not be run for two tokens to see its attention layers: "
                f"{type(error).__name__}: {error}"
            ) from error
    probe.require_attended()
    if not probe.calls:
        raise ContractError(f"{_name(model)} hands nothing of what it was given on to its attention function.")
    tolerance = 1e-5 if logits.dtype in (torch.float32, torch.float64) else 2e-2
    if not torch.allclose(logits[0, 1], logits[1, 1], rtol=tolerance, atol=tolerance * float(logits.abs().max())):
        raise ContractError(
            f"{_name(model)} lets tokens meet elsewhere than in attention (convolution, recurrent state, ...): only "
            "attention is kept apart by sequence. Use model.generate with its own cache."
        )
    max_positions = _max_positions(model)
    masks = {layer: call.require_mask() for layer, call in probe.calls.items()}
    by_function = {mask.function: mask for mask in masks.values()}  # layers share masks, and a proof takes a moment
    patterns = {function: mask.pattern_up_to(max_positions) for function, mask in by_function.items()}
    layers = {
        layer: Layer(index=index, facts=call.facts, spec=_spec(call, patterns[masks[layer].function], max_positions))
        for index, (layer, call) in enumerate(sorted(probe.calls.items()))
    }
    return ModelLayout(layers=layers, max_positions=max_positions)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model attends through `name`, and afterwards as before. Raises ContractError when it cannot be set."""
    config = model.config
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key)) is not None}
    own: str = config._attn_implementation
    before = {"": own, **{key: part._attn_implementation for key, part in parts.items()}} if parts else own
    model.set_attn_implementation(name)
    try:
        if config.get_text_config()._attn_implementation != name:
            raise ContractError(f"the attention implementation of {_name(model)} cannot be set.")
        yield
    finally:
        model.set_attn_implementation(before)


def _require_interface(model: PreTrainedModel) -> None:
    register()
    if model.config.is_encoder_decoder:
        raise ContractError(f"{_name(model)} is an encoder-decoder model; a runtime keeps one sequence's own tokens.")
    if not getattr(model, "_supports_attention_backend", False):
        raise ContractError(
            f"{_name(model)} does not use transformers' AttentionInterface (its _supports_attention_backend is not "
            "True), so anyattn cannot serve it: use model.generate with its own attention."
        )
    if model.training:
        raise ContractError(f"{_name(model)} is in training mode: call model.eval().")
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise ContractError(
            f"{_name(model)} has layers of type {', '.join(sorted(unknown))}; served are "
            f"{', '.join(sorted(_KNOWN_LAYER_TYPES))}. Use model.generate with its own cache."
        )


def _spec(call: AttentionCall, pattern: Pattern, max_positions: int) -> AttentionSpec:
    if not pattern.causal:
        raise ContractError(f"{call.name} is not causal: generation needs a decoder.")
    window = pattern.window
    stated = call.facts.sliding_window if call.facts.states_window else window
    if stated != window and min(stated or max_positions, window or max_positions) < max_positions:
        raise ContractError(f"{call.name} names sliding_window={stated}, and its mask has {window}: one is wrong.")
    return call.spec(causal=True, sliding_window=stated)


def _max_positions(model: PreTrainedModel) -> int:
    """Tokens of the longest sequence that the model's positions are made for.

    Some rotary embeddings change with the length of the longest sequence in a step, for all tokens of it at once
    ("dynamic", "longrope"): within their original length they do not, and only that far are they served.
    """
    config = model.config.get_text_config()
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or longest
            longest = min(longest, int(original))
    return longest


def cache_keyword(model: PreTrainedModel) -> str:
    """By what name the model's forward and `generate` take a cache: transformers renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
