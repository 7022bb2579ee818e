"""Whether the packages and programs that a backend needs are here: nothing is imported or started."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from packaging.requirements import Requirement

from anyattn.types import Reason


def missing_packages(requirements: Iterable[str], extra: str) -> tuple[Reason, ...]:
    """One reason for each entry of `Capabilities.packages` that this environment does not meet.

    extra: the extra of anyattn that brings them; empty when there is none. Torch by itself then has no remedy here, as
        each kind of device has a torch of its own: `judge`, which knows the device, fills it in.
    """
    reasons = []
    for entry in requirements:
        refused = []
        applicable = [text for text in alternatives(entry) if _applies(text)]
        for text in applicable:
            reason = _missing_module(text, extra) if text.startswith(_MODULE) else _missing_package(text, extra)
            if reason is None:
                break
            refused.append(reason)
        if len(refused) == len(applicable) > 0:
            remedy = next((reason.remedy for reason in refused if reason.remedy), "")
            states = dict.fromkeys(reason.supported for reason in refused)
            reasons.append(Reason(field="package", wanted=" or ".join(applicable).replace(_MODULE, ""),
                                  supported="; ".join(states), remedy=remedy))  # fmt: skip
    return tuple(reasons)


_MODULE = "module:"


def _applies(text: str) -> bool:
    """Whether the environment is one that a requirement's marker is for."""
    marker = None if text.startswith(_MODULE) else Requirement(text).marker
    return marker is None or marker.evaluate()


def alternatives(entry: str) -> list[str]:
    """Those that an entry of `Capabilities.packages` lists: requirement strings, and modules behind "module:"."""
    return [text.strip() for text in entry.split("|")]


def package_names(requirements: Iterable[str]) -> list[str]:
    """The distributions that entries of `Capabilities.packages` name."""
    named = (text for entry in requirements for text in alternatives(entry) if not text.startswith(_MODULE))
    return [Requirement(text).name for text in named]


def check_entry(entry: str) -> None:
    """Raises ValueError for an entry of `Capabilities.packages` that cannot be read."""
    for text in alternatives(entry):
        if text.startswith(_MODULE):
            if not all(part.isidentifier() for part in text.removeprefix(_MODULE).split(".")):
                raise ValueError(f"{text!r} names no module")
        elif (requirement := Requirement(text)).marker is not None:
            requirement.marker.evaluate()


def _missing_package(text: str, extra: str) -> Reason | None:
    requirement = Requirement(text)
    brought = f"anyattn[{extra}]" if extra else f"{requirement.name}{requirement.specifier}"
    remedy = "" if requirement.name == "torch" and not extra else f'pip install "{brought}"'
    try:
        version: Any = importlib.metadata.version(requirement.name)
        if not isinstance(version, str):
            raise ValueError("the metadata state no version")
        if requirement.specifier.contains(version, prereleases=True):
            return None
        installed = f"{version} is installed"
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    except Exception:
        installed = "its metadata are damaged"
        remedy = f"pip install --force-reinstall {requirement.name}"
    return Reason(field="package", wanted=text, supported=installed, remedy=remedy)


def _missing_module(text: str, extra: str) -> Reason | None:
    """Of a build that is known by its module, as it comes in several distributions or in none."""
    name = text.removeprefix(_MODULE)
    if find_module(name):
        return None
    brought = f"anyattn[{extra}]" if extra else name.partition(".")[0]
    return Reason(field="package", wanted=name, supported="not installed", remedy=f'pip install "{brought}"')


def find_module(name: str) -> bool:
    """Whether a module is there. Neither it nor the packages that it lies in are imported, as `find_spec` would."""
    top, *inner = name.split(".")
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        spec = importlib.util.find_spec(top)
        for i in range(len(inner)):
            if spec is None or spec.submodule_search_locations is None:
                return False
            full = ".".join([top, *inner[: i + 1]])
            spec = importlib.machinery.PathFinder.find_spec(full, list(spec.submodule_search_locations))
    except (ImportError, ValueError, AttributeError):  # what stands in sys.modules need not be a module
        return False
    return spec is not None and spec.origin is not None  # a folder of that name need not be a package


def missing_programs(programs: Iterable[str]) -> tuple[Reason, ...]:
    """One reason for each program that is not on the PATH; written as in `Capabilities.programs`."""
    reasons = []
    for text in programs:
        variable, _, default = text.partition("|") if text.startswith("$") else ("", "", text)
        name = os.environ.get(variable.removeprefix("$")) or default
        if shutil.which(name) is None:
            other = f", or set {variable.removeprefix('$')} to another" if variable else ""
            reasons.append(
                Reason(field="program", wanted=name, supported="not on the PATH", remedy=f"install {name}{other}")
            )
    return tuple(reasons)
