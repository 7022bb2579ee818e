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

    shuffle: the number of the random order in which keys, and the elements of heads, are summed; 0 for their own.
    split: q is scaled rather than the scores, the keys are attended in two parts, and the weights are divided by their
    sum last.
    in_turn: the products of a score are added one after the other, as products of few rows are by some libraries.
    """

    shuffle: int
    split: bool
    in_turn: bool = False


ORDERS = (Order(shuffle=1, split=False), Order(shuffle=2, split=True))
"""Those that say what rounding costs."""

MORE_ORDERS = (
    *(Order(shuffle=number, split=number % 2 == 0) for number in range(3, 15)),
    *(Order(shuffle=number, split=False, in_turn=True) for number in (0, 15, 16)),
)
"""More, where chance may have had all of `ORDERS` come out nearly exact."""


class Attended(NamedTuple):
    """out: [num_new, num_qo_heads, vo_head_dim]. lse: [num_new, num_qo_heads]."""

    out: torch.Tensor
    lse: torch.Tensor


class Spread(NamedTuple):
    """By how much roundings that do not depend on each other move a result, as a multiple of one such rounding.

    All [num_new, num_qo_heads]. A score is rounded by its size, and by the size of the products that it sums; a weight
    by its own. What that does to a result is summed over all keys as independent errors are, by their squares.

    log_sum: logarithm of what the output is divided by. Where weights are exp(score - log_sum), its rounding is all of
    theirs.
    """

    out: torch.Tensor
    lse: torch.Tensor
    log_sum: torch.Tensor


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
    """In float64, with nothing rounded.

    A key's score moves the output by its weight times its value less the output. Weights here leave the sinks out:
    what these take is one factor for a row. Tensors are changed in place where they can be, as at these sizes the
    memory of new ones costs more than what is computed.
    """
    spec, (num_new, num_tokens) = rows.spec, rows.seen.shape
    heads, group = spec.num_kv_heads, spec.group_size
    if not num_new:
        none = rows.k.new_empty(0, spec.num_qo_heads)
        return Attended(rows.k.new_empty(0, spec.num_qo_heads, spec.vo_head_dim), none), Spread(none, none, none)
    q = rows.q.double().view(num_new, heads, group, spec.head_dim).transpose(0, 1).flatten(1, 2)
    k, v, shape = rows.k.transpose(0, 1), rows.v.transpose(0, 1), (heads, num_new, group)
    scores = (q @ k.mT).mul_(spec.scale).view(*shape, num_tokens)
    if spec.logits_soft_cap is not None:
        scores = scores.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
    if rows.alibi_slopes is not None:
        distance = torch.arange(num_tokens) - torch.arange(rows.num_before, num_tokens)[:, None]
        scores.addcmul_(_of_heads(rows, rows.alibi_slopes)[:, None], distance[:, None].double())
    of_score = (q.square() @ k.square().mT).mul_(spec.scale**2).view(scores.shape).addcmul_(scores, scores)

    scores.masked_fill_(~rows.seen[:, None], float("-inf"))
    highest = scores.amax(dim=-1, keepdim=True)
    highest.masked_fill_(highest.isneginf(), 0.0)
    probs = scores.sub_(highest).exp_()
    summed = probs.sum(dim=-1, keepdim=True)
    lse = summed.log().add_(highest)
    probs.div_(summed.masked_fill_(summed == 0.0, 1.0))
    out = (probs.flatten(1, 2) @ v).view(*shape, -1)
    total, of_keys = lse, None
    if rows.sinks is not None:
        total = torch.logaddexp(lse, _of_heads(rows, rows.sinks)[:, None])
        of_keys = (lse - total).exp_()
        out.mul_(of_keys)

    by_weight = probs.square_()
    by_score = of_score.mul_(by_weight)
    by_both = by_weight.add_(by_score)
    of_lse = by_both.sum(dim=-1, keepdim=True).sqrt_()
    moved = (by_score.flatten(1, 2) @ v).view(out.shape).mul_(-2.0)
    moved.addcmul_(out, by_score.sum(dim=-1, keepdim=True)).mul_(out)
    moved.add_((by_both.flatten(1, 2) @ v.square()).view(out.shape))
    of_out = moved.amax(dim=-1, keepdim=True).clamp_(min=0.0).sqrt_()
    if of_keys is not None:
        of_out.mul_(of_keys)

    out, lse, of_out, of_lse, total = (x.transpose(0, 1).flatten(1, 2) for x in (out, lse, of_out, of_lse, total))
    return Attended(out, lse[..., 0]), Spread(of_out[..., 0], of_lse[..., 0], total[..., 0])


def attend_plainly(rows: Rows, order: Order) -> Attended:
    """In the spec's dtype, rounding what the spec allows to round; products are summed in float32 at least."""
    spec, dtype = rows.spec, rows.q.dtype
    scores, v = _scores_and_values(rows, rows.rounded_q, dtype, order)
    lse = torch.logsumexp(scores, dim=-1)
    highest = scores.amax(dim=-1) if scores.shape[-1] else lse
    numerators = _exp_of_difference(scores, highest)
    denominator = numerators.sum(dim=-1, keepdim=True)
    if rows.sinks is not None:
        denominator = denominator + _exp_of_difference(_of_heads(rows, rows.sinks)[..., None].to(lse.dtype), highest)
    denominator = denominator.masked_fill(denominator == 0.0, 1.0)
    if spec.may_quantize_probs and spec.storage_dtype in FP8_DTYPES:
        numerators = numerators.to(getattr(torch, spec.storage_dtype)).to(numerators.dtype)
    if order.split:
        weights, half = numerators.to(dtype).flatten(1, 2), rows.k.shape[0] // 2
        parts = [weights[..., :half] @ v[:, :half], weights[..., half:] @ v[:, half:]]
        summed = parts[0].to(scores.dtype) + parts[1].to(scores.dtype)
        out = (summed.view(*lse.shape, v.shape[-1]) / denominator).to(dtype)
    else:
        weights = (numerators / denominator).to(dtype).flatten(1, 2)
        out = (weights @ v).view(*lse.shape, v.shape[-1])
    return Attended(_tokens_first(out), _tokens_first(lse))


def _scores_and_values(
    rows: Rows, q: torch.Tensor, dtype: torch.dtype, order: Order
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [num_kv_heads, group, num_new, num_tokens], float32 at least; values [num_kv_heads, num_tokens, dim]."""
    spec, heads, group = rows.spec, rows.spec.num_kv_heads, rows.spec.group_size
    num_new, num_tokens = rows.seen.shape
    q = _grouped(rows, q.to(dtype))
    k, v = (x.to(dtype).transpose(0, 1) for x in (rows.k, rows.v))
    seen, position = rows.seen, torch.arange(num_tokens)
    if order.shuffle:
        generator = torch.Generator().manual_seed(order.shuffle)
        dims = torch.randperm(spec.head_dim, generator=generator)
        position = torch.randperm(num_tokens, generator=generator)
        q, k, v, seen = q[..., dims], k[:, position][..., dims], v[:, position], seen[:, position]
    if order.in_turn:
        summed = q.new_zeros(*q.shape[:2], num_tokens, dtype=torch.promote_types(dtype, torch.float32))
        for element in range(spec.head_dim):
            summed += q[..., element, None].to(summed.dtype) * k[:, None, :, element]
        scores = summed.to(dtype) * spec.scale
    else:
        scores = (q * spec.scale) @ k.mT if order.split else q @ k.mT * spec.scale
    scores = scores.view(heads, group, num_new, num_tokens).to(torch.promote_types(dtype, torch.float32))
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    if rows.alibi_slopes is not None:
        slopes = _of_heads(rows, rows.alibi_slopes)[..., None].to(scores.dtype)
        scores = scores + slopes * (position - torch.arange(rows.num_before, num_tokens)[:, None])
    return scores.masked_fill(~seen, float("-inf")), v


def _grouped(rows: Rows, q: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, group * num_new, head_dim]; query head h reads KV head h // group."""
    spec, num_new = rows.spec, q.shape[0]
    q = q.view(num_new, spec.num_kv_heads, spec.group_size, spec.head_dim).permute(1, 2, 0, 3)
    return q.reshape(spec.num_kv_heads, spec.group_size * num_new, spec.head_dim)


def _of_heads(rows: Rows, values: torch.Tensor) -> torch.Tensor:
    """From [num_qo_heads] to [num_kv_heads, group, 1], float64."""
    return values.double().view(rows.spec.num_kv_heads, rows.spec.group_size, 1)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """From [num_kv_heads, group, num_new, ...] to [num_new, num_qo_heads, ...]."""
    return x.movedim(2, 0).flatten(1, 2)


def _exp_of_difference(scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """exp(scores - highest), 0 where nothing is seen."""
    return torch.exp(scores - highest.masked_fill(highest.isneginf(), 0.0)[..., None])
