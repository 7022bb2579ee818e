"""The FlashAttention 4 adapter on the CPU, against an emulation with the signature of flash-attn-4 4.0.0b36.

Pages that are no tile of the kernels are loaded row by row, up to a sequence's end, and from its beginning or the first
tile that a window touches. The LSE has the sink in it, where there is one.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import AttentionSpec, Platform
from anyattn.hardware_backend.cuda import fa4
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.types import Load

sys.path.append(str(Path(__file__).parent))
from paged_kernel import HEAD_CASES, Loads, assert_called_alike, attend, chosen

BLACKWELL = Platform(kind="cuda", vendor="nvidia", name="emulated", arch="sm100", torch_device="cpu")
HOPPER = dataclasses.replace(BLACKWELL, arch="sm90")
Backend = fa4.FA4Backend
CASES = list(cases_for(Backend.capabilities))
TILES = (64, 80, 96, 112, 128, 144)
ON_HOPPER = ("plain", "sliding_window=33")


def emulated(arch):
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
        causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None,
        aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
        disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        assert (qv, cu_seqlens_k, min_seqlen_k, seqused_q) == (None,) * 4
        assert arch != "sm90" or num_splits == 1, "SplitKV not supported on SM 9.0"
        page_size, _, head_dim = k.shape[1:]
        assert v.shape[:3] == k.shape[:3]
        assert page_size not in TILES, "rows behind the end would have to be finite"
        assert head_dim % 16 == v.shape[3] % 16 == 0
        assert head_dim <= 128 or (head_dim, v.shape[3]) in ((192, 128), (256, 256))
        assert q.dtype == k.dtype == v.dtype
        assert all(stride * 2 % 16 == 0 for stride in q.stride()[:-1])
        assert page_table.stride(1) == 1
        assert page_table.shape[0] == seqused_k.shape[0]
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(seqused_k.max())
        left, right = window_size
        assert (left, right) == (None, None) or (causal and right == 0)
        result, lse = attend(
            q, k, v, page_table, seqused_k, cu_seqlens_q, scale=softmax_scale, causal=causal, soft_cap=softcap,
            window_left=-1 if left is None else left, sinks=learnable_sink, loads=Loads(first_tile=64),
        )  # fmt: skip
        if learnable_sink is not None:
            assert learnable_sink.shape == q.shape[1:2]
            assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
            lse = torch.logaddexp(lse, learnable_sink.float())
        return result.to(q.dtype), lse.T.contiguous() if return_lse else None

    return flash_attn_varlen_func


@pytest.fixture
def emulation(monkeypatch):
    return lambda device: monkeypatch.setattr(
        fa4, "flash_attn_cute", SimpleNamespace(flash_attn_varlen_func=emulated(device.arch))
    )


@pytest.mark.parametrize(("backend", "case"), chosen(Backend, CASES, HEAD_CASES))
def test_the_adapter_is_right_in_every_case_that_it_declares(emulation, backend, case):
    emulation(BLACKWELL)
    assert check_case(backend, case, BLACKWELL, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ON_HOPPER], ids=lambda case: case.name)
def test_hopper_is_not_asked_to_split_keys(emulation, case):
    emulation(HOPPER)
    assert check_case(Backend, case, HOPPER, torch.seed() % (1 << 31)).failure is None


def test_it_is_for_prefill_first_and_for_decode_on_hopper_last():
    spec, load = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64), Load(num_seqs=32, kv_len=4096)
    ranks = [
        Backend.capabilities.priority_for(device, spec, role, load)
        for device in (BLACKWELL, HOPPER)
        for role in ("prefill", "decode")
    ]
    assert ranks == [90, 60, 60, 20]


def test_flash_attn_4_is_called_as_it_is():
    reason = "needs flash-attn-4 and what it compiles with"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        pytest.skip(reason)
    cute = pytest.importorskip("flash_attn.cute", reason=reason, exc_type=ImportError)
    assert_called_alike(cute.flash_attn_varlen_func, emulated("sm100"))
