"""Where the rooms meet: what was discovered is selected from, and a runtime is put together."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.runtime import AttentionRuntime
from anyattn.attention.select import select_layers
from anyattn.attention.selection import Preference, Selection
from anyattn.attention.spec import AttentionSpec
from anyattn.discovery import candidates, detect, find_device, plugin_manager, require_real
from anyattn.errors import AnyattnError, ContractError, PluginLoadError, SpecError, contained
from anyattn.mem_cache.base import KVAllocator, KVPool
from anyattn.mem_cache.page_table import PageTable
from anyattn.platforms.base import Platform
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import Offer
from anyattn.settings import Settings
from anyattn.types import KV_LAYOUTS, ROLES, KVLayout

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

    Raises SpecError, NoDeviceError, NoBackendError (with all reasons) or PluginLoadError.
    """
    settings = Settings.from_env()
    plugins = plugin_manager(settings)
    num_pages = _integer("num_pages", num_pages, most=_MOST_PAGES)
    if page_size is not None:
        page_size = _integer("page_size", page_size)
    if layout not in (None, *KV_LAYOUTS):
        raise SpecError(f"layout must be {' or '.join(KV_LAYOUTS)}, not {layout!r}.")
    layers = layer_specs(spec, num_layers)
    detection = None
    if isinstance(device, Platform):
        platform = device
    else:
        detection = detect(plugins)
        platform = find_device(plugins, settings.platform if device is None else str(device), detection)
    require_real(platform)
    preference = Preference(
        prefill_backend=prefill_backend or backend or settings.prefill_backend,
        decode_backends=names(decode_backend) or names(backend) or settings.decode_backends,
        allocator=allocator,
        pool=pool,
        page_size=settings.page_size if page_size is None else page_size,
        layout=layout,
    )
    selections = select_layers(layers, platform, candidates(plugins, detection), preference)
    return _assemble(layers, selections, plugins, num_pages, debug=settings.debug)


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


def names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name or several, as a tuple; empty for None and for an empty name."""
    values = (value,) if isinstance(value, str) else tuple(value or ())
    return tuple(dict.fromkeys(name for name in values if name))


def _integer(name: str, value: Any, *, most: int | None = None) -> int:
    """value as an int. Raises SpecError when it is none, or not from 1 to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1 or (most is not None and number > most):
        limits = "a positive integer" if most is None else f"an integer from 1 to {most}"
        raise SpecError(f"{name} must be {limits}, not {value!r}.")
    return number


def layer_specs(spec: AttentionSpec | Sequence[AttentionSpec], num_layers: int | None) -> tuple[AttentionSpec, ...]:
    """A spec for each layer. Raises SpecError when they are none, or cannot share a KV cache."""
    if isinstance(spec, AttentionSpec):
        if num_layers is None:
            raise SpecError("num_layers must be given with one spec for all layers; or give a spec for each layer.")
        return (spec,) * _integer("num_layers", num_layers)
    specs = tuple(spec) if isinstance(spec, Iterable) else (spec,)
    if not all(isinstance(s, AttentionSpec) for s in specs):
        raise SpecError("spec must be an AttentionSpec, or a list of them with one for each layer.")
    if not specs or num_layers not in (None, len(specs)):
        raise SpecError(f"{len(specs)} specs were given for {num_layers} layers: give one for each layer.")
    caches = {s.cache_spec(num_layers=1, page_size=1, layout="NHD") for s in specs}
    if len(caches) > 1 or len({s.dtype for s in specs}) > 1:
        raise SpecError("layers that share a KV cache must have the same KV heads, head dims and dtypes.")
    return specs
