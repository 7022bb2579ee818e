"""Stores by Triton against stores by torch, which test_pool.py and test_sparse_pools.py hold: equal bytes."""

import os
import random

import pytest
import torch

from anyattn.mem_cache.kernels import store_torch, store_triton
from anyattn.mem_cache.kernels.store import RowTarget, StoreTarget
from anyattn.mem_cache.layouts import dims_of, page_shape, tokens_view
from anyattn.mem_cache.pool import MHAPool, quantize
from anyattn.mem_cache.spec import CacheSpec
from anyattn.types import ALL_LAYOUTS

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NUM_PAGES, HEADS, DIMS = 5, 3, (48, 32)


def targets(layout, dtype, device, *, page_size=16, joined=False, scales=(None, None), shift=0):
    """Storage of zeros, and keys and values of heads as two targets in it, `shift` elements from where it begins."""
    shapes = [
        page_shape(layout, part, page_size=page_size, num_kv_heads=HEADS, dim=dim, itemsize=dtype.itemsize)
        for part, dim in zip("kv", DIMS, strict=True)
    ]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    memory = torch.zeros(shift + (NUM_PAGES + 1) * sum(sizes), dtype=dtype, device=device)
    storage = memory[shift:]
    if joined:
        parts = storage.view(NUM_PAGES + 1, -1).split(sizes, dim=1)
    else:
        parts = [part.view(NUM_PAGES + 1, -1) for part in storage.split([(NUM_PAGES + 1) * size for size in sizes])]
    made = [
        StoreTarget(tokens_view(raw.unflatten(1, shape), layout, part), scale if scale is None else scale.to(device))
        for raw, shape, part, scale in zip(parts, shapes, "kv", scales, strict=True)
    ]
    return memory, made


def new_tokens(count, dtype, device, *, aligned=True):
    """Keys and values within a wider row, as a fused projection leaves them; begun at a multiple of 16 bytes or not."""
    gap = 16 if aligned else 3
    widths = [HEADS * dim for dim in DIMS]
    row = torch.randn(count, sum(widths) + 2 * gap).mul(8).to(dtype).to(device)
    k, v = row[:, gap : gap + widths[0]], row[:, gap + widths[0] : gap + sum(widths)]
    return [part.unflatten(1, (HEADS, dim)) for part, dim in zip((k, v), DIMS, strict=True)]


def some_slots(count, page_size=16):
    """Slots in random order; the null page's several times."""
    used = random.sample(range(page_size, page_size * (NUM_PAGES + 1)), count - count // 4)
    slots = used + [random.randrange(page_size) for _ in range(count // 4)]
    random.shuffle(slots)
    return torch.tensor(slots)


def check(sources, slots, device, layout, dtype, page_size=16, **fields):
    """Both kernels into storage of their own; the bytes must be the same, and not all zero. NaN may have any bytes."""
    wanted, torch_targets = targets(layout, dtype, CPU, page_size=page_size, **fields)
    found, triton_targets = targets(layout, dtype, device, page_size=page_size, **fields)
    store_torch.store([source.cpu() for source in sources], torch_targets, slots, page_size)
    store_triton.store(sources, triton_targets, slots.to(device), page_size)
    found = found.cpu()
    same = (found.view(torch.uint8) == wanted.view(torch.uint8)).view(*wanted.shape, -1).all(-1)
    assert (same | (found.isnan() & wanted.isnan())).all()
    assert wanted.view(torch.uint8).any()


@pytest.mark.parametrize("aligned", [True, False], ids=["vectors", "elements"])
@pytest.mark.parametrize("joined", [False, True], ids=["per-layer", "joined"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_keys_and_values_land_where_torch_puts_them(layout, dtype, joined, aligned, device):
    sources = new_tokens(37, dtype, device, aligned=aligned)
    check(sources, some_slots(37), device, layout, dtype, joined=joined, shift=0 if aligned else 1)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_any_page_size_is_right(layout, page_size, device):
    sources = new_tokens(5, torch.float16, device)
    check(sources, some_slots(5, page_size), device, layout, torch.float16, page_size)


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_a_dtype_is_converted_to_the_pools(source, stored, device):
    if INTERPRETED and source != stored and torch.bfloat16 in (source, stored):
        pytest.skip("needs a GPU: the interpreter does not round to bfloat16 as devices do")
    check(new_tokens(9, source, device), some_slots(9), device, "NHD", stored)


@pytest.mark.parametrize("permutation", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_inputs_may_have_any_strides(permutation, device):
    sources = []
    for dim in DIMS:
        shape = [(9, HEADS, dim)[axis] for axis in permutation]
        memory = torch.randn([2 * size for size in shape]).half().to(device)[tuple([slice(None, None, 2)] * 3)]
        sources.append(memory.permute(*[permutation.index(axis) for axis in range(3)]))
    slots = torch.stack([some_slots(9), torch.zeros(9, dtype=torch.int64)], dim=1)[:, 0]
    check(sources, slots, device, "HND", torch.float16)


@pytest.mark.parametrize("scales", [0, 1, HEADS])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_fp8_is_rounded_and_saturated_as_torch_does(stored, source, scales, device):
    sources = new_tokens(21, source, device)
    largest = torch.finfo(stored).max
    for tensor in sources:
        extremes = torch.tensor([torch.nan, torch.inf, -torch.inf, largest, -largest * 1.04, 1e-3, 1e-6, -0.0])
        tensor[3, 1, :8] = extremes.to(source)
        tensor[4] *= 2**-9  # below the smallest normal value
    divisors = [None if scales == 0 else torch.rand(scales) + 0.05 for _ in DIMS]
    if scales == 1:
        divisors = [divisors[0].reshape(()), None]
    check(sources, some_slots(21), device, "NHD", stored, scales=divisors)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_fp8_bytes_land_in_every_layout(layout, device):
    scales = (torch.tensor([0.3, 2.0, 0.05]), torch.tensor(0.5))
    check(new_tokens(11, torch.float16, device), some_slots(11), device, layout, torch.float8_e4m3fn, scales=scales)


@pytest.mark.parametrize("native", [False, True], ids=["integers", "native"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_all_magnitudes_of_float32_are_rounded_to_fp8_as_torch_does(dtype, native, device):
    if native and not store_triton.casts_rightly(device, dtype):
        pytest.skip("needs a device whose own cast to fp8 is right")
    bits = torch.randint(-(2**31), 2**31, (1 << 15,), dtype=torch.int32)
    trial = store_triton._trial_values(dtype)
    values = torch.cat([bits.view(torch.float32)[: (1 << 15) - len(trial)], trial])
    found = torch.empty(values.shape, dtype=torch.uint8, device=device)
    store_triton.cast_kernel[(1,)](values.to(device), found, store_triton._FP8[dtype], native, len(values))
    found, wanted = found.cpu().view(dtype), quantize(values, 1.0, dtype)
    same = (found.view(torch.uint8) == wanted.view(torch.uint8)) | (found.isnan() & wanted.isnan())
    assert same.all(), values[~same][:5]


def test_nan_for_the_null_page_goes_nowhere(device):
    sources = new_tokens(12, torch.float16, device)
    slots = some_slots(12)
    for tensor in sources:
        tensor[(slots < 16).to(device)] = torch.nan
    check(sources, slots, device, "NHD", torch.float16)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_latents_and_rope_apart_are_one_row(layout, device):
    memory = torch.zeros(NUM_PAGES + 1, *page_shape(layout, "k", page_size=16, num_kv_heads=1, dim=80, itemsize=2),
                         dtype=torch.float16, device=device)  # fmt: skip
    view = tokens_view(memory, layout, "k")
    rows, slots = torch.randn(7, 80).half(), some_slots(7)
    parts = [StoreTarget(dims_of(view, 0, 64)), StoreTarget(dims_of(view, 64, 16))]
    on_device = rows.to(device).unsqueeze(1)
    store_triton.store([on_device[..., :64], on_device[..., 64:]], parts, slots.to(device), 16)
    apart = memory.clone()
    memory.zero_()
    store_triton.store([on_device], [StoreTarget(view)], slots.to(device), 16)
    assert torch.equal(apart, memory)
    flat = view.reshape(-1, 80).cpu()
    stored = slots >= 16
    assert torch.equal(flat[slots[stored]], rows[stored])
    assert int(flat.any(-1).sum()) == int(stored.sum())


def row_target(device, page_size, tiles, tile, tail):
    """A storage of bytes, with fp8 values, scales and tails one after the other in each page."""
    widths = [page_size * tiles * tile, page_size * tiles * 4, page_size * tail * 2]
    storage = torch.zeros(NUM_PAGES + 1, sum(widths), dtype=torch.uint8, device=device)
    values, scales, tails = storage.split(widths, dim=1)
    return storage, RowTarget(
        values.unflatten(1, (page_size, -1)),
        scales.view(torch.float32).unflatten(1, (page_size, -1)),
        tails.view(torch.bfloat16).unflatten(1, (page_size, -1)) if tail else None,
    )


@pytest.mark.parametrize("step", [1, 2], ids=["vectors", "elements"])
@pytest.mark.parametrize(("tiles", "tile", "tail"), [(4, 128, 64), (1, 128, 0), (1, 20, 0), (2, 16, 8)], ids=str)
def test_rows_are_quantised_tile_by_tile_as_torch_does(tiles, tile, tail, step, device):
    dtype = torch.bfloat16 if tail else torch.float16  # the interpreter does not round to the tail's bfloat16
    rows = (torch.randn(9, (tiles * tile + tail) * step) * 3).to(dtype)[:, ::step]
    rows[0] = 0
    rows[1, 0], rows[2, 1] = torch.nan, torch.inf
    rows[3, :tile] *= 2**-20
    slots = some_slots(9, 4)
    wanted, torch_target = row_target(CPU, 4, tiles, tile, tail)
    found, triton_target = row_target(device, 4, tiles, tile, tail)
    width = tiles * tile
    store_torch.store_rows(rows[:, :width], rows[:, width:] if tail else None, torch_target, slots, 4)
    on_device = rows.to(device)
    store_triton.store_rows(
        on_device[:, :width], on_device[:, width:] if tail else None, triton_target, slots.to(device), 4
    )
    for name in ("values", "scales"):
        a, b = getattr(triton_target, name).cpu(), getattr(torch_target, name)
        if name == "values":
            a, b = a.contiguous().view(torch.float8_e4m3fn).float(), b.contiguous().view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if tail:
        assert torch.equal(triton_target.tail.cpu(), torch_target.tail)
    assert torch.equal(found[0].cpu(), torch.zeros_like(wanted[0]))


def test_slots_beyond_31_bits_of_elements_are_right(device):
    cache = CacheSpec(
        num_layers=1, num_kv_heads=8, head_dim=128, v_head_dim=64, page_size=1024, kv_dtype="float8_e4m3fn"
    )
    try:
        pool = MHAPool(cache, 2100, device)
    except torch.OutOfMemoryError:
        pytest.skip("needs a device with 4 GB of free memory")
    k, v = torch.randn(3, 8, 128).half(), torch.randn(3, 8, 64).half()
    slots = torch.tensor([2101 * 1024 - 1, 1024, 2099 * 1024 + 77])
    store_triton.store([k.to(device), v.to(device)], pool._targets[0], slots.to(device), 1024)
    for pages, new in zip(pool.layers[0].gather((slots // 1024).to(device)), (k, v), strict=True):
        read = pages.cpu()[torch.arange(3), slots % 1024]
        assert torch.equal(read.view(torch.uint8), quantize(new, 1.0, torch.float8_e4m3fn).view(torch.uint8))
        assert int((pages.view(torch.uint8) != 0).any(-1).any(-1).sum()) == 3
