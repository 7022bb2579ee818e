"""Selection: pure, explained, independent of order, and never silent."""

import dataclasses
import random

import pytest

from anyattn import AttentionSpec, Capabilities, NoBackendError, Platform, SpecError
from anyattn.arguments import checked_preference
from anyattn.attention.judge import judge
from anyattn.attention.select import select, select_layers
from anyattn.attention.selection import BackendCandidate, Candidates, Preference
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.settings import Settings
from anyattn.types import ANY_INT, IntSet, Reason, ints

CPU = Platform(kind="cpu", vendor="intel", name="Test", arch="x86_64", torch_device="cpu")
SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
ALL = frozenset({"prefill", "decode", "mixed"})


def backend(name, *, missing=(), **declared):
    base = {
        "dtypes": frozenset({"bfloat16"}), "head_dims": ANY_INT, "page_sizes": ANY_INT, "layouts": ("NHD", "HND"),
        "phases": ALL,
    }  # fmt: skip
    capabilities = Capabilities(**{**base, **declared})
    return BackendCandidate(name=name, distribution=f"{name}-dist", capabilities=capabilities, missing=missing)


def candidates(*backends, page_sizes=ANY_INT, layouts=("NHD", "HND")):
    return Candidates(
        backends=backends,
        allocators={"paged": AllocatorCapabilities(page_sizes=page_sizes)},
        pools={
            "mha": PoolCapabilities(kind="mha", kv_dtypes=frozenset({"bfloat16"}), layouts=layouts),
            "mla": PoolCapabilities(kind="mla", kv_dtypes=frozenset({"bfloat16"}), layouts=layouts),
        },
    )


def test_the_highest_priority_wins_and_ties_go_by_name():
    found = select(SPEC, CPU, candidates(backend("b", priority=5), backend("c", priority=5), backend("a")))
    assert (found.prefill, found.decode) == ("b", "b")


def test_priority_may_follow_from_facts_spec_and_role():
    def priority(platform, spec, role, load):
        return 100 if (platform.kind, spec.head_dim, role) == ("cpu", 64, "decode") else 0

    found = select(SPEC, CPU, candidates(backend("a", priority=priority), backend("b", priority=50)))
    assert (found.prefill, found.decode) == ("b", "a")


class Raising(Capabilities):
    """A plugin's own kind of declaration, which fails."""

    def reject_reasons(self, *arguments, **named):
        raise KeyError("boom")


def test_a_declaration_that_fails_is_a_reason_against_its_backend_alone():
    good = backend("good")
    broken = dataclasses.replace(backend("broken", priority=9), capabilities=Raising(**fields_of(good.capabilities)))
    found = select(SPEC, CPU, candidates(broken, good))
    assert (found.prefill, found.decode) == ("good", "good")
    text = "broken: capabilities: wanted reasons, supported KeyError: 'boom'; report it to broken-dist"
    assert text in found.explain()


def fields_of(declared):
    return {field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)}


def test_prefill_and_decode_agree_on_page_size_and_layout():
    found = select(
        SPEC,
        CPU,
        candidates(
            backend("decoder", phases=frozenset({"decode"}), page_sizes=ints(64), layouts=("HND",), priority=9),
            backend("prefiller", phases=frozenset({"prefill", "mixed"}), page_sizes=IntSet(multiple_of=32)),
        ),
    )
    assert (found.prefill, found.decode, found.page_size, found.layout) == ("prefiller", "decoder", 64, "HND")


def test_a_better_backend_that_cannot_agree_gives_way_to_one_that_can():
    found = select(
        SPEC,
        CPU,
        candidates(
            backend("decoder", phases=frozenset({"decode"}), page_sizes=ints(64), priority=9),
            backend("everything", page_sizes=ints(16)),
        ),
    )
    assert (found.prefill, found.decode, found.page_size) == ("everything", "everything", 16)


def test_the_allocator_and_the_pool_have_a_say_too():
    found = select(SPEC, CPU, candidates(backend("a", preferred_page_size=256), page_sizes=ints(8), layouts=("HND",)))
    assert (found.page_size, found.layout, found.allocator, found.pool) == (8, "HND", "paged", "mha")


def test_mla_gets_the_pool_for_latents():
    spec = AttentionSpec.mla(num_qo_heads=8, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
    assert select(spec, CPU, candidates(backend("a", any_mla_dims=True))).pool == "mla"


def test_the_choice_never_depends_on_the_order_of_the_candidates():
    some = [
        backend("a", priority=3, page_sizes=ints(16)),
        backend("b", priority=3, page_sizes=ints(64)),
        backend("c", priority=7, phases=frozenset({"decode"}), page_sizes=ints(64)),
        backend("d", priority=1),
    ]
    chosen = set()
    for _ in range(24):
        random.shuffle(some)
        found = select(SPEC, CPU, candidates(*some))
        chosen.add((found.prefill, found.decode, found.page_size, found.explain()))
    assert len(chosen) == 1


def test_nothing_valid_is_an_error_that_holds_every_candidates_reasons():
    absent = Reason(field="package", wanted="x", supported="not installed", remedy="pip install x")
    some = candidates(backend("a", dtypes=frozenset({"float16"})), backend("b", missing=(absent,)))
    with pytest.raises(NoBackendError) as caught:
        select(SPEC, CPU, some)
    assert "a: dtype: wanted bfloat16, supported float16; set dtype='float16'" in str(caught.value)
    assert "b: package: wanted x, supported not installed; pip install x" in str(caught.value)


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        (Preference(prefill_backend="a"), r"'a' was asked for and cannot serve prefill(.|\n)*b\."),
        (Preference(decode_backends=("a",)), r"'a' was asked for and cannot serve decode(.|\n)*Valid here: b"),
        (Preference(prefill_backend="zzz"), r"no attention backend named 'zzz': there are a, b"),
        (Preference(page_size=3), r"No attention backend can serve(.|\n)*page_size: wanted 3, supported 16, 64"),
        (Preference(layout="HND"), r"layout: wanted HND, supported NHD"),
        (Preference(allocator="zzz"), r"no KV allocator named 'zzz'(.|\n)*paged \(valid\)"),
        (Preference(pool="mla"), r"KV pool 'mla' was asked for(.|\n)*wanted keys and values of heads"),
    ],
)
def test_what_is_asked_for_and_invalid_fails_at_once_and_says_what_would_be_valid(preference, message):
    paging = {"page_sizes": ints(16, 64), "layouts": ("NHD",)}
    some = candidates(backend("a", sinks=True, dtypes=frozenset({"float16"}), **paging), backend("b", **paging))
    with pytest.raises(NoBackendError, match=message):
        select(SPEC, CPU, some, preference)


def test_what_is_asked_for_and_valid_is_taken_whatever_its_priority():
    some = candidates(backend("a", priority=100), backend("b"))
    found = select(SPEC, CPU, some, Preference(prefill_backend="b", decode_backends=("b",), page_size=5, layout="HND"))
    assert (found.prefill, found.decode, found.page_size, found.layout) == ("b", "b", 5, "HND")
    assert "a: valid, but b was asked for" in found.explain()


def test_explain_says_what_was_chosen_from_where_and_why_not_the_others():
    half = backend("c", dtypes=frozenset({"float16"}))
    found = select(SPEC, CPU, candidates(backend("a", priority=2), backend("b"), half))
    text = found.explain()
    assert "prefill   a: priority 2, from a-dist, declared, 2 valid" in text
    assert "b: valid, with priority 0" in text
    assert "c: dtype: wanted bfloat16" in text


def test_explain_says_that_a_better_candidate_found_no_agreement():
    some = candidates(
        backend("best", phases=frozenset({"decode"}), page_sizes=ints(64), priority=500),
        backend("all", page_sizes=ints(16), priority=10),
    )
    assert "decode: valid, with priority 500, but page size and layout find no agreement" in select(
        SPEC, CPU, some
    ).explain()


def test_a_priority_that_raises_refuses_its_own_backend_only():
    def broken(platform, spec, role, load):
        raise ZeroDivisionError("no priority")

    found = select(SPEC, CPU, candidates(backend("a", priority=broken), backend("b")))
    assert found.decode == "b"
    assert "a: priority: wanted a number, supported ZeroDivisionError: no priority" in found.explain()


def test_problems_are_told_with_the_choice_and_with_a_refusal():
    some = dataclasses.replace(candidates(backend("a")), problems=("plugin zoo cannot be imported",))
    assert "plugin zoo cannot be imported" in select(SPEC, CPU, some).explain()
    with pytest.raises(NoBackendError, match="plugin zoo cannot be imported"):
        select(SPEC, CPU, some, Preference(decode_backends=("zoo",)))


def test_the_choice_and_its_trace_go_to_json():
    import json

    found = select(SPEC, CPU, candidates(backend("a"), backend("c", dtypes=frozenset({"float16"}))))
    data = json.loads(json.dumps(found.to_json()))
    assert data["choice"]["decode"] == "a"
    refused = next(backend for backend in data["backends"] if backend["name"] == "c")
    assert refused["valid"] is False
    assert refused["reasons"][0]["field"] == "dtype"


def test_layers_of_several_kinds_agree_on_one_pool():
    window = SPEC.replace(sliding_window=128)
    some = candidates(
        backend("plain", page_sizes=ints(64), priority=9),
        backend("windowed", page_sizes=ints(16, 64), preferred_page_size=16, sliding_window=True),
    )
    found = select_layers([window, SPEC, window], CPU, some)
    assert list(found) == [window, SPEC]
    assert {selection.page_size for selection in found.values()} == {64}
    assert (found[SPEC].decode, found[window].decode) == ("plain", "windowed")


def test_layers_that_cannot_agree_are_refused():
    some = candidates(
        backend("plain", page_sizes=ints(64), priority=1),
        backend("windowed", page_sizes=ints(16), sliding_window=True, group_sizes=ints(4)),
    )
    layers = [SPEC.replace(num_qo_heads=4), SPEC.replace(sliding_window=8)]
    with pytest.raises(NoBackendError, match=r"page size 64(.|\n)*page size 16"):
        select_layers(layers, CPU, some)


def test_a_selection_is_plain_data():
    found = select(SPEC, CPU, candidates(backend("a")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.decode = "b"


@pytest.mark.parametrize("value", [True, "99", float("nan"), None, 10**400, [1]], ids=lambda v: repr(v)[:9])
def test_a_priority_that_is_no_number_refuses_its_own_backend_only(value):
    some = candidates(backend("a", priority=lambda *facts: value), backend("b"))
    assert select(SPEC, CPU, some).decode == "b"


def test_priorities_are_compared_as_they_are():
    some = candidates(backend("a", priority=lambda *facts: 3.1), backend("b", priority=lambda *facts: 3.9))
    found = select(SPEC, CPU, some)
    assert found.decode == "b"
    assert "a: valid, with priority 3.1" in found.explain()


def test_pools_and_allocators_have_priorities_too_behind_those_of_backends():
    some = candidates(backend("a", preferred_page_size=16))
    some = dataclasses.replace(
        some,
        allocators={**some.allocators, "fast": AllocatorCapabilities(page_sizes=ints(64), priority=100)},
        pools={
            **some.pools,
            "quick": PoolCapabilities(kind="mha", kv_dtypes=frozenset({"bfloat16"}), layouts=("HND",), priority=100),
        },
    )
    found = select(SPEC, CPU, some)
    assert (found.page_size, found.layout, found.allocator, found.pool) == (64, "HND", "fast", "quick")
    assert "allocator paged: valid, with priority 0" in found.explain()
    found = select(SPEC, CPU, some, Preference(page_size=16))
    assert (found.allocator, found.pool) == ("paged", "quick")


def test_the_pages_do_not_depend_on_which_kind_of_layer_comes_first():
    local = SPEC.replace(sliding_window=128)
    some = candidates(
        backend("a", page_sizes=ints(16)),
        backend("c", page_sizes=ints(64)),
        backend("b", page_sizes=ints(64), sliding_window=True),
        backend("z", page_sizes=ints(16), sliding_window=True),
    )
    one, other = (select_layers(specs, CPU, some) for specs in ([SPEC, local], [local, SPEC]))
    assert {spec: (s.decode, s.page_size) for spec, s in one.items()} == {
        spec: (s.decode, s.page_size) for spec, s in other.items()
    }


def test_a_remedy_agrees_with_all_decode_backends_that_were_asked_for():
    some = candidates(
        backend("a", phases=frozenset({"decode"}), layouts=("NHD",)),
        backend("b", phases=frozenset({"decode"})),
        backend("e", phases=frozenset({"prefill", "mixed"}), layouts=("HND",)),
    )
    asked = Preference(decode_backends=("a", "b"))
    reasons = next(v.reasons for v in judge(SPEC, CPU, some, asked) if (v.name, v.role) == ("a", "prefill"))
    assert "nothing that is installed serves all of this here" in reasons[0].remedy


def test_a_remedy_leads_out_of_what_was_asked_for_and_refused():
    some = candidates(backend("plain", priority=9), backend("sinking", sinks=True))
    asked = Preference(prefill_backend="plain", decode_backends=("plain",))
    with pytest.raises(NoBackendError, match="sinks: wanted True, supported False; set backend='sinking'"):
        select(SPEC.replace(sinks=True), CPU, some, asked)


def test_why_a_decoder_was_refused_for_prefill_is_told_beside_what_it_fills():
    some = candidates(backend("decoder", phases=frozenset({"decode"}), priority=9), backend("all"))
    assert "  decoder: prefill: phase: wanted mixed, prefill, supported decode" in select(SPEC, CPU, some).explain()


def test_explain_says_that_deterministic_rows_kept_a_better_decoder_out():
    spec = SPEC.replace(deterministic=True)
    some = candidates(
        backend("decoder", phases=frozenset({"decode"}), priority=9, deterministic=True),
        backend("all", deterministic=True),
    )
    text = "decode: valid, with priority 9, but with deterministic one backend has to fill both roles"
    assert text in select(spec, CPU, some).explain()


def test_a_remedy_for_one_role_is_said_in_the_argument_of_that_role():
    some = candidates(backend("plain", priority=9), backend("sinking", sinks=True))
    with pytest.raises(NoBackendError, match="set prefill_backend='sinking'"):
        select(SPEC.replace(sinks=True), CPU, some, Preference(prefill_backend="plain"))


def test_a_name_that_nobody_offers_tells_of_plugins_that_are_kept_out():
    some = dataclasses.replace(candidates(backend("a")), kept_out=("zoo",))
    with pytest.raises(NoBackendError, match="Plugins that ANYATTN_PLUGINS keeps out: zoo"):
        select(SPEC, CPU, some, Preference(decode_backends=("zoo",)))


FP8 = frozenset({"bfloat16", "float8_e4m3fn"})


def pool(**declared):
    return PoolCapabilities(**{"kind": "mha", "kv_dtypes": FP8, **declared})


def with_pools(*backends, **pools):
    return dataclasses.replace(candidates(*backends), pools=pools)


def test_joined_layers_go_to_backends_and_pools_that_declare_them():
    some = with_pools(
        backend("a", priority=9), backend("b", strided_pages=True), one=pool(priority=9), two=pool(joined_layers=True)
    )
    found = select(SPEC, CPU, some)
    assert (found.decode, found.pool) == ("a", "one")
    assert "joined" not in found.explain()
    assert "joined_layers" not in found.choice_json()
    found = select(SPEC, CPU, some, Preference(joined_layers=True))
    assert (found.prefill, found.decode, found.pool) == ("b", "b", "two")
    assert "pool two, joined layers" in found.explain()
    assert "a: joined_layers: wanted pages of joined layers" in found.explain()
    assert found.choice_json()["joined_layers"] is True


def test_joined_layers_that_nobody_stores_or_reads_are_refused_with_a_way_out():
    asked = Preference(joined_layers=True)
    with pytest.raises(NoBackendError, match=r"a: joined_layers: (.|\n)*set joined_layers=False"):
        select(SPEC, CPU, with_pools(backend("a"), one=pool(joined_layers=True)), asked)
    with pytest.raises(NoBackendError, match=r"one \(joined_layers: (.|\n)*set joined_layers=False"):
        select(SPEC, CPU, with_pools(backend("a", strided_pages=True), one=pool()), asked)


def test_joined_layers_and_layouts_are_checked_as_they_are_asked_for():
    settings = Settings()
    assert checked_preference(settings, joined_layers=True, layout="5D") == Preference(joined_layers=True, layout="5D")
    with pytest.raises(SpecError, match="joined_layers must be True or False, not 1"):
        checked_preference(settings, joined_layers=1)
    with pytest.raises(SpecError, match="layout must be NHD or HND or NZ or 5D, not 'nhd'"):
        checked_preference(settings, layout="nhd")


def test_scales_for_each_head_need_a_backend_and_a_pool_that_declare_them():
    spec = SPEC.replace(kv_dtype="float8_e4m3fn", kv_scale_per_head=True)
    kv_dtypes = frozenset({"float8_e4m3fn"})
    some = with_pools(
        backend("a", priority=9, kv_dtypes=kv_dtypes),
        backend("b", kv_dtypes=kv_dtypes, per_head_scales=True),
        one=pool(priority=9),
        two=pool(per_head_scales=True),
        three=pool(kv_dtypes=frozenset({"bfloat16"})),
    )
    found = select(spec, CPU, some)
    assert (found.prefill, found.decode, found.pool) == ("b", "b", "two")
    assert {v.name: [r.remedy for r in v.reasons] for v in found.storage if v.what == "pool"} == {
        "one": ["set kv_scale_per_head=False"],
        "three": ["set kv_dtype='bfloat16' and kv_scale_per_head=False", "set kv_scale_per_head=False"],
        "two": [],
    }
    # One layer among others that asks for them is enough.
    found = select_layers([spec.replace(kv_scale_per_head=False), spec], CPU, some)
    assert {selection.pool for selection in found.values()} == {"two"}


EVERY_LAYOUT = ("5D", "NZ", "HND", "NHD")


@pytest.mark.parametrize(
    ("layout", "page_sizes", "fields", "page_size"),
    [
        ("5D", ANY_INT, {}, 16),
        ("5D", ints(3, 24), {}, 24),
        ("5D", IntSet(multiple_of=3), {}, 24),
        ("5D", IntSet(multiple_of=12, maximum=24), {}, 24),
        ("5D", IntSet(multiple_of=12, maximum=47), {"dtype": "float32"}, 12),
        ("5D", IntSet(minimum=7, multiple_of=7), {"kv_dtype": "float8_e4m3fn"}, 112),
        ("NZ", ints(3), {}, 3),
        ("NZ", ANY_INT, {"head_dim": 80}, 16),
    ],
)
def test_the_page_size_fits_what_a_layout_cuts_pages_into(layout, page_sizes, fields, page_size):
    dtypes = frozenset({"bfloat16", "float32"})
    one = backend("a", layouts=(layout,), page_sizes=page_sizes, dtypes=dtypes, kv_dtypes=FP8)
    some = with_pools(one, one=pool(layouts=EVERY_LAYOUT, kv_dtypes=FP8 | dtypes))
    found = select(SPEC.replace(**fields), CPU, some)
    assert (found.layout, found.page_size) == (layout, page_size)
    cache = found.spec.cache_spec(num_layers=1, page_size=found.page_size, layout=found.layout)
    assert cache.layout == layout


def test_a_layout_that_cannot_hold_the_layers_gives_way_to_one_that_can():
    some = with_pools(backend("a", layouts=EVERY_LAYOUT), one=pool(layouts=EVERY_LAYOUT))
    assert select(SPEC, CPU, some).layout == "5D"
    assert select(SPEC.replace(head_dim=72, v_head_dim=None), CPU, some, Preference(page_size=8)).layout == "5D"
    assert select(SPEC.replace(head_dim=72), CPU, some, Preference(page_size=3)).layout == "HND"
    assert select(SPEC, CPU, some, Preference(page_size=3)).layout == "NZ"


@pytest.mark.parametrize(
    ("preference", "fields", "layouts", "message"),
    [
        (Preference(layout="NZ"), {"head_dim": 72}, EVERY_LAYOUT, "72 is not(.|\n)*set layout='5D'"),
        (Preference(layout="NZ"), {"head_dim": 72}, ("NZ",), "72 is not(.|\n)*nothing that is installed"),
        (Preference(layout="5D", page_size=3), {}, EVERY_LAYOUT, "3 is not(.|\n)*set page_size=16"),
        (Preference(page_size=17), {}, ("5D",), "17 is not(.|\n)*set page_size=32"),
        (Preference(layout="NHD"), {}, ("NZ", "5D"), "wanted NHD, supported NZ, 5D; set layout='NZ'"),
        (Preference(layout="NHD", page_size=3), {}, ("5D",), "supported 5D; set page_size=16 and layout='5D'"),
    ],
    ids=str,
)
def test_a_pool_says_why_it_cannot_hold_such_pages_before_it_is_made(preference, fields, layouts, message):
    some = with_pools(backend("a", layouts=EVERY_LAYOUT), one=pool(layouts=layouts))
    with pytest.raises(NoBackendError, match=f"No KV pool is valid here. There are: one (.|\n)*{message}"):
        select(SPEC.replace(**fields), CPU, some, preference)


def test_pages_that_no_layout_in_common_can_be_cut_into_are_told_with_the_sizes_that_can():
    some = with_pools(backend("a", layouts=("5D",), page_sizes=ints(3, 5)), one=pool(layouts=("5D", "NHD")))
    with pytest.raises(NoBackendError, match=r"layouts of such layers: 5D \(page size any, in multiples of 8\)"):
        select(SPEC, CPU, some)


@pytest.mark.parametrize(
    ("arch", "standing"),
    [("new", "contract-tested with vendor-kernels 1.2"), ("old", "run on hardware"), ("other", "declared")],
)
def test_the_explanation_says_with_which_wheel_calls_were_tested(arch, standing):
    tested = {"contract_tested_on": frozenset({"new"}), "run_on": frozenset({"old"})}
    device = dataclasses.replace(CPU, arch=arch)
    found = select(SPEC, device, candidates(backend("a", **tested, contract_tested_with="vendor-kernels 1.2")))
    assert f"from a-dist, {standing}, 1 valid" in found.explain()


def test_against_a_backend_for_another_kind_of_device_the_explanation_has_that_reason_alone():
    elsewhere = backend("b", device_kinds=frozenset({"npu"}), dtypes=frozenset({"float16"}))
    found = select(SPEC, CPU, candidates(backend("a"), elsewhere))
    assert "  b: device_kind: wanted cpu, supported npu; use a device of kind npu\n" in f"{found.explain()}\n"
    assert {reason.field for verdict in found.verdicts for reason in verdict.reasons} == {"device_kind", "dtype"}
