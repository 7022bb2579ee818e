"""What selection works on and what it answers: candidates, preferences, verdicts and the explained choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.load_table import LoadTable
from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.platforms.base import Platform
from anyattn.types import ROLES, KVLayout, Reason, Role, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCandidate:
    """A backend as selection sees it. missing: what is not installed here, as reasons."""

    name: str
    distribution: str
    capabilities: Capabilities
    missing: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Everything there is to choose from."""

    backends: Sequence[BackendCandidate]
    allocators: Mapping[str, AllocatorCapabilities]
    pools: Mapping[str, PoolCapabilities]
    problems: tuple[str, ...] = ()
    """In words, what kept a plugin or a device from being among the candidates; shown with every answer."""
    kept_out: tuple[str, ...] = ()
    """Plugins that are installed and not named by ANYATTN_PLUGINS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What the user asked for by name or number; None leaves it to selection. Asked for and invalid is an error.

    decode_backends: one name, or several that `plan` picks from by load; empty leaves it to selection.
    joined_layers: whether one storage holds all layers' parts of a page together.
    installed_only: on a simulated device, count only packages that are installed here. On a device that is here
        nothing else ever counts.
    """

    prefill_backend: str | None = None
    decode_backends: tuple[str, ...] = ()
    allocator: str | None = None
    pool: str | None = None
    page_size: int | None = None
    layout: KVLayout | None = None
    joined_layers: bool = False
    installed_only: bool = False

    def backends(self, role: Role) -> tuple[str, ...]:
        """The backends asked for in this role; none where the choice is selection's."""
        if role == "decode":
            return self.decode_backends
        return () if self.prefill_backend is None else (self.prefill_backend,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one candidate in one role. No reasons: it is valid.

    priority: at TYPICAL_LOAD. installed: whether its packages are all here.
    tested_with: the vendor's wheel that the calls are bound to, where the status is contract-tested and one is named.
    """

    name: str
    distribution: str
    role: Role
    priority: float
    status: Status
    tested_with: str
    installed: bool
    reasons: tuple[Reason, ...]

    @property
    def standing(self) -> str:
        """The status in words, with the wheel that is behind it."""
        return f"{self.status} with {self.tested_with}" if self.tested_with else self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageVerdict:
    """What became of one pool or allocator."""

    what: str
    """"pool" or "allocator"."""
    name: str
    priority: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The choice, and the trace of every candidate that led to it.

    decode: the decode backend at TYPICAL_LOAD. decode_by_load: who serves which batch, where several share the role;
    None where `decode` serves them all.
    """

    spec: AttentionSpec
    platform: Platform
    prefill: str
    decode: str
    decode_by_load: LoadTable | None = None
    page_size: int
    layout: KVLayout
    allocator: str
    pool: str
    preference: Preference
    problems: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = field(repr=False)
    storage: tuple[StorageVerdict, ...] = field(repr=False, default=())

    def backends(self, role: Role) -> tuple[str, ...]:
        """The backends chosen for a role, the one for a typical load first."""
        if role == "prefill":
            return (self.prefill,)
        others = () if self.decode_by_load is None else self.decode_by_load.backends()
        return tuple(dict.fromkeys([self.decode, *others]))

    def summary(self) -> list[str]:
        """What was chosen and why, a line for each role and one for the pages."""
        lines = []
        for role in ROLES:
            name = self.backends(role)[0]
            lines.append(f"{role:<9} {name}: {self._why(name, role)}")
            if role == "decode" and self.decode_by_load is not None:
                for other in self.backends(role):
                    regions = "; ".join(self.decode_by_load.regions(other))
                    lines.append(f"loads     {other} serves {regions}")
        paging = f"page size {self.page_size}, layout {self.layout}, allocator {self.allocator}, pool {self.pool}"
        if self.preference.joined_layers:
            paging += ", joined layers"
        return [*lines, f"paging    {paging}"]

    def explain(self) -> str:
        """What was chosen, and why not the others."""
        simulated = ", simulated" if self.platform.simulated else ""
        if simulated and not self.preference.installed_only:
            simulated += ": packages are taken as installed"
        lines = [f"spec      {self.spec}", f"device    {self.platform}{simulated}", *self.summary()]
        others = [
            (name, text)
            for name in sorted({verdict.name for verdict in self.verdicts})
            if (text := self._why_not(name)) is not None
        ]
        others += [
            (f"{v.what} {v.name}", "; ".join(map(str, v.reasons)) or f"valid, with priority {v.priority}")
            for v in self.storage
            if v.name != (self.pool if v.what == "pool" else self.allocator)
        ]
        if others:
            lines.append("not chosen")
            lines += [f"  {name}: {text}" for name, text in others]
        if self.problems:
            lines += ["problems", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)

    def _verdict(self, name: str, role: Role) -> Verdict:
        return next(verdict for verdict in self.verdicts if (verdict.name, verdict.role) == (name, role))

    def _why(self, name: str, role: Role) -> str:
        chosen = self._verdict(name, role)
        origin = f"from {chosen.distribution}, {chosen.standing}"
        if self.preference.backends(role):
            return f"asked for by name, {origin}"
        valid = sum(not v.reasons for v in self.verdicts if v.role == role)
        return f"priority {chosen.priority:g}, {origin}, {valid} valid"

    def _why_not(self, name: str) -> str | None:
        """For each role that the backend does not fill; None when it fills one and is valid in the other.

        Of what is for other kinds of devices that alone is told; `verdicts` have all reasons.
        """
        texts: dict[Role, str] = {}
        for role in ROLES:
            verdict = self._verdict(name, role)
            if name in self.backends(role):
                continue
            # One for another kind of device has dozens of reasons, of which the others say nothing more.
            reasons = [reason for reason in verdict.reasons if reason.field == "device_kind"] or verdict.reasons
            texts[role] = "; ".join(map(str, reasons)) or self._why_another(verdict)
        if len(texts) < len(ROLES):
            texts = {role: text for role, text in texts.items() if self._verdict(name, role).reasons}
        if len(texts) == len(ROLES) and len(set(texts.values())) == 1:
            return texts[ROLES[0]]
        return " | ".join(f"{role}: {text}" for role, text in texts.items()) or None

    def _why_another(self, valid: Verdict) -> str:
        asked, chosen = self.preference.backends(valid.role), self.backends(valid.role)
        if valid.name in asked:
            return f"valid and asked for, but for every batch {' or '.join(chosen)} has the higher priority"
        if asked:
            return f"valid, but {' and '.join(asked)} {'was' if len(asked) == 1 else 'were'} asked for"
        text = f"valid, with priority {valid.priority:g}"
        if valid.priority > self._verdict(chosen[0], valid.role).priority:
            if self.spec.deterministic:
                text += ", but with deterministic one backend has to fill both roles"
            else:
                text += ", but page size and layout find no agreement with it"
        return text

    def choice_json(self) -> dict[str, Any]:
        """What was chosen, as JSON values."""
        choice: dict[str, Any] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "page_size": self.page_size,
            "layout": self.layout,
            "allocator": self.allocator,
            "pool": self.pool,
        }
        if self.preference.joined_layers:
            choice["joined_layers"] = True
        if self.decode_by_load is not None:
            choice["decode_by_load"] = {
                name: list(self.decode_by_load.regions(name)) for name in self.backends("decode")
            }
        return choice

    def to_json(self) -> dict[str, Any]:
        """The choice and the trace as JSON values."""
        return {
            "spec": self.spec.to_json(),
            "device": self.platform.to_json(),
            "choice": self.choice_json(),
            "backends": backends_json([self.verdicts]),
        }


def backends_json(kinds: Sequence[Sequence[Verdict]]) -> list[dict[str, Any]]:
    """One object a backend, in order of appearance.

    kinds: the verdicts for each kind of a model's layers, by number. A backend is `valid` when it is in at least one
    role for at least one kind; `roles` says where and with which priority, each reason where not.
    """
    backends: dict[str, dict[str, Any]] = {}
    for kind, verdicts in enumerate(kinds):
        for verdict in verdicts:
            backend = backends.setdefault(
                verdict.name,
                {
                    "name": verdict.name,
                    "distribution": verdict.distribution,
                    "valid": False,
                    "installed": verdict.installed,
                    "status": verdict.status,
                    "contract_tested_with": verdict.tested_with,
                    "roles": [],
                    "reasons": [],
                },
            )
            where = {"layer_kind": kind, "role": verdict.role}
            if not verdict.reasons:
                backend["valid"] = True
                backend["roles"].append({**where, "priority": verdict.priority})
            backend["reasons"] += [
                {**where, "field": r.field, "wanted": r.wanted, "supported": r.supported, "remedy": r.remedy}
                for r in verdict.reasons
            ]
    return list(backends.values())
