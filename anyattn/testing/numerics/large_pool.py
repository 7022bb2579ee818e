"""Pages so far into a pool that their offsets, in elements, no longer fit 32 bits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import psutil
import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.platforms.base import Platform
from anyattn.testing.check import CannotRunError, Measured
from anyattn.testing.numerics.cases import Case
from anyattn.testing.numerics.driver import layer_kv, nan_for, run_step, runtime_around, set_scales
from anyattn.testing.numerics.inputs import PerHead, Step
from anyattn.testing.numerics.oracle import Oracle, compare
from anyattn.types import NULL_PAGE

_LARGEST = 2**31
"""The first element that a 32-bit offset does not reach."""

_STEPS = ((40, 3, 70), (5, 1, 2), (1, 1, 1))
_SPARE_PAGES = 8


class _LastPagesFirst(PagedAllocator):
    """Hands out the pool's last pages, in random order."""

    def __init__(self, num_pages: int, page_size: int, num_wanted: int, seed: int) -> None:
        super().__init__(num_pages, page_size)
        last = np.random.default_rng(seed).permutation(np.arange(num_pages - num_wanted, num_pages)) + 1
        self._free = np.concatenate([np.arange(1, num_pages - num_wanted + 1), last]).astype(np.int32)


def offsets_of_64_bits(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> Measured:
    """The steps' pages lie behind 2**31 elements; keys and values share a storage where that may be, to save memory.

    Raises CannotRunError where the memory is not there.
    """
    case = replace(case, steps=_STEPS, joined_layers=backend.capabilities.strided_pages)
    spec, page_size, generator = case.spec, case.page_size, torch.Generator().manual_seed(seed)
    page = spec.cache_spec(num_layers=3, page_size=page_size, layout=case.layout, joined_layers=case.joined_layers)
    shapes = page.page_shapes()
    apart = sum(map(math.prod, shapes)) * 3 if case.joined_layers else math.prod(shapes[0])
    num_wanted = sum(-(-sum(counts) // page_size) for counts in zip(*_STEPS, strict=True)) + _SPARE_PAGES
    num_pages = -(-_LARGEST // apart) + num_wanted
    layers = 3 if case.joined_layers else 1
    _require_memory(device, (num_pages + 1) * page.bytes_per_page * layers // 3)
    allocator = _LastPagesFirst(num_pages, page_size, num_wanted, seed)
    rt = runtime_around(backend, case, device, PageTable(allocator, page_size, device=device.torch_device))
    kv = layer_kv(rt, 0)
    for part in kv.stored:  # no other page: a host gives memory to pages that are written
        part[-num_wanted:].fill_(nan_for(part))
        part[NULL_PAGE].fill_(nan_for(part))
    oracle = Oracle(spec, case.num_seqs, *set_scales(rt, case)[0], page_size=page_size)
    per_head, seqs = PerHead.draw(spec, generator), rt.new_sequences(case.num_seqs)
    got, expected = [], []
    for counts in _STEPS:
        step = Step.draw(spec, counts, generator)
        got.append(run_step(rt, step, rt.plan(rt.extend(seqs, counts, tree_masks=step.tree_masks)), per_head))
        expected.append(oracle.expect(step, per_head, name=f"step {len(got) - 1}, on pages behind 2**31 elements"))
    return compare(got, expected)


def _require_memory(device: Platform, num_bytes: int) -> None:
    """Raises CannotRunError where it is not free, with room for a backend that copies the pool."""
    kind = torch.device(device.torch_device).type
    if kind == "cpu":
        free, wanted = psutil.virtual_memory().available, 3 * num_bytes
    else:
        wanted = num_bytes + (2 << 30)  # and workspaces
        try:
            free = torch.get_device_module(kind).mem_get_info(device.torch_device)[0]
        except (AttributeError, RuntimeError) as error:
            raise CannotRunError(f"{device} does not say how much of its memory is free: {error}") from error
    if free < wanted:
        raise CannotRunError(
            f"a pool of {num_bytes >> 30} GiB is wanted and {wanted >> 30} GiB must be free for it; {device} has "
            f"{free >> 30} GiB"
        )
