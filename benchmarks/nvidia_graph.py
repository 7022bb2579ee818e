"""What a decode step costs beside its layers, on an NVIDIA GPU: `python benchmarks/nvidia_graph.py [--operations]`.

An engine that captured its layers in a graph calls `extend` and `refresh_graph` before each replay, one without graphs
`extend` and `plan`. For each call, in microseconds, medians:

    host    until the call returns, on a device that has nothing to do: what the host loses
    done    until the device has done what the call gave it, too
    device  between events before and after, on a device that is busy until the call has returned; a call that waits
            for the device has its own waiting in there

With --operations, what the device does in each call, by the profiler: work that `refresh_graph` or `plan` repeats shows
there. The exit code is 1 where a call fails, and 2 without an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mem_cache_report import Timer
from nvidia_report import number, nvidia_gpu, versions
from nvidia_results import AUTO, described
from nvidia_rows import GROUPS, Group
from nvidia_runtimes import new_runtime
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anyattn import Platform
from anyattn.attention.runtime import AttentionRuntime
from anyattn.errors import AnyattnError
from anyattn.types import GraphLevel

# A file that is called nvidia must not be found where a vendor imports its own package of that name.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent.resolve()]

LENGTH = 1024
"""Tokens of each sequence, before the first step."""
MOST_STEPS = 256
BATCHES = (1, 32, 256)
REPEATS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table a group; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="which GPU, as torch calls it")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="groups and backends whose name has it")
    parser.add_argument("--operations", action="store_true", help="what the device does in each call, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there, too")
    options = parser.parse_args(arguments)
    platform = nvidia_gpu(options.device)
    if platform is None:
        return 2
    console = Console(width=150)
    device = torch.device(platform.torch_device)
    torch.cuda.set_device(device)
    console.print(f"{platform}, {', '.join(f'{name} {version}' for name, version in versions().items())}")
    timer = Timer(device, REPEATS)
    rows: list[dict[str, Any]] = []
    gc.disable()
    for group in (group for group in GROUPS if group.decodes):
        for backend in (name for name in (*group.kernels, AUTO) if options.only in f"{group.name}, {name}"):
            for batch in BATCHES:
                row = {"group": group.name, "backend": backend, "batch": batch}
                try:
                    rows.append({**row, **measure(group, backend, batch, platform, timer, options.operations)})
                except Exception as error:
                    rows.append({**row, "error": described(error), "refused": isinstance(error, AnyattnError)})
                gc.collect()
                torch.cuda.empty_cache()
    print_rows(console, rows)
    if options.json:
        options.json.write_text(json.dumps({"device": str(platform), "versions": versions(), "rows": rows}, indent=1))
    return int(any("error" in row and not row["refused"] for row in rows))


def measure(
    group: Group, backend: str, batch: int, platform: Platform, timer: Timer, with_operations: bool
) -> dict[str, Any]:
    """By call, its host, done and device microseconds, and its operations where wanted."""
    num_pages = batch * -(-(LENGTH + MOST_STEPS) // group.page_size)
    rt = new_runtime(group, backend, num_pages, platform)
    calls = step_calls(rt, batch)
    host, done = host_and_done_us(calls)
    device = {name: statistics.median(times) for name, times in timer(calls).items()}
    figures: dict[str, Any] = {
        name: {"host_us": host[name], "done_us": done[name], "device_us": device[name]} for name in calls
    }
    if with_operations:
        for name, call in calls.items():
            figures[name]["operations"] = operations(call)
    return {"calls": figures}


def step_calls(rt: AttentionRuntime, batch: int) -> dict[str, Callable[[], object]]:
    """extend, then plan, then refresh_graph of the step that extend made; in turns, each turn is the next step."""
    seqs, one_each = rt.new_sequences(batch), [1] * batch
    steps = [rt.extend(seqs, [LENGTH] * batch)]

    def extend() -> None:
        steps[0] = rt.extend(seqs, one_each)

    extend()
    plans = [rt.plan(steps[0])]

    def plan() -> None:
        plans[0] = rt.plan(steps[0])

    calls: dict[str, Callable[[], object]] = {"extend": extend, "plan": plan}
    if rt.layer_specs[0].graph >= GraphLevel.DECODE:
        graph_plan = rt.init_graph(batch, max_kv_len=LENGTH + MOST_STEPS)
        calls["refresh_graph"] = lambda: rt.refresh_graph(graph_plan, steps[0])
    return calls


def host_and_done_us(calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, float], dict[str, float]]:
    """By name, medians in turns: until the call returned, and until the device had nothing left to do."""
    host: dict[str, list[float]] = {name: [] for name in calls}
    done: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            host[name].append(1e6 * (time.perf_counter() - start))
            torch.cuda.synchronize()
            done[name].append(1e6 * (time.perf_counter() - start))
    host_us, done_us = ({name: statistics.median(times) for name, times in each.items()} for each in (host, done))
    return host_us, done_us


def operations(call: Callable[[], object]) -> dict[str, int]:
    """Kernels and copies of one call, by name, and how many of each."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    return dict(collections.Counter(names))


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The table, then what was not measured, then operations."""
    names = ("extend", "plan", "refresh_graph")
    table = Table("group", "backend", "batch", *[f"{name}: host, done, device" for name in names], "both, host")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        if "error" in row:
            continue
        calls = row["calls"]
        figures = [_figures(calls.get(name)) for name in names]
        planner = "refresh_graph" if "refresh_graph" in calls else "plan"
        both = number(calls["extend"]["host_us"] + calls[planner]["host_us"])
        table.add_row(row["group"], row["backend"], str(row["batch"]), *figures, both)
    console.print(f"a decode step of sequences of {LENGTH} tokens, us", table)
    for row in rows:
        where = f"{row['group']}, {row['backend']}, batch {row['batch']}"
        if "error" in row:
            console.print(escape(f"{where}: {row['error']}"))
        for name, figures in row.get("calls", {}).items():
            if "operations" in figures:
                done = "; ".join(f"{count} x {what[:60]}" for what, count in figures["operations"].items())
                console.print(escape(f"{where}, {name}: {done or 'nothing'}"))


def _figures(call: Mapping[str, float] | None) -> str:
    """host, done and device."""
    return "-" if call is None else ", ".join(number(call[f"{kind}_us"]) for kind in ("host", "done", "device"))


if __name__ == "__main__":
    sys.exit(main())
