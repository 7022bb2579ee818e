"""What selection works on and what it answers: candidates, preferences, verdicts and the explained choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.platforms.base import Platform
from anyattn.types import ROLES, KVLayout, Reason, Role


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What the user asked for by name or number; None leaves it to selection. Asked for and invalid is an error."""

    prefill_backend: str | None = None
    decode_backend: str | None = None
    allocator: str | None = None
    pool: str | None = None
    page_size: int | None = None
    layout: KVLayout | None = None

    def backend(self, role: Role) -> str | None:
        """The backend asked for in this role."""
        return self.prefill_backend if role == "prefill" else self.decode_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one candidate in one role. No reasons: it is valid."""

    name: str
    distribution: str
    role: Role
    priority: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The choice, and the trace of every candidate that led to it."""

    spec: AttentionSpec
    platform: Platform
    prefill: str
    decode: str
    page_size: int
    layout: KVLayout
    allocator: str
    pool: str
    preference: Preference
    problems: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = field(repr=False)

    def backend(self, role: Role) -> str:
        """The backend chosen for a role."""
        return self.prefill if role == "prefill" else self.decode

    def explain(self) -> str:
        """What was chosen, and why not the others."""
        lines = [
            f"spec      {self.spec}",
            f"device    {self.platform}",
            *(f"{role:<9} {self.backend(role)}: {self._why(role)}" for role in ROLES),
            f"paging    page size {self.page_size}, layout {self.layout}, "
            f"allocator {self.allocator}, pool {self.pool}",
        ]
        others = [
            (name, text)
            for name in sorted({verdict.name for verdict in self.verdicts})
            if (text := self._why_not(name)) is not None
        ]
        if others:
            lines.append("not chosen")
            lines += [f"  {name}: {text}" for name, text in others]
        if self.problems:
            lines += ["problems", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)

    def _verdicts(self, name: str) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.name == name]

    def _why(self, role: Role) -> str:
        chosen = next(v for v in self._verdicts(self.backend(role)) if v.role == role)
        origin = f"from {chosen.distribution}"
        if self.preference.backend(role) is not None:
            return f"asked for by name, {origin}"
        valid = sum(not v.reasons for v in self.verdicts if v.role == role)
        return f"priority {chosen.priority}, {origin}, {valid} valid"

    def _why_not(self, name: str) -> str | None:
        """None when the backend fills a role."""
        if name in (self.prefill, self.decode):
            return None
        texts = []
        for verdict in self._verdicts(name):
            chosen = self.backend(verdict.role)
            if verdict.reasons:
                texts.append("; ".join(map(str, verdict.reasons)))
            elif self.preference.backend(verdict.role) is not None:
                texts.append(f"valid, but {chosen} was asked for")
            elif verdict.priority > next(v for v in self._verdicts(chosen) if v.role == verdict.role).priority:
                texts.append(
                    f"valid, with priority {verdict.priority}, but page size and layout find no agreement with it"
                )
            else:
                texts.append(f"valid, with priority {verdict.priority}")
        same = len(set(texts)) == 1
        return texts[0] if same else " | ".join(f"{role}: {text}" for role, text in zip(ROLES, texts, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The choice and the trace as JSON values."""
        return {
            "spec": self.spec.to_json(),
            "device": self.platform.to_json(),
            "choice": {
                "prefill": self.prefill,
                "decode": self.decode,
                "page_size": self.page_size,
                "layout": self.layout,
                "allocator": self.allocator,
                "pool": self.pool,
            },
            "backends": [verdict_json(verdict) for verdict in self.verdicts],
        }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """One verdict as JSON values."""
    return {
        "name": verdict.name,
        "distribution": verdict.distribution,
        "role": verdict.role,
        "priority": verdict.priority,
        "valid": not verdict.reasons,
        "reasons": [
            {"field": r.field, "wanted": r.wanted, "supported": r.supported, "remedy": r.remedy}
            for r in verdict.reasons
        ],
    }
