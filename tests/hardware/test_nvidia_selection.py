"""What is chosen on NVIDIA's generations, from their facts and the backends' declarations alone, and why."""

import pytest

import anyattn
from anyattn import AttentionSpec
from anyattn.types import Load

GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
FP8 = GQA.replace(kv_dtype="float8_e4m3fn")
TREES = GQA.replace(tree_mask=True)
ALIBI = GQA.replace(alibi=True)
HEADS_OF_72 = GQA.replace(head_dim=72)


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
        ("sim:h200", GQA, "fa3", ("triton",)),
        ("sim:h100", GQA.replace(graph="decode"), "fa3", ("triton",)),
        ("sim:h200", GQA.replace(graph="always"), "fa3", ("triton",)),
        ("sim:h200", FP8, "flashinfer", ("triton",)),
        ("sim:h200", FP8.replace(may_quantize_q=True, may_quantize_probs=True), "fa3", ("triton",)),
        ("sim:h200", TREES, "flashinfer", ("triton",)),
        ("sim:h200", mla(128), "fa3", ("fa3", "flashinfer_mla")),
        ("sim:h200", mla(16, graph="decode"), "fa3", ("flashinfer_mla", "triton")),
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


@pytest.mark.parametrize("device", ["sim:h100", "sim:h200"])
@pytest.mark.parametrize(
    ("heads", "num_seqs", "decode"),
    [(16, 1, "triton"), (16, 4, "triton"), (16, 8, "flashinfer_mla"), (16, 128, "flashinfer_mla"), (8, 4, "triton")],
)
def test_on_hopper_triton_decodes_few_mla_heads_of_few_sequences(device, heads, num_seqs, decode):
    by_load = anyattn.survey(mla(heads, graph="decode"), device=device).selection.decode_by_load
    for kv_len in (1024, 131072):
        assert by_load.pick(Load(num_seqs=num_seqs, kv_len=kv_len)) == decode


@pytest.mark.parametrize(
    ("device", "spec", "prefill", "decode"),
    [
        ("sim:mi300x", FP8, "triton", "triton"),
        ("sim:mi355x", TREES, "triton", "triton"),
        ("sim:pvc", TREES, "triton", "triton"),
        ("sim:pvc", mla(128), "triton", "triton"),
        ("sim:rtx5090", HEADS_OF_72, "triton", "triton"),
        ("sim:rtx5090", ALIBI, "triton", "triton"),
        ("sim:b200", HEADS_OF_72, "triton", "triton"),
        ("sim:b200", ALIBI, "triton", "triton"),
        ("sim:a100", HEADS_OF_72, "flash_attn", "triton"),
        ("sim:a100", ALIBI, "flash_attn", "triton"),
        ("sim:a100", ALIBI.replace(kv_dtype="float8_e4m3fn"), "triton", "triton"),
    ],
    ids=str,
)
def test_where_no_vendors_kernel_fits_triton_is_chosen(device, spec, prefill, decode):
    selection = anyattn.survey(spec, device=device).selection
    assert (selection.prefill, selection.backends("decode")) == (prefill, (decode,))
    verdicts = [verdict for verdict in selection.verdicts if verdict.name == "triton"]
    assert {verdict.role for verdict in verdicts if not verdict.reasons} == {"prefill", "decode"}


@pytest.mark.parametrize("spec", [GQA, mla(128)], ids=str)
@pytest.mark.parametrize("device", ["sim:a100", "sim:l40s", "sim:b200", "sim:rtx5090"])
def test_where_a_vendors_kernel_fits_triton_is_valid_and_behind_it(device, spec):
    selection = anyattn.survey(spec, device=device).selection
    assert "triton" not in (selection.prefill, *selection.backends("decode"))
    verdicts = [verdict for verdict in selection.verdicts if verdict.name == "triton"]
    assert [(verdict.role, verdict.reasons) for verdict in verdicts] == [("prefill", ()), ("decode", ())]


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
