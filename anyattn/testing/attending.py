"""Attention of one sequence's new tokens, in any dtype and in several orders of the same computation.

In float64 it says what is right. In the spec's own dtype, as a model's plain code computes it, it says what rounding
costs. It shares no code with the backends, the reference among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.pool import quantize
from anyattn.types import FP8_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A sequence's new tokens in one step and all that they may see, on the CPU.

    q: [num_new, num_qo_heads, head_dim], the spec's dtype, the sequence's last tokens. rounded_q: as a backend may see
        it that rounds q to an fp8 cache's dtype; q itself where none may.
    k, v: [num_tokens, num_kv_heads, head_dim or vo_head_dim], float64: stored values times scales.
    seen: [num_new, num_tokens], bool: which tokens each new one sees.
    sinks, alibi_slopes: [num_qo_heads], float32.
    k_scale, v_scale: [1 or num_kv_heads, 1]; 1.0 where there are none.
    """

    spec: AttentionSpec
    q: torch.Tensor
    rounded_q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    tree_mask: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    page_size: int | None

    @property
    def num_before(self) -> int:
        """Tokens of the sequence before the new ones."""
        return self.k.shape[0] - self.q.shape[0]


class Order(NamedTuple):
    """One of several ways to compute the same, none of them more exact than another.

    shuffled: keys and the elements of heads are summed in a random order. split: q is scaled rather than the scores,
    the keys are attended in two parts, and the weights are divided by their sum last.
    """

    shuffled: bool
    split: bool


ORDERS = (Order(shuffled=True, split=False), Order(shuffled=True, split=True))
"""Those that say what rounding costs."""


class Attended(NamedTuple):
    """out: [num_new, num_qo_heads, vo_head_dim]. lse: [num_new, num_qo_heads]."""

    out: torch.Tensor
    lse: torch.Tensor


class Spread(NamedTuple):
    """By how much roundings that do not depend on each other move a result, as a multiple of one such rounding.

    Both [num_new, num_qo_heads]: the root of the weights' squares, for the output each times its value.
    """

    out: torch.Tensor
    lse: torch.Tensor


def visible_keys(
    spec: AttentionSpec, num_new: int, num_tokens: int, tree_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_new, num_tokens], bool: the new tokens are the last ones, and a tree mask stands for what is among them."""
    before = num_tokens - num_new
    distance = torch.arange(before, num_tokens)[:, None] - torch.arange(num_tokens)
    if not spec.causal:
        return torch.ones_like(distance, dtype=torch.bool)
    seen = distance >= 0
    if spec.sliding_window is not None:
        seen &= distance < spec.sliding_window
    return seen if tree_mask is None else torch.cat([seen[:, :before], tree_mask], dim=1)


def round_q(spec: AttentionSpec, q: torch.Tensor) -> torch.Tensor:
    """A step's q as a backend may see it: with one scale for the whole tensor, where it may round it to fp8."""
    if not (spec.may_quantize_q and spec.storage_dtype in FP8_DTYPES and q.numel()):
        return q
    stored: torch.dtype = getattr(torch, spec.storage_dtype)
    scale = q.abs().max().float().clamp(min=1e-30) / torch.finfo(stored).max
    return (quantize(q, scale, stored).float() * scale).to(q.dtype)


def attend_exactly(rows: Rows) -> tuple[Attended, Spread]:
    """In float64, with nothing rounded."""
    scores, v = _scores_and_values(rows, rows.q, torch.float64, Order(shuffled=False, split=False))
    lse, total = _sums(rows, scores)
    probs = _exp_of_difference(scores, total)
    out = probs.flatten(1, 2) @ v
    out_spread = (probs.square().flatten(1, 2) @ v.square()).amax(dim=-1).sqrt()
    lse_spread = (probs if rows.sinks is None else _exp_of_difference(scores, lse)).square().sum(dim=-1).sqrt()
    spread = Spread(_tokens_first(out_spread.view(lse.shape)), _tokens_first(lse_spread))
    return Attended(_tokens_first(out.view(*lse.shape, v.shape[-1])), _tokens_first(lse)), spread


def attend_plainly(rows: Rows, order: Order) -> Attended:
    """In the spec's dtype, rounding what the spec allows to round; products are summed in float32 at least."""
    spec, dtype = rows.spec, rows.q.dtype
    scores, v = _scores_and_values(rows, rows.rounded_q, dtype, order)
    lse, total = _sums(rows, scores)
    rounds_probs = spec.may_quantize_probs and spec.storage_dtype in FP8_DTYPES
    divided_by = total
    if order.split or rounds_probs:
        divided_by = scores.amax(dim=-1)
    weights = _exp_of_difference(scores, divided_by)
    if rounds_probs:
        weights = weights.to(getattr(torch, spec.storage_dtype)).to(weights.dtype)
    weights, half = weights.to(dtype).flatten(1, 2), rows.k.shape[0] // 2
    if order.split:
        parts = [weights[..., :half] @ v[:, :half], weights[..., half:] @ v[:, half:]]
        out = parts[0].to(scores.dtype) + parts[1].to(scores.dtype)
    else:
        out = (weights @ v).to(scores.dtype)
    out = out.view(*lse.shape, v.shape[-1])
    if divided_by is not total:
        out = out * _exp_of_difference(divided_by[..., None], total)
    return Attended(_tokens_first(out.to(dtype)), _tokens_first(lse))


def _scores_and_values(
    rows: Rows, q: torch.Tensor, dtype: torch.dtype, order: Order
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [num_kv_heads, group, num_new, num_tokens], float32 at least; values [num_kv_heads, num_tokens, dim]."""
    spec, heads, group = rows.spec, rows.spec.num_kv_heads, rows.spec.group_size
    num_new, num_tokens = rows.seen.shape
    q = q.to(dtype).view(num_new, heads, group, spec.head_dim)  # head h reads KV head h // group
    q = q.permute(1, 2, 0, 3).reshape(heads, group * num_new, spec.head_dim)
    k, v = (x.to(dtype).transpose(0, 1) for x in (rows.k, rows.v))
    seen, position = rows.seen, torch.arange(num_tokens)
    if order.shuffled:
        generator = torch.Generator().manual_seed(num_tokens)
        dims = torch.randperm(spec.head_dim, generator=generator)
        position = torch.randperm(num_tokens, generator=generator)
        q, k, v, seen = q[..., dims], k[:, position][..., dims], v[:, position], seen[:, position]
    scores = (q * spec.scale) @ k.mT if order.split else q @ k.mT * spec.scale
    scores = scores.view(heads, group, num_new, num_tokens).to(torch.promote_types(dtype, torch.float32))
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    if rows.alibi_slopes is not None:
        slopes = rows.alibi_slopes.to(scores.dtype).view(heads, group, 1, 1)
        scores = scores + slopes * (position - torch.arange(rows.num_before, num_tokens)[:, None])
    return scores.masked_fill(~seen, float("-inf")), v


def _sums(rows: Rows, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The LSE, and the logarithm of what the output is divided by, both [num_kv_heads, group, num_new]."""
    lse = torch.logsumexp(scores, dim=-1)
    if rows.sinks is None:
        return lse, lse
    return lse, torch.logaddexp(lse, rows.sinks.to(lse.dtype).view(*lse.shape[:2], 1))


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """From [num_kv_heads, group, num_new, ...] to [num_new, num_qo_heads, ...]."""
    return x.movedim(2, 0).flatten(1, 2)


def _exp_of_difference(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """exp(scores - highest), 0 where nothing is seen."""
    return torch.exp(scores - highest.masked_fill(highest.isneginf(), 0.0)[..., None])
