"""One row of nvidia.py: every way of doing its step, checked against each other and timed in turns."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import torch
from mem_cache_report import Timer
from nvidia_raw import KERNELS, Call, RawStep
from nvidia_results import AUTO, Result, after_store, attention, described, in_graph, run
from nvidia_rows import Group, Row
from nvidia_runtimes import Inputs, Runtimes, layer_kv, open_step, planned

from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.types import GraphLevel

LARGEST_ERROR = 0.02
"""Norm of the difference over the norm. Kernels that round p to bfloat16 in different places differ by 0.003, those
that read a wrong page by far more."""

HOST_REPEATS, HOST_BURST = 30, 40
"""Bursts of calls, which must not fill the device's queue of launches: it would hold up the host."""


def measure(group: Group, row: Row, runtimes: Runtimes, timer: Timer, rounds: int) -> Result:
    """All ways of one row, under graph replay. What cannot be done is in the result, with its reason.

    The device's time is measured, after its cache was flushed.
    """
    result = Result(group=group, row=row)
    inputs = Inputs.random(group, row, timer.device)
    ways = Ways(result)
    with _steps(runtimes, row, result, inputs) as plans:
        for kernel, rt, plan in _raw(group, runtimes, plans):
            with ways.expected(kernel, ours=False):
                attend, store_and_attend = _raw_calls(rt, plan, inputs, kernel, inputs.new_out(group))
                ways.add(kernel, attend)
                ways.add(after_store(kernel), store_and_attend)
        for backend, plan in plans.items():
            rt, out = runtimes.of[backend], inputs.new_out(group)
            result.served_by[backend] = type(planned(plan).backend).__name__
            with ways.expected(attention(backend)):
                ways.add(attention(backend), _attend_call(rt, plan, inputs, out))
            with ways.expected(run(backend)):
                ways.add(run(backend), _run_call(rt, plan, inputs, out))
            if rt.layer_specs[0].graph >= GraphLevel.DECODE:
                with ways.expected(in_graph(backend)):
                    graph_plan = rt.init_graph(row.batch, max_kv_len=row.length)
                    refresh = functools.partial(rt.refresh_graph, graph_plan, plan.batch)
                    ways.add(in_graph(backend), _run_call(rt, graph_plan, inputs, out), before_replay=refresh)
            elif group.spec.graph >= GraphLevel.DECODE:
                result.reasons[in_graph(backend)] = "it declares no graphs for this"
        result.times_us = timed(ways.calls, timer, rounds)
    return result


def timed(calls: Mapping[str, Callable[[], object]], timer: Timer, rounds: int) -> dict[str, list[float]]:
    """By way, the median of each round, in microseconds. A round is as many turns as the timer has repeats for."""
    if not calls:
        return {}
    size = timer.repeats // rounds
    return {
        way: [statistics.median(times[i * size : (i + 1) * size]) for i in range(rounds)]
        for way, times in timer(calls).items()
    }


def measure_host(group: Group, runtimes: Runtimes, device: torch.device) -> Result:
    """What `rt.run` costs the host beside a store and a raw kernel, called one after the other without a graph."""
    result = Result(group=group, row=group.host_row, host=True)
    inputs = Inputs.random(group, group.host_row, device)
    calls: dict[str, Call] = {}
    with _steps(runtimes, group.host_row, result, inputs) as plans:
        out = inputs.new_out(group)
        for kernel, rt, plan in _raw(group, runtimes, plans):
            with reported(result, kernel, ours=False):
                _, call = _raw_calls(rt, plan, inputs, kernel, out)
                call()
                calls[after_store(kernel)] = call
        for backend, plan in plans.items():
            if backend != AUTO:
                calls[run(backend)] = _run_call(runtimes.of[backend], plan, inputs, out)
        result.times_us = {way: [us] for way, us in host_us(calls).items()}
    return result


def host_us(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """By name, the microseconds that a call keeps the host; medians of bursts, in turns, each on an idle device."""
    bursts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(HOST_REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_BURST):
                call()
            bursts[name].append(1e6 * (time.perf_counter() - start) / HOST_BURST)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in bursts.items()}


def captured(call: Call) -> tuple[Callable[[], object], torch.Tensor]:
    """A device graph's replay, and the tensor that it writes; called before, so that nothing is compiled in it."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output


class Ways:
    """Calls of one row that are captured and right. calls: by way, what the timer calls.

    A graph reads the tensors that it was captured with, and does not keep them: the calls that hold them are kept here.
    """

    def __init__(self, result: Result) -> None:
        self.calls: dict[str, Callable[[], object]] = {}
        self._kept: list[Call] = []
        self._result = result
        self._first: tuple[str, torch.Tensor] | None = None
        self.expected = functools.partial(reported, result)

    def add(self, way: str, call: Call, *, before_replay: Callable[[], object] | None = None) -> None:
        """Captures a call, and checks its result. Where it cannot be captured, it is called each time, and a note left.

        before_replay: called once, after the capture. Raises ArithmeticError where the first way has another result.
        """
        self._kept.append(call)
        try:
            replay, output = captured(call)
        except RuntimeError as error:
            replay, output = call, call()
            self._result.notes.append(f"{self._result.where}, {way}: timed without a graph: {described(error)}")
        if before_replay is not None:
            before_replay()
        output.fill_(torch.nan)
        returned = replay()
        if isinstance(returned, torch.Tensor):  # a call without a graph may write to another tensor each time
            output = returned
        name, wanted = self._first or (way, output)
        error_norm = ((output.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if not error_norm <= LARGEST_ERROR:  # nor is NaN
            raise ArithmeticError(f"WRONG: differs from {name} by {error_norm:.3g} of its norm")
        if self._first is None:
            self._first = way, output.clone()
        self.calls[way] = replay


@contextmanager
def contained(where: str, failures: list[str]) -> Iterator[None]:
    """What fails in here, such as a device that is lost, is a failure, and what was measured before is still told."""
    try:
        yield
    except Exception as error:
        failures.append(f"{where}: {described(error)}")
    gc.collect()  # graphs, and the pools of the last group
    with suppress(RuntimeError):  # a device that is lost fails again here
        torch.cuda.empty_cache()


@contextmanager
def reported(result: Result, way: str, *, ours: bool = True) -> Iterator[None]:
    """What fails in here is the way's reason, and, unless a vendor's kernel cannot run, a failure."""
    try:
        yield
    except Exception as error:
        result.reasons[way] = described(error)
        if ours or isinstance(error, ArithmeticError):
            result.failures.append(f"{result.where}, {way}: {described(error)}")


@contextmanager
def _steps(runtimes: Runtimes, row: Row, result: Result, inputs: Inputs) -> Iterator[dict[str, Plan]]:
    """By backend, the row's planned step, run once: the raw kernels, too, find the new tokens in the pages."""
    result.reasons |= {attention(backend): reason for backend, reason in runtimes.reasons.items()}
    plans: dict[str, Plan] = {}
    with ExitStack() as stack:
        for backend, rt in runtimes.of.items():
            with reported(result, attention(backend)):
                plan = stack.enter_context(open_step(rt, row))
                _run_call(rt, plan, inputs, inputs.new_out(result.group))()
                plans[backend] = plan
        yield plans


def _raw(group: Group, runtimes: Runtimes, plans: Mapping[str, Plan]) -> Iterator[tuple[str, AttentionRuntime, Plan]]:
    """Each raw kernel, over the pages of the backend that it is compared with, or of any where that is not there."""
    for backend, kernels in group.kernels.items():
        beside = backend if backend in plans else next(iter(plans), None)
        if beside is not None:
            for kernel in kernels:
                yield kernel, runtimes.of[beside], plans[beside]


def _raw_calls(rt: AttentionRuntime, plan: Plan, inputs: Inputs, kernel: str, out: torch.Tensor) -> tuple[Call, Call]:
    """The raw kernel over a runtime's pages, and the same after its pool has stored."""
    pool, place, batch = rt.pools[0], rt.places[0][1], plan.batch
    attend = KERNELS[kernel](RawStep.of(rt.layer_specs[0], inputs.q, out, layer_kv(rt), batch))

    def store_and_attend() -> torch.Tensor:
        pool.store(place, inputs.k, inputs.v, batch.out_slots)
        return attend()

    return attend, store_and_attend


def _attend_call(rt: AttentionRuntime, plan: Plan, inputs: Inputs, out: torch.Tensor) -> Call:
    """The backend's part of `rt.run`."""
    step, kv, ours = planned(plan), layer_kv(rt), _out_of(plan, out)

    def attend() -> torch.Tensor:
        return step.run(inputs.q, kv, ours)[0]

    return attend


def _run_call(rt: AttentionRuntime, plan: Plan, inputs: Inputs, out: torch.Tensor) -> Call:
    """All of it."""
    return functools.partial(rt.run, 0, inputs.q, inputs.k, inputs.v, plan, out=_out_of(plan, out))


def _out_of(plan: Plan, out: torch.Tensor) -> torch.Tensor | None:
    """None for a backend whose kernels make their outputs, as the raw ones then do too."""
    return None if planned(plan).backend.capabilities.allocates_out else out
