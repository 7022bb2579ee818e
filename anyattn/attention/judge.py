"""What speaks against each candidate: every backend in every role, every pool and allocator, with all reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from anyattn.attention.pages import holds, page_size_for_every_layout, pages_worth_trying, refusal
from anyattn.attention.selection import BackendCandidate, Candidates, Preference, StorageVerdict, Verdict
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import ContractError, contained
from anyattn.mem_cache.base import PoolCapabilities
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
    if any(reason.another for verdict in verdicts for reason in verdict.reasons):
        remedies = _other_backends(spec, platform, candidates, preference, verdicts)
        verdicts = [replace(v, reasons=_told(v.reasons, remedies[v.role])) for v in verdicts]
    return tuple(verdicts)


def _verdict(
    spec: AttentionSpec, platform: Platform, candidate: BackendCandidate, role: Role, preference: Preference
) -> Verdict:
    capabilities = candidate.capabilities
    status = capabilities.status_on(platform)
    assumed = platform.simulated and not preference.installed_only
    reasons = [
        *_device_reasons(platform),
        *([] if assumed else (_for_device(reason, platform) for reason in candidate.missing)),
        *_declared_reasons(candidate, spec, platform, role, preference),
    ]
    priority = 0.0
    if not reasons:  # a priority is a function of what the backend serves, so it is asked for nothing else
        try:
            priority = capabilities.priority_for(platform, spec, role, TYPICAL_LOAD)
        except ContractError as error:
            reasons.append(_broken("priority", "a number", str(error), candidate))
    return Verdict(
        name=candidate.name,
        distribution=candidate.distribution,
        role=role,
        priority=priority,
        status=status,
        tested_with=capabilities.contract_tested_with if status == "contract-tested" else "",
        installed=not candidate.missing,
        reasons=tuple(reasons),
    )


def _declared_reasons(
    candidate: BackendCandidate, spec: AttentionSpec, platform: Platform, role: Role, preference: Preference
) -> list[Reason]:
    """What the declaration says. A plugin's own kind of declaration that fails is a reason too."""
    judged = partial(
        candidate.capabilities.reject_reasons,
        page_size=preference.page_size,
        layout=preference.layout,
        joined_layers=preference.joined_layers,
    )
    try:
        return contained(lambda: list(judged(spec, platform, role)))  # type: ignore[no-any-return]
    except Exception as error:
        return [_broken("capabilities", "reasons", f"{type(error).__name__}: {error}", candidate)]


def _broken(field: str, wanted: str, found: str, candidate: BackendCandidate) -> Reason:
    return Reason(field=field, wanted=wanted, supported=found, remedy=f"report it to {candidate.distribution}")


def _device_reasons(platform: Platform) -> Iterator[Reason]:
    for problem in platform.problems:
        yield Reason(
            field="device",
            wanted=str(platform),
            supported=f"nothing there, as {problem}",
            remedy="mend that, or use another device",
        )


def _for_device(missing: Reason, platform: Platform) -> Reason:
    """What is missing; a remedy that was left open is that of the torch which such a device needs."""
    remedy = missing.remedy or platform.torch_remedy or f'pip install "{missing.wanted}"'
    return replace(missing, remedy=remedy)


def _other_backends(
    spec: AttentionSpec,
    platform: Platform,
    candidates: Candidates,
    preference: Preference,
    verdicts: Sequence[Verdict],
) -> dict[Role, str]:
    """For each role, the setting that names a backend which select would then choose, the best first."""
    capabilities = {candidate.name: candidate.capabilities for candidate in candidates.backends}
    pools = [
        candidates.pools[verdict.name]
        for verdict in judge_pools(spec, platform, candidates, preference)
        if not verdict.reasons and preference.pool in (None, verdict.name)
    ]
    allocators = [
        candidates.allocators[verdict.name]
        for verdict in judge_allocators(platform, candidates, preference)
        if not verdict.reasons and preference.allocator in (None, verdict.name)
    ]
    pages = [
        (size, layout)
        for size, layout in pages_worth_trying(capabilities.values(), candidates.allocators.values(), preference)
        if holds(spec, layout, size)
        and any(layout in pool.layouts for pool in pools)
        and any(size in a.page_sizes for a in allocators)
    ]

    def agree(*names: str) -> bool:
        return any(
            all(size in capabilities[n].page_sizes and layout in capabilities[n].layouts for n in names)
            for size, layout in pages
        )

    valid = {role: [v.name for v in verdicts if v.role == role and not v.reasons] for role in ROLES}
    alone = [name for name in valid["decode"] if name in valid["prefill"] and agree(name)]
    paired: dict[Role, list[str]] = {}
    for role, other in (ROLES, ROLES[::-1]):
        asked = preference.backends(other)
        held = asked and all(name in valid[other] for name in asked)  # what is asked for and refused has to go as well
        partners = [asked] if held else [(name,) for name in valid[other]]
        paired[role] = [name for name in valid[role] if any(agree(name, *names) for names in partners)]
    # What is asked for in one role only beats `backend`.
    both = preference.backends("prefill") == preference.backends("decode")
    if both and (spec.deterministic or paired["prefill"] == paired["decode"] == alone):
        return dict.fromkeys(ROLES, _setting("backend", alone))
    if spec.deterministic:
        leave = "leave out prefill_backend and decode_backend, and "
        return dict.fromkeys(ROLES, f"{leave}{_setting('backend', alone)}" if alone else _setting("backend", alone))
    return {role: _setting(f"{role}_backend", paired[role]) for role in ROLES}


def _setting(name: str, values: Sequence[str]) -> str:
    if not values:
        return "nothing that is installed serves all of this here: look for a plugin that does, or use another device"
    return f"set {name}={' or '.join(map(repr, values))}"


def _told(reasons: Iterable[Reason], remedy: str) -> tuple[Reason, ...]:
    return tuple(replace(reason, remedy=remedy) if reason.another else reason for reason in reasons)


def judge_pools(
    spec: AttentionSpec, platform: Platform, candidates: Candidates, preference: Preference
) -> Iterator[StorageVerdict]:
    """Every pool, with all reasons against it."""
    reasons = {
        name: [
            *pool.reject_reasons(
                platform.kind,
                arch=platform.arch,
                kind=spec.cache_kind,
                kv_dtype=spec.storage_dtype,
                kv_scale_per_head=spec.kv_scale_per_head,
                joined_layers=preference.joined_layers,
            ),
            *_layout_reasons(spec, pool, preference),
        ]
        for name, pool in sorted(candidates.pools.items())
    }
    remedy = _setting("pool", [name for name in reasons if not reasons[name]])
    for name in reasons:
        yield StorageVerdict(
            what="pool", name=name, priority=candidates.pools[name].priority, reasons=_told(reasons[name], remedy)
        )


def _layout_reasons(spec: AttentionSpec, pool: PoolCapabilities, preference: Preference) -> Iterator[Reason]:
    """That a pool has not the layout asked for, or that its layouts cannot be cut into pages of such layers."""
    size, asked = preference.page_size, preference.layout
    wanted = [layout for layout in pool.layouts if asked in (None, layout)]
    if any(holds(spec, layout, size) for layout in wanted):
        return
    resized = [layout for layout in wanted or pool.layouts if size is not None and holds(spec, layout, None)]
    others = [layout for layout in pool.layouts if holds(spec, layout, size)]
    remedy = None
    if resized and (wanted or not others):
        remedy = f"set page_size={page_size_for_every_layout(size)}"
        if not wanted:
            remedy += f" and layout={resized[0]!r}"
    elif others:
        remedy = f"set layout={others[0]!r}"
    yield Reason(
        field="layout",
        wanted=asked or ", ".join(pool.layouts),
        supported="; ".join(refusal(spec, layout, size) for layout in wanted) or ", ".join(pool.layouts),
        remedy=remedy or "name another pool",
        another=remedy is None,
    )


def judge_allocators(platform: Platform, candidates: Candidates, preference: Preference) -> Iterator[StorageVerdict]:
    """Every allocator, with all reasons against it."""
    for name, allocator in sorted(candidates.allocators.items()):
        reasons = allocator.reject_reasons(platform.kind, preference.page_size)
        yield StorageVerdict(what="allocator", name=name, priority=allocator.priority, reasons=tuple(reasons))
