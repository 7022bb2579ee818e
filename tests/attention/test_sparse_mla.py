"""Sparse MLA: what its spec asks for, which slots a token's positions become, and attention to just these keys."""

import dataclasses
import random

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, Capabilities, ContractError, GraphLevel, Platform, SpecError
from anyattn.attention.graph import GraphBatch, GraphSizes
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.mla import expanded_specs
from anyattn.attention.reference import sparse_attention
from anyattn.attention.runtime import AttentionRuntime
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.empty_pool import EmptyPool
from anyattn.mem_cache.page_table import PageTable
from anyattn.types import ints

TOPK = 8
MLA = AttentionSpec.mla(
    num_qo_heads=3, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.07, kv_dtype="float8_e4m3fn", return_lse=True
)
SPEC = MLA.replace(topk=TOPK)
CPU = Platform(kind="cpu", vendor="intel", name="Test", arch="x86_64", torch_device="cpu")
BARE = Capabilities(
    dtypes=frozenset({"bfloat16"}),
    page_sizes=ints(16),
    layouts=("NHD",),
    phases=frozenset({"prefill", "decode", "mixed"}),
    lse=True,
)


def reasons(spec, **declared):
    found = dataclasses.replace(BARE, **declared).reject_reasons(spec, CPU, "decode")
    return {reason.field: reason for reason in found}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk": 0}, "topk must be a positive integer"),
        ({"topk": True}, "topk must be a positive integer"),
        ({"kv_dtype": "auto"}, "topk needs kv_dtype='float8_e4m3fn'"),
        ({"kv_dtype": "float8_e5m2"}, "topk needs kv_dtype='float8_e4m3fn'"),
        ({"causal": False}, "topk needs causal=True"),
        ({"sliding_window": 4}, "topk needs sliding_window=None"),
        ({"alibi": True}, "topk needs alibi=False"),
        ({"tree_mask": True}, "topk needs tree_mask=False"),
        ({"head_dim": 288, "kv_lora_rank": 256, "qk_rope_head_dim": 32}, "kv_lora_rank of 512"),
    ],
)
def test_a_sparse_spec_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        SPEC.replace(**fields)


def test_heads_of_keys_and_values_are_not_sparse():
    with pytest.raises(SpecError, match="topk needs MLA"):
        AttentionSpec(num_qo_heads=8, num_kv_heads=1, head_dim=576, topk=64, kv_dtype="float8_e4m3fn")


def test_the_cache_of_a_sparse_spec_is_that_of_its_rows():
    cache = SPEC.cache_spec(num_layers=2, page_size=64, layout="NHD")
    assert (cache.kind, cache.bytes_per_token) == ("dsa", 2 * 656)
    assert MLA.cache_kind == "mla"
    with pytest.raises(SpecError, match="layout must be 'NHD'"):
        SPEC.cache_spec(num_layers=2, page_size=64, layout="HND")


def test_nothing_is_expanded_from_latents_of_which_tokens_see_some():
    sizes = {"qk_nope_head_dim": 16, "v_head_dim": 16}
    assert expanded_specs(MLA.replace(**sizes)) is not None
    assert expanded_specs(SPEC.replace(**sizes)) is None


def test_sparse_attention_is_refused_by_backends_that_declare_none_and_others_are_asked_for_it_alone():
    dense = {"mla_dims": frozenset({(512, 64)}), "kv_dtypes": frozenset({"float8_e4m3fn"})}
    assert set(reasons(SPEC, **dense)) == {"topk"}
    assert reasons(SPEC, **dense)["topk"].supported == "dense attention only"
    assert reasons(SPEC, topk=ints(8, 64)) == {}
    assert reasons(SPEC, topk=ints(64))["topk"].supported == "64"
    assert set(reasons(SPEC, topk=ints(8), group_sizes=ints(64))) == {"num_qo_heads"}
    assert set(reasons(MLA, topk=ints(8))) == {"kv_lora_rank", "kv_dtype"}
    assert reasons(MLA, topk=ints(8))["kv_lora_rank"].supported == "sparse MLA only"


def test_pairs_that_do_not_go_together_tell_dense_attention_from_sparse():
    both = {"mla_dims": frozenset({(512, 64)}), "kv_dtypes": frozenset({"float8_e4m3fn"}), "topk": ints(8)}
    assert set(reasons(MLA, **both, not_together=(("mla", "fp8"),))) == {"kv_dtype"}
    assert reasons(SPEC, **both, not_together=(("mla", "fp8"),)) == {}
    assert set(reasons(SPEC, **both, not_together=(("topk", "return_lse"),))) == {"return_lse"}
    assert reasons(MLA, **both, not_together=(("topk", "return_lse"),)) == {}


def runtime(spec=SPEC, **fields):
    fields = {"num_layers": 1, "num_pages": 210, "page_size": random.choice([1, 3, 16]), **fields}
    return anyattn.create_runtime(spec, device="cpu", backend="reference", **fields)


def choices(batch, generator):
    """Positions, some of them -1 and some behind the token; and for each token the set that it sees."""
    rows, seen = torch.full((batch.num_tokens, TOPK), -1, dtype=torch.int32), []
    for row, position in zip(rows, batch.positions.tolist(), strict=True):
        drawn = torch.randperm(position + 4, generator=generator)[: random.randint(0, TOPK)]
        row[torch.randperm(TOPK, generator=generator)[: drawn.numel()]] = drawn.int()
        seen.append({int(p) for p in drawn if p <= position})
    return rows, seen


def test_positions_become_the_slots_where_their_tokens_lie():
    rt = runtime()
    seqs = rt.new_sequences(3)
    rt.extend(seqs[::-1], [7, 0, 4])
    slots = {}  # by sequence and position
    for counts in ([5, 0, 17], [1, 1, 1], [0, 9, 0]):
        batch = rt.extend(seqs, counts)
        owners = [seq for seq, count in zip(seqs, counts, strict=True) for _ in range(count)]
        for owner, position, slot in zip(owners, batch.positions.tolist(), batch.out_slots.tolist(), strict=True):
            slots[owner, position] = slot
        indices, seen = choices(batch, torch.Generator())
        got = batch.slots_of(indices)
        assert got.dtype == torch.int32
        for owner, row, wanted, visible in zip(owners, got.tolist(), indices.tolist(), seen, strict=True):
            for slot, position in zip(row, wanted, strict=True):
                expected = slots.get((owner, position), slot) if position in visible else -1
                assert slot == expected
                assert (slot >= rt.table.page_size) == (position in visible)


def test_rows_of_padding_become_slots_of_the_table_whatever_they_hold():
    rt = runtime()
    graph = GraphBatch(rt.table, GraphSizes(level=GraphLevel.ALWAYS, num_seqs=3, num_tokens=12, max_kv_len=50))
    extremes = torch.tensor([-(1 << 31), -1, 0, 1, 49, 50, 1 << 20, (1 << 31) - 1], dtype=torch.int32)
    pages = {0}
    for counts in ([5, 4, 3], [1, 1, 1], [2]):  # of which the later ones leave positions behind in the padding
        seqs = rt.new_sequences(len(counts))
        batch = rt.extend(seqs, counts)
        graph.refresh(batch)
        slots = graph.batch.slots_of(extremes.repeat(12, 1))
        pages |= set(batch.kv_indices.tolist())
        assert {slot // rt.table.page_size for slot in slots.flatten().tolist() if slot >= 0} <= pages
        assert (slots >= -1).all()
        assert torch.equal(slots[: batch.num_tokens], batch.slots_of(extremes.repeat(batch.num_tokens, 1)))


def rounded(k):
    """What the rows keep of k, by hand."""
    tiles = k[:, :512].float().unflatten(1, (4, 128))
    scales = tiles.abs().amax(-1, keepdim=True) / 448
    latents = ((tiles / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)
    return torch.cat([latents, k[:, 512:].bfloat16().float()], dim=1).double()


@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"logits_soft_cap": 2.0}], ids=["plain", "sinks", "cap"])
def test_a_token_attends_to_the_keys_that_were_chosen_for_it_and_to_no_other(fields):
    spec = SPEC.replace(dtype="float32", **fields)
    rt = runtime(spec)
    generator, seqs = torch.Generator(), rt.new_sequences(2)
    generator.seed()
    sinks = torch.randn(3, generator=generator) if spec.sinks else None
    stored = [torch.empty(0, 576, dtype=torch.float64) for _ in seqs]
    for counts in ([9, 20], [1, 1], [3, 0]):
        batch = rt.extend(seqs, counts)
        q, k = (torch.randn(sum(counts), *shape, generator=generator) for shape in ((3, 576), (576,)))
        indices, seen = choices(batch, generator)
        given = {} if sinks is None else {"sinks": sinks}
        out, lse = rt.run(0, q, k, None, rt.plan(batch), indices=indices, **given)
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        for i, part in enumerate(rounded(k).split(counts)):
            stored[i] = torch.cat([stored[i], part])
        for token, (owner, visible) in enumerate(zip(owners, seen, strict=True)):
            keys = stored[owner][sorted(visible)]
            scores = q[token].double() @ keys.T * spec.scale
            if spec.logits_soft_cap:
                scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
            log_sum = scores.logsumexp(-1)
            total = log_sum if sinks is None else torch.logaddexp(log_sum, sinks.double())
            right = (scores - total[:, None]).exp() @ keys[:, :512]
            right = torch.zeros_like(right) if not visible else right
            torch.testing.assert_close(out[token].double(), right, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[token].double(), log_sum, rtol=1e-5, atol=1e-5)


def test_up_projections_are_absorbed_with_the_same_choice():
    spec = SPEC.replace(dtype="float32", qk_nope_head_dim=8, v_head_dim=4)
    rt, plain = runtime(spec), runtime(spec)
    w_uk, w_uv = torch.randn(3, 8, 512), torch.randn(3, 512, 4)
    rt.bind_mla(0, w_uk, w_uv)
    batch, again = (each.extend(each.new_sequences(1), [200]) for each in (rt, plain))
    q, k = torch.randn(200, 3, 72), torch.randn(200, 576)
    indices, _ = choices(batch, torch.Generator())
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", q[..., :8], w_uk), q[..., 8:]], dim=-1)
    wanted, wanted_lse = plain.run(0, absorbed, k, None, plain.plan(again), indices=indices)
    out, lse = rt.run(0, q, k, None, rt.plan(batch), indices=indices)
    torch.testing.assert_close(out, torch.einsum("thr,hrv->thv", wanted, w_uv), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


def refused(rt, message, indices, spec=SPEC):
    batch = rt.extend(rt.new_sequences(1), [2])
    q, k = torch.randn(2, 3, 576, dtype=torch.bfloat16), torch.randn(2, 576, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match=message):
        rt.run(0, q, k, None, rt.plan(batch), indices=indices)
    assert not rt.pools[0].parts()[0].any()


def test_indices_that_do_not_fit_the_spec_are_refused_before_anything_is_stored():
    rt = runtime()
    refused(rt, "spec has topk=8: pass the positions", None)
    refused(rt, r"indices must be \[2, 8\]", torch.zeros(2, 9, dtype=torch.int32))
    refused(rt, "indices must be int32, not int64", torch.zeros(2, 8, dtype=torch.int64))
    refused(rt, "indices must be a dense tensor", [[0] * 8] * 2)
    refused(rt, "indices must be on cpu", torch.zeros(2, 8, dtype=torch.int32, device="meta"))
    refused(runtime(MLA), "the spec has no topk", torch.zeros(2, 8, dtype=torch.int32))


def test_a_pool_with_more_slots_than_int32_names_is_refused():
    spec, page_size = SPEC, 1 << 10
    rt = runtime(spec)
    cache = spec.cache_spec(num_layers=0, page_size=page_size, layout="NHD")
    for num_pages, fits in (((1 << 21) - 2, True), ((1 << 21) - 1, False)):
        table = PageTable(PagedAllocator(8, page_size), page_size, device="cpu")
        arguments = (
            [spec], {spec: rt.selection}, {spec: HybridBackend(rt.selection, {})},
            [EmptyPool(cache, num_pages, "cpu")], table, [(0, 0)],
        )  # fmt: skip
        if fits:
            AttentionRuntime(*arguments)
        else:
            with pytest.raises(ContractError, match="give num_pages=2097150 or fewer"):
                AttentionRuntime(*arguments)


def test_selection_finds_the_pool_of_the_rows_and_fp8_scales_are_not_to_be_set():
    rt = runtime()
    assert rt.selection.pool == "dsa"
    with pytest.raises(ContractError, match="none to set"):
        rt.set_scales(0, 0.5, 0.5)


def test_layers_with_and_without_topk_do_not_share_a_cache():
    with pytest.raises(SpecError, match="share a KV cache"):
        runtime([SPEC, MLA], num_layers=None)


def test_the_oracle_of_sparse_attention_takes_what_is_not_seen_for_anything():
    q, k = torch.randn(2, 3, 576), torch.randn(2, TOPK, 576)
    seen = torch.rand(2, TOPK) < 0.5
    k[~seen] = float("nan")
    out, lse = sparse_attention(SPEC, q, k, seen)
    assert out.isfinite().all()
    assert torch.equal(lse.isneginf(), ~seen.any(dim=1)[:, None].expand(2, 3))
