"""What is chosen on Intel's GPUs, asked of simulated ones: the vendor's kernels, Triton's, torch's."""

import dataclasses

import pytest

import anyattn
from anyattn import AttentionSpec
from anyattn.discovery import candidates
from anyattn.plugins.manager import PluginManager

GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
MLA = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
BACKENDS = {each.name: each.capabilities for each in candidates(PluginManager(entry_points=[])).backends}


SERVED = (
    (GQA, "intel_xpu", 64),
    (GQA.replace(kv_dtype="float8_e5m2"), "intel_xpu", 64),
    (GQA.replace(sliding_window=1024, head_dim=256), "intel_xpu", 64),
    (GQA.replace(sinks=True), "intel_xpu", 64),
    (GQA.replace(num_kv_heads=2), "intel_xpu_grouped", 64),
    (GQA.replace(sinks=True, sliding_window=128, head_dim=64), "triton", 16),
    (GQA.replace(logits_soft_cap=50.0), "triton", 16),
    (GQA.replace(head_dim=192, v_head_dim=128), "triton", 16),
    (GQA.replace(dtype="float32"), "triton", 16),
    (GQA.replace(deterministic=True), "triton", 16),
    (MLA, "triton", 16),
)


@pytest.mark.parametrize(
    ("device", "spec", "backend", "page_size"),
    [*(("sim:b580", *each) for each in SERVED), ("sim:pvc", *SERVED[0]), ("sim:pvc", *SERVED[-1])],
    ids=str,
)
def test_the_vendors_kernels_are_chosen_where_they_serve_and_triton_elsewhere(device, spec, backend, page_size):
    selection = anyattn.survey(spec, device=device).selection
    assert (selection.prefill, selection.backends("decode")) == (backend, (backend,))
    assert selection.page_size == page_size


def test_graphs_are_tritons_over_pages_that_both_read():
    selection = anyattn.survey(GQA.replace(graph="decode"), device="sim:b580").selection
    assert (selection.prefill, selection.backends("decode"), selection.page_size) == ("intel_xpu", ("triton",), 64)


def test_where_neither_has_kernels_it_is_torch():
    lunar_lake = dataclasses.replace(anyattn.survey(GQA, device="sim:b580").device, arch="lnl_m")
    for name in ("intel_xpu", "intel_xpu_grouped", "triton"):
        (reason,) = (r for r in BACKENDS[name].reject_reasons(GQA, lunar_lake, "decode") if r.field == "arch")
        assert "use a device of arch" in reason.remedy
    assert not BACKENDS["torch_native"].reject_reasons(GQA, lunar_lake, "decode")
    assert not BACKENDS["torch_native"].reject_reasons(GQA, lunar_lake, "prefill")


def test_what_stands_behind_them_is_said():
    device = anyattn.survey(GQA, device="sim:b580").device
    assert BACKENDS["intel_xpu"].status_on(device) == "contract-tested"
    assert BACKENDS["triton"].status_on(device) == "declared"
    assert device.collective == "xccl"
