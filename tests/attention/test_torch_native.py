"""torch_native on an accelerator, as far as that can be told without one."""

import dataclasses

import pytest
import torch

from anyattn import AttentionSpec
from anyattn.attention import torch_native
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.platforms.simulated import H200

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (1, 0), (0, 1), (8, 8)])
def test_the_flash_kernel_gets_rows_that_begin_at_multiples_of_16_bytes(monkeypatch, num_queries, gap, offset):
    """CUDA's kernel reads q in pieces of 16 bytes, and does not look whether it may."""
    seen = []

    def attend(q, k, v, **options):
        seen.append(q)
        return torch.zeros_like(q)

    monkeypatch.setattr(torch_native.F, "scaled_dot_product_attention", attend)
    cache = SPEC.cache_spec(num_layers=1, page_size=16, layout="NHD")
    backend = TorchNativeBackend(SPEC, cache, dataclasses.replace(H200, torch_device="cpu"))
    storage = torch.randn(num_queries * 4 * (64 + gap) + offset, dtype=torch.bfloat16)[offset:]
    q = storage.view(num_queries, 4, 64 + gap)[..., :64]
    k = torch.randn(9, 2, 64, dtype=torch.bfloat16)
    block = torch_native._Block(rows=slice(0), keys=slice(0), mask=None, distance=None, is_causal=False)
    assert backend._sdpa(q, k, k, block).shape == q.shape
    (given,) = seen
    assert torch_native._is_aligned(given)
    expected = q.reshape(1, 2, 2, 64) if num_queries == 1 else q.reshape(num_queries, 2, 2, 64).permute(1, 2, 0, 3)
    assert torch.equal(given, expected)
