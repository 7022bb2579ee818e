"""The sizes that all checks of graphs use: how large the graphs are, and which steps they get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from anyattn.attention.backend import AttentionBackend
from anyattn.platforms.base import Platform
from anyattn.testing.graphs.captured import Graph
from anyattn.testing.graphs.engine import Engine, Work
from anyattn.testing.numerics.cases import Case
from anyattn.types import GraphLevel

NUM_SEQS = 4
UNIFORM = 3
"""New tokens of each sequence, on average where they differ."""
_RAGGED = ((5, 1, 0, 3), (1, 1, 1, 1), (2, 4, 3, 1), (9, 0, 2, 1))  # of up to four sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is checked, and the sizes that all checks use."""

    backend: type[AttentionBackend]
    device: Platform
    case: Case
    level: GraphLevel
    seed: int

    @property
    def max_kv_len(self) -> int:
        """Three pages and a part of a fourth, and enough for the steps and for a window of 33 to let a page go."""
        return max(3 * self.case.page_size + 2, self.case.page_size + 48)

    def engine(self, seed: int = 0, *, max_kv_len: int | None = None) -> Engine:
        """seed: another number is another engine, with other pages and inputs."""
        case = replace(self.case, spec=self.case.spec.replace(graph=self.level))
        return Engine(self.backend, case, self.device, self.seed + seed, max_kv_len=max_kv_len or self.max_kv_len)

    def graph(
        self,
        engine: Engine,
        num_seqs: int = NUM_SEQS,
        *,
        captured_with: Work | None = None,
        max_kv_len: int | None = None,
    ) -> Graph:
        num_tokens = None if self.level == GraphLevel.DECODE else UNIFORM * num_seqs
        return Graph(engine, num_seqs, num_tokens, max_kv_len or self.max_kv_len, captured_with=captured_with)

    def counts(self, num_seqs: int, number: int = 0) -> list[int]:
        """New tokens of up to four sequences, in a step that a graph for so many serves."""
        if self.level != GraphLevel.ALWAYS:
            return [1 if self.level == GraphLevel.DECODE else UNIFORM] * num_seqs
        wanted = _RAGGED[number % len(_RAGGED)][:num_seqs]
        before = [0, *accumulate(wanted)]
        return [max(min(count, UNIFORM * num_seqs - sum_), 0) for count, sum_ in zip(wanted, before, strict=False)]

    def prompts(self) -> list[int]:
        """Of four sequences, which come to the ends of their pages in different steps."""
        size = self.case.page_size
        return [size - 1, size, 1, 2 * size - 1]
