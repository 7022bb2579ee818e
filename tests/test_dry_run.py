"""`survey`: what would be chosen, here or elsewhere, with nothing allocated and nothing left unsaid."""

import dataclasses

import pytest

import anyattn
from anyattn import AttentionSpec, NoDeviceError, SpecError
from anyattn.discovery import device_names
from anyattn.plugins.manager import PluginManager

SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
H100 = PluginManager(entry_points=[]).simulated_devices()["h100"].load()


def test_layers_of_several_kinds_are_told_apart():
    text = anyattn.survey(AttentionSpec.from_preset("gemma-3-27b"), device="sim:h100").explain()
    assert "layers    0-4, 6-10, 12-16" in text
    assert "layers    5, 11, 17" in text
    assert "sim:h100 (NVIDIA H100 80GB HBM3, sm90), simulated: packages are taken as installed" in text


def test_what_cannot_be_is_an_answer_and_what_means_nothing_an_error():
    assert "There is no simulated device 'sim:h9'" in anyattn.survey(SPEC, device="sim:h9").explain()
    assert "Was sim:h100, the simulated one, meant?" in str(anyattn.survey(SPEC, device="h100").error)
    assert anyattn.survey(SPEC, device="cpu", page_size=5000).selection is None
    for arguments in (
        {"page_size": 0}, {"page_size": True}, {"page_size": "16"}, {"layout": "nhd"}, {"backend": ["a"]},
        {"joined_layers": 1}, {"joined_layers": None},
        {"backend": ""}, {"decode_backend": []}, {"decode_backend": [""]}, {"pool": 3}, {"device": ""},
    ):  # fmt: skip
        with pytest.raises(SpecError):
            anyattn.survey(SPEC, **arguments)
    with pytest.raises(SpecError, match="num_layers must be an integer from 1 to"):
        anyattn.create_runtime(SPEC, num_layers=10**9, num_pages=1)
    both = anyattn.survey(SPEC, device="cpu", decode_backend="torch_native, reference").selection
    assert both.preference.decode_backends == ("torch_native", "reference")
    with pytest.raises(SpecError, match="0 specs were given for at least one layer"):
        anyattn.survey([])
    with pytest.raises(SpecError, match=r"layer 0 is \[8/2 heads of 64.*layer 2 is \[8/2 heads of 32"):
        anyattn.survey([SPEC, SPEC, SPEC.replace(head_dim=32)])


def test_joined_layers_are_judged_as_create_runtime_would():
    strided = anyattn.survey(SPEC, device="sim:h100", joined_layers=True)
    assert strided.selection.preference.joined_layers
    assert "joined layers" in strided.explain()
    refused = {v.name: v.reasons for v in strided.verdicts[SPEC]}["fa4"]
    assert {reason.field: reason.remedy for reason in refused} == {"joined_layers": "set joined_layers=False"}
    assert anyattn.survey(SPEC, device="sim:h100").selection.decode == "triton"
    by_name = anyattn.survey(SPEC, device="sim:h100", joined_layers=True, backend="fa4")
    assert "joined_layers: wanted pages of joined layers" in str(by_name.error)


def test_a_device_whose_kind_torch_calls_otherwise_answers_to_torchs_name():
    """As torch for ROCm does, whose devices are called cuda."""
    found = dataclasses.replace(H100, simulated=False, kind="rocm", torch_device="cuda:0")
    for name in ("rocm", "cuda", "cuda:0"):
        assert name in device_names(found)
    assert "cuda" not in device_names(dataclasses.replace(found, torch_device="cuda:1"))


@pytest.mark.parametrize("name", ["cpu", "cpu:0", " cpu "])
def test_a_device_answers_to_its_kind_and_to_torchs_names(name):
    torch = pytest.importorskip("torch", reason="needs torch")
    for device in (name, torch.device(name.strip())):
        assert anyattn.survey(SPEC, device=device).device.kind == "cpu"


def test_nothing_runs_on_what_is_simulated_broken_or_unknown_to_torch():
    pytest.importorskip("torch", reason="needs torch")
    broken = dataclasses.replace(H100, simulated=False, torch_device="cuda:0", problems=("no driver",))
    unknown = dataclasses.replace(H100, simulated=False, torch_device="zap:0")
    for device, message in (
        ("sim:h100", "is simulated: nothing runs on it"),
        (H100, "is simulated: nothing runs on it"),
        (broken, "cannot be used here: no driver"),
        (unknown, "torch cannot drive zap:0"),
    ):
        with pytest.raises(NoDeviceError, match=message):
            anyattn.create_runtime(SPEC, num_layers=1, num_pages=4, device=device)
    verdicts = anyattn.survey(SPEC, device=broken).verdicts[SPEC]
    assert all("device" in {reason.field for reason in verdict.reasons} for verdict in verdicts)


def test_a_platform_takes_all_layers_of_a_model():
    layers = AttentionSpec.from_preset("gpt-oss-20b")
    assert "flash_attn" in H100.backends(layers)
    assert "torch_varlen" not in H100.backends([spec.replace(alibi=True) for spec in layers])
    assert H100.backends(layers)[0] == H100.backends(layers[0])[0]
    with pytest.raises(SpecError):
        H100.backends("llama-3-8b")


def test_a_misspelled_variable_is_told_with_every_answer(monkeypatch):
    monkeypatch.setenv("ANYATTN_BACKEND", "reference")
    assert "ANYATTN_BACKEND is set, and anyattn reads no such variable" in anyattn.survey(SPEC, device="cpu").explain()


@pytest.mark.parametrize(
    "fields",
    [
        {"features": None}, {"graph": 7}, {"memory_total_bytes": 1.5}, {"torch_device": ["x"]}, {"problems": "x"},
        {"features": frozenset({1})}, {"simulated": 1}, {"num_cores": True}, {"kind": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_platform_that_means_nothing_cannot_be_made(fields):
    with pytest.raises(TypeError, match=next(iter(fields))):
        dataclasses.replace(H100, **fields)
