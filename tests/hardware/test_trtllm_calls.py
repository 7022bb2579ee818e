"""The adapters of TensorRT-LLM's kernels on the CPU, against emulations with FlashInfer 0.6.13's signatures.

0.7.4 has further parameters, all of them optional. The kernels load whole tiles of pages, and multiply what they mask.
"""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import AttentionSpec, GraphLevel, Platform
from anyattn.hardware_backend.cuda import mla_decode, trtllm_mha, trtllm_mla
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime, run_step
from anyattn.testing.numerics.inputs import PerHead, Step
from anyattn.types import Load

sys.path.append(str(Path(__file__).parent))
from paged_kernel import (
    GRAPHS,
    HEAD_CASES,
    MLA_CASES,
    Loads,
    assert_called_alike,
    attend,
    chosen,
    is_capturing,
)

BLACKWELL = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm100", torch_device="cpu", graph=GraphLevel.ALWAYS
)
MHA, MLA = trtllm_mha.TRTLLMMHABackend, trtllm_mla.TRTLLMMLABackend
TILES = Loads(tile=128)
COUNTER_BYTES = 8 << 20
BFLOAT16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def check_scales(q, k_pages, *scales):
    assert q.dtype == k_pages.dtype
    for scale in scales:
        if isinstance(scale, torch.Tensor):
            assert (q.dtype, scale.dtype, scale.numel()) == (FP8, torch.float32, 1)
        else:
            assert type(scale) is float


def check_workspace(workspace, *, decodes):
    assert workspace.dtype == torch.uint8
    assert workspace.is_contiguous()
    if decodes:
        assert workspace.numel() > COUNTER_BYTES
        assert is_capturing() or not workspace[:COUNTER_BYTES].any(), "counters must be zero before a launch"


def attend_heads(
    query, kv_cache, block_tables, seq_lens, qo_indptr, bmm1_scale, bmm2_scale, window_left, out, sinks, kv_layout,
    return_lse, lse, causal=True,
):  # fmt: skip
    """Both calls; returns as they do."""
    k_pages, v_pages = kv_cache
    check_scales(query, k_pages, bmm1_scale, bmm2_scale)
    assert k_pages.shape == v_pages.shape
    assert k_pages.stride() == v_pages.stride()  # the kernels use that of keys
    if kv_layout == "NHD":
        k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    heads, page_size, head_dim = k_pages.shape[1:]
    assert (page_size in (16, 32, 64), head_dim in (64, 128, 256), query.shape[1] // heads <= 16) == (True,) * 3
    assert all(place * query.element_size() % 16 == 0 for place in (query.storage_offset(), *query.stride()[:-1]))
    assert out.is_contiguous()
    assert out.shape == query.shape
    assert out.dtype in (query.dtype, torch.float16, BFLOAT16)
    assert sinks is None or (sinks.dtype == torch.float32 and not return_lse)
    assert lse is None
    result, natural = attend(
        query, k_pages.transpose(1, 2), v_pages.transpose(1, 2), block_tables, seq_lens, qo_indptr,
        scale=1.0, k_scale=bmm1_scale, v_scale=bmm2_scale, window_left=window_left, causal=causal, sinks=sinks,
        loads=TILES,
    )  # fmt: skip
    out.copy_(result)
    return (out, natural / math.log(2)) if return_lse else out


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
    window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
    enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
    skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None,
    return_lse=False,
):  # fmt: skip
    assert (backend, q_len_per_req, max_q_len, cum_seq_lens_q) == ("trtllm-gen", 1, None, None)
    check_workspace(workspace_buffer, decodes=True)
    assert max_seq_len <= block_tables.shape[1] * (kv_cache[0].shape[2 if kv_layout == "HND" else 1])
    one_each = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32)
    return attend_heads(
        query, kv_cache, block_tables, seq_lens, one_each, bmm1_scale, bmm2_scale, window_left, out, sinks, kv_layout,
        return_lse, lse,
    )  # fmt: skip


def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
    batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
    o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
    skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None, return_lse=False,
):  # fmt: skip
    check_workspace(workspace_buffer, decodes=False)
    assert batch_size == seq_lens.shape[0]
    assert cum_seq_lens_kv.dtype == torch.int32
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert max_q_len == int(cum_seq_lens_q.diff().max())
    assert max_kv_len == int(seq_lens.max())
    if return_lse:  # the statistics that it is made of, and a guard of 1 MiB behind them
        rows = query.shape[1] * batch_size * -(-max_q_len // 256) * 256
        assert workspace_buffer.numel() >= 8 * rows + (1 << 20)
        workspace_buffer[: 8 * rows].fill_(1)
    return attend_heads(
        query, kv_cache, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale, bmm2_scale, window_left, out, sinks,
        kv_layout, return_lse, lse, causal,
    )  # fmt: skip


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
    skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto",
):  # fmt: skip
    assert (backend, sparse_mla_top_k, sinks, lse, is_var_seq) == ("trtllm-gen", 0, None, None, True)
    check_workspace(workspace_buffer, decodes=True)
    check_scales(query, kv_cache, bmm1_scale, bmm2_scale)
    num_seqs, qo_len, heads, dim = query.shape
    assert (kv_lora_rank, qk_nope_head_dim) in ((512, 128), (256, 64))
    assert dim == kv_cache.shape[2] == kv_lora_rank + qk_rope_head_dim
    assert kv_cache.shape[1] in (32, 64)
    assert heads <= 64 or heads == 128
    assert block_tables.shape[1] % (128 // kv_cache.shape[1]) == 0
    assert max_seq_len <= block_tables.shape[1] * kv_cache.shape[1]
    assert out.shape == (num_seqs, qo_len, heads, kv_lora_rank)
    assert out.dtype == BFLOAT16
    pages = kv_cache.unsqueeze(2)
    result, natural = attend(
        query.flatten(0, 1), pages, pages[..., :kv_lora_rank], block_tables, seq_lens,
        torch.arange(num_seqs + 1, dtype=torch.int32) * qo_len, scale=1.0, k_scale=bmm1_scale, v_scale=bmm2_scale,
        loads=TILES,
    )  # fmt: skip
    out.copy_(result.view(out.shape))
    return (out, natural / math.log(2)) if return_lse else out


FLASHINFER = SimpleNamespace(
    decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache),
    prefill=SimpleNamespace(trtllm_batch_context_with_kv_cache=trtllm_batch_context_with_kv_cache),
    mla=SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla),
)


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    for adapter in (trtllm_mha, mla_decode):
        monkeypatch.setattr(adapter, "flashinfer", FLASHINFER)
    small = COUNTER_BYTES + 16  # what is not emulated takes its time
    monkeypatch.setattr(trtllm_mha, "_WORKSPACE_BYTES", small)
    monkeypatch.setattr(MLA, "workspace_bytes", small)


@pytest.mark.parametrize(
    ("backend", "case"),
    [*chosen(MHA, cases_for(MHA.capabilities), HEAD_CASES), *chosen(MLA, cases_for(MLA.capabilities), MLA_CASES)],
)
def test_an_adapter_is_right_in_every_case_that_it_declares(backend, case):
    assert check_case(backend, case, BLACKWELL, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(
    ("backend", "check"),
    [each for backend in (MHA, MLA) for each in chosen(backend, graph_checks(backend, BLACKWELL), GRAPHS)],
)
def test_a_graph_serves_later_steps(backend, check):
    check.run(torch.seed() % (1 << 31))


def test_decode_finds_its_counters_zero_after_a_prefill_that_returned_the_lse():
    """0.6.13's prefill writes what an LSE is made of where decode has its counters, if it is given the same memory."""
    (case,) = (case for case in cases_for(MHA.capabilities) if case.name == "return_lse=True")
    rt = build_runtime(MHA, case, BLACKWELL, 0)
    seqs, generator = rt.new_sequences(2), torch.Generator().manual_seed(0)
    per_head = PerHead.draw(case.spec, generator)
    for counts in ((9, 30), (1, 1)):
        step = Step.draw(case.spec, counts, generator)
        run_step(rt, step, rt.plan(rt.extend(seqs, counts)), per_head)


def test_q_beyond_the_range_of_fp8_saturates():
    (case,) = (case for case in cases_for(MHA.capabilities) if case.name == "KV float8_e4m3fn, float scales")
    rt = build_runtime(MHA, case, BLACKWELL, 0)
    rt.set_scales(0, 0.05, 0.05)
    step = Step.draw(case.spec, (5,), torch.Generator().manual_seed(0), query_scale=1000.0)
    (out,) = run_step(rt, step, rt.plan(rt.extend(rt.new_sequences(1), [5])), PerHead(sinks=None, alibi_slopes=None))
    assert out.isfinite().all()


def test_they_come_before_flashinfers_own_kernels():
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    for role in ("prefill", "decode"):
        assert MHA.capabilities.priority_for(BLACKWELL, spec, role, Load(num_seqs=32, kv_len=4096)) > 85


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python")
def test_flashinfer_is_called_as_it_is():
    import flashinfer

    for room in ("decode", "prefill", "mla"):
        for name, function in vars(getattr(FLASHINFER, room)).items():
            assert_called_alike(getattr(getattr(flashinfer, room), name), function)
