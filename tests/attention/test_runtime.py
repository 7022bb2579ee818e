"""The runtime's promises: odd input is refused before anything is written, and nothing stale is ever used."""

import numpy as np
import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError, NoBackendError, NoDeviceError, OutOfPagesError, SpecError

pytestmark = pytest.mark.usefixtures("portable")

GQA = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.fixture(params=["torch_native", "reference"])
def rt(request):
    return anyattn.create_runtime(
        AttentionSpec(**GQA), num_layers=2, num_pages=16, page_size=4, backend=request.param, device="cpu"
    )


def inputs(tokens, spec=None, dtype=torch.float32):
    spec = spec or AttentionSpec(**GQA)
    return (
        torch.randn(tokens, spec.num_qo_heads, spec.head_dim, dtype=dtype),
        torch.randn(tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype),
        torch.randn(tokens, spec.num_kv_heads, spec.vo_head_dim, dtype=dtype),
    )


def bytes_of(rt):
    return [(kv.k.clone(), kv.v.clone()) for pool in rt.pools for kv in pool.layers]


def unchanged(rt, before):
    return all(
        torch.equal(k, k_before) and torch.equal(v, v_before)
        for (k, v), (k_before, v_before) in zip(bytes_of(rt), before, strict=True)
    )


def wrong_inputs():
    q, k, v = inputs(3)
    yield "q of another dtype", (q.double(), k, v), "q must be float32, not float64"
    yield "k of another dtype", (q, k.half(), v), "k must be float32, not float16"
    yield "v of another dtype", (q, k, v.bfloat16()), "v must be float32, not bfloat16"
    yield "too few tokens", (q[:2], k, v), r"q must be \[3, 4, 16\], not \[2, 4, 16\]"
    yield "too many keys", (q, torch.cat([k, k]), v), r"k must be \[3, 2, 16\], not \[6, 2, 16\]"
    yield "another head count", (q[:, :2], k, v), "q must be"
    yield "flat heads", (q.flatten(1), k, v), "q must be"
    yield "another head dim", (q, k, v[..., :8]), "v must be"
    yield "a list", (q.tolist(), k, v), "q must be a dense tensor"
    yield "sparse k", (q, k.to_sparse(), v), "k must be a dense tensor"
    yield "no v", (q, k, None), "v must be a dense tensor"
    yield "another device", (q.to("meta"), k, v), "q must be on cpu, not on meta"
    yield "gradients", (q.requires_grad_(), k, v), "no gradients"


@pytest.mark.parametrize(("name", "tensors", "message"), [pytest.param(*case, id=case[0]) for case in wrong_inputs()])
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(rt, name, tensors, message):
    plan = rt.plan(rt.extend(rt.new_sequences(1), [3]))
    before = bytes_of(rt)
    with pytest.raises(ContractError, match=message):
        rt.run(0, *tensors, plan)
    assert unchanged(rt, before)


@pytest.mark.parametrize("made", ["to_sparse", "to_sparse_csr", "to_mkldnn", "double", "tolist"])
def test_an_out_that_cannot_be_written_to_is_refused_before_anything_is_stored(rt, made):
    plan = rt.plan(rt.extend(rt.new_sequences(1), [3]))
    before = bytes_of(rt)
    with pytest.raises(ContractError, match="out must be"):
        rt.run(0, *inputs(3), plan, out=getattr(torch.zeros(3, 4, 16), made)())
    assert unchanged(rt, before)


def test_strided_tensors_give_what_contiguous_ones_give(rt):
    q, k, v = inputs(5)
    plan = rt.plan(rt.extend(rt.new_sequences(1), [5]))
    contiguous = rt.run(0, q, k, v, plan)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    last_strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    fused = torch.cat([q, k, v], dim=1)
    sliced = [fused[:, :4], fused[:, 4:6], fused[:, 6:]]
    for variant in (heads_first, last_strided, sliced):
        assert torch.equal(rt.run(1, *variant, plan), contiguous)


def test_a_batch_of_zero_sequences_and_a_sequence_of_zero_tokens_are_served(rt):
    q, k, v = inputs(0)
    assert rt.run(0, q, k, v, rt.plan(rt.extend([], []))).shape == (0, 4, 16)
    seqs = rt.new_sequences(2)
    assert rt.run(0, q, k, v, rt.plan(rt.extend(seqs, [0, 0]))).shape == (0, 4, 16)
    q, k, v = inputs(3)
    assert rt.run(0, q, k, v, rt.plan(rt.extend(seqs, [0, 3]))).isfinite().all()


def test_short_pages_are_refused_and_the_next_request_that_fits_is_served(rt):
    seqs = rt.new_sequences(2)
    rt.extend(seqs, [30, 30])
    with pytest.raises(OutOfPagesError):
        rt.extend(seqs, [3, 3])
    rt.table.check()
    assert rt.table.lengths(seqs) == [30, 30]
    q, k, v = inputs(4)
    rt.run(0, q, k, v, rt.plan(rt.extend(seqs, [2, 2])))


def test_a_freed_sequence_is_refused_in_extend_in_plan_and_in_run(rt):
    seqs = rt.new_sequences(2)
    batch = rt.extend(seqs, [3, 1])
    plan = rt.plan(batch)
    rt.free(seqs[:1])
    before = bytes_of(rt)
    for call in (
        lambda: rt.extend(seqs, [1, 1]),
        lambda: rt.plan(batch),
        lambda: rt.run(0, *inputs(4), plan),
        lambda: rt.free(seqs),
    ):
        with pytest.raises(ContractError, match="was freed"):
            call()
    assert unchanged(rt, before)
    assert rt.table.lengths(seqs[1:]) == [1]


def test_a_plan_stays_valid_while_other_sequences_come_and_go(rt):
    (kept,) = rt.new_sequences(1)
    plan = rt.plan(rt.extend([kept], [3]))
    q, k, v = inputs(3)
    wanted = rt.run(0, q, k, v, plan)
    others = rt.new_sequences(3)
    rt.run(0, *inputs(6), rt.plan(rt.extend(others, [1, 2, 3])))
    rt.free(others)
    assert torch.equal(rt.run(0, q, k, v, plan), wanted)


def test_a_plan_of_another_runtime_is_refused(rt):
    other = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=4, device="cpu")
    plan = other.plan(other.extend(other.new_sequences(1), [1]))
    with pytest.raises(ContractError, match="another runtime"):
        rt.run(0, *inputs(1), plan)


@pytest.mark.parametrize("layer", [-1, 2, "0", None])
def test_a_layer_that_is_not_there_is_refused(rt, layer):
    plan = rt.plan(rt.extend(rt.new_sequences(1), [1]))
    with pytest.raises(ContractError, match="layer must be 0 to 1"):
        rt.run(layer, *inputs(1), plan)


def test_out_is_written_in_place_and_checked(rt):
    plan = rt.plan(rt.extend(rt.new_sequences(1), [2]))
    q, k, v = inputs(2)
    wanted = rt.run(0, q, k, v, plan)
    out = torch.full((2, 4, 16), float("nan"))
    assert rt.run(1, q, k, v, plan, out=out) is out
    assert torch.equal(out, wanted)
    with pytest.raises(ContractError, match="out must be"):
        rt.run(0, q, k, v, plan, out=torch.empty(2, 4, 8))
    for wrong in (torch.empty(4, 2, 16).transpose(0, 1), torch.empty(2, 4, 16, requires_grad=True)):
        with pytest.raises(ContractError, match="out must be contiguous and without gradient"):
            rt.run(0, q, k, v, plan, out=wrong)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes_are_wanted_exactly_when_the_spec_asks(rt, name):
    field = {"sinks": "sinks", "alibi_slopes": "alibi"}[name]
    plan = rt.plan(rt.extend(rt.new_sequences(1), [1]))
    with pytest.raises(ContractError, match="does not ask for them"):
        rt.run(0, *inputs(1), plan, **{name: torch.zeros(4)})
    asking = anyattn.create_runtime(AttentionSpec(**GQA, **{field: True}), num_layers=1, num_pages=4, device="cpu")
    plan = asking.plan(asking.extend(asking.new_sequences(1), [1]))
    for wrong, message in ((None, "asks for"), (torch.zeros(3), "must be"), (torch.zeros(4, dtype=int), "must be")):
        with pytest.raises(ContractError, match=message):
            asking.run(0, *inputs(1), plan, **{name: wrong})
    asking.run(0, *inputs(1), plan, **{name: torch.zeros(4)})


def test_tree_masks_are_checked_before_anything_is_reserved():
    rt = anyattn.create_runtime(AttentionSpec(**GQA, tree_mask=True), num_layers=1, num_pages=8, device="cpu")
    seqs = rt.new_sequences(2)
    masks = {
        "one mask or None for each": [None],
        r"bool \[2, 2\], not bool \[3, 3\]": [None, torch.ones(3, 3, dtype=torch.bool)],
        r"bool \[2, 2\], not float32 \[2, 2\]": [None, torch.ones(2, 2)],
    }
    for message, wrong in masks.items():
        with pytest.raises(ContractError, match=message):
            rt.extend(seqs, [1, 2], tree_masks=wrong)
    assert rt.table.lengths(seqs) == [0, 0]
    plain = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=8, device="cpu")
    with pytest.raises(ContractError, match="tree_mask=True"):
        plain.extend(plain.new_sequences(1), [1], tree_masks=[None])


def test_layers_with_different_masks_share_one_pool_and_get_their_own_plans():
    specs = [AttentionSpec(**GQA, sliding_window=window) for window in (2, None, 2)]
    rt = anyattn.create_runtime(specs, num_pages=8, device="cpu")
    assert len(rt.selections) == 2
    q, k, v = inputs(6, specs[0])
    plan = rt.plan(rt.extend(rt.new_sequences(1), [6]))
    outs = [rt.run(layer, q, k, v, plan) for layer in range(3)]
    assert torch.equal(outs[0], outs[2])
    assert torch.allclose(outs[0][:2], outs[1][:2])
    assert not torch.allclose(outs[0][3:], outs[1][3:])


MLA = {"num_qo_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "sm_scale": 0.2, "dtype": "float32"}


@pytest.mark.parametrize("backend", ["torch_native", "reference"])
def test_bound_mla_equals_attention_over_expanded_heads(backend):
    spec = AttentionSpec.mla(**MLA, qk_nope_head_dim=16, v_head_dim=12)
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=16, backend=backend, device="cpu")
    w_uk, w_uv = torch.randn(4, 16, 32) / 6, torch.randn(4, 32, 12) / 6
    rt.bind_mla(0, w_uk, w_uv)
    q, latent = torch.randn(7, 4, 24), torch.randn(7, 40)
    seqs = rt.new_sequences(1)
    outs = []
    for rows in (slice(0, 4), slice(4, 6), slice(6, 7)):
        plan = rt.plan(rt.extend(seqs, [rows.stop - rows.start]))
        outs.append(rt.run(0, q[rows], latent[rows], None, plan))
    k_nope = torch.einsum("tr,hnr->thn", latent[:, :32], w_uk)
    k = torch.cat([k_nope, latent[:, None, 32:].expand(-1, 4, -1)], dim=-1)
    v = torch.einsum("tr,hrv->thv", latent[:, :32], w_uv)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    wanted = torch.einsum("hqk,khv->qhv", scores.softmax(-1), v)
    assert torch.allclose(torch.cat(outs), wanted, atol=1e-5)
    plan = rt.plan(rt.extend(rt.new_sequences(1), [2]))
    out = torch.empty(2, 4, 12)
    assert rt.run(0, q[:2], latent[:2], None, plan, out=out) is out
    assert torch.allclose(out, wanted[:2], atol=1e-5)


def test_mla_refuses_a_v_and_up_projections_that_do_not_fit():
    rt = anyattn.create_runtime(AttentionSpec.mla(**MLA), num_layers=1, num_pages=4, device="cpu")
    plan = rt.plan(rt.extend(rt.new_sequences(1), [1]))
    with pytest.raises(ContractError, match="v must be None for MLA"):
        rt.run(0, torch.randn(1, 4, 40), torch.randn(1, 40), torch.randn(1, 32), plan)
    with pytest.raises(ContractError, match="sizes before absorption"):
        rt.bind_mla(0, torch.randn(4, 16, 32), torch.randn(4, 32, 12))
    rt = anyattn.create_runtime(
        AttentionSpec.mla(**MLA, qk_nope_head_dim=16, v_head_dim=12), num_layers=1, num_pages=4, device="cpu"
    )
    with pytest.raises(ContractError, match="w_uv must be"):
        rt.bind_mla(0, torch.randn(4, 16, 32), torch.randn(4, 12, 32))
    with pytest.raises(ContractError, match="layer must be"):
        rt.bind_mla(1, torch.randn(4, 16, 32), torch.randn(4, 32, 12))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "zzz"}, NoBackendError, "no attention backend named 'zzz'"),
        ({"backend": "flashinfer"}, NoBackendError, "device_kind: wanted cpu, supported cuda"),
        ({"page_size": 4096}, NoBackendError, "4096"),
        ({"page_size": 0}, SpecError, "page_size must be a positive integer"),
        ({"page_size": 16.0}, SpecError, "page_size must be a positive integer"),
        ({"num_pages": "10"}, SpecError, "num_pages must be an integer"),
        ({"num_pages": True}, SpecError, "num_pages must be an integer"),
        ({"num_pages": 2**31}, SpecError, "num_pages must be an integer from 1 to 2147483646"),
        ({"num_pages": 2**24, "page_size": 1024}, ContractError, "could not be had"),
        ({"num_layers": None}, SpecError, "num_layers must be given"),
        ({"layout": "DNH"}, SpecError, "layout must be NHD or HND"),
        ({"pool": ""}, SpecError, "pool must be a name, not ''"),
        ({"device": "npu"}, NoDeviceError, "No device 'npu' can be used here"),
        ({"num_layers": 0}, SpecError, "num_layers must be an integer from 1 to 65536"),
        ({"num_pages": 0}, SpecError, "num_pages must be an integer"),
    ],
)
def test_a_runtime_that_cannot_be_made_says_why(arguments, error, message):
    base = {"num_layers": 1, "num_pages": 4, "device": "cpu"}
    with pytest.raises(error, match=message):
        anyattn.create_runtime(AttentionSpec(**GQA), **{**base, **arguments})


def test_layers_that_do_not_fit_one_cache_are_refused():
    with pytest.raises(SpecError, match="same KV heads"):
        anyattn.create_runtime(
            [AttentionSpec(**GQA), AttentionSpec(**{**GQA, "head_dim": 32})], num_pages=4, device="cpu"
        )
    for nonsense in (None, [None], AttentionSpec, []):
        with pytest.raises(SpecError):
            anyattn.create_runtime(nonsense, num_pages=4, device="cpu")
    with pytest.raises(SpecError, match="one for each layer"):
        anyattn.create_runtime([AttentionSpec(**GQA)], num_layers=2, num_pages=4, device="cpu")


def test_arguments_beat_the_environment_which_beats_the_default(monkeypatch):
    def made(**arguments):
        rt = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=4, **arguments)
        return rt.selection.prefill, rt.selection.decode, rt.selection.page_size

    monkeypatch.setenv("ANYATTN_PLATFORM", "cpu")
    monkeypatch.delenv("ANYATTN_ATTENTION_BACKEND")
    prefill, decode, page_size = made()
    assert prefill == decode != "reference"  # whatever is best on this CPU
    assert page_size == 16
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "reference")
    monkeypatch.setenv("ANYATTN_PAGE_SIZE", "5")
    assert made() == ("reference", "reference", 5)
    monkeypatch.setenv("ANYATTN_DECODE_BACKEND", "torch_native")
    assert made() == ("reference", "torch_native", 5)
    assert made(backend="torch_native", page_size=8) == ("torch_native", "torch_native", 8)
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "zzz")
    with pytest.raises(NoBackendError, match="zzz"):
        made()


@pytest.mark.parametrize(
    ("name", "value"), [("ANYATTN_PAGE_SIZE", "many"), ("ANYATTN_PAGE_SIZE", "-1"), ("ANYATTN_DEBUG", "yes")]
)
def test_a_setting_that_means_nothing_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=name):
        anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=4)


def test_a_hybrid_gives_decode_steps_to_one_backend_and_all_others_to_the_other():
    rt = anyattn.create_runtime(
        AttentionSpec(**GQA), num_layers=1, num_pages=16, device="cpu",
        prefill_backend="reference", decode_backend="torch_native",
    )  # fmt: skip
    whole = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=16, device="cpu")
    seqs, other = rt.new_sequences(2), whole.new_sequences(2)
    for counts, name in (([5, 3], "ReferenceBackend"), ([1, 1], "TorchNativeBackend"), ([1, 4], "ReferenceBackend")):
        q, k, v = inputs(sum(counts))
        plan = rt.plan(rt.extend(seqs, counts))
        assert type(plan.steps[0].backend).__name__ == name
        wanted = whole.run(0, q, k, v, whole.plan(whole.extend(other, counts)))
        assert torch.allclose(rt.run(0, q, k, v, plan), wanted, atol=1e-6)


def test_the_buffers_of_torch_native_are_reused_from_step_to_step():
    rt = anyattn.create_runtime(
        AttentionSpec(**GQA), num_layers=1, num_pages=64, device="cpu", page_size=4, backend="torch_native"
    )
    seqs = rt.new_sequences(1)
    rt.run(0, *inputs(100), rt.plan(rt.extend(seqs, [100])))
    rt.run(0, *inputs(1), rt.plan(rt.extend(seqs, [1])))
    backend = rt.plan(rt.extend(seqs, [1])).steps[0].backend
    pointers = {name: buffer.data_ptr() for name, buffer in backend._buffers.items()}
    for _ in range(20):
        rt.run(0, *inputs(1), rt.plan(rt.extend(seqs, [1])))
    assert {name: buffer.data_ptr() for name, buffer in backend._buffers.items()} == pointers


def test_a_batch_of_another_runtime_is_refused_before_anything_is_written(rt):
    other = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=4, device="cpu")
    batch = other.extend(other.new_sequences(1), [3])
    rt.new_sequences(1)  # its handle is the same number
    with pytest.raises(ContractError, match="another runtime"):
        rt.plan(batch)


@pytest.mark.parametrize("count", [2**64 - 1, 2**63, 2**62])
def test_a_count_beyond_every_integer_is_refused_and_shrinks_nothing(rt, count):
    (seq,) = rt.new_sequences(1)
    rt.extend([seq], [10])
    with pytest.raises(OutOfPagesError):
        rt.extend([seq], [count])
    more = rt.new_sequences(4)
    with pytest.raises(OutOfPagesError):
        rt.extend(more, [2**62] * 4)
    assert rt.table.lengths([seq, *more]) == [10, 0, 0, 0, 0]
    rt.table.check()


@pytest.mark.parametrize("seqs", [[[1], [2, 3]], "ab", [1.5], [None]])
def test_handles_that_are_no_integers_are_refused(rt, seqs):
    with pytest.raises(ContractError):
        rt.extend(seqs, [1] * len(seqs))


def test_a_runtime_made_and_used_in_inference_mode_works_outside_of_it(rt):
    with torch.inference_mode():
        inner = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=8, device="cpu")
        seqs = inner.new_sequences(1)
        inner.run(0, *inputs(3), inner.plan(inner.extend(seqs, [3])))
    inner.run(0, *inputs(1), inner.plan(inner.extend(seqs, [1])))
    with torch.inference_mode():
        inner.run(0, *inputs(1), inner.plan(inner.extend(seqs, [1])))


def test_bound_up_projections_may_be_parameters():
    spec = AttentionSpec.mla(**MLA, qk_nope_head_dim=16, v_head_dim=12)
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=4, device="cpu")
    rt.bind_mla(0, torch.nn.Parameter(torch.randn(4, 16, 32)), torch.nn.Parameter(torch.randn(4, 32, 12)))
    out = rt.run(0, torch.randn(2, 4, 24), torch.randn(2, 40), None, rt.plan(rt.extend(rt.new_sequences(1), [2])))
    assert not out.requires_grad


def test_a_tree_mask_changed_after_extend_does_not_reach_the_step():
    rt = anyattn.create_runtime(
        AttentionSpec(**GQA, tree_mask=True), num_layers=1, num_pages=8, device="cpu", backend="reference"
    )
    mask = torch.eye(3, dtype=torch.bool)
    plan = rt.plan(rt.extend(rt.new_sequences(1), [3], tree_masks=[mask]))
    mask.fill_(True)
    q, k, v = inputs(3)
    assert torch.allclose(rt.run(0, q, k, v, plan), v.repeat_interleave(2, dim=1))


def test_an_empty_step_gives_an_empty_lse():
    rt = anyattn.create_runtime(AttentionSpec(**GQA, return_lse=True), num_layers=1, num_pages=4, device="cpu")
    out, lse = rt.run(0, *inputs(0), rt.plan(rt.extend(rt.new_sequences(2), [0, 0])))
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


def test_a_torch_device_may_be_named_or_given():
    rt = anyattn.create_runtime(AttentionSpec(**GQA), num_layers=1, num_pages=4, device=torch.device("cpu"))
    assert rt.device == torch.device("cpu")


def test_autocast_does_not_lower_the_precision(rt):
    q, k, v = inputs(7)
    plan = rt.plan(rt.extend(rt.new_sequences(1), [7]))
    wanted = rt.run(0, q, k, v, plan)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rt.run(1, q, k, v, plan), wanted)


def test_a_batch_does_not_follow_the_callers_array_of_handles(rt):
    handles = np.array(rt.new_sequences(2))
    batch = rt.extend(handles, [1, 1])
    rt.free(handles.copy())
    handles[:] = rt.new_sequences(2)
    with pytest.raises(ContractError, match="was freed"):
        rt.plan(batch)


def test_deterministic_wants_one_backend_for_both_roles_and_no_up_projections():
    spec = AttentionSpec(**GQA, deterministic=True)
    with pytest.raises(NoBackendError, match="one backend must fill both roles"):
        anyattn.create_runtime(
            spec, num_layers=1, num_pages=4, device="cpu", prefill_backend="reference", decode_backend="torch_native"
        )
    mla = AttentionSpec.mla(**MLA, qk_nope_head_dim=16, v_head_dim=12, deterministic=True)
    rt = anyattn.create_runtime(mla, num_layers=1, num_pages=4, device="cpu")
    with pytest.raises(ContractError, match="deterministic does not cover"):
        rt.bind_mla(0, torch.randn(4, 16, 32), torch.randn(4, 32, 12))
