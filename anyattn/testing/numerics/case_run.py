"""Drives a case through a backend, step by step, judges what it gave, and finds out where a NaN came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError, Measured
from anyattn.testing.numerics.cases import Case
from anyattn.testing.numerics.driver import POISONS, build_runtime, run_step, set_scales, store
from anyattn.testing.numerics.expectation import Expected, Results, judge
from anyattn.testing.numerics.inputs import PerHead, Step
from anyattn.testing.numerics.oracle import Oracle, compare


@dataclass(frozen=True, kw_only=True, eq=False)
class Driven:
    """What a case's steps took and gave, step by step, of each all layers.

    per_head: of each layer. before: what was stored before the first step, of each layer; none where nothing was.
    oracles: of each layer, with that.
    """

    steps: list[Step]
    got: list[Results]
    per_head: list[PerHead]
    before: list[Step]
    oracles: list[Oracle]

    @cached_property
    def expected(self) -> list[Expected]:
        """What each step must give, attended when it is first asked for: of bits that are compared, it never is."""
        expected, num_layers = [], len(self.oracles)
        for i, step in enumerate(self.steps):
            number, layer = divmod(i, num_layers)
            name = f"step {number}" + (f", layer {layer}" if num_layers > 1 else "")
            expected.append(self.oracles[layer].expect(step, self.per_head[layer], name=name))
        return expected


def drive_and_judge(
    backend: type[AttentionBackend], case: Case, platform: Platform, seed: int
) -> tuple[Driven, Measured]:
    """Runs the case with fresh random inputs. Raises CheckFailedError where output or LSE is wrong."""
    driven = drive(backend, case, platform, seed)
    try:
        return driven, compare(driven.got, driven.expected)
    except CheckFailedError as failure:
        if not judge(driven.got, driven.expected).is_nan:
            raise
        raise CheckFailedError(f"{failure}: {_origin_of_nan(backend, case, platform, seed)}") from failure


def drive(
    backend: type[AttentionBackend],
    case: Case,
    platform: Platform,
    seed: int,
    *,
    poison: frozenset[str] = frozenset(POISONS),
) -> Driven:
    """Runs all steps of the case. poison: of `POISONS`, what is NaN."""
    spec, generator = case.spec, torch.Generator().manual_seed(seed)
    layers = range(case.num_layers)
    rt = build_runtime(backend, case, platform, seed, poison=poison)
    scales = set_scales(rt, case)
    oracles = [Oracle(spec, case.num_seqs, *scales[layer], page_size=case.page_size) for layer in layers]
    drawn_sinks = {"extreme_sinks": case.extreme_sinks, "narrow_sinks": case.narrow_sinks}
    per_head = [PerHead.draw(spec, generator, **drawn_sinks) for _ in layers]
    driven = Driven(steps=[], got=[], per_head=per_head, before=[], oracles=oracles)
    seqs = rt.new_sequences(case.num_seqs)
    if case.stored_before is not None:
        batch = rt.extend(seqs, case.stored_before)
        for layer in layers:
            step = Step.draw(spec, case.stored_before, generator)
            store(rt, step, batch, layer)
            driven.before.append(step)
            for i, rows in enumerate(step.rows):
                oracles[layer].append(i, step.k[rows], step.v[rows])
    for counts in case.steps:
        drawn = [
            Step.draw(spec, counts, generator, trees=case.trees, query_scale=case.query_scale) for _ in layers
        ]
        batch = rt.extend(seqs, counts, tree_masks=drawn[0].tree_masks)
        plan = rt.plan(batch)
        for layer, each in enumerate(drawn):
            step = replace(each, tree_masks=drawn[0].tree_masks)
            got = run_step(rt, step, plan, per_head[layer], layer, odd_strides=case.odd_strides, poison=poison)
            driven.steps.append(step)
            driven.got.append(got)
    rt.free(seqs)
    rt.table.check()
    return driven


def _origin_of_nan(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> str:
    """Found by what still gives NaN when nothing else is NaN."""
    none: frozenset[str] = frozenset()
    for poison in (none, *(frozenset({name}) for name in POISONS)):
        driven = drive(backend, case, platform, seed, poison=poison)
        if judge(driven.got, driven.expected).is_nan:
            why = POISONS[min(poison)] if poison else "all that it could read were finite numbers"
            return f"{why}{_with_all_pages(backend, case, platform, seed)}"
    return "NaN was read that is none of the sequence's"


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
