"""What a caller may ask of `create_runtime` and `survey`, checked, with the settings for what is not given."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from anyattn.attention.selection import Preference
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError
from anyattn.platforms.base import Platform
from anyattn.settings import Settings
from anyattn.types import ALL_LAYOUTS

_MOST_LAYERS = 1 << 16


def checked_preference(
    settings: Settings,
    *,
    backend: Any = None,
    prefill_backend: Any = None,
    decode_backend: Any = None,
    allocator: Any = None,
    pool: Any = None,
    page_size: Any = None,
    layout: Any = None,
    joined_layers: Any = False,
    installed_only: bool = False,
) -> Preference:
    """Arguments beat the settings, and those of one role beat `backend`. Raises SpecError for what means nothing."""
    both, prefill = (_name(n, v) for n, v in (("backend", backend), ("prefill_backend", prefill_backend)))
    decode = () if decode_backend is None else _names("decode_backend", decode_backend)
    if layout not in (None, *ALL_LAYOUTS):
        raise SpecError(f"layout must be {' or '.join(ALL_LAYOUTS)}, not {layout!r}.")
    if not isinstance(joined_layers, bool):
        raise SpecError(f"joined_layers must be True or False, not {joined_layers!r}.")
    return Preference(
        prefill_backend=prefill or both or settings.prefill_backend,
        decode_backends=decode or ((both,) if both else settings.decode_backends),
        allocator=_name("allocator", allocator),
        pool=_name("pool", pool),
        page_size=settings.page_size if page_size is None else positive_integer("page_size", page_size),
        layout=layout,
        joined_layers=joined_layers,
        installed_only=installed_only,
    )


def checked_device(settings: Settings, device: Any) -> Platform | str | None:
    """A platform, or the name of a device; None for any. A torch device is taken by its name."""
    if device is None:
        return settings.platform
    if isinstance(device, Platform):
        return device
    if not str(device).strip():
        raise SpecError("device must be a kind, a torch device, a simulated device or a platform, not ''.")
    return str(device).strip()


def checked_layers(spec: Any, num_layers: Any) -> tuple[AttentionSpec, ...]:
    """A spec for each layer. Raises SpecError when they are none, or cannot share a KV cache."""
    if isinstance(spec, AttentionSpec):
        if num_layers is None:
            raise SpecError("num_layers must be given with one spec for all layers; or give a spec for each layer.")
        return (spec,) * positive_integer("num_layers", num_layers, most=_MOST_LAYERS)
    specs = tuple(spec) if isinstance(spec, Iterable) else (spec,)
    if not all(isinstance(s, AttentionSpec) for s in specs):
        raise SpecError("spec must be an AttentionSpec, or a list of them with one for each layer.")
    if not specs or num_layers not in (None, len(specs)):
        wanted = "at least one layer" if num_layers is None else f"{num_layers} layers"
        raise SpecError(f"{len(specs)} specs were given for {wanted}: give one for each layer.")
    caches = [(s.cache_spec(num_layers=1, page_size=1, layout="NHD"), s.dtype) for s in specs]
    if odd := next((number for number, cache in enumerate(caches) if cache != caches[0]), None):
        raise SpecError(
            "layers that share a KV cache must have the same KV heads, head dims and dtypes, and sparse MLA has "
            f"rows of its own: layer 0 is [{specs[0]}], "
            f"layer {odd} is [{specs[odd]}]. Make a runtime for each kind."
        )
    return specs


def positive_integer(name: str, value: Any, *, most: int | None = None) -> int:
    """value as an int. Raises SpecError when it is none, or not from 1 to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1 or (most is not None and number > most):
        limits = "a positive integer" if most is None else f"an integer from 1 to {most}"
        raise SpecError(f"{name} must be {limits}, not {value!r}.")
    return number


def _name(argument: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise SpecError(f"{argument} must be a name, not {value!r}.")
    return value


def _names(argument: str, value: Any) -> tuple[str, ...]:
    """One name or several, in a list or separated by commas."""
    values = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    if all(isinstance(name, str) for name in values):
        values = [part.strip() for name in values for part in name.split(",")]
    if not values or not all(isinstance(name, str) and name for name in values):
        raise SpecError(f"{argument} must be a name or a list of names, not {value!r}.")
    return tuple(dict.fromkeys(values))
