"""Names, constants and small values that every room shares. Standard library only."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any, Literal

CONTRACT_VERSION = 1
"""What a plugin states it was written for; raised when what was written for an older version no longer works."""

NULL_PAGE = 0
"""Never allocated: padding points at it, and whatever it holds reaches no result."""

MOST_PAGES = 2**31 - 2
"""In a pool: page ids are int32, and the null page takes one."""

Phase = Literal["prefill", "decode", "mixed", "verify"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "verify")

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
"""What a runtime fills with a backend: `decode` serves batches of one query token each, `prefill` all others."""

KVLayout = Literal["NHD", "HND", "NZ", "5D"]
KV_LAYOUTS: tuple[KVLayout, ...] = ("NHD", "HND")
"""Order within a page: NHD is [page_size, num_kv_heads, head_dim], HND is [num_kv_heads, page_size, head_dim]."""
VENDOR_LAYOUTS: tuple[KVLayout, ...] = ("NZ", "5D")
"""Orders that only some vendors' kernels read; `anyattn.mem_cache.layouts` says what they are."""
ALL_LAYOUTS: tuple[KVLayout, ...] = (*KV_LAYOUTS, *VENDOR_LAYOUTS)

Status = Literal["run on hardware", "emulated", "contract-tested", "declared"]
STATUSES: tuple[Status, ...] = ("run on hardware", "emulated", "contract-tested", "declared")
"""What stands behind a claim, best first: it ran on such hardware; it ran in an emulator of such hardware; its calls
ran against an emulation of the vendor's interface, written from the vendor's documents; it is written down only."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
}
"""The dtypes the contract knows, by torch's names, and the size of one element in bytes."""

OCP_FP8_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""The two of the Open Compute Project's specification, which most devices compute with."""
FP8_DTYPES = OCP_FP8_DTYPES | {"float8_e4m3fnuz"}
"""With float8_e4m3fnuz: its exponent's bias is one larger, its largest 240, and it has one NaN and one zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How big a batch is: what a backend's priority may depend on beside facts and spec.

    num_seqs: sequences in the batch. kv_len: tokens of a sequence on average, the new ones included.
    """

    num_seqs: int
    kv_len: int


TYPICAL_LOAD = Load(num_seqs=32, kv_len=4096)
"""Where priorities are compared when one backend has to be named for a whole role."""


class GraphLevel(enum.IntEnum):
    """For which batches a device graph captured once may be replayed with other lengths."""

    NEVER = 0
    DECODE = 1
    """Batches of one query token for each sequence."""
    UNIFORM = 2
    """Batches with the same number of query tokens for each sequence."""
    ALWAYS = 3


def dtype_name(dtype: Any) -> str:
    """`torch.bfloat16` or `"bfloat16"` as `"bfloat16"`; names that the contract does not know pass unchanged."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntSet:
    """A set of positive integers written as data: either listed, or bounds with a step.

    values: the members, or None for every multiple of `multiple_of` from `minimum` to `maximum`.
    """

    values: frozenset[int] | None = None
    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        numbers = [self.minimum, self.multiple_of, *([] if self.maximum is None else [self.maximum])]
        if self.values is not None:
            numbers += self.values
            if not isinstance(self.values, frozenset) or not self.values:
                raise ValueError("an IntSet's values are a frozenset of at least one integer")
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            raise ValueError("an IntSet is made of positive integers")
        if self.values is None and self.maximum is not None and self.example() > self.maximum:
            raise ValueError("an IntSet must not be empty")

    def __contains__(self, number: int) -> bool:
        if self.values is not None:
            return number in self.values
        return (
            number >= self.minimum
            and (self.maximum is None or number <= self.maximum)
            and number % self.multiple_of == 0
        )

    def __str__(self) -> str:
        if self.values is not None:
            return ", ".join(map(str, sorted(self.values))) or "none"
        upper = "any" if self.maximum is None and self.minimum <= 1 else f"{self.minimum} or more"
        text = upper if self.maximum is None else f"{self.minimum} to {self.maximum}"
        return text if self.multiple_of == 1 else f"{text}, in multiples of {self.multiple_of}"

    def nearest(self, number: int) -> int:
        """The member that is closest to a number, for remedies."""
        if self.values is not None:
            return min(self.values, key=lambda value: (abs(value - number), value))
        last = number if self.maximum is None else min(number, self.maximum)
        return max(last // self.multiple_of * self.multiple_of, self.example())

    def example(self) -> int:
        """The smallest member, for remedies."""
        if self.values is not None:
            return min(self.values)
        return -(-self.minimum // self.multiple_of) * self.multiple_of


def declared_json(declaration: Any) -> dict[str, Any]:
    """The fields of a dataclass of capabilities as JSON values; a function, as a priority may be one, as its name.

    Raises TypeError or ValueError for what JSON has no value for, as in a field that a subclass added.
    """
    document = {field.name: _json_value(getattr(declaration, field.name)) for field in dataclasses.fields(declaration)}
    json.dumps(document, allow_nan=False)
    return document


def _json_value(value: Any) -> Any:
    if isinstance(value, GraphLevel):
        return value.name.lower()
    if isinstance(value, IntSet):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(map(_json_value, value))
    if isinstance(value, tuple):
        return list(map(_json_value, value))
    return str(getattr(value, "__qualname__", "a function")) if callable(value) else value


ANY_INT = IntSet()


def ints(*values: int) -> IntSet:
    """The set of just these integers."""
    return IntSet(values=frozenset(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a candidate was refused: the field, what was wanted, what it supports, and what to do about it.

    another: whether only another candidate helps. Selection, which knows them, then names those in the remedy.
    """

    field: str
    wanted: str
    supported: str
    remedy: str
    another: bool = False

    def __str__(self) -> str:
        return f"{self.field}: wanted {self.wanted}, supported {self.supported}; {self.remedy}"
