"""What stored bytes mean, and whether they are what was to be stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anyattn.mem_cache.pool import quantize
from anyattn.mem_cache.sparse_pools import dsa_rows, index_keys
from anyattn.mem_cache.spec import DSA_V_HEAD_DIM, CacheSpec

# Of a pool that makes its scales itself: one unit in the last place of float8_e4m3fn, as a quotient may be rounded to
# either neighbour where a pool multiplies with a reciprocal. Below the smallest normal value units are of one size.
_FP8_UNIT = 2.0**-3
_FP8_LEAST_UNIT = 2.0**-9
_FP8_MOST = 448.0
_BFLOAT16_UNIT = 2.0**-7

TILE = 128
"""Elements of a "dsa" row that have one scale."""


class Compared(NamedTuple):
    """What is read, what should be, and where they differ by more than is allowed: [num_tokens, num_kv_heads, dim]."""

    read: torch.Tensor
    wanted: torch.Tensor
    wrong: torch.Tensor


def compared(cache: CacheSpec, stored: torch.Tensor, given: torch.Tensor, scale: torch.Tensor | float) -> Compared:
    """stored: [num_tokens, num_kv_heads, bytes]. given: [num_tokens, num_kv_heads, dim], what went into `store`.

    What is just moved has the same bits; what is converted or divided may be the next number of its dtype.
    """
    if cache.kind == "dsa":
        return _compared_tiles(dsa_rows(stored), given, DSA_V_HEAD_DIM, TILE)
    if cache.kind == "index":  # a token's bytes are as those of a page of one token
        return _compared_tiles(index_keys(stored[:, :, None]), given, cache.head_dim, cache.head_dim)
    dtype: torch.dtype = getattr(torch, cache.kv_dtype)
    read, wanted = stored.contiguous().view(dtype), quantize(given, scale, dtype)
    moved = given.dtype == dtype and isinstance(scale, float) and scale == 1.0
    wrong = (_ordinals(read) - _ordinals(wanted)).abs() > (0 if moved else 1)
    # There are many NaN, which are all the same.
    read, wanted = read.double(), wanted.double()
    return Compared(read, wanted, torch.where(wanted.isnan(), ~read.isnan(), wrong | read.isnan()))


def _compared_tiles(read: torch.Tensor, given: torch.Tensor, quantised: int, tile: int) -> Compared:
    """quantised: elements that tiles of fp8 have; behind them are bfloat16."""
    wanted = given.float()
    tiles = torch.unflatten(wanted[..., :quantised], -1, (-1, tile))
    units = tiles.abs() * _FP8_UNIT + tiles.abs().amax(-1, keepdim=True) / _FP8_MOST * _FP8_LEAST_UNIT
    rest = wanted[..., quantised:]
    allowed = torch.cat([units.flatten(-2), rest.abs() * (0 if given.dtype == torch.bfloat16 else _BFLOAT16_UNIT)], -1)
    wrong = ~((read - wanted).abs() <= allowed)
    # A tile with a NaN in it has a scale of NaN.
    spoilt = torch.cat([tiles.isnan().any(-1, keepdim=True).expand(tiles.shape).flatten(-2), rest.isnan()], -1)
    return Compared(read, wanted, torch.where(spoilt, ~read.isnan(), wrong))


def _ordinals(values: torch.Tensor) -> torch.Tensor:
    """Integers that count a dtype's values in their order: neighbours differ by 1."""
    bits = 8 * values.dtype.itemsize
    integers = values.view({8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]).long()
    return torch.where(integers < 0, -(integers & ((1 << (bits - 1)) - 1)), integers)
