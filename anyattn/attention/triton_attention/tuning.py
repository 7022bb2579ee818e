"""Which tiles the kernels work with: one table an architecture, chosen from by facts, never by trying.

The figures of sm90 were measured (`benchmarks/triton_backend.py`); the others follow from these and from what the
architecture's shared memory holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel is cut.

    block_m, block_n: rows of queries, and keys that they meet at a time. stages: blocks of keys that are on their way
    or in use. per_core: programs that a multiprocessor runs at a time. least_keys: that a program is worth.
    """

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    per_core: int = 1
    least_keys: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """One architecture.

    shared_bytes: of a multiprocessor, as one program can have them. descriptors: whether blocks of keys come by TMA
    where a page holds them. native_fp8: whether its instructions convert from float8_e4m3fn and float8_e5m2.
    chained: whether a kernel may start before the one that it waits for has ended (programmatic dependent launch).
    shared_products: whether tensor cores read the operands of 64 rows and more from shared memory.
    short: by the most elements of a key or value, tiles of 16, 32 and 64 rows, for steps of few rows; long: of the
    others.
    """

    shared_bytes: int
    descriptors: bool = False
    native_fp8: bool = False
    chained: bool = False
    shared_products: bool = False
    short: dict[int, tuple[Tile, Tile, Tile]]
    long: dict[int, Tile]


def _tile(block_m: int, block_n: int, num_warps: int, stages: int, per_core: int = 1, least_keys: int = 128) -> Tile:
    return Tile(
        block_m=block_m, block_n=block_n, num_warps=num_warps, stages=stages, per_core=per_core, least_keys=least_keys
    )


_SM90 = Tuning(
    shared_bytes=227 << 10,
    descriptors=True,
    native_fp8=True,
    chained=True,
    shared_products=True,
    short={
        64: (_tile(16, 128, 4, 3, 2, 128), _tile(32, 128, 4, 3, 2, 128), _tile(64, 128, 4, 3, 2, 128)),
        128: (_tile(16, 64, 4, 3, 2, 64), _tile(32, 64, 4, 3, 2, 64), _tile(64, 64, 4, 3, 2, 64)),
        256: (_tile(16, 64, 4, 2, 1, 64), _tile(32, 64, 4, 2, 1, 64), _tile(64, 64, 4, 2, 1, 64)),
        1024: (_tile(16, 32, 4, 3, 2, 64), _tile(32, 64, 8, 3, 1, 64), _tile(64, 64, 8, 2, 1, 64)),
    },
    long={
        64: _tile(128, 64, 4, 3, 2),
        128: _tile(64, 64, 4, 3, 2),
        256: _tile(64, 64, 8, 2),
        1024: _tile(64, 64, 8, 2),
    },
)

_SM80 = Tuning(
    shared_bytes=163 << 10,
    short={
        128: (_tile(16, 64, 4, 3, 2), _tile(32, 64, 4, 3, 2), _tile(64, 64, 4, 2, 1)),
        256: (_tile(16, 32, 4, 3, 2), _tile(32, 32, 4, 3, 2), _tile(64, 32, 4, 2, 1)),
        1024: (_tile(16, 32, 4, 2, 2), _tile(32, 32, 8, 2, 1), _tile(64, 32, 8, 2, 1)),
    },
    long={
        64: _tile(128, 64, 4, 2, 2),
        128: _tile(128, 64, 8, 2),
        256: _tile(64, 32, 4, 2),
        1024: _tile(64, 32, 8, 2),
    },
)

_SM86 = replace(  # what a wide accumulator takes of shared memory, when it changes its layout, does not fit
    _SM80,
    shared_bytes=99 << 10,
    short={**_SM80.short, 1024: (_tile(16, 32, 4, 2, 1),) * 3},
    long={**_SM80.long, 1024: _tile(16, 32, 4, 2)},
)
_SM89 = replace(_SM86, native_fp8=True)

TUNINGS: dict[str, Tuning] = {
    "sm80": _SM80,
    "sm86": _SM86,
    "sm89": _SM89,
    "sm90": _SM90,
    "sm100": _SM90,
    "sm103": _SM90,
    "sm120": replace(_SM89, descriptors=True, chained=True),
    "sm121": replace(_SM89, descriptors=True, chained=True),
    "gfx942": replace(_SM86, shared_bytes=64 << 10),
    "gfx950": replace(_SM80, shared_bytes=160 << 10),
    "pvc": replace(_SM80, shared_bytes=128 << 10),
    "bmg_g21": replace(_SM86, shared_bytes=64 << 10),
    "bmg_g31": replace(_SM86, shared_bytes=64 << 10),
}
"""By `Platform.arch`."""


def fitted(tile: Tile, tuning: Tuning, key_bytes: int, query_bytes: int, *, exact: bool = False) -> Tile:
    """The tile with as many stages, then as large blocks, as shared memory holds.

    key_bytes: of one key and its value, as they are multiplied. query_bytes: of one row of queries. exact: whether the
    products are float32's, without tensor cores.
    """
    stages, block_n = tile.stages, tile.block_n
    limit = tuning.shared_bytes - tile.block_m * query_bytes - 2048
    # Products that read shared memory themselves hold a block longer than those that read registers.
    held = 0 if exact or (tuning.shared_products and tile.block_m >= 64) else 1
    while stages > 1 and max(stages - held, 1) * block_n * key_bytes > limit:
        stages -= 1
    while block_n > 16 and max(stages - held, 1) * block_n * key_bytes > limit:
        block_n //= 2
    return replace(tile, stages=stages, block_n=block_n)
