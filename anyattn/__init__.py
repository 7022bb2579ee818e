"""anyattn stands between an LLM inference engine and its accelerator.

It says what machine this is, which attention kernels and KV-cache allocators are valid on it for the model at hand,
picks the best, and drives them through one contract. Public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyattn.attention.backend import AttentionBackend as AttentionBackend
    from anyattn.attention.batch import Batch as Batch
    from anyattn.attention.capabilities import Capabilities as Capabilities
    from anyattn.attention.merge import merge_states as merge_states
    from anyattn.attention.runtime import AttentionRuntime as AttentionRuntime
    from anyattn.attention.select import select as select
    from anyattn.attention.selection import Selection as Selection
    from anyattn.attention.spec import AttentionSpec as AttentionSpec
    from anyattn.discovery import current_platform as current_platform
    from anyattn.discovery import detect as detect
    from anyattn.dry_run import survey as survey
    from anyattn.errors import AnyattnError as AnyattnError
    from anyattn.errors import ContractError as ContractError
    from anyattn.errors import NoBackendError as NoBackendError
    from anyattn.errors import NoDeviceError as NoDeviceError
    from anyattn.errors import OutOfPagesError as OutOfPagesError
    from anyattn.errors import PluginLoadError as PluginLoadError
    from anyattn.errors import SpecError as SpecError
    from anyattn.errors import StorageError as StorageError
    from anyattn.mem_cache.base import AllocatorCapabilities as AllocatorCapabilities
    from anyattn.mem_cache.base import KVAllocator as KVAllocator
    from anyattn.mem_cache.base import KVPool as KVPool
    from anyattn.mem_cache.base import PoolCapabilities as PoolCapabilities
    from anyattn.mem_cache.file_tier import FileTier as FileTier
    from anyattn.mem_cache.host_tier import HostTier as HostTier
    from anyattn.mem_cache.prefix_cache import PrefixCache as PrefixCache
    from anyattn.mem_cache.transfer import export_sequence as export_sequence
    from anyattn.mem_cache.transfer import import_sequence as import_sequence
    from anyattn.platforms.base import Platform as Platform
    from anyattn.platforms.base import ProbeResult as ProbeResult
    from anyattn.plugins.hookspecs import hookimpl as hookimpl
    from anyattn.types import GraphLevel as GraphLevel
    from anyattn.wiring import create_runtime as create_runtime

_HOMES = {
    "AllocatorCapabilities": "anyattn.mem_cache.base",
    "AnyattnError": "anyattn.errors",
    "AttentionBackend": "anyattn.attention.backend",
    "AttentionRuntime": "anyattn.attention.runtime",
    "AttentionSpec": "anyattn.attention.spec",
    "Batch": "anyattn.attention.batch",
    "Capabilities": "anyattn.attention.capabilities",
    "ContractError": "anyattn.errors",
    "FileTier": "anyattn.mem_cache.file_tier",
    "GraphLevel": "anyattn.types",
    "HostTier": "anyattn.mem_cache.host_tier",
    "KVAllocator": "anyattn.mem_cache.base",
    "KVPool": "anyattn.mem_cache.base",
    "NoBackendError": "anyattn.errors",
    "NoDeviceError": "anyattn.errors",
    "OutOfPagesError": "anyattn.errors",
    "Platform": "anyattn.platforms.base",
    "PluginLoadError": "anyattn.errors",
    "PoolCapabilities": "anyattn.mem_cache.base",
    "PrefixCache": "anyattn.mem_cache.prefix_cache",
    "ProbeResult": "anyattn.platforms.base",
    "Selection": "anyattn.attention.selection",
    "SpecError": "anyattn.errors",
    "StorageError": "anyattn.errors",
    "create_runtime": "anyattn.wiring",
    "current_platform": "anyattn.discovery",
    "detect": "anyattn.discovery",
    "export_sequence": "anyattn.mem_cache.transfer",
    "hookimpl": "anyattn.plugins.hookspecs",
    "import_sequence": "anyattn.mem_cache.transfer",
    "merge_states": "anyattn.attention.merge",
    "select": "anyattn.attention.select",
    "survey": "anyattn.dry_run",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'anyattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
