"""Allocator, index and store kernels against what engines do: `python benchmarks/mem_cache.py [--device cuda]`.

Ours, the vectorised torch formulation that engines use (`mem_cache_peers.py`) and a plain copy of the same bytes do the
same work, in turns, in one run. Before anything is timed their results are compared, and one that is wrong ends the run
with exit code 1. Allocators are measured by the clock on the wall, from the call to the end of a synchronise. Kernels
are measured by the device's events, after the cache was flushed; the flush lasts longer than a launch, so that no
launch is in the figures: what launching costs the CPU is told beside them. The limit is what the bytes take at the
bandwidth that a large copy reaches, in the same run. What cannot run here is a row that says why.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from mem_cache_allocators import allocator_section
from mem_cache_kernels import indices_section, store_section
from mem_cache_pages import big_section, tier_section
from mem_cache_report import Report, Timer
from portable import bandwidth
from rich.console import Console

from anyattn.discovery import usable_device
from anyattn.mem_cache.kernels import triton_runs_on

SECTIONS = ("allocator", "indices", "store", "tier", "big")


def main() -> int:
    """Prints one table a section; the exit code is 1 when a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="a device kind or torch device; by default the first usable one")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions: to see that it runs")
    parser.add_argument("--sections", default="allocator,indices,store,tier", help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--big", action="store_true", help="adds the section big: pools of 4 to 8 GiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all rows there, too")
    options = parser.parse_args()
    sections = [*options.sections.split(","), *(["big"] if options.big else [])]
    if unknown := sorted(set(sections) - set(SECTIONS)):
        parser.error(f"there is no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    platform = usable_device(options.device)
    device = torch.device(platform.torch_device)
    console = Console(width=180)
    on_target = device.type != "cpu" and not options.quick
    report = Report(device, bandwidth(device), with_targets=on_target)
    timer = Timer(device, 3 if options.quick else 20 if device.type == "cpu" else 200)
    versions = {"torch": torch.__version__, "triton": triton_version(device), "python": sys.version.split()[0]}
    console.print(
        f"{platform}, {', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"a large copy reads and writes {report.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    gc.disable()  # `Report.case` collects between cases, and does not look again at what is there by now
    gc.freeze()
    run: dict[str, Callable[[], None]] = {
        "allocator": lambda: allocator_section(report, device, options.quick),
        "indices": lambda: indices_section(report, timer, device, options.quick),
        "store": lambda: store_section(report, timer, device, options.quick),
        "tier": lambda: tier_section(report, timer, device, options.quick),
        "big": lambda: big_section(report, device),
    }
    for section in dict.fromkeys(sections):
        with report.case(section, "all"):
            run[section]()
        report.print(console, section)
    gc.unfreeze()
    report.print_targets(console)
    if options.json:
        facts = {"device": str(platform), "versions": versions, "quick": options.quick}
        facts["copy_gb_per_s"] = report.copy_bytes_per_s / 1e9
        options.json.write_text(json.dumps({**facts, "rows": report.rows}, indent=1) + "\n")
    return int(report.wrong)


def triton_version(device: torch.device) -> str:
    """With what takes its place where it does not run."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return version if triton_runs_on(device) else f"{version} (does not run here: torch instead)"


if __name__ == "__main__":
    sys.exit(main())
