"""Tiers: what was saved comes back bit by bit, wherever it goes, and what goes wrong changes nothing and is told."""

import contextlib
import hashlib
import json
import random
import struct
import threading

import numpy as np
import pytest
import torch

import anyattn
from anyattn.errors import ContractError, OutOfPagesError, StorageError
from anyattn.mem_cache import host_tier
from anyattn.mem_cache.empty_pool import EmptyPool
from anyattn.mem_cache.file_tier import FileTier
from anyattn.mem_cache.host_tier import HostTier
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.mem_cache.sparse_pools import DSAPool, IndexKPool
from anyattn.mem_cache.spec import CacheSpec

SPECS = {
    "mha_nhd_float32": {},
    "mha_hnd_bfloat16_joined": {"layout": "HND", "kv_dtype": "bfloat16", "joined_layers": True},
    "mha_5d_fp8": {"layout": "5D", "kv_dtype": "float8_e4m3fn", "page_size": 16, "head_dim": 32, "v_head_dim": 16},
    "mha_nz_float16_joined": {
        "layout": "NZ", "kv_dtype": "float16", "head_dim": 32, "v_head_dim": 16, "joined_layers": True
    },
    "mla": {"kind": "mla", "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 8, "kv_dtype": "bfloat16"},
    "dsa": {"kind": "dsa", "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "kv_dtype": "float8_e4m3fn"},
    "index_joined": {
        "kind": "index", "num_kv_heads": 1, "head_dim": 32, "v_head_dim": 0, "kv_dtype": "float8_e4m3fn",
        "joined_layers": True,
    },
}  # fmt: skip
POOLS = {"mha": MHAPool, "mla": MLAPool, "dsa": DSAPool, "index": IndexKPool}


def new_pool(num_pages, *, device="cpu", seed=None, **fields):
    """A pool whose pages hold random bytes, NaN and all."""
    base = {
        "num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "v_head_dim": 5, "kv_dtype": "float32", "page_size": 3
    }  # fmt: skip
    cache = CacheSpec(**{**base, **fields})
    pool = POOLS[cache.kind](cache, num_pages, device)
    overwrite(pool, seed)
    return pool


def overwrite(pool, seed=None):
    seed = random.randrange(2**31) if seed is None else seed
    print("seed of the pool's bytes:", seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (pool.num_pages, pool.cache.bytes_per_page)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    pool.write_pages(np.arange(1, pool.num_pages + 1, dtype=np.int32), data.to(pool.device))


def contents(pool):
    """[num_pages + 1, bytes_per_page], uint8."""
    return pool.read_pages(np.arange(pool.num_pages + 1, dtype=np.int32)).cpu()


@pytest.fixture(params=["host", "file"])
def new_tier(request, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(pool, num_pages, **options):
            if request.param == "host":
                return HostTier(pool, num_pages, **options)
            name = f"tier{random.randrange(2**31)}"
            return stack.enter_context(FileTier(pool, num_pages, tmp_path / name, **options))

        yield make


@pytest.mark.parametrize("spec", SPECS)
def test_saved_pages_come_back_on_other_pages_after_their_own_were_overwritten(spec, new_tier):
    pool = new_pool(12, **SPECS[spec])
    tier = new_tier(pool, 6)
    pages = np.random.default_rng().permutation(12)[:5] + 1
    saved = contents(pool)[pages]
    host_pages = tier.save(pages)
    assert sorted(host_pages) == [*range(1, 6)]
    assert host_pages.dtype == np.int32
    assert (tier.num_pages, tier.num_free_pages) == (6, 1)
    overwrite(pool)
    expected = contents(pool)
    targets = np.random.default_rng().permutation(12)[:5] + 1
    expected[targets] = saved
    tier.load(host_pages, targets)
    assert torch.equal(contents(pool), expected)
    tier.synchronize()
    tier.free(host_pages)
    tier.check()
    assert tier.num_free_pages == 6


def test_the_null_page_is_saved_as_nothing_and_takes_nothing(new_tier):
    pool = new_pool(5)
    tier = new_tier(pool, 3)
    before = contents(pool)
    host_pages = tier.save(np.array([0, 4, 0, 2]))
    assert host_pages[[0, 2]].tolist() == [0, 0]
    assert host_pages[[1, 3]].all()
    assert tier.num_free_pages == 1
    tier.load(host_pages, np.array([0, 5, 0, 0]))
    before[5] = before[4]
    assert torch.equal(contents(pool), before)
    with pytest.raises(ContractError, match="page 3 is to be loaded from 0"):
        tier.load(host_pages, np.array([3, 5, 0, 1]))
    assert torch.equal(contents(pool), before)
    tier.free(host_pages)
    assert tier.num_free_pages == 3
    assert tier.save(np.zeros(4, dtype=np.int32)).tolist() == [0, 0, 0, 0]
    tier.load([], [])
    tier.free([])


def test_a_save_that_is_too_large_keeps_nothing(new_tier):
    pool = new_pool(5)
    tier = new_tier(pool, 3)
    tier.save([1])
    message = r"3 pages of the tier needed, 2 of 3 free.*Free pages of the tier, or make it larger"
    with pytest.raises(OutOfPagesError, match=message) as refused:
        tier.save([1, 2, 3])
    assert "num_pages" not in str(refused.value)
    assert (refused.value.pages_needed, refused.value.pages_free, refused.value.num_pages) == (3, 2, 3)
    assert tier.num_free_pages == 2
    tier.check()


def test_ids_that_mean_nothing_are_refused_and_nothing_changes(new_tier):
    pool = new_pool(5)
    tier = new_tier(pool, 4)
    kept = tier.save([1, 2])
    gone = tier.save([3])
    tier.free(gone)
    before = contents(pool)
    for call, match in [
        (lambda: tier.save([6]), "0 to 5"),
        (lambda: tier.save([-1]), "0 to 5"),
        (lambda: tier.save([[1]]), "flat list"),
        (lambda: tier.save([1.0]), "flat list"),
        (lambda: tier.load([5], [1]), "0 to 4"),
        (lambda: tier.load(gone, [1]), "free"),
        (lambda: tier.load([kept[0], *gone], [1, 2]), "free"),
        (lambda: tier.load(kept, [1]), "2 pages of the tier cannot go into 1"),
        (lambda: tier.load(kept, [3, 3]), "twice"),
        (lambda: tier.load(kept, [3, 6]), "0 to 5"),
        (lambda: tier.free(gone), "free"),
        (lambda: tier.free([kept[0], *gone]), "free"),
        (lambda: tier.free([kept[0], kept[0]]), "twice"),
        (lambda: tier.free([-1]), "0 to 4"),
    ]:
        with pytest.raises(ContractError, match=match):
            call()
    tier.check()
    assert tier.num_free_pages == 2
    assert torch.equal(contents(pool), before)


def test_one_saved_page_can_be_loaded_to_several(new_tier):
    pool = new_pool(5)
    tier = new_tier(pool, 2)
    expected = contents(pool)
    (host_page,) = tier.save([2])
    tier.load([host_page, host_page, host_page], [5, 1, 3])
    expected[[5, 1, 3]] = expected[2].clone()
    assert torch.equal(contents(pool), expected)


def test_a_save_that_fails_on_the_way_gives_its_pages_back(new_tier, monkeypatch):
    pool = new_pool(8)
    tier = new_tier(pool, 8, staging_bytes=2 * pool.cache.bytes_per_page)
    read, calls = pool.read_pages, []

    def failing(pages, *rest):
        calls.append(pages)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return read(pages, *rest)

    monkeypatch.setattr(pool, "read_pages", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        tier.save([1, 2, 3, 4])
    assert tier.num_free_pages == 8
    monkeypatch.undo()
    expected = contents(pool)
    expected[[4, 3, 2, 1]] = expected[[5, 6, 7, 8]]
    tier.load(tier.save([5, 6, 7, 8]), [4, 3, 2, 1])
    assert torch.equal(contents(pool), expected)


@pytest.mark.parametrize("kind", ["host", "file"])
def test_saves_frees_and_loads_in_any_order_agree_with_a_dictionary(kind, tmp_path, monkeypatch):
    """With memory in segments of two pages, chunks of few, and room for few to wait for the disk."""
    hypothesis = pytest.importorskip("hypothesis")  # a borrowed GPU host may lack it, and this file has tests for that
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=20, deadline=None)
    @hypothesis.given(data=st.data(), records=st.integers(1, 5), seed=st.integers(0, 2**31))
    def agrees(data, records, seed):
        pool = new_pool(9, num_layers=1, seed=seed)
        size = pool.cache.bytes_per_page
        monkeypatch.setattr(host_tier, "_SEGMENT_BYTES", 2 * size)
        options = {"staging_bytes": 2 * records * size}
        if kind == "host":
            tier = HostTier(pool, 7, **options)
        else:
            tier = FileTier(pool, 7, tmp_path / "pages", buffer_bytes=2 * records * size, **options)
        model = {}
        page_lists = st.lists(st.integers(0, 9), max_size=8)
        with tier if kind == "file" else contextlib.nullcontext():
            for _ in range(data.draw(st.integers(1, 12))):
                action = data.draw(st.sampled_from(["save", "free", "load", "write"]))
                if action == "save":
                    pages = data.draw(page_lists)
                    if sum(page != 0 for page in pages) > 7 - len(model):
                        with pytest.raises(OutOfPagesError):
                            tier.save(pages)
                        continue
                    host_pages = tier.save(pages).tolist()
                    assert [page == 0 for page in host_pages] == [page == 0 for page in pages]
                    assert not model.keys() & set(host_pages)
                    now = contents(pool)
                    model |= {host: now[page] for host, page in zip(host_pages, pages, strict=True) if page}
                    assert model.keys() >= set(host_pages) - {0}
                elif action == "write":
                    overwrite(pool, data.draw(st.integers(0, 2**31)))
                elif model:
                    chosen = data.draw(st.lists(st.sampled_from(sorted(model)), max_size=6, unique=action == "free"))
                    if action == "free":
                        tier.free(chosen)
                        for host in chosen:
                            del model[host]
                    else:
                        targets = data.draw(st.permutations(range(1, 10)))[: len(chosen)]
                        expected = contents(pool)
                        for host, target in zip(chosen, targets, strict=True):
                            expected[target] = model[host]
                        tier.load(chosen, targets)
                        assert torch.equal(contents(pool), expected)
                tier.check()
                assert tier.num_free_pages == 7 - len(model)

    agrees()


def test_a_tier_made_in_inference_mode_works_outside_of_it_and_the_other_way_round(new_tier):
    pool = new_pool(4)
    with torch.inference_mode():
        tier = new_tier(pool, 4)
    first = tier.save([1, 2])
    with torch.inference_mode():
        second = tier.save([3])
        tier.load(first, [3, 4])
    expected = contents(pool)
    expected[1] = expected[2]
    tier.load([first[1], second[0]], [1, 2])
    assert torch.equal(contents(pool)[1], expected[1])


def test_a_pool_on_a_device_that_torch_cannot_pin_memory_for_is_refused(tmp_path):
    pool = MHAPool(
        CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, v_head_dim=8, kv_dtype="float32", page_size=2), 3, "meta"
    )
    for make in (lambda: HostTier(pool, 2), lambda: FileTier(pool, 2, tmp_path / "pages")):
        with pytest.raises(ContractError, match="meta"):
            make()
    assert not list(tmp_path.iterdir())


def test_pages_of_a_pool_without_layers_are_kept_as_records_of_no_bytes(new_tier):
    cache = CacheSpec(num_layers=0, num_kv_heads=3, head_dim=8, v_head_dim=5, kv_dtype="float32", page_size=3)
    tier = new_tier(EmptyPool(cache, 5, "cpu"), 3)
    host_pages = tier.save([4, 0, 2])
    assert [page == 0 for page in host_pages] == [False, True, False]
    with pytest.raises(OutOfPagesError):
        tier.save([1, 3])
    tier.load(host_pages, [1, 0, 5])
    tier.synchronize()
    tier.free(host_pages)
    tier.check()
    assert tier.num_free_pages == 3


@pytest.mark.parametrize("windows", [(7, 7), (7, 20)], ids=["one-window", "two-windows"])
def test_a_model_whose_layers_all_have_windows_gets_its_pages_back_from_tiers(windows, new_tier):
    local = anyattn.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
    specs = [local.replace(sliding_window=window) for window in windows]
    rt = anyattn.create_runtime(
        specs, num_pages=30, num_window_pages=30, page_size=4, device="cpu", backend="torch_native"
    )
    assert not rt.pools[0].layers
    cache = anyattn.PrefixCache(rt.table, tiers=[new_tier(pool, 20) for pool in rt.pools], debug=True)
    prompt = list(range(23))
    tensors = [[torch.randn(23, heads, 16) for heads in (4, 2, 2)] for _ in windows]

    def compute(seq, first):
        plan = rt.plan(rt.extend([seq], [len(prompt) - first]))
        return [rt.run(layer, *(x[first:] for x in qkv), plan) for layer, qkv in enumerate(tensors)]

    (seq,) = rt.new_sequences(1)
    outputs = compute(seq, 0)
    cache.insert(prompt, rt.table.pages(seq)[:5])
    rt.free([seq])
    assert cache.evict(30) == 5
    for pool in rt.pools[1:]:
        overwrite(pool)
    match = cache.match(prompt)
    assert (match.num_tokens, match.num_host_tokens) == (0, 20)
    match = cache.restore(match)
    assert match.num_tokens == 20
    (seq,) = rt.new_sequences(1)
    rt.table.adopt(seq, match.pages)
    for output, again in zip(outputs, compute(seq, 20), strict=True):
        torch.testing.assert_close(again, output[20:])
    rt.table.check()


def test_the_file_has_its_full_size_and_says_what_it_is(tmp_path):
    pool = new_pool(3)
    with FileTier(pool, 5, tmp_path / "pages") as tier:
        content = (tmp_path / "pages").read_bytes()
        magic, version, header_bytes = struct.unpack_from("<8sII", content)
        header = json.loads(content[16 : 16 + header_bytes])
        assert (magic, version) == (b"anyattnF", 1)
        assert header["num_pages"] == 5
        assert header["cache"]["page_size"] == 3
        assert header["cache"]["kv_dtype"] == "float32"
        assert len(content) == 4096 + 5 * (pool.cache.bytes_per_page + 16 + 32)
        host_pages = tier.save([3, 1])
        tier.synchronize()
        written = (tmp_path / "pages").read_bytes()
        assert len(written) == len(content)
        for host_page, page in zip(host_pages.tolist(), [3, 1], strict=True):
            record = contents(pool)[page].numpy().tobytes() + struct.pack("<QQ", host_page, 1)
            start = 4096 + (host_page - 1) * (len(record) + 32)
            assert written[start : start + len(record) + 32] == record + hashlib.sha256(record).digest()


def test_a_file_that_is_there_is_refused_unless_it_may_be_overwritten(tmp_path):
    pool = new_pool(3)
    path = tmp_path / "pages"
    path.write_text("precious")
    with pytest.raises(ContractError, match=r"there already.*overwrite=True"):
        FileTier(pool, 2, path)
    assert path.read_text() == "precious"
    with FileTier(pool, 2, path, overwrite=True) as tier:
        tier.load(tier.save([1]), [2])
        assert torch.equal(contents(pool)[1], contents(pool)[2])
    with pytest.raises(ContractError, match="cannot be created"):
        FileTier(pool, 2, tmp_path / "missing" / "pages")


def test_a_disk_without_room_for_the_file_is_told_and_nothing_is_left_of_it(tmp_path, limited_files):
    limited_files(4096)
    with pytest.raises(StorageError, match=r"cannot be given 2 pages of .* bytes: .*File too large"):
        FileTier(new_pool(3), 2, tmp_path / "pages")
    assert not list(tmp_path.iterdir())


def test_a_closed_tier_has_written_all_and_keeps_or_removes_its_file(tmp_path):
    pool = new_pool(3)
    kept, gone = FileTier(pool, 2, tmp_path / "kept"), FileTier(pool, 2, tmp_path / "gone")
    kept.save([1, 2])
    kept.close(delete=False)
    kept.close()
    gone.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert contents(pool)[1].numpy().tobytes() in (tmp_path / "kept").read_bytes()
    for call in (lambda: kept.save([1]), lambda: kept.load([1], [1]), kept.synchronize):
        with pytest.raises(ContractError, match="closed"):
            call()


def test_damage_to_any_byte_of_a_record_is_found_and_the_pool_stays_as_it_was(tmp_path):
    pool = new_pool(6, num_layers=1, num_kv_heads=1, head_dim=2, v_head_dim=1, page_size=1)
    path = tmp_path / "pages"
    with FileTier(pool, 4, path) as tier:
        host_pages = tier.save([1, 2, 3])
        tier.synchronize()
        before = contents(pool)
        size = pool.cache.bytes_per_page + 16 + 32
        with path.open("r+b") as file:
            for position in range(4096 + size, 4096 + 2 * size):  # of the second page
                file.seek(position)
                (byte,) = file.read(1)
                for damaged in {byte ^ 1 << random.randrange(8), byte ^ 255}:
                    file.seek(position)
                    file.write(bytes([damaged]))
                    file.flush()
                    with pytest.raises(StorageError, match=r"page 2 is damaged"):
                        tier.load(host_pages, [4, 5, 6])
                    assert torch.equal(contents(pool), before)
                file.seek(position)
                file.write(bytes([byte]))
                file.flush()
            tier.load(host_pages, [4, 5, 6])
            assert torch.equal(contents(pool)[4:], before[1:4])


def test_a_record_of_another_page_or_of_an_earlier_save_is_not_taken_for_the_one_wanted(tmp_path):
    pool = new_pool(3)
    path = tmp_path / "pages"
    with FileTier(pool, 2, path) as tier, path.open("r+b") as file:
        size = pool.cache.bytes_per_page + 16 + 32
        first = tier.save([1, 2])
        tier.synchronize()
        file.seek(4096)
        record = file.read(size)
        file.seek(4096 + size)
        file.write(record)
        file.flush()
        with pytest.raises(StorageError, match="page 2 is damaged"):
            tier.load(first, [2, 3])
        tier.free(first)
        again = tier.save([1, 2])  # the same bytes in the same places
        tier.synchronize()
        file.seek(4096)
        file.write(record)
        file.flush()
        with pytest.raises(StorageError, match="page 1 is damaged"):
            tier.load(again, [2, 3])


def test_a_file_that_was_cut_off_is_found(tmp_path):
    pool = new_pool(6)
    path = tmp_path / "pages"
    with FileTier(pool, 3, path) as tier:
        host_pages = tier.save([1, 2, 3])
        tier.synchronize()
        before = contents(pool)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(StorageError, match=r"ends before page 3.*The pool is as before"):
            tier.load(host_pages, [4, 5, 6])
        assert torch.equal(contents(pool), before)


@pytest.fixture
def limited_files():
    """Sets the size that files of this process can have: what is written beyond fails as on a full disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))

    limit.lift = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    yield limit
    limit.lift()


@pytest.mark.parametrize("surface", ["save", "load", "synchronize", "close"])
def test_a_full_disk_is_told_by_the_next_call_which_does_nothing_else(surface, tmp_path, limited_files):
    pool = new_pool(6)
    tier = FileTier(pool, 6, tmp_path / "pages", staging_bytes=1)  # a write of its own for each page
    limited_files(4096 + 3 * (pool.cache.bytes_per_page + 48) - 1)
    host_pages = tier.save([1, 2, 3, 4])
    done = threading.Event()
    tier._worker.submit(done.set)
    assert done.wait(20)
    before = contents(pool)
    calls = {
        "save": lambda: tier.save([5]),
        "load": lambda: tier.load(host_pages[:1], [5]),
        "synchronize": tier.synchronize,
        "close": tier.close,
    }
    with pytest.raises(StorageError, match=r"writing to .*pages failed: .*File too large.* Pages \[3, 4\]"):
        calls[surface]()
    assert tier.num_free_pages == 2
    if surface == "close":
        assert not list(tmp_path.iterdir())
        return
    with pytest.raises(StorageError, match=r"page 3 of .* was not written and cannot be loaded: .*File too large"):
        tier.load(host_pages, [1, 2, 5, 6])
    assert torch.equal(contents(pool), before)
    limited_files.lift()
    with pytest.raises(StorageError, match=r"page 4 of .* was not written"):  # still: its bytes are gone
        tier.load(host_pages[3:], [5])
    tier.load(host_pages[:2], [6, 5])
    tier.free(host_pages[2:])
    again = tier.save([3, 4])
    tier.load(again, [1, 2])
    after = contents(pool)
    assert torch.equal(after[[6, 5, 1, 2]], before[[1, 2, 3, 4]])
    tier.close()


def test_a_load_right_behind_a_write_that_fails_is_refused_and_the_failure_is_told_once(tmp_path, limited_files):
    pool = new_pool(4)
    with FileTier(pool, 4, tmp_path / "pages") as tier:
        limited_files(4096 + 10)
        free = threading.Event()
        tier._worker.submit(free.wait, 20)  # the write has yet to fail when the load is called
        host_pages = tier.save([1, 2])
        before = contents(pool)
        timer = threading.Timer(0.1, free.set)
        timer.start()
        with pytest.raises(StorageError, match=r"page 1 of .* was not written and cannot be loaded: .*File too large"):
            tier.load(host_pages, [3, 4])
        timer.join()
        assert torch.equal(contents(pool), before)
        tier.synchronize()
        tier.free(host_pages)


def test_an_error_in_the_block_is_not_hidden_by_a_failed_write(tmp_path, limited_files):
    pool = new_pool(4)
    with pytest.raises(KeyError), FileTier(pool, 4, tmp_path / "pages") as tier:  # noqa: PT012
        limited_files(4096 + 10)
        tier.save([1, 2])
        raise KeyError
    limited_files.lift()
    assert not list(tmp_path.iterdir())


def test_a_save_to_a_file_returns_while_the_disk_is_busy_and_waits_only_beyond_its_buffer(tmp_path):
    pool = new_pool(8)
    size = pool.cache.bytes_per_page
    free = threading.Event()
    with FileTier(pool, 8, tmp_path / "pages", buffer_bytes=3 * size, staging_bytes=2 * size) as tier:
        for _ in range(2):
            expected = contents(pool)
            free.clear()
            tier._worker.submit(free.wait, 20)  # the disk is busy
            host_pages = tier.save([1, 2, 3])
            overwrite(pool)
            assert not tier._writes[0].future.done()
            timer = threading.Timer(0.1, free.set)
            timer.start()
            more = tier.save([4])
            assert free.is_set()
            timer.join()
            tier.load(host_pages, [1, 2, 3])
            assert torch.equal(contents(pool)[1:4], expected[1:4])
            tier.synchronize()
            tier.free([*host_pages, *more])


# On a GPU: the same, asynchronously.


@pytest.fixture
def busy():
    """Keeps the current stream busy for some milliseconds, so that what does not wait for it is too early."""
    x = torch.randn(4096, 4096, device="cuda")

    def run():
        for _ in range(20):
            torch.mm(x, x)

    run()
    return run


LARGE = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "page_size": 16, "kv_dtype": "float16"}


@pytest.mark.cuda
@pytest.mark.parametrize("joined", [False, True])
def test_device_pages_can_be_overwritten_as_soon_as_save_returns(joined, busy):
    pool = new_pool(200, device="cuda", joined_layers=joined, **LARGE)
    tier = HostTier(pool, 150, staging_bytes=16 * pool.cache.bytes_per_page)
    saved = contents(pool)
    pages = np.random.default_rng().permutation(200)[:150] + 1
    garbage = torch.full((200, pool.cache.bytes_per_page), 0xFF, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        busy()
        pool.write_pages(np.arange(1, 201), saved[1:].cuda())
        host_pages = tier.save(pages)
        pool.write_pages(np.arange(1, 201), garbage)
        busy()
        targets = np.random.default_rng().permutation(200)[:150] + 1
        tier.load(host_pages, targets)
        now = contents(pool)
        assert torch.equal(now[targets], saved[pages])
        rest = np.setdiff1d(np.arange(1, 201), targets)
        assert (now[rest] == 0xFF).all()
        tier.free(host_pages)


@pytest.mark.cuda
def test_neither_save_nor_load_synchronizes_with_the_device(tmp_path):
    pool = new_pool(64, device="cuda", **LARGE)
    tier = HostTier(pool, 64, staging_bytes=8 * pool.cache.bytes_per_page)
    assert all(segment.is_pinned() for segment in tier._segments)
    pages = np.arange(1, 65)
    before = contents(pool)
    with FileTier(pool, 64, tmp_path / "pages") as file:
        for warm in (True, False):
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            try:
                host_pages = tier.save(pages)
                tier.load(host_pages[::-1].copy(), pages)
                tier.free(host_pages)
                file.free(file.save(pages[:3]))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(contents(pool), before)  # reversed twice


@pytest.mark.cuda
def test_save_and_load_return_before_the_device_is_done(busy):
    pool = new_pool(64, device="cuda", **LARGE)
    tier = HostTier(pool, 64)
    pages = np.arange(1, 65)
    tier.load(tier.save(pages), pages)
    torch.cuda.synchronize()
    tier.free(np.arange(1, 65))
    for _ in range(5):
        busy()
    event = torch.cuda.Event()
    event.record()
    tier.load(tier.save(pages), pages)
    assert not event.query()


@pytest.mark.cuda
def test_device_memory_of_pages_on_their_way_is_bounded():
    pool = new_pool(400, device="cuda", **LARGE)
    size = pool.cache.bytes_per_page
    tier = HostTier(pool, 400, staging_bytes=10 * size)
    pages = np.arange(1, 401)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    host_pages = tier.save(pages)
    tier.load(host_pages, pages)
    assert torch.cuda.max_memory_allocated() - base <= 10 * size + (4 << 20)
    tier.synchronize()
    assert torch.cuda.memory_allocated() - base <= 4 << 20


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["host", "file"])
def test_many_interleaved_saves_frees_and_loads_on_several_streams_agree_with_a_dictionary(kind, tmp_path):
    seed = random.randrange(2**31)
    print("seed:", seed)
    draw = random.Random(seed)
    pool = new_pool(96, device="cuda", seed=seed, **LARGE)
    size = pool.cache.bytes_per_page
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    with contextlib.ExitStack() as stack:
        if kind == "host":
            tier = HostTier(pool, 64, staging_bytes=draw.choice([1, 4 * size, 64 * size]))
        else:
            tier = stack.enter_context(FileTier(pool, 64, tmp_path / "pages", staging_bytes=8 * size))
        model, now = {}, contents(pool)  # now: [97, bytes_per_page], what the pool should hold
        last = streams[0]
        for _ in range(300):
            stream = draw.choice(streams)
            stream.wait_stream(last)
            last = stream
            with torch.cuda.stream(stream):
                action = draw.choice(["save", "save", "load", "free", "write"])
                if action == "save" and len(model) < 64:
                    pages = draw.sample(range(1, 97), draw.randint(1, min(24, 64 - len(model))))
                    host_pages = tier.save(pages).tolist()
                    model |= {host: now[page].clone() for host, page in zip(host_pages, pages, strict=True)}
                elif action == "write":
                    pages = draw.sample(range(1, 97), 32)
                    value = draw.randrange(256)
                    now[pages] = value
                    pool.write_pages(np.array(pages), torch.full((32, size), value, dtype=torch.uint8, device="cuda"))
                elif model:
                    chosen = draw.sample(sorted(model), draw.randint(1, min(24, len(model))))
                    if action == "free":
                        tier.free(chosen)
                        for host in chosen:
                            del model[host]
                    elif action == "load":
                        targets = draw.sample(range(1, 97), len(chosen))
                        tier.load(chosen, targets)
                        for host, target in zip(chosen, targets, strict=True):
                            now[target] = model[host]
        with torch.cuda.stream(last):
            assert torch.equal(contents(pool)[1:], now[1:])
        tier.check()
