"""The cases that a declaration leads to: all that is declared, nothing else, under names that stay."""

import dataclasses
import itertools

import pytest

from anyattn import Capabilities, Platform
from anyattn.attention.flex_attention import FlexAttentionCPUBackend
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.combinations import combinations
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


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_two_values_meet_in_few_combinations(sizes):
    found = combinations(sizes)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        pairs = {(each[a], each[b]) for each in found}
        assert pairs == set(itertools.product(range(sizes[a]), range(sizes[b])))
    largest = sorted(sizes)[-2:]
    assert len(found) <= 2 * largest[0] * largest[-1]
    assert found == combinations(sizes)


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
        "mla_dims", "group_sizes", "page_sizes", "layouts", "strided_pages", "phases", "causal", "sliding_window",
        "logits_soft_cap", "sinks", "alibi", "tree_mask", "lse", "deterministic", "contiguous_q",
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
        assert len(found) <= 50
        assert {case.spec.is_mla for case in found} == {True, False}
    assert set(PHASES) == ALL.phases
