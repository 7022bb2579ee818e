"""Drives a backend as an engine with device graphs does: two layers, and replays judged against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.batch import Batch
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.platforms.base import Platform
from anyattn.testing.check import Measured
from anyattn.testing.numerics.cases import Case
from anyattn.testing.numerics.driver import PerHead, Step, build_runtime, run_step, set_scales
from anyattn.testing.numerics.expectation import LargestError
from anyattn.testing.numerics.oracle import Expected, Oracle, compare
from anyattn.types import GraphLevel

NUM_LAYERS = 2

Results = list[tuple[torch.Tensor, ...]]
"""Of each layer: output, and LSE where there is one, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One step of some sequences: its inputs, and what it must give, for each layer."""

    batch: Batch
    steps: tuple[Step, ...]
    expected: tuple[Expected, ...]


class Engine:
    """A runtime of two layers around one backend, its pools full of NaN and its pages in random order.

    A role whose phases the backend does not declare is filled by the reference, which no graph is asked of.
    """

    def __init__(
        self, backend: type[AttentionBackend], case: Case, platform: Platform, seed: int, *, max_kv_len: int
    ) -> None:
        """case: its spec asks for the graph level. max_kv_len: of up to twelve sequences at a time."""
        self.spec = case.spec
        # The reference serves no graphs, so that it is selected, and the runtime sized, for a spec without them.
        plain = case.spec.replace(graph=GraphLevel.NEVER)
        steps = ((max_kv_len,) * 12,)
        case = replace(case, spec=plain, steps=steps, stored_before=None, num_layers=NUM_LAYERS)
        built = build_runtime(backend, case, platform, seed)
        choice, cache = built.selection, built.pools[0].cache
        classes: dict[str, type[AttentionBackend]] = {"tested": backend, "reference": ReferenceBackend}
        instances = {name: classes[name](self.spec, cache, platform) for name in {choice.prefill, choice.decode}}
        self.rt = AttentionRuntime(
            [self.spec] * NUM_LAYERS,
            {self.spec: choice},
            {self.spec: HybridBackend(choice, instances)},
            built.pools,
            built.table,
            built.places,
        )
        self._generator = torch.Generator().manual_seed(seed)
        self.per_head = [PerHead.draw(self.spec, self._generator) for _ in range(NUM_LAYERS)]
        self._scales = set_scales(self.rt, case)
        self._histories: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._judged: list[tuple[tuple[torch.Tensor, ...], Expected]] = []

    def new(self, lengths: Sequence[int]) -> list[int]:
        """Sequences that have so many tokens, which ran without a graph; judged too, as `verdict` needs many tokens."""
        seqs = self.rt.new_sequences(len(lengths))
        work = self.extend(seqs, lengths)
        self.judge("a prompt without graph", work, self.run(work))
        return seqs

    def fork(self, seq: int) -> int:
        """A sequence that begins as another is, on the same pages."""
        (fork,) = self.rt.fork(seq)
        for layer in range(NUM_LAYERS):
            self._histories[layer, fork] = self._histories[layer, seq]
        return fork

    def extend(self, seqs: Sequence[int], counts: Sequence[int], *, trees: bool = False) -> Work:
        """New tokens of sequences, with random inputs. trees: whether they are those of trees."""
        drawn = [Step.draw(self.spec, counts, self._generator) for _ in range(NUM_LAYERS)]
        masks = drawn[0].tree_masks if trees else None
        steps = tuple(replace(step, tree_masks=masks) for step in drawn)
        batch = self.rt.extend(seqs, counts, tree_masks=masks)
        expected = tuple(self._expect(layer, seqs, step) for layer, step in enumerate(steps))
        return Work(batch=batch, steps=steps, expected=expected)

    def run(self, work: Work, plan: Plan | None = None) -> Results:
        """What each layer gives without a graph."""
        plan = self.rt.plan(work.batch) if plan is None else plan
        return [run_step(self.rt, step, plan, self.per_head[layer], layer) for layer, step in enumerate(work.steps)]

    def judge(self, name: str, work: Work, got: Results) -> None:
        """Keeps what a step gave for `verdict`. name: of the step, for the message."""
        for layer, (result, expected) in enumerate(zip(got, work.expected, strict=True)):
            self._judged.append((result, replace(expected, name=f"{name}, layer {layer}")))

    def verdict(self) -> Measured:
        """Judges all steps, by the largest error of plain code in any of them as `compare` does.

        Raises CheckFailedError for the first that is off, which is where something went wrong.
        """
        plain = LargestError(of=[expected.plain_error for _, expected in self._judged])
        sampled = LargestError(of=[expected.sampled_error for _, expected in self._judged])
        worst = Measured(error=0.0, allowed=1.0)
        for result, expected in self._judged:
            measured = compare([result], [replace(expected, sampled_error=sampled, plain_error=plain)])
            if measured.error / measured.allowed > worst.error / worst.allowed:
                worst = measured
        return worst

    def _expect(self, layer: int, seqs: Sequence[int], step: Step) -> Expected:
        oracle = Oracle(self.spec, len(seqs), *self._scales[layer], page_size=self.rt.table.page_size)
        for i, seq in enumerate(seqs):
            oracle.k[i], oracle.v[i] = self._histories.get((layer, seq), (oracle.k[i], oracle.v[i]))
        expected = oracle.expect(step, self.per_head[layer])
        for i, seq in enumerate(seqs):
            self._histories[layer, seq] = (oracle.k[i], oracle.v[i])
        return expected
