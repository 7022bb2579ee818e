"""The kit's graph tier passes backends that serve what they declare, and no mutant of one."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import AttentionBackend, Capabilities, ContractError, GraphLevel, Platform, discovery
from anyattn.testing.check import CannotRunError, CheckFailedError
from anyattn.testing.graphs.checks import checks
from anyattn.types import ANY_INT, IntSet, ints

sys.path.append(str(Path(__file__).parents[2] / "examples" / "anyattn-example-plugin"))
from anyattn_example_plugin.backend import ExampleBackend

DEVICE = Platform(
    kind="example",
    vendor="anyattn",
    name="Example device",
    arch="example1",
    torch_device="cpu",
    graph=GraphLevel.ALWAYS,
    status="emulated",
)


class Everything(AttentionBackend):
    """All features, in operations that a graph can replay."""

    capabilities = Capabilities(
        dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        per_head_scales=True,
        head_dims=ints(16),
        mla_dims=frozenset({(64, 16)}),
        group_sizes=IntSet(maximum=8),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=("HND", "NHD"),
        phases=frozenset({"prefill", "decode", "mixed", "verify"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        alibi=True,
        tree_mask=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
    )

    def plan(self, batch):
        return batch

    def init_graph(self, batch):
        return batch

    def refresh_graph(self, plan, batch):
        pass

    def owners(self, plan, token):
        return torch.searchsorted(plan.qo_indptr[1:], token.int(), right=True).clamp(max=plan.kv_lens.shape[0] - 1)

    def scales(self, kv):
        return [
            scale[:, None] if torch.is_tensor(scale) and scale.ndim else scale for scale in (kv.k_scale, kv.v_scale)
        ]

    def before_softmax(self, scores):
        return scores

    def write(self, plan, token, out, result):
        out.copy_(result)

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        spec, token = self.spec, torch.arange(out.shape[0])
        seq = self.owners(plan, token)
        pages = [part.view(torch.uint8)[plan.block_table[seq]].view(part.dtype) for part in kv.nhd()]
        k, v = (part.flatten(1, 2).float() * scale for part, scale in zip(pages, self.scales(kv), strict=True))
        key = torch.arange(k.shape[1])
        begin, prefix = plan.qo_indptr[seq], plan.kv_lens[seq] - plan.qo_indptr[seq + 1] + plan.qo_indptr[seq]
        position = (prefix + token - begin)[:, None]
        seen = key <= position if spec.causal else key < plan.kv_lens[seq][:, None]
        if spec.sliding_window is not None:
            seen &= key > position - spec.sliding_window
        if plan.tree_masks is not None:
            lens, most = plan.host.qo_lens.tolist(), plan.max_qo_len
            full = [
                torch.ones(n, n).tril().bool() if m is None else m for m, n in zip(plan.tree_masks, lens, strict=True)
            ]
            trees = torch.stack([torch.nn.functional.pad(m, (0, most - len(m), 0, most - len(m))) for m in full])
            row, column = (token - begin).clamp(0, most - 1)[:, None], key - prefix[:, None]
            seen = (key < prefix[:, None]) | (
                trees[seq[:, None], row, column.clamp(0, most - 1)] & (column >= 0) & seen
            )
        v = v.masked_fill(~seen[:, :, None, None], 0.0)
        grouped = q.unflatten(1, (spec.num_kv_heads, spec.group_size))
        scores = torch.einsum("thgd,tkhd->thgk", grouped, k).flatten(1, 2) * spec.scale
        if spec.logits_soft_cap is not None:
            scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None] * (key - position)[:, None]
        scores = self.before_softmax(scores.masked_fill(~seen[:, None], float("-inf")))
        lse = torch.logsumexp(scores, dim=-1)
        total = lse if sinks is None else torch.logaddexp(lse, sinks)
        weights = torch.exp(scores - total.masked_fill(total.isneginf(), 0.0)[..., None])
        weights = weights.unflatten(1, (spec.num_kv_heads, spec.group_size))
        self.write(plan, token, out, torch.einsum("thgk,tkhd->thgd", weights, v).flatten(1, 2))
        return lse if spec.return_lse else None


class OwnBuffers(Everything):
    """Keeps what it reads in tensors of its own, in all sorts of containers, and copies each step into them."""

    fields = ("qo_indptr", "kv_lens", "block_table")

    def init_graph(self, batch):
        own = {name: self.buffer(name, getattr(batch, name)) for name in self.fields}
        return SimpleNamespace(
            **{field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} | own,
            kept=[own, {"a": (1,)}],
        )

    def buffer(self, name, of):
        return of.clone()

    def refresh_graph(self, plan, batch):
        for name in self.fields:
            getattr(plan, name).copy_(getattr(batch, name))


class DecodeOnly(Everything):
    capabilities = dataclasses.replace(
        Everything.capabilities, phases=frozenset({"decode"}), graph=GraphLevel.DECODE, tree_mask=False
    )


def run_of(backend, name, seed=0, device=DEVICE):
    (check,) = [check for check in checks(backend, device) if check.name == name]
    return check.run(seed)


ALIKE = ("page size", "layout", "query heads", "MLA 64+16")


def every_check(*backends):
    """Sizes and MLA take long, and are the same to all of these backends and levels: the first backend has them at its
    highest level. The matrix, of which all cells are here, has each of them at every level."""
    return [
        pytest.param(check, id=f"{backend.__name__} {check.name}")
        for backend in backends
        for check in checks(backend, DEVICE)
        if "matrix: " in check.name
        or not any(words in check.name for words in ALIKE)
        or (backend is backends[0] and check.name.startswith("always: "))
    ]


@pytest.mark.parametrize("check", every_check(Everything, DecodeOnly))
def test_a_backend_that_serves_what_it_declares_passes(check):
    check.run(torch.seed() % (1 << 31))


@pytest.mark.parametrize("level", ["decode", "uniform", "always"])
def test_a_backend_with_tensors_of_its_own_passes(level):
    for name in (LENGTHS, FEWER, LONGEST, MOVED, SIDE_BY_SIDE, BESIDE_EAGER, AT_CAPTURE):
        run_of(OwnBuffers, f"{level}: {name}")


LENGTHS = "replays with other lengths, across the ends of pages"
PAGES = "replays with other sequences on other pages"
FEWER = "replays with fewer sequences than were captured"
LONGEST = "replays with max_kv_len tokens, and nothing of them is left after"
PADDING = "padding reaches no result and stores nothing"
MOVED = "the tensors of a plan stay where they are"
SIDE_BY_SIDE = "graphs of several sizes do not disturb one another"
BESIDE_EAGER = "graphs and plans without graph do not disturb one another"
AT_CAPTURE = "what the plan held at the capture is not in the graph for good"
WAITS = "nothing waits for the device"


class TableOfTheCapture(OwnBuffers):
    def refresh_graph(self, plan, batch):
        for name in ("qo_indptr", "kv_lens"):
            getattr(plan, name).copy_(getattr(batch, name))


class LengthsOfTheCapture(OwnBuffers):
    def refresh_graph(self, plan, batch):
        plan.block_table.copy_(batch.block_table)


class NewTensorsInRefresh(OwnBuffers):
    def refresh_graph(self, plan, batch):
        super().refresh_graph(plan, batch)
        plan.kept[0]["block_table"] = plan.block_table.clone()


class LongestReadBack(Everything):
    def run(self, q, kv, plan, out, **per_head):
        pages = -(-int(plan.kv_lens.max()) // self.cache.page_size)
        return super().run(q, kv, dataclasses.replace(plan, block_table=plan.block_table[:, :pages]), out, **per_head)


class LengthsListed(Everything):
    def run(self, q, kv, plan, out, **per_head):
        lens = torch.tensor(plan.kv_lens.tolist(), dtype=torch.int32)
        return super().run(q, kv, dataclasses.replace(plan, kv_lens=lens), out, **per_head)


class SizeOfTheHostAtCapture(OwnBuffers):
    """One that has another way for a single sequence, chosen by what the host knows."""

    def refresh_graph(self, plan, batch):
        super().refresh_graph(plan, batch)
        plan.host = batch.host

    def owners(self, plan, token):
        owners = super().owners(plan, token)
        return owners * 0 if plan.host.seqs.size == 1 else owners


class PaddingInTheLastRow(Everything):
    def write(self, plan, token, out, result):
        last = plan.qo_indptr[-1:] - 1
        out[torch.where(token <= last, token, last)] = result


class PaddingInTheMaximum(Everything):
    def before_softmax(self, scores):
        return scores - scores.amax() + scores.amax()


class PaddingStored(Everything):
    def write(self, plan, token, out, result):
        super().write(plan, token, out, result)
        self.pages[0] += 1.0

    def run(self, q, kv, plan, out, **per_head):
        self.pages = kv.k
        return super().run(q, kv, plan, out, **per_head)


class TokensDividedByCapturedSequences(OwnBuffers):
    def owners(self, plan, token):
        if not isinstance(plan, SimpleNamespace):
            return super().owners(plan, token)
        return (token * plan.kv_lens.shape[0] // plan.qo_indptr[-1].clamp(min=1)).clamp(max=plan.kv_lens.shape[0] - 1)


class LengthsThatOnlyGrow(OwnBuffers):
    def refresh_graph(self, plan, batch):
        longest = torch.maximum(plan.kv_lens, batch.kv_lens)
        super().refresh_graph(plan, batch)
        plan.kv_lens.copy_(longest)


class OneBufferForAllGraphs(OwnBuffers):
    def __init__(self, spec, cache, platform):
        super().__init__(spec, cache, platform)
        self.shared = {}

    def buffer(self, name, of):
        if name == "block_table":
            whole = self.shared.setdefault(name, torch.zeros(64, of.shape[1], dtype=of.dtype))
            return whole[: of.shape[0]]
        return of.clone()


class GraphAndEagerShareLengths(OwnBuffers):
    def __init__(self, spec, cache, platform):
        super().__init__(spec, cache, platform)
        self.lens = torch.zeros(64, dtype=torch.int32)

    def buffer(self, name, of):
        return self.lens[: of.shape[0]] if name == "kv_lens" else of.clone()

    def plan(self, batch):
        lens = self.lens[: batch.num_seqs]
        lens.copy_(batch.kv_lens)
        return dataclasses.replace(batch, kv_lens=lens)


class GraphsOfOneTokenOnly(OwnBuffers):
    """Declares level always, and takes every token of a graph for a sequence."""

    def owners(self, plan, token):
        if isinstance(plan, SimpleNamespace):
            return token.clamp(max=plan.kv_lens.shape[0] - 1)
        return super().owners(plan, token)


class UniformTakenForRagged(OwnBuffers):
    def owners(self, plan, token):
        if isinstance(plan, SimpleNamespace):
            return token // (token.shape[0] // plan.kv_lens.shape[0])
        return super().owners(plan, token)


class NoInitGraph(Everything):
    init_graph = AttentionBackend.init_graph


class NoRefreshGraph(Everything):
    refresh_graph = AttentionBackend.refresh_graph


class MasksOfTheCapture(OwnBuffers):
    def init_graph(self, batch):
        plan = super().init_graph(batch)
        if plan.tree_masks is not None:
            plan.tree_masks = [mask.clone() for mask in plan.tree_masks]
        return plan


class WindowIgnoredInGraphs(OwnBuffers):
    def run(self, q, kv, plan, out, **per_head):
        spec = self.spec
        if isinstance(plan, SimpleNamespace):
            self.spec = spec.replace(sliding_window=None)
        try:
            return super().run(q, kv, plan, out, **per_head)
        finally:
            self.spec = spec


class ScaleReadBack(Everything):
    def scales(self, kv):
        return [float(scale) if torch.is_tensor(scale) and not scale.ndim else scale for scale in super().scales(kv)]


class SinksReadBack(Everything):
    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        sinks = None if sinks is None else torch.tensor(sinks.tolist())
        return super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes)


class LengthsOfTheFirstRun(Everything):
    """Copies the lengths when `run` first sees a graph's plan: in the warm-up, so that no replay copies them again."""

    def init_graph(self, batch):
        self.lengths = None
        return super().init_graph(batch)

    def run(self, q, kv, plan, out, **per_head):
        if plan.num_seqs != plan.host.seqs.size:  # a graph's, at first without sequences
            if self.lengths is None:
                self.lengths = plan.kv_lens.clone()
            plan = dataclasses.replace(plan, kv_lens=self.lengths)
        return super().run(q, kv, plan, out, **per_head)


class LSEOfTheLastRow(Everything):
    """A row of the LSE for each row that has a token now, which a graph cannot know."""

    def run(self, q, kv, plan, out, **per_head):
        lse = super().run(q, kv, plan, out, **per_head)
        return lse if lse is None else lse[torch.arange(lse.shape[0]) < plan.qo_indptr[-1]]


MUTANTS = [
    (TableOfTheCapture, "decode: " + PAGES, "off by|NaN"),
    (LengthsOfTheCapture, "uniform: " + LENGTHS, "off by|NaN"),
    (NewTensorsInRefresh, "always: " + MOVED, r"kept\[0\]\['block_table'\] is another tensor after refresh_graph"),
    (LongestReadBack, "decode: " + WAITS, "Tensor.__int__ waits for cpu"),
    (LengthsListed, "always: " + WAITS, "Tensor.tolist waits for cpu"),
    (SizeOfTheHostAtCapture, "decode: " + AT_CAPTURE, "after a capture with 1 sequence in the plan"),
    (PaddingInTheLastRow, "decode: " + PADDING, "half padding"),
    (PaddingInTheMaximum, "uniform: " + PADDING, "NaN in a replay that is half padding"),
    (PaddingStored, "always: " + PADDING, "in page 0, .*the null page must stay zero"),
    (TokensDividedByCapturedSequences, "decode: " + FEWER, "2 of 4 sequences"),
    (LengthsThatOnlyGrow, "decode: " + LONGEST, "short sequences after long ones"),
    (OneBufferForAllGraphs, "decode: " + SIDE_BY_SIDE, "the graph for 4 after another was refreshed"),
    (GraphAndEagerShareLengths, "decode: " + BESIDE_EAGER, "planned before a replay"),
    (GraphsOfOneTokenOnly, "uniform: " + LENGTHS, "off by|NaN"),
    (UniformTakenForRagged, "always: " + LENGTHS, "off by|NaN"),
    (NoInitGraph, "decode: " + LENGTHS, "declares graph=always and has no init_graph: implement it"),
    (NoRefreshGraph, "decode: " + LENGTHS, "declares graph=always and has no refresh_graph: implement it"),
    (MasksOfTheCapture, "uniform: replays with tree_mask=True", "tree masks"),
    (WindowIgnoredInGraphs, "decode: replays with sliding_window=33", "off by|NaN"),
    (ScaleReadBack, "decode: replays with KV float8_e4m3fn, tensor scales", "Tensor.__float__ waits"),
    (SinksReadBack, "uniform: replays with sinks=True", "Tensor.tolist waits"),
    (LSEOfTheLastRow, "always: replays with return_lse=True", "gave no LSE"),
    (LengthsOfTheFirstRun, "decode: " + LENGTHS, "off by|NaN"),
]


@pytest.mark.parametrize(("mutant", "name", "message"), [pytest.param(*case, id=case[0].__name__) for case in MUTANTS])
def test_a_mutant_fails_the_check_whose_name_says_what_is_wrong(mutant, name, message):
    with pytest.raises((CheckFailedError, ContractError), match=message):
        run_of(mutant, name)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [(GraphsOfOneTokenOnly, "decode: " + LENGTHS), (UniformTakenForRagged, "uniform: " + LENGTHS)],
    ids=["GraphsOfOneTokenOnly", "UniformTakenForRagged"],
)
def test_levels_that_are_served_pass_where_a_higher_one_is_claimed(mutant, name):
    run_of(mutant, name)


def test_a_backend_without_graphs_has_no_checks():
    never = type(
        "Never", (Everything,), {"capabilities": dataclasses.replace(Everything.capabilities, graph=GraphLevel(0))}
    )
    assert list(checks(never, DEVICE)) == []


def test_a_level_that_no_declared_phase_can_reach_is_a_failure():
    capabilities = dataclasses.replace(
        Everything.capabilities, phases=frozenset({"prefill", "mixed", "verify"}), graph=GraphLevel.DECODE
    )
    (check,) = checks(type("PrefillOnly", (Everything,), {"capabilities": capabilities}), DEVICE)
    with pytest.raises(CheckFailedError, match="graph=decode is declared with the phases mixed, prefill, verify"):
        check.run(0)


def test_on_a_device_without_graphs_every_check_says_so():
    for check in checks(ExampleBackend, dataclasses.replace(discovery.usable_device("cpu"), kind="example")):
        with pytest.raises(CannotRunError, match=r"graph=always is declared, and device graphs of cpu .* level never"):
            check.run(0)


def test_checks_are_named_once_and_the_same_in_every_run():
    names = [check.id for check in checks(Everything, DEVICE)]
    assert len(set(names)) == len(names)
    assert names == [check.id for check in checks(Everything, DEVICE)]
    assert {check.tier for check in checks(Everything, DEVICE)} == {"graph"}
    assert {check.capability for check in checks(Everything, DEVICE)} == {"graph"}


def test_features_that_are_declared_not_to_go_with_graphs_are_not_replayed():
    declared = dataclasses.replace(Everything.capabilities, not_together=(("graph", "sinks"), ("return_lse", "graph")))
    backend = type("Apart", (Everything,), {"capabilities": declared})
    device = Platform(kind="test", vendor="any", name="any", arch="any", torch_device="cpu", graph=GraphLevel.ALWAYS)
    names = [check.name for check in checks(backend, device)]
    assert any("alibi" in name for name in names)
    assert not any("sinks" in name or "LSE" in name or "return_lse" in name for name in names)
