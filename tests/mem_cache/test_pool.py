"""Pools: every storage dtype and layout reads back what was stored, and nothing else changes."""

import pytest
import torch

from anyattn.errors import ContractError, SpecError
from anyattn.mem_cache.pool import MHAPool, MLAPool, dequantize, quantize
from anyattn.mem_cache.spec import CacheSpec

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def cache_spec(**fields):
    base = {
        "num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "v_head_dim": 5, "kv_dtype": "float32", "page_size": 4
    }  # fmt: skip
    return CacheSpec(**{**base, **fields})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stored_token_is_read_at_its_slot_and_no_other_slot_changes(dtype, layout):
    cache = cache_spec(kv_dtype=dtype, layout=layout)
    pool = MHAPool(cache, 6, "cpu")
    slots = torch.tensor([27, 4, 9, 15])
    k, v = torch.randn(4, 3, 8), torch.randn(4, 3, 5)
    pool.store(1, k, v, slots)
    for pages, new in zip(pool.layers[1].nhd(), (k, v), strict=True):
        assert pages.shape == (7, 4, 3, new.shape[-1])
        flat = pages.flatten(0, 1).float()
        assert torch.equal(flat[slots], quantize(new, 1.0, pages.dtype).float())
        rest = torch.ones(28, dtype=torch.bool)
        rest[slots] = False
        assert not flat[rest].any()
    assert not pool.layers[0].k.float().any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_mla_values_are_a_view_of_the_keys(layout):
    pool = MLAPool(cache_spec(num_kv_heads=1, v_head_dim=6, mla=True, layout=layout), 6, "cpu")
    latent = torch.randn(2, 8)
    pool.store(0, latent, None, torch.tensor([5, 12]))
    k, v = pool.layers[0].nhd()
    assert torch.equal(k.flatten(0, 1)[[5, 12], 0], latent)
    assert torch.equal(v.flatten(0, 1)[[5, 12], 0], latent[:, :6])
    assert v.data_ptr() == k.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates_where_torch_would_give_nan_or_inf(dtype):
    largest = torch.finfo(dtype).max
    stored = quantize(torch.tensor([1e9, -1e9, largest, 1.0]), 1.0, dtype).float()
    assert stored.tolist() == [largest, -largest, largest, 1.0]


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)])
def test_what_is_read_is_the_stored_value_times_the_scale(scale):
    x = torch.tensor([0.5, -100.0, 3.0])
    stored = quantize(x, scale, torch.float8_e4m3fn)
    assert stored.float().tolist() == [2.0, -384.0, 12.0]  # -400 lies between two values; ties go to even
    assert torch.allclose(dequantize(stored, scale, torch.float32), x, rtol=2**-4)


def test_a_scale_of_zero_of_several_elements_or_of_another_dtype_is_refused():
    pool = MHAPool(cache_spec(kv_dtype="float8_e4m3fn"), 2, "cpu")
    for scale in (0.0, -1.0, torch.ones(3), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")):
        with pytest.raises(ContractError, match="scale"):
            pool.set_scales(0, scale, 1.0)
    mla = MLAPool(cache_spec(num_kv_heads=1, v_head_dim=6, mla=True), 2, "cpu")
    with pytest.raises(ContractError, match="same"):
        mla.set_scales(0, 1.0, 2.0)


def test_bytes_per_token_counts_keys_and_values_once_each_and_mla_latents_once():
    assert cache_spec(kv_dtype="bfloat16").bytes_per_token == 2 * 3 * (8 + 5) * 2
    mla = CacheSpec(
        num_layers=61, num_kv_heads=1, head_dim=576, v_head_dim=512, kv_dtype="bfloat16", page_size=64, mla=True
    )
    assert mla.bytes_per_token == 61 * 576 * 2
    pages = mla.pages_for_bytes(1 << 30)
    assert (pages + 1) * mla.bytes_per_page <= 1 << 30 < (pages + 2) * mla.bytes_per_page
    assert mla.pages_for_bytes(0) == 0


@pytest.mark.parametrize(
    "fields", [{"num_layers": 0}, {"page_size": 0}, {"head_dim": -1}, {"kv_dtype": "int8"}, {"layout": "DNH"}]
)
def test_a_cache_spec_that_means_nothing_is_refused(fields):
    with pytest.raises(SpecError, match=next(iter(fields))):
        cache_spec(**fields)


def test_scales_are_refused_where_the_pool_is_not_fp8():
    with pytest.raises(ContractError, match="only fp8 KV has scales"):
        MHAPool(cache_spec(kv_dtype="bfloat16"), 2, "cpu").set_scales(0, 0.5, 0.5)


def test_a_scale_of_one_dimension_widens_nothing():
    pool = MHAPool(cache_spec(kv_dtype="float8_e4m3fn"), 2, "cpu")
    pool.set_scales(0, torch.full((1,), 0.5), torch.full((1, 1), 0.5))
    kv = pool.layers[0]
    assert dequantize(kv.k, kv.k_scale, torch.bfloat16).dtype == torch.bfloat16
