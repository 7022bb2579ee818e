"""A plugin's backend takes part in selection by what it declares: it wins, loses and shares a role like any other."""

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, NoBackendError
from anyattn.attention.reference import reference_attention
from anyattn.types import Load

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=32, dtype="float32")

BACKENDS = """
import dataclasses
from anyattn.attention.torch_native import TorchNativeBackend

BUILT_IN = TorchNativeBackend.capabilities


def few_sequences(platform, spec, role, load):
    return 199 if role == "decode" and load.num_seqs < 8 else 2


def on_amx(platform, spec, role, load):
    return 80 if "amx_bf16" in platform.features else 1


class Fast(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=160, sinks=False, device_kinds=frozenset({"cpu"}))


class Faster(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=170, dtypes=frozenset({"bfloat16"}))


class Equal(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=160)


class Slow(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=-5)


class Small(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=few_sequences, preferred_page_size=None)


class Amx(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=on_amx)


class DecodeOnly(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=190, phases=frozenset({"decode"}))


class Demanding(TorchNativeBackend):
    capabilities = dataclasses.replace(BUILT_IN, priority=195, packages=("torch>=2.9", "no-such-kernels>=3"))
"""


@pytest.fixture
def offer(site, hook):
    """Installs a plugin, of a distribution of that name, that offers these backends."""

    def install(plugin, **backends):
        if not (site.folder / "auto_backends").exists():
            site.module("auto_backends", BACKENDS)
        places = {name: f"auto_backends:{attribute}" for name, attribute in backends.items()}
        site.plugin(plugin, hook("attention_backends", **places), version="3.1")

    return install


@pytest.fixture
def selected():
    """What would be chosen on a device for a spec."""
    return lambda spec=SPEC, device="cpu", **asked: anyattn.survey(spec, device=device, **asked).selection


@pytest.fixture
def built_in(selected):
    """What is chosen on this CPU before any plugin is installed: which built-in backend that is depends on the CPU."""
    return selected().decode


def test_before_a_plugin_is_installed_a_built_in_backend_is_chosen(selected, built_in):
    assert f"decode    {built_in}: priority " in selected().explain()
    assert ", from anyattn, " in selected().explain()


def test_the_higher_priority_wins_and_the_explanation_names_the_distribution(offer, selected):
    offer("fast-kernels", fast="Fast")
    found = selected()
    assert (found.prefill, found.decode) == ("fast", "fast")
    assert "decode    fast: priority 160, from fast-kernels, " in found.explain()
    assert "torch_native: valid, with priority 10" in found.explain()


def test_an_engine_runs_on_the_plugins_backend_without_naming_it(offer):
    offer("fast-kernels", fast="Fast")
    rt = anyattn.create_runtime(SPEC, num_layers=1, num_pages=8, device="cpu")
    assert "prefill   fast: priority 160, from fast-kernels" in rt.explain()
    assert "decode    fast: priority 160, from fast-kernels" in rt.selection.explain()
    seqs = rt.new_sequences(1)
    q, k, v = (torch.randn(5, heads, 32) for heads in (4, 2, 2))
    out = rt.run(0, q, k, v, rt.plan(rt.extend(seqs, [5])))
    torch.testing.assert_close(out.double(), reference_attention(SPEC, q, k, v)[0], rtol=0, atol=1e-5)


def test_where_its_declaration_refuses_it_loses_and_the_reason_is_told(offer, selected):
    before = selected(SPEC.replace(sinks=True))
    offer("fast-kernels", fast="Fast")
    found = selected(SPEC.replace(sinks=True))
    assert (found.prefill, found.decode) == (before.prefill, before.decode)
    assert "fast: sinks: wanted True, supported False" in found.explain()


def test_on_a_device_that_it_does_not_declare_it_loses(offer, selected):
    offer("fast-kernels", fast="Fast")
    found = selected(SPEC.replace(dtype="bfloat16"), "sim:mi300x")
    assert (found.prefill, found.decode) == ("triton", "triton")  # of priority 50, behind the plugin's 160
    assert "fast: device_kind: wanted rocm, supported cpu" in found.explain()


def test_a_lower_priority_loses(offer, selected, built_in):
    offer("slow-kernels", slow="Slow")
    assert selected().decode == built_in
    assert "slow: valid, with priority -5" in selected().explain()


def test_a_backend_of_one_role_fills_that_role_alone(offer, selected, built_in):
    offer("decoders", decoder="DecodeOnly")
    found = selected()
    assert (found.prefill, found.decode) == (built_in, "decoder")
    assert "decode    decoder: priority 190, from decoders" in found.explain()
    assert "decoder: prefill: phase: wanted mixed, prefill, supported decode" in found.explain()


def test_what_is_not_installed_keeps_it_out_and_is_named(offer, selected, built_in):
    offer("demanding-kernels", demanding="Demanding")
    found = selected()
    assert found.decode == built_in
    assert (
        'package: wanted no-such-kernels>=3, supported not installed; pip install "no-such-kernels>=3"'
        in found.explain()
    )


def test_a_priority_may_depend_on_the_device(offer, selected):
    offer("amx-kernels", amx="Amx")
    spec = SPEC.replace(dtype="bfloat16")
    assert selected(spec, "sim:xeon-amx").decode == "amx"
    elsewhere = selected(spec, "sim:ascend910b")
    assert elsewhere.decode == "fused_infer_attention"
    assert "amx: valid, with priority 1" in elsewhere.explain()
    assert selected(spec, "sim:mi300x").decode == "triton"


def test_of_two_plugins_the_best_that_is_valid_is_chosen(offer, selected):
    offer("fast-kernels", fast="Fast")
    offer("faster-kernels", faster="Faster")
    assert selected(SPEC.replace(dtype="bfloat16")).decode == "faster"
    found = selected()
    assert found.decode == "fast"
    assert "from fast-kernels" in found.explain()
    assert "faster: dtype: wanted float32, supported bfloat16" in found.explain()


def test_between_equals_of_two_plugins_the_name_decides_not_the_plugin(offer, selected):
    offer("a-plugin", zeta="Equal")
    offer("z-plugin", alpha="Equal")
    found = selected()
    assert found.decode == "alpha"
    assert "alpha: priority 160, from z-plugin" in found.explain()


def test_one_that_is_best_for_some_loads_shares_decode_with_the_best_for_the_others(offer):
    offer("fast-kernels", fast="Fast")
    offer("small-kernels", small="Small")
    rt = anyattn.create_runtime(SPEC, num_layers=1, num_pages=32, page_size=4, device="cpu")
    assert (rt.selection.prefill, rt.selection.backends("decode")) == ("fast", ("fast", "small"))
    text = rt.selection.explain()
    assert "decode    fast: priority 160, from fast-kernels" in text
    assert "small serves 1 to 7 sequences" in text
    assert rt.selection.decode_by_load.pick(Load(num_seqs=7, kv_len=100)) == "small"
    for num_seqs, name in ((2, "Small"), (8, "Fast")):
        seqs = rt.new_sequences(num_seqs)
        for count, served in ((3, "Fast"), (1, name)):
            plan = rt.plan(rt.extend(seqs, [count] * num_seqs))
            assert type(plan.steps[0].backend).__name__ == served
        rt.free(seqs)


def test_it_can_be_asked_for_and_ruled_out_by_name(offer, selected, built_in, monkeypatch):
    offer("fast-kernels", fast="Fast")
    offer("slow-kernels", slow="Slow")
    assert selected(backend="slow").decode == "slow"
    assert selected(backend="torch_native").decode == "torch_native"
    with pytest.raises(NoBackendError, match="Attention backend 'fast' was asked for and cannot serve"):
        anyattn.create_runtime(SPEC.replace(sinks=True), num_layers=1, num_pages=1, device="cpu", backend="fast")
    monkeypatch.setenv("ANYATTN_PLUGINS", "slow-kernels")
    assert selected().decode == built_in


def test_when_the_plugin_is_gone_the_choice_is_as_before(offer, selected, built_in, site):
    offer("fast-kernels", fast="Fast")
    assert selected().decode == "fast"
    (site.folder / "fast_kernels-3.1.dist-info" / "entry_points.txt").unlink()
    assert selected().decode == built_in
