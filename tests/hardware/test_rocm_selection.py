"""What is chosen on AMD's Instincts, from their facts and the backends' declarations alone, and why."""

import pytest

import anyattn
from anyattn import AttentionSpec

GQA = AttentionSpec(num_qo_heads=8, num_kv_heads=1, head_dim=128)
ROUNDED = GQA.replace(may_quantize_q=True, may_quantize_probs=True)
FNUZ, OCP = ROUNDED.replace(kv_dtype="float8_e4m3fnuz"), ROUNDED.replace(kv_dtype="float8_e4m3fn")


def mla(heads, **fields):
    return AttentionSpec.mla(num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1, **fields)


def chosen(device, spec, **arguments):
    selection = anyattn.survey(spec, device=device, **arguments).selection
    return selection.prefill, selection.decode


@pytest.mark.parametrize(
    ("spec", "cdna3", "cdna4"),
    [
        (GQA, ("aiter", "aiter_paged"), ("aiter", "aiter_paged_ocp")),
        (GQA.replace(graph="always"), ("aiter", "aiter_paged"), ("aiter", "aiter_paged_ocp")),
        (GQA.replace(sliding_window=64), ("triton", "aiter_paged"), ("triton", "aiter_paged_ocp")),
        (GQA.replace(head_dim=64), ("triton", "aiter_paged"), ("triton", "aiter_paged_ocp")),
        (GQA.replace(return_lse=True), ("aiter", "triton"), ("aiter", "triton")),
        (GQA.replace(sinks=True), ("triton", "triton"), ("triton", "triton")),
        (FNUZ, ("triton", "aiter_paged"), ("triton", "triton")),
        (OCP, ("triton", "triton"), ("triton", "aiter_paged_ocp")),
        (mla(16), ("aiter_mla_prefill", "aiter_mla"), ("aiter_mla_prefill", "aiter_mla_ocp")),
        (mla(32), ("triton", "aiter_mla"), ("triton", "aiter_mla_ocp")),
        (mla(128), ("aiter_mla_prefill", "triton"), ("aiter_mla_prefill", "triton")),
        (mla(16, kv_dtype="float8_e4m3fnuz"), ("triton", "aiter_mla"), ("triton", "triton")),
    ],
    ids=str,
)
def test_aiter_and_triton_share_what_there_is_to_do(spec, cdna3, cdna4):
    assert (chosen("sim:mi300x", spec), chosen("sim:mi355x", spec)) == (cdna3, cdna4)


@pytest.mark.parametrize("device", ["sim:mi300x", "sim:mi355x"])
def test_pages_in_layout_5d_are_of_aiters_asm_kernels_in_both_roles(device):
    assert chosen(device, GQA, layout="5D") == ("aiter_asm", "aiter_asm")


def test_what_aiter_lacks_is_said_where_triton_stands_in_for_it():
    told = anyattn.survey(GQA.replace(sinks=True), device="sim:mi300x").explain()
    assert "triton" in told
    assert "sinks: wanted True, supported False" in told
    told = anyattn.survey(OCP, device="sim:mi300x").explain()
    assert "kv_dtype: wanted float8_e4m3fn, supported auto, float8_e4m3fnuz" in told
