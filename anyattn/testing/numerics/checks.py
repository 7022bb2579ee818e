"""Cases driven through a backend and compared with float64, NaN lying in every place that must not be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.runtime import AttentionRuntime
from anyattn.platforms.base import Platform
from anyattn.testing.check import Check, CheckFailedError, Measured
from anyattn.testing.numerics import scenarios
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.driver import POISONS, build_runtime, run_step, set_scales, store
from anyattn.testing.numerics.expectation import Expected, Results, judge
from anyattn.testing.numerics.inputs import PerHead, Step
from anyattn.testing.numerics.oracle import Oracle, compare

ALL_POISONS = frozenset(POISONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """error, allowed: largest absolute error of the output against float64, and what was allowed in that place.

    failure: in words, None when the case passed.
    """

    case: Case
    error: float
    allowed: float
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Driven:
    """What a case's steps took and gave, step by step, of each all layers.

    per_head: of each layer. before: what was stored before the first step, of each layer; none where nothing was.
    """

    steps: list[Step]
    got: list[Results]
    expected: list[Expected]
    per_head: list[PerHead]
    before: list[Step]


def checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    """Of the tiers numerics and memory, for all that the backend declares."""
    for case in cases_for(backend.capabilities):
        if not case.spec.deterministic:
            run = partial(run_case, backend, case, device)
            yield Check(tier="numerics", name=case.name, capability=case.capability, run=run)
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
    driven = drive(backend, case, platform, seed)
    verdict = judge(driven.got, driven.expected)
    if verdict.is_nan:
        raise CheckFailedError(f"{verdict.failure}{_whence(backend, case, platform, seed)}")
    measured = compare(driven.got, driven.expected)
    if case.spec.deterministic:
        from anyattn.testing.numerics.determinism import compare_alone

        compare_alone(backend, case, platform, seed, driven)
    return measured


def drive(
    backend: type[AttentionBackend],
    case: Case,
    platform: Platform,
    seed: int,
    *,
    poison: frozenset[str] = ALL_POISONS,
) -> Driven:
    """Runs all steps of the case. poison: of `POISONS`, what is NaN."""
    spec, generator = case.spec, torch.Generator().manual_seed(seed)
    layers = range(case.num_layers)
    rt = build_runtime(backend, case, platform, seed, poison=poison)
    scales = set_scales(rt, case)
    oracles = [Oracle(spec, case.num_seqs, *scales, page_size=case.page_size) for _ in layers]
    per_head = [PerHead.draw(spec, generator, extreme_sinks=case.extreme_sinks) for _ in layers]
    driven = Driven(steps=[], got=[], expected=[], per_head=per_head, before=[])
    seqs = rt.new_sequences(case.num_seqs)
    if case.stored_before is not None:
        batch = rt.extend(seqs, case.stored_before)
        for layer in layers:
            step = Step.draw(spec, case.stored_before, generator)
            store(rt, step, batch, layer)
            driven.before.append(step)
            for i, rows in enumerate(step.rows):
                oracles[layer].append(i, step.k[rows], step.v[rows])
    for number, counts in enumerate(case.steps):
        drawn = [
            Step.draw(spec, counts, generator, trees=case.trees, query_scale=case.query_scale) for _ in layers
        ]
        batch = rt.extend(seqs, counts, tree_masks=drawn[0].tree_masks)
        plan = rt.plan(batch)
        for layer, each in enumerate(drawn):
            step = replace(each, tree_masks=drawn[0].tree_masks)
            name = f"step {number}" + (f", layer {layer}" if case.num_layers > 1 else "")
            got = run_step(rt, step, plan, per_head[layer], layer, odd_strides=case.odd_strides, poison=poison)
            driven.steps.append(step)
            driven.got.append(got)
            driven.expected.append(oracles[layer].expect(step, per_head[layer], name=name))
    _end(rt, seqs)
    return driven


def _end(rt: AttentionRuntime, seqs: list[int]) -> None:
    rt.free(seqs)
    rt.table.check()


def _whence(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> str:
    """A clause that says where a NaN came from, by what stays NaN when nothing else is."""
    none: frozenset[str] = frozenset()
    for poison in (none, *(frozenset({name}) for name in POISONS)):
        driven = drive(backend, case, platform, seed, poison=poison)
        if judge(driven.got, driven.expected).is_nan:
            why = POISONS[min(poison)] if poison else "all that it could read were finite numbers"
            return f": {why}{_with_all_pages(backend, case, platform, seed)}"
    return ": NaN was read that is none of its sequence's"


def _with_all_pages(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> str:
    """What else is wrong where a window's pages are all kept, so that none of them is the null page."""
    if case.spec.sliding_window is None or not case.window_pages:
        return ""
    driven = drive(backend, replace(case, window_pages=False), platform, seed)
    if judge(driven.got, driven.expected).is_nan:
        return ""
    try:
        compare(driven.got, driven.expected)
    except CheckFailedError as failure:
        return f". Where all pages are kept, {failure}"
    return ""
