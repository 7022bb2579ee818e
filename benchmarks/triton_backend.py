"""The `triton` backend beside the vendors' kernels: `python benchmarks/triton_backend.py [--only SUBSTRING ...]`.

Each row is the attention of one layer's step in bfloat16, nothing stored, over pages of 1, 16 or 64 tokens in random
order. Rows come with lengths that are alike and, called ragged, with lengths drawn at random. The vendors' kernels
called directly, the backend (`triton`) and the backend without its Gluon kernels (`plain`) do the same work, planned
before; results are compared with the first one's, and then all are timed in turns, as replays of device graphs, by the
device's events, each after the cache was flushed. Figures are medians over the rounds, in microseconds. Ratios are to
the fastest of the vendors' kernels in the same row:

    rows of                           geometric mean at most   each at most
    MLA decode, 8, 16 and 32 heads    0.95                     1.03           plain, too
    MLA decode, 128 heads             1.10, of batch 1 0.90
    GQA decode                        0.97                     1.03           plain, too
    GQA prefill                       1.05, plain 1.20
    verify, of GQA and MLA            1.05

    limit   the larger of bytes / 4.4 TB/s and operations / 790 TFLOP/s, an H200's, of the lengths as they are

What cannot run here is told with its reason. The exit code is 1 where a ratio is larger, a result is wrong or nothing
could be judged, and 2 without an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from nvidia_measure import contained
from nvidia_raw import compile_kernels
from nvidia_report import nvidia_gpu, print_remarks, versions
from rich.console import Console
from rich.markup import escape
from triton_compile import Compilers, compile_every, parts_of
from triton_measure import Backends, ReplayTimer, measure
from triton_results import RowResult, print_group, print_verdicts, verdicts
from triton_rows import name_of, select

# A file that is called nvidia must not be found where a vendor imports its own package of that name.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent.resolve()]

TURNS = 9
"""In a round, how often each way is timed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each group and the verdicts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="which GPU, as torch calls it")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SUBSTRING", help='rows that have all in "group, row, page N, ragged,"'
    )
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 101), metavar="N", help="by default 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there, too")
    parser.add_argument("--compile", default="", metavar="I/N", help=argparse.SUPPRESS)  # see triton_compile
    options = parser.parse_args(arguments)
    selected = select(options.only)
    if not selected:
        parser.error(f"no row has {' and '.join(map(repr, options.only))} in its name")
    platform = nvidia_gpu(options.device)
    if platform is None:
        return 2
    started = time.perf_counter()
    console = Console(width=200)
    device = torch.device(platform.torch_device)
    torch.cuda.set_device(device)
    if options.compile:
        with torch.inference_mode():
            return compile_every(parts_of(selected), options.compile, platform)
    console.print(f"{platform}, {', '.join(f'{name} {version}' for name, version in versions().items())}")
    results: list[RowResult] = []
    failures: list[str] = []
    with torch.inference_mode(), Compilers(parts_of(selected), options.device, options.only) as compilers:
        compile_kernels([(group.spec, 64, kernel) for group, _ in selected for kernel in group.kernel_names], device)
        for remark in compilers.wait():
            console.print(escape(remark))
        console.print(f"the kernels took {time.perf_counter() - started:.1f} s to compile or find")
        gc.disable()  # it would run between turns
        gc.freeze()  # and again and again over all that is there already
        timer = ReplayTimer(device, options.rounds * TURNS)
        for _, of_all_page_sizes in itertools.groupby(selected, key=lambda each: each[0].name):
            measured: list[RowResult] = []
            for group, rows in of_all_page_sizes:
                with contained(f"{group.name}, page {group.page_size}", failures):
                    backends = Backends(group, rows, platform)
                    for row in rows:
                        with contained(name_of(group, row), failures):
                            measured.append(measure(group, row, backends, timer, options.rounds))
                    del backends
            print_group(console, measured)
            print_remarks(console, measured)
            failures += [failure for result in measured for failure in result.failures]
            results += measured
    gc.unfreeze()
    gc.enable()
    found = verdicts(results)
    print_verdicts(console, found, failures)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if options.json:
        facts = {"device": str(platform), "versions": versions(), "rounds": options.rounds, "failures": failures}
        rows_json = [result.to_json() for result in results]
        text = json.dumps({**facts, "rows": rows_json, "verdicts": [each.to_json() for each in found]}, indent=1)
        options.json.write_text(text + "\n")
    return int(not found or bool(failures) or not all(verdict.met for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
