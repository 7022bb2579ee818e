"""The FlashAttention 2 adapter on the CPU, against emulations written from its repository's interface (2.8).

Its kernels fill what lies behind a sequence's end with zeros, and skip tiles that lie wholly behind a window.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import AttentionSpec, GraphLevel, Platform
from anyattn.hardware_backend.cuda import flash_attn as adapter
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.types import Load

sys.path.append(str(Path(__file__).parent))
from paged_kernel import HEAD_CASES, Loads, assert_called_alike, attend, chosen, shortened

AMPERE = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm80", torch_device="cpu", graph=GraphLevel.ALWAYS
)
Backend = adapter.FlashAttnBackend
GRAPHS = ("across the ends of pages", "stay where they are", "at the capture")  # three pages of 256 take their time


def attend_pages(q, k, v, block_table, kv_lens, starts, softmax_scale, causal, window_size, softcap, alibi_slopes):
    """Both calls. Returns out in q's dtype and LSE [T, H]."""
    page_size, _, head_dim = k.shape[1:]
    assert page_size % 256 == 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert v.shape == k.shape
    assert q.dtype == k.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.is_contiguous()
    assert alibi_slopes is None or (alibi_slopes.dtype == torch.float32 and causal)
    left, right = window_size
    assert right == (0 if causal else -1)
    result, lse = attend(
        q, k, v, block_table, kv_lens, starts, scale=softmax_scale, causal=causal, window_left=left, soft_cap=softcap,
        alibi_slopes=alibi_slopes, loads=Loads(first_tile=64),
    )  # fmt: skip
    # Causal ALiBi adds slope * key position to scores.
    return result.to(q.dtype), lse if alibi_slopes is None else torch.full_like(lse, float("nan"))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    kv_lens = cu_seqlens_k.diff()
    assert dropout_p == 0.0
    assert cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(kv_lens.max())
    out, lse = attend_pages(
        q, k, v, block_table, kv_lens, cu_seqlens_q, softmax_scale, causal, window_size, softcap, alibi_slopes
    )
    return (out, lse.T.contiguous(), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    assert (k, v, cache_batch_idx, cache_leftpad) == (None,) * 4
    num_seqs, qo_len, heads, _ = q.shape
    assert block_table.shape[0] == cache_seqlens.shape[0] == num_seqs
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * qo_len
    out, lse = attend_pages(
        q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, starts, softmax_scale, causal, window_size,
        softcap, alibi_slopes,
    )  # fmt: skip
    lse = lse.view(num_seqs, qo_len, heads).transpose(1, 2)
    return (out.view(q.shape), lse) if return_softmax_lse else out.view(q.shape)


FUNCTIONS = {"flash_attn_varlen_func": flash_attn_varlen_func, "flash_attn_with_kvcache": flash_attn_with_kvcache}


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    monkeypatch.setattr(adapter, "flash_attn", SimpleNamespace(**FUNCTIONS))


@pytest.mark.parametrize(("backend", "case"), chosen(Backend, shortened(cases_for(Backend.capabilities)), HEAD_CASES))
def test_the_adapter_is_right_in_every_case_that_it_declares(backend, case):
    assert check_case(backend, case, AMPERE, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(("backend", "check"), chosen(Backend, graph_checks(Backend, AMPERE), GRAPHS))
def test_a_graph_serves_later_steps(backend, check):
    check.run(torch.seed() % (1 << 31))


def test_it_comes_after_flashinfer_in_both_roles():
    spec, load = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64), Load(num_seqs=32, kv_len=4096)
    ranks = [Backend.capabilities.priority_for(AMPERE, spec, role, load) for role in ("prefill", "decode")]
    assert ranks == [50, 45]


def test_flash_attn_is_called_as_it_is():
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn")
    import flash_attn

    for name, function in FUNCTIONS.items():
        if not hasattr(flash_attn, name):  # of flash-attn-4, whose package has this name too
            pytest.skip("needs flash-attn")
        assert_called_alike(getattr(flash_attn, name), function)
