"""Checks of a pool's pages as they are made: how many, zeroed, in which shapes, where they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyattn.mem_cache.base import KVPool, LayerKV
from anyattn.mem_cache.spec import CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError
from anyattn.testing.pools.bench import NUM_PAGES, Bench, page_bytes
from anyattn.types import DTYPE_BYTES, KV_LAYOUTS

PoolCheck = Callable[[type[KVPool], Platform, CacheSpec, int], None]
"""Takes the tested class, the device, the cache and the seed."""


def _zeroed(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    dirt = [
        torch.full(((NUM_PAGES + 1) * count,), 0xFF, dtype=torch.uint8, device=device.torch_device)
        for count in (*page_bytes(cache), cache.bytes_per_page, *page_bytes(cache) * cache.num_layers)
    ]
    del dirt  # memory that was just given back is often the next to be had
    for number, part in enumerate(Bench(tested, device, cache, seed).storage()):
        used = part.any(-1).nonzero().flatten().tolist()
        if used:
            raise CheckFailedError(
                f"page {used[0]} of part {number} is not zero when the pool is made: kernels read past a sequence's "
                "end and multiply what lies there by 0, which leaves NaN what it is."
            )


def _counted(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    pool = bench.pool
    if pool.num_pages != NUM_PAGES:
        raise CheckFailedError(f"num_pages is {pool.num_pages} of a pool that was made with {NUM_PAGES}.")
    if len(pool.layers) != cache.num_layers:
        raise CheckFailedError(f"the pool has {len(pool.layers)} layers, and its cache {cache.num_layers}.")
    counts = {
        **{f"layer {i}'s {part}": len(getattr(kv, part)) for i, kv in enumerate(pool.layers) for part in ("k", "v")},
        **{f"part {i}": len(part) for i, part in enumerate(pool.parts())},
    }
    for what, count in counts.items():
        if count != NUM_PAGES + 1:
            raise CheckFailedError(
                f"{what} has {count} pages; {NUM_PAGES} that sequences can own and the null page are {NUM_PAGES + 1}."
            )


def _shaped(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    pool = bench.pool
    if pool.cache != cache:
        raise CheckFailedError(f"cache is {pool.cache} of a pool that was made with {cache}.")
    if pool.device != bench.device:
        raise CheckFailedError(
            f"device is {pool.device}, where tensors made on {device.torch_device} name {bench.device}."
        )
    dtype = torch.uint8 if cache.kind in ("dsa", "index") else getattr(torch, cache.kv_dtype)
    for number, kv in enumerate(pool.layers):
        if kv.layout != cache.layout:
            raise CheckFailedError(f"layer {number} has layout {kv.layout}, and the cache asks for {cache.layout}.")
        for name, part, shape in zip(_names(kv), kv.stored, cache.page_shapes(), strict=False):
            if part.shape[1:] != shape or part.dtype != dtype or part.device != bench.device:
                raise CheckFailedError(
                    f"layer {number}'s {name} has pages of {list(part.shape[1:])} {part.dtype} on {part.device}; "
                    f"layout {cache.layout} has {list(shape)} {dtype} on {bench.device}."
                )
            if not part[0].is_contiguous():
                raise CheckFailedError(
                    f"a page of layer {number}'s {name} has strides {part[0].stride()}, not packed: {list(shape)}."
                )
        if kv.v_in_k != (cache.kind != "mha"):
            raise CheckFailedError(f"layer {number} says v_in_k={kv.v_in_k} for a cache of kind {cache.kind}.")
        if len(kv.stored) != len(cache.page_shapes()):
            raise CheckFailedError(
                f"layer {number} stores {', '.join(_names(kv))}, where a cache of kind {cache.kind} in layout "
                f"{cache.layout} has {len(cache.page_shapes())} parts a layer."
            )


def _names(kv: LayerKV) -> list[str]:
    """Of what `kv.stored` gives."""
    return ["k", *([] if kv.v_in_k else ["v"]), *([] if kv.rope is None else ["rope"])]


def _apart(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    pool = Bench(tested, device, cache, seed).pool
    itemsize = 1 if cache.kind in ("dsa", "index") else DTYPE_BYTES[cache.kv_dtype]
    for number, kv in enumerate(pool.layers):
        for name, part, count in zip(_names(kv), kv.stored, page_bytes(cache), strict=False):
            wanted = cache.bytes_per_page if cache.joined_layers else count
            if part.stride(0) * itemsize != wanted:
                raise CheckFailedError(
                    f"pages of layer {number}'s {name} are {part.stride(0) * itemsize} bytes apart; with joined_layers="
                    f"{cache.joined_layers} they are {wanted}."
                )
    widths = [part.numel() // len(part) * part.dtype.itemsize for part in pool.parts()]
    wanted_widths = [cache.bytes_per_page] if cache.joined_layers else page_bytes(cache) * cache.num_layers
    if widths != wanted_widths:
        raise CheckFailedError(
            f"parts() are of {widths} bytes a page; with joined_layers={cache.joined_layers} the storage is "
            f"{wanted_widths}: layer by layer, keys before values, and once what several layers share."
        )
    for number, part in enumerate(pool.parts()):
        if not part[0].is_contiguous():
            raise CheckFailedError(f"a page of part {number} is not contiguous: its strides are {part[0].stride()}.")


def _values_in_keys(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)
    bench.fill()
    pages = torch.arange(NUM_PAGES + 1, device=bench.device)
    for number, kv in enumerate(bench.pool.layers):
        if kv.v.data_ptr() != kv.k.data_ptr():
            raise CheckFailedError(f"layer {number}'s values are not where its keys are, of which they are a part.")
        k, v = (part.cpu().view(torch.uint8) for part in kv.gather(pages))
        width = cache.v_head_dim * DTYPE_BYTES[cache.kv_dtype]
        if v.shape[-1] != width or not torch.equal(v, k[..., :width]):
            raise CheckFailedError(
                f"layer {number}'s values are not the first {cache.v_head_dim} elements of its keys."
            )
        if cache.layout in KV_LAYOUTS and kv.v.stride() != kv.k.stride():
            raise CheckFailedError(f"layer {number}'s values have strides {kv.v.stride()}, its keys {kv.k.stride()}.")


SHAPE_CHECKS: dict[str, PoolCheck] = {
    "a fresh pool is zero": _zeroed,
    "there are num_pages pages and the null page": _counted,
    "pages have the shape, dtype and layout of the cache": _shaped,
    "pages lie where the cache says": _apart,
}
"""By name; for each case."""

MLA_CHECKS: dict[str, PoolCheck] = {"values are a view of the keys": _values_in_keys}
"""By name; for each case of kind mla."""
