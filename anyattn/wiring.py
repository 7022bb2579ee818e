"""Where the rooms meet: what was discovered is selected from, and a runtime is put together."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from anyattn.arguments import checked_device, checked_layers, checked_preference, positive_integer
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.runtime import AttentionRuntime
from anyattn.attention.select import select_layers
from anyattn.attention.selection import Selection
from anyattn.attention.spec import AttentionSpec
from anyattn.discovery import candidates, detect, find_device, plugin_manager, require_usable
from anyattn.errors import AnyattnError, ContractError, NoDeviceError, PluginLoadError, contained
from anyattn.mem_cache.base import KVAllocator, KVPool
from anyattn.mem_cache.page_table import PageTable
from anyattn.platforms.base import Platform
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import Offer
from anyattn.settings import Settings
from anyattn.types import ROLES, KVLayout

_MOST_PAGES = 2**31 - 2  # page ids are int32, and the null page takes one


def create_runtime(
    spec: AttentionSpec | Sequence[AttentionSpec],
    *,
    num_layers: int | None = None,
    num_pages: int,
    device: Any = None,
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | Sequence[str] | None = None,
    allocator: str | None = None,
    pool: str | None = None,
    page_size: int | None = None,
    layout: KVLayout | None = None,
) -> AttentionRuntime:
    """Detect, select, allocate: everything an engine needs to attend on this machine.

    spec: of all layers, with `num_layers`; or one for each layer. Layers may differ in masks and features, and share
        one KV cache.
    num_pages: pages that sequences can own; the pool holds one more, the null page.
    device: a kind ("cuda"), a torch device ("cuda:1", as a name or an object) or a platform; by default
        ANYATTN_PLATFORM, then the first usable device.
    backend: for both roles, or `prefill_backend` and `decode_backend` (several names: `plan` picks among them by
        priority at the batch's load); by default ANYATTN_ATTENTION_BACKEND,
        ANYATTN_PREFILL_BACKEND and ANYATTN_DECODE_BACKEND, then the best valid ones. Arguments beat the environment.
    page_size: tokens; by default ANYATTN_PAGE_SIZE, then what the chosen backends prefer.
    layout, allocator, pool: by default the best valid ones.

    Raises SpecError, NoDeviceError, NoBackendError (with all reasons), PluginLoadError, and ContractError for a pool
    that does not fit into memory.
    """
    settings = Settings.from_env()
    num_pages = positive_integer("num_pages", num_pages, most=_MOST_PAGES)
    layers = checked_layers(spec, num_layers)
    preference = checked_preference(
        settings,
        backend=backend,
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        allocator=allocator,
        pool=pool,
        page_size=page_size,
        layout=layout,
    )
    plugins = plugin_manager(settings)
    wanted = checked_device(settings, device)
    detection = None
    if not isinstance(wanted, Platform):
        detection = detect(plugins)
        wanted = find_device(plugins, wanted, detection)
    platform = require_usable(wanted)
    _require_torch(platform)
    selections = select_layers(layers, platform, candidates(plugins, detection), preference)
    return _assemble(layers, selections, plugins, num_pages, debug=settings.debug)


def _require_torch(platform: Platform) -> None:
    """Raises NoDeviceError when torch cannot be imported, or knows no such device."""
    try:
        importlib.import_module("torch").device(platform.torch_device)
    except Exception as error:
        raise NoDeviceError(
            f"torch cannot drive {platform}: {type(error).__name__}: {error}. `anyattn doctor` shows the torch that is "
            "installed; a plugin's device has to be called what torch calls it (torch_device)."
        ) from error


def _assemble(
    layers: Sequence[AttentionSpec],
    selections: dict[AttentionSpec, Selection],
    plugins: PluginManager,
    num_pages: int,
    *,
    debug: bool,
) -> AttentionRuntime:
    first = next(iter(selections.values()))
    cache = first.spec.cache_spec(num_layers=len(layers), page_size=first.page_size, layout=first.layout)
    offers = plugins.attention_backends()
    backends = {}
    for spec, selection in selections.items():
        chosen = dict.fromkeys(name for role in ROLES for name in selection.backends(role))
        instances = {name: _make(offers[name], spec, cache, selection.platform) for name in chosen}
        backends[spec] = HybridBackend(selection, instances)
    try:
        pool: KVPool = _make(plugins.kv_pools()[first.pool], cache, num_pages, first.platform.torch_device)
    except PluginLoadError:
        raise
    except (MemoryError, RuntimeError) as error:
        wanted = cache.bytes_per_page * (num_pages + 1)
        raise ContractError(
            f"a pool of {num_pages} pages takes {wanted / 2**30:.1f} GiB on {first.platform.torch_device}, which could "
            f"not be had: {error}. Give a smaller num_pages."
        ) from error
    pages: KVAllocator = _make(plugins.kv_allocators()[first.allocator], num_pages, first.page_size)
    return AttentionRuntime(layers, selections, backends, pool, PageTable(pages, first.page_size, debug=debug))


def _make(offer: Offer, *arguments: Any) -> Any:
    """An instance of what is offered. What a plugin's constructor raises becomes a PluginLoadError with its name."""
    try:
        return contained(offer.load(), *arguments)
    except AnyattnError:
        raise
    except Exception as error:
        if offer.distribution == "anyattn":
            raise
        raise PluginLoadError(
            f"{offer.name!r} of {offer.distribution} cannot be made: {type(error).__name__}: {error}"
        ) from error
