"""Tails zeroed by Triton against the same by torch."""

import numpy as np
import pytest
import torch

from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.kernels import tails
from anyattn.mem_cache.kernels.tails import TailZeroer

NUM_PAGES = 7


def layer(layout, page_size, heads, dims, dtype, *, apart=0, seed=0):
    """Pages of random numbers that are `apart` elements more than their size from each other; MLA's with one dim."""
    generator, made = torch.Generator().manual_seed(seed), []
    for dim in dims:
        shape = (page_size, heads, dim) if layout == "NHD" else (heads, page_size, dim)
        flat = torch.rand(NUM_PAGES, page_size * heads * dim + apart, generator=generator).add_(1).to(dtype)
        made.append(flat[:, : page_size * heads * dim].view(NUM_PAGES, *shape))
    return LayerKV(k=made[0], v=made[-1], layout=layout, v_in_k=len(dims) == 1)


def on_device(kv, device):
    k = kv.k.to(device) if kv.k.is_contiguous() else moved_apart(kv.k, device)
    v = k if kv.v_in_k else kv.v.to(device) if kv.v.is_contiguous() else moved_apart(kv.v, device)
    return LayerKV(k=k, v=v, layout=kv.layout, v_in_k=kv.v_in_k)


def moved_apart(pages, device):
    flat = torch.empty(NUM_PAGES, pages.stride(0), dtype=pages.dtype, device=device)
    there = flat[:, : pages[0].numel()].view(pages.shape)
    return there.copy_(pages)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("page_size", "heads", "dims", "dtype", "apart"),
    [
        (64, 1, (576,), torch.bfloat16, 0), (16, 4, (64, 32), torch.float16, 8), (3, 2, (5, 7), torch.float16, 3),
        (5, 3, (16, 16), torch.float8_e4m3fn, 0), (32, 2, (128, 128), torch.float32, 0),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_is_zero_as_torch_makes(layout, page_size, heads, dims, dtype, apart, device, monkeypatch):
    here = [layer(layout, page_size, heads, dims, dtype, apart=apart, seed=seed) for seed in range(3)]
    there = [on_device(kv, device) for kv in here]
    pages, used = np.array([5, 1, 2]), np.array([1, page_size - 1, page_size // 2 + 1])
    TailZeroer(there)(pages, used)
    monkeypatch.setattr(tails, "triton_runs_on", lambda device: False)
    TailZeroer(here)(pages, used)
    for kv, same in zip(there, here, strict=True):
        for part, wanted in zip((kv.k, kv.v), (same.k, same.v), strict=True):
            assert torch.equal(part.cpu().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
            nhd = wanted.float() if layout == "NHD" else wanted.float().transpose(1, 2)
            kept = (nhd != 0).flatten(2).all(-1)
            expected = torch.ones(NUM_PAGES, page_size, dtype=torch.bool)
            for page, count in zip(pages, used, strict=True):
                expected[page, count:] = False
            assert torch.equal(kept, expected)
