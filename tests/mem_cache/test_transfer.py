"""Export and import: a sequence arrives as it was, or is refused for a reason that is named, and nothing changes."""

import hashlib
import json
import random
import struct

import numpy as np
import pytest
import torch

import anyattn
from anyattn.errors import ContractError, OutOfPagesError, StorageError
from anyattn.mem_cache import transfer
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.mem_cache.sparse_pools import DSAPool, IndexKPool
from anyattn.mem_cache.spec import CacheSpec
from anyattn.mem_cache.transfer import export_chunks, export_sequence, import_sequence
from anyattn.mem_cache.windows import WindowPages

POOLS = {"mha": MHAPool, "mla": MLAPool, "dsa": DSAPool, "index": IndexKPool}
FP8 = "float8_e4m3fn"
SPECS = {
    "mha_nhd_float32": {},
    "mha_nhd_bfloat16_joined": {"kv_dtype": "bfloat16", "joined_layers": True},
    "mha_hnd_fp8": {"layout": "HND", "kv_dtype": FP8},
    "mha_nz_bfloat16": {"layout": "NZ", "kv_dtype": "bfloat16", "head_dim": 32, "v_head_dim": 16},
    "mha_nz_fp8_joined": {
        "layout": "NZ", "kv_dtype": FP8, "head_dim": 32, "v_head_dim": 16, "joined_layers": True
    },
    "mha_5d_float32": {"layout": "5D", "v_head_dim": 4, "page_size": 8},
    "mha_5d_bfloat16": {"layout": "5D", "kv_dtype": "bfloat16", "page_size": 16},
    "mha_5d_fp8": {"layout": "5D", "kv_dtype": "float8_e5m2", "head_dim": 16, "page_size": 32},
    "mla_bfloat16": {"kind": "mla", "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 8, "kv_dtype": "bfloat16"},
    "mla_hnd_float32_joined": {
        "kind": "mla", "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 8, "layout": "HND", "joined_layers": True
    },
    "mla_5d_fp8": {
        "kind": "mla", "num_kv_heads": 1, "head_dim": 48, "v_head_dim": 32, "layout": "5D", "kv_dtype": FP8
    },
    "dsa": {"kind": "dsa", "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "kv_dtype": FP8},
    "index": {"kind": "index", "num_kv_heads": 1, "head_dim": 32, "v_head_dim": 0, "kv_dtype": FP8},
}  # fmt: skip


def cache_spec(**fields):
    base = {
        "num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "v_head_dim": 5, "kv_dtype": "float32", "page_size": 4
    }  # fmt: skip
    return CacheSpec(**{**base, **fields})


class Side:
    """One process: a table whose free pages lie in random order, and pools full of NaN or of another byte."""

    def __init__(self, specs, *, windows=(), num_pages=40, num_window_pages=40, fill=0xFF, device="cpu"):
        specs = [spec if isinstance(spec, tuple) else (spec,) for spec in specs]
        page_size = specs[0][0].page_size
        allocator = PagedAllocator(num_pages, page_size)
        window_pages = [
            WindowPages(window, PagedAllocator(num_window_pages, page_size), num_pages=num_pages, page_size=page_size)
            for window in windows
        ]
        self.table = PageTable(allocator, page_size, windows=window_pages, debug=True)
        self.pools = []
        for group, caches in enumerate(specs):
            pages = num_window_pages if group else num_pages
            pools = tuple(POOLS[cache.kind](cache, pages, device) for cache in caches)
            for pool in pools:
                data = torch.full((pages, pool.cache.bytes_per_page), fill, dtype=torch.uint8, device=device)
                pool.write_pages(np.arange(1, pages + 1), data)
            self.pools.append(pools if len(pools) > 1 else pools[0])
        for one in (allocator, *(window.allocator for window in window_pages)):
            for page in np.random.default_rng().permutation(one.alloc(one.num_pages)):
                one.free(np.array([page]))

    def all_pools(self):
        for group, entry in enumerate(self.pools):
            for pool in entry if isinstance(entry, tuple) else (entry,):
                yield group, pool

    def state(self):
        """All that an import could change."""
        free = [self.table.allocator.num_free_pages, *(w.allocator.num_free_pages for w in self.table.windows)]
        refs = self.table.allocator.ref_counts(np.arange(1, self.table.allocator.num_pages + 1)).tolist()
        mapping = [window.page_of.tolist() for window in self.table.windows]
        return free, refs, mapping, [contents(pool).numpy().tobytes() for _, pool in self.all_pools()]

    def grow(self, steps, tokens):
        """A sequence that is extended in steps, with the tokens' keys and values stored in every layer."""
        (seq,) = self.table.new_sequences(1)
        length = 0
        for step in steps:
            self.table.extend([seq], [step])
            position = np.arange(length, length + step)
            length += step
            pages, page_size = self.table.pages(seq), self.table.page_size
            for index, (group, pool) in enumerate(self.all_pools()):
                own = self.table.windows[group - 1].page_of[pages] if group else pages
                slots = own[position // page_size].astype(np.int64) * page_size + position % page_size
                store(pool, tokens[index], position, slots)
        return seq


def contents(pool):
    return pool.read_pages(np.arange(1, pool.num_pages + 1, dtype=np.int32)).cpu()


def random_tokens(side, num_tokens, seed):
    """For each pool: keys and values of all layers, as `store` takes them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = []
    for _, pool in side.all_pools():
        cache = pool.cache
        if cache.kind == "mha":
            k, v = (num_tokens, cache.num_kv_heads, cache.head_dim), (num_tokens, cache.num_kv_heads, cache.v_head_dim)
        else:
            k, v = (num_tokens, cache.head_dim), None
        shapes.append((cache.num_layers, k, v))
    return [
        [
            tuple(None if shape is None else torch.randn(shape, generator=generator) for shape in (k, v))
            for _ in range(num_layers)
        ]
        for num_layers, k, v in shapes
    ]


def store(pool, layers, position, slots):
    device = pool.device
    dtype = getattr(torch, pool.cache.kv_dtype)
    dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
    for layer, (k, v) in enumerate(layers):
        k, v = (None if x is None else x[position].to(device, dtype) for x in (k, v))
        pool.store(layer, k, v, torch.from_numpy(slots).to(device))


def split(num_tokens):
    """Odd steps that make a sequence of this length."""
    steps = []
    while sum(steps) < num_tokens:
        steps.append(min(random.randint(1, 7), num_tokens - sum(steps)))
    return steps


@pytest.mark.parametrize("spec", SPECS)
def test_a_sequence_arrives_on_other_pages_of_a_pool_stored_in_another_way(spec):
    seed = random.randrange(2**31)
    print("seed:", seed)
    cache = cache_spec(**SPECS[spec])
    other = cache_spec(**{**SPECS[spec], "joined_layers": not cache.joined_layers})
    num_tokens = 3 * cache.page_size + random.randint(1, cache.page_size)
    here, there = Side([cache]), Side([other], fill=0x7F)
    tokens = random_tokens(here, num_tokens, seed)
    here.grow([5], tokens)
    seq = here.grow(split(num_tokens), tokens)
    data = export_sequence(here.table, here.pools, seq)
    before = contents(there.pools[0])
    arrived = import_sequence(there.table, there.pools, data)
    assert there.table.lengths([arrived]) == [num_tokens]
    pages = there.table.pages(arrived)
    after = contents(there.pools[0])
    rest = np.setdiff1d(np.arange(1, 41), pages)
    assert torch.equal(after[rest - 1], before[rest - 1])
    # The same tokens stored over zeros, in the order of pages that they have there.
    zeros = Side([other], fill=0)
    slots = pages[np.arange(num_tokens) // cache.page_size].astype(np.int64) * cache.page_size
    store(zeros.pools[0], tokens[0], np.arange(num_tokens), slots + np.arange(num_tokens) % cache.page_size)
    assert torch.equal(contents(zeros.pools[0])[pages - 1], after[pages - 1])
    there.table.check()


@pytest.mark.parametrize("spec", SPECS)
def test_what_lies_beyond_the_length_never_gets_into_the_bytes(spec):
    seed = random.randrange(2**31)
    print("seed:", seed)
    cache = cache_spec(**SPECS[spec])
    for used in {1, random.randint(1, cache.page_size), cache.page_size - 1, cache.page_size}:
        exports = []
        for fill in (0xFF, 0, 0x5A):
            side = Side([cache], fill=fill)
            tokens = random_tokens(side, cache.page_size + used, seed)
            exports.append(export_sequence(side.table, side.pools, side.grow(split(cache.page_size + used), tokens)))
        assert exports[0] == exports[1] == exports[2]


def test_a_sequence_with_windows_comes_back_from_a_second_export_as_the_same_bytes():
    hypothesis = pytest.importorskip("hypothesis")  # a borrowed GPU host may lack it, and this file has tests for that
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(data=st.data())
    def comes_back(data):
        page_size = data.draw(st.sampled_from([1, 2, 3, 4, 16]))
        windows = data.draw(st.lists(st.integers(1, 20), max_size=2, unique=True))
        num_tokens = data.draw(st.integers(0, 40))
        specs = [cache_spec(page_size=page_size, num_layers=1 + index) for index in range(1 + len(windows))]
        sizes = {"windows": windows, "num_window_pages": 90}
        here, there = Side(specs, num_pages=120, **sizes), Side(specs, num_pages=100, fill=3, **sizes)
        tokens = random_tokens(here, num_tokens, data.draw(st.integers(0, 2**31)))
        steps = []
        while sum(steps) < num_tokens:
            steps.append(data.draw(st.integers(1, num_tokens - sum(steps))))
        seq = here.grow(steps, tokens)
        exported = export_sequence(here.table, here.pools, seq)
        assert b"".join(export_chunks(here.table, here.pools, seq)) == exported
        arrived = import_sequence(there.table, there.pools, exported)
        there.table.check()
        assert export_sequence(there.table, there.pools, arrived) == exported
        copy = import_sequence(there.table, there.pools, bytearray(exported))
        there.table.free([arrived])
        assert export_sequence(there.table, there.pools, copy) == exported
        assert import_sequence(here.table, here.pools, memoryview(exported)) != seq
        there.table.extend([copy], [3])
        there.table.free([copy])
        assert there.state()[0] == [100, *([90] * len(windows))]

    comes_back()


def test_pools_that_share_their_pages_travel_together():
    latents, keys = cache_spec(**SPECS["dsa"]), cache_spec(**SPECS["index"])
    here, there = Side([(latents, keys)]), Side([(latents, keys)])
    tokens = random_tokens(here, 11, 1)
    data = export_sequence(here.table, here.pools, here.grow([11], tokens))
    assert export_sequence(there.table, there.pools, import_sequence(there.table, there.pools, data)) == data
    with pytest.raises(ContractError, match="pools differ: the export has 2, and here are 1"):
        import_sequence(there.table, [there.pools[0][0]], data)


@pytest.mark.parametrize("windows", [(7, 7), (7, 20)], ids=["one-window", "two-windows"])
@pytest.mark.parametrize("num_tokens", [0, 3, 32])
def test_a_model_whose_layers_all_have_windows_goes_on_elsewhere_as_here(windows, num_tokens):
    local = anyattn.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
    specs = [local.replace(sliding_window=window) for window in windows]
    here, there = (
        anyattn.create_runtime(
            specs, num_pages=pages, num_window_pages=20, page_size=4, device="cpu", backend="torch_native"
        )
        for pages in (20, 25)
    )

    def step(rt, seq, tensors):
        plan = rt.plan(rt.extend([seq], [len(tensors[0][0])]))
        return [rt.run(layer, *qkv, plan) for layer, qkv in enumerate(tensors)]

    def random_step(num_new):
        return [[torch.randn(num_new, heads, 16) for heads in (4, 2, 2)] for _ in windows]

    _, seq = here.new_sequences(2)
    step(here, seq, random_step(num_tokens))
    exported = anyattn.export_sequence(here.table, here.pools, seq)
    arrived = anyattn.import_sequence(there.table, there.pools, exported)
    assert there.table.lengths([arrived]) == [num_tokens]
    assert anyattn.export_sequence(there.table, there.pools, arrived) == exported
    tensors = random_step(3)
    for ours, theirs in zip(step(here, seq, tensors), step(there, arrived, tensors), strict=True):
        torch.testing.assert_close(ours, theirs)
    there.table.check()


def test_shared_and_shortened_sequences_are_exported_as_they_are():
    cache = cache_spec()
    here = Side([cache])
    tokens = random_tokens(here, 14, random.randrange(2**31))
    seq = here.grow([14], tokens)
    whole = export_sequence(here.table, here.pools, seq)
    (fork,) = here.table.fork(seq)
    assert export_sequence(here.table, here.pools, fork) == whole
    here.table.truncate([fork], [9])
    shorter = Side([cache])
    assert export_sequence(here.table, here.pools, fork) == export_sequence(
        shorter.table, shorter.pools, shorter.grow([9], tokens)
    )


def test_long_sequences_are_moved_in_pieces(monkeypatch):
    cache = cache_spec()
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", 3 * cache.bytes_per_page - 1)
    here, there = Side([cache]), Side([cache])
    seq = here.grow([38], random_tokens(here, 38, random.randrange(2**31)))
    pieces = [len(piece) // cache.bytes_per_page for piece in export_chunks(here.table, here.pools, seq)]
    assert pieces[1:-1] == [2, 2, 2, 2, 2]
    data = export_sequence(here.table, here.pools, seq)
    arrived = import_sequence(there.table, there.pools, data)
    monkeypatch.undo()
    assert export_sequence(there.table, there.pools, arrived) == data


@pytest.fixture(scope="module")
def tiny():
    """An export of some hundred bytes, and a side that takes it."""
    cache = cache_spec(num_layers=1, num_kv_heads=1, head_dim=1, v_head_dim=1, page_size=2)
    here, there = Side([cache, cache], windows=[2], num_pages=4), Side([cache, cache], windows=[2], num_pages=4)
    seq = here.grow([3], random_tokens(here, 3, random.randrange(2**31)))
    data = export_sequence(here.table, here.pools, seq)
    there.table.free([import_sequence(there.table, there.pools, data)])
    return data, there


def refused(side, data, match=None, error=ContractError):
    before = side.state()
    with pytest.raises(error, match=match) as raised:
        import_sequence(side.table, side.pools, data)
    side.table.check()
    assert side.state() == before
    return raised.value


def test_every_flipped_byte_is_found(tiny):
    data, side = tiny
    for position in range(len(data)):
        for flip in {1 << random.randrange(8), 0xFF}:
            damaged = bytearray(data)
            damaged[position] ^= flip
            refused(side, damaged, error=StorageError)


def test_every_cut_and_every_extension_is_found(tiny):
    data, side = tiny
    for length in range(len(data)):
        refused(side, data[:length], "cut off", StorageError)
    for more in (b"\0", data[-1:], data):
        refused(side, data + more, "extended", StorageError)
    refused(side, data[1:], error=StorageError)


def test_another_version_is_told_from_damage_and_what_never_was_an_export_counts_as_damaged(tiny):
    data, side = tiny
    refused(side, "text", "imported from bytes, not str")
    newer = data[:8] + struct.pack("<I", 2) + data[12:-32]
    newer += hashlib.sha256(newer).digest()
    refused(side, newer, "version of the format differs: the export has 2, and here it is 1")
    refused(side, newer[:-32] + data[-32:], "damaged: its bytes do not give its checksum", StorageError)
    refused(side, data[:-1] + bytes([data[-1] ^ 1]), "damaged: its bytes do not give its checksum", StorageError)
    refused(side, b"{}" * 100, "no export, or a damaged one: they begin with b'{}{}", StorageError)


def with_header(data, change):
    """The export of another writer, with a right checksum."""
    magic, version, header_bytes, record_bytes = struct.unpack_from("<8sIIQ", data)
    header = json.loads(data[24 : 24 + header_bytes])
    header = json.dumps(change(header)).encode()
    body = struct.pack("<8sIIQ", magic, version, len(header), record_bytes) + header + data[24 + header_bytes : -32]
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: [], "not one of this format"),
        (lambda h: {"num_tokens": 3}, "not one of this format"),
        (lambda h: {**h, "num_tokens": -1}, "num_tokens or pools cannot be"),
        (lambda h: {**h, "num_tokens": True}, "num_tokens or pools cannot be"),
        (lambda h: {**h, "num_tokens": 3.0}, "num_tokens or pools cannot be"),
        (lambda h: {**h, "num_tokens": 5}, "first_page of pool 1 differs|num_pages of pool 0 differs"),
        (lambda h: {**h, "num_tokens": 10**30}, "num_tokens or pools cannot be"),
        (lambda h: {**h, "num_tokens": 2**61}, "num_pages of pool 0 differs"),
        (lambda h: {**h, "pools": {}}, "num_tokens or pools cannot be"),
        (lambda h: {**h, "pools": [1, 2]}, "a pool is not an object"),
        (lambda h: {**h, "pools": h["pools"][:1]}, "pools differ: the export has 1, and here are 2"),
        (lambda h: {**h, "pools": [{**h["pools"][0], "num_pages": 1}, h["pools"][1]]}, "num_pages of pool 0 differs"),
        (lambda h: {**h, "pools": [h["pools"][0], {**h["pools"][1], "first_page": 0}]}, "first_page of pool 1 differs"),
        (lambda h: {**h, "pools": [{**h["pools"][0], "rotation": "x"}, h["pools"][1]]}, "rotation of pool 0 differs"),
        (
            lambda h: {**h, "pools": [{n: x for n, x in h["pools"][0].items() if n != "layout"}, h["pools"][1]]},
            "layout of pool 0 differs: the export has 'nothing', and here it is 'NHD'",
        ),
    ],
    ids=lambda value: None if callable(value) else value.split(" differs")[0][-20:].replace(" ", "_"),
)
def test_headers_of_other_writers_are_checked_before_anything_is_taken(change, match, tiny):
    data, side = tiny
    assert with_header(data, lambda header: header) == data
    refused(side, with_header(data, change), match)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("num_layers", {}, {"num_layers": 3}),
        ("num_kv_heads", {}, {"num_kv_heads": 1}),
        ("head_dim", {}, {"head_dim": 16}),
        ("v_head_dim", {}, {"v_head_dim": 8}),
        ("kv_dtype", {"kv_dtype": "float16"}, {"kv_dtype": "bfloat16"}),
        ("layout", {"layout": "HND"}, {}),
        ("page_size", {}, {"page_size": 8}),
        ("kind", {"num_kv_heads": 1}, {"num_kv_heads": 1, "kind": "mla"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pools_that_differ_are_refused_with_the_field_and_both_values(name, theirs, ours):
    sides = [Side([cache_spec(**{"v_head_dim": 5, **fields})]) for fields in (theirs, ours)]
    seq = sides[0].grow([6], random_tokens(sides[0], 6, 0))
    data = export_sequence(sides[0].table, sides[0].pools, seq)
    their, our = (repr(getattr(side.pools[0].cache, name)) for side in sides)
    refused(sides[1], data, f"{name} of pool 0 differs: the export has {their}, and here it is {our}")


def test_windows_that_differ_are_refused():
    cache = cache_spec()
    here = Side([cache, cache], windows=[6])
    data = export_sequence(here.table, here.pools, here.grow([20], random_tokens(here, 20, 0)))
    refused(Side([cache, cache], windows=[7]), data, "window of pool 1 differs: the export has 6, and here it is 7")
    refused(Side([cache]), data, "pools differ: the export has 2, and here are 1")
    refused(Side([cache] * 3, windows=[6, 7]), data, "pools differ: the export has 2, and here are 3")


def test_fp8_scales_must_be_the_same_number_however_they_are_given():
    cache = cache_spec(kv_dtype=FP8)

    def side(layer, k_scale, v_scale):
        made = Side([cache])
        made.pools[0].set_scales(layer, k_scale, v_scale)
        return made

    here = side(1, 0.1, torch.tensor(0.5))
    data = export_sequence(here.table, here.pools, here.grow([6], random_tokens(here, 6, 0)))
    for same in (side(1, torch.tensor([0.1]), 0.5), side(1, torch.full((3,), 0.1), torch.full((3,), 0.5))):
        import_sequence(same.table, same.pools, data)
    refused(side(1, 0.2, 0.5), data, r"k_scale of layer 1 of pool 0 differs: the export has \[0.1")
    refused(side(1, 0.1, torch.tensor([0.5, 0.5, 0.4])), data, "v_scale of layer 1 of pool 0 differs")
    refused(side(0, 0.1, 0.5), data, "k_scale of layer 0 of pool 0 differs")


def test_too_few_pages_of_either_kind_leave_all_as_it_was():
    cache = cache_spec()
    here = Side([cache, cache], windows=[9])
    data = export_sequence(here.table, here.pools, here.grow([21], random_tokens(here, 21, 0)))
    error = refused(Side([cache, cache], windows=[9], num_pages=5), data, error=OutOfPagesError)
    assert (error.pages_needed, error.pages_free, error.window) == (6, 5, None)
    error = refused(Side([cache, cache], windows=[9], num_window_pages=2), data, error=OutOfPagesError)
    assert (error.pages_needed, error.pages_free, error.window) == (3, 2, 9)


def test_when_writing_fails_the_pages_go_back(monkeypatch):
    cache = cache_spec()
    here, there = Side([cache, cache], windows=[9]), Side([cache, cache], windows=[9])
    data = export_sequence(here.table, here.pools, here.grow([21], random_tokens(here, 21, 0)))
    before = there.state()[:3]

    def failing(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(there.pools[1], "write_pages", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        import_sequence(there.table, there.pools, data)
    there.table.check()
    assert there.state()[:3] == before
    monkeypatch.undo()
    import_sequence(there.table, there.pools, data)


def test_pools_that_do_not_belong_to_the_table_and_freed_sequences_are_refused(tiny):
    cache = cache_spec()
    here = Side([cache])
    seq = here.grow([3], random_tokens(here, 3, 0))
    with pytest.raises(ContractError, match="one for each of 0 windows; 2 given"):
        export_sequence(here.table, [*here.pools, *here.pools], seq)
    with pytest.raises(ContractError, match="page_size 8, and the table 4"):
        export_sequence(here.table, Side([cache_spec(page_size=8)]).pools, seq)
    here.table.free([seq])
    with pytest.raises(ContractError):
        export_chunks(here.table, here.pools, seq)


@pytest.mark.cuda
@pytest.mark.parametrize("spec", SPECS)
def test_a_sequence_travels_between_a_gpu_and_the_cpu(spec):
    cache = cache_spec(**SPECS[spec])
    gpu, cpu, second = Side([cache], device="cuda"), Side([cache]), Side([cache], device="cuda", fill=1)
    num_tokens = 2 * cache.page_size + 3
    seq = gpu.grow(split(num_tokens), random_tokens(gpu, num_tokens, random.randrange(2**31)))
    data = export_sequence(gpu.table, gpu.pools, seq)
    arrived = import_sequence(cpu.table, cpu.pools, data)
    assert export_sequence(cpu.table, cpu.pools, arrived) == data
    back = import_sequence(second.table, second.pools, data)
    assert export_sequence(second.table, second.pools, back) == data
