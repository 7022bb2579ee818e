"""What a run of the kit has to say: in words, as a Markdown table for a README, as JSON."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.plugins.records import BUILTIN
from anyattn.testing.check import TIERS
from anyattn.testing.command.facts import declaration, facts, origin_text, rows
from anyattn.testing.command.verification import NotRun, Verification

if TYPE_CHECKING:  # its module imports pytest
    from anyattn.testing.command.runner import Outcome


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of verifying one target.

    command: what repeats the run. undeclared: what `undeclared.probe` found, as JSON objects; None where it was not
    asked.
    """

    verification: Verification
    outcomes: tuple[Outcome, ...]
    seed: int
    command: str
    undeclared: tuple[dict[str, Any], ...] | None = None

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What was verified, with what, and where, as JSON values."""
        known = facts(self.verification.target, self.verification.device)
        return {**known, "seed": self.seed, "command": self.command}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The facts in words."""
        known = rows(self.facts, self.verification.device)
        return [*known, ("seed", str(self.seed)), ("repeat", self.command)]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Those that make the answer no."""
        return tuple(outcome for outcome in self.outcomes if outcome.result in ("failed", "xpassed"))

    @property
    def not_run(self) -> tuple[NotRun, ...]:
        """What was asked for and did not run, with what a first failure left out."""
        left = self.verification.checks[len(self.outcomes) :]
        if not left:
            return self.verification.not_run
        number = "1 check" if len(left) == 1 else f"{len(left)} checks"
        tiers = tuple(tier for tier in TIERS if any(check.tier == tier for check in left))
        stopped = NotRun(tiers=tiers, reason=f"the run ended at a failure before; {number} did not run")
        return (*self.verification.not_run, stopped)

    def markdown(self) -> str:
        """A line that says what of, and a table of the capabilities in the order of their checks."""
        known, device = self.facts, self.verification.device
        declared = declaration(self.verification.target) or {}
        versions = [f"{name} {version}" for name in (BUILTIN, "torch") if (version := known["versions"][name])]
        where = "without a device" if device is None else f"device {device}"
        by_capability: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            by_capability.setdefault(outcome.check.capability, []).append(outcome)
        lines = [
            f"{known['name']} ({origin_text(known)}): {', '.join([*versions, where, known['date']])}",
            "",
            "| capability | declared | result |",
            "| --- | --- | --- |",
        ]
        for name, outcomes in by_capability.items():
            value = _short(_declared(declared, name), name) if name in declared else ""
            lines.append(f"| {_cell(name)} | {_cell(value)} | {_cell(_result(outcomes))} |")
        return "\n".join(lines)

    def summary(self) -> str:
        """How many checks passed, failed and were skipped."""
        return _summary(self.outcomes)

    def largest_error(self) -> str:
        """The largest error in units of what is allowed, and where it was; empty where nothing was measured."""
        ratios = [
            (outcome.measured.error / outcome.measured.allowed, outcome.check.id)
            for outcome in self.outcomes
            if outcome.measured is not None and outcome.measured.allowed > 0
        ]
        return "largest error: {:.3g} of what is allowed, in {}".format(*max(ratios)) if ratios else ""

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; a number that is not finite is null."""
        return {
            **self.facts,
            "capabilities": declaration(self.verification.target),
            "checks": [_outcome_json(outcome) for outcome in self.outcomes],
            "not_run": [entry.to_json() for entry in self.not_run],
            "undeclared": None if self.undeclared is None else list(self.undeclared),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of all targets. stale: expected failures that no check has, in words."""

    reports: tuple[Report, ...]
    stale: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was asked for ran and holds; where each check had to be skipped, nothing is known to."""
        wrong = self.stale or any(report.failures or report.not_run for report in self.reports)
        counts = _counted(self._outcomes())
        return not wrong and counts["passed"] + counts["xfailed"] > 0

    def summary(self) -> str:
        """How many checks passed, failed and were skipped."""
        return _summary(self._outcomes())

    def to_json(self) -> dict[str, Any]:
        """The run as one JSON object."""
        targets = [report.to_json() for report in self.reports]
        counts = _counted(self._outcomes())
        return {"anyattn_verify": 1, "targets": targets, "stale": list(self.stale), **counts, "ok": self.ok}

    def _outcomes(self) -> list[Outcome]:
        return [outcome for report in self.reports for outcome in report.outcomes]


def _summary(outcomes: Sequence[Outcome]) -> str:
    """How many checks passed, failed and were skipped, and how many each tier has."""
    counts = _counted(outcomes)
    tiers = Counter(outcome.check.tier for outcome in outcomes)
    text = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    if counts["xfailed"]:
        text += f", {counts['xfailed']} expected to fail"
    by_tier = ", ".join(f"{tier} {tiers[tier]}" for tier in TIERS if tiers[tier])
    return f"{text} ({by_tier})" if by_tier else text


def _counted(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """By result; what was expected to fail and passed is a failure."""
    counts = Counter("failed" if outcome.result == "xpassed" else outcome.result for outcome in outcomes)
    return {result: counts[result] for result in ("passed", "failed", "skipped", "xfailed")}


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    measured = outcome.measured
    return {
        "id": outcome.check.id,
        "tier": outcome.check.tier,
        "capability": outcome.check.capability,
        "outcome": outcome.result,
        "message": outcome.message,
        "expected_to_fail": outcome.expected,
        "error": None if measured is None else _finite(measured.error),
        "allowed": None if measured is None else _finite(measured.allowed),
        "seconds": round(outcome.seconds, 6),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


_ALL_OF = {"head_dims": "any_head_dim_pair", "head_dim_pairs": "any_head_dim_pair", "mla_dims": "any_mla_dims"}
"""By field: the flag that stands for every value of it."""


def _declared(declared: dict[str, Any], name: str) -> Any:
    return "any" if declared.get(_ALL_OF.get(name, "")) else declared[name]


def _short(value: Any, name: str = "") -> str:
    """What is declared, in a few words. name: of the field."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "any" if name in ("device_kinds", "archs") else "none"
    if isinstance(value, list):
        parts = [f"({', '.join(map(str, part))})" if isinstance(part, list) else _short(part) for part in value]
        return ", ".join(parts) or "none"
    return str(value)


def _result(outcomes: Sequence[Outcome]) -> str:
    """Of the checks of one capability."""
    counts = _counted(outcomes)
    held = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed") if counts[name])
    reasons = Counter(outcome.message for outcome in outcomes if outcome.result == "skipped")
    skipped = [f"{count} skipped: {reason}" for reason, count in reasons.items()]
    expected = [f"{o.check.id} is expected to fail: {o.expected}" for o in outcomes if o.result == "xfailed"]
    return "; ".join(filter(None, [held, *skipped, *expected]))


def _cell(text: str) -> str:
    """In one line, without what would end a cell."""
    return " ".join(text.split()).replace("|", "\\|")
