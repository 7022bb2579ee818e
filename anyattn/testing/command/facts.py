"""What was verified, with what, and where: from the declaration, the device and the metadata of what is installed."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import platform as host
from collections.abc import Mapping
from typing import Any

from anyattn.errors import contained
from anyattn.platforms.base import Platform
from anyattn.plugins.records import BUILTIN, owner
from anyattn.plugins.requirements import package_names
from anyattn.testing.target import Target
from anyattn.types import CONTRACT_VERSION

_PACKAGES = (BUILTIN, "torch", "triton", "numpy")


def facts(target: Target, device: Platform | None) -> dict[str, Any]:
    """All facts as JSON values; None for what is unknown or not there."""
    return {
        "name": target.name,
        "kind": target.kind,
        "place": target.place,
        **_origin(target),
        "contract_version": CONTRACT_VERSION,
        "device": None if device is None else device.to_json(),
        "versions": _versions(declaration(target) or {}),
        "os": host.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def declaration(target: Target) -> dict[str, Any] | None:
    """What the target declares, a simulated device its facts, as JSON values; None where nothing can be shown."""
    declared = target.loaded if isinstance(target.loaded, Platform) else getattr(target.loaded, "capabilities", None)
    try:
        values = contained(declared.to_json)  # type: ignore[union-attr]  # None has no such method either
        json.dumps(values, allow_nan=False)
    except Exception:  # which a check of the contract tells
        return None
    return values if isinstance(values, dict) else None


def rows(known: Mapping[str, Any], device: Platform | None) -> list[tuple[str, str]]:
    """The facts in words."""
    versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in known["versions"].items())
    return [
        ("target", f"{known['name']} ({known['kind']})"),
        ("place", known["place"]),
        ("from", origin_text(known)),
        ("contract", f"version {known['contract_version']}"),
        ("device", _device_text(device)),
        ("versions", versions),
        ("system", known["os"]),
        ("date", known["date"]),
    ]


def origin_text(known: Mapping[str, Any]) -> str:
    """Who brings the target, in words."""
    if known["plugin"] is not None:
        return owner(known["plugin"], known["distribution"], known["version"])
    if known["distribution"] is None:
        return "no installed distribution"
    return f"{known['distribution']} {known['version']}"


def _device_text(device: Platform | None) -> str:
    if device is None:
        return "none"
    known = (("driver", device.driver_version), ("runtime", device.runtime_version))
    return ", ".join([str(device), *(f"{name} {version}" for name, version in known if version)])


def _origin(target: Target) -> dict[str, str | None]:
    """The distribution that brings the target, its version, and the plugin that offers it; None for what is unknown."""
    if target.offer is not None:
        offer = target.offer
        return {"distribution": offer.distribution, "version": offer.version, "plugin": offer.plugin}
    distribution = _distribution_of(target.place.partition(":")[0].partition(".")[0])
    version = None if distribution is None else _installed_version(distribution)
    return {"distribution": distribution, "version": version, "plugin": None}


@functools.cache  # it reads the metadata of all that is installed
def _distribution_of(package: str) -> str | None:
    return next(iter(importlib.metadata.packages_distributions().get(package, [])), None)


def _versions(declared: Mapping[str, Any]) -> dict[str, str | None]:
    """Of what the target runs on and of what it asks for, nothing of which is imported."""
    asked = [name for entry in declared.get("packages", ()) for name in _names_in(entry)]
    found = {name: _installed_version(name) for name in dict.fromkeys([*_PACKAGES, *asked])}
    if found["triton"] is None and "triton" not in asked:
        del found["triton"]  # there is none for many devices
    return {BUILTIN: found.pop(BUILTIN), "Python": host.python_version(), **found}


def _names_in(entry: str) -> list[str]:
    try:
        return package_names([entry])
    except ValueError:  # which a check of the contract tells
        return []


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # not installed, or damaged metadata
        return None
