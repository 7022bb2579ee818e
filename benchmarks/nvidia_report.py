"""What the benchmarks of NVIDIA GPUs print, and what they run on."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from nvidia_results import AUTO, Bound, Result, attention, in_graph, run
from nvidia_rows import Group
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anyattn import Platform
from anyattn.discovery import usable_device
from anyattn.errors import NoDeviceError

PACKAGES = (
    "torch", "triton", "flashinfer-python", "sglang-kernel", "vllm", "flash-attn-3", "sgl-flash-mla", "flash-mla",
)  # fmt: skip


def nvidia_gpu(name: str) -> Platform | None:
    """The device of that name, which torch can drive; None, with a message, where there is none."""
    try:
        if not torch.cuda.is_available():
            raise NoDeviceError(f"torch {torch.__version__} sees none (torch.cuda.is_available() is false)")
        return usable_device(name)
    except NoDeviceError as error:
        print(f"{Path(sys.argv[0]).name} needs an NVIDIA GPU: {error}", file=sys.stderr)
        return None


def versions() -> dict[str, str]:
    """Of the packages that matter and are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def print_group(console: Console, group: Group, results: Sequence[Result]) -> None:
    """A row a shape: raw kernels, each backend of anyattn, what was chosen, and the limit."""
    if not results:
        return
    backends = list(group.kernels)
    table = Table(
        "shape", *group.kernel_names, *[f"{name}: attention, run, graph" for name in backends],
        "auto: attention, graph", "auto is", "limit",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        table.add_row(
            str(result.row),
            *[_figures(result, kernel) for kernel in group.kernel_names],
            *[_figures(result, attention(name), run(name), in_graph(name)) for name in backends],
            _figures(result, attention(AUTO), in_graph(AUTO)),
            result.served_by.get(AUTO, "-").removesuffix("Backend"),
            number(group.limit_us(result.row)),
        )
    console.print(f"[bold]{group.name}[/bold], page {group.page_size}, us", table)


def _figures(result: Result, *ways: str) -> str:
    """The medians of those that were measured, with how many times as long as its bound's other they take."""
    ratios = {bound.what: f" x{bound.ours_us / bound.other_us:.2f}" for bound in result.bounds()}
    return ", ".join(number(us) + ratios.get(way, "") for way in ways if (us := result.us(way)) is not None) or "-"


def print_host(console: Console, result: Result) -> None:
    """What a layer costs the host."""
    table = Table("ours", "host, us", "raw", "host, us", "difference, us")
    for bound in result.bounds():
        difference = f"{bound.ours_us - bound.other_us:+.1f}"
        table.add_row(bound.what, number(bound.ours_us), bound.other, number(bound.other_us), difference)
    console.print(f"{result.where}, a layer without a graph", table)


def print_remarks(console: Console, results: Sequence[Result]) -> None:
    """Why columns are empty, once each, and notes."""
    reasons = {(way, reason) for result in results for way, reason in result.reasons.items()}
    for way, reason in sorted(reasons):
        console.print(escape(f"{way}: {reason}"))
    for note in [note for result in results for note in result.notes]:
        console.print(escape(note))


def print_verdicts(console: Console, bounds: Sequence[Bound], failures: Sequence[str]) -> None:
    """What is missed, and how much was judged."""
    missed = [bound for bound in bounds if not bound.met]
    if missed:
        table = Table("missed by", "where", "us", "beside", "us", "at most, us", title="missed")
        for bound in missed:
            ours_us, other_us, most_us = map(number, (bound.ours_us, bound.other_us, bound.most_us))
            table.add_row(bound.what, bound.where, ours_us, bound.other, other_us, most_us)
        console.print(table)
    for failure in failures:
        console.print(escape(f"FAILED {failure}"))
    console.print(f"{len(bounds) - len(missed)} of {len(bounds)} bounds met, {len(failures)} failures")


def number(us: float) -> str:
    """Microseconds with what matters of their digits."""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"
