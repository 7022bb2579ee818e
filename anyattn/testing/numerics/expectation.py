"""How far from float64 a result may be, and where it is farthest off in terms of that.

A kernel may round as a model's plain code in the same dtypes does, but how much that costs differs from row to row, and
chance has plain code come out nearly exact in some. So the plain computation's errors of all rows, and of several
orders of its sums, are each divided by what independent roundings add up to in that row (`attending.Spread`): all
are then draws of one quantity, whose largest hardly depends on chance. Allowed is twice that, times the row's spread,
plus one unit in the last place: of the result's dtype at the row's largest value, and of the float32 logarithm of the
sum that a row may have been divided by. A result that is off by little is judged again by more orders.

The largest of some errors is at most that of all, and so is what they allow: a result that is right by some is right by
all. A sample is therefore tried first, one sequence of each step in one order, and all are only attended where a
result is not well within what the sample allows. What is said to be allowed is then the sample's, and may be more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from anyattn.testing.numerics.attending import (
    MORE_ORDERS,
    ORDERS,
    Attended,
    Order,
    Rows,
    Spread,
    attend_exactly,
    attend_plainly,
)

PARTS = ("output", "LSE")
_NEARLY = 3.0
"""Times what is allowed: what is off by more is wrong whatever the order."""
_WELL_WITHIN = 2 / 3
"""Of what a sample of the plain computation allows: what is off by more is judged by all of `ORDERS`."""

Results = tuple[torch.Tensor, ...]
"""Of one step: output [num_tokens, num_qo_heads, vo_head_dim] and, where wanted, LSE [num_tokens, num_qo_heads]."""


class PlainError(Protocol):
    """Of output and LSE, the largest error of the plain computation, in units of the spread."""

    def __getitem__(self, part: int, /) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """What one step must give.

    name: of the step, in messages. phase: the batch's. rows: each sequence's tokens. sequences: what was attended.
    exact: output and LSE of all tokens, in float64. spread: of both. sampled_error: the plain computation's in the
    first order, for one sequence. plain_error: in all `ORDERS`, for all; attended when it is first asked for.
    """

    name: str
    phase: str
    rows: list[slice]
    sequences: tuple[Rows, ...]
    exact: Attended
    spread: Spread
    sampled_error: PlainError
    plain_error: PlainError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """error, allowed: where the error is largest in units of what is allowed there; `judge` says by which orders.

    failure: what is wrong there, empty where nothing is. is_nan: whether that is a NaN. step: the number of the step.
    """

    error: float
    allowed: float
    failure: str = ""
    is_nan: bool = False
    step: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class _ErrorInOrders:
    """A `PlainError` that is attended when it is first asked for; sequences, exact and spread as `Expected` has them.

    rows: of each sequence.
    """

    orders: Sequence[Order]
    sequences: Sequence[Rows]
    rows: Sequence[slice]
    exact: Attended
    spread: Spread

    def __getitem__(self, part: int, /) -> float:
        return self._errors[part]

    @cached_property
    def _errors(self) -> list[float]:
        errors = [0.0 for _ in PARTS]
        for sequence, rows in zip(self.sequences, self.rows, strict=True):
            exact, spread = Attended(*(x[rows] for x in self.exact)), Spread(*(x[rows] for x in self.spread))
            for order in self.orders if sequence.q.shape[0] else ():
                plain = attend_plainly(sequence, order)
                for part in range(len(PARTS) if sequence.spec.return_lse else 1):
                    errors[part] = max(errors[part], _plain_error(part, exact, spread, plain, sequence.q.dtype))
        return errors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LargestError:
    """A `PlainError`, the largest of several, which are attended when it is first asked for."""

    of: Sequence[PlainError]

    def __getitem__(self, part: int, /) -> float:
        return max(each[part] for each in self.of)


def expect(name: str, phase: str, rows: list[slice], sequences: Sequence[Rows]) -> Expected:
    """Attends every sequence of one step, of which there is at least one, exactly; plainly what is asked for."""
    exact, spread = zip(*map(attend_exactly, sequences), strict=True)
    every = _ErrorInOrders(
        orders=ORDERS,
        sequences=sequences,
        rows=rows,
        exact=Attended(*map(torch.cat, zip(*exact, strict=True))),
        spread=Spread(*map(torch.cat, zip(*spread, strict=True))),
    )
    sizes = [each.seen.numel() for each in sequences]
    least = sizes.index(min(filter(None, sizes), default=0))
    return Expected(
        name=name,
        phase=phase,
        rows=rows,
        sequences=tuple(sequences),
        exact=every.exact,
        spread=every.spread,
        sampled_error=replace(every, orders=ORDERS[:1], sequences=[sequences[least]], rows=[rows[least]]),
        plain_error=every,
    )


def _plain_error(part: int, right: Attended, spread: Spread, plain: Attended, dtype: torch.dtype) -> float:
    """The largest, in units of the spread; what rounding the result itself to the nearest costs is left out."""
    wanted = _zero_where(right.lse.isneginf(), right[part])
    error = (_zero_where(right.lse.isneginf(), plain[part].double()) - wanted).abs()
    excess = error - unit_in_last_place(part, wanted, dtype) / 2
    excess = excess if part else excess.amax(dim=-1)
    return float((excess / spread[part]).masked_fill(spread[part] == 0.0, 0.0).clamp(min=0.0).max())


def _zero_where(unseen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """unseen: [num_tokens, num_qo_heads], rows that see nothing."""
    return x.masked_fill(unseen.view(unseen.shape + (1,) * (x.ndim - 2)), 0.0)


def unit_in_last_place(part: int, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the result's dtype at each row's largest value: [num_tokens, num_qo_heads, 1], for the LSE [num_tokens, 1]."""
    info = torch.finfo(torch.float32 if part else dtype)
    return (exact.abs().amax(dim=-1, keepdim=True) * info.eps).clamp(min=info.smallest_normal * info.eps)


def judge(got: Sequence[Results], expected: Sequence[Expected]) -> Verdict:
    """Judges the results of several steps, all by the largest error of the plain computation in any of them.

    What is allowed is by the sample where the error is well within that, by `ORDERS` where it is within that, and by
    `MORE_ORDERS` besides where they were tried.
    """
    verdict = _judge_all(got, expected, [each.sampled_error for each in expected])
    if verdict.is_nan or (not verdict.failure and verdict.error <= _WELL_WITHIN * verdict.allowed):
        return verdict
    plain = [each.plain_error for each in expected]
    verdict = _judge_all(got, expected, plain)
    if verdict.failure and verdict.error < _NEARLY * verdict.allowed:
        return _judge_all(got, expected, [*plain, *(_in_more_orders(each) for each in expected)])
    return verdict


def _in_more_orders(expected: Expected) -> PlainError:
    return _ErrorInOrders(
        orders=MORE_ORDERS,
        sequences=expected.sequences,
        rows=expected.rows,
        exact=expected.exact,
        spread=expected.spread,
    )


def _judge_all(got: Sequence[Results], expected: Sequence[Expected], plain: Sequence[PlainError]) -> Verdict:
    """plain: of which the largest counts."""
    worst = Verdict(error=0.0, allowed=1.0)
    for part in range(len(got[0]) if got else 0):
        plain_error = max(each[part] for each in plain)
        for step, (results, wanted) in enumerate(zip(got, expected, strict=True)):
            verdict = _judge(part, results[part], wanted, plain_error, step)
            if bool(verdict.failure) > bool(worst.failure) or (
                bool(verdict.failure) == bool(worst.failure)
                and verdict.error / verdict.allowed > worst.error / worst.allowed
            ):
                worst = verdict
    return worst


def _judge(part: int, got: torch.Tensor, expected: Expected, plain_error: float, step: int) -> Verdict:
    name, exact = PARTS[part], expected.exact[part]
    dtype = torch.float32 if part else expected.sequences[0].q.dtype if expected.sequences else got.dtype

    def failed(text: str, *, is_nan: bool = False) -> Verdict:
        return Verdict(error=float("inf"), allowed=1.0, failure=f"{name} {text}", is_nan=is_nan, step=step)

    if got.dtype != dtype:
        return failed(f"is of {got.dtype}, and the contract says {dtype}")
    if got.shape != exact.shape:
        return failed(f"is of shape {list(got.shape)}, and the contract says {list(exact.shape)}")
    if not got.numel():
        return Verdict(error=0.0, allowed=1.0, step=step)
    if got.isnan().any():
        rows = got.isnan().flatten(1).any(dim=1)
        others = f" and {int(rows.sum()) - 1} more tokens" if int(rows.sum()) > 1 else ""
        return failed(f"is NaN in {_place(expected, _first(got.isnan()))}{others}", is_nan=True)
    unseen = expected.exact[1].isneginf()
    if part == 1 and not torch.equal(got.isneginf(), unseen):
        place = _first(got.isneginf() != unseen)
        value, wanted = float(got[place]), float(exact[place])
        return failed(f"is {value:.4g} and not {wanted:.4g} in {_place(expected, place)}; it is -inf for a row that "
                      "sees nothing, and for no other")  # fmt: skip
    got = got.double()
    if part:
        got, exact = _zero_where(unseen, got), _zero_where(unseen, exact)
    spread = expected.spread[part]
    allowed = 2 * plain_error * (spread if part else spread[..., None]) + unit_in_last_place(part, exact, dtype)
    if not part:
        log_sum = expected.spread.log_sum.masked_fill(unseen, 0.0)
        summed = torch.finfo(torch.promote_types(dtype, torch.float32))
        allowed = allowed + summed.eps * log_sum.abs()[..., None] * exact.abs().amax(dim=-1, keepdim=True)
    error, allowed = (got - exact).abs(), allowed.expand_as(got)
    ratio = error / allowed
    place = _first(ratio == ratio.max())
    at_error, at_allowed = float(error[place]), float(allowed[place])
    if at_error <= at_allowed:
        return Verdict(error=at_error, allowed=at_allowed, step=step)
    off = f"{name} is off by {at_error:.3g} against float64 ({at_allowed:.2g} allowed), in {_place(expected, place)}"
    if not part and not got.any():
        off += "; it is 0 in the whole step"
    return Verdict(error=at_error, allowed=at_allowed, failure=off, step=step)


def _first(found: torch.Tensor) -> tuple[int, ...]:
    """Where the first True is."""
    return tuple(int(index) for index in found.nonzero()[0])


def _place(expected: Expected, place: tuple[int, ...]) -> str:
    """In words: the step, the sequence, its token among the new ones, and the head."""
    token, head = place[:2]
    sequence = next(i for i, rows in enumerate(expected.rows) if rows.start <= token < rows.stop)
    rows, lengths = expected.rows[sequence], [each.k.shape[0] for each in expected.sequences]
    return (
        f"{expected.name} ({expected.phase}), sequence {sequence} of {len(lengths)}, which has {lengths[sequence]} "
        f"tokens, new token {token - rows.start} of {rows.stop - rows.start}, head {head}"
    )
