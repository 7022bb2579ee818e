"""Whether a row's bits depend on the other sequences of its batch, for backends that declare that they do not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.platforms.base import Platform
from anyattn.testing.check import Check, CheckFailedError, Measured
from anyattn.testing.numerics.case_run import Driven, drive, drive_and_judge
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.driver import build_runtime, run_step, set_scales, store
from anyattn.testing.numerics.expectation import PARTS, Results

_MOST_ALONE = 4
"""Sequences of a batch that are run by themselves."""


def checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    """Of the tier determinism; none where `deterministic` is not declared."""
    for case in cases_for(backend.capabilities):
        if case.spec.deterministic:
            run = partial(run_case, backend, case, device)
            yield Check(tier="determinism", name=case.name, capability="deterministic", run=run)


def run_case(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> Measured:
    """Raises CheckFailedError where a result is wrong, or depends on the batch."""
    driven, measured = drive_and_judge(backend, case, platform, seed)
    _compare_again(driven, drive(backend, case, platform, seed))
    _compare_alone(backend, case, platform, seed, driven)
    return measured


def _compare_again(first: Driven, second: Driven) -> None:
    """Raises CheckFailedError where the same run does not give the same bits a second time."""
    for once, again, expected in zip(first.got, second.got, first.expected, strict=True):
        if (part := _differs(once, again)) is not None:
            raise CheckFailedError(
                f"{PARTS[part]} in {expected.name} ({expected.phase}) differs, by up to "
                f"{_largest(once[part], again[part]):.3g}, when the same is run again; deterministic is declared"
            )


def _compare_alone(
    backend: type[AttentionBackend], case: Case, platform: Platform, seed: int, driven: Driven
) -> None:
    """Drives sequences by themselves through the same steps, on other pages: every bit must be as in the batch.

    Raises CheckFailedError.
    """
    some = torch.linspace(0, case.num_seqs - 1, min(case.num_seqs, _MOST_ALONE)).long().tolist()
    for i in some:
        rt = build_runtime(backend, case, platform, seed + 1 + i)
        set_scales(rt, case)
        seqs = rt.new_sequences(1)
        for before in driven.before:
            alone = before.of_sequences([i])
            store(rt, alone, rt.extend(seqs, alone.counts))
        for step, together, expected in zip(driven.steps, driven.got, driven.expected, strict=True):
            alone, rows = step.of_sequences([i]), step.rows[i]
            batch = rt.extend(seqs, alone.counts, tree_masks=alone.tree_masks)
            mine = run_step(rt, alone, rt.plan(batch), driven.per_head[0])
            part = _differs(mine, tuple(result[rows] for result in together))
            if part is not None:
                raise CheckFailedError(
                    f"{PARTS[part]} of sequence {i} in {expected.name} ({expected.phase}, {step.counts} new tokens) "
                    f"differs, by up to {_largest(mine[part], together[part][rows]):.3g}, from what the sequence gives "
                    f"alone ({batch.phase}) on other pages; deterministic is declared, so that no bit of a row depends "
                    "on the other sequences of its batch"
                )


def _differs(mine: Results, together: Results) -> int | None:
    """The number of the part of which not every bit is the same."""
    for part, (one, other) in enumerate(zip(mine, together, strict=True)):
        if not torch.equal(one, other):
            return part
    return None


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of the differences."""
    return float((one.double() - other.double()).abs().max())
