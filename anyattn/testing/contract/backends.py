"""The contract tier of a backend: its class, its declaration, what that refuses, and its priority. No device runs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.load_table import LoadTable
from anyattn.attention.pages import holds
from anyattn.errors import ContractError
from anyattn.plugins.isolation import describe
from anyattn.plugins.records import BUILTIN
from anyattn.plugins.requirements import check_entry
from anyattn.testing.check import CannotRunError, Check, CheckFailedError
from anyattn.testing.contract import classes as class_contract
from anyattn.testing.contract import refusals
from anyattn.testing.contract.classes import contract_check
from anyattn.testing.contract.covered import devices, find_covered, plain_specs, reasons, specs_with_features
from anyattn.testing.target import Target
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, ROLES, GraphLevel, KVLayout, Load

_PLAIN_SPECS = 8
"""Of so many the priority is asked, with each feature: dtypes, heads and groups of all kinds are among them."""


def checks(target: Target) -> Iterator[Check]:
    """All checks of the class that need no device; those of its declaration where it has one."""
    yield from class_contract.checks(target, AttentionBackend, Capabilities)
    declared = class_contract.declared_by(target.loaded)
    if not (class_contract.is_subclass(target.loaded, AttentionBackend) and isinstance(declared, Capabilities)):
        return
    if declared.graph > GraphLevel.NEVER:
        yield contract_check(
            "init_graph and refresh_graph come with a graph level", "graph", partial(_require_graph, target.loaded)
        )
    for capability, name, function in _consistency(declared):
        yield contract_check(name, capability, partial(function, declared))
    yield contract_check(
        "the priority is a finite number for every load", "priority", partial(_require_priority, declared)
    )
    yield from refusals.checks(declared)


def _require_graph(backend: type[AttentionBackend]) -> None:
    own = [n for n in ("init_graph", "refresh_graph") if getattr(backend, n) is not getattr(AttentionBackend, n)]
    if len(own) < 2:
        missing = [name for name in ("init_graph", "refresh_graph") if name not in own]
        raise CheckFailedError(
            f"{backend.__name__} declares graph={backend.capabilities.graph.name.lower()} and has no "
            f"{' and no '.join(missing)}: implement both, or declare graph=GraphLevel.NEVER."
        )


def _consistency(declared: Capabilities) -> Iterator[tuple[str, str, Callable[[Capabilities], None]]]:
    """For each thing that is declared and means something only beside another: the field, a check's name, the check."""
    yield "phases", "the phases fill at least one role", _require_role
    if declared.phases & {"prefill", "mixed"}:
        yield "phases", "the phases prefill and mixed come together", _require_prefill
    if declared.packages:
        yield "packages", "packages are requirement strings", _require_requirements
    if declared.extra:
        yield "extra", "the extra is one of anyattn's", _require_extra
    if "verify" in declared.phases or (declared.tree_mask and declared.phases & {"prefill", "mixed"}):
        yield "tree_mask", "tree_mask and the phase verify come together", _require_verify
    if declared.decode_qo_len > 1:
        yield "decode_qo_len", "decode_qo_len comes with the phase decode", _require_decode
    for name in ("sliding_window", "tree_mask"):
        if getattr(declared, name):
            yield name, f"{name} comes with causal masks", partial(_require_causal, name)
    for name in ("per_head_scales", "quantizes_q", "quantizes_probs"):
        if getattr(declared, name):
            yield name, f"{name} comes with an fp8 cache", partial(_require_fp8, name)
    for layout in declared.layouts:
        if layout not in KV_LAYOUTS:
            yield "layouts", f"layout {layout} can hold pages of declared sizes", partial(_require_pages, layout)
    for name in ("run_on", "emulated_on", "contract_tested_on"):
        if getattr(declared, name) and declared.device_kinds is not None and declared.archs is not None:
            yield name, f"{name} names devices that are declared", partial(_require_claims, name)
    if declared.contract_tested_with:
        yield "contract_tested_with", "contract_tested_with comes with contract_tested_on", _require_tested


def _require_role(declared: Capabilities) -> None:
    if "decode" not in declared.phases and not declared.phases >= {"prefill", "mixed"}:
        raise CheckFailedError(
            f"phases {', '.join(sorted(declared.phases))} fill no role: decode needs the phase decode, prefill needs "
            "prefill and mixed, so that the backend is never chosen."
        )


def _require_tested(declared: Capabilities) -> None:
    if not declared.contract_tested_on:
        raise CheckFailedError(
            f"calls were bound to {declared.contract_tested_with}, and contract_tested_on names no device for which."
        )


def _require_decode(declared: Capabilities) -> None:
    if "decode" not in declared.phases:
        raise CheckFailedError(
            f"decode_qo_len={declared.decode_qo_len} is declared without the phase decode: it is about the role decode."
        )


def _require_prefill(declared: Capabilities) -> None:
    if missing := {"prefill", "mixed"} - declared.phases:
        raise CheckFailedError(
            f"the phase {missing.pop()} is not declared: the role prefill is filled only by a backend with prefill and "
            "mixed, as a batch may hold both kinds of sequences."
        )


def _require_requirements(declared: Capabilities) -> None:
    for text in declared.packages:
        try:
            check_entry(text)
        except Exception as error:
            raise CheckFailedError(
                f'{text!r} in packages cannot be read ({describe(error)}): write a name and versions, as "torch>=2.9", '
                'or a module, as "module:flash_attn", and " | " between alternatives.'
            ) from error


def _require_extra(declared: Capabilities) -> None:
    try:
        known = importlib.metadata.metadata(BUILTIN).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        raise CannotRunError("anyattn is not installed here, so that its extras cannot be told.") from None
    if declared.extra not in known:
        raise CheckFailedError(
            f"extra {declared.extra!r} is not one of anyattn's, so that the remedy `pip install \"anyattn"
            f'[{declared.extra}]"` would not help: leave it empty, and each of the packages is named.'
        )


def _require_verify(declared: Capabilities) -> None:
    if declared.tree_mask != ("verify" in declared.phases):
        given, missing = ("tree_mask", "the phase verify") if declared.tree_mask else ("the phase verify", "tree_mask")
        raise CheckFailedError(f"{given} is declared without {missing}: batches with tree masks are those of verify.")


def _require_causal(name: str, declared: Capabilities) -> None:
    if True not in declared.causal:
        raise CheckFailedError(f"{name} is declared with causal={{False}}: a spec allows it with causal=True only.")


def _require_fp8(name: str, declared: Capabilities) -> None:
    if not declared.kv_dtypes & FP8_DTYPES:
        raise CheckFailedError(f"{name} is declared, and kv_dtypes hold none of {', '.join(sorted(FP8_DTYPES))}.")


def _require_pages(layout: KVLayout, declared: Capabilities) -> None:
    sizes = {declared.preferred_page_size, *(declared.page_sizes.nearest(size) for size in (16, 64, 128, 1024))} - {
        None
    }
    if not any(holds(spec, layout, size) for spec, size in product(plain_specs(declared), sizes)):
        raise CheckFailedError(
            f"layout {layout} is declared, and none of the declared page sizes and head dims can be cut as it cuts "
            "them: see anyattn/mem_cache/layouts.py."
        )


def _require_claims(name: str, declared: Capabilities) -> None:
    known = (declared.device_kinds or frozenset()) | (declared.archs or frozenset())
    if others := sorted(getattr(declared, name) - known):
        raise CheckFailedError(f"{name} claims {', '.join(others)}, which neither device_kinds nor archs declare.")


def _require_priority(declared: Capabilities) -> None:
    find_covered(declared)
    plain = list(plain_specs(declared))
    some = plain[:: max(len(plain) // _PLAIN_SPECS, 1)]
    specs = dict.fromkeys(each for spec in some for each in specs_with_features(declared, spec))
    loads = [Load(num_seqs=n, kv_len=k) for n, k in product(LoadTable.NUM_SEQS, LoadTable.KV_LENS)]
    for device, role, spec in product(devices(declared), ROLES, specs):
        if reasons(declared, spec, device, role):
            continue
        for load in loads if callable(declared.priority) else loads[:1]:
            asked = f"{role} of [{spec}] on {device}, {load.num_seqs} sequences of {load.kv_len} tokens"
            try:
                first, again = (declared.priority_for(device, spec, role, load) for _ in range(2))
            except ContractError as error:
                raise CheckFailedError(f"the priority fails for {asked}: {error}.") from error
            if first != again:
                raise CheckFailedError(f"the priority for {asked} is {first:g}, and when asked again {again:g}.")
