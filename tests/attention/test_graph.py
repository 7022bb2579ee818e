"""Graphs of the runtime: one captured step serves all later ones, and what it does not serve is refused."""

import dataclasses
import importlib.metadata
import secrets
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import anyattn
from anyattn import AttentionBackend, AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.attention.batch import Batch
from anyattn.attention.graph import GraphBatch, GraphSizes
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.load_table import LoadTable
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.testing.graphs.capture import capture

EXAMPLE = Path(__file__).parents[2] / "examples" / "anyattn-example-plugin"
DEVICE = Platform(
    kind="example",
    vendor="anyattn",
    name="Example device",
    arch="example1",
    torch_device="cpu",
    graph=GraphLevel.ALWAYS,
    status="emulated",
)
SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", graph="always")
LAYERS = [SPEC, SPEC.replace(sliding_window=7), SPEC]
PAGED = {"num_pages": 60, "page_size": 4}


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    """The example plugin, installed for this file where it is not installed anyway."""
    try:
        importlib.metadata.distribution("anyattn-example-plugin")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        yield
        return
    site = tmp_path_factory.mktemp("site")
    info = site / "anyattn_example_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anyattn-example-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anyattn.plugins]\nexample = anyattn_example_plugin\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.syspath_prepend(site)
        yield
    for name in [name for name in sys.modules if name.startswith("anyattn_example_plugin")]:
        del sys.modules[name]


def runtime(specs=LAYERS, **fields):
    return anyattn.create_runtime(specs, device=DEVICE, backend="example_gather", **{**PAGED, **fields})


def draw(tokens):
    return torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)


class Captured:
    """All layers of a runtime, captured once."""

    def __init__(self, rt, num_seqs, num_tokens=None, max_kv_len=48):
        self.rt = rt
        self.plan = rt.init_graph(num_seqs, num_tokens=num_tokens, max_kv_len=max_kv_len)
        tokens = self.plan.batch.num_tokens
        with torch.inference_mode(False):
            self.inputs = [[torch.full_like(x, float("nan")) for x in draw(tokens)] for _ in rt.layer_specs]
        self.out, self.replay = capture(self.run, rt.device)

    def run(self):
        return [self.rt.run(layer, *self.inputs[layer], self.plan) for layer in range(len(self.inputs))]

    def step(self, batch, inputs):
        """What each layer gives for a step, padding left out."""
        self.rt.refresh_graph(self.plan, batch)
        for static, values in zip(self.inputs, inputs, strict=True):
            for tensor, value in zip(static, values, strict=True):
                tensor[: len(value)] = value
                tensor[len(value) :] = float("nan")
        self.replay()
        return [out[: batch.num_tokens].clone() for out in self.out]


class Pair:
    """A runtime with graphs, and one that computes every step in float64 without any, driven alike."""

    def __init__(self, specs=LAYERS, **fields):
        self.tested = runtime(specs, **fields)
        plain = [spec.replace(graph="never") for spec in specs]
        self.exact = anyattn.create_runtime(plain, device="cpu", backend="reference", **{**PAGED, **fields})

    def both(self, name, *arguments):
        tested, exact = (getattr(rt, name)(*arguments) for rt in (self.tested, self.exact))
        assert tested == exact
        return tested

    def step(self, seqs, counts, graph=None):
        batch, plain = self.tested.extend(seqs, counts), self.exact.plan(self.exact.extend(seqs, counts))
        inputs = [draw(sum(counts)) for _ in self.tested.layer_specs]
        if graph is None:
            plan = self.tested.plan(batch)
            got = [self.tested.run(layer, *values, plan) for layer, values in enumerate(inputs)]
        else:
            got = graph.step(batch, inputs)
        for layer, values in enumerate(inputs):
            # float32 sums of some 50 products of numbers of about 1
            torch.testing.assert_close(got[layer], self.exact.run(layer, *values, plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"num_window_pages": 40}], ids=["one pool", "window pool"])
@pytest.mark.parametrize("level", ["decode", "uniform", "always"])
def test_sequences_that_come_go_and_fork_get_the_same_with_graphs_as_without(level, fields):
    seed = secrets.randbelow(1 << 31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    pair = Pair([spec.replace(graph=level) for spec in LAYERS], **fields)
    graphs = {size: Captured(pair.tested, size, None if level == "decode" else 2 * size) for size in (1, 2, 4)}
    seqs = []

    def counts(size):
        if level != "always":
            return [1 if level == "decode" else 2] * size
        return random.multinomial(int(random.integers(2 * size + 1)), [1 / size] * size).tolist()

    for _ in range(60):
        action = random.choice(["new", "fork", "free", "eager", *["graph"] * 6])
        if action == "new" or not seqs:
            new = pair.both("new_sequences", int(random.integers(1, 3)))
            pair.step(new, random.integers(0, 9, len(new)).tolist())
            seqs += new
        elif action == "fork":
            seqs += pair.both("fork", int(random.choice(seqs)))
        elif action == "eager":
            some = random.permutation(seqs)[: random.integers(1, 4)].tolist()
            pair.step(some, random.integers(0, 5, len(some)).tolist())
        elif action == "graph":
            some = random.permutation(seqs)[: random.integers(1, 5)].tolist()
            size = int(random.choice([size for size in graphs if size >= len(some)]))
            pair.step(some, counts(len(some)), graphs[size])
        long = [seq for seq in seqs if pair.tested.table.lengths([seq])[0] > 36]
        gone = long + (seqs[:1] if action == "free" or len(seqs) > 6 else [])
        if gone := list(dict.fromkeys(gone)):
            pair.both("free", gone)
            seqs = [seq for seq in seqs if seq not in gone]
        pair.tested.table.check()


def test_a_page_table_that_grows_after_the_capture_is_read_where_it_then_is():
    pair = Pair(num_pages=400)
    graph = Captured(pair.tested, 2, max_kv_len=100)
    before = pair.tested.table.send([])[0].data_ptr()
    seqs = pair.both("new_sequences", 70)
    pair.step(seqs, [3] * 70)
    pair.step(seqs[-2:], [1, 1], graph)
    pair.step(seqs[40:41], [90])
    assert pair.tested.table.send([])[0].data_ptr() != before
    pair.step([seqs[69], seqs[40]], [1, 1], graph)
    pair.step([seqs[40]], [1], graph)


def tensors(batch):
    names = (
        "qo_indptr",
        "kv_lens",
        "kv_indptr",
        "kv_indices",
        "kv_last_page_len",
        "block_table",
        "out_slots",
        "positions",
    )
    return {(i, name): getattr(each, name) for i, each in enumerate([batch, *batch.windows]) for name in names}


@pytest.mark.parametrize("counts", [[1, 1], [3, 0, 2], [2, 2, 1, 3], []], ids=str)
def test_the_tensors_hold_the_step_and_behind_it_sequences_without_tokens_on_the_null_page(counts):
    rt = runtime(num_window_pages=40)
    plan = rt.init_graph(4, num_tokens=8, max_kv_len=40)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(plan.batch).items()}
    long = rt.extend(rt.new_sequences(4), [2] * 4)
    rt.refresh_graph(plan, long)
    seqs = rt.new_sequences(len(counts))
    rt.extend(seqs, list(range(7, 7 + len(counts))))
    batch = rt.extend(seqs, counts)
    rt.refresh_graph(plan, batch)
    held = tensors(plan.batch)
    assert {name: tensor.data_ptr() for name, tensor in held.items()} == addresses
    for name, eager in tensors(batch).items():
        tensor = held[name]
        assert tensor.dtype == eager.dtype
        own = tuple(slice(0, size) for size in eager.shape)
        assert torch.equal(tensor[own], eager), name
        rest = tensor.clone()
        rest[own] = 0
        if name[1].endswith("indptr"):
            rest[len(counts) + 1 :] -= eager[-1]
        assert not rest.any(), name


def test_kernels_may_load_sixteen_bytes_of_each_tensor_at_once():
    plan = runtime(num_window_pages=40).init_graph(5, num_tokens=7, max_kv_len=21)
    assert {
        name: tensor.data_ptr() % 16 for name, tensor in tensors(plan.batch).items() if tensor.data_ptr() % 16
    } == {}
    assert all(tensor.is_contiguous() for tensor in tensors(plan.batch).values())


def test_a_graph_begins_with_a_step_without_sequences_which_stores_nothing_when_it_is_run():
    rt = runtime()
    plan = rt.init_graph(4, max_kv_len=40)
    assert not any(tensor.any() for tensor in tensors(plan.batch).values())
    rt.run(0, *draw(4), plan)
    assert not any(part.any() for pool in rt.pools for part in pool.parts())


def test_a_step_without_sequences_empties_a_graph():
    rt = runtime()
    plan = rt.init_graph(2, max_kv_len=40)
    rt.refresh_graph(plan, rt.extend(rt.new_sequences(2), [1, 1]))
    rt.refresh_graph(plan, rt.extend([], []))
    assert not any(tensor.any() for tensor in tensors(plan.batch).values())


def test_backends_get_the_padded_step_on_the_host_and_the_tensors_of_their_layers_pages(monkeypatch):
    rt = runtime(num_window_pages=40)
    given = []
    for step in (rt._backends[0], rt._backends[1]):
        for backend in step._backends.values():
            monkeypatch.setattr(backend, "refresh_graph", lambda plan, batch: given.append((plan, batch)))
    plan = rt.init_graph(3, max_kv_len=40)
    rt.refresh_graph(plan, rt.extend(rt.new_sequences(2), [1, 1]))
    for (backends_plan, batch), tensors_of in zip(given, (plan.batch, plan.batch.windows[0]), strict=True):
        assert batch.block_table is tensors_of.block_table is backends_plan.block_table
        assert batch.host.kv_lens.tolist() == [1, 1, 0]
        assert batch.host.qo_indptr.tolist() == [0, 1, 2, 2]
        assert batch.host.kv_indptr.tolist() == [0, 1, 2, 2]
        assert (batch.num_seqs, batch.num_tokens, batch.max_qo_len, batch.max_kv_len) == (3, 3, 1, 40)


def test_the_numbers_of_a_graph_hold_for_all_its_steps():
    rt = runtime([SPEC])

    def numbers(*sizes, **named):
        batch = rt.init_graph(*sizes, **named).batch
        return batch.num_seqs, batch.num_tokens, batch.max_qo_len, batch.max_kv_len, batch.phase

    assert numbers(4, max_kv_len=40) == (4, 4, 1, 40, "decode")
    assert numbers(4, num_tokens=12, max_kv_len=40) == (4, 12, 12, 40, "mixed")
    assert numbers(4, num_tokens=12, max_kv_len=5) == (4, 12, 5, 5, "mixed")
    assert numbers(4, num_tokens=4, max_kv_len=40) == (4, 4, 4, 40, "mixed")
    assert numbers(4, num_tokens=1, max_kv_len=40) == (4, 1, 1, 40, "mixed")  # three sequences may have no new token
    rt = runtime([SPEC.replace(graph="uniform")])
    assert numbers(4, num_tokens=4, max_kv_len=40) == (4, 4, 1, 40, "decode")
    assert numbers(4, num_tokens=12, max_kv_len=40) == (4, 12, 3, 40, "mixed")


def test_a_graph_may_be_made_in_inference_mode_and_refreshed_outside_of_it_and_the_other_way_round():
    pair = Pair()
    with torch.inference_mode():
        graph = Captured(pair.tested, 2)
    seqs = pair.both("new_sequences", 2)
    pair.step(seqs, [5, 2])
    with torch.no_grad():
        pair.step(seqs, [1, 1], graph)
    with torch.inference_mode():
        pair.step(seqs, [1, 1], graph)
    outside = Captured(pair.tested, 2)
    with torch.inference_mode():
        pair.step(seqs, [1, 1], outside)
    pair.step(seqs, [1, 1], outside)


def test_a_graphs_plan_runs_without_a_replay_too():
    pair = Pair()
    graph = Captured(pair.tested, 2)
    graph.replay = lambda: graph.out.__setitem__(slice(None), graph.run())
    seqs = pair.both("new_sequences", 2)
    pair.step(seqs, [5, 2])
    pair.step(seqs, [1, 1], graph)


# What is not served


@pytest.mark.parametrize(
    ("level", "sizes", "message"),
    [
        ("never", {}, r"the spec asks for no graph: make the runtime with AttentionSpec\(graph='decode'\)"),
        ("decode", {"num_tokens": 8}, r"one token for each sequence, not 8 for 4: ask for AttentionSpec\(graph='unifo"),
        ("uniform", {"num_tokens": 6}, "6 cannot be divided among 4: pass a multiple of num_seqs, or ask for"),
        ("uniform", {"num_tokens": 12, "max_kv_len": 2}, "max_kv_len counts the new tokens too: 2 do not hold the 3"),
        ("always", {"num_tokens": 0}, "num_tokens of a graph must be a positive integer, not 0"),
        ("always", {"num_seqs": True}, "num_seqs of a graph must be a positive integer, not True"),
        ("always", {"max_kv_len": 4.0}, "max_kv_len of a graph must be a positive integer, not 4.0"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_sizes_that_no_graph_can_have_are_refused(level, sizes, message):
    rt = runtime([SPEC, SPEC.replace(graph=level, sliding_window=7)])
    with pytest.raises(ContractError, match=message):
        rt.init_graph(**{"num_seqs": 4, "max_kv_len": 40, **sizes})


@pytest.fixture
def held():
    """A uniform graph that holds a step, and what shows whether it still does."""
    pair = Pair([spec.replace(graph="uniform") for spec in LAYERS])
    graph = Captured(pair.tested, 3, 6, max_kv_len=12)
    seqs = pair.both("new_sequences", 2)
    pair.step(seqs, [5, 2])
    pair.step(seqs, [2, 2], graph)
    before = {name: tensor.clone() for name, tensor in tensors(graph.plan.batch).items()}
    outputs = [out[:4].clone() for out in graph.out]

    def unchanged():
        graph.replay()
        same = all(torch.equal(out[:4], before) for out, before in zip(graph.out, outputs, strict=True))
        return same and all(torch.equal(tensor, before[name]) for name, tensor in tensors(graph.plan.batch).items())

    return SimpleNamespace(rt=pair.tested, graph=graph, seqs=seqs, unchanged=unchanged)


def steps_not_served():
    yield "more sequences", [2] * 4, "up to 3 sequences with 6 new tokens, and the batch has 4 with 8: capture a larger"
    yield "more tokens", [4, 4], "up to 3 sequences with 6 new tokens, and the batch has 2 with 8"
    yield "fewer tokens each", [1, 1], "2 new tokens for each sequence, and one has 1: capture one for that, or run"
    yield "a sequence that rests", [2, 0], "2 new tokens for each sequence, and one has 0"


@pytest.mark.parametrize(
    ("counts", "message"), [pytest.param(counts, text, id=name) for name, counts, text in steps_not_served()]
)
def test_a_step_that_the_graph_does_not_serve_is_refused_and_changes_nothing(held, counts, message):
    batch = held.rt.extend(held.rt.new_sequences(len(counts)), counts)
    with pytest.raises(ContractError, match=message):
        held.rt.refresh_graph(held.graph.plan, batch)
    assert held.unchanged()


def test_a_sequence_longer_than_max_kv_len_is_refused_and_one_as_long_is_not(held):
    seqs = held.rt.new_sequences(1)
    held.rt.extend(seqs, [11])
    longer = held.rt.extend(seqs, [2])
    with pytest.raises(ContractError, match="sequences of up to 12 tokens, and one has 13: capture one with a larger"):
        held.rt.refresh_graph(held.graph.plan, longer)
    assert held.unchanged()
    held.rt.truncate(seqs, [10])
    held.rt.refresh_graph(held.graph.plan, held.rt.extend(seqs, [2]))
    assert held.graph.plan.batch.kv_lens.tolist() == [12, 0, 0]


@pytest.mark.parametrize("since", ["extended", "freed", "held"])
def test_a_step_that_is_not_the_tables_last_is_refused_and_changes_nothing(held, since):
    others = held.rt.new_sequences(2)
    batch = held.rt.extend(others[:1], [2])
    if since == "extended":
        held.rt.extend(others[1:], [2])
    elif since == "freed":
        held.rt.free(others[1:])
    else:
        held.rt.table.hold(held.rt.table.pages(others[0]))
    with pytest.raises(ContractError, match="refresh a graph right after the step's extend"):
        held.rt.refresh_graph(held.graph.plan, batch)
    assert held.unchanged()


def test_freed_sequences_other_runtimes_batches_and_other_plans_are_refused_and_change_nothing(held):
    seqs = held.rt.new_sequences(1)
    batch = held.rt.extend(seqs, [2])
    held.rt.free(seqs)
    with pytest.raises(ContractError, match="freed"):
        held.rt.refresh_graph(held.graph.plan, batch)
    other = runtime()
    foreign = other.extend(other.new_sequences(1), [2])
    with pytest.raises(ContractError, match="refresh_graph takes what this runtime's extend returned"):
        held.rt.refresh_graph(held.graph.plan, foreign)
    with pytest.raises(ContractError, match="refresh_graph takes what this runtime's extend returned"):
        held.rt.refresh_graph(held.graph.plan, held.graph.plan)
    batch = held.rt.extend(held.rt.new_sequences(1), [2])
    for plan in (held.rt.plan(batch), other.init_graph(3, num_tokens=6, max_kv_len=12), None):
        with pytest.raises(ContractError, match="takes a plan that this runtime's init_graph returned"):
            held.rt.refresh_graph(plan, batch)
    assert held.unchanged()


def test_a_graphs_plan_is_not_run_once_a_sequence_of_the_step_that_it_holds_was_freed(held):
    held.rt.free(held.rt.new_sequences(1))
    held.graph.run()
    held.rt.free(held.seqs[:1])
    with pytest.raises(ContractError, match="freed"):
        held.graph.run()
    held.rt.refresh_graph(held.graph.plan, held.rt.extend(held.seqs[1:], [2]))
    held.graph.run()


def test_a_backend_that_declares_graphs_and_has_none_is_named(monkeypatch):
    rt = runtime()
    backend = type(next(iter(rt._backends[0]._backends.values())))
    monkeypatch.setattr(backend, "init_graph", AttentionBackend.init_graph)
    with pytest.raises(ContractError, match="ExampleBackend declares graph=always and has no init_graph: implement it"):
        rt.init_graph(2, max_kv_len=40)


# Tree masks


def tree_graph(num_seqs=3, num_tokens=6):
    table = PageTable(PagedAllocator(40, 4), 4)
    sizes = GraphSizes(
        level=GraphLevel.UNIFORM, num_seqs=num_seqs, num_tokens=num_tokens, max_kv_len=20, tree_mask=True
    )
    return table, GraphBatch(table, sizes)


def step(table, counts, tree_masks=None, seqs=None):
    view = table.extend(table.new_sequences(len(counts)) if seqs is None else seqs, counts)
    return anyattn.Batch.from_view(view, view.tensors(), tree_masks)


CAUSAL = [[True, False], [True, True]]
SELF = [[True, False], [False, True]]


def test_tree_masks_are_written_into_the_graphs_and_causal_ones_where_there_are_none():
    table, graph = tree_graph()
    addresses = [mask.data_ptr() for mask in graph.batch.tree_masks]
    assert graph.batch.phase == "verify"
    assert [mask.tolist() for mask in graph.batch.tree_masks] == [CAUSAL] * 3
    graph.refresh(step(table, [2, 2, 2], (torch.tensor(SELF), None, torch.tensor(SELF))))
    assert [mask.tolist() for mask in graph.batch.tree_masks] == [SELF, CAUSAL, SELF]
    graph.refresh(step(table, [2], (torch.tensor(SELF),)))
    assert graph.batch.tree_masks[0].tolist() == SELF
    graph.refresh(step(table, [2, 2, 2]))
    assert [mask.tolist() for mask in graph.batch.tree_masks] == [CAUSAL] * 3
    graph.refresh(step(table, []))
    assert [mask.data_ptr() for mask in graph.batch.tree_masks] == addresses


def test_a_runtime_with_tree_masks_makes_graphs_of_them_for_several_tokens_a_sequence_only():
    rt = runtime([SPEC.replace(graph="uniform")])
    rt.layer_specs = (rt.layer_specs[0].replace(tree_mask=True),)  # the example backend serves none
    assert rt.init_graph(4, max_kv_len=40).batch.tree_masks is None
    assert rt.init_graph(4, num_tokens=4, max_kv_len=40).batch.tree_masks is None
    assert [mask.shape for mask in rt.init_graph(4, num_tokens=12, max_kv_len=40).batch.tree_masks] == [(3, 3)] * 4


def test_tree_masks_are_refused_by_a_graph_that_has_none():
    table = PageTable(PagedAllocator(40, 4), 4)
    graph = GraphBatch(table, GraphSizes(level=GraphLevel.UNIFORM, num_seqs=2, num_tokens=4, max_kv_len=20))
    with pytest.raises(ContractError, match="the graph has no tree masks, and the batch brings some"):
        graph.refresh(step(table, [2], (torch.tensor(SELF),)))
    with pytest.raises(
        ContractError, match=r"as many tokens for each sequence: ask for AttentionSpec\(graph='uniform'"
    ):
        GraphSizes(level=GraphLevel.ALWAYS, num_seqs=2, num_tokens=4, max_kv_len=20, tree_mask=True)


# Who serves a graph


def picked(graph, decode_qo_len=1, level=GraphLevel.DECODE):
    def backend(name):
        declared = SimpleNamespace(decode_qo_len=decode_qo_len, graph=level)
        return SimpleNamespace(init_graph=lambda batch: name, capabilities=declared)

    def best(load):
        if load.num_seqs < 8:
            return "few"
        return "short" if load.kv_len < 1024 else "typical" if load.kv_len < 16384 else "long"

    chosen = SimpleNamespace(prefill="prefill", decode="few", decode_by_load=LoadTable.of(best))
    backends = {name: backend(name) for name in ("prefill", "few", "short", "typical", "long")}
    return HybridBackend(chosen, backends).init_graph(graph.batch, graph.sizes.level).plan


def test_the_backend_of_a_graph_is_picked_once_by_its_role_and_its_sizes():
    def batch(num_seqs, max_kv_len, level=GraphLevel.DECODE, num_tokens=None):
        table = PageTable(PagedAllocator(8, 4), 4)
        sizes = {"num_seqs": num_seqs, "num_tokens": num_tokens or num_seqs, "max_kv_len": max_kv_len}
        return GraphBatch(table, GraphSizes(level=level, **sizes))

    assert picked(batch(4, 4096)) == "few"
    assert picked(batch(8, 1000)) == "short"
    assert picked(batch(8, 1 << 20)) == "typical"  # few sequences are as long as they may be
    assert picked(batch(8, 1000, GraphLevel.UNIFORM)) == "short"
    assert picked(batch(8, 1000, GraphLevel.UNIFORM, 16)) == "prefill"
    assert picked(batch(8, 1000, GraphLevel.ALWAYS)) == "prefill"
    assert picked(tree_graph()[1]) == "prefill"
    uniform = batch(8, 1000, GraphLevel.UNIFORM, 16)
    assert picked(uniform, decode_qo_len=2, level=GraphLevel.UNIFORM) == "short"
    assert picked(uniform, decode_qo_len=2, level=GraphLevel.DECODE) == "prefill"
    assert picked(tree_graph()[1], decode_qo_len=9, level=GraphLevel.ALWAYS) == "prefill"
    assert picked(batch(8, 1000, GraphLevel.ALWAYS, 16), decode_qo_len=9, level=GraphLevel.ALWAYS) == "prefill"


def test_a_graph_runs_with_the_backend_that_it_was_made_with_whatever_the_load():
    rt = runtime([SPEC])
    graph = rt.init_graph(2, max_kv_len=40)
    backend = graph.steps[0].backend
    rt.refresh_graph(graph, rt.extend(rt.new_sequences(1), [1]))
    assert graph.steps[0].backend is backend
    assert dataclasses.is_dataclass(graph)
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.steps = ()


# Who serves a batch


def test_batches_of_as_many_tokens_each_go_to_a_decode_backend_that_serves_so_many():
    table = PageTable(PagedAllocator(40, 4), 4)
    seqs = table.new_sequences(3)

    def picked(counts, decode_qo_len, masks=None):
        def backend(name):
            declared = SimpleNamespace(decode_qo_len=decode_qo_len, graph=GraphLevel.NEVER)
            return SimpleNamespace(plan=lambda batch: name, capabilities=declared)

        chosen = SimpleNamespace(prefill="prefill", decode="decode", decode_by_load=None)
        view = table.extend(seqs, counts)
        batch = Batch.from_view(view, view.tensors(), masks)
        return HybridBackend(chosen, {name: backend(name) for name in ("prefill", "decode")}).plan(batch).plan

    assert picked([1, 1, 1], 1) == "decode"
    assert picked([3, 3, 3], 2) == "prefill"
    assert picked([3, 3, 3], 3) == "decode"
    assert picked([3, 3, 0], 3) == picked([3, 2, 1], 3) == "prefill"
    assert picked([2, 2, 2], 3, (torch.ones(2, 2, dtype=torch.bool),) * 3) == "prefill"
