"""`intel_cpu` against float64 on input that is made to break it, and what it gives whoever calls it and however often.

What is compiled costs seconds a variant, so nearly all of this is of two: heads of 16 in float32, of one new token and
of several. Windows, sinks, masks and scales are no variants.
"""

import dataclasses
import importlib.util
import threading

import pytest
import torch

from anyattn import AttentionSpec
from anyattn.attention.reference import reference_attention
from anyattn.platforms.cpu import probe
from anyattn.testing.numerics.cases import Case
from anyattn.testing.numerics.driver import PerHead, Step, build_runtime, layer_kv, run_step, store
from anyattn.testing.numerics.oracle import Oracle, compare

CPU = probe().devices[0]
LACKING = sorted({"avx2", "f16c", "fma"} - CPU.features)
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"needs a CPU with {', '.join(LACKING)}"),
    pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba"),
]
SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", return_lse=True)
PAGE_SIZE = 16
SMALL = torch.finfo(torch.float32).eps
"""Half of it is what a rounding to float32 costs."""
EXP_ERROR = 2e-7
"""The kernel's exponential, of itself: what `vectors` says."""


@pytest.fixture
def backend():
    from anyattn.hardware_backend.intel.cpu import IntelCPUBackend

    return IntelCPUBackend


@pytest.fixture
def threads():
    """Sets torch's number of threads, which is as before behind the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Driven:
    """Sequences in a pool whose every other byte is NaN, in pages of random order."""

    def __init__(self, backend, spec, counts, *, seed=1, **case):
        """counts: tokens that each sequence has before the first step, and gains in each."""
        before, *steps = counts
        case = {"page_size": PAGE_SIZE, "layout": "NHD", **case}
        self.spec = spec
        self.case = Case(name="", spec=spec, stored_before=before, steps=tuple(steps) or (before,), **case)
        self.rt = build_runtime(backend, self.case, CPU, seed)
        self.seqs = self.rt.new_sequences(len(before))
        self.oracle = Oracle(spec, len(before), 1.0, 1.0)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, counts, **changes):
        """New tokens. changes: what is otherwise random."""
        step = Step.draw(self.spec, counts, self.generator)
        return dataclasses.replace(step, **changes)

    def store(self, step):
        """Tokens that are there before, and not attended."""
        store(self.rt, step, self.rt.extend(self.seqs, step.counts))
        for i, rows in enumerate(step.rows):
            self.oracle.append(i, step.k[rows], step.v[rows])

    def plan(self, step):
        return self.rt.plan(self.rt.extend(self.seqs, step.counts))

    def judged(self, step, sinks=None):
        """Runs a step, and has it judged; output and LSE."""
        per_head = PerHead(sinks=sinks, alibi_slopes=None)
        got = run_step(self.rt, step, self.plan(step), per_head)
        compare([got], [self.oracle.expect(step, per_head)])
        return got


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("deterministic", [False, True], ids=["parts by load", "deterministic"])
def test_a_long_sequence_is_right_in_as_many_parts_as_threads_ask_for(backend, threads, num_threads, deterministic):
    """Judged as the kit judges; a part that is lost or merged twice is a tenth of the result."""
    threads(num_threads)
    spec = SPEC.replace(deterministic=deterministic)
    driven = Driven(backend, spec, [(9001,), (1,), (5,)])
    driven.store(driven.draw((9001,)))
    for counts in ((1,), (5,)):
        driven.judged(driven.draw(counts))


@pytest.mark.parametrize("num_threads", [2, 16])
def test_more_threads_than_there_is_work_for_change_nothing(backend, threads, num_threads):
    threads(num_threads)
    driven = Driven(backend, SPEC, [(3, 0), (1, 1), (2, 3)])
    driven.store(driven.draw((3, 0)))
    for counts in ((1, 1), (2, 3)):
        driven.judged(driven.draw(counts))


@pytest.mark.parametrize("now", [1, 4])
def test_a_plan_may_be_run_with_fewer_or_more_threads_than_it_was_made_for(backend, threads, now):
    threads(2)
    driven = Driven(backend, SPEC, [(3000,), (1,)])
    driven.store(driven.draw((3000,)))
    step, none = driven.draw((1,)), PerHead(sinks=None, alibi_slopes=None)
    plan = driven.plan(step)
    threads(now)
    compare([run_step(driven.rt, step, plan, none)], [driven.oracle.expect(step, none)])


SCORES = {
    "all of ten thousand": torch.full((700,), 1e4),
    "all of minus ten thousand": torch.full((700,), -1e4),
    "rising": torch.linspace(-3000, 3000, 700),
    "falling": torch.linspace(3000, -3000, 700),
    "down to what float32 has no normal number for": torch.linspace(0, -110, 700),
    "one far above the others, at the beginning": torch.tensor([1e4] + [0.0] * 699),
    "one far above the others, at the end": torch.tensor([0.0] * 699 + [1e4]),
    "up and down at each key": torch.tensor([200.0, -200.0] * 350),
}


@pytest.mark.parametrize("name", list(SCORES))
@pytest.mark.parametrize("num_new", [1, 3], ids=["one new token", "several"])
def test_scores_of_any_size_give_what_float64_gives(backend, name, num_new):
    """q has one element, so that each score is one product, and exact: what is left is the softmax's error.

    That is an exponential's of its argument, which is rounded to float32 at up to 1e4 where that is the LSE, and 700
    additions in float32. A weight is at most 1, and so is each value.
    """
    spec = SPEC.replace(sm_scale=1.0, causal=False)
    driven = Driven(backend, spec, [(700 - num_new,), (num_new,)])
    history, step = driven.draw((700 - num_new,)), driven.draw((num_new,))
    q = torch.zeros_like(step.q)
    q[..., 3] = 1.0
    k, v = torch.cat([history.k, step.k]), torch.cat([history.v, step.v]).clamp(-1.0, 1.0)
    k[..., 3] = SCORES[name][:, None]
    driven.store(dataclasses.replace(history, k=k[:-num_new], v=v[:-num_new]))
    step = dataclasses.replace(step, q=q, k=k[-num_new:], v=v[-num_new:])
    plan = driven.plan(step)
    out, lse = run_step(driven.rt, step, plan, PerHead(sinks=None, alibi_slopes=None))
    wanted, wanted_lse = reference_attention(spec, q.double(), k.double(), v.double())
    assert (out - wanted).abs().max() <= 700**0.5 * SMALL + 2 * EXP_ERROR
    assert (lse - wanted_lse).abs().max() <= 700**0.5 * SMALL + EXP_ERROR + SMALL / 2 * wanted_lse.abs().max()


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 5000])
def test_a_window_of_one_token_or_beyond_the_sequence_is_right_at_every_step(backend, window):
    driven = Driven(backend, SPEC.replace(sliding_window=window), [(150, 0), (1, 1), (4, 90), (1, 1)])
    driven.store(driven.draw((150, 0)))
    for counts in ((1, 1), (4, 90), (1, 1)):
        driven.judged(driven.draw(counts))


@pytest.mark.parametrize("sink", [-1e30, -1e4, -80.0, 80.0, 1e4, 1e30, float("-inf")])
def test_a_sink_of_any_size_takes_its_share_and_no_more(backend, sink):
    """In decode, of several new tokens, and of a prompt, which torch attends to."""
    spec = SPEC.replace(sinks=True)
    driven = Driven(backend, spec, [(90, 0), (1, 1), (4, 130)])
    driven.store(driven.draw((90, 0)))
    sinks = torch.tensor([sink, 0.0, sink, 1.0])
    for counts in ((1, 1), (4, 130)):
        out, lse = driven.judged(driven.draw(counts), sinks)
        assert lse.isfinite().all()
        if sink >= 1e4:
            assert (out[:, ::2] == 0.0).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("window", [None, 20])
def test_what_lies_behind_ends_in_other_pages_and_in_the_null_page_reaches_no_result(backend, garbage, window):
    spec = SPEC.replace(sliding_window=window)
    driven = Driven(backend, spec, [(37, 90, 0), (1, 1, 1), (3, 80, 2)])
    for part in layer_kv(driven.rt, 0).stored:
        part.fill_(garbage)
    driven.store(driven.draw((37, 90, 0)))
    for counts in ((1, 1, 1), (3, 80, 2)):
        driven.judged(driven.draw(counts))


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("place", [0, 40, 99])
@pytest.mark.parametrize("num_new", [1, 3, 90], ids=["one new token", "several", "a prompt"])
def test_a_nan_that_a_token_sees_makes_its_row_nan_and_no_other_head_s(backend, part, place, num_new):
    driven = Driven(backend, SPEC, [(100,), (num_new,)])
    history, step = driven.draw((100,)), driven.draw((num_new,))
    getattr(history, part)[place, 1, 5] = float("nan")
    driven.store(history)
    out, lse = run_step(driven.rt, step, driven.plan(step), PerHead(sinks=None, alibi_slopes=None))
    assert out[:, :2].isfinite().all()
    assert lse[:, :2].isfinite().all()
    assert out[:, 2:].isnan().all() if part == "k" else out[:, 2:, 5].isnan().all()
    assert lse[:, 2:].isnan().all() if part == "k" else lse[:, 2:].isfinite().all()


def test_a_nan_in_one_query_stays_in_its_row(backend):
    driven = Driven(backend, SPEC, [(100, 5), (3, 1)])
    driven.store(driven.draw((100, 5)))
    step = driven.draw((3, 1))
    step.q[1, 2, 7] = float("nan")
    out, _ = run_step(driven.rt, step, driven.plan(step), PerHead(sinks=None, alibi_slopes=None))
    is_nan = torch.zeros(4, 4, dtype=torch.bool)
    is_nan[1, 2] = True
    assert torch.equal(out.isnan().any(dim=-1), is_nan)


FP8 = ("float8_e4m3fn", "float8_e5m2")
LANES = [pytest.param(features, id=name) for name, features in (("AVX-512", {"avx512f"}), ("AVX2", set()))]


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("wide", LANES)
def test_each_of_the_256_bytes_of_fp8_is_read_as_torch_reads_it(backend, kv_dtype, wide):
    """Sequences of one token, all elements of which are the same byte: the output is the value, the LSE the score.

    Heads of 56 are read in pieces of every kind. All products and sums are exact, as a byte has at most 4 digits.
    """
    if not wide <= CPU.features:
        pytest.skip("needs a CPU with avx512f")
    platform = dataclasses.replace(CPU, features=CPU.features - {"avx512f"} | wide)
    spec = AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim=56, dtype="float32", kv_dtype=kv_dtype, sm_scale=1.0, return_lse=True
    )
    case = Case(name="", spec=spec, page_size=1, layout="NHD", steps=((1,) * 512,))
    rt = build_runtime(backend, case, platform, 1)
    rt.set_scales(0, 0.5, 0.25)
    seqs = rt.new_sequences(512)
    batch = rt.extend(seqs, [1] * 512)
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kv_dtype))
    kv = layer_kv(rt, 0)
    pages = (kv.k.view(torch.uint8), kv.v.view(torch.uint8))
    for byte in range(256):  # the first half of the sequences is of values, with keys of 0; the other one of keys
        for part, seq, other in ((pages[1], byte, pages[0]), (pages[0], 256 + byte, pages[1])):
            page = int(batch.kv_indices[seq])
            part[page], other[page] = byte, 0
    (step,) = rt.plan(batch).steps
    out = torch.full((512, 1, 56), float("nan"))
    _, lse = step.run(torch.full((512, 1, 56), 0.125), kv, out)
    assert torch.equal(out[:256, 0].nan_to_num(7e4), (0.25 * values.float()).nan_to_num(7e4)[:, None].expand(256, 56))
    scores = 0.5 * 56 * 0.125 * values.float()
    is_number = scores.isfinite()
    assert torch.equal(lse[256:, 0][is_number], scores[is_number])
    assert (out[256:, 0][is_number] == 0.0).all()
    assert lse[256:, 0][scores.isnan()].isnan().all()
    assert (lse[:256] == 0.0).all()


def results(driven, step, plan):
    return run_step(driven.rt, step, plan, PerHead(sinks=None, alibi_slopes=None))


def assert_same(once, again):
    """Every bit, as one thread computes parts in the same order each time."""
    for left, right in zip(once, again, strict=True):
        assert torch.equal(left, right)


def test_a_plan_gives_the_same_as_often_as_it_is_run_and_two_plans_in_turn_likewise(backend, threads):
    threads(2)
    driven = Driven(backend, SPEC.replace(deterministic=True), [(3000, 70, 9), (1, 3, 80)])
    history = driven.draw((3000, 70, 9))
    driven.store(history)
    seqs = driven.seqs
    driven.seqs = seqs[:1]
    long = driven.draw((1,))
    long_plan = driven.plan(long)
    driven.seqs = seqs[1:]
    short = driven.draw((3, 80))
    short_plan = driven.plan(short)
    first, second = results(driven, long, long_plan), results(driven, short, short_plan)
    for _ in range(3):
        assert_same(results(driven, long, long_plan), first)
        assert_same(results(driven, short, short_plan), second)


def test_threads_that_call_at_once_each_with_a_runtime_of_its_own_get_what_each_gets_alone(backend, threads):
    threads(2)
    spec = SPEC.replace(deterministic=True)
    calls = []
    for seed in range(4):
        driven = Driven(backend, spec, [(2500, 20), (1, 5)], seed=seed)
        driven.store(driven.draw((2500, 20)))
        step = driven.draw((1, 5))
        plan = driven.plan(step)
        calls.append((driven, step, plan, results(driven, step, plan)))
    found, errors = [[] for _ in calls], []

    def call(number):
        torch.set_num_threads(2)  # OpenMP's number is each thread's own
        driven, step, plan, _ = calls[number]
        try:
            found[number] += [results(driven, step, plan) for _ in range(20)]
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    for (*_, alone), mine in zip(calls, found, strict=True):
        for result in mine:
            assert_same(result, alone)
