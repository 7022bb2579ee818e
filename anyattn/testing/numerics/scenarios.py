"""What must hold beside single cases: plans side by side, NaN in other sequences, memory that is not `out`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.batch import Batch
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.mem_cache.spec import CacheKind
from anyattn.platforms.base import Platform
from anyattn.testing.check import Check, CheckFailedError, Measured, Tier
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.driver import build_runtime, indices_on, layer_kv, run_step, set_scales, store
from anyattn.testing.numerics.expectation import Expected, Results
from anyattn.testing.numerics.inputs import PerHead, Step, part_of_fused
from anyattn.testing.numerics.large_pool import offsets_of_64_bits
from anyattn.testing.numerics.oracle import Oracle, compare

Function = Callable[[type[AttentionBackend], Case, Platform, int], Measured | None]

_GUARD_ROWS = 3
_GUARD = -77.0  # in all dtypes, and no result
_STEPS = ((40, 3, 70), (5, 1, 2), (1, 1, 1))


def checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    """For the plain case of heads, and for those of MLA and of sparse MLA where they are declared."""
    plain: dict[CacheKind, Case] = {}
    for case in cases_for(backend.capabilities):
        plain.setdefault(case.spec.cache_kind, case)
    for tier, functions in _FUNCTIONS.items():
        for case in plain.values():
            for name, function in functions.items():
                run = partial(function, backend, case, device)
                name = case.name.removesuffix("plain") + name
                yield Check(tier=tier, name=name, capability="contract", run=run)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """One step of some sequences: its inputs, its plan, and what it must give."""

    step: Step
    batch: Batch
    plan: Plan
    expected: Expected


class _Sequences:
    """Some of a runtime's sequences, which go through their steps together."""

    def __init__(self, rt: AttentionRuntime, case: Case, seed: int, name: str = "") -> None:
        self._rt, self._name = rt, name
        self._generator = torch.Generator().manual_seed(seed)
        self._seqs = rt.new_sequences(case.num_seqs)
        self._oracle = Oracle(case.spec, case.num_seqs, *set_scales(rt, case)[0], page_size=case.page_size)
        self.per_head = PerHead.draw(case.spec, self._generator)
        self._number = 0

    def plan(self, counts: Sequence[int]) -> _Work:
        """New tokens, planned and not yet run."""
        rt, name = self._rt, f"{self._name}step {self._number}"
        self._number += 1
        step = Step.draw(rt.layer_specs[0], counts, self._generator)
        batch = rt.extend(self._seqs, counts, tree_masks=step.tree_masks)
        expected = self._oracle.expect(step, self.per_head, name=name)
        return _Work(step=step, batch=batch, plan=rt.plan(batch), expected=expected)

    def run(self, work: _Work) -> Results:
        return run_step(self._rt, work.step, work.plan, self.per_head)


def _two_plans(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> Measured:
    """Both are made before one of them runs; the one that was made last runs first, and again after the other."""
    halves = replace(case, steps=tuple((*counts, *counts) for counts in _STEPS))
    rt = build_runtime(backend, halves, device, seed)
    case = replace(case, steps=_STEPS)
    first, second = _Sequences(rt, case, seed, "first plan, "), _Sequences(rt, case, seed + 1, "second plan, ")
    got, expected = [], []
    for counts in _STEPS:
        works = first.plan(counts), second.plan(counts[::-1])
        for number, again in ((1, ""), (0, ""), (1, ", run again")):
            work = works[number]
            got.append((first, second)[number].run(work))
            expected.append(replace(work.expected, name=work.expected.name + again))
    try:
        return compare(got, expected)
    except CheckFailedError as failure:
        raise CheckFailedError(
            f"{failure}; each plan was made before the other ran, and a plan stays valid while other steps are planned "
            "and run"
        ) from failure


def _nan_in_one_sequence(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> Measured:
    """All of one sequence's inputs are NaN, and the others' results are as ever."""
    poisoned, kept = 1, (0, 2)
    case = replace(case, steps=_STEPS)
    rt, spec = build_runtime(backend, case, device, seed), case.spec
    generator = torch.Generator().manual_seed(seed)
    oracle = Oracle(spec, len(kept), *set_scales(rt, case)[0], page_size=case.page_size)
    per_head, seqs = PerHead.draw(spec, generator), rt.new_sequences(case.num_seqs)
    got, expected = [], []
    for counts in case.steps:
        step = Step.draw(spec, counts, generator)
        for part in (step.q, step.k, step.v):
            part[step.rows[poisoned]] = float("nan")
        results = run_step(rt, step, rt.plan(rt.extend(seqs, counts, tree_masks=step.tree_masks)), per_head)
        got.append(tuple(torch.cat([result[step.rows[i]] for i in kept]) for result in results))
        expected.append(oracle.expect(step.of_sequences(kept), per_head))
    try:
        return compare(got, expected)
    except CheckFailedError as failure:
        raise CheckFailedError(
            f"{failure}; in its batch is another sequence, all of whose inputs are NaN, and its pages must not be read"
        ) from failure


def _with_features(backend: type[AttentionBackend], case: Case) -> Case:
    """With tensors for each head, and with the LSE, where they are declared, and declared to go together."""
    declared, spec = backend.capabilities, case.spec
    alibi = declared.alibi and spec.topk is None  # which no spec has together
    for name, is_declared in (("return_lse", declared.lse), ("sinks", declared.sinks), ("alibi", alibi)):
        more = spec.replace(**{name: is_declared})
        spec = spec if declared.pairs_in(more) else more
    return replace(case, spec=spec, steps=_STEPS)


def _kv_cache_as_it_is(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> None:
    case = _with_features(backend, case)
    rt = build_runtime(backend, case, device, seed)
    sequences = _Sequences(rt, case, seed)
    for counts in _STEPS:
        work = sequences.plan(counts)
        store(rt, work.step, work.batch)
        parts = [part for pool in rt.pools for part in pool.parts()]
        before = [part.clone() for part in parts]
        _run_backend(rt, work, sequences.per_head)
        for one, other in zip(before, parts, strict=True):
            differ = (one != other) & ~(one.isnan() & other.isnan())
            if differ.any():
                page = int(differ.flatten(1).any(dim=1).nonzero()[0])
                raise CheckFailedError(
                    f"run wrote to page {page} of the KV cache in {work.expected.name} ({work.batch.phase}); it reads "
                    "pages, and only the pool writes to them"
                )


def _run_backend(rt: AttentionRuntime, work: _Work, per_head: PerHead) -> None:
    """What the runtime's `run` does after it has stored."""
    (step,) = filter(None, work.plan.steps)
    q = part_of_fused(work.step.q, rt.device, gap=float("nan"))
    step.run(q, layer_kv(rt, 0), **_per_head_on(rt, per_head), **_slots_on(rt, work))


def _per_head_on(rt: AttentionRuntime, per_head: PerHead) -> dict[str, torch.Tensor | None]:
    given = {"sinks": per_head.sinks, "alibi_slopes": per_head.alibi_slopes}
    return {name: None if values is None else values.to(rt.device) for name, values in given.items()}


def _slots_on(rt: AttentionRuntime, work: _Work) -> dict[str, torch.Tensor]:
    """What a backend's `run` takes besides where the spec has a topk."""
    indices = indices_on(rt, work.step, work.batch)
    return {} if indices is None else {"indices": work.batch.of_pool(rt.places[0][0]).slots_of(indices)}


def _nothing_beside_out(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> None:
    case = _with_features(backend, case)
    rt, spec = build_runtime(backend, case, device, seed), case.spec
    sequences = _Sequences(rt, case, seed)
    for counts in _STEPS:
        work = sequences.plan(counts)
        q, k, v = (x.to(rt.device) for x in (work.step.q, work.step.k, work.step.v))
        shape = (q.shape[0] + 2 * _GUARD_ROWS, spec.num_qo_heads, spec.vo_head_dim)
        guarded = torch.full(shape, _GUARD, dtype=q.dtype, device=rt.device)
        out = guarded[_GUARD_ROWS:-_GUARD_ROWS]
        is_mla = spec.is_mla
        per_head = _per_head_on(rt, sequences.per_head)
        indices = indices_on(rt, work.step, work.batch)
        rt.run(0, q, k[:, 0] if is_mla else k, None if is_mla else v, work.plan, out=out, indices=indices, **per_head)
        for rows, place in ((guarded[:_GUARD_ROWS], "before"), (guarded[-_GUARD_ROWS:], "behind")):
            if not bool((rows == _GUARD).all()):
                raise CheckFailedError(
                    f"run wrote {place} out in {work.expected.name} ({work.batch.phase}); out is {list(out.shape)}, "
                    "contiguous, and may be a part of a larger tensor"
                )


def _new_output(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> None:
    case = _with_features(backend, case)
    rt = build_runtime(backend, case, device, seed)
    sequences = _Sequences(rt, case, seed)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for counts in _STEPS:
        work = sequences.plan(counts)
        q, k, v = (x.to(rt.device) for x in (work.step.q, work.step.k, work.step.v))
        is_mla, indices = case.spec.is_mla, indices_on(rt, work.step, work.batch)
        per_head = _per_head_on(rt, sequences.per_head)
        result = rt.run(0, q, k[:, 0] if is_mla else k, None if is_mla else v, work.plan, indices=indices, **per_head)
        out = result[0] if case.spec.return_lse else result
        for earlier, values in before:
            if not torch.equal(earlier, values):
                raise CheckFailedError(
                    f"run changed the output of an earlier step in {work.expected.name} ({work.batch.phase}); each "
                    "call returns a new tensor, where it is given none to write to"
                )
        before.append((out, out.clone()))


def _inputs_as_they_are(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> None:
    case = _with_features(backend, case)
    rt = build_runtime(backend, case, device, seed)
    sequences = _Sequences(rt, case, seed)
    for counts in _STEPS:
        work = sequences.plan(counts)
        store(rt, work.step, work.batch)
        (step,) = filter(None, work.plan.steps)
        fused = torch.cat([work.step.q, torch.zeros_like(work.step.q)], dim=1).to(rt.device)
        q = fused[:, : work.step.q.shape[1]]
        per_head = _per_head_on(rt, sequences.per_head)
        slots = _slots_on(rt, work)
        given = {"q": fused, **slots, **{name: values for name, values in per_head.items() if values is not None}}
        batch = work.batch.of_pool(rt.places[0][0])
        for name in _OF_THE_BATCH:
            given[f"batch.{name}"] = getattr(batch, name)
        given |= {f"tree mask {i}": mask for i, mask in enumerate(batch.tree_masks or ()) if mask is not None}
        before = {name: values.clone() for name, values in given.items()}
        contiguous = step.backend.capabilities.contiguous_q
        if contiguous:
            q = given["q"] = q.contiguous()
            before["q"] = q.clone()
        step.run(q, layer_kv(rt, 0), **per_head, **slots)
        for name, values in given.items():
            if not torch.equal(values, before[name]):
                raise CheckFailedError(
                    f"run changed {name} in {work.expected.name} ({work.batch.phase}), which is the caller's"
                )


_OF_THE_BATCH = (
    "qo_indptr", "kv_lens", "kv_indptr", "kv_indices", "kv_last_page_len", "block_table", "out_slots", "positions",
)  # fmt: skip


_FUNCTIONS: dict[Tier, dict[str, Function]] = {
    "numerics": {
        "two plans alive at once": _two_plans,
        "NaN in one sequence reaches no other": _nan_in_one_sequence,
        "64-bit offsets": offsets_of_64_bits,
    },
    "memory": {
        "run leaves the KV cache as it is": _kv_cache_as_it_is,
        "run writes nothing beside out": _nothing_beside_out,
        "run leaves its inputs as they are": _inputs_as_they_are,
        "run returns a new output": _new_output,
    },
}
