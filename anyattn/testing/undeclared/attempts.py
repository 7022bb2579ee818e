"""What a backend does not declare, value by value, and how each is tried: with the cases of a looser declaration."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.errors import contained
from anyattn.platforms.base import Platform
from anyattn.plugins.isolation import describe
from anyattn.testing.check import CannotRunError, Check
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.types import ALL_LAYOUTS, DTYPE_BYTES, FP8_DTYPES, GraphLevel, Role, ints

_HEAD_DIMS = (16, 32, 64, 72, 80, 96, 112, 128, 192, 256, 512)
_HEAD_DIM_PAIRS = ((192, 128), (128, 64), (64, 128), (32, 48))
_MLA_DIMS = ((512, 64), (256, 32), (64, 16))
_GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 71)
_PAGE_SIZES = (1, 2, 3, 8, 16, 32, 64, 128, 256)
_FLAGS = ("per_head_scales", "strided_pages", "sliding_window", "logits_soft_cap", "sinks", "alibi", "lse")

_Values = tuple[str, str, dict[str, Any]]
"""A field, a value in words, and the fields of a declaration that holds it."""

_MOST_CASES = 12
"""Of one attempt: enough to meet it with each dtype and layout, few enough for a value that every case has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """field, value: of the declaration, in words. loosened: the fields of a declaration that holds it.

    checks: what is run of a backend with that declaration, instead of the cases that it adds.
    """

    field: str
    value: str
    loosened: dict[str, Any]
    checks: Callable[[type[AttentionBackend], Platform], Iterator[Check]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """works: whether all that was run is right. note: in words, what was run or what is wrong.

    is_safe: whether nothing was raised that may have left the device in a bad state.
    """

    works: bool
    note: str
    is_safe: bool = True


def attempts(capabilities: Capabilities, device: Platform) -> Iterator[Attempt]:
    """Everything that is not declared and could be tried on the device; that device first, where it is not declared."""
    for field, value, loosened in (
        *_device(capabilities, device),
        *_dtypes(capabilities),
        *_heads(capabilities),
        *_pages(capabilities),
        *_features(capabilities),
    ):
        of_graphs = field == "not_together" and "graph" in value.split(" and ")
        yield Attempt(
            field=field,
            value=value,
            loosened={**_here(capabilities, device), **loosened},
            checks=_graph_checks if of_graphs else None,
        )
    if not capabilities.deterministic:
        loosened = {**_here(capabilities, device), "deterministic": True}
        yield Attempt(field="deterministic", value="True", loosened=loosened, checks=_determinism_checks)
    for level in GraphLevel:
        if capabilities.graph < level <= device.graph:
            loosened = {**_here(capabilities, device), "graph": level}
            yield Attempt(field="graph", value=level.name.lower(), loosened=loosened, checks=_graph_checks)


def attempt(
    backend: type[AttentionBackend], device: Platform, wanted: Attempt, seed: int, tell: Callable[[str], None]
) -> Tried | None:
    """Tries one value; None where there is nothing to try. tell: is called with what is run next, before it is run."""
    declared = backend.capabilities
    here = _here(declared, device)
    before = declared if wanted.loosened == here else dataclasses.replace(declared, **here)
    looser = dataclasses.replace(declared, **wanted.loosened)
    loosened = types.new_class(
        backend.__name__,
        (backend,),
        exec_body=lambda body: body.update(capabilities=looser, __module__=backend.__module__),
    )
    runs = [
        (case.name, lambda case=case: check_case(loosened, case, device, seed).failure)
        for case in islice(_new_cases(before, looser, device), _MOST_CASES)
    ]
    if wanted.checks is not None:
        runs = [(check.name, lambda check=check: check.run(seed)) for check in wanted.checks(loosened, device)]
    for name, run in runs:
        tell(name)
        try:
            failure = contained(run)
        except CannotRunError as error:
            return Tried(works=False, note=f"cannot be told here: {error}")
        except AssertionError as error:
            return Tried(works=False, note=f"{name}: {error}")
        except Exception as error:
            return Tried(works=False, note=f"{name}: {describe(error)}", is_safe=False)
        if isinstance(failure, str):
            return Tried(works=False, note=f"{name}: {failure}")
    kind = "case" if wanted.checks is None else "check"
    return Tried(works=True, note=f"right in {len(runs)} {kind}{'s' * (len(runs) != 1)}") if runs else None


def _determinism_checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    from anyattn.testing.numerics import determinism

    return determinism.checks(backend, device)


def _graph_checks(backend: type[AttentionBackend], device: Platform) -> Iterator[Check]:
    from anyattn.testing.graphs import checks as graphs

    return graphs.checks(backend, device)


def _here(capabilities: Capabilities, device: Platform) -> dict[str, Any]:
    """What has to be looser for anything to be accepted on the device."""
    if not list(capabilities.device_reasons(device)):
        return {}
    return {"device_kinds": None, "archs": None, "features": frozenset()}


def _new_cases(before: Capabilities, looser: Capabilities, device: Platform) -> Iterator[Case]:
    """The cases that the looser declaration accepts and the one before does not; all where neither refuses any."""
    roles: list[Role] = ["decode"] if "decode" in looser.phases else []
    roles += ["prefill"] if looser.phases >= {"prefill", "mixed"} else []

    def refuses(declared: Capabilities, case: Case) -> bool:
        asked = {"page_size": case.page_size, "layout": case.layout, "joined_layers": case.joined_layers}
        return any(declared.reject_reasons(case.spec, device, role, **asked) for role in roles)  # type: ignore[arg-type]

    asks_less = (looser.contiguous_q, looser.needs_finite_tails)  # of the runtime, for the same specs
    nothing_new = (before.contiguous_q, before.needs_finite_tails) != asks_less
    for case in cases_for(looser):
        if not refuses(looser, case) and (nothing_new or refuses(before, case)):
            yield case


def _device(capabilities: Capabilities, device: Platform) -> Iterator[_Values]:
    if loosened := _here(capabilities, device):
        fields = {"device_kind": "device_kinds", "arch": "archs", "features": "features"}
        refused = next(iter(capabilities.device_reasons(device)))
        yield fields.get(refused.field, refused.field), refused.wanted, loosened


def _dtypes(capabilities: Capabilities) -> Iterator[_Values]:
    for dtype in DTYPE_BYTES:
        if dtype not in capabilities.dtypes | FP8_DTYPES:
            yield "dtypes", dtype, {"dtypes": capabilities.dtypes | {dtype}}
    for dtype in DTYPE_BYTES:
        if dtype not in capabilities.kv_dtypes:
            yield "kv_dtypes", dtype, {"kv_dtypes": capabilities.kv_dtypes | {dtype}}


def _heads(capabilities: Capabilities) -> Iterator[_Values]:
    pairs, mla_dims = capabilities.head_dim_pairs, capabilities.mla_dims
    if not capabilities.any_head_dim_pair:
        for dim in _HEAD_DIMS:
            if dim not in (capabilities.head_dims or ()) and (dim, dim) not in pairs:
                yield "head_dims", str(dim), {"head_dim_pairs": pairs | {(dim, dim)}}
        for qk, vo in _HEAD_DIM_PAIRS:
            if (qk, vo) not in pairs:
                yield "head_dim_pairs", f"{qk} with values of {vo}", {"head_dim_pairs": pairs | {(qk, vo)}}
    if not capabilities.any_mla_dims:
        for rank, rope in _MLA_DIMS:
            if (rank, rope) not in mla_dims:
                yield "mla_dims", f"rank {rank} + rope {rope}", {"mla_dims": mla_dims | {(rank, rope)}}
    for size in _GROUP_SIZES:
        if size not in capabilities.group_sizes:
            yield "group_sizes", str(size), {"group_sizes": ints(size)}


def _pages(capabilities: Capabilities) -> Iterator[_Values]:
    for size in _PAGE_SIZES:
        if size not in capabilities.page_sizes:
            yield "page_sizes", str(size), {"page_sizes": ints(size), "preferred_page_size": None}
    for layout in ALL_LAYOUTS:
        if layout not in capabilities.layouts:
            yield "layouts", layout, {"layouts": (layout,)}


def _features(capabilities: Capabilities) -> Iterator[_Values]:
    phases = capabilities.phases
    for value, filled in (("decode", {"decode"}), ("prefill, mixed", {"prefill", "mixed"})):
        if not filled <= phases:
            yield "phases", value, {"phases": frozenset(filled)}
    for causal in (True, False):
        if causal not in capabilities.causal:
            yield "causal", str(causal), {"causal": frozenset({causal})}
    for name in _FLAGS:
        if not getattr(capabilities, name):
            yield name, "True", {name: True}
    if not capabilities.tree_mask:
        yield (
            "tree_mask",
            "True",
            {"tree_mask": True, "phases": phases | ({"verify"} if "prefill" in phases else set())},
        )
    for pair in capabilities.not_together:
        others = tuple(other for other in capabilities.not_together if other != pair)
        yield "not_together", " and ".join(pair), {"not_together": others}
    if capabilities.contiguous_q:
        yield "contiguous_q", "False", {"contiguous_q": False}
    if capabilities.needs_finite_tails:
        yield "needs_finite_tails", "False", {"needs_finite_tails": False}
