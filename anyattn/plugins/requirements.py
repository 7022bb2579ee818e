"""Whether the packages that a backend needs are installed, told from their metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement

from anyattn.types import Reason


def missing_packages(requirements: Iterable[str], extra: str) -> tuple[Reason, ...]:
    """One reason for each requirement string that this environment does not meet.

    extra: the extra of anyattn that brings them; empty when there is none.
    """
    reasons = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        else:
            if version is not None and requirement.specifier.contains(version, prereleases=True):
                continue
            installed = f"{version or 'an unknown version'} is installed"
        wanted = f"anyattn[{extra}]" if extra else text
        reasons.append(Reason(field="package", wanted=text, supported=installed, remedy=f'pip install "{wanted}"'))
    return tuple(reasons)
