"""Pools of heads and latents: every dtype and layout reads back what was stored, and nothing else changes."""

import itertools
import os
import random
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.errors import ContractError
from anyattn.mem_cache.base import KVPool, PoolCapabilities
from anyattn.mem_cache.empty_pool import EmptyPool
from anyattn.mem_cache.kernels.pages import PageMover
from anyattn.mem_cache.pool import MHAPool, MLAPool, dequantize, quantize
from anyattn.mem_cache.spec import CacheSpec
from anyattn.types import ALL_LAYOUTS, FP8_DTYPES

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
E4M3 = torch.float8_e4m3fn


def cache_spec(**fields):
    base = {
        "num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "v_head_dim": 5, "kv_dtype": "float32", "page_size": 4
    }  # fmt: skip
    return CacheSpec(**{**base, **fields})


def wide_spec(layout, **fields):
    """Sizes that every layout can hold."""
    return cache_spec(**{"head_dim": 48, "v_head_dim": 32, "page_size": 16, "layout": layout, **fields})


def mla_spec(layout="NHD", **fields):
    return wide_spec(layout, **{"num_kv_heads": 1, "kind": "mla", "page_size": 4, **fields})


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def slots_for(pool, count):
    """Slots in random order, none of the null page."""
    page_size = pool.cache.page_size
    return torch.tensor(random.sample(range(page_size, page_size * (pool.num_pages + 1)), count))


@pytest.mark.parametrize("joined", [False, True], ids=["per-layer", "joined"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stored_token_is_read_at_its_slot_and_no_other_slot_changes(dtype, layout, joined):
    pool = MHAPool(wide_spec(layout, kv_dtype=dtype, joined_layers=joined), 6, "cpu")
    slots = slots_for(pool, 9)
    k, v = torch.randn(9, 3, 48), torch.randn(9, 3, 32)
    pool.store(1, k, v, slots)
    for pages, new in zip(pool.layers[1].gather(torch.arange(7)), (k, v), strict=True):
        assert pages.shape == (7, 16, 3, new.shape[-1])
        flat = pages.flatten(0, 1)
        assert torch.equal(bits(flat)[slots], bits(quantize(new, 1.0, pages.dtype)))
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[slots] = False
        assert not bits(flat)[rest].any()
    assert not pool.layers[0].k.float().any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_plain_layouts_hold_sizes_that_nothing_divides(layout):
    pool = MHAPool(cache_spec(layout=layout, page_size=1, kv_dtype="float16", joined_layers=True), 9, "cpu")
    k, v = torch.randn(3, 3, 8, dtype=torch.float16), torch.randn(3, 3, 5, dtype=torch.float16)
    pool.store(0, k, v, torch.tensor([9, 1, 4]))
    for pages, new in zip(pool.layers[0].nhd(), (k, v), strict=True):
        assert torch.equal(pages[[9, 1, 4], 0], new)


@pytest.mark.parametrize("joined", [False, True], ids=["per-layer", "joined"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_latents_and_rope_apart_are_stored_as_when_joined(layout, joined):
    one, other = (MLAPool(mla_spec(layout, joined_layers=joined), 6, "cpu") for _ in range(2))
    rows, slots = torch.randn(5, 48), slots_for(one, 5)
    one.store(1, rows, None, slots)
    other.store(1, rows[:, :32], rows[:, 32:], slots)
    k, v = one.layers[1].gather(torch.arange(7))
    assert torch.equal(k.flatten(0, 2)[slots], rows)
    assert torch.equal(v.flatten(0, 2)[slots], rows[:, :32])
    for stored, also in zip(one.parts(), other.parts(), strict=True):
        assert torch.equal(stored, also)


def test_mla_without_rope_stores_latents():
    pool = MLAPool(mla_spec(v_head_dim=48), 3, "cpu")
    rows = torch.randn(2, 48)
    pool.store(0, rows, None, torch.tensor([5, 12]))
    assert torch.equal(pool.layers[0].v.flatten(0, 2)[[5, 12]], rows)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_tokens_of_the_null_page_are_not_stored_however_many_share_a_slot(layout, dtype):
    pool = MHAPool(wide_spec(layout, kv_dtype=dtype), 4, "cpu")
    slots = torch.tensor([0, 37, 0, 15, 0, 16])
    k, v = torch.randn(6, 3, 48), torch.randn(6, 3, 32)
    k[[0, 2, 3, 4]] = v[[0, 2, 3, 4]] = torch.nan
    pool.store(0, k, v, slots)
    for pages, new in zip(pool.layers[0].gather(torch.arange(5)), (k, v), strict=True):
        assert not bits(pages[0]).any()
        assert torch.equal(bits(pages.flatten(0, 1)[[37, 16]]), bits(quantize(new[[1, 5]], 1.0, pages.dtype)))
        assert int((pages.flatten(0, 1).float() != 0).any(-1).any(-1).sum()) == 2


def test_no_tokens_are_stored_without_a_word():
    pool = MHAPool(cache_spec(), 2, "cpu")
    pool.store(0, torch.empty(0, 3, 8), torch.empty(0, 3, 5), torch.empty(0, dtype=torch.int64))
    assert not any(part.any() for part in pool.parts())


@settings(max_examples=30)
@given(
    order=st.permutations(range(3)),
    steps=st.tuples(*[st.integers(1, 3)] * 3),
    layout=st.sampled_from(ALL_LAYOUTS),
    seed=st.integers(0, 2**31),
)
def test_inputs_may_have_any_strides(order, steps, layout, seed):
    torch.manual_seed(seed)
    pool, plain = (MHAPool(wide_spec(layout), 4, "cpu") for _ in range(2))
    new = []
    for dim in (48, 32):
        shape = [size * step for size, step in zip((5, 3, dim), steps, strict=True)]
        memory = torch.randn([shape[axis] for axis in order])
        strided = memory.permute(*np.argsort(order).tolist())[tuple(slice(None, None, step) for step in steps)]
        assert strided.shape == (5, 3, dim)
        new.append(strided)
    slots = slots_for(pool, 10)[::2]
    pool.store(0, *new, slots)
    plain.store(0, *(tensor.contiguous() for tensor in new), slots.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(pool.parts(), plain.parts(), strict=True))


# Scales and fp8


@pytest.mark.parametrize("dtype", sorted(FP8_DTYPES))
def test_fp8_saturates_where_torch_would_give_nan_or_inf(dtype):
    dtype = getattr(torch, dtype)
    largest = torch.finfo(dtype).max
    stored = quantize(torch.tensor([1e9, -1e9, largest, 1.0, torch.nan]), 1.0, dtype).float()
    assert stored[:4].tolist() == [largest, -largest, largest, 1.0]
    assert stored[4].isnan()


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)], ids=["float", "tensor"])
def test_what_is_read_is_the_stored_value_times_the_scale(scale):
    x = torch.tensor([0.5, -100.0, 3.0])
    stored = quantize(x, scale, E4M3)
    assert stored.float().tolist() == [2.0, -384.0, 12.0]  # -400 lies between two values; ties go to even
    assert torch.allclose(dequantize(stored, scale, torch.float32), x, rtol=2**-4)


@pytest.mark.parametrize("dtype", sorted(FP8_DTYPES))
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_the_pool_stores_just_what_quantize_gives_for_scales_of_a_tensor_and_of_each_head(layout, dtype):
    pool = MHAPool(wide_spec(layout, kv_dtype=dtype), 6, "cpu")
    k, v = (torch.randn(9, 3, dim).mul(15).clamp(-20, 20).bfloat16() for dim in (48, 32))
    slots = slots_for(pool, 9)
    per_head = torch.rand(3) + 0.1  # times 240, the smallest is still above 20
    rounding = torch.finfo(getattr(torch, dtype)).eps / 2
    for k_scale, v_scale in ((0.37, 1.0), (torch.tensor([0.11]), 0.2), (per_head, torch.tensor(0.3)), (0.7, per_head)):
        pool.set_scales(1, k_scale, v_scale)
        pool.store(1, k, v, slots)
        kv = pool.layers[1]
        gathered = kv.gather(torch.arange(7))
        for pages, new, scale in zip(gathered, (k, v), (kv.k_scale, kv.v_scale), strict=True):
            stored = pages.flatten(0, 1)[slots]
            assert torch.equal(bits(stored), bits(quantize(new, scale, pages.dtype)))
            divisor = scale if isinstance(scale, float) else scale.expand(3)[:, None]
            assert torch.equal(bits(stored), bits(quantize(new.float() / divisor, 1.0, pages.dtype)))
            read = dequantize(stored, scale, torch.float32)
            assert torch.allclose(read, new.float(), rtol=rounding, atol=2e-3)  # or below the smallest normal value
    assert pool.layers[0].k_scale == 1.0


def test_a_scale_that_cannot_be_one_is_refused_and_the_scales_stay():
    pool = MHAPool(cache_spec(kv_dtype="float8_e4m3fn"), 2, "cpu")
    pool.set_scales(0, 0.5, 0.25)
    wrong = [0.0, -1.0, float("inf"), "1", torch.ones(2), torch.ones(3, 1), torch.ones(3, dtype=torch.float64)]
    for scale in (*wrong, torch.ones(1, device="meta"), torch.ones(3, device="meta")):
        for pair in ((scale, 1.0), (1.0, scale)):
            with pytest.raises(ContractError, match="scale"):
                pool.set_scales(0, *pair)
    for layer in (-1, 2):
        with pytest.raises(ContractError, match="layer must be 0 to 1"):
            pool.set_scales(layer, 1.0, 1.0)
    assert (pool.layers[0].k_scale, pool.layers[0].v_scale) == (0.5, 0.25)


def test_mla_has_one_scale_for_keys_and_values_and_none_for_heads():
    pool = MLAPool(mla_spec(kv_dtype="float8_e4m3fn"), 2, "cpu")
    scale = torch.tensor(0.5)
    for wrong in ((1.0, 2.0), (scale, 0.5), (scale, scale.clone())):
        with pytest.raises(ContractError, match="must be the same"):
            pool.set_scales(0, *wrong)
    per_head = torch.ones(2)
    with pytest.raises(ContractError, match="of one element on"):
        pool.set_scales(0, per_head, per_head)
    rows = torch.randn(3, 48)
    for scales in ((0.25, 0.25), (scale, scale)):
        pool.set_scales(0, *scales)
        pool.store(0, rows[:, :32], rows[:, 32:], torch.tensor([4, 5, 6]))
        assert torch.equal(bits(pool.layers[0].k[1, :3, 0]), bits(quantize(rows, scales[0], E4M3)))


def test_scales_are_refused_where_the_pool_is_not_fp8():
    with pytest.raises(ContractError, match="only fp8 KV has scales"):
        MHAPool(cache_spec(kv_dtype="bfloat16"), 2, "cpu").set_scales(0, 0.5, 0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_scale_widens_nothing_and_is_rounded_only_with_the_product(dtype):
    dtype = getattr(torch, dtype)
    pool = MHAPool(cache_spec(kv_dtype="float8_e4m3fn", num_kv_heads=3), 2, "cpu")
    pool.store(0, torch.randn(4, 3, 8), torch.randn(4, 3, 5), torch.arange(4, 8))
    raw = pool.layers[0].k
    for scale in (0.37, torch.full((1,), 0.37), torch.full((1, 1), 0.37), torch.rand(3) + 0.1):
        pool.set_scales(0, scale, scale)
        read = dequantize(raw, pool.layers[0].k_scale, dtype)
        factor = torch.tensor(scale) if isinstance(scale, float) else scale
        exact = raw.double() * factor.double().expand(1, 3).reshape(3, 1)
        assert read.dtype == dtype
        assert read.shape == raw.shape
        rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        assert torch.allclose(read.double(), exact, rtol=rounding * 0.51, atol=2.0**-24)


def test_a_pool_takes_just_its_own_kind():
    with pytest.raises(ContractError, match="MHAPool keeps kind 'mha', not 'mla'"):
        MHAPool(mla_spec(), 2, "cpu")
    with pytest.raises(ContractError, match="MHAPool needs layers; for a cache of none there is EmptyPool"):
        MHAPool(cache_spec(num_layers=0), 3, "cpu")
    with pytest.raises(ContractError, match="num_pages must be at least 1"):
        MHAPool(cache_spec(), 0, "cpu")


# Without a sync: tensors of the meta device have no values, so that whatever looks at one fails


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_nothing_that_a_step_does_looks_at_values(layout):
    slots = torch.empty(5, dtype=torch.int64, device="meta")
    pages = torch.empty(3, dtype=torch.int32, device="meta")
    heads = MHAPool(wide_spec(layout, kv_dtype="float8_e4m3fn"), 6, "meta")
    heads.set_scales(0, torch.empty(3, device="meta"), torch.empty(1, device="meta"))
    heads.store(0, torch.empty(5, 3, 48, device="meta"), torch.empty(5, 3, 32, device="meta"), slots)
    latents = MLAPool(mla_spec(layout), 6, "meta")
    latents.store(1, torch.empty(5, 48, device="meta"), None, slots)
    latents.store(1, torch.empty(5, 32, device="meta"), torch.empty(5, 16, device="meta"), slots)
    for pool in (heads, latents):
        records = pool.read_pages(pages)
        assert records.shape == (3, pool.cache.bytes_per_page)
        pool.write_pages(pages, records)
        pool.copy_pages(pages, pages)
        pool.layers[0].gather(pages)


# Whole pages


def filled(pool):
    """Random bytes in all pages but the null page."""
    for part in pool.parts():
        part[1:] = torch.randint(256, part[1:].shape, dtype=torch.uint8)
    return pool


POOLS = [
    *((MHAPool, wide_spec(layout, kv_dtype="float16")) for layout in ALL_LAYOUTS),
    (MHAPool, cache_spec(kv_dtype="float8_e5m2", page_size=1)),
    (MLAPool, mla_spec(kv_dtype="bfloat16")),
]


@pytest.mark.parametrize(("pool_class", "cache"), POOLS, ids=lambda value: getattr(value, "layout", "pool"))
def test_a_record_has_the_pages_bytes_layer_by_layer_keys_first_joined_or_not(pool_class, cache):
    fields = {name: getattr(cache, name) for name in cache.__slots__}
    apart = filled(pool_class(cache, 7, "cpu"))
    joined = pool_class(CacheSpec(**{**fields, "joined_layers": True}), 7, "cpu")
    assert len(joined.parts()) == 1
    wanted = []
    for kv in apart.layers:
        wanted += [kv.k.view(torch.uint8).flatten(1)]
        wanted += [] if kv.v_in_k else [kv.v.view(torch.uint8).flatten(1)]
    wanted = torch.cat(wanted, dim=1)
    pages = np.array([3, 1, 0, 7, 3], dtype=np.int32)
    records = apart.read_pages(pages)
    assert torch.equal(records, wanted[pages.astype(np.int64)])
    joined.write_pages(np.array([5, 2, 0, 1, 0]), records)
    for page, record in ((5, 0), (2, 1), (1, 3)):
        assert torch.equal(joined.read_pages(np.array([page]))[0], records[record])
        for from_kv, kv in zip(apart.layers, joined.layers, strict=True):
            of_page = torch.tensor([pages[record]], dtype=torch.int64)
            for stored, read in zip(from_kv.gather(of_page), kv.gather(torch.tensor([page])), strict=True):
                assert torch.equal(bits(stored), bits(read))
    assert not joined.read_pages(np.array([0, 3, 4, 6, 7])).any()


@settings(max_examples=25)
@given(data=st.data(), joined=st.booleans(), seed=st.integers(0, 2**31))
def test_pages_move_as_a_plain_list_of_records_would(data, joined, seed):
    torch.manual_seed(seed)
    pool = filled(MHAPool(cache_spec(joined_layers=joined, kv_dtype="float16"), 8, "cpu"))
    model = pool.read_pages(np.arange(9))
    for _ in range(4):
        count = data.draw(st.integers(0, 4))
        order = data.draw(st.permutations(range(1, 9)))
        src, dst = order[:count], order[count : 2 * count]
        padding = data.draw(st.integers(0, 2))
        src, dst = src + data.draw(st.lists(st.integers(0, 8), min_size=padding, max_size=padding)), dst + [0] * padding
        if data.draw(st.booleans()):
            pool.copy_pages(torch.tensor(src, dtype=torch.int32), np.array(dst, dtype=np.int32))
            moved = model[src]
        else:
            moved = torch.randint(256, (len(dst), model.shape[1]), dtype=torch.uint8)
            pool.write_pages(torch.tensor(dst, dtype=torch.int64), moved)
        for target, record in zip(dst, moved, strict=True):
            if target:
                model[target] = record
        assert torch.equal(pool.read_pages(np.arange(9)), model)


def test_records_can_be_read_into_a_buffer_with_rows_apart():
    pool = filled(MHAPool(cache_spec(), 4, "cpu"))
    width = pool.cache.bytes_per_page
    buffer = torch.full((3, width + 5), 7, dtype=torch.uint8)
    out = buffer[:, 2 : 2 + width]
    assert pool.read_pages(np.array([2, 4, 1]), out=out) is out
    assert torch.equal(out, pool.read_pages(np.array([2, 4, 1])))
    assert (buffer[:, :2] == 7).all()
    assert (buffer[:, 2 + width :] == 7).all()
    pool.write_pages(np.array([1, 2, 4]), out)
    assert torch.equal(pool.read_pages(np.array([1, 2, 4])), out)


def test_pages_and_records_that_do_not_fit_are_refused_before_anything_moves():
    pool = filled(MHAPool(cache_spec(), 4, "cpu"))
    before = pool.read_pages(np.arange(5))
    records = torch.zeros(2, pool.cache.bytes_per_page, dtype=torch.uint8)
    refused = [
        (lambda: pool.read_pages(np.array([1, 5])), "pages must be 0 to 4: 1 to 5"),
        (lambda: pool.read_pages(np.array([-1])), "pages must be 0 to 4: -1"),
        (lambda: pool.read_pages(np.array([1.0])), "integers of one axis, not float64"),
        (lambda: pool.read_pages(np.array([[1]])), "integers of one axis"),
        (lambda: pool.read_pages([1]), "numpy array or a tensor of int32 or int64"),
        (lambda: pool.read_pages(torch.tensor([1.0])), "numpy array or a tensor of int32 or int64"),
        (lambda: pool.read_pages(torch.tensor([1], device="meta")), "on the pool's device, cpu, not on meta"),
        (lambda: pool.read_pages(np.array([1]), out=records), "out must be uint8 of shape \\(1, "),
        (lambda: pool.write_pages(np.array([1, 2]), records[:, 1:]), "data must be uint8 of shape \\(2, "),
        (lambda: pool.write_pages(np.array([1, 2]), records.float()), "not torch.float32"),
        (lambda: pool.write_pages(np.array([1, 2]), records.t().contiguous().t()), "contiguous rows"),
        (lambda: pool.copy_pages(np.array([1, 2]), np.array([3])), "equally many pages, not 2 and 1"),
    ]
    for move, message in refused:
        with pytest.raises(ContractError, match=message):
            move()
    assert torch.equal(pool.read_pages(np.arange(5)), before)


class ListedPool(KVPool):
    """A stranger's pool, which says just where its bytes are."""

    capabilities = PoolCapabilities(kind="mha", kv_dtypes=frozenset({"float32"}))

    def __init__(self, cache, num_pages, device):
        self.tensors = [torch.zeros(num_pages + 1, 2, 3, device=device) for _ in range(2)]
        self.tensors.append(torch.zeros(num_pages + 1, 9, dtype=torch.int16, device=device)[:, 2:7])

    def store(self, layer, k, v, slots):
        raise NotImplementedError

    def set_scales(self, layer, k_scale, v_scale):
        raise NotImplementedError

    def parts(self):
        return self.tensors


def test_a_strangers_pool_moves_pages_by_naming_its_parts():
    pool = ListedPool(None, 4, "cpu")
    for part in pool.parts():
        part[1:] = torch.arange(part[1:].numel()).view(part[1:].shape)
    records = pool.read_pages(np.array([2, 3]))
    assert records.shape == (2, 2 * 24 + 10)
    pool.copy_pages(np.array([2]), np.array([4]))
    pool.write_pages(np.array([1]), records[1:])
    for part in pool.parts():
        assert torch.equal(part[4], part[2])
        assert torch.equal(part[1], part[3])


def test_parts_whose_pages_are_not_contiguous_or_equally_many_are_refused():
    for parts in ([torch.zeros(3, 4, 5).transpose(1, 2)], [torch.zeros(3, 4), torch.zeros(4, 4)]):
        with pytest.raises(ContractError, match="each is contiguous"):
            PageMover(parts)


def test_a_pool_without_layers_has_page_ids_a_device_and_records_of_no_bytes():
    pool = EmptyPool(cache_spec(num_layers=0), 4, "cpu")
    assert (pool.num_pages, pool.layers, pool.parts()) == (4, [], [])
    assert pool.device == MHAPool(cache_spec(), 1, "cpu").device == torch.device("cpu")
    records = pool.read_pages(np.array([2, 0, 2]))
    assert (records.shape, records.dtype, records.device) == ((3, 0), torch.uint8, pool.device)
    assert pool.read_pages(np.array([2]), out=records) is records
    pool.write_pages(np.array([1, 2, 3]), records)
    pool.copy_pages(torch.tensor([1]), torch.tensor([2]))
    for refused in (lambda: pool.store(0, None, None, None), lambda: pool.set_scales(0, 1.0, 1.0)):
        with pytest.raises(ContractError, match="no layer 0: it is empty"):
            refused()
    with pytest.raises(ContractError, match="an empty pool has no layers, not 2"):
        EmptyPool(cache_spec(), 4, "cpu")


@pytest.mark.cuda
def test_a_pools_device_is_that_of_its_tensors_with_its_index():
    for pool in (MHAPool(cache_spec(), 2, "cuda"), EmptyPool(cache_spec(num_layers=0), 2, "cuda")):
        assert pool.device == torch.empty(0, device="cuda").device


# Declarations


def test_a_pool_that_declares_nothing_serves_no_scales_of_heads_and_no_joined_layers():
    declared = PoolCapabilities(kind="mla", kv_dtypes=frozenset({"bfloat16"}))
    assert declared.reject_reasons("cpu", kind="mla", kv_dtype="bfloat16") == []
    reasons = declared.reject_reasons("cpu", kind="dsa", kv_dtype="float8_e4m3fn", kv_scale_per_head=True,
                                      joined_layers=True)  # fmt: skip
    assert [reason.field for reason in reasons] == ["kind", "kv_dtype", "kv_scale_per_head", "joined_layers"]
    assert reasons[0].another
    assert "sparse attention" in reasons[0].wanted
    assert [reason.remedy for reason in reasons[1:]] == [
        "set kv_dtype='bfloat16' and kv_scale_per_head=False", "set kv_scale_per_head=False", "set joined_layers=False",
    ]  # fmt: skip
    fp8 = PoolCapabilities(kind="mha", kv_dtypes=frozenset({"float8_e5m2"}), per_head_scales=True)
    (reason,) = fp8.reject_reasons("cpu", kind="mha", kv_dtype="float8_e4m3fn", kv_scale_per_head=True)
    assert reason.remedy == "set kv_dtype='float8_e5m2'"
    served = MHAPool.capabilities
    assert not served.reject_reasons("any", kind="mha", kv_dtype="float16", kv_scale_per_head=True, joined_layers=True)


@pytest.mark.parametrize(
    "fields", [{"kind": "heads"}, {"kind": True}, {"layouts": ("NHD", "DNH")}, {"joined_layers": 1}], ids=str
)
def test_a_declaration_that_means_nothing_is_refused(fields):
    with pytest.raises(ContractError, match=next(iter(fields))):
        PoolCapabilities(**{"kind": "mha", "kv_dtypes": frozenset({"float16"}), **fields})


# Compiled kernels


class KeyRecorder:
    """Stands where a kernel is launched and notes under which keys Triton would look for its compiled forms."""

    def __init__(self, kernel, backend):
        from triton.runtime.jit import create_function_from_signature

        self.binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys = set()
        self.launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.note

    def note(self, *arguments):
        _, specialization, options = self.binder(*arguments, debug=False)
        self.keys.add(str(specialization) + str(options))


@pytest.fixture(params=[("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["sm_90", "gfx942"])
def recorder(request, monkeypatch):
    """Puts a KeyRecorder for a target in the place of a module's kernel."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler: TRITON_INTERPRET is set")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    def record(module, name):
        made = KeyRecorder(getattr(module, name), make_backend(GPUTarget(*request.param)))
        monkeypatch.setattr(module, name, made)
        return made

    return record


STRIDES = {
    "contiguous": lambda count, heads, dim: torch.zeros(count, heads, dim),
    "fused": lambda count, heads, dim: torch.zeros(count, heads + 5, dim + 16)[:, 2 : 2 + heads, 8 : 8 + dim],
    "unaligned": lambda count, heads, dim: torch.zeros(count, heads, dim + 1)[:, :, 1:],
    "heads first": lambda count, heads, dim: torch.zeros(heads, count, dim).transpose(0, 1),
    "dims first": lambda count, heads, dim: torch.zeros(dim, heads, count).permute(2, 1, 0),
}


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_store_is_one_launch_of_one_of_two_compiled_kernels(layout, recorder):
    from anyattn.mem_cache.kernels import store_triton

    recorded = recorder(store_triton, "store_kernel")
    pool = MHAPool(wide_spec(layout, joined_layers=True), 4, "cpu")
    stores = 0
    for count, make, shift, layer in itertools.product((1, 2, 15, 16, 300), STRIDES.values(), (0, 1, 2), (0, 1)):
        slots = torch.zeros(count + shift, dtype=torch.int64)[shift:]
        store_triton.store([make(count, 3, 48), make(count, 3, 32)], pool._targets[layer], slots, 16)
        stores += 1
    assert recorded.launches == stores
    assert len(recorded.keys) == 2


def test_rows_are_stored_by_one_launch_of_one_of_two_compiled_kernels(recorder):
    from anyattn.mem_cache.kernels import store_triton
    from anyattn.mem_cache.sparse_pools import DSAPool

    recorded = recorder(store_triton, "store_rows_kernel")
    cache = cache_spec(kind="dsa", num_kv_heads=1, head_dim=576, v_head_dim=512, kv_dtype="float8_e4m3fn")
    pool = DSAPool(cache, 4, "cpu")
    for count, make in itertools.product((1, 2, 15, 16, 300), STRIDES.values()):
        rows = make(count, 1, 576)[:, 0]
        store_triton.store_rows(
            rows[:, :512], rows[:, 512:], pool._targets[0], torch.zeros(count, dtype=torch.int64), 4
        )
    assert recorded.launches == 5 * len(STRIDES)
    assert len(recorded.keys) == 2


def test_pages_are_moved_by_one_launch_of_one_of_two_compiled_kernels_for_each_way(recorder):
    from anyattn.mem_cache.kernels import pages_triton

    recorded = recorder(pages_triton, "move_pages_kernel")
    pool = MHAPool(cache_spec(head_dim=16, v_head_dim=32), 20, "cpu")
    mover = pages_triton.TritonMover(pool.parts())
    width = pool.cache.bytes_per_page
    for count, shift in itertools.product((1, 2, 15, 16), (0, 1, 3)):
        pages = torch.zeros(count + shift, dtype=torch.int64)[shift:]
        records = torch.zeros(shift + count * width, dtype=torch.uint8)[shift:].view(count, width)
        mover.read(pages, records)
        mover.write(pages, records)
        mover.copy(pages, pages)
    assert recorded.launches == 4 * 3 * 3
    assert len(recorded.keys) == 2 + 2 + 1


@pytest.mark.parametrize("topic", ["store", "pages"])
def test_what_is_aligned_moves_in_vectors_of_16_bytes(topic, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler: TRITON_INTERPRET is set")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    listed = runpy.run_path(str(Path(__file__).parent / "offline_kernels" / f"{topic}.py"))["KERNELS"]
    for kernel, types, constants in listed[:2]:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        wide = re.findall(r"(?:ld|st)\.global\.(?:v4\.b32|v2\.b64)", assembly)
        narrow = re.findall(r"(?:ld|st)\.global\.b(?:8|16)", assembly)
        assert bool(wide) == constants["VECTOR"]
        assert bool(narrow) != constants["VECTOR"]


# Size


def resident_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to see that memory is not touched")
@pytest.mark.parametrize(("layout", "joined"), [("NHD", False), ("NHD", True), ("5D", False)], ids=str)
def test_offsets_beyond_31_bits_are_right_and_untouched_pages_take_no_memory(layout, joined):
    before = resident_bytes()
    cache = cache_spec(
        num_layers=1, num_kv_heads=8, head_dim=128, v_head_dim=64, page_size=1024, kv_dtype="float8_e4m3fn",
        layout=layout, joined_layers=joined,
    )  # fmt: skip
    pool = MHAPool(cache, 2100, "cpu")
    assert pool.layers[0].k.numel() > 2**31
    slots = torch.tensor([1024, 2101 * 1024 - 1, 2050 * 1024 + 5])
    k, v = torch.randn(3, 8, 128), torch.randn(3, 8, 64)
    pool.store(0, k, v, slots)
    pool.copy_pages(np.array([2100]), np.array([2]))
    pages, offsets = torch.tensor([1, 2100, 2050, 2]), torch.tensor([0, 1023, 5, 1023])
    for gathered, new in zip(pool.layers[0].gather(pages), (k, v), strict=True):
        read = gathered[torch.arange(4), offsets]
        assert torch.equal(bits(read), bits(quantize(new[[0, 1, 2, 1]], 1.0, E4M3)))
        assert int((bits(gathered) != 0).any(-1).any(-1).sum()) == 4
    assert not pool.read_pages(np.array([0, 1049, 2099])).any()
    assert resident_bytes() - before < 1 << 28


def test_every_pair_of_storage_and_layout_is_tried():
    tried = {(cache.layout, pool_class) for pool_class, cache in POOLS}
    assert set(itertools.product(ALL_LAYOUTS, [MHAPool])) <= tried
