"""What is known of every plugin and of each thing it offers, as frozen data."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anyattn.errors import PluginLoadError, contained
from anyattn.plugins.isolation import describe

BUILTIN = "anyattn"
"""Name of the plugin, and of the distribution, of what anyattn itself offers."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")

PluginState = Literal["loaded", "failed", "not allowed", "missing"]
"""It is in use, where single offers may have failed; nothing of it is in use; it is installed and not named by
ANYATTN_PLUGINS; it is named there and not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """What became of one plugin. Unknown facts are None."""

    name: str
    """Of the entry point."""
    distribution: str | None = None
    version: str | None = None
    """Of the distribution."""
    target: str | None = None
    """What the entry point names: "package.module" or "package.module:attribute"."""
    state: PluginState
    contract_version: int | None = None
    """The one that the plugin states; None for a plugin that was not imported or states none."""
    offers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By hook, as the plugin returned it: names, and where to find what they name."""
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "target": self.target,
            "state": self.state,
            "contract_version": self.contract_version,
            "offers": {hook: dict(names) for hook, names in self.offers.items()},
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One thing a plugin offers, found by its dotted name when needed."""

    name: str
    target: str
    plugin: str
    distribution: str
    version: str | None = None

    @property
    def owner(self) -> str:
        """The plugin and its distribution, for messages."""
        return owner(self.plugin, self.distribution, self.version)

    def load(self) -> Any:
        """Imports and returns it. Raises PluginLoadError."""
        try:
            return contained(_find, self.target)
        except Exception as error:
            raise PluginLoadError(
                f"{self.name!r} of {self.owner}: {self.target} cannot be imported: {describe(error)}"
            ) from error


def owner(plugin: str, distribution: str | None, version: str | None) -> str:
    """Whose something is, for messages: plugin zoo (zoo-kernels 1.2), or anyattn 1.0 for what is built in."""
    whole = release(distribution, version)
    return whole if plugin == BUILTIN == distribution else f"plugin {plugin} ({whole})"


def release(distribution: str | None, version: str | None) -> str:
    """A distribution and its version, for messages."""
    return " ".join(filter(None, (distribution or "unknown distribution", version)))


def is_name(text: str) -> bool:
    """Whether a plugin or an offer may be called that: what a terminal shows and a user can type."""
    return _NAME.fullmatch(text) is not None


def offer_kind(hook: str) -> str:
    """What the hook is for, in words: KV pools for anyattn_kv_pools."""
    return hook.removeprefix("anyattn_").replace("_", " ").replace("kv", "KV")


def _find(target: str) -> Any:
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if found is None:
        raise TypeError("it is None")
    return found
