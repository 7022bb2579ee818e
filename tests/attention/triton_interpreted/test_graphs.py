"""A graph's steps, planned and refreshed but not captured, and long sequences on few and on many multiprocessors.

The kit asks for graphs only where there are some; what the kernels read of a padded step can be had without.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from anyattn.attention.batch import Batch, checked_tree_masks
from anyattn.attention.graph import GraphBatch, GraphSizes
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.types import NULL_PAGE, GraphLevel

_spec = importlib.util.spec_from_file_location("triton_interpreted", Path(__file__).with_name("interpreted.py"))
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
CPU, InterpretedTriton = _module.CPU, _module.InterpretedTriton

GQA = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=32, dtype="float32", return_lse=True)
MLA = AttentionSpec.mla(
    num_qo_heads=20, kv_lora_rank=64, qk_rope_head_dim=16, sm_scale=0.1, dtype="float32", return_lse=True
)
SPECS = {
    "plain": GQA,
    "window-sinks": GQA.replace(sliding_window=40, sinks=True),
    "non-causal": GQA.replace(causal=False),
    "deterministic": GQA.replace(deterministic=True),
    "mla": MLA,
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Engine:
    """A backend and pages that are NaN where no token is stored, but for what lies behind the ends of sequences."""

    def __init__(self, spec, num_pages, *, page_size=16, num_cores=3):
        self.spec, platform = spec, dataclasses.replace(CPU, num_cores=num_cores)
        cache = spec.cache_spec(num_layers=1, page_size=page_size, layout="NHD")
        self.pool = (MLAPool if spec.is_mla else MHAPool)(cache, num_pages, "cpu")
        self.kv = self.pool.layers[0]
        self.table = PageTable(PagedAllocator(num_pages, page_size), page_size, device="cpu")
        self.backend = InterpretedTriton(spec, cache, platform)
        self.reference = ReferenceBackend(spec, cache, platform)
        self.more = {"sinks": torch.randn(spec.num_qo_heads)} if spec.sinks else {}
        for part in (self.kv.k, self.kv.v):
            part.fill_(torch.nan)

    def extend(self, seqs, new, *, trees=False):
        """The step's batch, its keys and values stored."""
        view = self.table.extend(seqs, new)
        masks = [torch.rand(count, count) > 0.4 for count in new] if trees else None
        batch = Batch.from_view(
            view, view.tensors(), None if masks is None else checked_tree_masks(masks, new, torch.device("cpu"))
        )
        spec, tails = self.spec, batch.block_table[torch.arange(len(new)), view.num_pages - 1].long()
        for part in (self.kv.k, self.kv.v):
            part[tails] = torch.nan_to_num(part[tails])
        k = torch.randn(batch.num_tokens, spec.num_kv_heads, spec.head_dim)
        v = torch.randn(batch.num_tokens, spec.num_kv_heads, spec.vo_head_dim)
        self.pool.store(0, k[:, 0] if spec.is_mla else k, None if spec.is_mla else v, batch.out_slots)
        for part in (self.kv.k, self.kv.v):
            part[NULL_PAGE] = torch.nan
        return batch

    def run(self, backend, q, plan):
        out = torch.full((q.shape[0], self.spec.num_qo_heads, self.spec.vo_head_dim), torch.nan)
        return out, backend.run(q, self.kv, plan, out, **self.more)

    def check(self, batch, plan, *, rows=None):
        """What a plan gives for the batch's tokens, against the reference. rows: of the plan, with those of padding."""
        tokens = batch.num_tokens
        q = torch.randn(tokens, self.spec.num_qo_heads, self.spec.head_dim)
        padded = torch.full((rows or tokens, *q.shape[1:]), torch.nan)
        padded[:tokens] = q
        out, lse = self.run(self.backend, padded, plan)
        right, right_lse = self.run(self.reference, q, batch)
        torch.testing.assert_close(out[:tokens], right, **CLOSE)
        torch.testing.assert_close(lse[:tokens], right_lse, **CLOSE)


def graph_of(engine, level, *, num_seqs, num_tokens, trees=False):
    sizes = GraphSizes(level=level, num_seqs=num_seqs, num_tokens=num_tokens, max_kv_len=700, tree_mask=trees)
    graph = GraphBatch(engine.table, sizes)
    return graph, engine.backend.init_graph(graph.batch)


def replay(engine, graph, plan, batch):
    """The batch in the graph's tensors; what the last step left in the workspace is NaN."""
    engine.backend.refresh_graph(plan, graph.refresh(batch))
    for division in plan.divisions:
        division.partial_out.fill_(torch.nan)
        division.partial_lse.fill_(torch.nan)
    engine.check(batch, plan, rows=graph.sizes.num_tokens)


STEPS = {
    "decode": (GraphLevel.DECODE, [(1,) * 4, (1,), (1,) * 3]),
    "uniform": (GraphLevel.UNIFORM, [(4,) * 4, (4,), (4,) * 3]),
    "always": (GraphLevel.ALWAYS, [(1, 30, 2, 1), (60,), (1, 1, 1), (5, 17)]),
}
"""New tokens of each sequence, step by step: full ones and padded ones."""


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(("plain", steps) for steps in STEPS),
        ("window-sinks", "always"),
        ("non-causal", "uniform"),
        ("deterministic", "always"),
        ("mla", "decode"),
    ],
)
def test_a_graph_s_plan_serves_every_later_step(name, steps):
    torch.manual_seed(0)
    level, counts = STEPS[steps]
    engine = Engine(SPECS[name], 80)
    seqs = engine.table.new_sequences(4)
    engine.extend(seqs, [600, 3, 120, 47])
    graph, plan = graph_of(engine, level, num_seqs=4, num_tokens=max(map(sum, counts)) if level > 1 else 4)
    for new in counts:
        replay(engine, graph, plan, engine.extend(seqs[: len(new)], new))
    engine.check(batch := engine.extend(seqs, [1, 2, 1, 20]), engine.backend.plan(batch))


def test_a_graph_s_trees_are_those_of_its_step():
    torch.manual_seed(1)
    engine = Engine(GQA.replace(tree_mask=True), 40)
    seqs = engine.table.new_sequences(3)
    engine.extend(seqs, [200, 3, 47])
    graph, plan = graph_of(engine, GraphLevel.UNIFORM, num_seqs=3, num_tokens=15, trees=True)
    for num_seqs, trees in ((3, True), (1, True), (2, False), (3, True)):
        replay(engine, graph, plan, engine.extend(seqs[:num_seqs], (5,) * num_seqs, trees=trees))


DECODE, SHORT, MIXED = (1,) * 6, (7, 1, 16, 2, 3, 1), (1, 40, 1, 1, 17, 2)


@pytest.mark.parametrize(
    ("name", "new", "num_cores"),
    [
        pytest.param("plain", DECODE, 1, id="decode-on-one"),
        pytest.param("plain", MIXED, 40, id="mixed-on-many"),
        pytest.param("window-sinks", SHORT, 40, id="window-short-on-many"),
        pytest.param("deterministic", MIXED, 1, id="deterministic-mixed-on-one"),
        pytest.param("deterministic", DECODE, 40, id="deterministic-decode-on-many"),
        pytest.param("mla", DECODE, 40, id="mla-decode-on-many"),
    ],
)
def test_lengths_of_thousands_and_of_one_share_a_batch(name, new, num_cores):
    torch.manual_seed(2)
    lengths = [2900, 0, 130, 1, 511, 64]
    num_pages = sum(-(-(before + count) // 64) for before, count in zip(lengths, new, strict=True))
    engine = Engine(SPECS[name], num_pages, page_size=64, num_cores=num_cores)
    seqs = engine.table.new_sequences(6)
    engine.extend(seqs, lengths)
    batch = engine.extend(seqs, new)
    engine.check(batch, engine.backend.plan(batch))
