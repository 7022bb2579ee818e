"""The plugins that the installed distributions name in their metadata, and in words what is wrong with that metadata.

`importlib.metadata.entry_points` would not do: one unreadable file ends it, and of two metadata folders of one
distribution it takes whichever the file system lists first.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from anyattn.errors import contained
from anyattn.plugins.hookspecs import ENTRY_POINT_GROUP
from anyattn.plugins.isolation import describe
from anyattn.plugins.records import Offer, owner

_TARGET = re.compile(r"(?P<module>\w+(\.\w+)*)\s*(:\s*(?P<attribute>\w+(\.\w+)*)\s*)?(\[.*\])?")
"""The packaging specification "Entry points": a module, an attribute in it, and extras that nobody uses any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """An entry point of the group `anyattn.plugins`.

    target: None where it could not be read.
    metadata: what the rest was read from.
    problem: why the metadata cannot be relied on, with what mends it.
    """

    name: str
    target: str | None = None
    distribution: str | None = None
    version: str | None = None
    metadata: importlib.metadata.Distribution | None = None
    problem: str | None = None

    @property
    def owner(self) -> str:
        """The plugin and its distribution, for messages."""
        return owner(self.name, self.distribution, self.version)

    def offer(self, name: str, target: str) -> Offer:
        """Something that this plugin offers."""
        distribution = self.distribution or "unknown distribution"
        return Offer(name=name, target=target, plugin=self.name, distribution=distribution, version=self.version)

    def target_parts(self) -> tuple[str, list[str]] | None:
        """The target's module and the attributes to follow in it; None when it is no such thing."""
        match = _TARGET.fullmatch(self.target or "")
        return None if match is None else (match["module"], list(filter(None, (match["attribute"] or "").split("."))))

    def editable_folder(self) -> str | None:
        """Where the sources are of a distribution that was installed as editable; None for another.

        Read from direct_url.json, as in the packaging specification of that name.
        """
        if self.metadata is None:
            return None
        try:
            origin = json.loads(contained(self.metadata.read_text, "direct_url.json") or "{}")
            if not origin.get("dir_info", {}).get("editable"):
                return None
            from urllib.request import url2pathname  # takes as long to import as all the rest, and is hardly needed

            return url2pathname(urlsplit(origin["url"]).path)
        except Exception:
            return None


def from_entry_point(entry_point: importlib.metadata.EntryPoint, problem: str | None = None) -> InstalledPlugin:
    """What an entry point and its distribution say of themselves."""
    distribution = entry_point.dist
    return InstalledPlugin(
        name=entry_point.name,
        target=entry_point.value,
        distribution=None if distribution is None else _name(distribution),
        version=None if distribution is None else _stated(distribution, "Version"),
        metadata=distribution,
        problem=problem,
    )


def installed_plugins() -> list[InstalledPlugin]:
    """Those of every distribution that an import would find: of one name, the first on sys.path."""
    groups: dict[tuple[str, str], dict[str, importlib.metadata.Distribution]] = {}
    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except UnicodeDecodeError:  # no build tool writes that, and nothing can be read from it
            continue
        if ENTRY_POINT_GROUP in text:
            one = groups.setdefault((_site(distribution), _canonical(_name(distribution))), {})
            one.setdefault(os.path.realpath(_folder(distribution)), distribution)
    plugins: list[InstalledPlugin] = []
    for (site, _), distributions in groups.items():
        if not _shadowed(site, next(iter(distributions.values()))):
            plugins += _of_one_distribution(list(distributions.values()))
    return plugins


def _of_one_distribution(distributions: list[importlib.metadata.Distribution]) -> Iterator[InstalledPlugin]:
    """distributions: one, unless it has several metadata folders beside each other."""
    distributions = [one for one in distributions if not _is_leftover(one)] or distributions
    problem = _metadata_problem(distributions)
    seen: set[tuple[str, str]] = set()
    for distribution in distributions:
        try:
            points = list(contained(lambda d=distribution: d.entry_points.select(group=ENTRY_POINT_GROUP)))
        except Exception as error:
            name = _name(distribution)
            yield InstalledPlugin(
                name=name,
                distribution=name,
                version=_stated(distribution, "Version"),
                problem=f"its entry_points.txt cannot be read ({describe(error)}): run "
                f"`pip install --force-reinstall {name}`",
            )
            continue
        for point in points:
            # Folders of one distribution may repeat each other; one message tells it.
            key = (point.name, "" if problem else point.value)
            if key not in seen:
                seen.add(key)
                yield from_entry_point(point, problem)


def _metadata_problem(distributions: list[importlib.metadata.Distribution]) -> str | None:
    """What pip does with each of these was tried (23.2): it does not see a distribution without a name at all."""
    folders = [_folder(distribution) for distribution in distributions]
    name = _name(distributions[0])
    if len(folders) > 1:
        return (
            f"{name} has several metadata folders, {' and '.join(sorted(folders))}, so what is installed cannot be "
            f"told: run `pip uninstall {name}` until pip finds none, then `pip install {name}`"
        )
    if _is_leftover(distributions[0]):
        return f"{folders[0]} is left over from a removal that was cut short: delete that folder"
    if _stated(distributions[0], "Name") is None:
        return (
            f"{folders[0]} has no METADATA that names a distribution: delete that folder, then run "
            f"`pip install --force-reinstall {name}`"
        )
    return None


def _shadowed(site: str, distribution: importlib.metadata.Distribution) -> bool:
    """Whether another folder, earlier on sys.path, holds a distribution of the same name."""
    name = _stated(distribution, "Name")
    if name is None:
        return False
    try:
        return _site(contained(importlib.metadata.distribution, name)) != site
    except Exception:  # a folder whose name is not that of the distribution
        return False


def _is_leftover(distribution: importlib.metadata.Distribution) -> bool:
    """Whether pip was about to remove it: it renames the folder first, and ignores what it left with such a name."""
    return os.path.basename(_folder(distribution)).startswith("~")


def _name(distribution: importlib.metadata.Distribution) -> str:
    """As METADATA states it, else by the folder, as in zoo-1.0.dist-info."""
    folder = os.path.splitext(os.path.basename(_folder(distribution)))[0]
    return _stated(distribution, "Name") or folder.partition("-")[0] or "unknown"


def _stated(distribution: importlib.metadata.Distribution, field: str) -> str | None:
    """A field of METADATA; None where the file or the field is missing or cannot be read."""
    try:
        metadata: Any = distribution.metadata
        value = metadata.get(field)  # [] warns where the field is missing
    except Exception:
        return None
    return value if isinstance(value, str) else None


def _folder(distribution: importlib.metadata.Distribution) -> str:
    """The metadata's folder, which no public attribute gives; empty where it is none."""
    return str(getattr(distribution, "_path", ""))


def _site(distribution: importlib.metadata.Distribution) -> str:
    """The folder that the metadata's folder lies in."""
    return os.path.realpath(os.path.dirname(_folder(distribution)))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
