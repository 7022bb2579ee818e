"""What the compliance kit is made of: checks, each of one thing that a declaration or the contract says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Tier = Literal["contract", "numerics", "memory", "graph", "determinism"]
TIERS: tuple[Tier, ...] = ("contract", "numerics", "memory", "graph", "determinism")
"""contract needs no device; all others run on one."""


class CheckFailedError(AssertionError):
    """What was checked does not hold; the text says what is wrong, and by how much."""


class CannotRunError(Exception):
    """What was to be checked cannot be checked here; the text says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """error, allowed: the largest error against float64 in units of what is allowed there, both absolute.

    What is allowed may be more than is said where the error is far within it: see `numerics.expectation.judge`.
    """

    error: float
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold.

    name: in words, unique within its tier and the same in every run, as lists of expected failures name it.
    capability: the row of the report that it belongs to, a field of the declaration where there is one.
    run: takes the seed of all random inputs. It raises CheckFailedError, or whatever the tested code raises, where the
        check fails, CannotRunError where it cannot be made.
    """

    tier: Tier
    name: str
    capability: str
    run: Callable[[int], Measured | None]

    @property
    def id(self) -> str:
        """How the check is named from outside: "numerics/sliding_window=33"."""
        return f"{self.tier}/{self.name}"
