"""One row of triton_backend.py, and the pool of a group that its rows are measured over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from mem_cache_report import Timer
from nvidia_measure import Ways, timed
from nvidia_raw import KERNELS, Call, RawStep
from nvidia_rows import Group, Row
from nvidia_runtimes import Inputs, content_of, layer_kv, open_step, planned
from triton_results import PLAIN, TRITON, RowResult

import anyattn
from anyattn import Platform
from anyattn.attention.hybrid import PlannedStep
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.attention.triton_attention.backend import TritonBackend


class PlainTriton(TritonBackend):
    """The backend without its Gluon kernels."""

    uses_gluon = False


class ReplayTimer(Timer):
    """For replays of graphs, some of which take milliseconds: three calls tell what one costs the host."""

    def launch_us(self, way: Callable[[], object]) -> float:
        """CPU time of one call, median of three, each on an idle device."""
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            way()
            times.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize(self.device)
        return statistics.median(times)


class Backends:
    """The runtime of one group, and the backend without Gluon over the same pages, which hold normal values."""

    def __init__(self, group: Group, rows: Sequence[Row], platform: Platform) -> None:
        """rows: those that the pool must have room for, one at a time."""
        num_pages = max(map(group.pages_of, rows))
        self.runtime: AttentionRuntime = anyattn.create_runtime(
            group.spec, num_layers=1, num_pages=num_pages, device=platform, page_size=group.page_size, backend="triton",
            layout="NHD",
        )  # fmt: skip
        for part in content_of(self.runtime):
            part[1:].normal_()  # all but the null page
        self._plain = PlainTriton(self.runtime.layer_specs[0], self.runtime.pools[0].cache, platform)

    def attend_call(self, way: str, plan: Plan, inputs: Inputs, out: torch.Tensor) -> Call:
        """Plans the step as the way does, and returns what attends. plan: the runtime's."""
        step = planned(plan) if way == TRITON else PlannedStep(self._plain, self._plain.plan(plan.batch))
        kv = layer_kv(self.runtime)
        return lambda: step.run(inputs.q, kv, out)[0]


def measure(group: Group, row: Row, backends: Backends, timer: Timer, rounds: int) -> RowResult:
    """All ways of one row, under graph replay. What cannot be done is in the result, with its reason.

    The device's time is measured, after its cache was flushed.
    """
    result = RowResult(group=group, row=row)
    inputs = Inputs.random(group, row, timer.device)
    ways = Ways(result)
    with open_step(backends.runtime, row) as plan:
        for kernel in group.kernel_names:
            with ways.expected(kernel, ours=False):
                out, kv = inputs.new_out(group), layer_kv(backends.runtime)
                ways.add(kernel, KERNELS[kernel](RawStep.of(group.spec, inputs.q, out, kv, plan.batch)))
        for way in (TRITON, PLAIN):
            with ways.expected(way):
                ways.add(way, backends.attend_call(way, plan, inputs, inputs.new_out(group)))
        result.times_us = timed(ways.calls, timer, rounds)
    return result
