"""Warming a runtime up: each kind of step runs once on every backend that may serve it, and nothing is left behind."""

import dataclasses

import numpy as np
import pytest
import torch

import anyattn
from anyattn import AttentionSpec, GraphLevel, OutOfPagesError
from anyattn.attention import flex_attention
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.load_table import LoadTable
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.runtime import AttentionRuntime
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.attention.warmup import warmup_pages, warmup_steps

pytestmark = pytest.mark.usefixtures("portable")

FULL = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
LOCAL = FULL.replace(sliding_window=7)
MLA = AttentionSpec.mla(
    num_qo_heads=3, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, sm_scale=0.2,
    dtype="float32",
)  # fmt: skip
PLAIN = ("prefill", "decode", "mixed", "several")


@pytest.fixture(autouse=True)
def books_are_proved(monkeypatch):
    monkeypatch.setenv("ANYATTN_DEBUG", "1")


def runtime(specs, **options):
    specs = [specs] if isinstance(specs, AttentionSpec) else specs
    return anyattn.create_runtime(specs, **{"num_pages": 200, "page_size": 4, "device": "cpu", **options})


def around(spec, classes, *, by_load=None, num_pages=80):
    """A runtime of one layer whose decode and prefill are these classes, whatever they declare."""
    base = runtime(spec.replace(graph="never"), backend="reference", num_pages=num_pages)
    chosen = dataclasses.replace(base.selection, spec=spec, prefill="prefill", decode="decode", decode_by_load=by_load)
    made = {name: each(spec, base.pools[0].cache, base.selection.platform) for name, each in classes.items()}
    backends = {spec: HybridBackend(chosen, made)}
    return AttentionRuntime([spec], {spec: chosen}, backends, base.pools, base.table, base.places)


def warmed(rt):
    return [(part.layer, part.backend, part.steps) for part in rt.warmup().warmed]


def draw(spec, tokens, generator):
    q, k, v = ((spec.num_qo_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, 16))
    return [torch.randn(tokens, *shape, generator=generator) for shape in (q, k, v)]


def step(rt, seqs, counts, generator):
    plan = rt.plan(rt.extend(seqs, counts))
    inputs = [draw(spec, sum(counts), generator) for spec in rt.layer_specs]
    return [rt.run(layer, *tensors, plan) for layer, tensors in enumerate(inputs)]


def busy(specs, **options):
    """A runtime at work: ragged sequences, forks that share a partial page, and pages that a cache holds."""
    rt, generator = runtime(specs, **options), torch.Generator().manual_seed(7)
    seqs = rt.new_sequences(3)
    step(rt, seqs, [30, 1, 9], generator)
    step(rt, seqs, [1, 5, 1], generator)
    gone, *seqs = seqs
    rt.table.hold(rt.table.pages(gone)[:5])
    rt.free([gone])
    seqs += rt.fork(seqs[1])
    rt.truncate(seqs[:1], [5])
    return rt, seqs, generator


def books(rt, seqs):
    """What the table and the allocators say, as values."""
    table = rt.table
    everywhere = [table.allocator, *(window.allocator for window in table.windows)]
    counts = [each.ref_counts(np.arange(each.num_pages + 1)).tolist() for each in everywhere]
    windows = [(window.page_of.tolist(), window._holders.tolist()) for window in table.windows]
    return (
        table.lengths(seqs), [table.pages(seq).tolist() for seq in seqs], [each.num_free_pages for each in everywhere],
        counts, windows, table._held.tolist(), table._handles.living_rows().tolist(),
    )  # fmt: skip


def contents(rt):
    return [(part.clone(), number) for number, pool in enumerate(rt.pools) for part in pool.parts()]


RUNTIMES = pytest.mark.parametrize(
    ("specs", "options"),
    [
        pytest.param([FULL, FULL], {}, id="full"),
        pytest.param([LOCAL, FULL, LOCAL], {}, id="windows in one pool"),
        pytest.param([LOCAL, FULL, LOCAL], {"num_window_pages": 60}, id="windows"),
        pytest.param([LOCAL, FULL.replace(sliding_window=19)], {"num_window_pages": 60}, id="only windows"),
        pytest.param([FULL], {"num_pages": 25}, id="short"),
        pytest.param([LOCAL, FULL], {"num_window_pages": 12}, id="short of windows"),
        pytest.param([FULL, FULL], {"joined_layers": True}, id="joined"),
    ],
)


@RUNTIMES
@pytest.mark.parametrize("backend", ["torch_native", "reference"])
def test_the_books_the_data_and_the_next_steps_are_as_if_it_had_never_been(specs, options, backend):
    rt, seqs, generator = busy(specs, backend=backend, **options)
    other, its_seqs, its_generator = busy(specs, backend=backend, **options)
    before, data = books(rt, seqs), contents(rt)
    assert rt.warmup().warmed
    assert books(rt, seqs) == before
    refs = before[3]
    for (now, number), (was, _) in zip(contents(rt), data, strict=True):
        held = torch.tensor(refs[number]) > 0
        assert torch.equal(now[held], was[held])
        assert not now[0].any()
        assert not now[now != was].any()  # of free pages, what is written is zeros
    for counts in ([1, 1, 1], [3, 1, 6]):
        outs = zip(step(rt, seqs, counts, generator), step(other, its_seqs, counts, its_generator), strict=True)
        assert all(torch.equal(one, another) for one, another in outs)
    rt.free(seqs)
    assert rt.table.allocator.num_free_pages == rt.table.allocator.num_pages - 5


@RUNTIMES
@pytest.mark.parametrize("call", range(5))
@pytest.mark.parametrize("method", ["plan", "run"])
def test_a_backend_that_raises_is_heard_and_the_books_are_as_before(specs, options, call, method, monkeypatch):
    rt, seqs, generator = busy(specs, backend="torch_native", **options)
    before, calls = books(rt, seqs), []
    original = getattr(TorchNativeBackend, method)

    def fails(self, *args, **more):
        calls.append(method)
        if len(calls) > call:
            raise RuntimeError("no such kernel")
        return original(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(TorchNativeBackend, method, fails)
        with pytest.raises(RuntimeError, match="no such kernel"):
            rt.warmup()
    assert books(rt, seqs) == before
    step(rt, seqs, [1, 1, 1], generator)
    assert rt.warmup().warmed


def test_an_interrupt_frees_the_sequences_too(monkeypatch):
    rt = runtime(FULL)

    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchNativeBackend, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rt.warmup()
    assert rt.table.allocator.num_free_pages == 200


def test_a_plan_of_before_still_runs():
    rt = runtime(FULL)
    seqs, generator = rt.new_sequences(2), torch.Generator().manual_seed(1)
    plan, inputs = rt.plan(rt.extend(seqs, [5, 3])), draw(FULL, 8, generator)
    wanted = rt.run(0, *inputs, plan)
    rt.warmup()
    assert torch.equal(rt.run(0, *inputs, plan), wanted)


def counted(monkeypatch, backend=TorchNativeBackend):
    """What the backend is asked for: phases with the new tokens of each sequence, and layers by their specs."""
    plans, runs = [], []
    plan, run = backend.plan, backend.run

    def counts_plan(self, batch):
        plans.append((batch.phase, batch.host.qo_lens.tolist(), batch.host.prefix_lens.tolist()))
        return plan(self, batch)

    def counts_run(self, q, *args, **more):
        assert not q.any()
        runs.append((self.spec, q.shape[0], sorted(name for name, value in more.items() if value is not None)))
        return run(self, q, *args, **more)

    monkeypatch.setattr(backend, "plan", counts_plan)
    monkeypatch.setattr(backend, "run", counts_run)
    return plans, runs


def test_a_backend_sees_every_kind_of_step(monkeypatch):
    plans, runs = counted(monkeypatch)
    rt = runtime([FULL] * 3)
    done = rt.warmup()
    assert plans == [
        ("prefill", [100, 100], [0, 0]),
        ("decode", [1, 1], [100, 100]),
        ("mixed", [1, 33], [100, 100]),
        ("prefill", [2, 2], [100, 100]),
        ("prefill", [8, 8], [100, 100]),
    ]
    assert [tokens for _, tokens, _ in runs] == [200, 2, 34, 4, 16]
    assert [(part.layer, part.backend, part.steps) for part in done.warmed] == [(0, "torch_native", PLAIN)]
    assert done.seconds > 0


def test_one_layer_of_each_distinct_spec_runs(monkeypatch):
    _, runs = counted(monkeypatch)
    capped = FULL.replace(logits_soft_cap=30.0)
    assert warmed(runtime([FULL, LOCAL, FULL, capped, LOCAL])) == [
        (layer, "torch_native", PLAIN) for layer in (0, 1, 3)
    ]
    assert [spec for spec, _, _ in runs] == [FULL, LOCAL, capped] * 5


def test_roles_go_to_their_own_backends():
    rt = runtime(FULL, prefill_backend="reference", decode_backend="torch_native")
    assert warmed(rt) == [(0, "reference", ("prefill", "mixed", "several")), (0, "torch_native", ("decode",))]


def test_trees_are_verified_where_all_specs_have_them(monkeypatch):
    plans, _ = counted(monkeypatch)
    tree = FULL.replace(tree_mask=True)
    assert warmed(runtime(tree)) == [(0, "torch_native", (*PLAIN, "verify"))]
    assert plans[5:] == [("verify", [2, 2], [100, 100]), ("verify", [8, 8], [100, 100])]
    assert warmed(runtime([tree, FULL])) == [(0, "torch_native", PLAIN), (1, "torch_native", PLAIN)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sinks_and_slopes_are_passed_where_the_spec_asks(dtype, monkeypatch):
    _, runs = counted(monkeypatch)
    spec = FULL.replace(dtype=dtype, return_lse=True)
    specs = [spec.replace(sinks=True), spec.replace(alibi=True), spec.replace(sinks=True, alibi=True)]
    rt = runtime(specs)
    rt.warmup()
    assert [names for _, _, names in runs[:3]] == [["sinks"], ["alibi_slopes"], ["alibi_slopes", "sinks"]]


@pytest.mark.parametrize("fields", [{"kv_dtype": "float8_e4m3fn"}, {"causal": False}, {"deterministic": True}], ids=str)
def test_other_features_are_served_as_they_are(fields):
    assert runtime(FULL.replace(**fields)).warmup().warmed


def test_sparse_mla_gets_positions_of_its_own():
    spec = AttentionSpec.mla(
        num_qo_heads=2, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.07, kv_dtype="float8_e4m3fn", topk=8
    )
    rt = runtime(spec, page_size=16, backend="reference")
    assert warmed(rt) == [(0, "reference", PLAIN)]
    assert rt.table.allocator.num_free_pages == 200


# MLA


def bound(layers, num_layers=3, spec=MLA, **options):
    rt = runtime([spec] * num_layers, **options)
    for layer in layers:
        rt.bind_mla(layer, torch.randn(3, 16, 32), torch.randn(3, 32, 12))
    return rt


def test_mla_is_warmed_without_up_projections_and_with_them():
    expanded = ("prefill", "expanded", "decode", "mixed", "several")
    assert warmed(bound([])) == [(0, "torch_native", PLAIN)]
    assert warmed(bound([1, 2])) == [(0, "torch_native", PLAIN), (1, "torch_native", expanded)]
    assert warmed(bound([0, 1, 2])) == [(0, "torch_native", expanded)]
    masked = bound([1], spec=MLA.replace(logits_soft_cap=20.0))  # is never expanded
    assert warmed(masked) == [(0, "torch_native", PLAIN), (1, "torch_native", PLAIN)]


def test_keys_and_values_are_expanded_by_both_of_the_backends_that_attend_to_them(monkeypatch):
    _, runs = counted(monkeypatch)
    rt = bound([0], num_layers=1)
    (expansion,) = rt.expansions.values()
    rt.warmup()
    tokens = [(spec.causal, count) for spec, count, _ in runs if spec is not MLA]
    assert tokens == [(True, 200), (True, 33), (False, 33)]  # a prompt; a chunk's own piece, and the piece before it
    assert {expansion.causal.spec, expansion.whole.spec} == {spec for spec, _, _ in runs if spec is not MLA}
    rt.table.check()


def test_bound_layers_leave_the_books_as_they_were():
    rt = bound([1], num_pages=90)
    (seq,) = rt.new_sequences(1)
    plan = rt.plan(rt.extend([seq], [7]))
    for layer, width in ((0, 40), (1, 24), (2, 40)):
        rt.run(layer, torch.randn(7, 3, width), torch.randn(7, 40), None, plan)
    before = books(rt, [seq])
    rt.warmup()
    assert books(rt, [seq]) == before


# Loads and graphs


class First(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, decode_qo_len=4)


class Graphs(ReferenceBackend):
    """Keeps what it is asked for; a plan is a list of the batch it was refreshed with."""

    capabilities = dataclasses.replace(ReferenceBackend.capabilities, graph=GraphLevel.ALWAYS)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made, self.refreshed = [], []

    def init_graph(self, batch):
        self.made.append((batch.num_seqs, batch.num_tokens, batch.max_kv_len))
        return [batch]

    def refresh_graph(self, plan, batch):
        self.refreshed.append(batch.host.qo_lens.tolist())
        plan[0] = batch

    def run(self, q, kv, plan, out, **more):
        return super().run(q, kv, plan[0] if type(plan) is list else plan, out, **more)


def test_every_backend_that_shares_decode_by_load_is_warmed():
    by_load = LoadTable.of(lambda load: "decode" if load.num_seqs < 8 else "many")
    rt = around(FULL, {"prefill": ReferenceBackend, "decode": First, "many": ReferenceBackend}, by_load=by_load)
    assert warmed(rt) == [
        (0, "prefill", ("prefill", "mixed", "several")),
        (0, "decode", ("decode", "several")),
        (0, "many", ("decode",)),
    ]


def test_decode_backends_of_several_tokens_and_prefill_s_are_told_apart():
    rt = around(FULL, {"prefill": ReferenceBackend, "decode": First})  # two tokens each are decode's, eight prefill's
    assert warmed(rt) == [(0, "prefill", ("prefill", "mixed", "several")), (0, "decode", ("decode", "several"))]


@pytest.mark.parametrize("level", ["decode", "uniform", "always"])
@pytest.mark.parametrize("tree_mask", [False, True])
def test_steps_of_graphs_are_planned_refreshed_and_run(level, tree_mask):
    rt = around(FULL.replace(graph=level, tree_mask=tree_mask), {"prefill": Graphs, "decode": Graphs})
    prefill, decode = (rt._backends[0]._backends[name] for name in ("prefill", "decode"))
    steps = {part.backend: part.steps for part in rt.warmup().warmed}
    assert steps["decode"] == ("decode", "decode graph")
    assert decode.made == [(2, 2, 101)]
    assert decode.refreshed == [[1, 1]]
    several = level == "uniform" or (level == "always" and not tree_mask)  # trees have graphs of level uniform
    assert ("several graph" in steps["prefill"]) == several
    assert prefill.made == ([(2, 4, 102), (2, 16, 108)] if several else [])
    assert prefill.refreshed == ([[2, 2], [8, 8]] if several else [])
    assert rt.table.allocator.num_free_pages == 80


def test_all_decode_backends_make_graphs():
    by_load = LoadTable.of(lambda load: "decode" if load.num_seqs < 8 else "many")
    rt = around(FULL.replace(graph="decode"), dict.fromkeys(["prefill", "decode", "many"], Graphs), by_load=by_load)
    steps = {part.backend: part.steps for part in rt.warmup().warmed}
    assert steps["decode"] == steps["many"] == ("decode", "decode graph")


def test_a_graph_of_before_serves_the_next_step():
    rt = around(FULL.replace(graph="decode"), {"prefill": Graphs, "decode": Graphs})
    graph = rt.init_graph(2, max_kv_len=40)
    rt.warmup()
    rt.refresh_graph(graph, rt.extend(rt.new_sequences(2), [1, 1]))


# Pages


@pytest.mark.parametrize(
    ("num_pages", "page_size", "kinds"),
    [
        (1, 1, ("decode",)),
        (2, 1, ("decode",)),
        (4, 1, ("prefill", "decode")),
        (6, 1, ("prefill", "decode", "mixed", "several")),
        (1, 2, ("prefill", "decode")),
        (1, 16, ("prefill", "decode", "several")),
        (2, 16, PLAIN),
        (3, 16, PLAIN),
    ],
)
def test_short_of_pages_it_runs_what_fits(num_pages, page_size, kinds):
    rt = runtime(FULL, num_pages=num_pages, page_size=page_size)
    assert warmed(rt) == [(0, "torch_native", kinds)]
    assert rt.table.allocator.num_free_pages == num_pages


def test_without_a_free_page_it_is_refused_and_nothing_changes():
    rt = runtime(FULL, num_pages=4)
    (seq,) = rt.new_sequences(1)
    rt.extend([seq], [16])
    before, version = books(rt, [seq]), rt.table.version
    with pytest.raises(OutOfPagesError, match="1 pages needed, 0 of 4 free; nothing was taken"):
        rt.warmup()
    assert (books(rt, [seq]), rt.table.version) == (before, version)


def test_without_a_free_page_of_a_window_it_is_refused_and_nothing_changes():
    rt = runtime([LOCAL, FULL], num_window_pages=4)
    (seq,) = rt.new_sequences(1)
    rt.extend([seq], [16])
    before, version = books(rt, [seq]), rt.table.version
    with pytest.raises(OutOfPagesError, match="1 pages of the layers with window 7 needed, 0 of 4 free"):
        rt.warmup()
    assert (books(rt, [seq]), rt.table.version) == (before, version)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 1024])
@pytest.mark.parametrize("graph", list(GraphLevel))
@pytest.mark.parametrize("trees", [False, True])
def test_the_steps_fit_into_any_number_of_pages_and_decode_is_always_one(page_size, graph, trees):
    whole = warmup_steps(warmup_pages(page_size), page_size, graph=graph, trees=trees)
    assert whole == warmup_steps(10**6, page_size, graph=graph, trees=trees)
    for num_pages in (*range(1, 12), 100, 10**6):
        steps = warmup_steps(num_pages, page_size, graph=graph, trees=trees)
        assert {len(each.counts) for each in steps} == {min(num_pages, 2)}
        lengths = np.zeros(min(num_pages, 2), dtype=int)
        for each in steps:
            lengths += each.counts
            assert (-(-lengths // page_size)).sum() <= num_pages
            assert (lengths >= each.keep).all()
            lengths[:] = each.keep
        assert "decode" in [each.kind for each in steps]
        for each in steps:
            assert all(each.counts)
            assert (max(each.counts) == 1) == each.kind.startswith("decode")
            assert each.kind != "mixed" or (each.keep and each.counts[0] == 1)


# What it is for


@pytest.mark.slow
def test_the_first_requests_then_compile_nothing():
    from torch._dynamo.utils import counters

    spec = FULL.replace(num_kv_heads=1, sliding_window=50)  # of no other test, whose kernels would be there already
    rt = runtime(spec, backend="flex_attention_cpu", page_size=16)
    compiled = flex_attention._kernel.cache_info().misses
    rt.warmup()
    assert flex_attention._kernel.cache_info().misses == compiled + 2  # for decode, and for all others
    graphs = counters["stats"]["unique_graphs"]
    seqs, generator = rt.new_sequences(5), torch.Generator().manual_seed(3)
    for counts in ([300, 7, 1, 64, 20], [1] * 5, [1, 40, 1, 1, 1], [3] * 5, [8] * 5, [1] * 5):
        step(rt, seqs, counts, generator)
    assert flex_attention._kernel.cache_info().misses == compiled + 2
    assert counters["stats"]["unique_graphs"] == graphs > 0
