"""The adapter of torch's attention over pages on the CPU, against an emulation, as torch has no CPU kernel for it.

The emulation's signature is held against torch's own. The kernel is FlashAttention 2: it fills what lies behind a
sequence's end with zeros, and skips tiles that lie wholly behind a window.
"""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import Platform
from anyattn.hardware_backend.cuda import torch_varlen
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case

sys.path.append(str(Path(__file__).parent))
from paged_kernel import HEAD_CASES, Loads, attend, chosen, shortened

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.13")
AMPERE = Platform(kind="cuda", vendor="nvidia", name="emulated", arch="sm80", torch_device="cpu")
Backend = torch_varlen.TorchVarlenBackend
takes_pages = "block_table" in inspect.signature(varlen.varlen_attn).parameters


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    page_size, num_kv_heads, head_dim = key.shape[1:]
    assert cu_seq_k is None
    assert page_size % 256 == 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert value.shape == key.shape
    assert query.dtype == key.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.is_contiguous()
    assert enable_gqa or query.shape[1] == num_kv_heads
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k == int(seqused_k.max())
    left, right = window_size
    assert right in (0, -1)
    result, lse = attend(
        query, key, value, block_table, seqused_k, cu_seq_q, scale=scale, causal=right == 0, window_left=left,
        loads=Loads(first_tile=64),
    )  # fmt: skip
    out = result.to(query.dtype)
    return (out, lse.T.contiguous()) if return_aux is not None and return_aux.lse else out


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    made = SimpleNamespace(varlen_attn=varlen_attn, AuxRequest=varlen.AuxRequest)
    monkeypatch.setattr(torch_varlen, "varlen", made)


@pytest.mark.parametrize(("backend", "case"), chosen(Backend, shortened(cases_for(Backend.capabilities)), HEAD_CASES))
def test_the_adapter_is_right_in_every_case_that_it_declares(backend, case):
    assert check_case(backend, case, AMPERE, torch.seed() % (1 << 31)).failure is None


@pytest.mark.skipif(not takes_pages, reason="needs torch 2.13")
def test_torch_is_called_as_it_is():
    def parameters(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(varlen.varlen_attn) == parameters(varlen_attn)
    assert varlen.AuxRequest._fields == ("lse",)


@pytest.mark.skipif(not takes_pages, reason="needs torch 2.13")
def test_torchs_lse_has_heads_first():
    """Whatever its documentation says; on the meta device it answers without a kernel."""
    q, pages, starts = (torch.empty(size, device="meta") for size in ((5, 8, 64), (3, 256, 2, 64), (3,)))
    _, lse = varlen.varlen_attn(
        q, pages, pages, starts, None, 3, 256, return_aux=varlen.AuxRequest(lse=True), window_size=(-1, 0),
        enable_gqa=True, seqused_k=starts, block_table=starts,
    )  # fmt: skip
    assert lse.shape == (8, 5)
