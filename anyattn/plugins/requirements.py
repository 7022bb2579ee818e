"""Whether the packages and programs that a backend needs are here: nothing is imported or started."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterable
from typing import Any

from packaging.requirements import Requirement

from anyattn.types import Reason


def missing_packages(requirements: Iterable[str], extra: str) -> tuple[Reason, ...]:
    """One reason for each requirement string that this environment does not meet.

    extra: the extra of anyattn that brings them; empty when there is none. Torch by itself then has no remedy here, as
        each kind of device has a torch of its own: `judge`, which knows the device, fills it in.
    """
    reasons = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        brought = f"anyattn[{extra}]" if extra else text
        remedy = "" if requirement.name == "torch" and not extra else f'pip install "{brought}"'
        try:
            version: Any = importlib.metadata.version(requirement.name)
            if not isinstance(version, str):
                raise ValueError("the metadata state no version")
            if requirement.specifier.contains(version, prereleases=True):
                continue
            installed = f"{version} is installed"
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        except Exception:
            installed = "its metadata are damaged"
            remedy = f"pip install --force-reinstall {requirement.name}"
        reasons.append(Reason(field="package", wanted=text, supported=installed, remedy=remedy))
    return tuple(reasons)


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
