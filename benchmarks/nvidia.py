"""Attention on an NVIDIA GPU, by raw kernels and through anyattn: `python benchmarks/nvidia.py [--only SUBSTRING]`.

Each row is one layer's step in bfloat16, over pages in random order. The vendors' kernels called directly, the same
kernels through anyattn (its backends, named) and what anyattn chooses by itself do the same work; results are compared
with each other, and then all are timed in turns, as replays of device graphs, by the device's events, each after the
cache was flushed. Figures are medians over the rounds, in microseconds:

    attention   the backend's `run`, against the raw kernel: at most 1.02 times as long, or 0.5 us longer
    run         `AttentionRuntime.run`, which stores and attends, against a store and the raw kernel: likewise
    graph       the same with a plan of `init_graph`, as an engine captures it; for information
    auto        attention by the chosen backend, against the fastest: at most 1.05 times as long, or 1 us longer
    limit       the larger of bytes / 4.4 TB/s and operations / 790 TFLOP/s, an H200's

Beside that, what `AttentionRuntime.run` costs the host in each layer where no graph is used: at most 5 us more than a
store and the raw kernel. What cannot run here is told with its reason. The exit code is 1 where a bound is missed, a
result is wrong or nothing could be judged, and 2 without an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from mem_cache_report import Timer
from nvidia_measure import contained, measure, measure_host
from nvidia_raw import compile_kernels
from nvidia_report import nvidia_gpu, print_group, print_host, print_remarks, print_verdicts, versions
from nvidia_results import Bound, Result
from nvidia_rows import GROUPS, Group, Row
from nvidia_runtimes import Runtimes
from rich.console import Console

# A file that is called nvidia must not be found where a vendor imports its own package of that name.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent.resolve()]

TURNS = 15
"""In a round, how often each way is timed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each group and the verdicts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="which GPU, as torch calls it")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="rows whose group and name have it")
    parser.add_argument("--rounds", type=int, default=5, choices=range(1, 101), metavar="N", help="by default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there, too")
    options = parser.parse_args(arguments)
    selected = select(options.only)
    if not selected:
        parser.error(f"no row has {options.only!r} in its name")
    platform = nvidia_gpu(options.device)
    if platform is None:
        return 2
    started = time.perf_counter()
    console = Console(width=180)
    device = torch.device(platform.torch_device)
    torch.cuda.set_device(device)
    console.print(f"{platform}, {', '.join(f'{name} {version}' for name, version in versions().items())}")
    results: list[Result] = []
    bounds: list[Bound] = []
    failures: list[str] = []
    gc.disable()  # it would run in the host's bursts of calls
    with torch.inference_mode():
        wanted = [(group.spec, group.page_size, kernel) for group, _, _ in selected for kernel in group.kernel_names]
        console.print(f"FlashInfer's kernels took {compile_kernels(wanted, device):.1f} s to compile or find")
        timer = Timer(device, options.rounds * TURNS)
        for group, rows, with_host in selected:
            runtimes = Runtimes(group, [*rows, group.host_row], platform)
            failures += runtimes.failures
            calls = [functools.partial(measure, group, row, runtimes, timer, options.rounds) for row in rows]
            if with_host:
                calls.append(functools.partial(measure_host, group, runtimes, device))
            measured = []
            for call in calls:
                with contained(group.name, failures):
                    measured.append(call())
            print_group(console, group, [result for result in measured if not result.host])
            for result in measured:
                if result.host:
                    print_host(console, result)
            print_remarks(console, measured)
            bounds += [bound for result in measured for bound in result.bounds()]
            failures += [failure for result in measured for failure in result.failures]
            results += measured
            del runtimes, calls, call  # with their pools
    gc.enable()
    print_verdicts(console, bounds, failures)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if options.json:
        facts = {"device": str(platform), "versions": versions(), "rounds": options.rounds, "failures": failures}
        rows_json = [result.to_json() for result in results]
        text = json.dumps({**facts, "rows": rows_json, "bounds": [bound.to_json() for bound in bounds]}, indent=1)
        options.json.write_text(text + "\n")
    return int(not bounds or bool(failures) or not all(bound.met for bound in bounds))


def select(only: str) -> list[tuple[Group, list[Row], bool]]:
    """The groups that have rows with this in their name, those rows, and whether host time is measured."""
    chosen = []
    for group in GROUPS:
        rows = [row for row in group.rows if only in f"{group.name}, {row}"]
        with_host = only in f"{group.name}, host time"
        if rows or with_host:
            chosen.append((group, rows, with_host))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
