"""Several decode backends over one pool: the table that says who serves which batch, and plan, which follows it."""

import dataclasses
import random

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, Capabilities, NoBackendError, Platform
from anyattn.attention.load_table import LoadTable
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.select import select, select_layers
from anyattn.attention.selection import BackendCandidate, Candidates, Preference
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.types import ANY_INT, TYPICAL_LOAD, IntSet, Load, ints

CPU = Platform(kind="cpu", vendor="intel", name="Test", arch="x86_64", torch_device="cpu")
SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)


def backend(name, **declared):
    bare = {
        "dtypes": frozenset({"bfloat16"}),
        "head_dims": ANY_INT,
        "page_sizes": ANY_INT,
        "layouts": ("NHD", "HND"),
        "phases": frozenset({"prefill", "decode", "mixed"}),
    }
    return BackendCandidate(name=name, distribution="dist", capabilities=Capabilities(**{**bare, **declared}))


def candidates(*backends):
    return Candidates(
        backends=backends,
        allocators={"paged": AllocatorCapabilities(page_sizes=ANY_INT)},
        pools={"mha": PoolCapabilities(kind="mha", kv_dtypes=frozenset({"bfloat16"}))},
    )


def small_batches(platform, spec, role, load):
    """Best for few long sequences."""
    return 90 if role == "decode" and load.num_seqs < 8 and load.kv_len >= 1024 else 1


def few_sequences(platform, spec, role, load):
    return 99 if load.num_seqs < 4 else 0


def test_the_points_of_the_table_are_the_loads_from_which_on_they_hold():
    table = LoadTable.of(lambda load: f"{load.num_seqs}x{load.kv_len}")
    for _ in range(200):
        load = Load(num_seqs=random.randint(1, 2000), kv_len=random.randint(1, 200_000))
        num_seqs = max(n for n in table.NUM_SEQS if n <= load.num_seqs)
        kv_len = max(n for n in table.KV_LENS if n <= load.kv_len)
        assert table.pick(load) == f"{num_seqs}x{kv_len}"
    assert table.pick(Load(num_seqs=0, kv_len=0)) == "1x1"


def test_the_typical_load_is_a_point_of_the_table():
    assert TYPICAL_LOAD.num_seqs in LoadTable.NUM_SEQS
    assert TYPICAL_LOAD.kv_len in LoadTable.KV_LENS


def test_a_backend_that_is_better_for_some_loads_shares_the_role():
    found = select(SPEC, CPU, candidates(backend("big", priority=50), backend("small", priority=small_batches)))
    assert (found.prefill, found.decode) == ("big", "big")
    assert found.backends("decode") == ("big", "small")
    assert found.decode_by_load.pick(Load(num_seqs=7, kv_len=1024)) == "small"
    assert found.decode_by_load.pick(Load(num_seqs=8, kv_len=1024)) == "big"
    assert found.decode_by_load.pick(Load(num_seqs=1, kv_len=1023)) == "big"
    text = found.explain()
    assert "small serves 1 to 7 sequences of 1024 or more tokens" in text
    assert "big serves 1 to 7 sequences of 1 to 1023 tokens; 8 or more sequences" in text
    assert "not chosen" not in text
    assert found.choice_json()["decode_by_load"]["small"] == ["1 to 7 sequences of 1024 or more tokens"]


def test_the_table_does_not_depend_on_the_order_of_the_candidates():
    some = [backend("big", priority=50), backend("small", priority=small_batches), backend("also", priority=50)]
    tables = set()
    for _ in range(12):
        random.shuffle(some)
        found = select(SPEC, CPU, candidates(*some))
        tables.add((found.decode, found.decode_by_load))
    assert len(tables) == 1
    assert tables.pop()[1].backends() == ("also", "small")


def test_one_that_does_not_take_the_chosen_pages_does_not_share_them():
    small = backend("small", priority=small_batches, page_sizes=ints(48))
    found = select(SPEC, CPU, candidates(backend("big", priority=50, page_sizes=ints(64)), small))
    assert found.decode_by_load is None


def test_where_rows_have_to_be_deterministic_one_backend_serves_every_load():
    spec = SPEC.replace(deterministic=True)
    both = [backend("big", priority=50, deterministic=True)]
    both.append(backend("small", priority=small_batches, deterministic=True))
    assert select(spec, CPU, candidates(*both)).decode_by_load is None


def test_those_named_share_the_role_and_no_others():
    some = candidates(
        backend("big", priority=50), backend("small", priority=small_batches), backend("best", priority=99)
    )
    found = select(SPEC, CPU, some, Preference(decode_backends=("big", "small")))
    assert found.backends("decode") == ("big", "small")
    assert found.prefill == "best"
    found = select(SPEC, CPU, some, Preference(decode_backends=("big", "best")))
    assert found.backends("decode") == ("best",)
    why_not = "decode: valid and asked for, but for every batch best has the higher priority"
    assert f"big: prefill: valid, with priority 50 | {why_not}" in found.explain()


def test_each_of_those_named_has_to_be_valid():
    some = candidates(backend("big", priority=50), backend("half", dtypes=frozenset({"float16"})))
    with pytest.raises(NoBackendError, match=r"'half' was asked for(.|\n)*Valid here: big"):
        select(SPEC, CPU, some, Preference(decode_backends=("big", "half")))


def test_those_named_agree_on_pages_or_are_refused_together():
    big = backend("big", priority=50, page_sizes=ints(16, 64))
    some = candidates(big, backend("small", priority=small_batches, page_sizes=ints(64)))
    found = select(SPEC, CPU, some, Preference(decode_backends=("big", "small")))
    assert (found.page_size, found.backends("decode")) == (64, ("big", "small"))
    some = candidates(big, backend("small", priority=small_batches, page_sizes=ints(48)))
    with pytest.raises(NoBackendError, match=r"small \(page size 48;(.|\n)*Valid here: page_size=16"):
        select(SPEC, CPU, some, Preference(decode_backends=("big", "small")))


def test_several_named_ones_and_deterministic_rows_contradict_each_other():
    both = candidates(backend("a", deterministic=True), backend("b", deterministic=True))
    with pytest.raises(NoBackendError, match="come from one backend whatever the batch: name one"):
        select(SPEC.replace(deterministic=True), CPU, both, Preference(decode_backends=("a", "b")))


def test_a_priority_that_fails_for_some_loads_loses_them():
    def moody(platform, spec, role, load):
        if load.num_seqs == 1:
            raise RuntimeError("not for one")
        return 80

    found = select(SPEC, CPU, candidates(backend("moody", priority=moody), backend("steady", priority=1)))
    assert found.decode_by_load.pick(Load(num_seqs=1, kv_len=4096)) == "steady"
    assert found.decode_by_load.pick(Load(num_seqs=2, kv_len=4096)) == "moody"
    problem = "the decode priority of moody fails for 1 sequences of 1 tokens: RuntimeError: not for one"
    assert problem in found.explain()


def test_plan_picks_by_the_batch_and_the_results_stay_those_of_one_cache(monkeypatch):
    """One pool, two decode backends: a conversation whose batch grows and shrinks goes to and fro between them."""
    monkeypatch.setattr(
        ReferenceBackend,
        "capabilities",
        dataclasses.replace(ReferenceBackend.capabilities, priority=few_sequences),
    )
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
    options = {"num_layers": 1, "num_pages": 64, "device": "cpu", "page_size": 4, "backend": "torch_native"}
    both = anyattn.create_runtime(spec, **options, decode_backend=["torch_native", "reference"])
    one = anyattn.create_runtime(spec, **options)
    assert both.selection.backends("decode") == ("torch_native", "reference")
    seqs, other = both.new_sequences(6), one.new_sequences(6)
    picked = []
    for chosen in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [1, 5], [0, 1, 2, 3], [3], [0, 1, 2, 3, 4, 5]):
        counts = [7, 1, 3, 9, 2, 5] if not picked else [1] * len(chosen)
        q, k, v = (torch.randn(sum(counts), heads, 16) for heads in (4, 2, 2))
        plan = both.plan(both.extend([seqs[i] for i in chosen], counts))
        expected = one.run(0, q, k, v, one.plan(one.extend([other[i] for i in chosen], counts)))
        torch.testing.assert_close(both.run(0, q, k, v, plan), expected, atol=1e-5, rtol=1e-5)
        picked.append(type(plan.steps[0].backend))
    native, reference = TorchNativeBackend, ReferenceBackend
    assert picked == [native, native, reference, native, reference, native]


def test_several_decode_backends_can_be_named_by_argument_and_environment(monkeypatch):
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
    options = {"num_layers": 1, "num_pages": 4, "device": "cpu"}
    rt = anyattn.create_runtime(spec, **options, decode_backend=["reference", "torch_native"])
    assert rt.selection.preference.decode_backends == ("reference", "torch_native")
    monkeypatch.setenv("ANYATTN_DECODE_BACKEND", "reference, torch_native")
    rt = anyattn.create_runtime(spec, **options)
    assert rt.selection.preference.decode_backends == ("reference", "torch_native")
    monkeypatch.setenv("ANYATTN_DECODE_BACKEND", "reference,nonsense")
    with pytest.raises(NoBackendError, match="no attention backend named 'nonsense'"):
        anyattn.create_runtime(spec, **options)


def test_layers_share_pages_that_none_of_them_would_choose_alone():
    local = SPEC.replace(sliding_window=128)
    some = candidates(
        backend("plain", page_sizes=ints(16, 64), preferred_page_size=16),
        backend("windowed", page_sizes=ints(64, 128), preferred_page_size=128, sliding_window=True, priority=5),
    )
    found = select_layers([SPEC, local], CPU, some)
    assert {selection.page_size for selection in found.values()} == {128}
    some = candidates(
        backend("plain", page_sizes=ints(16, 64), preferred_page_size=16, priority=9),
        backend("windowed", page_sizes=ints(64, 128), preferred_page_size=128, sliding_window=True, priority=5),
    )
    assert {s.page_size for s in select_layers([SPEC, local], CPU, some).values()} == {64}


def test_page_sizes_meet_in_a_common_multiple():
    some = candidates(
        backend("decoder", phases=frozenset({"decode"}), page_sizes=IntSet(multiple_of=48)),
        backend("prefiller", phases=frozenset({"prefill", "mixed"}), page_sizes=IntSet(multiple_of=40)),
    )
    assert select(SPEC, CPU, some).page_size == 240
