"""What nvidia.py measures of a row, by the names of its ways, and what that says of the bounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nvidia_rows import Group, Row

AUTO = "auto"
"""The column of what is chosen where no backend is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How long ours may take beside another: ratio times as long or slack_us longer, whichever allows more."""

    where: str
    what: str
    ours_us: float
    other: str
    other_us: float
    ratio: float
    slack_us: float

    @property
    def most_us(self) -> float:
        """The longest that is within it."""
        return max(self.ratio * self.other_us, self.other_us + self.slack_us)

    @property
    def met(self) -> bool:
        """Whether ours is within it."""
        return self.ours_us <= self.most_us

    def to_json(self) -> dict[str, Any]:
        """All fields, and the verdict."""
        return {**asdict(self), "most_us": self.most_us, "met": self.met}


def attention(backend: str) -> str:
    """The way that attends through anyattn and does not store."""
    return f"{backend}: attention"


def run(backend: str) -> str:
    """The way that stores and attends, as `AttentionRuntime.run` does."""
    return f"{backend}: run"


def in_graph(backend: str) -> str:
    """The same with a plan of `init_graph`, as an engine captures it."""
    return f"{backend}: run of init_graph"


def after_store(kernel: str) -> str:
    """The way that has the pool store, and calls the raw kernel."""
    return f"{kernel} after a store"


@dataclass(slots=True, kw_only=True)
class Result:
    """A row as it was measured.

    times_us: by way, a median for each round; of the device, or where `host` what a call without a graph keeps it.
    reasons: by way, why it was not measured.
    served_by: by column of anyattn, the class of the backend that the step went to.
    failures: what has to be mended; it fails the benchmark. notes: what else is to be known.
    """

    group: Group
    row: Row
    host: bool = False
    times_us: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    served_by: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Group and row."""
        return f"{self.group.name}, {'host time of ' if self.host else ''}{self.row}"

    def us(self, way: str) -> float | None:
        """The median over the rounds."""
        return statistics.median(self.times_us[way]) if way in self.times_us else None

    def fastest(self, ways: Sequence[str]) -> tuple[str, float] | None:
        """Of those that were measured, the name and the time."""
        measured = [(way, us) for way in ways if (us := self.us(way)) is not None]
        return min(measured, key=lambda item: item[1]) if measured else None

    def bounds(self) -> Iterator[Bound]:
        """What the measured ways allow to be judged."""
        for backend, kernels in self.group.kernels.items():
            after_stores = [after_store(kernel) for kernel in kernels]
            if self.host:
                yield from self._bound(run(backend), after_stores, ratio=1.0, slack_us=5.0)
                continue
            yield from self._bound(attention(backend), kernels, ratio=1.02, slack_us=0.5)
            yield from self._bound(run(backend), after_stores, ratio=1.02, slack_us=0.5)
        best = [*self.group.kernel_names, *map(attention, self.group.kernels)]
        yield from self._bound(attention(AUTO), best, ratio=1.05, slack_us=1.0)

    def _bound(self, ours: str, others: Sequence[str], *, ratio: float, slack_us: float) -> Iterator[Bound]:
        ours_us, other = self.us(ours), self.fastest(others)
        if ours_us is not None and other is not None:
            yield Bound(
                where=self.where, what=ours, ours_us=ours_us, other=other[0], other_us=other[1],
                ratio=ratio, slack_us=slack_us,
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "group": self.group.name,
            "row": str(self.row),
            "host": self.host,
            "limit_us": self.group.limit_us(self.row),
            "median_us": {way: self.us(way) for way in self.times_us},
            "rounds_us": self.times_us,
            "served_by": self.served_by,
            "reasons": self.reasons,
            "failures": self.failures,
            "notes": self.notes,
        }


def described(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
