"""Has Triton's kernels compiled by several processes: in one, it compiles them one after the other, for seconds each.

What they compile is found on disk, in Triton's cache, where it is first used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from nvidia_results import described
from nvidia_rows import Group, Row
from nvidia_runtimes import Inputs, open_step
from triton_measure import Backends
from triton_results import PLAIN, TRITON

from anyattn import Platform

LONGEST_S = 240
FEWEST = 6
"""So few parts are compiled sooner than processes start."""

Parts = list[tuple[Group, Sequence[Row], str]]


def parts_of(selected: Sequence[tuple[Group, Sequence[Row]]]) -> Parts:
    """What is compiled together: each group's rows, by each way."""
    return [(group, rows, way) for group, rows in selected for way in (TRITON, PLAIN)]


class Compilers:
    """Processes that each run every so many-th part once. Used in a `with`, which leaves none running."""

    def __init__(self, parts: Parts, device: str, only: Sequence[str]) -> None:
        """parts: those of the rows that `only` selects, as the processes select them again."""
        self._deadline = time.monotonic() + LONGEST_S
        count = min(len(parts), (os.cpu_count() or 1) - 2) if len(parts) > FEWEST else 0
        script = str(Path(__file__).with_name("triton_backend.py"))
        command = [sys.executable, script, "--device", device, *(["--only", *only] if only else []), "--compile"]
        self._processes = [
            subprocess.Popen([*command, f"{i}/{count}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for i in range(count)
        ]

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def wait(self) -> list[str]:
        """Until all are done. Returns what those that failed said, which is told again where it is measured."""
        remarks = []
        for process in self._processes:
            try:
                _, said = process.communicate(timeout=max(self._deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                _, said = process.communicate()
            if process.returncode:
                said = (said.strip().splitlines() or ["nothing"])[-1]
                remarks.append(f"a compiling process ended with {process.returncode} and said: {said}")
        return remarks


def compile_every(parts: Parts, which: str, platform: Platform) -> int:
    """What such a process does. which: "I/N", for every N-th part from the I-th on. Returns the exit code."""
    first, count = map(int, which.split("/"))
    device = torch.device(platform.torch_device)
    failed = False
    for group, rows, way in parts[first::count]:
        backends = Backends(group, rows, platform)
        for row in rows:
            try:
                inputs = Inputs.random(group, row, device)
                with open_step(backends.runtime, row) as plan:
                    backends.attend_call(way, plan, inputs, inputs.new_out(group))()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{group.name}, {row}, {way}: {described(error)}", file=sys.stderr)
                failed = True
        del backends
        torch.cuda.empty_cache()
    return int(failed)
