"""The choice of backends and pages for layers on a device: a pure function of facts, declarations and preference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.judge import judge, judge_allocators, judge_pools
from anyattn.attention.load_table import LoadTable
from anyattn.attention.pages import USUAL_PAGE_SIZES, holds, page_sizes_of, pages_worth_trying
from anyattn.attention.selection import Candidates, Preference, Selection, StorageVerdict, Verdict
from anyattn.attention.spec import AttentionSpec, layer_kinds
from anyattn.errors import ContractError, NoBackendError
from anyattn.platforms.base import Platform
from anyattn.types import ANY_INT, ROLES, KVLayout, Load, Role


def select(
    spec: AttentionSpec,
    platform: Platform,
    candidates: Candidates,
    preference: Preference | None = None,
) -> Selection:
    """The best valid pair of a prefill and a decode backend that agree on page size and layout, with their pool.

    Among valid backends the highest priority at TYPICAL_LOAD wins, then the name that sorts first; the order of the
    candidates never matters. Decode's priority counts before prefill's, as most steps of most engines are decodes.
    Other decode backends that serve the same pages join for those loads where their priority is higher.

    Raises NoBackendError, with all reasons, when no pair is valid or what was asked for by name is not.
    """
    return select_layers([spec], platform, candidates, preference)[spec]


def select_layers(
    layer_specs: Sequence[AttentionSpec],
    platform: Platform,
    candidates: Candidates,
    preference: Preference | None = None,
) -> dict[AttentionSpec, Selection]:
    """A selection for each distinct spec, in order of appearance, all agreeing on the one pool that they share.

    Of all pages that serve every spec, those with the highest priorities in sum are taken.

    Raises NoBackendError as `select` does.
    """
    preference = preference or Preference()
    specs = list(layer_kinds(layer_specs))
    contests = [_Contest.of(spec, platform, candidates, preference) for spec in specs]
    stored = next((spec for spec in specs if spec.kv_scale_per_head), specs[0])  # all else that pools judge is common
    storage = [
        *judge_pools(stored, platform, candidates, preference),
        *judge_allocators(platform, candidates, preference),
    ]
    pools = _named_or_best("pool", preference.pool, storage)
    allocators = _named_or_best("allocator", preference.allocator, storage)
    best = None
    serving = [contest.capabilities[v.name] for contest in contests for role in ROLES for v in contest.valid[role]]
    for page_size, layout in pages_worth_trying(serving, candidates.allocators.values(), preference):
        pool = next((name for name in pools if layout in candidates.pools[name].layouts), None)
        allocator = next((n for n in allocators if page_size in candidates.allocators[n].page_sizes), None)
        pairs = [contest.pair(page_size, layout) for contest in contests]
        if pool is None or allocator is None or not all(pairs) or not holds(stored, layout, page_size):
            continue
        priority = candidates.pools[pool].priority + candidates.allocators[allocator].priority
        found = _Agreement(page_size, layout, pool, allocator, priority, tuple(pair for pair in pairs if pair))
        if best is None or found.rank() < best.rank():
            best = found
    if best is None:
        raise NoBackendError(_disagreement(contests, pools, allocators, platform, candidates, preference))
    selections = {}
    for contest, pair in zip(contests, best.pairs, strict=True):
        by_load, problems = contest.decode_by_load(best.page_size, best.layout)
        selections[contest.spec] = Selection(
            spec=contest.spec,
            platform=platform,
            prefill=pair.prefill.name,
            decode=pair.decode.name,
            decode_by_load=by_load,
            page_size=best.page_size,
            layout=best.layout,
            allocator=best.allocator,
            pool=best.pool,
            preference=preference,
            problems=(*candidates.problems, *problems),
            verdicts=contest.verdicts,
            storage=tuple(storage),
        )
    return selections


@dataclass(frozen=True, slots=True)
class _Pair:
    decode: Verdict
    prefill: Verdict
    preferred_page_sizes: tuple[int, ...]
    layouts: tuple[KVLayout, ...]


@dataclass(frozen=True, slots=True)
class _Agreement:
    """Pages that serve every spec, and who would then serve each."""

    page_size: int
    layout: KVLayout
    pool: str
    allocator: str
    storage_priority: int
    pairs: tuple[_Pair, ...]

    def rank(self) -> tuple[object, ...]:
        """Smaller is better: priorities, of backends before pool and allocator, names, then what backends prefer."""
        return (
            -sum(pair.decode.priority for pair in self.pairs),
            -sum(pair.prefill.priority for pair in self.pairs),
            -self.storage_priority,
            sorted((pair.decode.name, pair.prefill.name) for pair in self.pairs),
            sum(self._size_rank(pair) for pair in self.pairs),
            self.page_size,
            sum(pair.layouts.index(self.layout) for pair in self.pairs),
            self.layout,
        )

    def _size_rank(self, pair: _Pair) -> int:
        sizes = [*pair.preferred_page_sizes, *USUAL_PAGE_SIZES]
        return sizes.index(self.page_size) if self.page_size in sizes else len(sizes)


@dataclass(frozen=True, slots=True)
class _Contest:
    """Who competes for one spec: the verdicts, and in each role the valid ones that may be chosen, best first."""

    spec: AttentionSpec
    platform: Platform
    capabilities: Mapping[str, Capabilities]
    verdicts: tuple[Verdict, ...]
    valid: Mapping[Role, list[Verdict]]
    asked: tuple[str, ...]
    """Decode backends that were asked for by name, all of which then take part."""

    @classmethod
    def of(cls, spec: AttentionSpec, platform: Platform, candidates: Candidates, preference: Preference) -> _Contest:
        """Raises NoBackendError when a role has no valid backend, or not every one that was asked for."""
        if spec.deterministic and len(preference.decode_backends) > 1:
            raise NoBackendError(
                f"Decode backends {', '.join(preference.decode_backends)} were asked for, and deterministic rows come "
                "from one backend whatever the batch: name one."
            )
        verdicts = judge(spec, platform, candidates, preference)
        valid: dict[Role, list[Verdict]] = {}
        for role in ROLES:
            found = [verdict for verdict in verdicts if verdict.role == role and not verdict.reasons]
            wanted = preference.backends(role)
            for name in wanted or [None]:
                if not found or (name is not None and name not in {verdict.name for verdict in found}):
                    raise NoBackendError(_refusal(spec, platform, role, name, verdicts, candidates))
            valid[role] = [verdict for verdict in found if not wanted or verdict.name in wanted]
        capabilities = {candidate.name: candidate.capabilities for candidate in candidates.backends}
        return cls(spec, platform, capabilities, verdicts, valid, preference.decode_backends)

    def serving(self, role: Role, page_size: int, layout: KVLayout) -> list[Verdict]:
        """The backends of a role that may be chosen and take such pages, best first."""
        return [
            verdict
            for verdict in self.valid[role]
            if page_size in self.capabilities[verdict.name].page_sizes
            and layout in self.capabilities[verdict.name].layouts
        ]

    def pair(self, page_size: int, layout: KVLayout) -> _Pair | None:
        """The best two that take such pages; none where not all that were asked for by name do."""
        decodes, prefills = (self.serving(role, page_size, layout) for role in ("decode", "prefill"))
        if len(decodes) < len(self.asked):
            return None
        for decode in decodes:
            for prefill in prefills:
                if self.spec.deterministic and decode.name != prefill.name:
                    continue  # a row's backend, and so its bits, would depend on whether its batch-mates decode
                both = [self.capabilities[verdict.name] for verdict in (decode, prefill)]
                preferred = tuple(c.preferred_page_size for c in both if c.preferred_page_size is not None)
                return _Pair(decode, prefill, preferred, both[0].layouts)
        return None

    def decode_by_load(self, page_size: int, layout: KVLayout) -> tuple[LoadTable | None, tuple[str, ...]]:
        """Who decodes which load over such pages, None when it is the same backend for every one; and any problems."""
        names = [verdict.name for verdict in self.serving("decode", page_size, layout)]
        if self.spec.deterministic or len(names) == 1:
            return None, ()
        problems: dict[str, str] = {}

        def rank(name: str, load: Load) -> tuple[float, str]:
            try:
                return -self.capabilities[name].priority_for(self.platform, self.spec, "decode", load), name
            except ContractError as error:  # it answered for the typical load; where it does not, others serve
                at = f"{load.num_seqs} sequences of {load.kv_len} tokens"
                problems.setdefault(name, f"the decode priority of {name} fails for {at}: {error}; others serve them")
                return math.inf, name

        table = LoadTable.of(lambda load: min(names, key=lambda name: rank(name, load)))
        return table if len(table.backends()) > 1 else None, tuple(problems.values())


def _named_or_best(what: str, wanted: str | None, storage: Sequence[StorageVerdict]) -> list[str]:
    """Valid names, best first; only the wanted one where there is one. Raises NoBackendError when none is left."""
    there = {verdict.name: verdict for verdict in storage if verdict.what == what}
    best = sorted((v for v in there.values() if not v.reasons), key=lambda v: (-v.priority, v.name))
    valid = [verdict.name for verdict in best]
    if wanted is None and valid:
        return valid
    if wanted in valid:
        return [wanted]
    asked = f"No KV {what} is valid here"
    if wanted is not None:
        asked = f"There is no KV {what} named {wanted!r}"
        if wanted in there:
            asked = f"KV {what} {wanted!r} was asked for and is not valid here"
    every = "; ".join(f"{name} ({'; '.join(map(str, there[name].reasons)) or 'valid'})" for name in sorted(there))
    raise NoBackendError(f"{asked}. There are: {every or 'none'}.")


def _refusal(
    spec: AttentionSpec,
    platform: Platform,
    role: Role,
    wanted: str | None,
    verdicts: Sequence[Verdict],
    candidates: Candidates,
) -> str:
    in_role = [verdict for verdict in verdicts if verdict.role == role]
    valid = [verdict.name for verdict in in_role if not verdict.reasons]
    if wanted is None:
        head = f"No attention backend can serve {role} of [{spec}] on {platform}."
        shown = in_role
    elif wanted not in {verdict.name for verdict in in_role}:
        names = ", ".join(sorted(verdict.name for verdict in in_role))
        head = f"There is no attention backend named {wanted!r}: there are {names}."
        if candidates.kept_out:
            head += f" Plugins that ANYATTN_PLUGINS keeps out: {', '.join(candidates.kept_out)}."
        shown = []
    else:
        head = f"Attention backend {wanted!r} was asked for and cannot serve {role} of [{spec}] on {platform}."
        shown = [verdict for verdict in in_role if verdict.name == wanted]
    lines = [f"  {verdict.name}: {'; '.join(map(str, verdict.reasons))}" for verdict in shown]
    tail = f"Valid here: {', '.join(valid)}." if valid else "`anyattn backends` shows every backend with its reasons."
    return "\n".join([head, *lines, *candidates.problems, tail])


def _disagreement(
    contests: Sequence[_Contest],
    pools: Sequence[str],
    allocators: Sequence[str],
    platform: Platform,
    candidates: Candidates,
    preference: Preference,
) -> str:
    lines = []
    for contest in contests:
        for role in ROLES:
            paging = [
                f"{v.name} (page size {c.page_sizes}; layout {', '.join(c.layouts)})"
                for v in contest.valid[role]
                for c in [contest.capabilities[v.name]]
            ]
            lines.append(f"  {role} of [{contest.spec}]: {', '.join(paging)}")
    if any(contest.spec.deterministic for contest in contests):
        lines.append("With deterministic, one backend must fill both roles.")
    remedy = "Install a plugin with a backend, a pool or an allocator that fits, or ask for less."
    free = replace(preference, page_size=None, layout=None, prefill_backend=None, decode_backends=())
    if free != preference:
        with contextlib.suppress(NoBackendError):
            found = next(iter(select_layers([c.spec for c in contests], platform, candidates, free).values()))
            remedy = (
                f"Valid here: page_size={found.page_size}, layout={found.layout!r} with prefill_backend="
                f"{found.prefill!r}, decode_backend={found.decode!r}."
            )
    sizes = ", ".join(f"{name} (page size {candidates.allocators[name].page_sizes})" for name in allocators)
    layouts = ", ".join(f"{name} (layout {', '.join(candidates.pools[name].layouts)})" for name in pools)
    spec = contests[0].spec
    cut = {
        layout: page_sizes_of(spec, layout)
        for layout in sorted({layout for name in pools for layout in candidates.pools[name].layouts})
    }
    if bounds := [f"{layout} (page size {sizes or 'none'})" for layout, sizes in cut.items() if sizes != ANY_INT]:
        lines.append(f"  layouts of such layers: {', '.join(bounds)}")
    return "\n".join(
        [
            f"No prefill and decode backend on {platform} agree on page size and layout with each other, a pool and an "
            "allocator.",
            *lines,
            f"  pools: {layouts}",
            f"  allocators: {sizes}",
            remedy,
        ]
    )
