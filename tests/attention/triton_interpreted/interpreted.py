"""The `triton` backend on the CPU, with few multiprocessors.

Tests load this file by its path, as folders of tests are no packages.
"""

import dataclasses

from anyattn.attention.triton_attention import tuning
from anyattn.attention.triton_attention.backend import TritonBackend
from anyattn.platforms.base import Platform

DTYPES = frozenset({"float16", "float32"})  # the interpreter computes products of bfloat16 wrongly
CPU = Platform(kind="cpu", vendor="", name="", arch="interpreted", torch_device="cpu", num_cores=3)


def _small(tile):
    """As many programs at a time, and fewer keys a block, so that short sequences have many blocks."""
    return dataclasses.replace(tile, block_n=16, least_keys=32, per_core=2)


_SM90 = tuning.TUNINGS["sm90"]
TUNING = dataclasses.replace(
    _SM90,
    chained=False,
    short={most: tuple(map(_small, tiles)) for most, tiles in _SM90.short.items()},
    long={most: _small(tile) for most, tile in _SM90.long.items()},
)


class InterpretedTriton(TritonBackend):
    """Declared for what the interpreter computes right."""

    capabilities = dataclasses.replace(
        TritonBackend.capabilities,
        device_kinds=frozenset({"cpu"}),
        archs=None,
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        run_on=frozenset(),
        contract_tested_on=frozenset(),
    )
