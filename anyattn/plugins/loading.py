"""From an entry point to the hooks that its plugin implements, or a PluginLoadError that says what would mend it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pluggy

from anyattn.errors import PluginLoadError, contained
from anyattn.plugins import hookspecs
from anyattn.plugins.installed import InstalledPlugin
from anyattn.plugins.isolation import describe
from anyattn.plugins.records import is_name
from anyattn.types import CONTRACT_VERSION

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("anyattn_"))


class _NotThereError(Exception):
    """What the entry point names does not exist."""


def import_plugin(plugin: InstalledPlugin) -> tuple[Any, Any]:
    """The module or object that the entry point names, and what it states as its contract version.

    Raises PluginLoadError.
    """
    who = plugin.owner
    if plugin.problem is not None:
        raise PluginLoadError(f"{who} is not loaded: {plugin.problem}.")
    parts = plugin.target_parts()
    if parts is None:
        raise PluginLoadError(
            f"{who} cannot be imported: its entry point names {plugin.target!r}, which is not package.module or "
            "package.module:attribute: correct it where the plugin is built."
        )
    module, attributes = parts
    try:
        loaded, version = contained(_import, module, attributes)
    except _NotThereError as error:
        raise PluginLoadError(f"{who} cannot be imported: {error}: {_mend(plugin)}.") from error
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise PluginLoadError(f"{who} cannot be imported: {module} is not there: {_mend(plugin)}.") from error
        text = f"{who} cannot be imported: {describe(error)}: run `pip check` to see what it needs."
        raise PluginLoadError(text) from error
    except Exception as error:
        raise PluginLoadError(f"{who} cannot be imported: {describe(error)}") from error
    return loaded, version


def check_contract(plugin: InstalledPlugin, version: Any) -> None:
    """Raises PluginLoadError when the plugin is not written for this anyattn's contract."""
    who = plugin.owner
    name = plugin.distribution or "its distribution"
    if version is None:
        raise PluginLoadError(f"{who} states no contract version: set contract_version = {CONTRACT_VERSION} in it.")
    if not is_contract_version(version):
        raise PluginLoadError(
            f"{who} states a contract version of type {type(version).__name__}, which is no integer, or a huge one: "
            f"set contract_version = {CONTRACT_VERSION} in it."
        )
    if version != CONTRACT_VERSION:
        behind, ahead = (name, "anyattn") if version < CONTRACT_VERSION else ("anyattn", name)
        raise PluginLoadError(
            f"{who} is written for contract version {version}, and this anyattn has {CONTRACT_VERSION}: run "
            f"`pip install --upgrade {behind}`, or install an older {ahead}."
        )


def is_contract_version(version: Any) -> bool:
    """Whether it is an integer, which True is not."""
    return type(version) is int and abs(version) < 1_000_000  # what is longer cannot be put into words


def implemented_hooks(plugin: InstalledPlugin, loaded: Any) -> list[tuple[str, Callable[[], Any]]]:
    """The hooks that the plugin implements, with the functions to call. Raises PluginLoadError.

    Every plugin has a pluggy manager of its own: in a common one, one that raises ends the call of a hook for all.
    """
    who = plugin.owner
    hooks = " or ".join(HOOKS)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        contained(manager.register, loaded, plugin.name)
        manager.check_pending()
    except Exception as error:
        raise PluginLoadError(f"{who} does not fit the hooks: {describe(error)}; hooks are {hooks}.") from error
    found = [(hook, call) for hook in HOOKS for call in getattr(manager.hook, hook).get_hookimpls()]
    if not found:
        raise PluginLoadError(f"{who} implements no hook: mark {hooks} with @anyattn.hookimpl.")
    if any(call.wrapper or call.hookwrapper for _, call in found):
        raise PluginLoadError(f"{who} wraps a hook, and there is nothing to wrap: write @anyattn.hookimpl alone.")
    return [(hook, call.function) for hook, call in found]


def call_hook(function: Callable[[], Any]) -> dict[str, str]:
    """The names that a hook returns, with their dotted names.

    Raises TypeError for another result, and whatever the hook raises.
    """
    names: dict[str, str] = contained(lambda: _checked_names(function()))
    return names


def _checked_names(names: Any) -> dict[str, str]:
    if not isinstance(names, dict):
        raise TypeError(f"it returned {type(names).__name__}, not a dict of names and 'package.module:attribute'")
    for name, target in names.items():
        if not (isinstance(name, str) and is_name(name) and isinstance(target, str) and target.count(":") == 1):
            raise TypeError(f"{name!r}: {target!r} is not a name with its 'package.module:attribute'")
    return dict(names)


def _import(module: str, attributes: list[str]) -> tuple[Any, Any]:
    loaded = importlib.import_module(module)
    if _is_empty_folder(loaded):
        raise _NotThereError(f"{module} is a folder without code")
    for attribute in attributes:
        name = getattr(loaded, "__name__", type(loaded).__name__)
        try:
            loaded = getattr(loaded, attribute)
        except AttributeError:
            raise _NotThereError(f"{name} has no {attribute!r}, which its entry point names") from None
    return loaded, getattr(loaded, "contract_version", None)


def _is_empty_folder(module: ModuleType) -> bool:
    """Python takes a folder that an uninstall left behind, with a __pycache__ in it, for a namespace package."""
    return hasattr(module, "__path__") and getattr(module, "__file__", None) is None


def _mend(plugin: InstalledPlugin) -> str:
    """What to do about metadata without code."""
    name = plugin.distribution
    if name is None:
        return "install it again"
    folder = plugin.editable_folder()
    if folder is not None and not os.path.exists(folder):
        return f"it was installed as editable from {folder}, which is gone; run `pip uninstall {name}`"
    return f"run `pip install --force-reinstall {name}`, or `pip uninstall {name}`"
