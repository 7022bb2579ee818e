"""Remedies of declarations, as printed, are followed here, and the reason is gone; and load order never matters."""

import ast
import dataclasses
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyattn import AttentionSpec, Capabilities, GraphLevel, NoBackendError, SpecError
from anyattn.attention.judge import judge, judge_allocators, judge_pools
from anyattn.attention.select import select
from anyattn.attention.selection import BackendCandidate, Candidates, Preference
from anyattn.discovery import candidates
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.mem_cache.spec import CACHE_KINDS
from anyattn.plugins.manager import PluginManager
from anyattn.types import ALL_LAYOUTS, ANY_INT, DTYPE_BYTES, FP8_DTYPES, PHASES, IntSet, Reason, ints

PLUGINS = PluginManager(entry_points=[])
BUILTIN = candidates(PLUGINS)
DEVICES = {name: offer.load() for name, offer in PLUGINS.simulated_devices().items()}
MISSING = Reason(field="package", wanted="kernels>=2", supported="not installed", remedy='pip install "anyattn[cuda]"')

int_sets = st.one_of(
    st.just(ANY_INT),
    st.sets(st.sampled_from([1, 8, 16, 48, 64, 128]), min_size=1).map(lambda values: ints(*values)),
    st.builds(IntSet, multiple_of=st.sampled_from([8, 16, 48, 64]), maximum=st.sampled_from([None, 256])),
)


def subset(values, *, least=0):
    return st.sets(st.sampled_from(sorted(values)), min_size=least).map(frozenset)


def declared(**fields):
    """A declaration; a page size that is preferred and not served would be refused."""
    if fields["preferred_page_size"] not in fields["page_sizes"]:
        fields["preferred_page_size"] = None
    return Capabilities(**fields)


some_layouts = st.lists(st.sampled_from(ALL_LAYOUTS), min_size=1, unique=True).map(tuple)
declarations = st.builds(
    declared,
    device_kinds=st.none() | subset({"cuda", "cpu", "rocm", "ascend", "xpu"}, least=1),
    archs=st.none() | subset({"sm80", "sm90", "x86_64", "gfx942"}, least=1),
    features=subset({"amx_bf16", "avx2"}),
    dtypes=subset(set(DTYPE_BYTES) - FP8_DTYPES, least=1),
    kv_dtypes=subset(DTYPE_BYTES),
    head_dims=st.none() | int_sets,
    head_dim_pairs=subset({(192, 128), (128, 64)}),
    mla_dims=subset({(512, 64)}),
    group_sizes=int_sets,
    num_qo_heads=int_sets,
    page_sizes=int_sets,
    preferred_page_size=st.sampled_from([0, 16, 64]),
    per_head_scales=st.booleans(),
    layouts=some_layouts,
    strided_pages=st.booleans(),
    phases=subset(PHASES, least=1),
    causal=subset({True, False}, least=1),
    sliding_window=st.booleans(),
    logits_soft_cap=st.booleans(),
    sinks=st.booleans(),
    alibi=st.booleans(),
    tree_mask=st.booleans(),
    lse=st.booleans(),
    graph=st.sampled_from(GraphLevel),
    deterministic=st.booleans(),
    priority=st.integers(0, 3) | st.sampled_from([lambda p, s, r, load: load.num_seqs, lambda *facts: 1 // 0]),
)
offers = st.builds(
    lambda capabilities, missing: (capabilities, (MISSING,) if missing else ()), declarations, st.booleans()
)
pools = st.builds(
    PoolCapabilities,
    device_kinds=st.none() | subset({"cuda", "cpu"}, least=1),
    kind=st.sampled_from(sorted(CACHE_KINDS)),
    kv_dtypes=subset(DTYPE_BYTES, least=1),
    layouts=some_layouts,
    per_head_scales=st.booleans(),
    joined_layers=st.booleans(),
    priority=st.integers(0, 1),
)
allocators = st.builds(AllocatorCapabilities, page_sizes=int_sets, priority=st.integers(0, 1))


@st.composite
def offered(draw):
    """Backends, pools and allocators of strangers beside the built-in ones, or without them."""
    backends = [
        BackendCandidate(name=name, distribution="dist", capabilities=capabilities, missing=missing)
        for name, (capabilities, missing) in zip("abcd", draw(st.lists(offers, min_size=1, max_size=4)), strict=False)
    ]
    stored = {
        "pools": dict(zip("pq", draw(st.lists(pools, max_size=2)), strict=False)),
        "allocators": dict(zip("xy", draw(st.lists(allocators, max_size=2)), strict=False)),
    }
    if draw(st.booleans()):
        backends += BUILTIN.backends
        stored = {kind: {**getattr(BUILTIN, kind), **some} for kind, some in stored.items()}
    return Candidates(backends=backends, **stored)


@st.composite
def specs(draw):
    fields = {
        "dtype": draw(st.sampled_from(sorted(set(DTYPE_BYTES) - FP8_DTYPES))),
        "kv_dtype": draw(st.sampled_from(["auto", *DTYPE_BYTES])),
        "sliding_window": draw(st.none() | st.just(128)),
        "logits_soft_cap": draw(st.none() | st.just(30.0)),
        "sinks": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "tree_mask": draw(st.booleans()),
        "return_lse": draw(st.booleans()),
        "graph": draw(st.sampled_from(GraphLevel)),
        "deterministic": draw(st.booleans()),
        "causal": draw(st.booleans()),
    }
    if fields["kv_dtype"] in FP8_DTYPES:
        fields["kv_scale_per_head"] = draw(st.booleans())
    group, heads = draw(st.sampled_from([1, 4, 7, 16])), draw(st.sampled_from([1, 2, 8]))
    try:
        if draw(st.booleans()):
            return AttentionSpec(
                num_qo_heads=group * heads, num_kv_heads=heads, v_head_dim=draw(st.none() | st.just(128)),
                head_dim=draw(st.sampled_from([64, 72, 80, 90, 128, 192])), **fields,
            )  # fmt: skip
        rank = draw(st.sampled_from([256, 512]))
        return AttentionSpec.mla(num_qo_heads=group, kv_lora_rank=rank, qk_rope_head_dim=64, sm_scale=0.1, **fields)
    except SpecError:
        return AttentionSpec(num_qo_heads=8, num_kv_heads=8, head_dim=64)


preferences = st.builds(
    Preference,
    prefill_backend=st.none() | st.none() | st.sampled_from("ab"),
    decode_backends=st.just(()) | st.just(()) | st.lists(st.sampled_from("abc"), unique=True).map(tuple),
    allocator=st.none() | st.none() | st.sampled_from("xy"),
    pool=st.none() | st.none() | st.sampled_from("pq"),
    page_size=st.none() | st.sampled_from([16, 40, 64]),
    layout=st.none() | st.sampled_from(ALL_LAYOUTS),
    joined_layers=st.booleans(),
    installed_only=st.booleans(),
)
devices = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__)


def told_another_backend(preference, verdicts, leaves_out, role, name):
    """The preference with the backend that a remedy names; what else was asked for and is refused goes."""
    if role == "":
        # Arguments of one role beat `backend`, so this is said only where both were asked for alike, or are left out.
        assert leaves_out or preference.backends("prefill") == preference.backends("decode")
        return dataclasses.replace(preference, prefill_backend=name, decode_backends=(name,))
    other = "decode" if role == "prefill_" else "prefill"
    refused = {verdict.name for verdict in verdicts if verdict.role == other and verdict.reasons}
    there = {verdict.name for verdict in verdicts}
    if refused & set(preference.backends(other)) or not set(preference.backends(other)) <= there:
        nothing = {"decode_backends": ()} if other == "decode" else {"prefill_backend": None}
        preference = dataclasses.replace(preference, **nothing)
    chosen = {"prefill_backend": name} if role == "prefill_" else {"decode_backends": (name,)}
    return dataclasses.replace(preference, **chosen)


def reasons_of(name, role, spec, device, candidates, preference):
    return next(v.reasons for v in judge(spec, device, candidates, preference) if (v.name, v.role) == (name, role))


def follow(remedy, name, spec, device, candidates, preference):
    """Spec, device, candidates and preference after one has done what the remedy says."""
    if remedy.startswith("set "):
        settings = dict(setting.split("=") for setting in remedy.removeprefix("set ").split(" and "))
        values = {field: ast.literal_eval(value) for field, value in settings.items()}
        arguments = {field: values.pop(field) for field in ("page_size", "layout", "joined_layers") if field in values}
        return spec.replace(**values), device, candidates, dataclasses.replace(preference, **arguments)
    if remedy.startswith(("pip install", "run `pip install", "see ", "install ")):
        backends = [dataclasses.replace(c, missing=()) if c.name == name else c for c in candidates.backends]
        return spec, device, dataclasses.replace(candidates, backends=backends), preference
    if kinds := re.fullmatch(r"use a device of kind ([\w, ]+)", remedy):
        return spec, dataclasses.replace(device, kind=kinds[1].split(", ")[0]), candidates, preference
    if archs := re.fullmatch(r"use a device of arch ([\w, ]+)", remedy):
        return spec, dataclasses.replace(device, arch=archs[1].split(", ")[0]), candidates, preference
    features = re.fullmatch(r"use a device with ([\w, ]+)", remedy)
    assert features, f"nobody could follow {remedy!r}"
    capable = dataclasses.replace(device, features=device.features | set(features[1].split(", ")))
    return spec, capable, candidates, preference


def can_be_made(spec, page_size, layout):
    """Whether a pool would find a place for everything, which its constructor asks of the cache's spec."""
    try:
        spec.cache_spec(num_layers=1, page_size=page_size, layout=layout)
    except SpecError:
        return False
    return True


@given(specs(), devices, offered(), preferences)
def test_each_printed_remedy_when_followed_removes_its_reason(spec, device, candidates, preference):
    asked = (spec, device, candidates, preference)
    verdicts = judge(*asked)
    chosen, judged, alone = {}, {}, set()  # what is followed is followed once: many reasons have the same remedy
    for verdict in verdicts:
        valid = [v.name for v in verdicts if v.role == verdict.role and not v.reasons]
        for reason in verdict.reasons:
            named = re.fullmatch(r"(leave out .*, and )?set (prefill_|decode_|)backend=(.+)", reason.remedy)
            if named:
                for name in map(ast.literal_eval, named[3].split(" or ")):
                    followed = told_another_backend(preference, verdicts, named[1], named[2], name)
                    if followed not in chosen:
                        chosen[followed] = select(spec, device, candidates, followed)
                    assert name in chosen[followed].backends(verdict.role)
            elif reason.remedy.startswith("nothing that is installed"):
                for name in valid:  # each of them is alone with its pages, or has no partner
                    role = {"prefill_backend": name} if verdict.role == "prefill" else {"decode_backends": (name,)}
                    if (name, verdict.role) not in alone:
                        with pytest.raises(NoBackendError):
                            select(spec, device, candidates, dataclasses.replace(preference, **role))
                    alone.add((name, verdict.role))
            elif reason.field == "priority":
                assert reason.remedy == "report it to dist"
            else:
                after = follow(reason.remedy, verdict.name, *asked)
                installed = None if after[2] is candidates else verdict.name
                key = (after[0], after[1], installed, after[3])
                if key not in judged:
                    judged[key] = {(v.name, v.role): v.reasons for v in judge(*after)}
                left = judged[key][verdict.name, verdict.role]
                assert reason.field not in {other.field for other in left}, reason


@given(specs(), devices, offered(), preferences)
def test_so_do_the_remedies_for_pools_and_allocators(spec, device, candidates, preference):
    found = list(judge_pools(spec, device, candidates, preference))
    for verdict in found:
        for reason in verdict.reasons:
            if named := re.fullmatch(r"set pool=(.+)", reason.remedy):
                valid = {v.name for v in found if not v.reasons}
                assert {ast.literal_eval(name) for name in named[1].split(" or ")} == valid
            elif reason.remedy.startswith("nothing that is installed"):
                assert all(v.reasons for v in found)
            else:
                after = follow(reason.remedy, "", spec, device, candidates, preference)
                left = next(v.reasons for v in judge_pools(*after) if v.name == verdict.name)
                assert reason.field not in {other.field for other in left}, reason
    for verdict in judge_allocators(device, candidates, preference):
        for reason in verdict.reasons:
            after = follow(reason.remedy, "", spec, device, candidates, preference)
            left = next(v.reasons for v in judge_allocators(*after[1:]) if v.name == verdict.name)
            assert reason.field not in {other.field for other in left}, reason


@given(specs(), devices, offered(), preferences, st.randoms())
def test_the_choice_and_every_word_about_it_never_depend_on_load_order(spec, device, candidates, preference, rng):
    def answer(some):
        try:
            found = select(spec, device, some, preference)
        except NoBackendError as refusal:
            return str(refusal)
        return found.explain(), found.choice_json(), found.verdicts

    def shuffled(mapping):
        return dict(rng.sample(list(mapping.items()), len(mapping)))

    other = Candidates(
        backends=rng.sample(list(candidates.backends), len(candidates.backends)),
        pools=shuffled(candidates.pools),
        allocators=shuffled(candidates.allocators),
    )
    assert answer(candidates) == answer(other)


@given(specs(), devices, offered(), preferences)
def test_what_is_chosen_is_valid_in_its_role_and_takes_the_pages(spec, device, candidates, preference):
    try:
        found = select(spec, device, candidates, preference)
    except NoBackendError:
        return
    declared = {candidate.name: candidate.capabilities for candidate in candidates.backends}
    for role in ("prefill", "decode"):
        for name in found.backends(role):
            pinned = dataclasses.replace(preference, page_size=found.page_size, layout=found.layout)
            assert reasons_of(name, role, spec, device, candidates, pinned) == ()
            assert found.page_size in declared[name].page_sizes
    assert found.layout in candidates.pools[found.pool].layouts
    assert can_be_made(spec, found.page_size, found.layout)
    assert found.page_size in candidates.allocators[found.allocator].page_sizes
    assert preference.page_size in (None, found.page_size)
    assert preference.layout in (None, found.layout)


@given(specs(), devices, offered(), preferences)
def test_a_refusal_means_that_no_pages_at_all_would_have_done(spec, device, candidates, preference):
    """Against brute force over every page size, for what is refused although each role has valid backends."""
    try:
        select(spec, device, candidates, preference)
        return
    except NoBackendError as refusal:
        if "agree on page size" not in str(refusal):
            return
    declared = {candidate.name: candidate.capabilities for candidate in candidates.backends}
    verdicts = [v for v in judge(spec, device, candidates, preference) if not v.reasons]
    prefills, decodes = (
        [v.name for v in verdicts if v.role == role and (not asked or v.name in asked)]
        for role, asked in (("prefill", preference.backends("prefill")), ("decode", preference.decode_backends))
    )
    pools = [v.name for v in judge_pools(spec, device, candidates, preference) if not v.reasons]
    allocators = [v.name for v in judge_allocators(device, candidates, preference) if not v.reasons]
    for size in [preference.page_size] if preference.page_size else range(1, 2049):
        for layout in [preference.layout] if preference.layout else ALL_LAYOUTS:
            fits = [n for n, c in declared.items() if size in c.page_sizes and layout in c.layouts]
            books = [n for n in allocators if preference.allocator in (None, n)]
            takes = any(size in candidates.allocators[n].page_sizes for n in books)
            stored = any(layout in candidates.pools[n].layouts for n in pools if preference.pool in (None, n))
            stored = stored and can_be_made(spec, size, layout)
            left = [n for n in decodes if n in fits]
            some = left if not preference.decode_backends else left * (len(left) == len(decodes))
            pairs = [(d, p) for d in some for p in prefills if p in fits and (d == p or not spec.deterministic)]
            assert not (takes and stored and pairs), (size, layout, pairs)


@given(specs(), devices, offered(), preferences)
def test_a_named_backend_is_chosen_or_refused_and_never_replaced(spec, device, candidates, preference):
    name = random.choice(candidates.backends).name
    asked = dataclasses.replace(preference, prefill_backend=name, decode_backends=(name,), pool=None, allocator=None)
    try:
        found = select(spec, device, candidates, asked)
    except NoBackendError:
        return
    assert (found.prefill, found.decode, found.decode_by_load) == (name, name, None)


@pytest.mark.parametrize("number", [0, 1])
def test_a_pool_for_the_other_kind_of_layer_names_the_one_that_fits(number):
    spec = [
        AttentionSpec(num_qo_heads=8, num_kv_heads=8, head_dim=64),
        AttentionSpec.mla(num_qo_heads=8, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1),
    ][number]
    fits, other = ["mha", "mla"][number], ["mla", "mha"][number]
    found = {v.name: v.reasons for v in judge_pools(spec, DEVICES["h100"], BUILTIN, Preference())}
    assert found[fits] == ()
    assert [reason.remedy for reason in found[other]] == [f"set pool={fits!r}"]
