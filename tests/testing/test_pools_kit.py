"""The kit's checks of pools: those of anyattn pass, so does another one that is right, and each mutant is caught."""

import dataclasses

import numpy as np
import pytest
import torch

from anyattn.errors import ContractError
from anyattn.mem_cache.base import KVPool, LayerKV, PoolCapabilities
from anyattn.mem_cache.kernels.store_torch import quantize, quantize_tiles
from anyattn.mem_cache.layouts import tokens_view
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.mem_cache.sparse_pools import DSAPool, IndexKPool
from anyattn.platforms.base import Platform
from anyattn.testing.check import CannotRunError, CheckFailedError
from anyattn.testing.pools import checks as pools
from anyattn.testing.pools.cases import cases_for
from anyattn.testing.target import Target
from anyattn.types import ALL_LAYOUTS, FP8_DTYPES

CPU = Platform(kind="cpu", vendor="any", name="any CPU", arch="any", torch_device="cpu")
SMALL_CPU = dataclasses.replace(CPU, memory_free_bytes=8 << 30)
BUILT_IN = [MHAPool, MLAPool, DSAPool, IndexKPool]
FP8 = "float8_e4m3fn"
SEED = 20


class PlainPool(KVPool):
    """A stranger's, written from the contract: a tensor a layer and part, and one token stored after the other."""

    capabilities = PoolCapabilities(
        kind="mha", kv_dtypes=frozenset({"bfloat16", FP8}), layouts=("NHD", "HND"), device_kinds=frozenset({"cpu"})
    )

    def __init__(self, cache, num_pages, device):
        self.cache, self.num_pages, self.device = cache, num_pages, torch.device(device)
        self.layers = [self.new_layer() for _ in range(cache.num_layers)]

    def new_layer(self):
        dtype = getattr(torch, self.cache.kv_dtype)
        k, v = (torch.zeros(self.num_pages + 1, *shape, dtype=dtype) for shape in self.cache.page_shapes())
        return LayerKV(k=k, v=v, layout=self.cache.layout)

    def store(self, layer, k, v, slots):
        kv = self.layers[layer]
        for token, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, self.cache.page_size)
            if page:
                for part, new, scale in ((kv.k, k, kv.k_scale), (kv.v, v, kv.v_scale)):
                    rows = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
                    stored = self.quantised(new[token], scale)
                    place = (page, offset) if kv.layout == "NHD" else (page, slice(None), offset)
                    rows[place] = stored.view(rows.dtype)

    def quantised(self, new, scale):
        return quantize(new, scale, getattr(torch, self.cache.kv_dtype)).contiguous()

    def set_scales(self, layer, k_scale, v_scale):
        for scale in (k_scale, v_scale):
            fits = isinstance(scale, float)
            if isinstance(scale, torch.Tensor):
                fits = scale.numel() == 1 and scale.dtype == torch.float32 and scale.device == self.device
            if not fits or self.cache.kv_dtype not in FP8_DTYPES:
                raise ContractError("no such scale")
        self.layers[layer] = dataclasses.replace(self.layers[layer], k_scale=k_scale, v_scale=v_scale)

    def parts(self):
        return [part for kv in self.layers for part in (kv.k, kv.v)]


def target(pool):
    return Target(kind="pool", name=pool.__name__, place=f"{pool.__module__}:{pool.__name__}", loaded=pool)


def all_checks(pool):
    return [*pools.contract_checks(target(pool)), *pools.checks(pool, CPU)]


def memory_checks(pool):
    return {check.name: check for check in pools.checks(pool, CPU)}


def failure(check, seed=0):
    """What the check says against its target, or None."""
    try:
        check.run(seed)
    except CannotRunError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def outcome(check, seed=0):
    """Likewise; None too where the check cannot be made."""
    try:
        return failure(check, seed)
    except CannotRunError:
        return None


@pytest.mark.parametrize("pool", [*BUILT_IN, PlainPool], ids=lambda pool: pool.__name__)
def test_a_pool_that_is_right_passes_every_check(pool):
    # A test's module cannot be imported in a fresh process.
    checks = [
        check for check in pools.contract_checks(target(pool)) if "imported" not in check.name or pool in BUILT_IN
    ]
    checks += pools.checks(pool, CPU if pool in BUILT_IN else SMALL_CPU)  # others write zeros, which takes its time
    assert {check.id: said for check in checks if (said := outcome(check, SEED))} == {}


def test_names_are_the_same_in_every_run_and_each_is_there_once():
    for pool in (*BUILT_IN, PlainPool):
        names = [check.id for check in all_checks(pool)]
        assert names == [check.id for check in all_checks(pool)]
        assert len(set(names)) == len(names)
        assert {check.tier for check in pools.checks(pool, CPU)} == {"memory"}


def test_every_declared_value_is_among_the_cases():
    for pool in (*BUILT_IN, PlainPool):
        declared = pool.capabilities
        cases = list(cases_for(declared))
        assert {case.cache.kv_dtype for case in cases} == declared.kv_dtypes
        assert {case.cache.layout for case in cases} == set(declared.layouts)
        assert {case.cache.joined_layers for case in cases} == {False, declared.joined_layers}
        assert {case.cache.kind for case in cases} == {declared.kind}
        for layout in declared.layouts:
            assert any(case.thorough and case.cache.layout == layout for case in cases)


def test_what_is_not_declared_has_no_checks():
    names = memory_checks(PlainPool)
    assert not [name for name in names if "joined" in name or "for each head" in name or "5D" in name or "e5m2" in name]
    assert [name for name in memory_checks(MHAPool) if "for each head, float8_e5m2, 5D" in name]
    assert "set_scales refuses where there are no scales" in memory_checks(DSAPool)
    assert not [name for name in memory_checks(DSAPool) if "fp8 is" in name or "saturates" in name]


def test_every_check_says_which_capability_it_belongs_to():
    fields = {field.name for field in dataclasses.fields(PoolCapabilities)} - {"priority"}
    named = {check.capability for check in all_checks(MHAPool)}
    assert fields <= named
    assert named - fields == {"contract", "packages", "page_sizes", "head_dims"}


def test_on_a_device_that_is_not_declared_nothing_can_be_checked():
    class OfAnother(PlainPool):
        capabilities = dataclasses.replace(PlainPool.capabilities, device_kinds=frozenset({"cuda"}))

    checks = list(pools.checks(OfAnother, CPU))
    assert len(checks) > 20
    for check in checks:
        with pytest.raises(CannotRunError, match="serves devices of kind cuda, not cpu"):
            check.run(0)


def test_a_large_pool_is_not_tried_where_memory_is_short():
    (check,) = (check for check in pools.checks(IndexKPool, SMALL_CPU) if check.name.startswith("offsets beyond"))
    with pytest.raises(CannotRunError, match=r"takes 2\.\d GiB on cpu .* 12 GiB more are to stay free; .* are free"):
        check.run(0)


# What is wrong, and the check that says so


class WritesTheNullPage(PlainPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots)
        size = self.cache.page_size
        for token in (slots < size).nonzero().flatten().tolist():
            place = (0, int(slots[token])) if self.cache.layout == "NHD" else (0, slice(None), int(slots[token]))
            self.layers[layer].k[place] = self.quantised(k[token], 1.0)


class PaddingIsTheLastPage(PlainPool):
    """As an index of -1 would have it."""

    def store(self, layer, k, v, slots):
        size = self.cache.page_size
        super().store(layer, k, v, torch.where(slots < size, slots + self.num_pages * size, slots))


class ScaleIgnored(PlainPool):
    def quantised(self, new, scale):
        return super().quantised(new, 1.0)


class Multiplies(PlainPool):
    def quantised(self, new, scale):
        return super().quantised(new, 1 / scale)


class ScaleOfTheFirstLayer(PlainPool):
    def store(self, layer, k, v, slots):
        scales = {"k_scale": self.layers[0].k_scale, "v_scale": self.layers[0].v_scale}
        kept, self.layers[layer] = self.layers[layer], dataclasses.replace(self.layers[layer], **scales)
        super().store(layer, k, v, slots)
        self.layers[layer] = kept


class ScalesOfKeysAndValuesSwapped(PlainPool):
    def set_scales(self, layer, k_scale, v_scale):
        super().set_scales(layer, v_scale, k_scale)


class ScalesOfAllLayers(PlainPool):
    def set_scales(self, layer, k_scale, v_scale):
        for each in range(len(self.layers)):
            super().set_scales(each, k_scale, v_scale)


class ScalesOfTheNextHead(MHAPool):
    def set_scales(self, layer, k_scale, v_scale):
        kept = [scale.roll(1) if isinstance(scale, torch.Tensor) else scale for scale in (k_scale, v_scale)]
        super().set_scales(layer, *kept)
        self.layers[layer] = dataclasses.replace(self.layers[layer], k_scale=k_scale, v_scale=v_scale)


class NotSaturating(PlainPool):
    def quantised(self, new, scale):
        divided = new.float() / scale
        over = divided.abs() > 448
        return torch.where(over, torch.nan, divided).to(getattr(torch, self.cache.kv_dtype))


class TruncatesFar(PlainPool):
    """Two bits of fraction instead of three."""

    def quantised(self, new, scale):
        stored = super().quantised(new, scale)
        return (stored.view(torch.uint8) & 0xFC).view(stored.dtype) if stored.dtype.itemsize == 1 else stored


class AnyScaleWillDo(PlainPool):
    def set_scales(self, layer, k_scale, v_scale):
        self.layers[layer] = dataclasses.replace(self.layers[layer], k_scale=k_scale, v_scale=v_scale)


class RefusesHalfway(PlainPool):
    def set_scales(self, layer, k_scale, v_scale):
        if isinstance(k_scale, float) or k_scale.numel() == 1:
            self.layers[layer] = dataclasses.replace(self.layers[layer], k_scale=0.5)
        super().set_scales(layer, k_scale, v_scale)


class OneSlotOff(PlainPool):
    def store(self, layer, k, v, slots):
        last = (self.num_pages + 1) * self.cache.page_size - 1
        super().store(layer, k, v, torch.where(slots < self.cache.page_size, slots, (slots + 1).clamp(max=last)))


class ValuesOneSlotOff(PlainPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k, v.roll(1, 0), slots)


class OnePageLess(PlainPool):
    def __init__(self, cache, num_pages, device):
        super().__init__(cache, num_pages - 1, device)
        self.num_pages = num_pages


class OnePageTooMany(PlainPool):
    def __init__(self, cache, num_pages, device):
        super().__init__(cache, num_pages + 1, device)
        self.num_pages = num_pages


class AnotherLayerToo(PlainPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots)
        if layer == 1:
            super().store(0, k[:1], v[:1], slots[:1])


class RoundsUpToWholeTokensOfFour(PlainPool):
    """Writes four tokens at a time, the last of them beyond the input."""

    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots)
        if len(slots) % 4 and slots[-1] >= self.cache.page_size:
            beyond = (slots[-1:] + 1).clamp(max=(self.num_pages + 1) * self.cache.page_size - 1)
            if not (slots == beyond).any():
                super().store(layer, k[-1:], v[-1:], beyond)


class StridesIgnored(PlainPool):
    def store(self, layer, k, v, slots):
        def packed(x):
            heads, dim = x.shape[1:]
            return x.as_strided(x.shape, (heads * dim, dim, 1)) if x.numel() <= x.untyped_storage().size() else x

        super().store(layer, *map(packed, (k, v)), slots)


class OnlyTheTokensStrideIsRead(PlainPool):
    def store(self, layer, k, v, slots):
        k = k.as_strided(k.shape, (k.stride(0), k.shape[2], 1))
        super().store(layer, k, v, slots)


class SlotsWithGapsMisread(PlainPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots.as_strided(slots.shape, (1,)))


class EmptyStoreFails(PlainPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots[: int(slots.max())])


class MultipliesWhatWasThere(PlainPool):
    """Blends whole pages, which leaves NaN where NaN was."""

    def store(self, layer, k, v, slots):
        kv = self.layers[layer]
        old = [part.clone() for part in (kv.k, kv.v)]
        super().store(layer, k, v, slots)
        if self.cache.kv_dtype == "bfloat16":
            for part, before in zip((kv.k, kv.v), old, strict=True):
                part += 0.0 * before.flatten(1).sum(1).reshape(-1, 1, 1, 1)


class SpreadsNaN(PlainPool):
    """Sums over what is stored, as a matrix product with one-hot rows does."""

    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots)
        if self.cache.kv_dtype == "bfloat16" and len(slots):
            self.layers[layer].k[2] += 0.0 * k.sum()


class ReadsBitsOfOtherDtypes(PlainPool):
    def quantised(self, new, scale):
        dtype = getattr(torch, self.cache.kv_dtype)
        if dtype.itemsize == new.dtype.itemsize:
            return new.contiguous().view(dtype)
        return super().quantised(new, scale)


class HNDStoredAsNHD(PlainPool):
    def store(self, layer, k, v, slots):
        kept = self.layers[layer]
        heads, size = self.cache.num_kv_heads, self.cache.page_size
        k_pages, v_pages = (part.view(len(part), size, heads, -1) for part in (kept.k, kept.v))
        self.layers[layer] = dataclasses.replace(kept, k=k_pages, v=v_pages, layout="NHD")
        super().store(layer, k, v, slots)
        self.layers[layer] = kept


class AlwaysNHD(PlainPool):
    def __init__(self, cache, num_pages, device):
        super().__init__(dataclasses.replace(cache, layout="NHD"), num_pages, device)
        self.cache = cache


class Float16ForBFloat16(PlainPool):
    def new_layer(self):
        kv = super().new_layer()
        half = kv.k.dtype == torch.bfloat16
        return dataclasses.replace(kv, k=kv.k.half(), v=kv.v.half()) if half else kv


class NotZeroed(PlainPool):
    def new_layer(self):
        kv = super().new_layer()
        kv.v.view(torch.uint8)[-1, -1] = 0xFF
        return kv


class PagesPadded(PlainPool):
    def new_layer(self):
        kv = super().new_layer()
        k, v = (torch.nn.functional.pad(part.float(), (0, 8)).to(part.dtype) for part in (kv.k, kv.v))
        return dataclasses.replace(kv, k=k[..., :-8], v=v[..., :-8])


class JoinedInName(MHAPool):
    """Declares joined layers and keeps a storage for each part."""

    def __init__(self, cache, num_pages, device):
        super().__init__(dataclasses.replace(cache, joined_layers=False), num_pages, device)
        self.cache = cache


class CopiesOneLayer(PlainPool):
    def copy_pages(self, src, dst):
        pages = [torch.as_tensor(ids).long() for ids in (src, dst)]
        src, dst = (ids[pages[1] > 0] for ids in pages)
        if len(src) and int(max(src.max(), dst.max())) > self.num_pages:
            raise ContractError("no such page")
        for part in self.parts()[:2]:
            rows = part.view(torch.uint8)
            rows[dst] = rows[src]


class CopiesToTheNullPage(PlainPool):
    def copy_pages(self, src, dst):
        super().copy_pages(src, dst)
        for part in self.parts() if len(dst) else ():
            part[0] = part[1]


class WritesRecordsToTheNullPage(PlainPool):
    def write_pages(self, pages, data):
        super().write_pages(pages, data)
        for part in self.parts() if 0 in torch.as_tensor(pages) else ():
            part[0] = part[1]


class ValuesBeforeKeys(PlainPool):
    def parts(self):
        return [part for kv in self.layers for part in (kv.v, kv.k)]


class ReadsEachPageOnce(PlainPool):
    def read_pages(self, pages, out=None):
        ids = torch.as_tensor(pages)
        return super().read_pages(torch.unique(ids) if len(ids) else ids, out)


class IgnoresTheBuffer(PlainPool):
    def read_pages(self, pages, out=None):
        return super().read_pages(pages)


class ClampsPages(PlainPool):
    def read_pages(self, pages, out=None):
        return super().read_pages(np.clip(pages, 0, self.num_pages) if isinstance(pages, np.ndarray) else pages, out)


class MovesWhenItStores(PlainPool):
    def store(self, layer, k, v, slots):
        kv = self.layers[layer]
        self.layers[layer] = dataclasses.replace(kv, k=kv.k.clone(), v=kv.v.clone())
        super().store(layer, k, v, slots)


class PartsAreCopies(PlainPool):
    kept = None

    def parts(self):
        self.kept = self.kept or [part.clone() for part in super().parts()]
        for copy, part in zip(self.kept, super().parts(), strict=True):
            copy.view(torch.uint8).copy_(part.view(torch.uint8))
        return self.kept


class OffsetsOf31Bits(PlainPool):
    capabilities = dataclasses.replace(PlainPool.capabilities, kv_dtypes=frozenset({FP8}), layouts=("NHD",))

    def new_layer(self):
        k, v = (
            torch.from_numpy(np.zeros((self.num_pages + 1, *shape), np.uint8)) for shape in self.cache.page_shapes()
        )
        return LayerKV(k=k.view(torch.float8_e4m3fn), v=v.view(torch.float8_e4m3fn), layout="NHD")

    def store(self, layer, k, v, slots):
        kv = self.layers[layer]
        for part, new in ((kv.k, k), (kv.v, v)):
            row = self.quantised(new, 1.0).view(torch.uint8).flatten(1)
            places = (slots[:, None] * row.shape[1] + torch.arange(row.shape[1])) % 2**31
            part.view(torch.uint8).view(-1)[places] = row


class ValuesBesideTheKeys(MLAPool):
    def __init__(self, cache, num_pages, device):
        super().__init__(cache, num_pages, device)
        self.layers = [dataclasses.replace(kv, v=kv.v.clone()) for kv in self.layers]


class RopeFirst(MLAPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k if v is None else torch.cat([v, k], dim=1), None, slots)


class TwoScalesForOneRow(MLAPool):
    def set_scales(self, layer, k_scale, v_scale):
        super().set_scales(layer, k_scale, k_scale)


class OneScaleForARow(DSAPool):
    def store(self, layer, k, v, slots):
        rows = k if v is None else torch.cat([k, v], dim=1)
        super().store(layer, rows, None, slots)
        stored = self.layers[layer].k.flatten(0, 2)
        kept = slots >= self.cache.page_size
        fp8, scale = quantize_tiles(rows[kept, :512])
        stored[slots[kept], :512] = fp8.view(torch.uint8)
        stored[slots[kept], 512:528] = scale.expand(-1, 4).contiguous().view(torch.uint8)


class ScalesBesideTheKeys(IndexKPool):
    """A key and its scale together, as no kernel reads them."""

    def store(self, layer, k, v, slots):
        for token, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, self.cache.page_size)
            if page:
                fp8, scale = quantize_tiles(k[token])
                self.layers[layer].k[page, offset, 0] = torch.cat([fp8.view(torch.uint8), scale.view(torch.uint8)])


class SetsScalesThatItMakesItself(IndexKPool):
    def set_scales(self, layer, k_scale, v_scale):
        pass


class SwapsPiecesOf5D(MHAPool):
    def store(self, layer, k, v, slots):
        super().store(layer, k, v, slots)
        if self.cache.layout == "5D" and len(slots) and int(slots[0]) >= self.cache.page_size:
            page, offset = divmod(int(slots[0]), self.cache.page_size)
            token = tokens_view(self.layers[layer].k, "5D", "k")[page, 0, offset]
            token.copy_(token.flip(1))


STORE = "store writes tokens to their slots and nothing else, bfloat16, NHD"
NULL = "store keeps tokens of the null page's slots out of it, bfloat16, NHD"
STRIDES = "store reads inputs of any strides, bfloat16, NHD"
SHAPE = "pages have the shape, dtype and layout of the cache, bfloat16, NHD"
NUM_PAGES = "there are num_pages pages and the null page, bfloat16, NHD"
FLOAT_SCALE = f"fp8 is stored as value / scale, a float, {FP8}, NHD"
NO_SCALE = "set_scales refuses what cannot be a scale"
NAN = "NaN stays in the slots that it was stored to, bfloat16, NHD"

MUTANTS = {
    WritesTheNullPage: NULL,
    PaddingIsTheLastPage: NULL,
    ScaleIgnored: FLOAT_SCALE,
    Multiplies: f"fp8 is stored as value / scale, a tensor, {FP8}, HND",
    ScaleOfTheFirstLayer: FLOAT_SCALE,
    ScalesOfKeysAndValuesSwapped: FLOAT_SCALE,
    ScalesOfAllLayers: FLOAT_SCALE,
    ScalesOfTheNextHead: f"fp8 is stored as value / scale, one for each head, {FP8}, NZ",
    NotSaturating: f"fp8 saturates, {FP8}, NHD",
    TruncatesFar: FLOAT_SCALE,
    AnyScaleWillDo: NO_SCALE,
    RefusesHalfway: NO_SCALE,
    OneSlotOff: STORE,
    ValuesOneSlotOff: STORE,
    OnePageLess: NUM_PAGES,
    OnePageTooMany: NUM_PAGES,
    AnotherLayerToo: STORE,
    RoundsUpToWholeTokensOfFour: STORE,
    StridesIgnored: STRIDES,
    OnlyTheTokensStrideIsRead: STRIDES,
    SlotsWithGapsMisread: STRIDES,
    EmptyStoreFails: "store of no tokens changes nothing, bfloat16, NHD",
    MultipliesWhatWasThere: NAN,
    SpreadsNaN: NAN,
    ReadsBitsOfOtherDtypes: "store converts other dtypes, bfloat16, NHD",
    HNDStoredAsNHD: "store writes tokens to their slots and nothing else, bfloat16, HND",
    AlwaysNHD: "pages have the shape, dtype and layout of the cache, bfloat16, HND",
    Float16ForBFloat16: SHAPE,
    NotZeroed: "a fresh pool is zero, bfloat16, NHD",
    PagesPadded: SHAPE,
    JoinedInName: "pages lie where the cache says, joined layers, NHD",
    CopiesOneLayer: "copy_pages copies all layers, and never to the null page, bfloat16, NHD",
    CopiesToTheNullPage: "copy_pages copies all layers, and never to the null page, bfloat16, NHD",
    WritesRecordsToTheNullPage: "write_pages writes all layers, and never the null page, bfloat16, NHD",
    ValuesBeforeKeys: "read_pages gives the bytes of all layers, bfloat16, NHD",
    ReadsEachPageOnce: "read_pages gives the bytes of all layers, bfloat16, NHD",
    IgnoresTheBuffer: "read_pages writes to a buffer with rows apart, bfloat16, NHD",
    ClampsPages: "pages beyond the pool are refused, bfloat16, NHD",
    MovesWhenItStores: "parts are the storage, and stay where they are, bfloat16, NHD",
    PartsAreCopies: "parts are the storage, and stay where they are, bfloat16, NHD",
    OffsetsOf31Bits: "offsets beyond 31 bits are right, NHD",
    ValuesBesideTheKeys: "values are a view of the keys, bfloat16, NHD",
    RopeFirst: "store takes latents and rope parts apart, bfloat16, NHD",
    TwoScalesForOneRow: NO_SCALE,
    OneScaleForARow: f"store writes tokens to their slots and nothing else, {FP8}, NHD",
    ScalesBesideTheKeys: f"store writes tokens to their slots and nothing else, {FP8}, NHD",
    SetsScalesThatItMakesItself: "set_scales refuses where there are no scales",
    SwapsPiecesOf5D: "store writes tokens to their slots and nothing else, bfloat16, 5D",
}
"""Each with the check whose name says what is wrong."""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught_by_the_check_that_names_what_is_wrong(mutant, seed):
    check = memory_checks(mutant)[MUTANTS[mutant]]
    try:
        said = failure(check, seed)
    except CannotRunError as reason:
        pytest.skip(str(reason))
    assert said


def test_what_a_check_says_has_places_and_numbers():
    said = {mutant: outcome(memory_checks(mutant)[name]) for mutant, name in MUTANTS.items()}
    assert "which is in the null page" in said[WritesTheNullPage]
    assert "which is another layer's" in said[AnotherLayerToo]
    assert "has layout NHD, and the cache asks for HND" in said[AlwaysNHD]
    assert "has 5 pages; 5 that sequences can own and the null page are 6" in said[OnePageLess]
    assert "saturates at 448.0" in said[NotSaturating]
    assert "belongs into slot" in said[OnlyTheTokensStrideIsRead]


# Declarations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeverRefuses(PoolCapabilities):
    def reject_reasons(self, device_kind, **asked):
        return []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusesAll(PoolCapabilities):
    def reject_reasons(self, device_kind, **asked):
        other = PoolCapabilities(kind="dsa", kv_dtypes=frozenset({"float64"}), device_kinds=frozenset({"none"}))
        return other.reject_reasons(device_kind, **asked)


@pytest.mark.parametrize("declaration", [NeverRefuses, RefusesAll], ids=lambda declaration: declaration.__name__)
def test_a_declaration_that_refuses_too_little_or_too_much_is_caught(declaration):
    class Declared(PlainPool):
        capabilities = declaration(kind="mha", kv_dtypes=frozenset({"bfloat16", FP8}), device_kinds=frozenset({"cpu"}))

    checks = {check.name: check for check in pools.contract_checks(target(Declared))}
    for field in ("device_kinds", "kind", "kv_dtypes", "per_head_scales", "joined_layers"):
        with pytest.raises(CheckFailedError, match="reject_reasons"):
            checks[f"reject_reasons is about {field} as declared"].run(0)


def test_a_declaration_that_no_cache_can_have_is_caught():
    class Declared(PlainPool):
        capabilities = PoolCapabilities(kind="dsa", kv_dtypes=frozenset({FP8, "bfloat16"}), layouts=ALL_LAYOUTS)

    checks = {check.name: check for check in pools.contract_checks(target(Declared))}
    with pytest.raises(CheckFailedError, match="no cache of kind 'dsa' can have kv_dtype 'bfloat16' in layout NHD"):
        checks["a cache of its kind can have each of its dtypes"].run(0)
    with pytest.raises(CheckFailedError, match="in layout HND"):
        checks["a cache of its kind can have each of its layouts"].run(0)
    assert {case.cache.layout for case in cases_for(Declared.capabilities)} == {"NHD"}


def test_what_is_no_pool_has_checks_of_the_contract_alone():
    for loaded in (object(), PlainPool.store, KVPool):
        wrong = Target(kind="pool", name="wrong", place="some.module:wrong", loaded=loaded)
        assert any(outcome(check) for check in pools.contract_checks(wrong))
        assert list(pools.checks(loaded, CPU)) == []
