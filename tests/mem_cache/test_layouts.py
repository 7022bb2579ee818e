"""Layouts: every element is where plain arithmetic puts it, and nothing is lost on the way from one to another."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.errors import ContractError, SpecError
from anyattn.mem_cache import layouts
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.pool import MLAPool
from anyattn.mem_cache.spec import CacheSpec
from anyattn.types import ALL_LAYOUTS, DTYPE_BYTES, KV_LAYOUTS, VENDOR_LAYOUTS

PARTS = ("k", "v")


def place(layout, part, page, token, head, d, *, page_size, num_kv_heads, dim, itemsize):
    """The index of an element in flat storage, counted by hand."""
    x = 16 // itemsize
    if layout == "NHD":
        return ((page * page_size + token) * num_kv_heads + head) * dim + d
    if layout == "HND":
        return ((page * num_kv_heads + head) * page_size + token) * dim + d
    if layout == "NZ":
        return (((page * num_kv_heads + head) * (dim // 16) + d // 16) * page_size + token) * 16 + d % 16
    if part == "k":
        return (((page * num_kv_heads + head) * (dim // x) + d // x) * page_size + token) * x + d % x
    return (((page * num_kv_heads + head) * (page_size // x) + token // x) * dim + d) * x + token % x


def numbered(layout, part, num_pages, itemsize, **sizes):
    """Pages whose elements are their own index in storage."""
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16}[itemsize]
    shape = (num_pages, *layouts.page_shape(layout, part, **sizes, itemsize=itemsize))
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)


SIZES = [
    {"page_size": 8, "num_kv_heads": 1, "dim": 16},
    {"page_size": 16, "num_kv_heads": 3, "dim": 48},
]


@pytest.mark.parametrize("sizes", SIZES, ids=["one-piece", "many-pieces"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_every_element_is_where_plain_arithmetic_puts_it(layout, part, itemsize, sizes):
    pages = numbered(layout, part, 3, itemsize, **sizes)
    view = layouts.tokens_view(pages, layout, part)
    assert view.data_ptr() == pages.data_ptr()
    assert view.shape[1] * view.shape[2] == sizes["page_size"]
    assert view.shape[4] * view.shape[5] == sizes["dim"]
    ids = torch.tensor([2, 0, 2])
    gathered = layouts.gather(pages, layout, part, ids)
    assert gathered.shape == (3, sizes["page_size"], sizes["num_kv_heads"], sizes["dim"])
    assert gathered.is_contiguous()
    viewed, copied = view.tolist(), gathered.tolist()
    token_piece, dim_piece = view.shape[2], view.shape[5]
    ranges = map(range, (3, sizes["page_size"], sizes["num_kv_heads"], sizes["dim"]))
    for page, token, head, d in itertools.product(*ranges):
        (t_hi, t_lo), (d_hi, d_lo) = divmod(token, token_piece), divmod(d, dim_piece)
        wanted = place(layout, part, page, token, head, d, **sizes, itemsize=itemsize)
        assert viewed[page][t_hi][t_lo][head][d_hi][d_lo] == wanted
        for row in (row for row, taken in enumerate(ids.tolist()) if taken == page):
            assert copied[row][token][head][d] == wanted


@settings(max_examples=40)
@given(
    data=st.data(),
    dtype=st.sampled_from([name for name in DTYPE_BYTES if name != "float64"]),
    part=st.sampled_from(PARTS),
    num_pages=st.integers(1, 3),
    pieces=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    num_kv_heads=st.integers(1, 3),
)
def test_pages_come_back_from_every_layout_as_they_were(data, dtype, part, num_pages, pieces, num_kv_heads):
    itemsize = DTYPE_BYTES[dtype]
    sizes = {"page_size": 16 // itemsize * pieces[0], "num_kv_heads": num_kv_heads, "dim": 16 * pieces[1]}
    source, target = data.draw(st.tuples(st.sampled_from(ALL_LAYOUTS), st.sampled_from(ALL_LAYOUTS)))
    shape = (num_pages, *layouts.page_shape(source, part, **sizes, itemsize=itemsize))
    seed = data.draw(st.integers(0, 2**31))
    bits = torch.randint(256, (*shape, itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    pages = bits.view(getattr(torch, dtype)).view(shape)  # any bits, NaN of all sorts among them
    converted = layouts.convert(pages, source, target, part)
    assert converted.dtype == pages.dtype
    assert converted.shape == (num_pages, *layouts.page_shape(target, part, **sizes, itemsize=itemsize))
    everything = torch.arange(num_pages)
    as_gathered = [layouts.gather(p, name, part, everything) for p, name in ((pages, source), (converted, target))]
    assert torch.equal(*(gathered.view(torch.uint8) for gathered in as_gathered))
    back = layouts.convert(converted, target, source, part)
    assert torch.equal(back.view(torch.uint8), pages.view(torch.uint8))


@pytest.mark.parametrize(
    ("layout", "part", "sizes", "named"),
    [
        ("NZ", "k", {"dim": 40}, "dim must be a multiple of 16, as 48; 40"),
        ("NZ", "v", {"dim": 8}, "dim must be a multiple of 16, as 16; 8"),
        ("5D", "k", {"dim": 12}, "dim must be a multiple of 8, as 16; 12"),
        ("5D", "v", {"page_size": 1}, "page_size must be a multiple of 8, as 8; 1"),
        ("DNH", "k", {}, "layout must be one of NHD, HND, NZ, 5D"),
    ],
)
def test_sizes_that_a_layout_cannot_hold_are_refused_with_what_it_could(layout, part, sizes, named):
    with pytest.raises(SpecError, match=named):
        layouts.page_shape(layout, part, **{"page_size": 16, "num_kv_heads": 2, "dim": 64, "itemsize": 2, **sizes})


def test_values_in_pieces_of_tokens_may_have_any_dim():
    assert layouts.page_shape("5D", "v", page_size=16, num_kv_heads=2, dim=5, itemsize=1) == (2, 1, 5, 16)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_cut_of_the_dims_views_just_those_elements(layout):
    sizes = {"page_size": 8, "num_kv_heads": 2, "dim": 64}
    view = layouts.tokens_view(numbered(layout, "k", 2, 2, **sizes), layout, "k")
    flat = view.reshape(2, 8, 2, 64)
    for first, count in ((0, 48), (48, 16), (64, 0)):
        cut = layouts.dims_of(view, first, count)
        assert torch.equal(cut.reshape(2, 8, 2, count), flat[..., first : first + count])
    if layout in VENDOR_LAYOUTS:
        with pytest.raises(SpecError, match="cannot be cut at 4 and 64"):
            layouts.dims_of(view, 4, 60)


@pytest.mark.parametrize("layout", VENDOR_LAYOUTS)
def test_a_vendor_layout_has_no_plain_view_but_can_be_gathered(layout):
    sizes = {"page_size": 8, "num_kv_heads": 2, "dim": 16, "itemsize": 4}
    k, v = (torch.randn(4, *layouts.page_shape(layout, part, **sizes)) for part in PARTS)
    kv = LayerKV(k=k, v=v, layout=layout)
    with pytest.raises(ContractError, match=r"gather\(pages\)"):
        kv.nhd()
    k, v = kv.gather(torch.tensor([3, 1], dtype=torch.int32))
    assert torch.equal(k, layouts.convert(kv.k, layout, "NHD", "k")[[3, 1]])
    assert torch.equal(v, layouts.convert(kv.v, layout, "NHD", "v")[[3, 1]])


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_gathered_mla_values_are_the_beginning_of_the_keys(layout):
    cache = CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=48, v_head_dim=32, kv_dtype="float16", page_size=4, layout=layout,
        kind="mla",
    )  # fmt: skip
    pool = MLAPool(cache, 3, "cpu")
    rows = torch.randn(4, 48, dtype=torch.float16)
    slots = random.sample(range(4, 16), 4)
    pool.store(0, rows, None, torch.tensor(slots))
    kv = pool.layers[0]
    k, v = kv.gather(torch.arange(4))
    assert v.shape == (4, 4, 1, 32)
    assert torch.equal(k.flatten(0, 2)[slots], rows)
    assert torch.equal(v.flatten(0, 2)[slots], rows[:, :32])
    if layout in KV_LAYOUTS:
        assert torch.equal(kv.nhd()[1], v)
    assert kv.v.untyped_storage().data_ptr() == kv.k.untyped_storage().data_ptr()
