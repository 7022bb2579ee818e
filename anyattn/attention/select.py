"""Which backends serve a spec on a device: a pure function of facts and declarations, so it runs on any machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.selection import BackendCandidate, Candidates, Preference, Selection, Verdict
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import NoBackendError, contained
from anyattn.platforms.base import Platform
from anyattn.types import ROLES, KVLayout, Reason, Role

_USUAL_PAGE_SIZES = (16, 64, 32, 128, 256, 1, 2, 4, 8, 512, 1024)


def judge(
    spec: AttentionSpec, platform: Platform, candidates: Candidates, preference: Preference
) -> tuple[Verdict, ...]:
    """Every backend in every role, valid or not, with all reasons; by role, then priority, then name."""
    verdicts = [
        _verdict(spec, platform, candidate, role, preference) for role in ROLES for candidate in candidates.backends
    ]
    return tuple(sorted(verdicts, key=lambda v: (ROLES.index(v.role), -v.priority, v.name)))


def _verdict(
    spec: AttentionSpec, platform: Platform, candidate: BackendCandidate, role: Role, preference: Preference
) -> Verdict:
    capabilities = candidate.capabilities
    reasons = [
        *candidate.missing,
        *capabilities.reject_reasons(
            spec, platform, role, page_size=preference.page_size, layout=preference.layout
        ),
    ]
    priority = 0
    if not reasons:  # a priority is a function of what the backend serves, so it is asked for nothing else
        try:
            priority = int(contained(capabilities.priority_for, platform, spec, role))
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
        reasons=tuple(reasons),
    )


def select(
    spec: AttentionSpec,
    platform: Platform,
    candidates: Candidates,
    preference: Preference | None = None,
) -> Selection:
    """The best valid pair of a prefill and a decode backend that agree on page size and layout, with their pool.

    Among valid backends the highest priority wins, then the name that sorts first; the order of the candidates never
    matters. Decode's priority counts before prefill's, as most steps of most engines are decodes.

    Raises NoBackendError, with all reasons, when no pair is valid or what was asked for by name is not.
    """
    preference = preference or Preference()
    verdicts = judge(spec, platform, candidates, preference)
    capabilities = {candidate.name: candidate.capabilities for candidate in candidates.backends}
    chosen: dict[Role, list[str]] = {}
    for role in ROLES:
        valid = [verdict.name for verdict in verdicts if verdict.role == role and not verdict.reasons]
        wanted = preference.backend(role)
        if not valid or (wanted is not None and wanted not in valid):
            raise NoBackendError(_refusal(spec, platform, role, wanted, verdicts, candidates.problems))
        chosen[role] = valid if wanted is None else [wanted]
    pools = _valid_pools(spec, platform, candidates, preference)
    allocators = _valid_allocators(platform, candidates, preference)
    for decode, prefill in product(chosen["decode"], chosen["prefill"]):
        if spec.deterministic and decode != prefill:
            continue  # a row's backend, and so its bits, would depend on whether its batch-mates decode
        pair = (capabilities[decode], capabilities[prefill])
        for page_size, layout in _agreements(pair, preference):
            pool = next((name for name in pools if layout in candidates.pools[name].layouts), None)
            allocator = next((n for n in allocators if page_size in candidates.allocators[n].page_sizes), None)
            if pool is not None and allocator is not None:
                return Selection(
                    spec=spec,
                    platform=platform,
                    prefill=prefill,
                    decode=decode,
                    page_size=page_size,
                    layout=layout,
                    allocator=allocator,
                    pool=pool,
                    preference=preference,
                    problems=candidates.problems,
                    verdicts=verdicts,
                )
    raise NoBackendError(
        f"No prefill and decode backend for [{spec}] on {platform} agree on page size and layout with a pool and an "
        f"allocator: prefill {', '.join(chosen['prefill'])}; decode {', '.join(chosen['decode'])}; "
        f"pools {', '.join(pools)}; allocators {', '.join(allocators)}."
        f"{' With deterministic, one backend must fill both roles.' if spec.deterministic else ''} "
        "Give another page_size or backend."
    )


def select_layers(
    layer_specs: Sequence[AttentionSpec],
    platform: Platform,
    candidates: Candidates,
    preference: Preference | None = None,
) -> dict[AttentionSpec, Selection]:
    """A selection for each distinct spec, in order of appearance, all agreeing on the one pool that they share.

    Where their own first choices differ in page size or layout, the one that lets the others keep the higher
    priorities is taken.

    Raises NoBackendError as `select` does.
    """
    preference = preference or Preference()
    specs = list(dict.fromkeys(layer_specs))
    free = [select(spec, platform, candidates, preference) for spec in specs]
    if len(free) == 1:
        return {specs[0]: free[0]}
    agreements = []
    for choice in free:
        pinned = replace(
            preference,
            page_size=choice.page_size,
            layout=choice.layout,
            allocator=choice.allocator,
            pool=choice.pool,
        )
        with contextlib.suppress(NoBackendError):
            agreements.append([select(spec, platform, candidates, pinned) for spec in specs])
    if agreements:
        best = max(agreements, key=lambda selections: sum(map(_total_priority, selections)))
        return dict(zip(specs, best, strict=True))
    choices = "; ".join(f"page size {s.page_size}, layout {s.layout} for [{s.spec}]" for s in free)
    raise NoBackendError(f"The layers' specs agree on no page size and layout: {choices}. Give a page_size.")


def _total_priority(selection: Selection) -> int:
    return sum(v.priority for v in selection.verdicts if v.name == selection.backend(v.role))


def _agreements(
    pair: tuple[Capabilities, Capabilities], preference: Preference
) -> Iterator[tuple[int, KVLayout]]:
    """Page sizes and layouts that both serve, best first."""
    preferred = [c.preferred_page_size for c in pair if c.preferred_page_size is not None]
    listed = sorted(size for c in pair if c.page_sizes.values is not None for size in c.page_sizes.values)
    smallest = [c.page_sizes.example() for c in pair]
    sizes = [*preferred, *_USUAL_PAGE_SIZES, *listed, *smallest]
    if preference.page_size is not None:
        sizes = [preference.page_size]
    layouts = [layout for layout in pair[0].layouts if layout in pair[1].layouts]
    if preference.layout is not None:
        layouts = [layout for layout in layouts if layout == preference.layout]
    for size in dict.fromkeys(sizes):
        if all(size in c.page_sizes for c in pair):
            for layout in layouts:
                yield size, layout


def _valid_pools(
    spec: AttentionSpec, platform: Platform, candidates: Candidates, preference: Preference
) -> list[str]:
    reasons = {
        name: pool.reject_reasons(platform.kind, mla=spec.is_mla, kv_dtype=spec.storage_dtype)
        for name, pool in candidates.pools.items()
    }
    priorities = {name: pool.priority for name, pool in candidates.pools.items()}
    return _named_or_best("KV pool", preference.pool, reasons, priorities)


def _valid_allocators(platform: Platform, candidates: Candidates, preference: Preference) -> list[str]:
    reasons = {
        name: allocator.reject_reasons(platform.kind, preference.page_size)
        for name, allocator in candidates.allocators.items()
    }
    priorities = {name: allocator.priority for name, allocator in candidates.allocators.items()}
    return _named_or_best("KV allocator", preference.allocator, reasons, priorities)


def _named_or_best(
    what: str, wanted: str | None, reasons: Mapping[str, list[Reason]], priorities: Mapping[str, int]
) -> list[str]:
    """Valid names, best first; only the wanted one where there is one. Raises NoBackendError when none is left."""
    valid = sorted((name for name in reasons if not reasons[name]), key=lambda name: (-priorities[name], name))
    if wanted is None and valid:
        return valid
    if wanted in valid:
        return [wanted]
    asked = f"No {what} is valid here"
    if wanted is not None:
        asked = f"There is no {what} named {wanted!r}"
        if wanted in reasons:
            asked = f"{what} {wanted!r} was asked for and is not valid here"
    every = "; ".join(f"{name} ({'; '.join(map(str, reasons[name])) or 'valid'})" for name in sorted(reasons))
    raise NoBackendError(f"{asked}. There are: {every or 'none'}.")


def _refusal(
    spec: AttentionSpec,
    platform: Platform,
    role: Role,
    wanted: str | None,
    verdicts: Sequence[Verdict],
    problems: Sequence[str],
) -> str:
    in_role = [verdict for verdict in verdicts if verdict.role == role]
    valid = [verdict.name for verdict in in_role if not verdict.reasons]
    if wanted is None:
        head = f"No attention backend can serve {role} of [{spec}] on {platform}."
        shown = in_role
    elif wanted not in {verdict.name for verdict in in_role}:
        names = ", ".join(sorted(verdict.name for verdict in in_role))
        head = f"There is no attention backend named {wanted!r}: there are {names}."
        shown = []
    else:
        head = f"Attention backend {wanted!r} was asked for and cannot serve {role} of [{spec}] on {platform}."
        shown = [verdict for verdict in in_role if verdict.name == wanted]
    lines = [f"  {verdict.name}: {'; '.join(map(str, verdict.reasons))}" for verdict in shown]
    tail = f"Valid here: {', '.join(valid)}." if valid else "`anyattn backends` shows every backend with its reasons."
    return "\n".join([head, *lines, *problems, tail])
