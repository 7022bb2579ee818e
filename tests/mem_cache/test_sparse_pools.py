"""The pools of DeepSeek sparse attention: bytes where kernels look for them, and numbers within fp8's rounding."""

import random
import struct

import numpy as np
import pytest
import torch

from anyattn.errors import ContractError
from anyattn.mem_cache.pool import quantize
from anyattn.mem_cache.sparse_pools import DSAPool, IndexKPool, dsa_rows, index_keys
from anyattn.mem_cache.spec import CacheSpec

E4M3 = torch.float8_e4m3fn
TINY = 2.0**-126
FIELDS = {"num_layers": 2, "num_kv_heads": 1, "kv_dtype": "float8_e4m3fn", "page_size": 4}


def dsa_pool(num_pages=5, **fields):
    return DSAPool(
        CacheSpec(**{**FIELDS, "kind": "dsa", "head_dim": 576, "v_head_dim": 512, **fields}), num_pages, "cpu"
    )


def index_pool(num_pages=5, head_dim=128, **fields):
    cache = CacheSpec(**{**FIELDS, "kind": "index", "head_dim": head_dim, "v_head_dim": 0, **fields})
    return IndexKPool(cache, num_pages, "cpu")


def slots_for(pool, count):
    page_size = pool.cache.page_size
    return random.sample(range(page_size, page_size * (pool.num_pages + 1)), count)


def numbers(row, first, count, code):
    """Numbers of a row of bytes, little-endian, as `struct` reads them."""
    return list(struct.unpack_from(f"<{count}{code}", bytes(row.tolist()), first))


def expected_tile(values):
    """The bytes of one tile, and its scale, in float32 arithmetic of one number at a time."""
    scale = max(np.float32(values.abs().max()) / np.float32(448), np.float32(TINY))
    return quantize(values.float() / torch.tensor(scale), 1.0, E4M3).view(torch.uint8), float(scale)


@pytest.mark.parametrize("joined", [False, True], ids=["per-layer", "joined"])
def test_a_row_has_fp8_latents_then_four_scales_then_rope_in_bfloat16(joined):
    pool = dsa_pool(joined_layers=joined)
    rows, slots = torch.randn(6, 576) * torch.tensor([1e-3, 1.0, 50.0, 1e4, 1e-8, 3.0])[:, None], slots_for(pool, 6)
    pool.store(1, rows, None, torch.tensor(slots))
    kv = pool.layers[1]
    assert kv.k.shape == (6, 4, 1, 656)
    assert kv.v.data_ptr() == kv.k.data_ptr()
    for row, slot in zip(rows, slots, strict=True):
        stored = kv.k[slot // 4, slot % 4, 0]
        for tile in range(4):
            fp8, scale = expected_tile(row[tile * 128 : tile * 128 + 128])
            assert torch.equal(stored[tile * 128 : tile * 128 + 128], fp8)
            assert numbers(stored, 512 + 4 * tile, 1, "f") == [scale]
        rope = row[512:].bfloat16().view(torch.int16).tolist()
        assert numbers(stored, 528, 64, "h") == rope
    assert int(kv.k.any(-1).sum()) == 6
    assert not pool.layers[0].k.any()


def test_dsa_rows_are_read_as_they_were_stored_but_for_rounding():
    pool = dsa_pool()
    rows, slots = torch.randn(6, 576) * 10, slots_for(pool, 6)
    pool.store(0, rows, None, torch.tensor(slots))
    read = dsa_rows(pool.layers[0].k.flatten(0, 2)[slots])
    assert read.shape == (6, 576)
    assert read.dtype == torch.float32
    largest = rows[:, :512].unflatten(1, (4, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    # Three bits of fraction, and below the smallest normal value steps of 2**-9 of what 448 stands for.
    allowed = rows[:, :512].abs() * 2**-4 + largest / 448 * 2**-10
    assert ((read[:, :512] - rows[:, :512]).abs() <= allowed * (1 + 1e-6)).all()
    assert torch.equal(read[:, 512:], rows[:, 512:].bfloat16().float())
    gathered, values = pool.layers[0].gather(torch.tensor([slots[0] // 4]))
    assert torch.equal(dsa_rows(gathered[0, slots[0] % 4, 0]), read[0])
    assert torch.equal(values, gathered)


def test_latents_and_rope_apart_strided_and_of_any_float_dtype_are_stored_as_when_joined():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        one, other = dsa_pool(), dsa_pool()
        rows, slots = torch.randn(5, 1152).to(dtype)[:, ::2], torch.tensor(slots_for(one, 5))
        one.store(0, rows.contiguous(), None, slots)
        other.store(0, rows[:, :512], rows[:, 512:], slots)
        assert torch.equal(one.layers[0].k, other.layers[0].k)
        assert one.layers[0].k.any()


@pytest.mark.parametrize("joined", [False, True], ids=["per-layer", "joined"])
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 128), (1, 128), (3, 20)])
def test_an_index_page_has_all_keys_then_all_scales(page_size, head_dim, joined):
    pool = index_pool(page_size=page_size, head_dim=head_dim, joined_layers=joined, num_pages=7)
    keys, slots = torch.randn(6, head_dim) * torch.rand(6, 1).mul(20).sub(10).exp2(), slots_for(pool, 6)
    pool.store(1, keys, None, torch.tensor(slots))
    kv = pool.layers[1]
    assert kv.k.shape == (8, page_size, 1, head_dim + 4)
    assert kv.v.numel() == 0
    pages = kv.k.flatten(1)
    read = index_keys(kv.k).flatten(0, 1)
    for key, slot in zip(keys, slots, strict=True):
        page, offset = pages[slot // page_size], slot % page_size
        fp8, scale = expected_tile(key)
        assert torch.equal(page[offset * head_dim : offset * head_dim + head_dim], fp8)
        assert numbers(page, page_size * head_dim + 4 * offset, 1, "f") == [scale]
        assert torch.equal(read[slot], fp8.view(E4M3).float() * scale)
    assert int(read.any(-1).sum()) == 6
    assert not pool.layers[0].k.any()


@pytest.mark.parametrize("make", [dsa_pool, index_pool])
def test_tokens_of_the_null_page_are_not_stored(make):
    pool = make()
    width = pool.cache.head_dim
    new = torch.randn(5, width)
    new[[0, 2, 4]] = torch.nan
    pool.store(0, new, None, torch.tensor([0, 9, 0, 5, 3]))
    alone = make()
    alone.store(0, new[[1, 3]], None, torch.tensor([9, 5]))
    assert torch.equal(pool.layers[0].k, alone.layers[0].k)
    pool.store(0, new[:0], None, torch.empty(0, dtype=torch.int64))


def test_zeros_stay_zero_and_no_tile_is_spoilt_by_another():
    pool = dsa_pool()
    rows = torch.randn(3, 576)
    rows[0] = 0
    rows[1, 130] = torch.nan  # in the second tile
    rows[2, 400], rows[2, 520] = torch.inf, torch.nan
    pool.store(0, rows, None, torch.tensor([4, 5, 6]))
    read = dsa_rows(pool.layers[0].k[1, :3, 0])
    assert torch.equal(read[0], torch.zeros(576))
    assert read[1, 128:256].isnan().all()
    assert read[1, :128].isfinite().all()
    assert read[1, 256:].isfinite().all()
    assert not read[2, 384:512].isfinite().any()
    assert read[2, :384].isfinite().all()
    assert read[2, 520].isnan()
    assert torch.equal(read[2, 521:], rows[2, 521:].bfloat16().float())


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-37])
def test_numbers_too_small_for_a_scale_become_zero_or_themselves_never_nan(tiny):
    pool = index_pool()
    key = torch.zeros(1, 128)
    key[0, 7] = tiny
    pool.store(0, key, None, torch.tensor([4]))
    read = index_keys(pool.layers[0].k)[1, 0]
    assert read.isfinite().all()
    assert abs(float(read[7]) - tiny) <= TINY / 2**10 + tiny / 16
    assert int(read.count_nonzero()) <= 1


@pytest.mark.parametrize("make", [dsa_pool, index_pool])
def test_scales_cannot_be_set(make):
    with pytest.raises(ContractError, match="makes the scales itself"):
        make().set_scales(0, 1.0, 1.0)
    with pytest.raises(ContractError, match="layer must be 0 to 1"):
        make().set_scales(2, 1.0, 1.0)


@pytest.mark.parametrize("joined", [False, True], ids=["per-layer", "joined"])
@pytest.mark.parametrize("make", [dsa_pool, index_pool])
def test_pages_move_with_their_scales(make, joined):
    pool, other = make(joined_layers=joined), make(joined_layers=not joined)
    for layer in range(2):
        pool.store(layer, torch.randn(8, pool.cache.head_dim), None, torch.arange(4, 12))
    records = pool.read_pages(np.array([2, 1]))
    assert records.shape == (2, pool.cache.bytes_per_page)
    other.write_pages(np.array([5, 3]), records)
    other.copy_pages(np.array([5]), np.array([4]))
    for kv, copied in zip(pool.layers, other.layers, strict=True):
        assert torch.equal(copied.k[[5, 3, 4]], kv.k[[2, 1, 2]])
        assert not copied.k[:3].any()


def test_nothing_that_a_step_does_looks_at_values():
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    for make, width in ((DSAPool, 576), (IndexKPool, 128)):
        cache = (dsa_pool() if make is DSAPool else index_pool()).cache
        make(cache, 5, "meta").store(1, torch.empty(3, width, device="meta"), None, slots)


def test_a_row_pool_of_more_than_31_bits_of_bytes_is_right_at_both_ends():
    pool = dsa_pool(num_layers=1, page_size=1024, num_pages=3300)
    assert pool.layers[0].k.numel() > 2**31
    rows, slots = torch.randn(2, 576), torch.tensor([3301 * 1024 - 1, 1024])
    pool.store(0, rows, None, slots)
    small = dsa_pool(num_pages=1)
    small.store(0, rows, None, torch.tensor([4, 5]))
    k = pool.layers[0].k
    assert torch.equal(k[3300, 1023], small.layers[0].k[1, 0])
    assert torch.equal(k[1, 0], small.layers[0].k[1, 1])
    assert not k[1, 1:].any()
    assert not k[3300, :1023].any()
