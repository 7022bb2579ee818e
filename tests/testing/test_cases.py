"""The cases that a declaration leads to: all that is declared, nothing else, under names that stay."""

import dataclasses
import itertools

import pytest

from anyattn import Capabilities, Platform
from anyattn.attention.flex_attention import FlexAttentionCPUBackend
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.combinations import combinations, pairs
from anyattn.types import PHASES, ints

ANYWHERE = Platform(kind="cpu", vendor="any", name="any", arch="any", torch_device="cpu")
ALL = ReferenceBackend.capabilities
FEW = Capabilities(
    dtypes=frozenset({"float16"}),
    head_dims=ints(48),
    page_sizes=ints(32),
    layouts=("HND",),
    phases=frozenset({"prefill", "decode", "mixed"}),
)


SIZES = [(2, 2, 2, 2, 2, 3, 2, 4), (3, 3), (2,), (1, 1, 1), (2, 1, 4, 3), (5, 4, 3, 2)]


def factors(sizes):
    return [[{f"factor {number}": value} for value in range(size)] for number, size in enumerate(sizes)]


def pairs_in(found):
    return {frozenset(pair) for values in found for pair in itertools.combinations(values.items(), 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_two_values_meet_in_few_combinations(sizes):
    wanted = pairs(factors(sizes))
    found, impossible = combinations(factors(sizes), wanted, lambda values: "")
    assert impossible == []
    assert len(wanted) == sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert pairs_in(found) == set(map(frozenset, wanted))
    largest = sorted(sizes)[-2:]
    assert len(found) <= 2 * largest[0] * largest[-1]
    assert (found, impossible) == combinations(factors(sizes), wanted, lambda values: "")


def test_what_does_not_go_together_is_in_no_combination_and_all_else_is():
    sizes = (3, 4, 2, 5)

    def refusal(values):
        first, second, last = (values.get(f"factor {number}") for number in (0, 1, 3))
        return "odd" if (first, second) == (0, 1) or (first, last) == (2, 4) or (second, last) == (3, 4) else ""

    wanted = pairs(factors(sizes))
    found, impossible = combinations(factors(sizes), wanted, refusal)
    assert not any(refusal(values) for values in found)
    assert all(len(values) == len(sizes) for values in found)
    refused = {((0, 0), (1, 1)), ((0, 2), (3, 4)), ((1, 3), (3, 4))}
    assert {tuple((int(name[-1]), value) for name, value in sorted(pair)) for pair in impossible} == refused
    assert pairs_in(found) == set(map(frozenset, wanted)) - set(map(frozenset, impossible))


def test_a_pair_that_nothing_else_goes_with_is_impossible():
    third_is_refused = {"factor 2": 0, "factor 0": 1, "factor 1": 1}.items()
    found, impossible = combinations(
        factors((2, 2, 1)),
        pairs(factors((2, 2, 1))),
        lambda values: "odd" if third_is_refused <= values.items() else "",
    )
    assert [dict(pair) for pair in impossible] == [{"factor 0": 1, "factor 1": 1}]
    assert {"factor 0": 1, "factor 1": 0, "factor 2": 0} in found


def test_a_value_may_stand_for_several():
    variants = [{"dtype": "float16", "dim": 64}, {"dtype": "bfloat16", "dim": 64}, {"dtype": "float16", "dim": 96}]
    together = [variants, [{"page": size} for size in (1, 16)]]
    found, impossible = combinations(together, [*pairs(together), (("dtype", "bfloat16"), ("dim", 96))], lambda _: "")
    assert impossible == [(("dtype", "bfloat16"), ("dim", 96))]
    assert all({name: values[name] for name in ("dtype", "dim")} in variants for values in found)
    assert len(found) <= 5


@pytest.mark.parametrize("backend", [ReferenceBackend, TorchNativeBackend, FlexAttentionCPUBackend])
def test_names_differ_and_are_always_the_same(backend):
    names = [case.name for case in cases_for(backend.capabilities)]
    assert len(set(names)) == len(names)
    assert names == [case.name for case in cases_for(backend.capabilities)]


def test_every_case_is_about_a_declared_field():
    fields = {field.name for field in dataclasses.fields(Capabilities)}
    about = {case.capability for case in cases_for(dataclasses.replace(ALL, quantizes_q=True, quantizes_probs=True))}
    assert about - fields == {"contract", "combinations"}
    assert about >= {
        "dtypes", "kv_dtypes", "per_head_scales", "quantizes_q", "quantizes_probs", "head_dims", "head_dim_pairs",
        "mla_dims", "topk", "group_sizes", "page_sizes", "layouts", "strided_pages", "phases", "causal",
        "sliding_window", "logits_soft_cap", "sinks", "alibi", "tree_mask", "lse", "deterministic", "contiguous_q",
    }  # fmt: skip


def test_nothing_that_is_not_declared_is_tried():
    for case in cases_for(FEW):
        assert (case.page_size, case.layout, case.joined_layers) == (32, "HND", False)
        assert (case.spec.dtype, case.spec.storage_dtype, case.spec.head_dim) == ("float16", "float16", 48)
        spec = case.spec
        assert spec.causal
        assert (spec.sliding_window, spec.logits_soft_cap) == (None, None)
        features = (spec.sinks, spec.alibi, spec.tree_mask, spec.return_lse, spec.deterministic, spec.is_mla)
        assert features == (False,) * 6


@pytest.mark.parametrize("phases", ["decode", "prefill mixed", "decode verify"])
def test_a_backend_of_some_phases_is_tried_in_those(phases):
    names = {case.name for case in cases_for(dataclasses.replace(ALL, phases=frozenset(phases.split())))}
    assert ("decode" in names) == ("decode" in phases)
    assert ("mixed" in names) == ("mixed" in phases)
    assert not any("tree_mask" in name or "deterministic" in name for name in names)


def test_a_backend_without_a_causal_mask_is_tried_without_what_needs_one():
    for case in cases_for(dataclasses.replace(ALL, causal=frozenset({False}))):
        assert not case.spec.causal


def test_windows_are_tried_at_the_edges_of_pages():
    windows = {case.spec.sliding_window for case in cases_for(dataclasses.replace(ALL, preferred_page_size=64))}
    assert windows >= {1, 2, 33, 63, 64, 65, 129, 4096}


def test_a_prompt_fills_two_pages_and_begins_a_third():
    for case in cases_for(ALL):
        if case.name.startswith("page size"):
            assert max(case.steps[0]) > 2 * case.page_size


def test_a_backend_that_rounds_is_allowed_to_where_it_declares_it():
    rounding = dataclasses.replace(ALL, quantizes_probs=True)
    for case in cases_for(rounding):
        assert not case.spec.may_quantize_q
        assert case.spec.may_quantize_probs == (case.spec.storage_dtype.startswith("float8"))
        assert not rounding.reject_reasons(case.spec, ANYWHERE, "decode")


def test_combinations_are_few_and_hold_all_features():
    for declared in (ALL, TorchNativeBackend.capabilities):
        found = [case for case in cases_for(declared) if case.capability == "combinations"]
        assert len(found) <= 190
        assert {case.spec.is_mla for case in found} == {True, False}
    assert set(PHASES) == ALL.phases


def test_every_listed_size_is_tried():
    listed = dataclasses.replace(FEW, head_dims=ints(48, 64, 512), page_sizes=ints(32, 48, 16), group_sizes=ints(4, 9))
    cases = list(cases_for(listed))
    assert {case.spec.head_dim for case in cases} == {48, 64, 512}
    assert {case.page_size for case in cases} == {16, 32, 48}
    assert {case.spec.group_size for case in cases} == {4, 9}
