"""What is right, how far off a result may be, and what is said about one that is wrong."""

import collections
import math
import secrets
from dataclasses import replace

import pytest
import torch

from anyattn import AttentionSpec
from anyattn.attention.reference import reference_attention
from anyattn.testing.check import CheckFailedError
from anyattn.testing.numerics import expectation
from anyattn.testing.numerics.attending import ORDERS, attend_exactly, attend_plainly, round_q
from anyattn.testing.numerics.expectation import judge
from anyattn.testing.numerics.inputs import PerHead, Step, at_odd_strides, part_of_fused
from anyattn.testing.numerics.oracle import Oracle, compare

GQA = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 32}
SPECS = {
    "plain": AttentionSpec(**GQA),
    "float32": AttentionSpec(**GQA, dtype="float32"),
    "not causal": AttentionSpec(**GQA, causal=False),
    "window": AttentionSpec(**GQA, sliding_window=7),
    "soft cap": AttentionSpec(**GQA, logits_soft_cap=2.0),
    "sinks": AttentionSpec(**GQA, sinks=True),
    "ALiBi": AttentionSpec(**GQA, alibi=True),
    "tree": AttentionSpec(**GQA, tree_mask=True),
    "scale": AttentionSpec(**GQA, sm_scale=0.4),
    "values of other size": AttentionSpec(**GQA, v_head_dim=48),
    "all": AttentionSpec(**GQA, sliding_window=7, logits_soft_cap=2.0, sinks=True, alibi=True, sm_scale=0.4),
    "MLA": AttentionSpec.mla(num_qo_heads=3, kv_lora_rank=32, qk_rope_head_dim=16, sm_scale=0.2),
}
STEPS = ((20, 0, 3), (5, 9, 1), (1, 1, 1))


def expected_of(spec, seed, steps=STEPS, before=(), **draw):
    """Of each step, and what was drawn for each head. before: tokens that sequences have already."""
    generator = torch.Generator().manual_seed(seed)
    oracle, per_head = Oracle(spec, len(steps[0]), 1.0, 1.0, page_size=16), PerHead.draw(spec, generator)
    for i, count in enumerate(before):
        step = Step.draw(spec, [count], generator)
        oracle.append(i, step.k, step.v)
    drawn = [Step.draw(spec, counts, generator, **draw) for counts in steps]
    return [oracle.expect(step, per_head) for step in drawn], per_head


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("trees", ["each", "some", "arbitrary", "blind"])
def test_it_says_what_the_reference_says(spec, trees):
    if trees != "each" and not spec.tree_mask:
        pytest.skip("without trees there is one kind of mask")
    steps, per_head = expected_of(spec, secrets.randbelow(1 << 31), trees=trees)
    for expected in steps:
        for rows, each in zip(expected.rows, expected.sequences, strict=True):
            given = {"sinks": per_head.sinks, "alibi_slopes": per_head.alibi_slopes, "tree_mask": each.tree_mask}
            out, lse = reference_attention(spec, each.q, each.k, each.v, **given)
            assert torch.allclose(expected.exact.out[rows], out, rtol=1e-9, atol=1e-12)
            assert torch.allclose(expected.exact.lse[rows], lse, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_plain_computation_in_another_order_is_right(spec):
    steps, _ = expected_of(spec.replace(return_lse=True), secrets.randbelow(1 << 31))
    for order in (order._replace(shuffle=99) for order in ORDERS):
        got = [
            tuple(map(torch.cat, zip(*(attend_plainly(each, order) for each in expected.sequences), strict=True)))
            for expected in steps
        ]
        assert compare(got, steps).error > 0


def exact_results(spec, steps):
    dtype = getattr(torch, spec.dtype)
    return [(each.exact.out.to(dtype), each.exact.lse.float()) for each in steps]


def changed(steps, spec, change):
    """The exact results, rounded, with a change made to those of the last step."""
    got = exact_results(spec, steps)
    out, lse = (part.clone() for part in got[-1])
    change(out, lse)
    return [*got[:-1], (out, lse)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_what_is_exact_but_for_its_own_rounding_is_right(dtype):
    spec = AttentionSpec(**GQA, dtype=dtype, return_lse=True)
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31))
    measured = compare(exact_results(spec, steps), steps)
    assert measured.error <= 0.6 * measured.allowed  # half a unit of rounding, in a place where one is allowed


@pytest.mark.parametrize(("dtype", "off"), [("bfloat16", 0.1), ("float16", 0.02), ("float32", 1e-5)])
def test_a_value_that_is_off_is_found_wherever_it_is(dtype, off):
    spec = AttentionSpec(**GQA, dtype=dtype, return_lse=True)
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31))
    token, head, dim = (secrets.randbelow(size) for size in (3, 6, 32))

    def out_is_off(out, lse):
        out[token, head, dim] += off

    def lse_is_off(out, lse):
        lse[token, head] -= off

    place = rf"step 2 \(decode\), sequence {token} of 3, which has [0-9]+ tokens, new token 0 of 1, head {head}"
    for change, part in ((out_is_off, "output"), (lse_is_off, "LSE")):
        with pytest.raises(CheckFailedError, match=f"^{part} is off by .* against float64 .* allowed\\), in {place}"):
            compare(changed(steps, spec, change), steps)


def test_of_a_long_sequence_some_keys_less_are_found():
    """The weight of each is far below what is allowed in rows of few keys."""
    spec = AttentionSpec(**GQA)
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31), steps=((9, 9), (1, 1)), before=(0, 3000))
    rows = steps[1].sequences[1]
    seen = rows.seen.clone()
    seen[:, 2900:2916] = False  # a page
    got = exact_results(spec, steps)
    got[1][0][1] = attend_exactly(replace(rows, seen=seen))[0].out[0].to(torch.bfloat16)
    assert "sequence 1 of 2" in judge([result[:1] for result in got], steps).failure


def test_what_lies_within_twice_the_largest_error_of_all_rows_is_right():
    spec = AttentionSpec(**GQA, return_lse=True)
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31))
    most = max(each.plain_error[0] for each in steps)
    for factor, is_right in ((1.9, True), (10.0, False)):  # a unit in the last place, and more orders, are beside it

        def change(out, lse, factor=factor):
            out[1, 2, 3] += factor * most * steps[-1].spread.out[1, 2]

        assert bool(judge(changed(steps, spec, change), steps).failure) != is_right


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_sample_allows_no_more_than_all(spec):
    steps, _ = expected_of(spec.replace(return_lse=True), secrets.randbelow(1 << 31))
    for each in steps:
        for part in (0, 1):
            assert 0 <= each.sampled_error[part] <= each.plain_error[part]


def counted(monkeypatch):
    """How often the plain computation was attended, by order."""
    orders = collections.Counter()

    def attend(rows, order):
        orders[order] += 1
        return attend_plainly(rows, order)

    monkeypatch.setattr(expectation, "attend_plainly", attend)
    return orders


def test_what_is_well_within_what_a_sample_allows_is_judged_by_it(monkeypatch):
    spec = AttentionSpec(**GQA, dtype="float32")
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31))
    orders = counted(monkeypatch)
    assert not judge(exact_results(spec, steps), steps).failure
    assert orders == {ORDERS[0]: len(steps)}


@pytest.mark.parametrize("factor", [1.0, 4.0, 1e6])
def test_what_is_not_well_within_what_a_sample_allows_is_judged_by_all(monkeypatch, factor):
    spec = AttentionSpec(**GQA, dtype="float32")
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31))
    sampled = max(each.sampled_error[0] for each in steps)

    def change(out, lse):
        out[1, 2, 3] += factor * (2 * sampled * steps[-1].spread.out[1, 2] + 5 * out[1, 2].abs().max() * 2**-23)

    got = changed(steps, spec, change)
    orders = counted(monkeypatch)
    verdict = judge(got, steps)
    assert set(orders) >= set(ORDERS)
    assert verdict == judge(got, [replace(each, sampled_error=each.plain_error) for each in steps])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, lse: (out, lse.double()), "LSE is of torch.float64, and the contract says torch.float32"),
        (lambda out, lse: (out.float(), lse), "output is of torch.float32, and the contract says torch.bfloat16"),
        (lambda out, lse: (out[:, :-1], lse), r"output is of shape \[3, 5, 32\], and the contract says \[3, 6, 32\]"),
        (lambda out, lse: (out * math.nan, lse), r"output is NaN in step 2 \(decode\).* and 2 more tokens$"),
        (lambda out, lse: (out, lse - math.inf), "LSE is -inf and not .* sees nothing, and for no other"),
        (lambda out, lse: (out * 0, lse), "output is off by .*; it is 0 in the whole step"),
        (lambda out, lse: (out, lse * 1.1), r"LSE is off by .* head [0-5]; only steps of phase decode are off$"),
    ],
    ids=["dtype of the LSE", "dtype of the output", "shape", "NaN", "infinity", "zero", "no known mistake"],
)
def test_a_wrong_result_is_put_into_words(change, message):
    spec = AttentionSpec(**GQA, return_lse=True)
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31))
    got = exact_results(spec, steps)
    with pytest.raises(CheckFailedError, match=message):
        compare([*got[:-1], change(*got[-1])], steps)


def test_a_row_that_sees_nothing_must_be_zero():
    spec = AttentionSpec(**GQA, tree_mask=True, return_lse=True)
    steps, _ = expected_of(spec, secrets.randbelow(1 << 31), steps=((4, 4),), trees="blind")
    (got,) = exact_results(spec, steps)
    assert (got[0][0] == 0).all()
    assert got[1][0].isneginf().all()
    assert not judge([got], steps).failure
    got[0][0, 0, 0] = 1e-3
    assert "new token 0 of 4" in judge([got], steps).failure


def test_q_is_rounded_with_one_scale_where_that_may_be():
    spec = AttentionSpec(**GQA, kv_dtype="float8_e4m3fn")
    q = torch.randn(5, 6, 32, dtype=torch.bfloat16)
    assert round_q(spec, q) is q
    rounded = round_q(spec.replace(may_quantize_q=True), q)
    assert not torch.equal(rounded, q)
    assert torch.allclose(rounded.float(), q.float(), rtol=2**-3.9, atol=1e-3)  # half a unit of three bits


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("dim", [16, 17])
def test_inputs_lie_apart_with_nan_between_them(heads, dim):
    x = torch.randn(4, heads, dim)
    for laid_out in (part_of_fused, at_odd_strides):
        view = laid_out(x, torch.device("cpu"), gap=math.nan)
        assert torch.equal(view, x)
        assert not view.is_contiguous()
        storage = view.as_strided((view.untyped_storage().nbytes() // 4,), (1,), 0)
        assert storage.isnan().sum() == storage.numel() - x.numel()
    assert all(stride % 8 for stride in view.stride())
    assert view.storage_offset() % 2
