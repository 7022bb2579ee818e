"""Which caches a pool must be able to keep, derived from what it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from anyattn.errors import SpecError
from anyattn.mem_cache.base import PoolCapabilities
from anyattn.mem_cache.spec import DSA_HEAD_DIM, DSA_V_HEAD_DIM, CacheKind, CacheSpec
from anyattn.types import DTYPE_BYTES, FP8_DTYPES, KVLayout

_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
_PAGE_SIZE = 16
_PAGE_SIZES = (1, 3, 64, 256)

_SIZES: dict[CacheKind, dict[str, int]] = {
    "mha": {"num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64},
    "mla": {"num_kv_heads": 1, "head_dim": 80, "v_head_dim": 64},
    "dsa": {"num_kv_heads": 1, "head_dim": DSA_HEAD_DIM, "v_head_dim": DSA_V_HEAD_DIM},
    "index": {"num_kv_heads": 1, "head_dim": 128, "v_head_dim": 0},
}
_OTHER_SIZES: dict[CacheKind, dict[str, dict[str, int]]] = {
    "mha": {
        "1 KV head": {"num_kv_heads": 1},
        "3 KV heads": {"num_kv_heads": 3},
        "head dims 192 and 128": {"head_dim": 192, "v_head_dim": 128},
        "head dims 48 and 96": {"head_dim": 48, "v_head_dim": 96},
        "head dims 80": {"head_dim": 80, "v_head_dim": 80},
        "head dims 256": {"head_dim": 256, "v_head_dim": 256},
    },
    "mla": {
        "latents of 512 and rope of 64": {"head_dim": 576, "v_head_dim": 512},
        "latents without rope": {"head_dim": 64, "v_head_dim": 64},
    },
    "dsa": {},
    "index": {"keys of 64": {"head_dim": 64}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCase:
    """One cache, its name, and the declared field that has it in the list.

    thorough: whether all that can be checked is checked with it; otherwise what depends on sizes.
    """

    name: str
    capability: str
    cache: CacheSpec
    thorough: bool = False


def base_dtype(capabilities: PoolCapabilities) -> str:
    """The dtype for all that does not depend on it."""
    return next(dtype for dtype in _DTYPES if dtype in capabilities.kv_dtypes)


def fp8_dtypes(capabilities: PoolCapabilities) -> list[str]:
    """Those whose elements are divided by scales that can be set."""
    return sorted(capabilities.kv_dtypes & FP8_DTYPES) if capabilities.kind in ("mha", "mla") else []


def cache_for(capabilities: PoolCapabilities, dtype: str, layout: KVLayout, **fields: Any) -> CacheSpec | None:
    """A cache of usual sizes but for these fields; None where there can be none such."""
    sizes = {"num_layers": 3, "page_size": _PAGE_SIZE, **_SIZES[capabilities.kind], **fields}
    try:
        return CacheSpec(kind=capabilities.kind, kv_dtype=dtype, layout=layout, **sizes)
    except SpecError:
        return None


def cases_for(capabilities: PoolCapabilities) -> Iterator[PoolCase]:
    """Every declared value at least once, and every dtype in every layout, as that may cut pages by element sizes."""
    base = base_dtype(capabilities)
    most_layouts = {base, *fp8_dtypes(capabilities)[:1]}

    def case(name: str, capability: str, *places: tuple[str, KVLayout], **fields: Any) -> Iterator[PoolCase]:
        """One, with the first dtype and layout that can have it."""
        thorough = bool(fields.pop("thorough", False))
        for dtype, layout in places:
            cache = cache_for(capabilities, dtype, layout, **fields)
            if cache is not None:
                yield PoolCase(name=name, capability=capability, cache=cache, thorough=thorough)
                return

    dtypes = sorted(capabilities.kv_dtypes, key=lambda dtype: (dtype != base, -DTYPE_BYTES[dtype], dtype))
    for dtype, layout in product(dtypes, capabilities.layouts):
        capability = "layouts" if dtype == base else "kv_dtypes"
        yield from case(f"{dtype}, {layout}", capability, (dtype, layout), thorough=dtype in most_layouts)
    if capabilities.joined_layers:
        for layout in capabilities.layouts:
            name = f"joined layers, {layout}"
            yield from case(name, "joined_layers", (base, layout), joined_layers=True, thorough=True)
        for dtype in dtypes[1:]:
            places = [(dtype, layout) for layout in capabilities.layouts]
            yield from case(f"joined layers, {dtype}", "joined_layers", *places, joined_layers=True)
    places = [(base, layout) for layout in capabilities.layouts]
    for page_size in _PAGE_SIZES:
        yield from case(f"page size {page_size}", "page_sizes", *places, page_size=page_size)
    for name, sizes in _OTHER_SIZES[capabilities.kind].items():
        yield from case(name, "head_dims", *places, **sizes)
