"""How mem_cache.py measures and what it prints: rows of figures, timers of kernels and calls, and counts of syncs."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from portable import synchronize
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FLUSH_BYTES = 1 << 28
"""More than any cache holds."""

OURS = "ours"
COPY = "plain copy"


class WrongResult(Exception):
    """Two ways of doing the same work do not agree."""


def require(condition: bool, what: str) -> None:
    """Raises WrongResult."""
    if not condition:
        raise WrongResult(what)


class Report:
    """Rows of figures: printed section by section, written as JSON."""

    def __init__(self, device: torch.device, copy_bytes_per_s: float, *, with_targets: bool) -> None:
        """with_targets: whether they are judged; they are for the full sizes on an accelerator."""
        self.device = device
        self.with_targets = with_targets
        self.copy_bytes_per_s = copy_bytes_per_s
        self.rows: list[dict[str, Any]] = []
        self.wrong = False

    def add(self, section: str, case: str, what: str, **figures: Any) -> None:
        """One row; figures: as `add_times` has them, or an error."""
        self.rows.append({"section": section, "case": case, "what": what, **figures})

    def add_times(
        self,
        section: str,
        case: str,
        times_us: Mapping[str, Sequence[float]],
        *,
        num_bytes: int | None = None,
        in_device: bool = True,
        targets: Mapping[str, float] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """One row for each way of doing the work, ours first; where it is not there, nothing is compared.

        num_bytes: read and written together. in_device: whether that is what its bandwidth limits.
        targets: by the other's name, the most of its time that ours may take.
        """
        first, first_times = next(iter(times_us.items()))
        ours = statistics.median(first_times) if first.startswith(OURS) else None
        for i, (what, times) in enumerate(times_us.items()):
            quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
            figures: dict[str, Any] = {"median_us": quartiles[1], "quartiles_us": [quartiles[0], quartiles[2]]}
            if num_bytes is not None:
                figures["gb_per_s"] = 1e-3 * num_bytes / quartiles[1]
                if in_device:
                    figures["limit_us"] = 1e6 * num_bytes / self.copy_bytes_per_s
            if ours is not None and i > 0:
                ratio = figures["ours_over_this"] = ours / quartiles[1]
                if self.with_targets and targets and what in targets:
                    figures |= {"target": targets[what], "met": ratio <= targets[what]}
            self.add(section, case, what, **figures, note=(notes or {}).get(what, ""))

    @contextmanager
    def case(self, section: str, case: str, way: str = "", *, strict: bool = False) -> Iterator[None]:
        """What fails in here becomes a row. strict: anything but a lack of memory is a wrong result."""
        try:
            yield
        except WrongResult as error:
            self.wrong = True
            self.add(section, case, way, error=f"WRONG: {error}")
        except Exception as error:  # what cannot run here: no memory, no such kernel
            self.wrong |= strict and not isinstance(error, MemoryError | torch.OutOfMemoryError)
            self.add(section, case, way, error=f"not run: {type(error).__name__}: {error}".splitlines()[0][:300])
        gc.collect()
        if self.device.type != "cpu":
            with suppress(RuntimeError):  # a device that failed fails again here
                torch.get_device_module(self.device).empty_cache()

    def print(self, console: Console, section: str) -> None:
        """The section's table."""
        table = Table("case", "way", "median, us", "quartiles, us", "limit, us", "GB/s", "ours / this", "note")
        for column in table.columns[2:7]:
            column.justify = "right"
        last = None
        for row in (row for row in self.rows if row["section"] == section):
            if last not in (None, row["case"]):
                table.add_section()
            ratio = f"{row['ours_over_this']:.2f}" if "ours_over_this" in row else ""
            if "target" in row:
                ratio += f" ({'met' if row['met'] else 'MISSED'}: at most {row['target']:.2f})"
            table.add_row(
                row["case"] if row["case"] != last else "",
                row["what"],
                _number(row.get("median_us")),
                " to ".join(_number(quartile) for quartile in row.get("quartiles_us", [])),
                _number(row.get("limit_us")),
                _number(row.get("gb_per_s")),
                ratio,
                escape(row.get("error") or row.get("note", "")),
            )
            last = row["case"]
        console.print(f"[bold]{section}[/bold]", table)

    def print_targets(self, console: Console) -> None:
        """What was aimed for, in one place."""
        for row in self.rows:
            if "target" in row:
                verdict = f"{row['ours_over_this']:.2f} of {row['what']}, at most {row['target']:.2f} aimed for"
                console.print(f"{'met   ' if row['met'] else 'MISSED'} {row['section']}, {row['case']}: {verdict}")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


class Timer:
    """Times kernels in turns: microseconds between two events on the device, or on the CPU by the clock."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
            self._flush_us = statistics.median(self._events([self._cache.zero_] * 10, flushes=[0] * 10))

    def __call__(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """By name, the microseconds of each repetition."""
        for way in ways.values():
            way()
        synchronize(self.device)
        if self.device.type == "cpu":
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(self.repeats):
                for name, way in ways.items():
                    start = time.perf_counter()
                    way()
                    times[name].append(1e6 * (time.perf_counter() - start))
            return times
        calls = list(ways.values()) * self.repeats
        flushes = [1 + int(2 * self.launch_us(way) / self._flush_us) for way in ways.values()] * self.repeats
        measured = self._events(calls, flushes)
        return {name: measured[i :: len(ways)] for i, name in enumerate(ways)}

    def launches(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, str]:
        """By name, what a call costs the CPU; nothing where the CPU does the work."""
        if self.device.type == "cpu":
            return {}
        return {name: f"{self.launch_us(way):.0f} us of CPU time" for name, way in ways.items()}

    def launch_us(self, way: Callable[[], object]) -> float:
        """CPU time of one call: median of 5 rounds of 10 calls, each round on an idle device."""
        rounds = []
        for _ in range(5):
            synchronize(self.device)
            start = time.perf_counter()
            for _ in range(10):
                way()
            rounds.append(1e6 * (time.perf_counter() - start) / 10)
        synchronize(self.device)
        return statistics.median(rounds)

    def _events(self, calls: Sequence[Callable[[], object]], flushes: Sequence[int]) -> list[float]:
        pairs = [[self._module.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        for (start, end), call, num_flushes in zip(pairs, calls, flushes, strict=True):
            for _ in range(num_flushes):
                self._cache.zero_()
            start.record()
            call()
            end.record()
        synchronize(self.device)
        return [1e3 * start.elapsed_time(end) for start, end in pairs]


def wall_us(device: torch.device, call: Callable[[], object]) -> float:
    """Microseconds of a call and a synchronise, on a device that was idle before."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e6 * (time.perf_counter() - start)


@contextmanager
def sync_debug_mode(device: torch.device, mode: str) -> Iterator[bool]:
    """Sets it, and tells whether the device has it and it finds a sync that is there."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield False
        return
    word = torch.zeros(1, device=device)
    before = module.get_sync_debug_mode()
    try:
        module.set_sync_debug_mode("error")
        try:
            word.item()
            works = False
        except RuntimeError:
            works = True
        module.set_sync_debug_mode(mode)
        yield works
    finally:
        module.set_sync_debug_mode(before)


def loaded(dotted: str) -> Any:
    """The object of `module:name`."""
    module, _, attribute = dotted.partition(":")
    return getattr(importlib.import_module(module), attribute)
