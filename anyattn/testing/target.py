"""What is to be verified: a backend, allocator, pool or platform, by the name it is offered under or by its place."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from anyattn.attention.backend import AttentionBackend
from anyattn.errors import AnyattnError, ContractError, contained
from anyattn.mem_cache.base import KVAllocator, KVPool
from anyattn.platforms.base import Platform
from anyattn.plugins.isolation import describe
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import Offer

TargetKind = Literal["backend", "allocator", "pool", "platform", "simulated device"]

_HOOK_KINDS: dict[str, TargetKind] = {
    "anyattn_platforms": "platform",
    "anyattn_attention_backends": "backend",
    "anyattn_kv_allocators": "allocator",
    "anyattn_kv_pools": "pool",
    "anyattn_simulated_devices": "simulated device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """name: as it was asked for or is offered. place: "package.module:attribute". loaded: what is there.

    offer: the plugin's, where it was found by one.
    """

    kind: TargetKind
    name: str
    place: str
    loaded: Any
    offer: Offer | None = None


def find_targets(text: str, plugins: PluginManager) -> list[Target]:
    """text: "package.module:attribute", a name that a plugin offers, or a plugin's, which stands for all it offers.

    Raises ContractError or PluginLoadError where there is no such thing, or it cannot be loaded.
    """
    if ":" in text:
        return [_at(text, plugins)]
    offers = [(kind, offer) for hook, kind in _HOOK_KINDS.items() for offer in _offered(plugins, hook)]
    for record in plugins.records:
        if record.name == text and record.problems:
            raise ContractError(f"plugin {text} is not as its author means it to be: {' '.join(record.problems)}")
    chosen = [(kind, offer) for kind, offer in offers if offer.plugin == text]
    chosen = chosen or [(kind, offer) for kind, offer in offers if offer.name == text]
    if not chosen:
        names = ", ".join(sorted({offer.name for _, offer in offers} | {offer.plugin for _, offer in offers}))
        raise ContractError(
            f"{text!r} is neither package.module:attribute nor what an installed plugin offers (`anyattn plugins` "
            f"shows them; is the package installed?). {' '.join([*plugins.problems, ''])}Offered are {names}."
        )
    return [
        Target(kind=kind, name=offer.name, place=offer.target, loaded=offer.load(), offer=offer)
        for kind, offer in chosen
    ]


def _offered(plugins: PluginManager, hook: str) -> list[Offer]:
    return list(getattr(plugins, hook.removeprefix("anyattn_"))().values())


def _at(place: str, plugins: PluginManager) -> Target:
    module, _, attribute = place.partition(":")
    if not (module and attribute):
        raise ContractError(f"{place!r} is not package.module:attribute; a file's folder must be on PYTHONPATH.")
    try:
        loaded = contained(lambda: getattr(importlib.import_module(module), attribute))
    except AnyattnError:
        raise
    except Exception as error:
        raise ContractError(f"{place} cannot be imported: {describe(error)}") from error
    offers = [offer for hook in _HOOK_KINDS for offer in _offered(plugins, hook) if offer.target == place]
    return Target(
        kind=_kind_of(place, loaded), name=attribute, place=place, loaded=loaded, offer=offers[0] if offers else None
    )


def _kind_of(place: str, loaded: Any) -> TargetKind:
    for base, kind in ((AttentionBackend, "backend"), (KVAllocator, "allocator"), (KVPool, "pool")):
        if isinstance(loaded, type) and issubclass(loaded, base):
            return kind  # type: ignore[return-value]
    if isinstance(loaded, Platform):
        return "simulated device"
    if callable(loaded) and not isinstance(loaded, type):
        return "platform"
    raise ContractError(
        f"{place} is no subclass of anyattn.AttentionBackend, KVAllocator or KVPool, no probe and no Platform."
    )
