"""What triton_backend.py found of a row, what it is held against, and the tables of both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_report import number
from nvidia_results import Result
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from triton_rows import name_of

TRITON = "triton"
PLAIN = "plain"
"""The backend as it is, and without its Gluon kernels."""

MOST_SHOWN = 20
"""Failures that are printed; what is wrong with a kernel is often so in every row."""


class RowResult(Result):
    """A row as it was measured, by peers' kernels and by both ways of the backend."""

    @property
    def where(self) -> str:
        """Group, row and page size."""
        return name_of(self.group, self.row)

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest of the vendors' kernels that were measured, and its microseconds."""
        return self.fastest(self.group.kernel_names)

    def ratio(self, way: str) -> float | None:
        """The way's time over the fastest peer's."""
        us, best = self.us(way), self.best_peer
        return None if us is None or best is None else us / best[1]

    def to_json(self) -> dict[str, Any]:
        """As any result, with the page size and the ratios."""
        return {
            **super().to_json(),
            "page_size": self.group.page_size,
            "ragged": bool(self.row.ragged),
            "best_peer": self.best_peer,
            "ratios": {way: self.ratio(way) for way in (TRITON, PLAIN)},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How long a way may take, as a multiple of the fastest peer's time, over all rows of some groups.

    geomean: of all these rows. each: of any of them. batch: that of the rows which count; None where all do.
    """

    name: str
    way: str
    groups: tuple[str, ...]
    geomean: float
    each: float | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target and the ratios of its rows, by name."""

    target: Target
    ratios: dict[str, float]

    @property
    def geomean(self) -> float:
        """Of all ratios."""
        return statistics.geometric_mean(self.ratios.values())

    @property
    def largest(self) -> tuple[str, float]:
        """The row with the largest ratio, and that."""
        return max(self.ratios.items(), key=lambda item: item[1])

    @property
    def above(self) -> dict[str, float]:
        """Rows that take longer than any may, the worst first."""
        each = self.target.each
        over = {} if each is None else {name: ratio for name, ratio in self.ratios.items() if ratio > each}
        return dict(sorted(over.items(), key=lambda item: -item[1]))

    @property
    def met(self) -> bool:
        """Whether the target is."""
        return self.geomean <= self.target.geomean and not self.above

    def to_json(self) -> dict[str, Any]:
        """The target, and what was found."""
        target = self.target
        return {
            "name": target.name, "way": target.way, "rows": len(self.ratios), "geomean": self.geomean,
            "geomean_at_most": target.geomean, "largest": self.largest, "each_at_most": target.each, "met": self.met,
            "above": self.above,
        }  # fmt: skip


_FEW_HEADS = ("MLA decode, 8 heads", "MLA decode, 16 heads", "MLA decode, 32 heads")
_MANY_HEADS = ("MLA decode, 128 heads",)
_VERIFY = ("GQA verify", "MLA verify, 16 heads", "MLA verify, 128 heads")

TARGETS = (
    Target(name="MLA decode, 8 to 32 heads", way=TRITON, groups=_FEW_HEADS, geomean=0.95, each=1.03),
    Target(name="MLA decode, 128 heads", way=TRITON, groups=_MANY_HEADS, geomean=1.10),
    Target(name="MLA decode, 128 heads, batch 1", way=TRITON, groups=_MANY_HEADS, geomean=0.90, batch=1),
    Target(name="GQA decode", way=TRITON, groups=("GQA decode",), geomean=0.97, each=1.03),
    Target(name="GQA prefill", way=TRITON, groups=("GQA prefill",), geomean=1.05),
    Target(name="verify", way=TRITON, groups=_VERIFY, geomean=1.05),
    Target(name="MLA decode, 8 to 32 heads", way=PLAIN, groups=_FEW_HEADS, geomean=0.95, each=1.03),
    Target(name="GQA decode", way=PLAIN, groups=("GQA decode",), geomean=0.97, each=1.03),
    Target(name="GQA prefill", way=PLAIN, groups=("GQA prefill",), geomean=1.20),
)


def verdicts(results: Sequence[RowResult]) -> list[Verdict]:
    """Of the targets that have rows which were measured, by their way and by a peer."""
    found = []
    for target in TARGETS:
        rows = [
            result
            for result in results
            if result.group.name in target.groups and target.batch in (None, result.row.batch)
        ]
        ratios = {row.where: ratio for row in rows if (ratio := row.ratio(target.way)) is not None}
        if ratios:
            found.append(Verdict(target=target, ratios=ratios))
    return found


def print_group(console: Console, results: Sequence[RowResult]) -> None:
    """The rows of one group, of all page sizes."""
    if not results:
        return
    kernels = list(dict.fromkeys(kernel for result in results for kernel in result.group.kernel_names))
    table = Table("row", "page", *kernels, "best peer", TRITON, "ratio", PLAIN, "ratio", "limit")
    for column in table.columns[1:]:
        column.justify = "right"
    for before, result in zip([None, *results], results, strict=False):
        if before is not None and before.group.page_size != result.group.page_size:
            table.add_section()
        best = result.best_peer
        table.add_row(
            f"{result.row}{', ragged' if result.row.ragged else ''}",
            str(result.group.page_size),
            *[_us(result.us(kernel)) for kernel in kernels],
            "-" if best is None else best[0],
            *[text for way in (TRITON, PLAIN) for text in (_us(result.us(way)), _ratio(result.ratio(way)))],
            number(result.group.limit_us(result.row)),
        )
    console.print(f"[bold]{results[0].group.name}[/bold], us", table)
    means = []
    for way in (TRITON, PLAIN):
        ratios = [ratio for result in results if (ratio := result.ratio(way)) is not None]
        if ratios:
            means.append(f"{way} {statistics.geometric_mean(ratios):.3f}, at most {max(ratios):.3f}")
    console.print(f"geometric means of the ratios: {'; '.join(means) or 'none'}")


def print_verdicts(console: Console, found: Sequence[Verdict], failures: Sequence[str]) -> None:
    """Each target with what was found, the rows that are above it, and what failed."""
    table = Table("rows of", "way", "rows", "geometric mean", "at most", "largest", "at most", "", "of")
    for verdict in found:
        target, (where, largest) = verdict.target, verdict.largest
        table.add_row(
            target.name, target.way, str(len(verdict.ratios)), _ratio(verdict.geomean), f"{target.geomean:.2f}",
            _ratio(largest), "-" if target.each is None else f"{target.each:.2f}", "met" if verdict.met else "MISSED",
            where,
        )  # fmt: skip
    console.print(table)
    for verdict in found:
        for where, ratio in verdict.above.items():
            console.print(escape(f"{verdict.target.way} x{ratio:.3f}: {where}"))
    for failure in failures[:MOST_SHOWN]:
        console.print(escape(f"FAILED {failure}"))
    if len(failures) > MOST_SHOWN:
        console.print(f"... and {len(failures) - MOST_SHOWN} more")
    met = sum(verdict.met for verdict in found)
    console.print(f"{met} of {len(found)} targets met, {len(failures)} failures")


def _us(us: float | None) -> str:
    return "-" if us is None else number(us)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
