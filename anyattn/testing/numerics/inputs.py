"""Random inputs of steps, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from anyattn.attention.spec import AttentionSpec

Trees = Literal["each", "some", "arbitrary", "blind"]
"""The tree masks of a spec that has them. each: a random tree for every sequence. some: for every other sequence, and
for none in a step with a long prompt. arbitrary: masks of which no tree would be made, as what a token sees, others
need not see through it. blind: such masks, and some tokens see no new token, not even themselves."""

_LONG_PROMPT = 32
_KINDS_OF_ROWS = 8
"""In sparse attention, of so many tokens one sees no key, and half see as many as they may."""
_EXTREME_SINKS = (30.0, -1e4, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerHead:
    """What `run` takes for each query head: [num_qo_heads], on the CPU; None where the spec has it not."""

    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None

    @classmethod
    def draw(
        cls,
        spec: AttentionSpec,
        generator: torch.Generator,
        *,
        extreme_sinks: bool = False,
        narrow_sinks: bool = False,
    ) -> PerHead:
        """extreme_sinks: some that leave nothing to the keys, and some that leave all. narrow_sinks: in bfloat16."""
        sinks = torch.randn(spec.num_qo_heads, generator=generator) if spec.sinks else None
        if sinks is not None and extreme_sinks:
            sinks = torch.tensor(_EXTREME_SINKS).repeat(spec.num_qo_heads)[: spec.num_qo_heads] + sinks
        if sinks is not None and narrow_sinks:
            sinks = sinks.bfloat16()
        slopes = torch.rand(spec.num_qo_heads, generator=generator) * 0.2 if spec.alibi else None
        return cls(sinks=sinks, alibi_slopes=slopes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Fresh inputs of one step on the CPU; k and v in the shapes of heads, for MLA v the latent part of k.

    rows: each sequence's tokens. tree_masks: as `AttentionRuntime.extend` takes them.
    topk, seeds: where the spec has a topk, that, and of each sequence what its tokens' keys are drawn by.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: list[slice]
    tree_masks: list[torch.Tensor | None] | None
    topk: int | None = None
    seeds: tuple[int, ...] = ()

    @classmethod
    def draw(
        cls,
        spec: AttentionSpec,
        counts: Sequence[int],
        generator: torch.Generator,
        *,
        trees: Trees = "each",
        query_scale: float = 1.0,
    ) -> Step:
        """counts: new tokens of each sequence. query_scale: of q's elements, whose deviation is 1 otherwise."""
        tokens, dtype = sum(counts), getattr(torch, spec.dtype)
        k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
        v = torch.randn(tokens, spec.num_kv_heads, spec.vo_head_dim, generator=generator).to(dtype)
        q = torch.randn(tokens, spec.num_qo_heads, spec.head_dim, generator=generator) * query_scale
        return cls(
            q=q.to(dtype),
            k=k,
            v=k[..., : spec.vo_head_dim] if spec.is_mla else v,
            rows=_rows(counts),
            tree_masks=_tree_masks(counts, generator, trees) if spec.tree_mask else None,
            topk=spec.topk,
            seeds=_seeds(len(counts), generator) if spec.topk else (),
        )

    def of_sequences(self, which: Sequence[int]) -> Step:
        """These sequences' part, as a step of its own."""
        counts = self.counts
        return Step(
            q=torch.cat([self.q[self.rows[i]] for i in which]),
            k=torch.cat([self.k[self.rows[i]] for i in which]),
            v=torch.cat([self.v[self.rows[i]] for i in which]),
            rows=_rows([counts[i] for i in which]),
            tree_masks=None if self.tree_masks is None else [self.tree_masks[i] for i in which],
            topk=self.topk,
            seeds=tuple(self.seeds[i] for i in which) if self.seeds else (),
        )

    def indices(self, prefixes: Sequence[int]) -> torch.Tensor | None:
        """What `AttentionRuntime.run` takes, on the CPU, always the same; None where the spec has no topk.

        prefixes: tokens of each sequence before the step.
        """
        if self.topk is None:
            return None
        drawn = [
            _chosen(self.topk, prefix, count, seed)
            for prefix, count, seed in zip(prefixes, self.counts, self.seeds, strict=True)
        ]
        return torch.cat(drawn)

    @property
    def counts(self) -> list[int]:
        """New tokens of each sequence."""
        return [rows.stop - rows.start for rows in self.rows]


def _seeds(count: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(1 << 31, (count,), generator=generator).tolist())


def _chosen(topk: int, prefix: int, count: int, seed: int) -> torch.Tensor:
    """For each new token some of the positions up to its own, in any order, -1 among them: [count, topk], int32."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((count, topk), -1, dtype=torch.int32)
    for row, position in zip(indices, range(prefix, prefix + count), strict=True):
        kind, most = int(torch.randint(_KINDS_OF_ROWS, (), generator=generator)), min(topk, position + 1)
        if kind == 0:
            continue
        seen = most if kind > _KINDS_OF_ROWS // 2 else int(torch.randint(1, most + 1, (), generator=generator))
        places = torch.randperm(topk, generator=generator)[:seen]
        row[places] = torch.randperm(position + 1, generator=generator)[:seen].int()
    return indices


def _rows(counts: Sequence[int]) -> list[slice]:
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def _tree_masks(
    counts: Sequence[int], generator: torch.Generator, trees: Trees
) -> list[torch.Tensor | None] | None:
    if trees == "some" and max(counts, default=0) >= _LONG_PROMPT:
        return None
    draw = _tree if trees in ("each", "some") else _arbitrary
    masks: list[torch.Tensor | None] = [draw(count, generator) for count in counts]
    if trees == "some":
        return [mask if i % 2 else None for i, mask in enumerate(masks)]
    if trees == "blind":
        for mask in masks:
            assert mask is not None
            mask[::3] = False
    return masks


def _tree(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """A random tree in which each token sees its ancestors and itself: [num_tokens, num_tokens], bool."""
    mask = torch.eye(num_tokens, dtype=torch.bool)
    for token in range(1, num_tokens):
        parent = int(torch.randint(-1, token, (1,), generator=generator))
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def _arbitrary(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Each token sees itself and about half of those before it."""
    mask = torch.rand(num_tokens, num_tokens, generator=generator) < 0.5
    return mask.tril() | torch.eye(num_tokens, dtype=torch.bool)


def part_of_fused(x: torch.Tensor, device: torch.device, *, gap: float) -> torch.Tensor:
    """[num_tokens, heads, dim], a view of as many heads more, as of a fused projection; the gap fills the others."""
    return torch.cat([x, torch.full_like(x, gap)], dim=1).to(device)[:, : x.shape[1]]


def at_odd_strides(x: torch.Tensor, device: torch.device, *, gap: float) -> torch.Tensor:
    """[num_tokens, heads, dim], a view that begins at an odd element, with no stride a multiple of 8 elements."""
    tokens, heads, dim = x.shape
    head = dim + (2 if dim % 2 else 1)
    token = heads * head + (2 if heads * head % 2 == 1 else 1)
    storage = torch.full((1 + tokens * token,), gap, dtype=x.dtype, device=device)
    view = storage.as_strided(x.shape, (token, head, 1), 1)
    view.copy_(x)
    return view
