"""What the runtime makes of shared pages, windows' own pools and sizes: the outputs are those of a runtime without."""

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError, OutOfPagesError, SpecError

pytestmark = pytest.mark.usefixtures("portable")

FULL = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
LOCAL = FULL.replace(sliding_window=7)
WIDE = FULL.replace(sliding_window=19)
BACKENDS = ["torch_native", "reference"]


def runtime(specs, **options):
    return anyattn.create_runtime(specs, **{"num_pages": 200, "page_size": 4, "device": "cpu", **options})


class Drive:
    """Gives several runtimes the same random inputs, and compares what comes out."""

    def __init__(self, *runtimes, seed):
        self.runtimes = runtimes
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, seqs, counts):
        """seqs: for each runtime its handles."""
        tokens = sum(counts)
        plans = [rt.plan(rt.extend(own, counts)) for rt, own in zip(self.runtimes, seqs, strict=True)]
        for layer, spec in enumerate(self.runtimes[0].layer_specs):
            q = torch.randn(tokens, spec.num_qo_heads, spec.head_dim, generator=self.generator)
            k, v = (torch.randn(tokens, spec.num_kv_heads, spec.head_dim, generator=self.generator) for _ in "kv")
            outs = [rt.run(layer, q, k, v, plan) for rt, plan in zip(self.runtimes, plans, strict=True)]
            for out in outs[1:]:
                torch.testing.assert_close(out, outs[0], atol=2e-5, rtol=2e-5)  # float32: sums in another order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("specs", [[LOCAL, FULL], [WIDE, LOCAL, FULL], [LOCAL] * 2], ids=["one", "two", "only windows"])
def test_layers_with_windows_compute_the_same_from_the_window_s_pages_alone(specs, backend):
    rt = runtime(specs, num_window_pages=24, backend=backend)
    drive = Drive(runtime(specs, backend=backend), rt, seed=torch.seed() % 2**31)
    for pool in rt.pools:
        for kv in pool.layers:
            kv.k.fill_(float("nan"))
            kv.v.fill_(float("nan"))
    seqs = [r.new_sequences(3) for r in drive.runtimes]
    drive.step(seqs, [30, 1, 9])
    for counts in ([1, 1, 1], [5, 0, 2], [1, 1, 1], [1, 17, 1], [1, 1, 1], [1, 1, 1]):
        drive.step(seqs, counts)
    kept = [window.allocator.num_pages - window.allocator.num_free_pages for window in rt.table.windows]
    for count, window in zip(kept, rt.table.windows, strict=True):
        assert count <= 3 * (-(-(window.window - 1) // 4) + 1)
    rt.free(seqs[1])
    rt.table.check()


def test_layers_with_one_window_have_one_pool_and_those_without_another():
    rt = runtime([LOCAL, FULL, WIDE, LOCAL, FULL], num_window_pages=30)
    assert rt.places == ((1, 0), (0, 0), (2, 0), (1, 1), (0, 1))
    assert [(len(pool.layers), pool.num_pages) for pool in rt.pools] == [(2, 200), (2, 30), (1, 30)]
    assert [window.window for window in rt.table.windows] == [7, 19]


def test_without_num_window_pages_all_layers_share_one_pool():
    rt = runtime([LOCAL, FULL])
    assert rt.table.windows == ()
    assert [len(pool.layers) for pool in rt.pools] == [2]


def test_short_window_pages_are_refused_and_the_next_smaller_step_runs():
    rt = runtime([LOCAL, FULL], num_window_pages=4)
    (seq,) = rt.new_sequences(1)
    with pytest.raises(OutOfPagesError, match=r"5 pages of the layers with window 7 needed, 4 of 4.*num_window_pages"):
        rt.extend([seq], [20])
    rt.extend([seq], [16])


@pytest.mark.parametrize("specs", [[FULL], [LOCAL, FULL]], ids=["full", "window"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_go_their_own_ways_from_a_shared_partial_page(specs, backend):
    windows = {} if len(specs) == 1 else {"num_window_pages": 60}
    rt = runtime(specs, num_layers=len(specs), backend=backend, **windows)
    drive = Drive(runtime(specs, num_layers=len(specs), backend="reference"), rt, seed=torch.seed() % 2**31)
    plain = drive.runtimes[0].new_sequences(3)
    (seq,) = rt.new_sequences(1)
    state = drive.generator.get_state()
    for own in plain:  # the plain runtime stores the prefix three times
        drive.generator.set_state(state)
        solo = Drive(drive.runtimes[0], seed=0)
        solo.generator = drive.generator
        solo.step([[own]], [10])
    drive.generator.set_state(state)
    solo = Drive(rt, seed=0)
    solo.generator = drive.generator
    solo.step([[seq]], [10])
    forked = [seq, *rt.fork(seq, 2)]
    for counts in ([1, 3, 0], [1, 1, 1], [2, 1, 6]):
        drive.step([plain, forked], counts)
    rt.free(forked)
    assert rt.table.allocator.num_free_pages == 200


def test_a_truncated_sequence_goes_on_as_if_the_rejected_tokens_had_never_been():
    rt = runtime([FULL])
    drive = Drive(runtime([FULL], backend="reference"), rt, seed=torch.seed() % 2**31)
    seqs = [r.new_sequences(1) for r in drive.runtimes]
    drive.step(seqs, [6])
    rejected = Drive(rt, seed=1)
    rejected.step([seqs[1]], [9])
    rt.truncate(seqs[1], [6])
    drive.step(seqs, [3])


def test_a_plan_whose_sequence_was_truncated_since_is_refused_and_nothing_is_written():
    rt = runtime([FULL])
    seqs = rt.new_sequences(2)
    plan = rt.plan(rt.extend(seqs, [6, 2]))
    rt.truncate(seqs[:1], [2])
    before = [kv.k.clone() for kv in rt.pools[0].layers]
    tensors = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    with pytest.raises(ContractError, match="truncated after"):
        rt.run(0, *tensors, plan)
    assert all(torch.equal(kv.k, k) for kv, k in zip(rt.pools[0].layers, before, strict=True))


def test_mla_takes_latent_and_rope_apart_or_joined():
    spec = AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=32, qk_rope_head_dim=8, sm_scale=0.2, dtype="float32")
    q, k = torch.randn(5, 4, 40), torch.randn(5, 40)
    outs = []
    for keys in ((k, None), (k[:, :32], k[:, 32:])):
        rt = runtime(spec, num_layers=1)
        outs.append(rt.run(0, q, *keys, rt.plan(rt.extend(rt.new_sequences(1), [5]))))
    assert torch.equal(*outs)


@pytest.mark.parametrize("specs", [[FULL] * 3, [LOCAL, FULL, WIDE], [LOCAL] * 2], ids=["full", "both", "only windows"])
def test_pools_made_for_so_many_bytes_take_no_more_and_nearly_all(specs):
    memory = 1_000_000
    rt = anyattn.create_runtime(
        specs, memory_bytes=memory, max_num_seqs=4, max_new_tokens=64, page_size=4, device="cpu"
    )
    taken = sum(part.numel() * part.element_size() for pool in rt.pools for part in pool.parts())
    assert taken <= memory
    if FULL in specs:  # what windows need is bounded, and all else is for the others
        assert taken > memory - rt.pools[0].cache.bytes_per_page
    for window in rt.table.windows:
        assert window.allocator.num_pages >= 4 * 2
    rt.extend(rt.new_sequences(4), [16] * 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "give num_pages"),
        ({"num_pages": 4, "memory_bytes": 1 << 20}, "give num_pages"),
        ({"memory_bytes": 1 << 20, "num_window_pages": 4}, "give num_pages"),
        ({"num_pages": 4, "num_window_pages": 0}, "num_window_pages"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"memory_bytes": 1 << 20, "max_num_seqs": 0}, "max_num_seqs"),
        ({"memory_bytes": 100}, "memory_bytes"),
        ({"num_pages": 4, "max_num_seqs": 8}, "max_num_seqs and max_new_tokens are for memory_bytes"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, message):
    with pytest.raises(SpecError, match=message):
        anyattn.create_runtime([LOCAL, FULL], device="cpu", **sizes)


def test_where_all_layers_have_windows_page_ids_are_not_what_memory_bounds():
    rt = anyattn.create_runtime([LOCAL] * 2, memory_bytes=100_000, max_num_seqs=2, max_new_tokens=32, device="cpu")
    (seq,) = rt.new_sequences(1)
    for _ in range(200):
        rt.extend([seq], [32])
    assert rt.table.lengths([seq]) == [6400]


def test_window_pages_without_windows_are_refused():
    with pytest.raises(SpecError, match="no layer has one"):
        runtime([FULL], num_window_pages=4)


def test_a_pool_that_does_not_fit_names_the_argument_that_said_its_size():
    with pytest.raises(ContractError, match="smaller num_window_pages"):
        runtime([LOCAL, FULL], num_window_pages=2**31 - 2)


def test_scales_for_each_head_need_a_spec_that_says_so():
    rt = runtime([FULL.replace(kv_dtype="float8_e4m3fn")])
    scales = torch.tensor([0.5, 2.0])
    with pytest.raises(ContractError, match="kv_scale_per_head=True"):
        rt.set_scales(0, scales, scales)
    rt = runtime([FULL.replace(kv_dtype="float8_e4m3fn", kv_scale_per_head=True)])
    rt.set_scales(0, scales, scales)


def test_joined_layers_compute_the_same_and_store_all_layers_of_a_page_together():
    rt = runtime([FULL, LOCAL], joined_layers=True)
    drive = Drive(runtime([FULL, LOCAL], backend="reference"), rt, seed=torch.seed() % 2**31)
    assert len(rt.pools[0].parts()) in (1, 4)
    starts = {kv.k.untyped_storage().data_ptr() for kv in rt.pools[0].layers}
    assert len(starts) == 1
    seqs = [r.new_sequences(2) for r in drive.runtimes]
    for counts in ([9, 3], [1, 1], [2, 5]):
        drive.step(seqs, counts)
