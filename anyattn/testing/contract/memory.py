"""The contract tier of allocators and pools: their classes, and whether their declarations refuse what they should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from anyattn.testing.check import Check, CheckFailedError
from anyattn.testing.contract import classes as class_contract
from anyattn.testing.target import Target
from anyattn.types import Reason

_UNKNOWN_DEVICE_KIND = "no such device"


def checks(
    target: Target, base: type[Any], declaration: type[Any], about: Mapping[str, tuple[str, Callable[[Any], None]]]
) -> Iterator[Check]:
    """base, declaration: as for `class_contract.checks`.

    about: by name, checks of what is declared: the field, and a function that takes the declaration.
    """
    yield from class_contract.checks(target, base, declaration)
    declared = class_contract.declared_by(target.loaded)
    if class_contract.is_subclass(target.loaded, base) and isinstance(declared, declaration):
        for name, (capability, function) in about.items():
            yield class_contract.contract_check(name, capability, partial(function, declared))


def must_refuse(reasons: list[Reason], field: str, asked: str) -> None:
    """Fails unless just this field speaks against what was asked, with a remedy."""
    if [reason.field for reason in reasons] != [field] or not reasons[0].remedy:
        given = "; ".join(map(str, reasons)) or "no reason"
        raise CheckFailedError(f"asked for {asked}, reject_reasons must name {field} with a remedy; it gave {given}.")


def must_accept(reasons: list[Reason], asked: str) -> None:
    """Fails where something speaks against what is declared."""
    if reasons:
        raise CheckFailedError(f"{asked} is declared, and reject_reasons gave {'; '.join(map(str, reasons))}.")


def some_device_kind(declared: frozenset[str] | None) -> str:
    """A kind of device that the declaration holds."""
    return "cpu" if declared is None else min(declared)


def check_device_kinds(declared: frozenset[str] | None, reasons: Callable[[str], list[Reason]]) -> None:
    """reasons: those against a kind of device."""
    for kind in sorted(declared or {_UNKNOWN_DEVICE_KIND, "cpu"}):
        must_accept(reasons(kind), f"device kind {kind!r}")
    if declared is not None:
        must_refuse(reasons(_UNKNOWN_DEVICE_KIND), "device_kind", f"device kind {_UNKNOWN_DEVICE_KIND!r}")
