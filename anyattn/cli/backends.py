"""`anyattn backends`: every backend for a spec on a device, valid or not, with all reasons, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from anyattn.attention.selection import Selection, Verdict, verdict_json
from anyattn.attention.spec import AttentionSpec
from anyattn.cli.output import section, show, show_json
from anyattn.cli.survey import Survey, survey
from anyattn.types import KV_LAYOUTS, ROLES, GraphLevel, KVLayout, Reason, Role


def backends(
    num_qo_heads: Annotated[int | None, typer.Option(help="Query heads. [default: 32; with --mla 128]")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key and value heads. [default: 8]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of a head. [default: 128]")] = None,
    mla: Annotated[bool, typer.Option("--mla", help="Latent attention with DeepSeek-V3's dimensions.")] = False,
    dtype: Annotated[str, typer.Option(help="Of queries, keys, values and outputs.")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache; auto is the dtype above.")] = "auto",
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a page. [default: negotiated]")] = None,
    layout: Annotated[str | None, typer.Option(help="Of a page, NHD or HND. [default: negotiated]")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Tokens seen, the token itself counted.")] = None,
    logits_soft_cap: Annotated[float | None, typer.Option(help="c of c * tanh(score / c).")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="One logit a head joins the softmax.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="Scores with ALiBi slopes.")] = False,
    tree_mask: Annotated[bool, typer.Option("--tree-mask", help="Verification of token trees.")] = False,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="Log-sum-exp beside the output.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Rows do not depend on the batch.")] = False,
    graph: Annotated[str, typer.Option(help="Replayable batches: never, decode, uniform or always.")] = "never",
    backend: Annotated[str | None, typer.Option(help="Choose this one. [default: the best valid ones]")] = None,
    device: Annotated[str, typer.Option(help="auto, a kind (cpu, cuda) or a torch device (cuda:1).")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show every backend, valid or not, with all reasons.

    Ends with the choice for each role; the exit code is 0 when there is one. The model's layers are described by
    their dimensions and features, in the words of anyattn.AttentionSpec.
    """
    features: dict[str, Any] = {
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "alibi": alibi,
        "tree_mask": tree_mask,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "graph": _graph_level(graph),
    }
    if mla:
        if num_kv_heads is not None or head_dim is not None:
            raise typer.BadParameter("it sets --num-kv-heads and --head-dim itself.", param_hint="--mla")
        spec = _deepseek_v3(128 if num_qo_heads is None else num_qo_heads, features)
    else:
        spec = AttentionSpec(
            num_qo_heads=32 if num_qo_heads is None else num_qo_heads,
            num_kv_heads=8 if num_kv_heads is None else num_kv_heads,
            head_dim=128 if head_dim is None else head_dim,
            **features,
        )
    found = survey(
        spec,
        device=None if device == "auto" else device,
        backend=backend,
        page_size=page_size,
        layout=_layout(layout),
    )
    if as_json:
        show_json(_document(found))
    else:
        _report(found)
    if found.error is not None:
        raise found.error


def _graph_level(name: str) -> GraphLevel:
    try:
        return GraphLevel[name.upper()]
    except KeyError:
        names = ", ".join(level.name.lower() for level in GraphLevel)
        raise typer.BadParameter(f"{name!r} is not one of {names}.", param_hint="--graph") from None


def _layout(name: str | None) -> KVLayout | None:
    found = next((layout for layout in KV_LAYOUTS if name is not None and layout == name.upper()), None)
    if name is not None and found is None:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(KV_LAYOUTS)}.", param_hint="--layout")
    return found


def _deepseek_v3(num_qo_heads: int, features: dict[str, Any]) -> AttentionSpec:
    """Dimensions from the config.json of deepseek-ai/DeepSeek-V3; YaRN's part of the scale does not touch selection."""
    return AttentionSpec.mla(
        num_qo_heads=num_qo_heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        sm_scale=(128 + 64) ** -0.5,
        **features,
    )


def _document(found: Survey) -> dict[str, Any]:
    selection = found.selection
    return {
        "device": None if found.device is None else found.device.to_json(),
        "spec": found.spec.to_json(),
        "choice": None if selection is None else selection.to_json()["choice"],
        "error": None if found.error is None else str(found.error),
        "backends": [verdict_json(verdict) for verdict in found.verdicts],
        "problems": [*found.detection.problems, *found.plugin_problems],
    }


def _report(found: Survey) -> None:
    if found.verdicts:
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for title in ("role", "backend", "from"):
            table.add_column(title, overflow="fold")
        table.add_column("priority", justify="right")
        table.add_column("verdict")
        for verdict in found.verdicts:
            mark = _mark(verdict, found.selection)
            table.add_row(verdict.role, verdict.name, verdict.distribution, str(verdict.priority), mark)
        show(table)
        show()
    if refusals := _refusals(found.verdicts):
        section("refused", refusals)
    if problems := [*found.detection.problems, *found.plugin_problems]:
        section("problems", (("-", problem) for problem in problems))
    if found.selection is not None:
        show(found.selection.explain())


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
    if selection is not None and selection.backend(verdict.role) == verdict.name:
        return Text("chosen", style="bold green")
    return Text("valid", style="green")
