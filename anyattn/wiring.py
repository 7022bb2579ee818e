"""Where the rooms meet: what was discovered is selected from, and a runtime is put together."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyattn.arguments import checked_device, checked_layers, checked_preference, positive_integer
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.mla import Expansion, expanded_specs
from anyattn.attention.runtime import AttentionRuntime
from anyattn.attention.select import select_layers
from anyattn.attention.selection import Candidates, Preference, Selection
from anyattn.attention.spec import AttentionSpec
from anyattn.discovery import candidates, detect, find_device, plugin_manager, require_usable
from anyattn.errors import (
    AnyattnError,
    ContractError,
    NoBackendError,
    NoDeviceError,
    PluginLoadError,
    SpecError,
    contained,
)
from anyattn.mem_cache.base import KVAllocator, KVPool
from anyattn.mem_cache.empty_pool import EmptyPool
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.spec import CacheGroup, CacheSpec, memory_needed, pages_for_memory
from anyattn.mem_cache.windows import WindowPages
from anyattn.platforms.base import Platform
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import Offer
from anyattn.settings import Settings
from anyattn.types import KV_LAYOUTS, MOST_PAGES, ROLES, KVLayout

_FREE_OF_BYTES = 1 << 20
"""Pages where a page takes no memory but for the books, as all layers keep only their windows."""


def create_runtime(
    spec: AttentionSpec | Sequence[AttentionSpec],
    *,
    num_layers: int | None = None,
    num_pages: int | None = None,
    num_window_pages: int | None = None,
    memory_bytes: int | None = None,
    max_num_seqs: int | None = None,
    max_new_tokens: int | None = None,
    device: Any = None,
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | Sequence[str] | None = None,
    allocator: str | None = None,
    pool: str | None = None,
    page_size: int | None = None,
    layout: KVLayout | None = None,
    joined_layers: bool = False,
) -> AttentionRuntime:
    """Detect, select, allocate: everything an engine needs to attend on this machine.

    spec: of all layers, with `num_layers`; or one for each layer. Layers may differ in masks and features, and share
        one KV cache.
    num_pages: pages that sequences can own; the pool holds one more, the null page.
    num_window_pages: gives the layers of each sliding window a pool of their own, of so many pages, in which sequences
        keep only what the window reaches; without it, such layers keep all pages, in the one pool.
    memory_bytes: instead of both, what all pools may take together. Layers with windows get what `max_num_seqs`
        sequences (256) need that extend by `max_new_tokens` tokens (8192) a step together, the others what is left.
    device: a kind ("cuda"), a torch device ("cuda:1", as a name or an object) or a platform; by default
        ANYATTN_PLATFORM, then the first usable device.
    backend: for both roles, or `prefill_backend` and `decode_backend` (several names: `plan` picks among them by
        priority at the batch's load); by default ANYATTN_ATTENTION_BACKEND,
        ANYATTN_PREFILL_BACKEND and ANYATTN_DECODE_BACKEND, then the best valid ones. Arguments beat the environment.
    page_size: tokens; by default ANYATTN_PAGE_SIZE, then what the chosen backends prefer.
    layout, allocator, pool: by default the best valid ones.
    joined_layers: all layers' parts of one page lie together, in one tensor, which moves pages in longer pieces.

    Raises SpecError, NoDeviceError, NoBackendError (with all reasons), PluginLoadError, and ContractError for a pool
    that does not fit into memory.
    """
    settings = Settings.from_env()
    size = _PoolSize.checked(num_pages, num_window_pages, memory_bytes, max_num_seqs, max_new_tokens)
    layers = checked_layers(spec, num_layers)
    if num_window_pages is not None and not any(layer.sliding_window for layer in layers):
        raise SpecError("num_window_pages is for layers with a sliding_window, and no layer has one.")
    preference = checked_preference(
        settings,
        backend=backend,
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        allocator=allocator,
        pool=pool,
        page_size=page_size,
        layout=layout,
        joined_layers=joined_layers,
    )
    plugins = plugin_manager(settings)
    wanted = checked_device(settings, device)
    detection = None
    if not isinstance(wanted, Platform):
        detection = detect(plugins)
        wanted = find_device(plugins, wanted, detection)
    platform = require_usable(wanted)
    _require_torch(platform)
    found = candidates(plugins, detection)
    selections = select_layers(layers, platform, found, preference)
    return _assemble(layers, selections, plugins, found, size, joined_layers=joined_layers, debug=settings.debug)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolSize:
    """What the caller said of the pools' sizes: pages, or bytes and what they are to be enough for."""

    num_pages: int | None
    num_window_pages: int | None
    memory_bytes: int | None
    max_num_seqs: int
    max_new_tokens: int

    @classmethod
    def checked(
        cls, num_pages: Any, num_window_pages: Any, memory_bytes: Any, max_num_seqs: Any, max_new_tokens: Any
    ) -> _PoolSize:
        """Raises SpecError unless pages are given, or bytes."""
        if (num_pages is None) == (memory_bytes is None) or (num_pages is None and num_window_pages is not None):
            raise SpecError("give num_pages (and num_window_pages), or memory_bytes.")
        if memory_bytes is None and (max_num_seqs, max_new_tokens) != (None, None):
            raise SpecError("max_num_seqs and max_new_tokens are for memory_bytes: num_pages says the size already.")
        return cls(
            num_pages=None if num_pages is None else positive_integer("num_pages", num_pages, most=MOST_PAGES),
            num_window_pages=None
            if num_window_pages is None
            else positive_integer("num_window_pages", num_window_pages, most=MOST_PAGES),
            memory_bytes=None if memory_bytes is None else positive_integer("memory_bytes", memory_bytes),
            max_num_seqs=positive_integer("max_num_seqs", 256 if max_num_seqs is None else max_num_seqs),
            max_new_tokens=positive_integer("max_new_tokens", 8192 if max_new_tokens is None else max_new_tokens),
        )

    def setting(self, group: CacheGroup) -> str:
        """The argument that says how large a group's pool is."""
        if self.memory_bytes is not None:
            return "memory_bytes"
        return "num_pages" if group.window is None else "num_window_pages"

    def pages(self, groups: Sequence[CacheGroup]) -> tuple[int, ...]:
        """Pages of each group's pool. Raises SpecError where memory_bytes are too few for one page of each."""
        if self.num_pages is not None:
            return (self.num_pages, *[self.num_window_pages or self.num_pages for _ in groups[1:]])
        pages = pages_for_memory(
            groups, self.memory_bytes or 0, num_seqs=self.max_num_seqs, max_new_tokens=self.max_new_tokens
        )
        if 0 in pages:
            least = memory_needed(groups, [1] * len(groups))
            raise SpecError(f"memory_bytes={self.memory_bytes} hold no page: {least} are the least for these layers.")
        if not groups[0].cache.num_layers:  # ids without bytes: what sequences have behind their windows
            pages = (max(pages[0], _FREE_OF_BYTES), *pages[1:])
        return tuple(min(count, MOST_PAGES) for count in pages)


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
    found: Candidates,
    size: _PoolSize,
    *,
    joined_layers: bool,
    debug: bool,
) -> AttentionRuntime:
    first = next(iter(selections.values()))
    page_size, device = first.page_size, first.platform.torch_device
    own_pools = size.num_window_pages is not None or size.memory_bytes is not None
    windows = sorted({spec.sliding_window for spec in layers if spec.sliding_window}) if own_pools else []
    numbers = [windows.index(spec.sliding_window) + 1 if spec.sliding_window in windows else 0 for spec in layers]
    places = [(number, numbers[:layer].count(number)) for layer, number in enumerate(numbers)]
    groups = [
        CacheGroup(
            cache=first.spec.cache_spec(
                num_layers=numbers.count(number), page_size=page_size, layout=first.layout, joined_layers=joined_layers
            ),
            window=window,
        )
        for number, window in enumerate([None, *windows])
    ]
    offers = plugins.attention_backends()
    backends = {}
    for spec, selection in selections.items():
        chosen = dict.fromkeys(name for role in ROLES for name in selection.backends(role))
        cache = groups[numbers[list(layers).index(spec)]].cache
        instances = {name: _make(offers[name], spec, cache, selection.platform) for name in chosen}
        backends[spec] = HybridBackend(selection, instances)
    num_pages = size.pages(groups)
    pools = [
        _make_pool(plugins.kv_pools()[first.pool], group.cache, pages, device, size.setting(group))
        for group, pages in zip(groups, num_pages, strict=True)
    ]
    offer = plugins.kv_allocators()[first.allocator]
    allocators: list[KVAllocator] = [_make(offer, pages, page_size, device, debug=debug) for pages in num_pages]
    table = PageTable(
        allocators[0],
        page_size,
        device=device,
        windows=[
            WindowPages(window, allocator, num_pages=num_pages[0], page_size=page_size)
            for window, allocator in zip(windows, allocators[1:], strict=True)
        ],
        debug=debug,
    )
    expansions = {
        spec: expansion
        for spec, selection in selections.items()
        if (expansion := _expansion(selection, found, offers)) is not None
    }
    return AttentionRuntime(layers, selections, backends, pools, table, places, expansions)


_SCRATCH_PAGE_SIZE = 128
"""Tokens in a page of expanded keys and values, where the backends take it: what kernels load at once."""


def _expansion(selection: Selection, found: Candidates, offers: Mapping[str, Offer]) -> Expansion | None:
    """What attends where MLA's keys and values are expanded: the named prefill backend, or else the best valid ones."""
    specs = expanded_specs(selection.spec) if selection.spec.is_mla else None
    if specs is None or selection.layout not in KV_LAYOUTS:  # vendors' orders have no view of a token's latent
        return None
    for name in dict.fromkeys([*selection.preference.backends("prefill"), None]):
        preference = Preference(prefill_backend=name, layout="NHD")
        try:
            chosen = select_layers(specs, selection.platform, found, preference)
            break
        except NoBackendError:  # of those that are named, not all serve heads of keys and values
            continue
    else:
        return None
    names = [chosen[spec].prefill for spec in specs]
    declared = {candidate.name: candidate.capabilities for candidate in found.backends}
    usual = all(_SCRATCH_PAGE_SIZE in declared[name].page_sizes for name in names)
    page_size = _SCRATCH_PAGE_SIZE if usual else chosen[specs[0]].page_size
    try:
        causal, whole = (
            _make(
                offers[name], spec, spec.cache_spec(num_layers=1, page_size=page_size, layout="NHD"), selection.platform
            )
            for name, spec in zip(names, specs, strict=True)
        )
    except AnyattnError as error:
        if preference.prefill_backend is not None:
            raise
        warnings.warn(
            f"prompts of MLA layers with up-projections will be absorbed, as {names[0]}, which attends to expanded "
            f"keys and values, cannot be made: {error}",
            stacklevel=4,
        )
        return None
    return Expansion(causal=causal, whole=whole, page_size=page_size, names=(names[0], names[1]))


def _make_pool(offer: Offer, cache: CacheSpec, num_pages: int, device: str, setting: str) -> KVPool:
    """A pool. Raises ContractError where there is no memory for it. setting: what the caller gave its size by."""
    if not cache.num_layers:
        return EmptyPool(cache, num_pages, device)
    try:
        pool: KVPool = _make(offer, cache, num_pages, device)
    except PluginLoadError:
        raise
    except (MemoryError, RuntimeError) as error:
        wanted = cache.bytes_per_page * (num_pages + 1)
        raise ContractError(
            f"a pool of {num_pages} pages takes {wanted / 2**30:.1f} GiB on {device}, which could not be had: {error}. "
            f"Give a smaller {setting}."
        ) from error
    return pool


def _make(offer: Offer, *arguments: Any, **named: Any) -> Any:
    """An instance of what is offered. What a plugin's constructor raises becomes a PluginLoadError with its name."""
    try:
        return contained(partial(offer.load(), **named), *arguments)
    except AnyattnError:
        raise
    except Exception as error:
        if offer.distribution == "anyattn":
            raise
        raise PluginLoadError(
            f"{offer.name!r} of {offer.distribution} cannot be made: {type(error).__name__}: {error}"
        ) from error
