"""The hooks that a plugin implements. Each returns names and where to find them: {"name": "package.module:attribute"}.

A plugin is a module or object named by an entry point of the group `anyattn.plugins`. It states the contract it was
written for, `contract_version = 1`, and implements any of these hooks with `@anyattn.hookimpl`. Nothing behind a
dotted name is imported before it is needed. Probes run in threads of their own, and have a time limit.
"""

from __future__ import annotations

import pluggy

PROJECT = "anyattn"
ENTRY_POINT_GROUP = "anyattn.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def anyattn_platforms() -> dict[str, str]:  # type: ignore[empty-body]
    """Probes by device kind; each is a function without arguments that returns a `ProbeResult`.

    All devices of a probe are of the kind that it is offered for, and each has a torch device of its own; what is
    neither is left out and reported. Probes run side by side, under one time limit.
    """


@hookspec
def anyattn_attention_backends() -> dict[str, str]:  # type: ignore[empty-body]
    """Attention backends by name; each is a subclass of `AttentionBackend`."""


@hookspec
def anyattn_kv_allocators() -> dict[str, str]:  # type: ignore[empty-body]
    """KV allocators by name; each is a subclass of `KVAllocator`."""


@hookspec
def anyattn_kv_pools() -> dict[str, str]:  # type: ignore[empty-body]
    """KV pools by name; each is a subclass of `KVPool`."""


@hookspec
def anyattn_simulated_devices() -> dict[str, str]:  # type: ignore[empty-body]
    """Facts of hardware that is not here, by name; each is a `Platform` with `simulated=True`."""
