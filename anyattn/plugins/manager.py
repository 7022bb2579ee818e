"""Loads plugins one by one, so that none takes another down, and keeps the books of what became of each."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterable
from typing import Any

from anyattn.errors import PluginLoadError
from anyattn.plugins.installed import InstalledPlugin, from_entry_point, installed_plugins
from anyattn.plugins.isolation import describe
from anyattn.plugins.loading import (
    HOOKS,
    call_hook,
    check_contract,
    implemented_hooks,
    import_plugin,
    is_contract_version,
)
from anyattn.plugins.records import BUILTIN, Offer, PluginRecord, PluginState, is_name, offer_kind, release


class PluginManager:
    """Everything that is offered here: built-ins first, then the entry points of the group `anyattn.plugins`.

    allow: names of entry points that may be loaded; None for all of them.
    strict: a plugin that fails raises PluginLoadError; otherwise the failure is kept in `problems` and `records`.
    entry_points: instead of those of the installed distributions.
    time_limit_s: seconds that all probes together have in `detect`; one that takes longer is a failure.
    """

    def __init__(
        self,
        *,
        allow: frozenset[str] | None = None,
        strict: bool = False,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
        time_limit_s: float = 10.0,
    ) -> None:
        self.problems: list[str] = []
        self.time_limit_s = time_limit_s
        self._strict = strict
        self._records: list[PluginRecord] = []
        self._offered: dict[str, list[Offer]] = {hook: [] for hook in HOOKS}
        self._register(_builtin())
        found = installed_plugins() if entry_points is None else [from_entry_point(point) for point in entry_points]
        by_name: dict[str, list[InstalledPlugin]] = {}
        for plugin in sorted(found, key=lambda plugin: (plugin.name, plugin.distribution or "")):
            if allow is None or plugin.name in allow:
                by_name.setdefault(plugin.name, []).append(plugin)
            else:
                self._keep(plugin, "not allowed")
        for name in sorted((allow or frozenset()) - by_name.keys() - {BUILTIN}):
            names = ", ".join(sorted({repr(plugin.name) for plugin in found})) or "no plugin"
            problem = f"ANYATTN_PLUGINS names {name!r}, which no installed distribution provides; installed: {names}."
            self._fail([InstalledPlugin(name=name)], problem, state="missing")
        for name, rivals in by_name.items():
            owners = " and ".join(release(rival.distribution, rival.version) for rival in rivals)
            if not is_name(name):
                problem = f"a plugin is named {name!r} by {owners}: names are letters, digits, '_', '.' and '-'."
            elif name == BUILTIN:
                problem = f"plugin name {name!r} is the built-in's; that of {owners} is not loaded: rename it."
            elif len(rivals) > 1:
                remedy = "uninstall one of them"
                if len({rival.distribution for rival in rivals}) == 1:
                    remedy = "its author has to rename one"
                problem = f"plugin name {name!r} is taken by {owners}; none is loaded: {remedy}."
            else:
                self._register(rivals[0])
                continue
            self._fail(rivals, problem)
        self._offers = {hook: self._agreed(hook) for hook in HOOKS}

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """What became of every plugin that was found or asked for: the built-in one first, then by name."""
        builtin, *others = self._records
        return (builtin, *sorted(others, key=lambda record: (record.name, record.distribution or "")))

    def platforms(self) -> dict[str, Offer]:
        """Platform probes by device kind. The CPU's is the last, so that a plugin's accelerator goes before it."""
        offers = dict(self._offers["anyattn_platforms"])
        if "cpu" in offers:
            offers["cpu"] = offers.pop("cpu")
        return offers

    def attention_backends(self) -> dict[str, Offer]:
        """Attention backends by name."""
        return dict(self._offers["anyattn_attention_backends"])

    def kv_allocators(self) -> dict[str, Offer]:
        """KV allocators by name."""
        return dict(self._offers["anyattn_kv_allocators"])

    def kv_pools(self) -> dict[str, Offer]:
        """KV pools by name."""
        return dict(self._offers["anyattn_kv_pools"])

    def simulated_devices(self) -> dict[str, Offer]:
        """Simulated devices by name."""
        return dict(self._offers["anyattn_simulated_devices"])

    def load(self, offer: Offer) -> Any | None:
        """What the offer names, or None, and a problem, when it cannot be loaded."""
        try:
            return offer.load()
        except PluginLoadError as error:
            self.report(str(error), error, plugin=offer.plugin)
            return None

    def report(self, problem: str, cause: BaseException | None = None, *, plugin: str | None = None) -> None:
        """Keeps a failure, once. Raises PluginLoadError in strict mode.

        plugin: the name of the loaded plugin that is to blame, in whose record it is kept too.
        """
        if self._strict:
            raise PluginLoadError(problem) from cause
        if problem not in self.problems:
            self.problems.append(problem)
        for index, record in enumerate(self._records):
            if record.name == plugin and record.state == "loaded" and problem not in record.problems:
                self._records[index] = dataclasses.replace(record, problems=(*record.problems, problem))

    def _register(self, plugin: InstalledPlugin) -> None:
        """Imports a plugin and calls its hooks."""
        stated = None
        try:
            loaded, version = import_plugin(plugin)
            stated = version if is_contract_version(version) else None
            check_contract(plugin, version)
            hooks = implemented_hooks(plugin, loaded)
        except PluginLoadError as error:
            self._fail([plugin], str(error), error.__cause__, contract_version=stated)
            return
        offers: dict[str, dict[str, str]] = {}
        failed: list[tuple[str, Exception]] = []
        for hook, function in hooks:
            try:
                names = call_hook(function)
            except Exception as error:
                failed.append((f"{plugin.owner}: {hook} failed: {describe(error)}", error))
                continue
            offers[hook] = offers.get(hook, {}) | names
            self._offered[hook] += [plugin.offer(name, target) for name, target in names.items()]
        self._keep(plugin, "loaded", contract_version=stated, offers=offers)
        for problem, cause in failed:
            self.report(problem, cause, plugin=plugin.name)

    def _agreed(self, hook: str) -> dict[str, Offer]:
        """All offers of one hook by name, built-ins first; a name that two plugins offer belongs to neither.

        A built-in keeps its name, so that no plugin can take one down.
        """
        by_name: dict[str, list[Offer]] = {}
        for offer in self._offered[hook]:
            by_name.setdefault(offer.name, []).append(offer)
        agreed = {}
        for name, rivals in by_name.items():
            is_builtin = rivals[0].plugin == BUILTIN
            if is_builtin or len(rivals) == 1:
                agreed[name] = rivals[0]
            kept = "none is used: uninstall one or keep it out with ANYATTN_PLUGINS"
            if len({rival.plugin for rival in rivals}) == 1:
                kept = "none is used: the plugin must offer it once"
            if is_builtin:
                kept = "the built-in is used: the plugin must choose another name"
            owners = " and ".join(rival.owner for rival in rivals)
            kind = offer_kind(hook).removesuffix("s")
            for rival in rivals[is_builtin:] if len(rivals) > 1 else ():
                self.report(f"{kind} {name!r} is offered by {owners}; {kept}.", plugin=rival.plugin)
        return agreed

    def _fail(
        self,
        plugins: list[InstalledPlugin],
        problem: str,
        cause: BaseException | None = None,
        *,
        state: PluginState = "failed",
        contract_version: int | None = None,
    ) -> None:
        for plugin in plugins:
            self._keep(plugin, state, contract_version=contract_version, problems=(problem,))
        self.report(problem, cause)

    def _keep(self, plugin: InstalledPlugin, state: PluginState, **fields: Any) -> None:
        self._records.append(
            PluginRecord(
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                target=plugin.target,
                state=state,
                **fields,
            )
        )


def _builtin() -> InstalledPlugin:
    try:
        version = importlib.metadata.version(BUILTIN)
    except Exception:  # a checkout that is not installed, or broken metadata
        version = None
    return InstalledPlugin(name=BUILTIN, target="anyattn.plugins.builtin", distribution=BUILTIN, version=version)
