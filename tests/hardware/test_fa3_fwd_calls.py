"""The fa3-fwd adapter on the CPU, against an emulation of `fa3_fwd_interface` with the parameters of 0.0.3."""

import sys
import types
from pathlib import Path

import pytest
import torch

from anyattn import AttentionSpec, Platform
from anyattn.attention.reference import reference_attention
from anyattn.hardware_backend.cuda import fa3_fwd
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.scenarios import checks as scenarios

sys.path.append(str(Path(__file__).parent))
from paged_kernel import HEAD_CASES, chosen

HOPPER = Platform(kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu")
Backend = fa3_fwd.FA3FwdBackend
CASES = [
    case
    for case in cases_for(Backend.capabilities)
    if case.page_size <= 128 and case.spec.group_size <= 8  # what is larger takes long here, and is no other
]
WIDEST_TILE = 192


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """Its last tile of a sequence's values is multiplied by 0 behind the end, whatever lies there."""
    assert {tensor.dtype for tensor in (q, k, v)} == {torch.bfloat16}
    assert {tensor.dtype for tensor in (cu_seqlens_q, cu_seqlens_k, seqused_k)} == {torch.int32}
    for tensor in (q, k, v):
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
    assert k.shape[0] == v.shape[0] == cu_seqlens_k[-1]
    assert max(seqused_k) <= max_seqlen_k
    spec = AttentionSpec(
        num_qo_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], v_head_dim=v.shape[2],
        sm_scale=softmax_scale, causal=causal, logits_soft_cap=softcap or None,
    )  # fmt: skip
    out = torch.full((*q.shape[:2], v.shape[2]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for i, length in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        if rows.start == rows.stop:
            assert length == 0, "nothing attends to what was gathered"
            continue
        assert rows.stop - rows.start <= max_seqlen_q
        begin = int(cu_seqlens_k[i])
        end, tiles_end = begin + length, begin + -(-length // WIDEST_TILE) * WIDEST_TILE
        out[rows], of_rows = reference_attention(spec, q[rows], k[begin:end], v[begin:end])
        out[rows] += (0 * v[end:tiles_end]).sum().to(out.dtype)
        lse[:, rows] = of_rows.T
    return (out, lse) if return_attn_probs else out


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    module = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(fa3_fwd, "fa3_fwd_interface", module)


@pytest.mark.parametrize(("backend", "case"), chosen(Backend, CASES, (*HEAD_CASES, "page size 128")))
def test_the_adapter_is_right_in_every_case_that_it_declares(backend, case):
    assert check_case(backend, case, HOPPER, 0).failure is None


@pytest.mark.parametrize("check", list(scenarios(Backend, HOPPER)), ids=lambda check: check.name)
def test_nothing_beside_a_step_matters_to_it_or_is_changed_by_it(check):
    check.run(0)
