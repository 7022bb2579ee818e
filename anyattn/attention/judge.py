"""What speaks against each candidate: every backend in every role, every pool and allocator, with all reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from anyattn.attention.capabilities import ANOTHER_BACKEND
from anyattn.attention.selection import BackendCandidate, Candidates, Preference, StorageVerdict, Verdict
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import contained
from anyattn.mem_cache.base import ANOTHER_POOL
from anyattn.platforms.base import Platform
from anyattn.types import ROLES, TYPICAL_LOAD, Reason, Role


def judge(
    spec: AttentionSpec, platform: Platform, candidates: Candidates, preference: Preference
) -> tuple[Verdict, ...]:
    """Every backend in every role, valid or not, with all reasons; by role, then priority, then name."""
    verdicts = [
        _verdict(spec, platform, candidate, role, preference) for role in ROLES for candidate in candidates.backends
    ]
    verdicts.sort(key=lambda v: (ROLES.index(v.role), bool(v.reasons), -v.priority, v.name))
    valid = {role: [v.name for v in verdicts if v.role == role and not v.reasons] for role in ROLES}
    same = valid["prefill"] == valid["decode"]
    remedies = {role: _another("backend" if same else f"{role}_backend", valid[role]) for role in ROLES}
    return tuple(replace(v, reasons=_told(v.reasons, ANOTHER_BACKEND, remedies[v.role])) for v in verdicts)


def _verdict(
    spec: AttentionSpec, platform: Platform, candidate: BackendCandidate, role: Role, preference: Preference
) -> Verdict:
    capabilities = candidate.capabilities
    assumed = platform.simulated and not preference.installed_only
    reasons = [
        *([] if assumed else candidate.missing),
        *capabilities.reject_reasons(spec, platform, role, page_size=preference.page_size, layout=preference.layout),
    ]
    priority = 0
    if not reasons:  # a priority is a function of what the backend serves, so it is asked for nothing else
        try:
            priority = int(contained(capabilities.priority_for, platform, spec, role, TYPICAL_LOAD))
        except Exception as error:
            reasons.append(
                Reason(
                    field="priority",
                    wanted="a number",
                    supported=f"{type(error).__name__}: {error}",
                    remedy=f"report it to {candidate.distribution}",
                )
            )
    return Verdict(
        name=candidate.name,
        distribution=candidate.distribution,
        role=role,
        priority=priority,
        status=capabilities.status_on(platform),
        installed=not candidate.missing,
        reasons=tuple(reasons),
    )


def _another(setting: str, valid: Sequence[str]) -> str:
    if not valid:
        return "nothing that is installed serves all of this here: look for a plugin that does, or use another device"
    return f"set {setting}={' or '.join(map(repr, valid))}"


def _told(reasons: Iterable[Reason], placeholder: str, remedy: str) -> tuple[Reason, ...]:
    return tuple(replace(reason, remedy=remedy) if reason.remedy == placeholder else reason for reason in reasons)


def judge_pools(spec: AttentionSpec, platform: Platform, candidates: Candidates) -> Iterator[StorageVerdict]:
    """Every pool, with all reasons against it."""
    reasons = {
        name: pool.reject_reasons(platform.kind, mla=spec.is_mla, kv_dtype=spec.storage_dtype)
        for name, pool in sorted(candidates.pools.items())
    }
    remedy = _another("pool", [name for name in reasons if not reasons[name]])
    for name in reasons:
        yield StorageVerdict(what="pool", name=name, reasons=_told(reasons[name], ANOTHER_POOL, remedy))


def judge_allocators(platform: Platform, candidates: Candidates, preference: Preference) -> Iterator[StorageVerdict]:
    """Every allocator, with all reasons against it."""
    for name, allocator in sorted(candidates.allocators.items()):
        reasons = allocator.reject_reasons(platform.kind, preference.page_size)
        yield StorageVerdict(what="allocator", name=name, reasons=tuple(reasons))
