"""The FlashInfer adapter on the CPU, against an emulation of the two wrappers with the signatures of 0.6.13.

It holds the adapter's own work (arguments, conventions, one wrapper a live plan); the kernels are test_cuda.py's.
"""

import dataclasses
import math
import types

import pytest
import torch

from anyattn import AttentionSpec, Platform
from anyattn.attention.reference import reference_attention
from anyattn.hardware_backend.cuda import flashinfer as adapter
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime

HOPPER = Platform(kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu")
CASES = list(cases_for(adapter.FlashInferBackend.capabilities))


class Wrapper:
    """What both wrappers share: a plan is state of the wrapper, the window excludes the token, the LSE is in base 2."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8
        self.kv_layout = kv_layout

    def keep(self, qo_indptr, indptr, indices, last_page_len, heads, causal, options):
        num_qo_heads, num_kv_heads, head_dim, page_size = heads
        assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16
        assert {t.dtype for t in (qo_indptr, indptr, indices, last_page_len)} == {torch.int32}
        lengths = ((indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last_page_len).tolist()
        assert options["seq_lens"].tolist() == lengths
        window = options["window_left"]
        self.spec = AttentionSpec(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, sm_scale=options["sm_scale"],
            causal=causal, sliding_window=None if window < 0 else window + 1,
        )  # fmt: skip
        assert 0 not in indices, "the null page may hold NaN, and kernels mask what is behind a window without skipping"
        self.state = (qo_indptr.tolist(), indptr.tolist(), indices.clone(), lengths)

    def run(self, q, paged_kv_cache, *, out=None, lse=None, return_lse=False):
        assert q.is_contiguous()
        qo_indptr, indptr, indices, lengths = self.state
        lses = torch.empty(q.shape[:2])
        for i, length in enumerate(lengths):
            rows, pages = slice(qo_indptr[i], qo_indptr[i + 1]), indices[indptr[i] : indptr[i + 1]]
            parts = [part if self.kv_layout == "NHD" else part.transpose(1, 2) for part in paged_kv_cache]
            k, v = (part[pages].flatten(0, 1)[:length] for part in parts)
            out[rows], lses[rows] = reference_attention(self.spec, q[rows], k, v)
        return (out, lses / math.log(2)) if return_lse else out


class Decode(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None, seq_lens=None,
    ):  # fmt: skip
        options = {
            "window_left": window_left, "q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale,
            "seq_lens": seq_lens,
        }  # fmt: skip
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.keep(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, heads, True, options)


class Prefill(Wrapper):
    def plan(
        self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, *,
        causal=False, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
        seq_lens=None,
    ):  # fmt: skip
        options = {
            "window_left": window_left, "q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale,
            "seq_lens": seq_lens,
        }  # fmt: skip
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.keep(qo_indptr, indptr, indices, last_page_len, heads, causal, options)


class Event:
    def record(self, stream):
        assert stream == "stream of cpu"

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": Decode, "BatchPrefillWithPagedKVCacheWrapper": Prefill}
    monkeypatch.setattr(adapter, "flashinfer", types.SimpleNamespace(**wrappers))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_adapter_is_right_in_every_case_that_it_declares(case):
    assert check_case(adapter.FlashInferBackend, case, HOPPER, 0).failure is None


def test_a_wrapper_serves_another_plan_only_when_its_own_is_gone():
    rt = build_runtime(adapter.FlashInferBackend, dataclasses.replace(CASES[0], steps=((9, 9, 9),)), HOPPER, 0)
    seqs = rt.new_sequences(3)
    first = rt.plan(rt.extend(seqs[:1], [5]))
    second = rt.plan(rt.extend(seqs[1:2], [5]))
    used = [plan.steps[0].plan.wrapper for plan in (first, second)]
    assert used[0] is not used[1]
    del first
    assert rt.plan(rt.extend(seqs[2:], [5])).steps[0].plan.wrapper is used[0]
