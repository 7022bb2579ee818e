"""A check of a pool so large that 31 bits cannot count the elements of one layer's keys."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from anyattn.mem_cache.base import KVPool
from anyattn.mem_cache.spec import CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CannotRunError, CheckFailedError
from anyattn.testing.device import free_bytes
from anyattn.testing.pools.bench import Bench
from anyattn.testing.pools.shapes import PoolCheck

_PAGE_SIZE = 64
_LARGE_HEADS: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
_STAYS_FREE = 12 << 30
"""Bytes beside the pool: others use the device too."""


def _far(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    sizes = _LARGE_HEADS if cache.kind == "mha" else {}
    cache = dataclasses.replace(cache, num_layers=1, page_size=_PAGE_SIZE, **sizes)
    last = 2**31 // math.prod(cache.page_shapes()[0]) + 50
    _require_memory(device, (last + 1) * cache.bytes_per_page)
    bench = Bench(tested, device, cache, seed, num_pages=last)
    middle, copy = last // 2, 2
    offsets = {1: [0], middle: [7], last: [5, _PAGE_SIZE - 1]}
    slots = torch.tensor([page * _PAGE_SIZE + offset for page, listed in offsets.items() for offset in listed])
    tokens = bench.tokens(len(slots))
    bench.store(0, tokens, slots)
    bench.pool.copy_pages(*(torch.tensor([page], device=bench.device) for page in (last, copy)))
    places = [*slots.tolist(), *(copy * _PAGE_SIZE + offset for offset in offsets[last])]
    order = [0, 1, 2, 3, 2, 3]  # of the tokens that are to be found there
    offsets[copy] = offsets[last]
    # Pages that a wrapped offset would hit are among the last ones' neighbours and the first ones.
    empty = [page for page in (0, 3, 49, 50, 51, middle + 1, last - 51, last - 50, last - 1) if page not in offsets]
    for number, given in enumerate(tokens.parts()):
        what = "values" if number else "keys"
        for place, token in zip(places, order, strict=True):
            page, offset = divmod(place, _PAGE_SIZE)
            rows = bench.rows(0, torch.tensor([page], device=bench.device))[number][0]
            bench.must_be(rows[[offset]], given[[token]], 1.0, torch.tensor([place]), what)
            if int(rows.flatten(1).any(-1).sum()) != len(offsets[page]):
                raise CheckFailedError(f"page {page} of {last} has {what} where no token was stored.")
        used = bench.rows(0, torch.tensor(empty, device=bench.device))[number].flatten(1).any(-1)
        if used.any():
            page = empty[int(used.nonzero()[0])]
            raise CheckFailedError(f"page {page} of {last} has {what}, and no token was stored there.")


def _require_memory(device: Platform, needed: int) -> None:
    free = free_bytes(device)
    if free is None or free < needed + _STAYS_FREE:
        had = "how much is free there nobody can tell" if free is None else f"{free / 2**30:.1f} GiB are free"
        raise CannotRunError(
            f"such a pool takes {needed / 2**30:.1f} GiB on {device}, where {_STAYS_FREE >> 30} GiB more are to stay "
            f"free; {had}."
        )


FAR_CHECKS: dict[str, PoolCheck] = {"offsets beyond 31 bits are right": _far}
"""By name; for a case of each layout."""
