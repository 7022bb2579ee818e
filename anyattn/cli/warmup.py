"""`anyattn warmup`: compiles ahead what kernels compile at their first use, for a model's layers on this machine."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyattn.attention.spec import layer_kinds, stretches
from anyattn.attention.warmup import Warmup, warmup_pages
from anyattn.cli import options
from anyattn.cli.output import section, show, show_json
from anyattn.discovery import require_usable
from anyattn.dry_run import survey
from anyattn.plugins.isolation import stdout_on_stderr

if TYPE_CHECKING:
    from anyattn.attention.runtime import AttentionRuntime


def warmup(
    model: options.Model = None,
    tp: options.TP = 1,
    device: Annotated[str, typer.Option(help="auto, a kind (cpu, cuda) or a torch device (cuda:1).")] = "auto",
    page_size: options.PageSize = None,
    kv_dtype: options.KVDtype = "auto",
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
    """Compile ahead what kernels compile at their first use.

    Makes a small KV cache, runs a layer of each kind through every kind of step, and tells which backends ran what and
    where Triton keeps its kernels. A server that then attends to the same layers finds them there: run it where a
    container image is built, on such a device as the server will have.
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
    choice: dict[str, Any] = {
        "backend": backend,
        "prefill_backend": prefill_backend,
        "decode_backend": decode_backend or None,
        "allocator": allocator,
        "pool": pool,
        "page_size": page_size,
        "layout": options.asked_layout(layout),
        "joined_layers": joined_layers,
    }
    with stdout_on_stderr():  # a plugin may print when it is imported
        found = survey(layers, device=None if device == "auto" else device, **choice)
    if found.device is not None:
        require_usable(found.device)
    if found.error is not None:
        raise found.error
    if not as_json:
        show(f"device    {found.device}")
        if model is not None:
            show(f"model     {model}, {len(layers)} layer{'s' * (len(layers) > 1)}, tensor parallel {tp}")
        show()
    with stdout_on_stderr():  # and a compiler when it compiles
        # Not before: torch takes seconds to import, and what was refused above needs none.
        from anyattn.wiring import create_runtime

        num_pages = max(warmup_pages(selection.page_size) for selection in found.selections.values())
        has_windows = any(spec.sliding_window for spec in layers)
        runtime = create_runtime(
            layers,
            num_pages=num_pages,
            num_window_pages=num_pages if has_windows else None,
            device=found.device,
            **choice,
        )
        _bind_some(runtime)
        caches = [_triton_cache(runtime)]
        done = runtime.warmup()
        caches.append(_triton_cache(runtime))  # torch.compile moves it where no variable says where it is
    kept = [path for path in dict.fromkeys(caches) if path is not None]
    if as_json:
        show_json(_document(runtime, model, tp, done, kept))
    else:
        _report(runtime, done, kept)


def _bind_some(runtime: AttentionRuntime) -> None:
    """Gives the last layer of each kind of MLA up-projections, as an engine may, or may not."""
    import torch

    for spec, numbers in layer_kinds(runtime.layer_specs).items():
        nope, v_dim = spec.qk_nope_head_dim, spec.v_head_dim
        if not spec.is_mla or nope is None or v_dim is None or spec.deterministic:  # see `bind_mla`
            continue
        zeros = functools.partial(torch.zeros, dtype=getattr(torch, spec.dtype), device=runtime.device)
        heads, rank = spec.num_qo_heads, spec.vo_head_dim
        runtime.bind_mla(numbers[-1], zeros(heads, nope, rank), zeros(heads, rank, v_dim))


def _triton_cache(runtime: AttentionRuntime) -> str | None:
    """The folder of what Triton compiles; None where it compiles nothing for the device, or is not installed."""
    if not runtime.selection.platform.triton:
        return None
    try:
        path: str = importlib.import_module("triton").knobs.cache.dir
    except Exception:  # no triton, one that cannot be loaded here, or one before knobs
        return None
    return os.path.abspath(path)


def _warmed(done: Warmup, numbers: Sequence[int]) -> dict[str, list[str]]:
    """Of layers of one kind: the kinds of step that each backend ran."""
    steps: dict[str, dict[str, None]] = {}
    for part in done.warmed:
        if part.layer in numbers:
            steps.setdefault(part.backend, {}).update(dict.fromkeys(part.steps))
    return {name: list(kinds) for name, kinds in steps.items()}


def _document(
    runtime: AttentionRuntime, model: str | None, tp: int, done: Warmup, caches: Sequence[str]
) -> dict[str, Any]:
    kinds = layer_kinds(runtime.layer_specs)
    return {
        "device": runtime.selection.platform.to_json(),
        "model": {"name": model, "tp": tp, "num_layers": len(runtime.layer_specs)},
        "choices": [selection.choice_json() for selection in runtime.selections],
        "warmed": [
            {"layers": numbers, "spec": spec.to_json(), "backends": _warmed(done, numbers)}
            for spec, numbers in kinds.items()
        ],
        "seconds": done.seconds,
        "triton_caches": list(caches),
    }


def _report(runtime: AttentionRuntime, done: Warmup, caches: Sequence[str]) -> None:
    kinds = layer_kinds(runtime.layer_specs)
    for spec, numbers in kinds.items():
        which = "" if len(kinds) == 1 else f"layers {stretches(numbers)}: "
        warmed = _warmed(done, numbers)
        section(f"{which}{spec}", ((name, ", ".join(steps)) for name, steps in warmed.items()))
    show(f"warmed up in {done.seconds:.1f} s")
    for path in caches:
        show(f"Triton's kernels are kept in {path}")
