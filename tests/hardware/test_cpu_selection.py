"""What is chosen on CPUs, from their facts and the backends' declarations alone, and why."""

import dataclasses
import importlib.metadata

import pytest

import anyattn
from anyattn import AttentionSpec
from anyattn.attention.presets import PRESETS
from anyattn.platforms import simulated

GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
MLA = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
X86 = {"xeon-amx": 60, "epyc": 60, "xeon-avx2": 40}


def verdicts(spec, device, name, **arguments):
    found = anyattn.survey(spec, device=device, **arguments)
    return [verdict for verdict in found.verdicts[spec] if verdict.name == name]


def reasons(spec, device, name, **arguments):
    """What speaks against a backend: (field, wanted, supported) of each reason in any role."""
    return {
        (reason.field, reason.wanted, reason.supported)
        for verdict in verdicts(spec, device, name, **arguments)
        for reason in verdict.reasons
    }


def chosen(spec, device, **arguments):
    """Of both roles, where no other backend shares decode at any load."""
    selection = anyattn.survey(spec, device=device, **arguments).selection
    assert selection.decode_by_load is None
    return selection.prefill, selection.decode


@pytest.mark.parametrize("name", X86)
@pytest.mark.parametrize(
    "spec",
    [
        GQA,
        GQA.replace(dtype="float32"),
        GQA.replace(dtype="float16"),
        GQA.replace(kv_dtype="float8_e4m3fn"),
        GQA.replace(sliding_window=1024),
        GQA.replace(logits_soft_cap=30.0),
        GQA.replace(sinks=True),
        GQA.replace(return_lse=True),
        GQA.replace(head_dim=72),
        GQA.replace(deterministic=True),
        MLA,
        MLA.replace(kv_dtype="float8_e4m3fn"),
    ],
    ids=str,
)
def test_an_x86_cpu_has_intel_cpu_in_both_roles_of_whichever_vendor_it_is(name, spec):
    assert chosen(spec, f"sim:{name}") == ("intel_cpu", "intel_cpu")
    assert {verdict.priority for verdict in verdicts(spec, f"sim:{name}", "intel_cpu")} == {X86[name]}


@pytest.mark.parametrize("name", X86)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "mpt-7b"])
def test_models_without_alibi_have_intel_cpu_in_all_their_layers(name, preset):
    found = anyattn.survey(AttentionSpec.from_preset(preset), device=f"sim:{name}")
    assert {(each.prefill, each.decode) for each in found.selections.values()} == {("intel_cpu", "intel_cpu")}


@pytest.mark.parametrize("name", X86)
@pytest.mark.parametrize("feature", ["tree_mask", "alibi"])
def test_trees_and_alibi_go_to_another_backend_with_the_reason(name, feature):
    spec = GQA.replace(**{feature: True})
    assert chosen(spec, f"sim:{name}") == ("torch_native", "torch_native")
    assert (feature, "True", "False") in reasons(spec, f"sim:{name}", "intel_cpu")
    assert f"{feature}: wanted True, supported False" in anyattn.survey(spec, device=f"sim:{name}").explain()


@pytest.mark.parametrize("spec", [GQA, MLA, GQA.replace(sinks=True), GQA.replace(alibi=True)], ids=str)
def test_on_arm_torchs_operators_are_chosen_and_intel_cpu_is_refused_by_its_arch(spec):
    assert chosen(spec, "sim:graviton4") == ("torch_native", "torch_native")
    assert ("arch", "aarch64", "x86_64") in reasons(spec, "sim:graviton4", "intel_cpu")
    explained = anyattn.survey(spec, device="sim:graviton4").explain()
    assert "intel_cpu: " in explained
    assert "arch: wanted aarch64, supported x86_64" in explained


@pytest.mark.parametrize("lacking", ["avx2", "fma", "f16c"])
def test_an_x86_cpu_without_an_instruction_set_that_is_compiled_for_refuses_it(lacking):
    device = dataclasses.replace(simulated.XEON_AVX2, features=simulated.XEON_AVX2.features - {lacking})
    assert chosen(GQA, device) == ("torch_native", "torch_native")
    told = reasons(GQA, device, "intel_cpu")
    assert told == {("features", lacking, "devices with avx2, f16c, fma")}


def test_amx_is_torchs_to_use_and_avx512_decides_the_priority():
    without_amx = {name for name in simulated.XEON_AMX.features if not name.startswith("amx")}
    for features, priority in ((without_amx, 60), (without_amx - {"avx512f"}, 40)):
        device = dataclasses.replace(simulated.XEON_AMX, features=frozenset(features))
        assert chosen(GQA, device) == ("intel_cpu", "intel_cpu")
        assert verdicts(GQA, device, "intel_cpu")[0].priority == priority


@pytest.mark.parametrize("name", X86)
def test_without_numba_torchs_operators_are_chosen_and_the_package_is_named(name, monkeypatch):
    version = importlib.metadata.version

    def absent(distribution):
        if distribution == "numba":
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version(distribution)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    device = f"sim:{name}"
    assert chosen(GQA, device) == ("intel_cpu", "intel_cpu")  # taken as installed there
    assert chosen(GQA, device, installed_only=True) == ("torch_native", "torch_native")
    refused = verdicts(GQA, device, "intel_cpu", installed_only=True)[0]
    (reason,) = refused.reasons
    assert (reason.field, reason.wanted, reason.supported) == ("package", "numba>=0.62", "not installed")
    assert reason.remedy == 'pip install "anyattn[cpu]"'
    explained = anyattn.survey(GQA, device=device, installed_only=True).explain()
    assert 'package: wanted numba>=0.62, supported not installed; pip install "anyattn[cpu]"' in explained
