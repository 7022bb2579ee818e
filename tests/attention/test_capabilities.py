"""Refusal is the default: every field of the spec, asked of a backend that declares nothing beyond the bare minimum."""

import dataclasses
from dataclasses import dataclass

import pytest

from anyattn import AttentionSpec, Capabilities, ContractError, GraphLevel, Platform
from anyattn.attention.capabilities import _JUDGED_FIELDS
from anyattn.attention.reference import ReferenceBackend
from anyattn.types import ANY_INT, ROLES, IntSet, ints

CPU = Platform(kind="cpu", vendor="intel", name="Test", arch="x86_64", torch_device="cpu")
H100 = Platform(kind="cuda", vendor="nvidia", name="Test", arch="sm90", torch_device="cuda:0")
SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)

BARE = Capabilities(
    dtypes=frozenset({"bfloat16"}),
    head_dims=ints(64, 128),
    page_sizes=ints(16, 64),
    layouts=("NHD",),
    phases=frozenset({"prefill", "decode", "mixed"}),
)

ASKED = {
    "num_qo_heads": ({"num_qo_heads": 14, "num_kv_heads": 2}, {"group_sizes": ints(4)}),
    "num_kv_heads": None,  # with num_qo_heads
    "head_dim": ({"head_dim": 80}, {}),
    "v_head_dim": ({"v_head_dim": 128}, {}),
    "dtype": ({"dtype": "float16"}, {}),
    "kv_dtype": ({"kv_dtype": "float8_e4m3fn"}, {}),
    "kv_scale_per_head": ({"kv_dtype": "float8_e4m3fn", "kv_scale_per_head": True}, {}),
    "may_quantize_q": (
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtypes": frozenset({"float8_e4m3fn"}), "quantizes_q": True},
    ),
    "may_quantize_probs": (
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtypes": frozenset({"float8_e4m3fn"}), "quantizes_probs": True},
    ),
    "sm_scale": None,  # every backend takes any scale
    "causal": ({"causal": False}, {}),
    "sliding_window": ({"sliding_window": 128}, {}),
    "logits_soft_cap": ({"logits_soft_cap": 30.0}, {}),
    "sinks": ({"sinks": True}, {}),
    "alibi": ({"alibi": True}, {}),
    "tree_mask": ({"tree_mask": True}, {}),
    "return_lse": ({"return_lse": True}, {}),
    "graph": ({"graph": GraphLevel.UNIFORM}, {}),
    "deterministic": ({"deterministic": True}, {}),
    "kv_lora_rank": (
        {"num_kv_heads": 1, "head_dim": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "sm_scale": 1.0},
        {},
    ),
    "qk_rope_head_dim": None,  # with kv_lora_rank
    "qk_nope_head_dim": None,  # the runtime's, not the backend's
    "topk": (
        {"num_kv_heads": 1, "head_dim": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "sm_scale": 1.0,
         "kv_dtype": "float8_e4m3fn", "topk": 64},
        {},
    ),
}  # fmt: skip
"""By spec field: what to ask, and what to take from the declaration besides."""

REPORTED_AS = {"v_head_dim": "head_dim"}


def reasons(spec, platform=CPU, role="prefill", capabilities=BARE, **paging):
    return {reason.field: reason for reason in capabilities.reject_reasons(spec, platform, role, **paging)}


def test_the_plain_spec_is_accepted_in_both_roles():
    assert reasons(SPEC) == {}
    assert reasons(SPEC, role="decode", page_size=16, layout="NHD") == {}


def test_every_field_of_the_spec_is_asked_here():
    assert set(ASKED) == {field.name for field in dataclasses.fields(AttentionSpec)}


@pytest.mark.parametrize("field", [field for field, asked in ASKED.items() if asked])
def test_what_is_not_declared_is_refused_with_a_reason_that_names_the_field(field):
    fields, declared = ASKED[field]
    found = reasons(SPEC.replace(**fields), capabilities=dataclasses.replace(BARE, **declared))
    reason = found[REPORTED_AS.get(field, field)]
    assert reason.wanted
    assert reason.supported
    assert reason.remedy


@pytest.mark.parametrize(
    ("level", "prefill", "decode"),
    [
        (GraphLevel.DECODE, GraphLevel.NEVER, GraphLevel.DECODE),
        (GraphLevel.UNIFORM, GraphLevel.UNIFORM, GraphLevel.DECODE),
        (GraphLevel.ALWAYS, GraphLevel.ALWAYS, GraphLevel.DECODE),
    ],
)
def test_steps_of_one_token_each_have_their_graphs_from_the_decode_backend_all_others_from_prefill(
    level, prefill, decode
):
    device = dataclasses.replace(CPU, graph=GraphLevel.ALWAYS)
    for role, least in (("prefill", prefill), ("decode", decode)):
        for declared in GraphLevel:
            found = reasons(SPEC.replace(graph=level), device, role, dataclasses.replace(BARE, graph=declared))
            assert ("graph" in found) == (declared < least), (role, declared)


def test_all_reasons_are_given_at_once():
    spec = SPEC.replace(dtype="float16", sinks=True, sliding_window=4, head_dim=80, return_lse=True)
    capabilities = dataclasses.replace(BARE, device_kinds=frozenset({"cuda"}), features=frozenset({"amx_bf16"}))
    assert set(reasons(spec, capabilities=capabilities, page_size=3, layout="HND")) == {
        "device_kind", "features", "dtype", "head_dim", "sliding_window", "sinks", "return_lse", "page_size", "layout"
    }  # fmt: skip


def test_scales_for_each_head_are_refused_where_only_one_for_all_is_declared():
    spec = SPEC.replace(kv_dtype="float8_e5m2", kv_scale_per_head=True)
    served = dataclasses.replace(BARE, kv_dtypes=frozenset({"float8_e5m2"}))
    assert {f: r.remedy for f, r in reasons(spec, capabilities=served).items()} == {
        "kv_scale_per_head": "set kv_scale_per_head=False"
    }
    assert reasons(spec, capabilities=dataclasses.replace(served, per_head_scales=True)) == {}
    assert reasons(spec)["kv_dtype"].remedy == "set kv_dtype='auto' and kv_scale_per_head=False"


def test_what_is_rounded_to_fp8_has_to_be_allowed_and_only_where_the_cache_is_fp8():
    rounds = dataclasses.replace(
        BARE, kv_dtypes=frozenset({"float8_e4m3fn"}), quantizes_q=True, quantizes_probs=True
    )
    fp8 = SPEC.replace(kv_dtype="float8_e4m3fn")
    assert {f: r.remedy for f, r in reasons(fp8, capabilities=rounds).items()} == {
        "may_quantize_q": "set may_quantize_q=True",
        "may_quantize_probs": "set may_quantize_probs=True",
    }
    assert reasons(fp8.replace(may_quantize_q=True, may_quantize_probs=True), capabilities=rounds) == {}
    assert reasons(SPEC, capabilities=rounds) == {}
    assert reasons(SPEC.replace(may_quantize_q=True)) == {}


def test_pages_of_joined_layers_are_refused_unless_strided_pages_are_declared():
    assert reasons(SPEC, joined_layers=True)["joined_layers"].remedy == "set joined_layers=False"
    assert reasons(SPEC, capabilities=dataclasses.replace(BARE, strided_pages=True), joined_layers=True) == {}


def test_the_architecture_counts_on_a_device_of_the_right_kind():
    hopper = dataclasses.replace(BARE, device_kinds=frozenset({"cuda"}), archs=frozenset({"sm90"}))
    assert reasons(SPEC, H100, capabilities=hopper) == {}
    assert set(reasons(SPEC, dataclasses.replace(H100, arch="sm80"), capabilities=hopper)) == {"arch"}
    assert set(reasons(SPEC, CPU, capabilities=hopper)) == {"device_kind"}


def test_a_role_wants_its_phases_and_trees_want_verify():
    decode_only = dataclasses.replace(BARE, phases=frozenset({"decode"}))
    assert reasons(SPEC, role="decode", capabilities=decode_only) == {}
    assert reasons(SPEC, role="prefill", capabilities=decode_only)["phase"].wanted == "mixed, prefill"
    trees = dataclasses.replace(BARE, tree_mask=True)
    assert reasons(SPEC.replace(tree_mask=True), capabilities=trees)["phase"].wanted == "verify"
    assert reasons(SPEC.replace(tree_mask=True), role="decode", capabilities=trees) == {}


def test_unequal_head_dims_are_served_only_as_declared_pairs():
    pairs = dataclasses.replace(BARE, head_dim_pairs=frozenset({(192, 128)}))
    assert reasons(SPEC.replace(head_dim=192, v_head_dim=128), capabilities=pairs) == {}
    assert "head_dim" in reasons(SPEC.replace(head_dim=192), capabilities=pairs)
    assert "head_dim" in reasons(SPEC.replace(head_dim=128, v_head_dim=64), capabilities=pairs)


def test_mla_is_refused_by_rank_and_rope_even_where_the_head_dim_would_fit():
    spec = AttentionSpec.mla(num_qo_heads=8, kv_lora_rank=48, qk_rope_head_dim=16, sm_scale=1.0)
    assert "kv_lora_rank" in reasons(spec)
    declared = dataclasses.replace(BARE, mla_dims=frozenset({(48, 16)}))
    assert reasons(spec, capabilities=declared) == {}


@dataclass(frozen=True, kw_only=True)
class LaterSpec(AttentionSpec):
    """A spec of a contract that has grown by two fields."""

    differential: bool = False
    temperature: float = 1.0


def test_a_field_that_is_not_known_is_refused_unless_it_holds_its_neutral_default():
    fields = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    assert reasons(LaterSpec(**fields)) == {}
    found = reasons(LaterSpec(**fields, differential=True, temperature=0.5))
    assert set(found) == {"differential", "temperature"}
    assert found["temperature"].remedy == "set temperature=1.0"


def test_a_declaration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BARE.sinks = True


def test_the_graph_level_is_bounded_by_the_device_too():
    everywhere = dataclasses.replace(BARE, graph=GraphLevel.ALWAYS)
    wanted = SPEC.replace(graph=GraphLevel.UNIFORM)
    assert reasons(wanted, CPU, capabilities=everywhere)["graph"].supported == "never"
    gpu = dataclasses.replace(H100, graph=GraphLevel.ALWAYS)
    assert reasons(wanted, gpu, capabilities=everywhere) == {}


def test_every_field_of_the_spec_is_judged_and_no_other():
    assert {field.name for field in dataclasses.fields(AttentionSpec)} == _JUDGED_FIELDS


def test_the_nearest_member_of_a_set_is_what_a_remedy_names():
    assert IntSet(maximum=1024).nearest(5000) == 1024
    assert IntSet(minimum=16, maximum=64, multiple_of=16).nearest(40) == 32
    assert IntSet(minimum=16, multiple_of=16).nearest(3) == 16
    assert ints(16, 64).nearest(60) == 64
    assert reasons(SPEC, page_size=60)["page_size"].remedy == "set page_size=64"


@dataclass(frozen=True, kw_only=True)
class ListingSpec(AttentionSpec):
    """A spec whose new field has a default that is made anew for each."""

    tags: tuple[str, ...] = dataclasses.field(default_factory=tuple)


def test_a_default_that_is_made_is_neutral_too():
    fields = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    assert reasons(ListingSpec(**fields)) == {}
    assert reasons(ListingSpec(**fields, tags=("x",)))["tags"].remedy == "set tags=()"


def test_int_sets_hold_what_they_say():
    assert [n for n in range(1, 70) if n in IntSet(minimum=16, maximum=64, multiple_of=16)] == [16, 32, 48, 64]
    assert str(IntSet(minimum=16, maximum=64, multiple_of=16)) == "16 to 64, in multiples of 16"
    assert str(ANY_INT) == "any"
    assert str(ints(64, 1)) == "1, 64"
    assert IntSet(minimum=10, multiple_of=16).example() == 16
    assert 0 not in ANY_INT


@pytest.mark.parametrize(
    "fields",
    [
        {"dtypes": frozenset()},
        {"dtypes": None},
        {"causal": frozenset()},
        {"layouts": ()},
        {"page_sizes": 16},
        {"preferred_page_size": "16"},
        {"graph": "never"},
        {"priority": "high"},
        {"packages": "torch"},
        {"dtypes": frozenset({"fp32"})},
        {"phases": frozenset({"extend"})},
        {"layouts": ("DNH",)},
        {"features": frozenset({1})},
        {"archs": frozenset({9})},
        {"archs": frozenset()},
        {"device_kinds": frozenset({None})},
        {"head_dim_pairs": frozenset({64})},
        {"mla_dims": frozenset({(512, 0)})},
        {"preferred_page_size": 48},
        {"sinks": "no"},
        {"deterministic": None},
        {"per_head_scales": 1},
        {"strided_pages": None},
        {"priority": True},
        {"programs": "g++"},
    ],
    ids=str,
)
def test_a_declaration_that_means_nothing_cannot_be_made(fields):
    with pytest.raises(ContractError, match=next(iter(fields))):
        dataclasses.replace(BARE, **fields)


@pytest.mark.parametrize(
    "fields", [{"values": frozenset()}, {"multiple_of": 0}, {"minimum": 0}, {"minimum": 9, "maximum": 8}], ids=str
)
def test_an_int_set_that_is_empty_or_not_of_positive_integers_cannot_be_made(fields):
    with pytest.raises(ValueError, match="IntSet"):
        IntSet(**fields)


def test_features_that_do_not_go_together_are_refused_where_a_spec_has_both():
    declared = dataclasses.replace(
        ReferenceBackend.capabilities,
        not_together=(("mla", "fp8"), ("sliding_window", "sinks"), ("float16", "alibi")),
    )

    def fields(spec):
        return [reason.field for reason in declared.reject_reasons(spec, CPU, "decode")]

    heads = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    mla = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
    fp8 = "float8_e4m3fn"
    for spec in (heads.replace(kv_dtype=fp8), mla, heads.replace(sinks=True), heads.replace(sliding_window=9)):
        assert fields(spec) == []
    assert fields(mla.replace(kv_dtype=fp8)) == ["kv_dtype"]
    assert fields(heads.replace(sliding_window=9, sinks=True)) == ["sinks"]
    assert fields(heads.replace(dtype="float16", alibi=True)) == ["alibi"]
    for wrong in (("mla", "mla"), ("mla", "nonesuch"), ("mla",), "mla"):
        with pytest.raises(ContractError, match="not_together"):
            dataclasses.replace(declared, not_together=(wrong,))


def test_a_pair_with_graphs_is_about_the_role_that_has_them():
    device = dataclasses.replace(CPU, graph=GraphLevel.ALWAYS)
    declared = dataclasses.replace(
        BARE, graph=GraphLevel.ALWAYS, sinks=True, lse=True, not_together=(("graph", "sinks"), ("return_lse", "graph"))
    )
    for level, roles in ((GraphLevel.NEVER, ()), (GraphLevel.DECODE, ("decode",)), (GraphLevel.UNIFORM, ROLES)):
        spec = SPEC.replace(graph=level)
        for role in ROLES:
            assert reasons(spec, device, role, declared) == {}
            found = reasons(spec.replace(sinks=True), device, role, declared)
            assert set(found) == ({"sinks"} if role in roles else set())
            found = reasons(spec.replace(return_lse=True), device, role, declared)
            assert set(found) == ({"graph"} if role in roles else set())


def test_more_query_heads_than_are_declared_are_refused():
    declared = dataclasses.replace(BARE, num_qo_heads=IntSet(maximum=16))
    assert reasons(SPEC.replace(num_qo_heads=16), capabilities=declared) == {}
    reason = reasons(SPEC.replace(num_qo_heads=18), capabilities=declared)["num_qo_heads"]
    assert (reason.wanted, reason.supported) == ("18 query heads", "1 to 16")
