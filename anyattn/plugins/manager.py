"""Loads plugins one by one, so that none takes another down, and keeps the books of what each offers."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pluggy

from anyattn.errors import PluginLoadError, contained
from anyattn.plugins import builtin, hookspecs
from anyattn.types import CONTRACT_VERSION

_BUILTIN = "anyattn"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One thing a plugin offers, found by its dotted name when needed."""

    name: str
    target: str
    plugin: str
    distribution: str

    def load(self) -> Any:
        """Imports and returns it. Raises PluginLoadError."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(contained(importlib.import_module, module), attribute)
        except Exception as error:
            raise PluginLoadError(
                f"{self.name!r} of plugin {self.plugin} ({self.distribution}): {self.target} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error


class PluginManager:
    """Everything that is offered here: built-ins first, then the entry points of the group `anyattn.plugins`.

    allow: names of entry points that may be loaded; None for all of them.
    strict: a plugin that fails raises PluginLoadError; otherwise the failure is kept in `problems`.
    entry_points: instead of those of the installed distributions.
    """

    def __init__(
        self,
        *,
        allow: frozenset[str] | None = None,
        strict: bool = False,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    ) -> None:
        self.problems: list[str] = []
        self._strict = strict
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._distributions = {_BUILTIN: _BUILTIN}
        self._manager.register(builtin, _BUILTIN)
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
        by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
        for entry_point in entry_points:
            if allow is None or entry_point.name in allow:
                by_name.setdefault(entry_point.name, []).append(entry_point)
        for name in sorted((allow or frozenset()) - by_name.keys()):
            self.report(f"ANYATTN_PLUGINS names {name!r}, which no installed distribution provides.")
        for name in sorted(by_name):
            if not _NAME.fullmatch(name):
                self.report(f"a plugin is named {name!r}: names are letters, digits, '_', '.' and '-'.")
            elif len(by_name[name]) > 1 or name == _BUILTIN:
                owners = ", ".join(sorted(map(_distribution, by_name[name])))
                self.report(f"plugin name {name!r} is taken by {owners}; none is loaded: uninstall or rename one.")
            else:
                self._register(by_name[name][0])

    def platforms(self) -> dict[str, Offer]:
        """Platform probes by device kind."""
        return self._offers("anyattn_platforms")

    def attention_backends(self) -> dict[str, Offer]:
        """Attention backends by name."""
        return self._offers("anyattn_attention_backends")

    def kv_allocators(self) -> dict[str, Offer]:
        """KV allocators by name."""
        return self._offers("anyattn_kv_allocators")

    def kv_pools(self) -> dict[str, Offer]:
        """KV pools by name."""
        return self._offers("anyattn_kv_pools")

    def load(self, offer: Offer) -> Any | None:
        """What the offer names, or None, and a problem, when it cannot be loaded."""
        try:
            return offer.load()
        except PluginLoadError as error:
            self.report(str(error), error)
            return None

    def report(self, problem: str, cause: Exception | None = None) -> None:
        """Keeps a plugin's failure, once. Raises PluginLoadError in strict mode."""
        if self._strict:
            raise PluginLoadError(problem) from cause
        if problem not in self.problems:
            self.problems.append(problem)

    def _register(self, entry_point: importlib.metadata.EntryPoint) -> None:
        distribution = _distribution(entry_point)
        who = f"plugin {entry_point.name} ({distribution})"
        try:
            plugin = contained(entry_point.load)
            version = contained(getattr, plugin, "contract_version", None)
        except Exception as error:
            self.report(f"{who} cannot be imported: {type(error).__name__}: {error}", error)
            return
        if version is None:
            self.report(f"{who} states no contract version: set contract_version = {CONTRACT_VERSION} in it.")
            return
        if not isinstance(version, int) or version != CONTRACT_VERSION:
            self.report(
                f"{who} is written for contract version {version}, and this anyattn has {CONTRACT_VERSION}: "
                f"install a release of {distribution} for it."
            )
            return
        try:
            self._manager.register(plugin, entry_point.name)
            self._manager.check_pending()
        except Exception as error:
            if self._manager.has_plugin(entry_point.name):
                self._manager.unregister(name=entry_point.name)
            self.report(f"{who} does not fit the hooks: {error}; hooks are {', '.join(_hook_names())}", error)
            return
        if not self._manager.get_hookcallers(plugin):
            self._manager.unregister(name=entry_point.name)
            self.report(f"{who} implements no hook: mark {' or '.join(_hook_names())} with @anyattn.hookimpl.")
            return
        self._distributions[entry_point.name] = distribution

    def _offers(self, hook: str) -> dict[str, Offer]:
        """All offers of one hook by name, built-ins first; a name that two distributions offer belongs to neither.

        A built-in keeps its name, so that no plugin can take one down.
        """
        found: dict[str, list[Offer]] = {}
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        for implementation in sorted(implementations, key=lambda i: (i.plugin_name != _BUILTIN, i.plugin_name)):
            plugin = implementation.plugin_name
            distribution = self._distributions[plugin]
            try:
                names = _checked_offers(contained(implementation.function))
            except Exception as error:
                self.report(f"plugin {plugin} ({distribution}): {hook} raised {type(error).__name__}: {error}", error)
                continue
            for name, target in names.items():
                offer = Offer(name=name, target=target, plugin=plugin, distribution=distribution)
                found.setdefault(name, []).append(offer)
        offers = {}
        for name, rivals in found.items():
            if len(rivals) > 1:
                owners = ", ".join(sorted({rival.distribution for rival in rivals}))
                kept = "the built-in is used" if rivals[0].plugin == _BUILTIN else "none is used"
                self.report(f"{name!r} is offered by {owners}; {kept}: uninstall one or set ANYATTN_PLUGINS.")
            if len(rivals) == 1 or rivals[0].plugin == _BUILTIN:
                offers[name] = rivals[0]
        return offers


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    return "unknown distribution" if entry_point.dist is None else entry_point.dist.name


def _hook_names() -> list[str]:
    return sorted(name for name in vars(hookspecs) if name.startswith("anyattn_"))


def _checked_offers(names: Any) -> dict[str, str]:
    """What a hook returned. Raises TypeError when it is not names and dotted names."""
    for name, target in dict(names).items():
        if not (isinstance(name, str) and _NAME.fullmatch(name) and isinstance(target, str) and target.count(":") == 1):
            raise TypeError(f"{name!r}: {target!r} is not a name with its 'package.module:attribute'")
    return dict(names)
