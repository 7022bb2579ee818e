"""The example device is found where its variable says so, and is served by its own backend and allocator."""

import os

import pytest
import torch

import anyattn
from anyattn_example_plugin.backend import ExampleBackend

SPEC = anyattn.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, dtype="float32")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ANYATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ANYATTN_PLUGINS", "example")  # what others offer may be better
    monkeypatch.setenv("EXAMPLE_DEVICES", "1")


def runtime(device, spec=SPEC):
    return anyattn.create_runtime(spec, num_layers=1, num_pages=32, device=device)


def found():
    return [device for device in anyattn.detect().devices if device.kind == "example"]


def test_the_example_device_chooses_its_own_backend_and_allocator_by_priority():
    selection = runtime("example").selection
    assert selection.platform.kind == "example"
    assert (selection.prefill, selection.decode) == ("example_gather", "example_gather")
    assert selection.allocator == "example_lowest_first"
    text = selection.explain()
    assert f"example_gather: priority {ExampleBackend.capabilities.priority}, from anyattn-example-plugin" in text
    assert "torch_native: valid, with priority 10" in text
    assert "allocator paged: valid, with priority 0" in text


def test_what_it_does_not_declare_goes_to_a_backend_that_runs_anywhere():
    selection = runtime("example", SPEC.replace(dtype="bfloat16")).selection
    assert selection.platform.kind == "example"
    assert selection.decode == "torch_native"
    assert "example_gather: dtype: wanted bfloat16, supported float32" in selection.explain()


def test_attention_on_the_example_device_is_torchs():
    rt = runtime("example")
    seqs = rt.new_sequences(2)
    q, k, v = torch.randn(7, 4, 64), torch.randn(7, 2, 64), torch.randn(7, 2, 64)
    out = rt.run(0, q, k, v, rt.plan(rt.extend(seqs, [5, 2])))
    for rows in (slice(0, 5), slice(5, 7)):
        heads = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[rows], wanted[0].transpose(0, 1))


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=repr)
def test_the_cpu_is_still_the_cpu_beside_it(device):
    selection = runtime(device).selection
    assert selection.platform.kind == "cpu"
    assert selection.decode != "example_gather"
    assert "example_gather: device_kind: wanted cpu, supported example" in selection.explain()


def test_no_device_is_found_where_the_variable_is_not_set(monkeypatch):
    monkeypatch.delenv("EXAMPLE_DEVICES")
    assert found() == []
    with pytest.raises(anyattn.NoDeviceError, match="No device 'example' can be used here"):
        runtime("example")


@pytest.mark.parametrize("text", ["2", "-1", "many", ""])
def test_a_number_of_devices_that_cannot_be_emulated_is_said_in_words(monkeypatch, text):
    monkeypatch.setenv("EXAMPLE_DEVICES", text)
    assert found() == []
    assert any(f"EXAMPLE_DEVICES is {text!r}: set it to 0 or 1" in problem for problem in anyattn.detect().problems)


def test_the_same_is_chosen_on_the_simulated_device(monkeypatch):
    monkeypatch.delenv("EXAMPLE_DEVICES")
    selection = anyattn.survey(SPEC, device="sim:example1").selection
    assert (selection.decode, selection.allocator) == ("example_gather", "example_lowest_first")
