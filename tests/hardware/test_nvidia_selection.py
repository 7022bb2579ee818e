"""What is chosen on NVIDIA's generations, from their facts and the backends' declarations alone, and why."""

import pytest

import anyattn
from anyattn import AttentionSpec

GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
FP8 = GQA.replace(kv_dtype="float8_e4m3fn")
TREES = GQA.replace(tree_mask=True)
ALIBI = GQA.replace(alibi=True)


def mla(heads, **fields):
    return AttentionSpec.mla(num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1, **fields)


def chosen(device, spec):
    selection = anyattn.survey(spec, device=device).selection
    by_load = selection.decode_by_load
    decodes = (selection.decode,) if by_load is None else by_load.backends()
    return selection.prefill, decodes


@pytest.mark.parametrize(
    ("device", "spec", "prefill", "decodes"),
    [
        ("sim:h200", GQA, "fa3", ("flashinfer",)),
        ("sim:h100", GQA.replace(graph="decode"), "fa3", ("flashinfer",)),
        ("sim:h200", GQA.replace(graph="always"), "fa3", ("flashinfer",)),
        ("sim:h200", FP8, "flashinfer", ("flashinfer",)),
        ("sim:h200", FP8.replace(may_quantize_q=True, may_quantize_probs=True), "fa3", ("flashinfer",)),
        ("sim:h200", TREES, "flashinfer", ("flashinfer",)),
        ("sim:h200", mla(128), "fa3", ("fa3", "flashinfer_mla")),
        ("sim:h200", mla(16, graph="decode"), "fa3", ("fa3", "flashinfer_mla")),
        ("sim:a100", GQA, "flashinfer", ("flashinfer",)),
        ("sim:a100", mla(128), "flashinfer_mla", ("flashinfer_mla",)),
        ("sim:l40s", GQA, "flashinfer", ("flashinfer",)),
        ("sim:b200", GQA, "trtllm_mha", ("trtllm_mha",)),
        ("sim:b200", mla(128), "flashinfer_mla", ("trtllm_mla",)),
        ("sim:rtx5090", GQA, "flashinfer", ("flashinfer",)),
    ],
    ids=str,
)
def test_each_generation_gets_what_is_best_on_it(device, spec, prefill, decodes):
    assert chosen(device, spec) == (prefill, decodes)


def test_two_gpus_of_different_generations_get_different_choices_in_one_process():
    hopper, ampere = (anyattn.survey(GQA, device=device).selection for device in ("sim:h100", "sim:a100"))
    assert (hopper.prefill, ampere.prefill) == ("fa3", "flashinfer")
    assert chosen("sim:h100", GQA)[0] == "fa3"


@pytest.mark.parametrize(
    ("device", "backend", "field"),
    [
        ("sim:a100", "fa3", "arch"),
        ("sim:l40s", "flashmla", "arch"),
        ("sim:b200", "fa3", "arch"),
        ("sim:h200", "trtllm_mha", "arch"),
        ("sim:rtx5090", "cutlass_mla", "arch"),
        ("sim:mi300x", "flashinfer", "device_kind"),
    ],
)
def test_what_is_not_for_a_generation_says_so(device, backend, field):
    spec = mla(128) if backend in ("flashmla", "cutlass_mla") else GQA
    verdicts = [v for v in anyattn.survey(spec, device=device).selection.verdicts if v.name == backend]
    assert verdicts
    assert all(field in {reason.field for reason in verdict.reasons} for verdict in verdicts)


def test_what_no_kernel_serves_is_refused_with_each_backends_reason():
    spec = mla(128).replace(kv_dtype="float8_e4m3fn", may_quantize_q=True, may_quantize_probs=True)
    found = anyattn.survey(spec, device="sim:h200", backend="fa3")
    assert found.selection is None
    assert "fp8 together with mla" in str(found.error)


def test_features_choose_other_backends_and_the_reasons_name_them():
    assert chosen("sim:a100", ALIBI)[0] not in ("fa3", "flashinfer")
    reasons = [
        reason
        for verdict in anyattn.survey(ALIBI, device="sim:h200").selection.verdicts
        if verdict.name == "fa3"
        for reason in verdict.reasons
    ]
    assert {reason.field for reason in reasons} == {"alibi"}
