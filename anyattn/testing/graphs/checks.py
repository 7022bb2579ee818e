"""Whether a backend's plans, captured once, serve every later step up to the graph level that the backend declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CannotRunError, Check, CheckFailedError, Measured
from anyattn.testing.graphs import apart as graph_apart
from anyattn.testing.graphs import replays as graph_replays
from anyattn.testing.graphs.captured import Graph
from anyattn.testing.graphs.setting import UNIFORM, Setting
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.driver import store
from anyattn.testing.numerics.matrix import cells
from anyattn.types import FP8_DTYPES, GraphLevel

_LEVELS = (GraphLevel.DECODE, GraphLevel.UNIFORM, GraphLevel.ALWAYS)


def checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    """For each level up to the declared one. None where no graph is declared."""
    declared = backend.capabilities
    levels = [level for level in _LEVELS if level <= declared.graph and _is_asked(declared, level)]
    if declared.graph > GraphLevel.NEVER and not levels:
        yield Check(
            tier="graph",
            name="a graph can be asked for",
            capability="graph",
            run=partial(_no_level, declared),
        )
    cases = graph_cases(declared)
    for level in levels if cases else ():
        (_, plain), *others = cases
        named = [(name, plain, check) for name, check in {**graph_replays.CHECKS, **graph_apart.CHECKS}.items()]
        for name, case in others:
            if not case.spec.tree_mask:
                named.append((f"replays with {name}", case, graph_replays.features))
            elif level == GraphLevel.UNIFORM:
                named.append((f"replays with {name}", case, graph_replays.trees))
        for name, case, check in named:
            yield Check(
                tier="graph",
                name=f"{level.name.lower()}: {name}",
                capability="graph",
                run=partial(_run, check, backend, device, case, level),
            )
    for cell in cells(declared):
        if cell.graph != GraphLevel.NEVER:
            run = partial(_run, _replayed, backend, device, cell.case, cell.graph)
            yield Check(tier="graph", name=cell.case.name, capability="graph", run=run)


def _replayed(setting: Setting) -> Measured:
    """The steps of a case in one graph; sequences without new tokens are not in a step, which is padded then."""
    case = setting.case
    stored = case.stored_before or (0,) * case.num_seqs
    longest = max(before + sum(new) for before, *new in zip(stored, *case.steps, strict=True))
    engine = setting.engine(max_kv_len=longest)
    num_tokens = None if setting.level == GraphLevel.DECODE else max(map(sum, case.steps))
    graph = Graph(engine, case.num_seqs, num_tokens, longest)
    seqs = engine.rt.new_sequences(case.num_seqs)
    before = engine.extend(seqs, stored)
    for layer, step in enumerate(before.steps):
        store(engine.rt, step, before.batch, layer)
    for number, counts in enumerate(case.steps):
        there = [i for i, count in enumerate(counts) if count]
        work = engine.extend([seqs[i] for i in there], [counts[i] for i in there], trees=case.spec.tree_mask)
        graph.step(f"replay {number}, with {len(there)} of {case.num_seqs} sequences", work)
    return engine.verdict()


_SIZES = frozenset({"page_sizes", "layouts", "head_dims", "group_sizes", "dtypes"})
"""What kernels are specialised for: one case of each value, as a graph may bake in that of the plain case."""


_LARGEST_PAGE, _LARGEST_GROUP = 64, 16  # larger ones take long without graphs too, of which three pages are run


def graph_cases(declared: Capabilities) -> list[tuple[str, Case]]:
    """The plain case, then one for each declared feature that changes what a replay reads, each with its name."""
    found: dict[object, Case] = {}
    base: AttentionSpec | None = None
    for case in cases_for(declared):
        if case.capability == "combinations":
            continue
        if declared.pairs_in(case.spec.replace(graph=declared.graph)):
            continue
        plain = base is None or _kind(case.spec) != _kind(base)  # each begins with a case that is plain
        if plain:
            base = case.spec
        if plain or (base is not None and _is_feature(case, base)):
            asked = (case.spec, case.page_size, case.layout, case.window_pages)
            if asked not in found or len(case.name) < len(found[asked].name):  # of two names for one thing
                found[asked] = case
    return [(case.name, case) for case in found.values()]


def _kind(spec: AttentionSpec) -> tuple[int | None, int | None, bool]:
    return spec.kv_lora_rank, spec.qk_rope_head_dim, spec.topk is not None


def _is_feature(case: Case, base: AttentionSpec) -> bool:
    spec = case.spec
    changed = {field.name for field in fields(spec) if getattr(spec, field.name) != getattr(base, field.name)}
    changed -= {"may_quantize_q", "may_quantize_probs"}  # what an fp8 cache may need besides
    if case.joined_layers:
        return False
    if case.capability in _SIZES:
        return case.page_size <= _LARGEST_PAGE and spec.group_size <= _LARGEST_GROUP
    if changed in ({"kv_dtype"}, {"kv_dtype", "kv_scale_per_head"}):
        return spec.storage_dtype in FP8_DTYPES and case.scale_as_tensor
    single = ("logits_soft_cap", "sinks", "alibi", "tree_mask", "return_lse", "causal")
    return (changed == {"sliding_window"} and spec.sliding_window == 33) or any(changed == {name} for name in single)


def _is_asked(declared: Capabilities, level: GraphLevel) -> bool:
    """Whether a backend with these phases is ever asked for graphs of a level."""
    if declared.phases & {"prefill", "mixed"} and level > GraphLevel.DECODE:
        return True
    most = {GraphLevel.DECODE: 1, GraphLevel.UNIFORM: UNIFORM}.get(level, declared.decode_qo_len + 1)
    return "decode" in declared.phases and most <= declared.decode_qo_len


def _no_level(declared: Capabilities, seed: int) -> None:
    raise CheckFailedError(
        f"graph={declared.graph.name.lower()} is declared with the phases {', '.join(sorted(declared.phases))}, so no "
        "graph is ever asked for: graphs of level decode need the phase decode, those above prefill or mixed, and "
        f"those of level uniform also come to a decode backend with a decode_qo_len of {UNIFORM}"
    )


def _run(
    check: Callable[[Setting], Measured | None],
    backend: type[AttentionBackend],
    device: Platform,
    case: Case,
    level: GraphLevel,
    seed: int,
) -> Measured | None:
    if device.graph < level:
        raise CannotRunError(
            f"graph={backend.capabilities.graph.name.lower()} is declared, and device graphs of {device} serve at "
            f"most level {device.graph.name.lower()}"
        )
    return check(Setting(backend=backend, device=device, case=case, level=level, seed=seed))
