"""The checks of numerics and memory: every case of what a backend declares, judged against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from anyattn.attention.backend import AttentionBackend
from anyattn.platforms.base import Platform
from anyattn.testing.check import Check, CheckFailedError, Measured
from anyattn.testing.numerics import determinism, matrix, scenarios
from anyattn.testing.numerics.case_run import drive_and_judge
from anyattn.testing.numerics.cases import Case, cases_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """error, allowed: largest absolute error of the output against float64, and what was allowed in that place.

    failure: in words, None when the case passed.
    """

    case: Case
    error: float
    allowed: float
    failure: str | None


def checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    """Of the tiers numerics and memory, for all that the backend declares."""
    for case in cases_for(backend.capabilities):
        if not case.spec.deterministic:
            run = partial(run_case, backend, case, device)
            yield Check(tier="numerics", name=case.name, capability=case.capability, run=run)
    yield from matrix.checks(backend)
    yield from scenarios.checks(backend, device)


def check_case(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> Result:
    """Runs the case with fresh random inputs and judges output and LSE."""
    try:
        measured = run_case(backend, case, platform, seed)
    except CheckFailedError as failure:
        return Result(case=case, error=float("inf"), allowed=1.0, failure=str(failure))
    return Result(case=case, error=measured.error, allowed=measured.allowed, failure=None)


def run_case(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> Measured:
    """As `check_case`, but that it raises CheckFailedError."""
    if case.spec.deterministic:
        return determinism.run_case(backend, case, platform, seed)
    return drive_and_judge(backend, case, platform, seed)[1]
