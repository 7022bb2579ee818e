"""The options that tell a command of a model's layers and of what to choose for them, and what they stand for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from anyattn.attention.presets import PRESETS
from anyattn.attention.spec import AttentionSpec
from anyattn.types import ALL_LAYOUTS, GraphLevel, KVLayout

_LAYOUTS = ", ".join(ALL_LAYOUTS)

Model = Annotated[
    str | None, typer.Option(help="A preset (llama-3-8b, deepseek-v3, ...), a config.json or its folder.")
]
TP = Annotated[int, typer.Option(min=1, help="Tensor-parallel degree; with --model.")]
PageSize = Annotated[int | None, typer.Option(min=1, help="Tokens in a page. [default: negotiated]")]
KVDtype = Annotated[str, typer.Option(help="Of the KV cache; auto is the model's.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Backend = Annotated[str | None, typer.Option(help="Choose this one. [default: the best valid ones]")]
PrefillBackend = Annotated[str | None, typer.Option(help="Choose this one for prefill.")]
DecodeBackend = Annotated[
    list[str] | None, typer.Option(help="Choose this one for decode; repeated, these share it by load.")
]
Allocator = Annotated[str | None, typer.Option(help="KV allocator. [default: the best valid one]")]
Pool = Annotated[str | None, typer.Option(help="KV pool. [default: the best valid one]")]
Layout = Annotated[str | None, typer.Option(help=f"Of a page: {_LAYOUTS}. [default: negotiated]")]
JoinedLayers = Annotated[bool, typer.Option("--joined-layers", help="All layers' parts of a page lie together.")]
Dtype = Annotated[str | None, typer.Option(help="Of queries, keys, values. [default: the model's]")]
Graph = Annotated[str, typer.Option(help="Replayable batches: never, decode, uniform or always.")]
TreeMask = Annotated[bool, typer.Option("--tree-mask", help="Verification of token trees.")]
ReturnLSE = Annotated[bool, typer.Option("--return-lse", help="Log-sum-exp beside the output.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Rows do not depend on the batch.")]
NumQoHeads = Annotated[int | None, typer.Option(help="Without --model: query heads. [default: 32]")]
NumKVHeads = Annotated[int | None, typer.Option(help="Key and value heads. [default: 8]")]
HeadDim = Annotated[int | None, typer.Option(help="Elements of a head. [default: 128]")]
SlidingWindow = Annotated[int | None, typer.Option(help="Tokens seen, the token itself counted.")]
LogitsSoftCap = Annotated[float | None, typer.Option(help="c of c * tanh(score / c).")]
Sinks = Annotated[bool, typer.Option("--sinks", help="One logit a head joins the softmax.")]
Alibi = Annotated[bool, typer.Option("--alibi", help="Scores with ALiBi slopes.")]


def asked_layers(
    model: str | None,
    tp: int,
    *,
    dtype: str | None,
    kv_dtype: str,
    described: Mapping[str, Any],
    graph: str,
    **asked: bool,
) -> tuple[AttentionSpec, ...]:
    """A spec for each layer of a model, or one for layers that are described.

    model: a preset, a config.json or its folder. described: fields of the spec without a model; None and False are not
        given. graph, asked: of every layer's spec, the first by the name of its level.

    Raises BadParameter for options that contradict each other, SpecError for a model that cannot be read or divided.
    """
    given = {name: value for name, value in described.items() if value is not None and value is not False}
    if model is not None:
        if given:
            named = ", ".join("--" + name.replace("_", "-") for name in given)
            raise typer.BadParameter(f"the model says what its layers are: leave out {named}.", param_hint="--model")
        layers = _layers(model, tp, dtype, kv_dtype)
    else:
        if tp != 1:
            message = "it divides a model's heads: give --model, or heads after division."
            raise typer.BadParameter(message, param_hint="--tp")
        fields: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, **given}
        layers = (AttentionSpec(**fields, dtype=dtype or "bfloat16", kv_dtype=kv_dtype),)
    level = _graph_level(graph)
    return tuple(spec.replace(graph=level, **asked) for spec in layers)


def _layers(model: str, tp: int, dtype: str | None, kv_dtype: str) -> tuple[AttentionSpec, ...]:
    """A preset's layers, or those of a config.json."""
    if model not in PRESETS and (os.sep in model or os.path.exists(model) or model.endswith(".json")):
        return AttentionSpec.from_hf_config(model, tp, dtype=dtype, kv_dtype=kv_dtype)
    return AttentionSpec.from_preset(model, tp, dtype=dtype, kv_dtype=kv_dtype)


def _graph_level(name: str) -> GraphLevel:
    try:
        return GraphLevel[name.upper()]
    except KeyError:
        names = ", ".join(level.name.lower() for level in GraphLevel)
        raise typer.BadParameter(f"{name!r} is not one of {names}.", param_hint="--graph") from None


def asked_layout(name: str | None) -> KVLayout | None:
    """A layout by its name in any case. Raises BadParameter for one that there is not."""
    found = next((layout for layout in ALL_LAYOUTS if name is not None and layout == name.upper()), None)
    if name is not None and found is None:
        raise typer.BadParameter(f"{name!r} is not one of {_LAYOUTS}.", param_hint="--layout")
    return found
