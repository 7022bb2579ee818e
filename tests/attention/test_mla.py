"""MLA from the heads before absorption: by absorption, by expansion, and both in one step, are the same attention."""

import dataclasses
import secrets

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError, wiring
from anyattn.attention import mla
from anyattn.attention.batch import Batch
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable

HEADS, RANK, ROPE, NOPE, V = 3, 32, 8, 16, 12
SPEC = AttentionSpec.mla(
    num_qo_heads=HEADS, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=V, sm_scale=0.2,
    dtype="float32", return_lse=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(secrets.randbelow(1 << 31))


@pytest.fixture(autouse=True)
def small_heads_are_worth_it(monkeypatch):
    """Where moving data costs something, heads as small as these are never expanded."""
    monkeypatch.setattr(mla, "_MOVED", 0)
    monkeypatch.setattr(mla, "_MERGED", 0)


def runtime(spec=SPEC, num_pages=400, page_size=3, **asked):
    asked = {"backend": "torch_native", **asked}
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=num_pages, page_size=page_size, device="cpu", **asked)
    if spec.storage_dtype == "float32":
        rt.pools[0].layers[0].k.fill_(float("nan"))
    w_uk, w_uv = torch.randn(HEADS, NOPE, RANK) / 6, torch.randn(HEADS, RANK, V) / 6
    rt.bind_mla(0, w_uk, w_uv)
    return rt, w_uk, w_uv


def wanted(q, latent, w_uk, w_uv, prefix):
    """In float64, of one sequence: q of its last tokens, the latents of all."""
    q, latent, w_uk, w_uv = (x.double() for x in (q, latent, w_uk, w_uv))
    k = torch.einsum("tr,hnr->thn", latent[:, :RANK], w_uk)
    k = torch.cat([k, latent[:, None, RANK:].expand(-1, HEADS, -1)], dim=-1)
    v = torch.einsum("tr,hrv->thv", latent[:, :RANK], w_uv)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
    seen = torch.arange(k.shape[0]) <= prefix + torch.arange(q.shape[0])[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), v), scores.logsumexp(-1).T


def drive(rt, w_uk, w_uv, steps):
    """Steps of the same sequences, each judged; returns the plans."""
    seqs = rt.new_sequences(len(steps[0]))
    latents = [torch.zeros(0, RANK + ROPE) for _ in seqs]
    plans = []
    for counts in steps:
        q, new = torch.randn(sum(counts), HEADS, NOPE + ROPE), torch.randn(sum(counts), RANK + ROPE)
        plan = rt.plan(rt.extend(seqs, counts))
        out, lse = rt.run(0, q, new, None, plan)
        start = 0
        for i, count in enumerate(counts):
            rows = slice(start, start + count)
            prefix, start = latents[i].shape[0], start + count
            latents[i] = torch.cat([latents[i], new[rows]])
            expected, expected_lse = wanted(q[rows], latents[i], w_uk, w_uv, prefix)
            assert torch.allclose(out[rows].double(), expected, atol=2e-5)
            assert torch.allclose(lse[rows].double(), expected_lse, atol=2e-5)
        plans.append(plan)
    return [plan.mla[0] for plan in plans]


def test_prompts_are_expanded_decode_is_absorbed_and_a_mixed_step_is_both():
    prompt, chunk, decode, mixed, short = drive(
        *runtime(), [(150, 130, 0), (140, 3, 135), (1, 1, 1), (1, 129, 5), (2, 2, 2)]
    )
    assert prompt.absorbed is None
    assert len(prompt.passes) == 1
    assert chunk.absorbed is not None
    assert chunk.passes
    assert decode.absorbed is not None
    assert not decode.passes
    assert mixed.absorbed is not None
    assert mixed.passes
    assert not short.passes


@pytest.mark.parametrize("budget", [1, 40_000])
def test_long_prefixes_are_expanded_in_pieces_that_are_merged(monkeypatch, budget):
    monkeypatch.setattr(mla, "_SCRATCH_BYTES", budget)
    steps = drive(*runtime(), [(170, 1, 35), (131, 150, 140), (200, 140, 133), (1, 1, 1)])
    most = max(len(step.passes) for step in steps)
    assert most >= 2
    if budget == 1:  # pieces of twice the new tokens
        assert [len(step.passes) for step in steps] == [1, 2, 2, 0]


def test_which_sequences_are_expanded_follows_from_the_products_that_it_saves():
    rt, *_ = runtime(num_pages=20000)
    path = rt._mla_paths[0]

    def worth(prefix, new):
        table = PageTable(PagedAllocator(20000, 3), 3)
        seqs = table.new_sequences(len(prefix))
        table.extend(seqs, prefix).tensors()
        view = table.extend(seqs, new)
        return path._worth_expanding(Batch.from_view(view, view.tensors())).tolist()

    assert worth([0], [100]) == []  # too little for the launches
    assert worth([0], [128]) == [0]
    assert worth([5000], [12]) == []
    # Of n queries, each of m earlier keys costs n * 36 products less, and 896 once.
    assert worth([6000, 6000, 0], [24, 26, 128]) == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [{"sliding_window": 40}, {"logits_soft_cap": 3.0}, {"sinks": True}, {"tree_mask": True}, {"causal": False}],
)
def test_what_expansion_does_not_serve_is_absorbed(fields):
    assert mla.expanded_specs(SPEC.replace(**fields)) is None
    assert runtime(SPEC.replace(**fields))[0].expansions == {}


def test_an_fp8_cache_is_expanded_with_its_scale():
    rt, w_uk, w_uv = runtime(SPEC.replace(kv_dtype="float8_e4m3fn"))
    rt.set_scales(0, 0.05, 0.05)
    q, latent = torch.randn(140, HEADS, NOPE + ROPE), torch.randn(140, RANK + ROPE)
    plan = rt.plan(rt.extend(rt.new_sequences(1), [140]))
    assert plan.mla[0].passes
    out, _ = rt.run(0, q, latent, None, plan)
    stored = (latent / 0.05).to(torch.float8_e4m3fn).float() * 0.05
    assert torch.allclose(out.double(), wanted(q, stored, w_uk, w_uv, 0)[0], atol=2e-5)


def test_the_prefill_backend_that_was_named_attends_to_what_is_expanded_too():
    rt, *_ = runtime(backend="reference")
    assert rt.expansions[SPEC].names == ("reference", "reference")
    assert "long prompts have keys and values expanded, for reference" in rt.explain()


def test_up_projections_that_come_after_the_plan_want_another():
    rt = anyattn.create_runtime(SPEC, num_layers=2, num_pages=8, device="cpu", backend="torch_native")
    w_uk, w_uv = torch.randn(HEADS, NOPE, RANK), torch.randn(HEADS, RANK, V)
    batch = rt.extend(rt.new_sequences(1), [1])
    plan = rt.plan(batch)
    rt.bind_mla(1, w_uk, w_uv)
    q, latent = torch.randn(1, HEADS, NOPE + ROPE), torch.randn(1, RANK + ROPE)
    with pytest.raises(ContractError, match="after this step was planned: plan it again"):
        rt.run(1, q, latent, None, plan)
    plan = rt.plan(batch)
    assert rt.run(1, q, latent, None, plan)[0].shape == (1, HEADS, V)
    absorbed = torch.randn(1, HEADS, RANK + ROPE)
    assert rt.run(0, absorbed, latent, None, plan)[0].shape == (1, HEADS, RANK)


def test_a_step_of_some_of_its_sequences_has_their_rows_and_pages():
    table = PageTable(PagedAllocator(90, 4), 4)
    seqs = table.new_sequences(4)
    table.extend(seqs, [9, 0, 17, 4]).tensors()
    view = table.extend(seqs, [1, 6, 0, 3])
    batch = Batch.from_view(view, view.tensors(), (None, torch.ones(6, 6, dtype=torch.bool), None, None))
    part, rows = batch.of_sequences(torch.tensor([1, 3]).numpy())
    assert rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (part.num_seqs, part.num_tokens, part.max_qo_len, part.max_kv_len) == (2, 9, 6, 7)
    assert part.qo_indptr.tolist() == part.host.qo_indptr.tolist() == [0, 6, 9]
    assert part.kv_lens.tolist() == [6, 7]
    assert part.kv_indptr.tolist() == [0, 2, 4]
    assert part.block_table.tolist() == batch.block_table[[1, 3], :2].tolist()
    assert part.kv_indices.tolist() == part.block_table.flatten().tolist()
    assert part.kv_last_page_len.tolist() == [2, 3]
    assert part.out_slots.tolist() == batch.out_slots[1:10].tolist()
    assert part.tree_masks[0].shape == (6, 6)
    assert part.host.seqs.tolist() == [seqs[1], seqs[3]]


def test_a_backend_that_wants_contiguous_q_gets_it_for_expanded_prompts_too(monkeypatch):
    rt, *_ = runtime()
    backend = rt.expansions[SPEC].causal
    declared = dataclasses.replace(backend.capabilities, contiguous_q=True)
    monkeypatch.setattr(type(backend), "capabilities", declared)
    given = []
    run = backend.run

    def recorded(q, *rest, **more):
        given.append(q.is_contiguous())
        return run(q, *rest, **more)

    monkeypatch.setattr(backend, "run", recorded)
    plan = rt.plan(rt.extend(rt.new_sequences(1), [150]))
    rt.run(0, torch.randn(HEADS, 150, NOPE + ROPE).transpose(0, 1), torch.randn(150, RANK + ROPE), None, plan)
    assert given == [True]


def test_a_v_that_is_no_rope_part_is_refused_before_anything_is_stored():
    rt = anyattn.create_runtime(SPEC, num_layers=1, num_pages=8, device="cpu", backend="torch_native")
    plan = rt.plan(rt.extend(rt.new_sequences(1), [5]))
    before = rt.pools[0].layers[0].k.clone()
    with pytest.raises(ContractError, match="v must be None for MLA"):
        rt.run(0, torch.randn(5, HEADS, RANK + ROPE), torch.randn(5, 2 * RANK), torch.randn(5), plan)
    assert torch.equal(rt.pools[0].layers[0].k, before)


def test_a_backend_that_cannot_be_made_for_expansion_leaves_prompts_absorbed_and_says_so(monkeypatch):
    make = wiring._make

    def fail(offer, *arguments, **named):
        if isinstance(arguments[0], AttentionSpec) and arguments[0].num_kv_heads == HEADS:
            raise ContractError("it was built for another torch")
        return make(offer, *arguments, **named)

    monkeypatch.setattr(wiring, "_make", fail)
    with pytest.warns(UserWarning, match="will be absorbed.*it was built for another torch"):
        rt = anyattn.create_runtime(SPEC, num_layers=1, num_pages=8, device="cpu")
    assert rt.expansions == {}


def test_in_a_vendors_layout_prompts_are_absorbed():
    spec = SPEC.replace(kv_lora_rank=64, qk_rope_head_dim=16, head_dim=80)
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=40, page_size=16, layout="NZ", device="cpu")
    assert rt.expansions == {}
    rt.bind_mla(0, torch.randn(HEADS, NOPE, 64), torch.randn(HEADS, 64, V))
    plan = rt.plan(rt.extend(rt.new_sequences(1), [200]))
    out, _ = rt.run(0, torch.randn(200, HEADS, NOPE + 16), torch.randn(200, 80), None, plan)
    assert out.isfinite().all()


DEEPSEEK = AttentionSpec.mla(
    num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, sm_scale=0.1
)


@pytest.mark.parametrize(
    ("new", "before", "expanded"),
    [
        ([4096], 0, True), ([128], 0, True), ([64], 0, False), ([32] * 8, 0, False), ([512] * 4, 0, True),
        ([128], 4096, False), ([512], 4096, True), ([512], 32768, True), ([256] * 4, 16384, False),
        ([1] * 64, 4096, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_measured_to_be_faster_is_chosen(new, before, expanded, monkeypatch):
    """On an H200, by benchmarks/nvidia_mla.py."""
    monkeypatch.undo()
    rt = anyattn.create_runtime(DEEPSEEK, num_layers=1, num_pages=5000, page_size=64, device="cpu")
    (path,) = rt._mla_paths
    seqs = rt.new_sequences(len(new))
    rt.extend(seqs, [before] * len(new))
    assert bool(path._worth_expanding(rt.extend(seqs, new)).size) == expanded
