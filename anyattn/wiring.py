"""Where the rooms meet: plugins give probes and candidates, selection picks, and a runtime is put together.

This is the only file that imports every room.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.runtime import AttentionRuntime
from anyattn.attention.select import select_layers
from anyattn.attention.selection import BackendCandidate, Candidates, Preference, Selection
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import AnyattnError, ContractError, NoDeviceError, PluginLoadError, SpecError, contained
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator, KVPool, PoolCapabilities
from anyattn.mem_cache.page_table import PageTable
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.plugins.manager import Offer, PluginManager
from anyattn.plugins.requirements import missing_packages
from anyattn.settings import Settings
from anyattn.types import KV_LAYOUTS, KVLayout

_MOST_PAGES = 2**31 - 2  # page ids are int32, and the null page takes one


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Every device that was found, accelerators first, and in words what kept a probe from finding out more."""

    devices: tuple[Platform, ...]
    problems: tuple[str, ...]


def plugin_manager(settings: Settings | None = None) -> PluginManager:
    """The plugins that the settings allow."""
    settings = settings or Settings.from_env()
    return PluginManager(allow=settings.plugins, strict=settings.strict)


def detect(plugins: PluginManager | None = None) -> Detection:
    """Runs every platform probe. Starts no device context, and no probe takes another down.

    plugins: whose `problems` then tell what failed to load; without it they are among the detection's.
    """
    if plugins is None:
        plugins = plugin_manager()
        found = detect(plugins)
        return Detection(devices=found.devices, problems=(*found.problems, *plugins.problems))
    devices: list[Platform] = []
    problems: list[str] = []
    for offer in plugins.platforms().values():
        probe = plugins.load(offer)
        if probe is None:
            continue
        try:
            result = contained(probe)
            if not isinstance(result, ProbeResult):
                raise TypeError(f"it returned {type(result).__name__}, not ProbeResult")
        except Exception as error:
            plugins.report(f"the {offer.name} probe of {offer.distribution} failed: {type(error).__name__}: {error}")
            continue
        devices += result.devices
        problems += result.problems
    return Detection(devices=tuple(devices), problems=tuple(problems))


def current_platform(settings: Settings | None = None, plugins: PluginManager | None = None) -> Platform:
    """The device to use: the one asked for (ANYATTN_PLATFORM), otherwise the first that torch can drive here.

    Raises NoDeviceError when that is not found or cannot be driven.
    """
    settings = settings or Settings.from_env()
    return choose_device(detect(plugins or plugin_manager(settings)), settings.platform)


def choose_device(detection: Detection, wanted: str | None) -> Platform:
    """wanted: a device kind or a torch device; None for the first usable device.

    Raises NoDeviceError when there is none, with what was found.
    """
    found = "; ".join(f"{d} ({'; '.join(d.problems) or 'usable'})" for d in detection.devices) or "nothing"
    matching = [d for d in detection.devices if wanted is None or wanted in (d.kind, d.torch_device)]
    usable = [device for device in matching if not device.problems]
    if usable:
        return usable[0]
    asked = f"No device {wanted!r} can be used here" if wanted else "No device can be used here"
    raise NoDeviceError(f"{asked}. Found: {found}. {' '.join(detection.problems)}".rstrip())


def candidates(plugins: PluginManager, detection: Detection | None = None) -> Candidates:
    """What the plugins offer, with what is missing here for each backend.

    detection: whose devices that torch cannot drive here are told among the candidates' problems.
    """
    backends = []
    for offer in plugins.attention_backends().values():
        capabilities = _capabilities(plugins, offer, AttentionBackend, Capabilities)
        if capabilities is None:
            continue
        try:
            missing = missing_packages(capabilities.packages, capabilities.extra)
        except Exception as error:
            plugins.report(f"{offer.name!r} of {offer.distribution} declares packages that cannot be read: {error}")
            continue
        backends.append(
            BackendCandidate(
                name=offer.name, distribution=offer.distribution, capabilities=capabilities, missing=missing
            )
        )
    allocators = {
        offer.name: capabilities
        for offer in plugins.kv_allocators().values()
        if (capabilities := _capabilities(plugins, offer, KVAllocator, AllocatorCapabilities)) is not None
    }
    pools = {
        offer.name: capabilities
        for offer in plugins.kv_pools().values()
        if (capabilities := _capabilities(plugins, offer, KVPool, PoolCapabilities)) is not None
    }
    unusable = [d for d in detection.devices if d.problems] if detection else []
    return Candidates(
        backends=backends,
        allocators=allocators,
        pools=pools,
        problems=(
            *(f"{device} cannot be used here: {'; '.join(device.problems)}" for device in unusable),
            *plugins.problems,
        ),
    )


def create_runtime(
    spec: AttentionSpec | Sequence[AttentionSpec],
    *,
    num_layers: int | None = None,
    num_pages: int,
    device: Any = None,
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
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
    backend: for both roles, or `prefill_backend` and `decode_backend`; by default ANYATTN_ATTENTION_BACKEND,
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
    layer_specs = _layer_specs(spec, num_layers)
    detection = None
    if isinstance(device, Platform):
        platform = device
    else:
        detection = detect(plugins)
        platform = choose_device(detection, settings.platform if device is None else str(device))
    preference = Preference(
        prefill_backend=prefill_backend or backend or settings.prefill_backend,
        decode_backend=decode_backend or backend or settings.decode_backend,
        allocator=allocator,
        pool=pool,
        page_size=settings.page_size if page_size is None else page_size,
        layout=layout,
    )
    selections = select_layers(layer_specs, platform, candidates(plugins, detection), preference)
    return _assemble(layer_specs, selections, plugins, num_pages, debug=settings.debug)


def _assemble(
    layer_specs: Sequence[AttentionSpec],
    selections: dict[AttentionSpec, Selection],
    plugins: PluginManager,
    num_pages: int,
    *,
    debug: bool,
) -> AttentionRuntime:
    first = next(iter(selections.values()))
    cache = first.spec.cache_spec(num_layers=len(layer_specs), page_size=first.page_size, layout=first.layout)
    offers = plugins.attention_backends()
    backends = {}
    for spec, selection in selections.items():
        prefill = decode = _make(offers[selection.prefill], spec, cache, selection.platform)
        if selection.decode != selection.prefill:
            decode = _make(offers[selection.decode], spec, cache, selection.platform)
        backends[spec] = HybridBackend(prefill, decode)
    try:
        pool: KVPool = _make(plugins.kv_pools()[first.pool], cache, num_pages, first.platform.torch_device)
    except (MemoryError, RuntimeError) as error:
        wanted = cache.bytes_per_page * (num_pages + 1)
        raise ContractError(
            f"a pool of {num_pages} pages takes {wanted / 2**30:.1f} GiB on {first.platform.torch_device}, which could "
            f"not be had: {error}. Give a smaller num_pages."
        ) from error
    pages: KVAllocator = _make(plugins.kv_allocators()[first.allocator], num_pages, first.page_size)
    return AttentionRuntime(layer_specs, selections, backends, pool, PageTable(pages, first.page_size, debug=debug))


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


def _layer_specs(spec: AttentionSpec | Sequence[AttentionSpec], num_layers: int | None) -> tuple[AttentionSpec, ...]:
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


def _capabilities(plugins: PluginManager, offer: Offer, base: type[Any], declared: type[Any]) -> Any | None:
    """What the offered class declares; None, and a problem, when it cannot be loaded or is not what the hook promises.

    base: what the class must derive from. declared: of what type its `capabilities` must be.
    """
    loaded = plugins.load(offer)
    if loaded is None:
        return None
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        plugins.report(f"{offer.name!r} of {offer.distribution}: {offer.target} is no subclass of {base.__name__}.")
        return None
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        plugins.report(f"{offer.name!r} of {offer.distribution} lacks {', '.join(missing)} of {base.__name__}.")
        return None
    capabilities = getattr(loaded, "capabilities", None)
    if not isinstance(capabilities, declared):
        plugins.report(f"{offer.name!r} of {offer.distribution} has no capabilities of type {declared.__name__}.")
        return None
    return capabilities
