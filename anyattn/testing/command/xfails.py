"""Checks that are expected to fail, each with a reason, as a file names them.

A line is `ID  # reason`. With several targets, `NAME:ID` means the check of the target of that name alone, and goes
before an ID that stands for all of them. Empty lines and lines that begin with # are left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anyattn.errors import ContractError
from anyattn.testing.check import TIERS
from anyattn.testing.command.verification import Verification

_LINE = re.compile(r"(?P<name>.*?\S)\s+#(?P<reason>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailure:
    """target: the name of the one that is meant; None for every one that has the check. line: its number."""

    target: str | None
    id: str
    reason: str
    line: int

    @property
    def name(self) -> str:
        """As it is written in the file."""
        return self.id if self.target is None else f"{self.target}:{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailures:
    """What a file names; path: as it was given, for messages."""

    path: str
    entries: tuple[ExpectedFailure, ...]

    @classmethod
    def read(cls, path: Path) -> ExpectedFailures:
        """Raises ContractError for a file that cannot be read, and for a line that says no id, or no reason."""
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ContractError(f"the file of expected failures, {path}, cannot be read: {error}") from error
        entries: dict[str, ExpectedFailure] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                entry = _entry(line.strip(), number, path)
                if entry.name in entries:
                    first = entries[entry.name].line
                    raise ContractError(f"{path}, line {number}: {entry.name!r} is in line {first} too; remove one.")
                entries[entry.name] = entry
        return cls(path=str(path), entries=tuple(entries.values()))

    def reason_for(self, target: str, check: str) -> str | None:
        """Why the check of that id is expected to fail; None where it is not."""
        for owner in (target, None):
            for entry in self.entries:
                if entry.id == check and entry.target == owner:
                    return entry.reason
        return None

    def stale(self, verifications: Sequence[Verification]) -> list[str]:
        """In words, the entries that no target has a check for, whether or not it was among those asked for."""
        return [
            f"{self.path}, line {entry.line}: {text}"
            for entry in self.entries
            if (text := _stale(entry, verifications))
        ]


def _entry(line: str, number: int, path: Path) -> ExpectedFailure:
    match = _LINE.fullmatch(line)
    name, reason = (match["name"], match["reason"].strip()) if match else (line, "")
    if not reason:
        raise ContractError(f"{path}, line {number}: {name!r} has no reason: write `{name}  # why it fails`.")
    owner, _, rest = name.partition(":")
    prefixed = not _has_tier(name) and _has_tier(rest)
    if not prefixed and not _has_tier(name):
        raise ContractError(
            f"{path}, line {number}: {name!r} is no check's id: one is TIER/NAME or TARGET:TIER/NAME, with a tier of "
            f"{', '.join(TIERS)}; `anyattn verify TARGET --list` prints them."
        )
    return ExpectedFailure(
        target=owner if prefixed else None, id=rest if prefixed else name, reason=reason, line=number
    )


def _has_tier(check: str) -> bool:
    return any(check.startswith(f"{tier}/") for tier in TIERS)


def _stale(entry: ExpectedFailure, verifications: Sequence[Verification]) -> str:
    """In words, why the entry names no check; empty where it does, or where that cannot be told here."""
    targets = [found for found in verifications if entry.target in (None, found.target.name)]
    if not targets:
        names = ", ".join(found.target.name for found in verifications)
        return f"{entry.name!r} names a target that is not verified here; verified are {names}."
    tier = entry.id.partition("/")[0]
    if any(tier in found.unmade for found in targets):
        return ""
    known = {name for found in targets for name in found.known}
    if entry.id in known:
        return ""
    near = difflib.get_close_matches(entry.id, sorted(known), n=1, cutoff=0.0)
    meant = f"; the closest is {near[0]!r}" if near else ""
    return f"there is no check {entry.id!r}{meant}. Remove the line, or mend it."
