"""`anyattn backends`: every backend for a model on a device, valid or not, with all reasons, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from anyattn.attention.selection import Selection, Verdict, backends_json
from anyattn.attention.spec import layer_kinds, stretches
from anyattn.cli import options
from anyattn.cli.output import Answered, section, show, show_json
from anyattn.dry_run import Survey, survey
from anyattn.plugins.isolation import stdout_on_stderr
from anyattn.types import ROLES, Reason, Role


def backends(
    model: options.Model = None,
    tp: options.TP = 1,
    device: Annotated[
        str, typer.Option(help="auto, a kind (cpu, cuda), a torch device (cuda:1) or a simulated one (sim:h100).")
    ] = "auto",
    page_size: options.PageSize = None,
    kv_dtype: options.KVDtype = "auto",
    installed_only: Annotated[
        bool, typer.Option("--installed-only", help="On a simulated device, count only packages that are here.")
    ] = False,
    as_json: options.AsJSON = False,
    backend: options.Backend = None,
    prefill_backend: options.PrefillBackend = None,
    decode_backend: options.DecodeBackend = None,
    allocator: options.Allocator = None,
    pool: options.Pool = None,
    layout: options.Layout = None,
    joined_layers: options.JoinedLayers = False,
    dtype: options.Dtype = None,
    graph: options.Graph = "never",
    tree_mask: options.TreeMask = False,
    return_lse: options.ReturnLSE = False,
    deterministic: options.Deterministic = False,
    num_qo_heads: options.NumQoHeads = None,
    num_kv_heads: options.NumKVHeads = None,
    head_dim: options.HeadDim = None,
    sliding_window: options.SlidingWindow = None,
    logits_soft_cap: options.LogitsSoftCap = None,
    sinks: options.Sinks = False,
    alibi: options.Alibi = False,
) -> None:
    """Show every backend, valid or not, with all reasons.

    Ends with the choice for each role; the exit code is 0 when there is one. The model is a preset or a config.json,
    or its layers are described by their dimensions and features, in the words of anyattn.AttentionSpec.
    """
    layers = options.asked_layers(
        model,
        tp,
        dtype=dtype,
        kv_dtype=kv_dtype,
        described={
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "sinks": sinks,
            "alibi": alibi,
        },
        graph=graph,
        tree_mask=tree_mask,
        return_lse=return_lse,
        deterministic=deterministic,
    )
    with stdout_on_stderr():  # a plugin may print when it is imported
        found = survey(
            layers,
            device=None if device == "auto" else device,
            backend=backend,
            prefill_backend=prefill_backend,
            decode_backend=decode_backend or None,
            allocator=allocator,
            pool=pool,
            page_size=page_size,
            layout=options.asked_layout(layout),
            joined_layers=joined_layers,
            installed_only=installed_only,
        )
    if as_json:
        show_json(_document(found, model, tp))
    else:
        _report(found, model, tp)
    if found.error is not None:
        raise Answered(found.error)


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
        notes = [", simulated"] if found.device.simulated else []
        if found.device.status == "declared":
            notes.append(", unverified: nobody has seen its facts on hardware")
        show(f"device    {found.device}{''.join(notes)}")
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
        table.add_row(name, first.distribution, first.standing, "yes" if first.installed else "no", *marks)
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
