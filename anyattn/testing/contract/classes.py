"""Checks of any class that a plugin offers: its methods, its declaration, its plugin and what its import brings in."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from typing import Any

from packaging.utils import canonicalize_name

from anyattn.errors import contained
from anyattn.plugins.isolation import describe
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import PluginRecord
from anyattn.plugins.signatures import missing_methods, wrong_signatures
from anyattn.settings import Settings
from anyattn.testing.check import CannotRunError, Check, CheckFailedError
from anyattn.testing.contract.fresh_process import brought_in, call
from anyattn.testing.target import Target
from anyattn.types import CONTRACT_VERSION

_HEAVY = frozenset({"torch", "triton"})
_ALWAYS_HERE = frozenset({"anyattn", "numpy", "packaging", "pluggy", "psutil"})
"""Distributions that anyattn itself needs: importing them costs no machine the declaration."""


def checks(target: Target, base: type[Any], declaration: type[Any]) -> Iterator[Check]:
    """base: what the class must derive from. declaration: of what type its `capabilities` must be."""

    loaded = target.loaded
    name = base.__name__
    yield contract_check(f"is a subclass of {name}", "contract", lambda: _require_subclass(target, base))
    yield contract_check("its plugin states this contract version", "contract", lambda: require_version(target))
    if not is_subclass(loaded, base):
        return
    yield contract_check(f"has all methods of {name}", "contract", lambda: _require_methods(loaded, base))
    yield contract_check(
        f"its methods are called like those of {name}", "contract", lambda: _require_signatures(loaded, base)
    )
    yield contract_check(
        f"declares {declaration.__name__}", "contract", lambda: _require_declaration(loaded, declaration)
    )
    yield contract_check(
        "its module is imported without torch and the packages it names", "packages", lambda: require_light(target)
    )
    yield contract_check(
        "its plugin is imported without torch and the packages it names",
        "packages",
        lambda: _require_light_plugin(target),
    )
    declared = declared_by(loaded)
    if isinstance(declared, declaration):
        yield contract_check("its declaration is frozen", "contract", lambda: require_frozen(declared))
        yield contract_check("its declaration can be written as JSON", "contract", lambda: require_json(declared))


def contract_check(name: str, capability: str, function: Callable[[], None]) -> Check:
    """A check of the contract tier, which draws nothing from its seed."""
    return Check(tier="contract", name=name, capability=capability, run=lambda seed: function())


def is_subclass(loaded: Any, base: type[Any]) -> bool:
    """Whether it is a class that derives from the base, and not the base itself."""
    return isinstance(loaded, type) and issubclass(loaded, base) and loaded is not base


def declared_by(loaded: Any) -> Any:
    """The class's `capabilities`; None where there are none or they cannot be read."""
    try:
        return contained(getattr, loaded, "capabilities", None)
    except Exception:
        return None


def _require_subclass(target: Target, base: type[Any]) -> None:
    if not is_subclass(target.loaded, base):
        raise CheckFailedError(
            f"{target.place} is {target.loaded!r}: what is offered is a subclass of {base.__name__}."
        )


def _require_methods(loaded: type[Any], base: type[Any]) -> None:
    if missing := missing_methods(loaded):
        raise CheckFailedError(f"{loaded.__name__} leaves {', '.join(missing)} of {base.__name__} open.")


def _require_signatures(loaded: type[Any], base: type[Any]) -> None:
    if wrong := wrong_signatures(loaded, base):
        raise CheckFailedError(f"methods do not fit {base.__name__}: {'; '.join(wrong)}.")


def _require_declaration(loaded: type[Any], declaration: type[Any]) -> None:
    declared = contained(getattr, loaded, "capabilities", None)
    if not isinstance(declared, declaration):
        raise CheckFailedError(
            f"its capabilities are {declared!r}: set the class attribute capabilities = {declaration.__name__}(...)."
        )


def require_frozen(declared: Any) -> None:
    """Raises CheckFailedError where a field of a dataclass can be assigned, or holds what can change."""
    name = type(declared).__name__
    for field in dataclasses.fields(declared):
        try:
            setattr(declared, field.name, getattr(declared, field.name))
        except (AttributeError, TypeError):
            continue
        raise CheckFailedError(f"{name}.{field.name} can be assigned: facts and declarations are frozen dataclasses.")
    try:
        hash(declared)
    except TypeError as error:
        raise CheckFailedError(f"{name} holds a value that can change ({error}): use frozensets and tuples.") from error


def require_json(declared: Any) -> None:
    """Raises CheckFailedError where `to_json` does not give every field of a dataclass as JSON values."""
    name = type(declared).__name__
    try:
        document = contained(declared.to_json)
        again = json.loads(json.dumps(document, allow_nan=False))
    except Exception as error:
        raise CheckFailedError(
            f"{name}.to_json() gives no JSON values ({describe(error)}): fields hold numbers, texts, tuples and "
            "frozensets of them, and IntSets."
        ) from error
    if again != document:
        raise CheckFailedError(f"{name}.to_json() gives {document!r}, which JSON turns into {again!r}.")
    if left_out := sorted({field.name for field in dataclasses.fields(declared)} - document.keys()):
        raise CheckFailedError(f"{name}.to_json() leaves out {', '.join(left_out)}.")
    if contained(declared.to_json) != document:
        raise CheckFailedError(f"{name}.to_json() gives another answer when it is called again.")


def require_version(target: Target) -> None:
    """Raises CheckFailedError where the plugin is refused, for its contract version or for anything else."""
    record = _record(target)
    if record.state != "loaded":
        raise CheckFailedError(" ".join(record.problems) or f"the plugin {record.name} is {record.state}.")
    if target.offer is None:
        raise CannotRunError(f"not offered by an installed plugin: {record.name}, of the same package, offers others.")
    if record.contract_version != CONTRACT_VERSION:
        raise CheckFailedError(
            f"the plugin {record.name} states contract version {record.contract_version}, and this anyattn has "
            f"{CONTRACT_VERSION}."
        )


def _record(target: Target) -> PluginRecord:
    """Of the plugin that offers the target, else of one that comes with the same package, as one that is refused may.

    Raises CannotRunError where there is none.
    """
    records = PluginManager(allow=Settings.from_env().plugins).records
    if target.offer is not None:
        found = [record for record in records if record.name == target.offer.plugin]
    else:
        package = _top_level(target.place)
        brings = importlib.metadata.packages_distributions().get(package, [])
        found = [
            record
            for record in records
            if record.state in ("loaded", "failed")
            and (_top_level(record.target or "") == package or record.distribution in brings)
        ]
        found.sort(key=lambda record: record.state == "loaded")  # what is refused is what tells
    if not found:
        raise CannotRunError("not offered by an installed plugin, which would state its contract version.")
    return found[0]


def require_light(target: Target) -> None:
    """Raises CheckFailedError where importing the target imports torch, Triton or what another distribution brings."""
    _require_absent(target, target.place)


def _require_light_plugin(target: Target) -> None:
    if target.offer is None:
        raise CannotRunError("not offered by an installed plugin, whose module would be imported.")
    _require_absent(target, (_record(target).target or "").partition(":")[0])


def _require_absent(target: Target, place: str) -> None:
    names = (_HEAVY | _foreign_modules(target)) - {_top_level(place), _top_level(target.place)}
    found = call(brought_in, place=place, names=sorted(names))
    if found := [name for name in found if name in _HEAVY] or found:  # what torch brings in turn tells nobody more
        raise CheckFailedError(
            f"importing {place} imports {', '.join(found)}: what is offered must be readable on any machine, so "
            "import such packages when they are first used, as with anyattn.lazy.lazy_import."
        )


def _foreign_modules(target: Target) -> set[str]:
    """Top-level modules of all installed distributions but the plugin's own and those that anyattn itself needs."""
    ours = set(_ALWAYS_HERE)
    if target.offer is not None:
        ours.add(canonicalize_name(target.offer.distribution))
    installed = importlib.metadata.packages_distributions()
    return {module for module, names in installed.items() if not ours & {canonicalize_name(name) for name in names}}


def _top_level(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]
