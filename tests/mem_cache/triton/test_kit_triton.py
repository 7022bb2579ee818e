"""The compliance kit's memory tier on what stores, moves and books pages with Triton kernels."""

import dataclasses

import pytest
import torch

from anyattn.mem_cache.device_allocator import DeviceAllocator
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.platforms.base import Platform
from anyattn.testing.allocators import checks as allocators
from anyattn.testing.check import CannotRunError
from anyattn.testing.pools import checks as pools

INEXACT = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"})
"""What the interpreter rounds otherwise than a GPU does."""


def interpreted(pool):
    """The pool, declared for what the interpreter computes right."""
    declared = pool.capabilities
    dtypes = declared.kv_dtypes - (INEXACT if not torch.accelerator.is_available() else frozenset())
    fields = {"capabilities": dataclasses.replace(declared, kv_dtypes=dtypes, per_head_scales=False)}
    return type(pool.__name__, (pool,), fields)


@pytest.fixture(scope="module")
def platform(device):
    return Platform(kind=device.type, vendor="", name="", arch="", torch_device=str(device))


TESTED = {"DeviceAllocator": DeviceAllocator, "MHAPool": interpreted(MHAPool), "MLAPool": interpreted(MLAPool)}
ROOMS = {"DeviceAllocator": allocators, "MHAPool": pools, "MLAPool": pools}
ON_ANY = Platform(kind="cpu", vendor="", name="", arch="", torch_device="cpu")


def names():
    """One check of each title, as the interpreter is slow; the titles end where the first size or dtype is named."""
    for name, tested in TESTED.items():
        titles = {check.name.partition(",")[0]: check.name for check in ROOMS[name].checks(tested, ON_ANY)}
        yield from ((name, check_name) for check_name in titles.values())



@pytest.mark.parametrize(("tested", "name"), list(names()))
def test_the_memory_tier_holds(platform, tested, name):
    (check,) = (each for each in ROOMS[tested].checks(TESTED[tested], platform) if each.name == name)
    try:
        check.run(20)
    except CannotRunError as reason:
        pytest.skip(str(reason))
