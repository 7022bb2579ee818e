"""Checks that what a backend does not declare is refused, field by field, with a reason that can be acted on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.testing.check import Check, CheckFailedError
from anyattn.testing.contract.classes import contract_check
from anyattn.testing.contract.covered import Covered, find_covered, reasons
from anyattn.testing.contract.questions import Question, Refusal, refusals


def checks(capabilities: Capabilities) -> Iterator[Check]:
    """One check for each field of which something is not declared, and those of a field that nobody knows."""
    yield contract_check("a plain spec that it declares is accepted", "contract", partial(_require_base, capabilities))
    for refusal in (*refusals(capabilities), _LATER):
        if refusal.values:
            named = "it" if refusal.what.endswith(refusal.field) or refusal is _LATER else refusal.field
            yield contract_check(
                f"{refusal.what} is refused with a reason that names {named}",
                refusal.capability,
                partial(_require_refused, capabilities, refusal),
            )
    yield contract_check(
        "a field of a later version changes nothing at its neutral value",
        "contract",
        partial(_require_neutral, capabilities),
    )


def _require_base(capabilities: Capabilities) -> None:
    find_covered(capabilities)


def _require_refused(capabilities: Capabilities, refusal: Refusal) -> None:
    covered = find_covered(capabilities)
    for question in (refusal.ask(covered, value) for value in refusal.values):
        spec, device = question.spec or covered.spec, question.device or covered.device
        for role in question.roles or covered.roles:
            given = reasons(capabilities, spec, device, role, **question.paging)
            named = [reason for reason in given if reason.field == refusal.field]
            if not named:
                said = f"reasons that name {', '.join(reason.field for reason in given)}" if given else "no reason"
                raise CheckFailedError(
                    f"{question.asked} is not declared, and reject_reasons gave {said} for {role} of [{spec}] on "
                    f"{device}: what is not declared is refused with a reason whose field is {refusal.field!r}."
                )
            for part in ("wanted", "supported", "remedy"):
                text = getattr(named[0], part)
                if not (isinstance(text, str) and text.strip()):
                    raise CheckFailedError(
                        f"the reason against {question.asked} has {text!r} for {part}: a reason says what was wanted, "
                        "what is supported and what to do."
                    )


def _require_neutral(capabilities: Capabilities) -> None:
    covered = find_covered(capabilities)
    for role in covered.roles:
        if given := reasons(capabilities, _later(covered.spec, asked=False), covered.device, role):
            raise CheckFailedError(
                f"a spec that also has the field a_later_field, at its neutral value, is refused: {given[0]}. Refuse "
                "unknown fields only where they ask for something, so that the contract can grow."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaterSpec(AttentionSpec):
    """A spec of a later version, with a field that no declaration knows."""

    a_later_field: bool = False


def _later(spec: AttentionSpec, *, asked: bool) -> AttentionSpec:
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return _LaterSpec(**fields, a_later_field=asked)


def _ask_later(covered: Covered, value: Any) -> Question:
    return Question(asked=f"a_later_field={value}", spec=_later(covered.spec, asked=value))


_LATER = Refusal(
    what="a field of a later version", field="a_later_field", capability="contract", values=(True,), ask=_ask_later
)
