"""`anyattn backends`: every backend for a model on a device, valid or not, with all reasons, and the choice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from anyattn.attention.presets import PRESETS
from anyattn.attention.selection import Selection, Verdict, backends_json
from anyattn.attention.spec import AttentionSpec, layer_kinds, stretches
from anyattn.cli.output import Answered, section, show, show_json
from anyattn.dry_run import Survey, survey
from anyattn.plugins.isolation import stdout_on_stderr
from anyattn.types import ALL_LAYOUTS, ROLES, GraphLevel, KVLayout, Reason, Role

_LAYOUTS = ", ".join(ALL_LAYOUTS)


def backends(
    model: Annotated[
        str | None, typer.Option(help="A preset (llama-3-8b, deepseek-v3, ...), a config.json or its folder.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree; with --model.")] = 1,
    device: Annotated[
        str, typer.Option(help="auto, a kind (cpu, cuda), a torch device (cuda:1) or a simulated one (sim:h100).")
    ] = "auto",
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a page. [default: negotiated]")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache; auto is the model's.")] = "auto",
    installed_only: Annotated[
        bool, typer.Option("--installed-only", help="On a simulated device, count only packages that are here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    backend: Annotated[str | None, typer.Option(help="Choose this one. [default: the best valid ones]")] = None,
    prefill_backend: Annotated[str | None, typer.Option(help="Choose this one for prefill.")] = None,
    decode_backend: Annotated[
        list[str] | None, typer.Option(help="Choose this one for decode; repeated, these share it by load.")
    ] = None,
    allocator: Annotated[str | None, typer.Option(help="KV allocator. [default: the best valid one]")] = None,
    pool: Annotated[str | None, typer.Option(help="KV pool. [default: the best valid one]")] = None,
    layout: Annotated[str | None, typer.Option(help=f"Of a page: {_LAYOUTS}. [default: negotiated]")] = None,
    joined_layers: Annotated[
        bool, typer.Option("--joined-layers", help="All layers' parts of a page lie together.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Of queries, keys, values. [default: the model's]")] = None,
    graph: Annotated[str, typer.Option(help="Replayable batches: never, decode, uniform or always.")] = "never",
    tree_mask: Annotated[bool, typer.Option("--tree-mask", help="Verification of token trees.")] = False,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="Log-sum-exp beside the output.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Rows do not depend on the batch.")] = False,
    num_qo_heads: Annotated[int | None, typer.Option(help="Without --model: query heads. [default: 32]")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key and value heads. [default: 8]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of a head. [default: 128]")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Tokens seen, the token itself counted.")] = None,
    logits_soft_cap: Annotated[float | None, typer.Option(help="c of c * tanh(score / c).")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="One logit a head joins the softmax.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="Scores with ALiBi slopes.")] = False,
) -> None:
    """Show every backend, valid or not, with all reasons.

    Ends with the choice for each role; the exit code is 0 when there is one. The model is a preset or a config.json,
    or its layers are described by their dimensions and features, in the words of anyattn.AttentionSpec.
    """
    described = {
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks or None,
        "alibi": alibi or None,
    }
    given = {name: value for name, value in described.items() if value is not None}
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
    asked = {
        "tree_mask": tree_mask,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "graph": _graph_level(graph),
    }
    with stdout_on_stderr():  # a plugin may print when it is imported
        found = survey(
            [spec.replace(**asked) for spec in layers],
            device=None if device == "auto" else device,
            backend=backend,
            prefill_backend=prefill_backend,
            decode_backend=decode_backend or None,
            allocator=allocator,
            pool=pool,
            page_size=page_size,
            layout=_layout(layout),
            joined_layers=joined_layers,
            installed_only=installed_only,
        )
    if as_json:
        show_json(_document(found, model, tp))
    else:
        _report(found, model, tp)
    if found.error is not None:
        raise Answered(found.error)


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


def _layout(name: str | None) -> KVLayout | None:
    found = next((layout for layout in ALL_LAYOUTS if name is not None and layout == name.upper()), None)
    if name is not None and found is None:
        raise typer.BadParameter(f"{name!r} is not one of {_LAYOUTS}.", param_hint="--layout")
    return found


def _document(found: Survey, model: str | None, tp: int) -> dict[str, Any]:
    """choice: of the layers of kind 0; `choices` has every kind's, which differ in their backends at most."""
    kinds = layer_kinds(found.layers)
    choices = [selection.choice_json() for selection in found.selections.values()]
    return {
        "device": None if found.device is None else found.device.to_json(),
        "model": {
            "name": model,
            "tp": tp,
            "num_layers": len(found.layers),
            "layer_kinds": [{"layers": layers, "spec": spec.to_json()} for spec, layers in kinds.items()],
        },
        "choice": choices[0] if choices else None,
        "choices": choices,
        "error": None if found.error is None else str(found.error),
        "backends": backends_json([found.verdicts.get(spec, ()) for spec in kinds]),
        "problems": _problems(found),
    }


def _problems(found: Survey) -> list[str]:
    return list(dict.fromkeys([*found.detection.problems, *found.candidates.problems, *found.plugin_problems]))


def _report(found: Survey, model: str | None, tp: int) -> None:
    if found.device is not None:
        show(f"device    {found.device}{', simulated' if found.device.simulated else ''}")
    if model is not None:
        layers = "1 layer" if len(found.layers) == 1 else f"{len(found.layers)} layers"
        show(f"model     {model}, {layers}, tensor parallel {tp}")
    kinds = layer_kinds(found.layers)
    for spec, numbers in kinds.items():
        if verdicts := found.verdicts.get(spec):
            selection = found.selections.get(spec)
            which = "" if len(kinds) == 1 else f"layers {stretches(numbers)}: "
            show()
            show(Text(f"{which}{spec}", style="bold"))
            show(_table(verdicts, selection))
            show()
            if refusals := _refusals(verdicts):
                section("refused", refusals)
            if selection is not None:
                section("choice", (tuple(line.split(None, 1)) for line in selection.summary()))  # type: ignore[misc]
    if problems := _problems(found):
        section("problems", (("-", problem) for problem in problems))


def _table(verdicts: Sequence[Verdict], selection: Selection | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for title in ("backend", "from", "status", "installed", *ROLES):
        table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=len(title))
    for name in dict.fromkeys(verdict.name for verdict in verdicts):
        by_role = {verdict.role: verdict for verdict in verdicts if verdict.name == name}
        first = next(iter(by_role.values()))
        marks = [_mark(by_role[role], selection) for role in ROLES]
        table.add_row(name, first.distribution, first.status, "yes" if first.installed else "no", *marks)
    return table


def _refusals(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Each refused backend with its reasons, one a line; once for the roles where they are the same."""
    roles: dict[tuple[str, tuple[Reason, ...]], list[Role]] = {}
    for verdict in verdicts:
        if verdict.reasons:
            roles.setdefault((verdict.name, verdict.reasons), []).append(verdict.role)
    return [
        (name if len(where) == len(ROLES) else f"{name}, {where[0]}", "\n".join(map(str, reasons)))
        for (name, reasons), where in roles.items()
    ]


def _mark(verdict: Verdict, selection: Selection | None) -> Text:
    if verdict.reasons:
        return Text("refused", style="red")
    if selection is not None and verdict.name in selection.backends(verdict.role):
        return Text(f"chosen ({verdict.priority:g})", style="bold green")
    return Text(f"valid ({verdict.priority:g})", style="green")
