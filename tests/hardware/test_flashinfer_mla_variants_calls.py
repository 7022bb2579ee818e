"""The adapters of FlashInfer's other MLA kernels for Blackwell on the CPU, against emulations with its signatures.

The CuTe DSL's function is as in 0.6.13, to which 0.7.4 adds optional parameters; CUTLASS's wrapper is as in 0.7.4. Both
kernels load whole tiles of pages, and multiply what they mask.
"""

import dataclasses
import functools
import importlib.util
import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import GraphLevel, Platform
from anyattn.hardware_backend.cuda import cutedsl_mla, cutlass_mla, mla_decode
from anyattn.testing.graphs import apart, replays
from anyattn.testing.graphs.setting import Setting
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime, run_step
from anyattn.testing.numerics.inputs import PerHead, Step

sys.path.append(str(Path(__file__).parent))
from paged_kernel import GRAPHS, MLA_CASES, Loads, assert_called_alike, attend, chosen

BLACKWELL = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm100", torch_device="cpu", graph=GraphLevel.ALWAYS
)
CuteDSL, Cutlass = cutedsl_mla.CuteDSLMLABackend, cutlass_mla.CutlassMLABackend
TILES = Loads(tile=128)
BUILT_IN_SCALE = 1 / math.sqrt(128 + 64)
SEEN_QUERIES = []


def is_aligned(*tensors):
    return not any(tensor.data_ptr() % 16 for tensor in tensors)


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
    skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto",
):  # fmt: skip
    assert (backend, sparse_mla_top_k, sinks, lse, is_var_seq, bmm2_scale) == ("cute-dsl", 0, None, None, True, 1.0)
    num_seqs, qo_len, heads, dim = query.shape
    page_size = kv_cache.shape[1]
    assert workspace_buffer.dtype == torch.int8
    assert type(bmm1_scale) is float
    assert (kv_lora_rank, qk_rope_head_dim, dim, kv_cache.shape[2]) == (512, 64, 576, 576)
    assert query.dtype == kv_cache.dtype == out.dtype == torch.bfloat16
    assert 1 < page_size <= 128
    assert 128 % page_size == 0
    assert block_tables.shape[1] % (128 // page_size) == 0
    assert is_aligned(block_tables, seq_lens)
    assert block_tables.is_contiguous()
    assert 0 < max_seq_len <= block_tables.shape[1] * page_size
    assert heads <= 128
    assert out.shape == (num_seqs, qo_len, heads, 512)
    assert out.is_contiguous()
    pages = kv_cache.unsqueeze(2)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * qo_len
    result, natural = attend(
        query.flatten(0, 1), pages, pages[..., :512], block_tables, seq_lens, starts, scale=bmm1_scale, loads=TILES
    )
    out.copy_(result.view(out.shape))
    return (out, natural) if return_lse else out


class MLAPlanMetadata:
    @classmethod
    def dense(cls, cum_seq_lens_q, block_tables, seq_lens, max_q_len=None):
        made = cls()
        made.cum_seq_lens_q, made.block_tables, made.seq_lens = cum_seq_lens_q, block_tables, seq_lens
        return made


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert backend == "cutlass"
        assert float_workspace_buffer.is_contiguous()

    def plan(
        self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None,
        head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None,
        use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None,
        query_layout=None, kv_cache_layout=None, lse_mode="none", output_dtype=None, output_scale="none",
        scale_mode="default", skip_softmax=False, enable_pdl=None, use_sinks=False,
    ):  # fmt: skip
        assert (num_heads, head_dim_ckv, head_dim_kpe, causal) == (128, 512, 64, True)
        assert math.isclose(sm_scale, BUILT_IN_SCALE, rel_tol=1e-5)
        assert 128 % page_size == 0
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.bfloat16, torch.float16)
        lens = metadata.cum_seq_lens_q.diff()  # read on the host, as the lengths are: neither may be on the device
        assert (lens == 1).all()
        assert {t.dtype for t in (metadata.cum_seq_lens_q, metadata.block_tables, metadata.seq_lens)} == {torch.int32}
        assert metadata.block_tables.shape[1] % (128 // page_size) == 0
        assert int(metadata.seq_lens.max()) <= metadata.block_tables.shape[1] * page_size
        self.num_seqs, self.page_size, self.dtype = len(lens), page_size, q_data_type

    def run(
        self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None,
        kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None,
        skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None,
    ):  # fmt: skip
        assert (lse, return_lse, sinks, bmm1_scale, bmm2_scale) == (None, False, None, None, None)
        assert query.shape == (self.num_seqs, 128, 576)
        assert query.dtype == kv_cache.dtype == out.dtype == self.dtype
        assert kv_cache.shape[1:] == (self.page_size, 576)
        assert page_table.shape[1] % (128 // self.page_size) == 0
        assert all(tensor.is_contiguous() for tensor in (query, kv_cache, out, page_table))
        SEEN_QUERIES.append(query)
        pages, starts = kv_cache.unsqueeze(2), torch.arange(self.num_seqs + 1, dtype=torch.int32)
        result, _ = attend(
            query, pages, pages[..., :512], page_table, kv_len, starts, scale=BUILT_IN_SCALE, loads=TILES
        )
        return out.copy_(result)


FLASHINFER = SimpleNamespace(
    mla=SimpleNamespace(
        trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
        BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
        MLAPlanMetadata=MLAPlanMetadata,
    )
)


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    for adapter in (mla_decode, cutlass_mla):
        monkeypatch.setattr(adapter, "flashinfer", FLASHINFER)
    SEEN_QUERIES.clear()


def cases_of_few_tokens(backend):
    """Of decode alone: 128 heads of 576 elements take their time."""
    for case in cases_for(backend.capabilities):
        qo_len = 8 if "8 new tokens" in case.name else 1
        yield dataclasses.replace(case, steps=((qo_len,) * 3,) * 2, stored_before=(40, 0, 129))


def graph_checks_of_few_tokens(backend):
    case = dataclasses.replace(next(cases_for(backend.capabilities)), page_size=2)
    level = backend.capabilities.graph
    for name, run in {**replays.CHECKS, **apart.CHECKS}.items():
        setting = Setting(backend=backend, device=BLACKWELL, case=case, level=level, seed=torch.seed() % (1 << 31))
        yield SimpleNamespace(name=name, run=functools.partial(run, setting))


@pytest.mark.parametrize(
    ("backend", "case"),
    [each for backend in (CuteDSL, Cutlass) for each in chosen(backend, cases_of_few_tokens(backend), MLA_CASES)],
)
def test_an_adapter_is_right_in_every_case_that_it_declares(backend, case):
    assert check_case(backend, case, BLACKWELL, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(
    ("backend", "check"),
    [each for backend in (CuteDSL, Cutlass) for each in chosen(backend, graph_checks_of_few_tokens(backend), GRAPHS)],
)
def test_a_graph_serves_later_steps(backend, check):
    check.run()


@pytest.mark.parametrize(("scale", "is_the_callers"), [(BUILT_IN_SCALE, True), (0.1352, False)])
def test_cutlass_gets_q_as_it_is_where_its_scale_is_the_models(scale, is_the_callers):
    (case,) = (case for case in cases_for(Cutlass.capabilities) if case.name == "MLA 512+64 decode")
    rt = build_runtime(Cutlass, dataclasses.replace(case, spec=case.spec.replace(sm_scale=scale)), BLACKWELL, 0)
    step = Step.draw(case.spec, (1,), torch.Generator().manual_seed(0))
    run_step(rt, step, rt.plan(rt.extend(rt.new_sequences(1), [1])), PerHead(sinks=None, alibi_slopes=None))
    assert torch.equal(SEEN_QUERIES[0], step.q) is is_the_callers


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python")
def test_flashinfer_is_called_as_it_is():
    from flashinfer import mla

    assert_called_alike(mla.trtllm_batch_decode_with_kv_cache_mla, trtllm_batch_decode_with_kv_cache_mla)
    if "metadata" not in inspect.signature(mla.BatchMLAPagedAttentionWrapper.plan).parameters:
        pytest.skip("needs flashinfer-python 0.7.4 for CUTLASS's wrapper")
    for method in ("__init__", "plan", "run"):
        here = getattr(BatchMLAPagedAttentionWrapper, method)
        assert_called_alike(getattr(mla.BatchMLAPagedAttentionWrapper, method), here)
    assert_called_alike(mla.MLAPlanMetadata.dense, MLAPlanMetadata.dense)
