"""The XQA adapter on the CPU, against an emulation with FlashInfer 0.6.13's signature.

0.7.4 has a further parameter, which is optional. The generic kernel fills what lies behind a sequence's end with zeros;
Hopper's for fp8 loads whole pages.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import AttentionSpec, GraphLevel, Platform
from anyattn.hardware_backend.cuda import xqa
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.types import Load

sys.path.append(str(Path(__file__).parent))
from paged_kernel import GRAPHS, HEAD_CASES, Loads, assert_called_alike, attend, chosen, is_capturing

HOPPER = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu", graph=GraphLevel.ALWAYS
)
CONSUMER = dataclasses.replace(HOPPER, arch="sm120")
Backend = xqa.XQABackend
CASES = list(cases_for(Backend.capabilities))
COUNTER_BYTES = 8 << 20
FP8 = torch.float8_e4m3fn


def emulated(arch):
    def xqa_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0,
        mask=None, kv_cache_sf=None,
    ):  # fmt: skip
        assert (q_len_per_req, o_scale, mask, kv_cache_sf, enable_pdl) == (1, 1.0, None, None, None)
        k_pages, v_pages = kv_cache if kv_layout == "NHD" else (part.transpose(1, 2) for part in kv_cache)
        page_size, num_kv_heads, head_dim = k_pages.shape[1:]
        assert page_size in (16, 32, 64, 128)
        assert head_dim % 16 == 0
        assert head_dim <= 256
        assert k_pages.stride() == v_pages.stride()  # the kernels use that of keys, in heads
        assert all(stride % head_dim == 0 for stride in k_pages.stride()[:-1])
        assert query.is_contiguous()
        assert out.is_contiguous()
        assert out.dtype == query.dtype
        assert seq_lens.dtype == torch.uint32
        assert block_tables.is_contiguous()
        assert max_seq_len <= block_tables.shape[1] * page_size
        assert workspace_buffer.view(torch.uint8).numel() > COUNTER_BYTES
        assert is_capturing() or not workspace_buffer[:COUNTER_BYTES].any(), "counters must be zero before a launch"
        assert sinks is None or sinks.dtype == torch.float32
        for scale in (bmm1_scale, bmm2_scale):
            assert type(scale) is float or (scale.dtype == torch.float32 and scale.numel() == 1)
        # As FlashInfer passes them on: one scale for keys and values, the rest in q's.
        q_scale = bmm1_scale / (bmm2_scale * o_scale) * head_dim**0.5
        kv_scale = bmm2_scale * o_scale if k_pages.dtype == FP8 else 1.0
        per_head = None if sinks is None else sinks.reshape(num_kv_heads, -1).flatten()
        tile = min(64, page_size) if k_pages.dtype == FP8 and arch == "sm90" else 1  # no page behind the last is read
        result, _ = attend(
            query, k_pages, v_pages, block_tables, seq_lens.view(torch.int32),
            torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32), scale=head_dim**-0.5, k_scale=q_scale * kv_scale,
            v_scale=kv_scale, window_left=window_left, sinks=per_head, loads=Loads(tile=tile),
        )  # fmt: skip
        return out.copy_(result)

    return xqa_batch_decode_with_kv_cache


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    monkeypatch.setattr(xqa, "_WORKSPACE_BYTES", COUNTER_BYTES + 16)  # what is not emulated takes its time
    return lambda device: monkeypatch.setattr(
        xqa, "flashinfer", SimpleNamespace(decode=SimpleNamespace(xqa_batch_decode_with_kv_cache=emulated(device.arch)))
    )


@pytest.mark.parametrize(("backend", "case"), chosen(Backend, CASES, HEAD_CASES))
def test_the_adapter_is_right_in_every_case_that_it_declares(emulation, backend, case):
    emulation(HOPPER)
    assert check_case(backend, case, HOPPER, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(("backend", "case"), chosen(Backend, CASES, ("KV float8_e4m3fn, tensor", "sliding_window=33")))
def test_the_generic_kernel_serves_other_gpus(emulation, backend, case):
    emulation(CONSUMER)
    assert check_case(backend, case, CONSUMER, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(("backend", "check"), chosen(Backend, graph_checks(Backend, HOPPER), GRAPHS))
def test_a_graph_serves_later_steps(emulation, backend, check):
    emulation(HOPPER)
    check.run(torch.seed() % (1 << 31))


def test_it_comes_first_on_consumer_gpus_only():
    spec, load = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64), Load(num_seqs=32, kv_len=4096)
    ranks = [Backend.capabilities.priority_for(device, spec, "decode", load) for device in (HOPPER, CONSUMER)]
    assert ranks == [40, 60]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python")
def test_flashinfer_is_called_as_it_is():
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    assert_called_alike(xqa_batch_decode_with_kv_cache, emulated("sm90"))
