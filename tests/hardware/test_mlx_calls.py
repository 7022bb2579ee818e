"""The MLX adapter on the CPU: on MLX's own CPU build where it can be installed, and on an emulation everywhere."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, Platform
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.hardware_backend.apple import mlx as adapter
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.spec import CacheSpec
from anyattn.testing.numerics import determinism
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case

sys.path.append(str(Path(__file__).parent))
import mlx_emulation as emulated
from paged_kernel import chosen
from vendor_calls import wheel

APPLE = Platform(kind="apple", vendor="apple", name="emulated", arch="apple9", torch_device="cpu")
Backend = adapter.MLXBackend
NAMES = (
    "plain", "float16", "float32", "causal False", "layout HND", "page size 16", "head dim 192, 128", "KV heads: 1",
    "sliding_window=33", "sinks=True", "tree_mask=True", "see nothing", "strides", "mixed", "sequences without tokens",
    "end is read", "64 plain", "joined layers, H",
)  # fmt: skip
CASES = chosen(Backend, cases_for(Backend.capabilities), NAMES)
FP8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.fixture(params=["MLX's CPU build", "emulated"])
def mlx(request, monkeypatch):
    if request.param == "emulated":
        monkeypatch.setattr(adapter, "mx", emulated.MODULE)
        return
    if importlib.util.find_spec("mlx") is None:
        pytest.skip("needs mlx[cpu], whose wheels want glibc 2.35")
    pytest.importorskip("mlx.core", exc_type=ImportError)


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_the_adapter_is_right_in_cases_of_each_kind(mlx, backend, case):
    assert check_case(backend, case, APPLE, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize("check", [*determinism.checks(Backend, APPLE)][::10], ids=lambda check: check.name)
def test_rows_do_not_depend_on_other_sequences(mlx, check):
    check.run(torch.seed() % (1 << 31))


def test_the_declaration_names_the_wheel_whose_signatures_the_calls_are_bound_to():
    assert Backend.capabilities.contract_tested_with == wheel("mlx")


@pytest.mark.parametrize("limit", ["_GATHERED_BYTES", "_SCORE_ELEMENTS"])
@pytest.mark.parametrize("name", ["plain", "sliding_window=33", "mixed", "sequences without tokens"])
def test_batches_and_prompts_that_are_taken_in_parts_come_out_the_same(mlx, monkeypatch, limit, name):
    monkeypatch.setattr(adapter, limit, 1 << 12)
    case = min((case for case in cases_for(Backend.capabilities) if name in case.name), key=lambda case: len(case.name))
    assert check_case(Backend, case, APPLE, torch.seed() % (1 << 31)).failure is None


def test_mps_is_waited_for_before_mlx_reads(monkeypatch):
    """As MLX documents its exchange with PyTorch: `torch.mps.synchronize()`, then the import."""
    order = []
    monkeypatch.setattr(adapter, "mx", emulated.MODULE)
    monkeypatch.setattr(emulated.MODULE, "from_dlpack", lambda x: order.append("import") or emulated.from_dlpack(x))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: order.append("wait"))
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=2, head_dim=8, dtype="float32")
    cache = CacheSpec(num_layers=1, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype="float32", page_size=4)
    kv = torch.zeros(2, 4, 2, 8)
    sequence = adapter._Sequence(first=0, num_keys=3, num_queries=1, tree_mask=None)
    plan = [adapter._Group(pages=torch.tensor([1], dtype=torch.int32), rows=slice(0, 1), sequences=[sequence])]

    class OnMPS(torch.Tensor):
        device = torch.device("mps")

    q, out = torch.zeros(1, 2, 8), torch.ones(1, 2, 8)
    Backend(spec, cache, APPLE).run(q.as_subclass(OnMPS), LayerKV(k=kv, v=kv, layout="NHD"), plan, out)
    assert order == ["wait", "import", "import", "import"]
    assert not out.any()


def attended(**changed):
    arguments = {
        "q": (1, 4, 3, 16), "k": (1, 2, 5, 16), "v": (1, 2, 5, 16), "dtype": torch.bfloat16, "scale": 0.25,
        "mask": "causal", **changed,
    }  # fmt: skip
    dtype = arguments.pop("dtype")
    for name in ("q", "k", "v"):
        arguments[name] = emulated.Array(torch.zeros(arguments[name], dtype=dtype))
    return emulated.scaled_dot_product_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"),
                                                 **arguments)  # fmt: skip


VIOLATIONS = {
    "no scale": {"scale": None, "unknown": 1},
    "heads without a batch": {"q": (4, 3, 16)},
    "keys of another head dim": {"k": (1, 2, 5, 8)},
    "query heads that KV heads do not divide": {"q": (1, 3, 3, 16)},
    "values of fewer tokens": {"v": (1, 2, 4, 16)},
    "more queries than keys, causal": {"q": (1, 4, 6, 16)},
    "a mask of another name": {"mask": "window"},
    "an additive mask of another type": {"mask": emulated.Array(torch.zeros(3, 5, dtype=torch.float64))},
    "integers": {"dtype": torch.int32},
    "sinks that would be rounded": {"sinks": emulated.Array(torch.zeros(4))},
    "a sink for each KV head": {"sinks": emulated.Array(torch.zeros(2, dtype=torch.bfloat16))},
}


def test_the_call_that_the_violations_change_is_taken():
    assert attended().shape == (1, 4, 3, 16)


@pytest.mark.parametrize("what", VIOLATIONS)
def test_the_emulation_refuses_what_is_documented_not_to_be_taken(what):
    with pytest.raises((AssertionError, TypeError)):
        attended(**VIOLATIONS[what])


def test_what_is_not_evaluated_cannot_be_read_by_torch():
    array = emulated.Array(torch.zeros(2))
    with pytest.raises(AssertionError, match=r"mx\.eval"):
        torch.from_dlpack(array)
    emulated.evaluate(array)
    assert torch.from_dlpack(array).shape == (2,)


def test_fp8_is_not_imported():
    with pytest.raises(AssertionError, match="dtype"):
        emulated.from_dlpack(torch.zeros(2).to(torch.float8_e4m3fn))


GQA = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)


def test_mlx_is_chosen_where_it_can_serve_and_torch_elsewhere():
    def chosen_for(spec):
        selection = anyattn.survey(spec, device="sim:m3").selection
        return selection.prefill, selection.backends("decode")

    assert chosen_for(GQA) == ("mlx", ("mlx",))
    assert chosen_for(GQA.replace(sliding_window=128, sinks=True)) == ("mlx", ("mlx",))
    for fields in ({"return_lse": True}, {"logits_soft_cap": 30.0}, {"alibi": True}):
        assert chosen_for(GQA.replace(**fields)) == ("torch_native", ("torch_native",))


@pytest.mark.parametrize("kv_dtype", FP8)
def test_an_fp8_cache_is_refused_as_torch_has_none_on_mps(kv_dtype):
    found = anyattn.survey(GQA.replace(kv_dtype=kv_dtype), device="sim:m3")
    assert found.selection is None
    assert f"torch has no {kv_dtype} on devices of kind apple" in str(found.error)
    spec, reasons = GQA.replace(kv_dtype=kv_dtype), TorchNativeBackend.capabilities.reject_reasons
    (reason,) = reasons(spec, found.device, "decode")
    assert (reason.field, reason.wanted, reason.remedy) == ("kv_dtype", kv_dtype, "set kv_dtype='auto'")
    (reason,) = reasons(spec.replace(kv_scale_per_head=True), found.device, "decode")
    assert reason.remedy == "set kv_dtype='auto' and kv_scale_per_head=False"
    assert not reasons(GQA, found.device, "decode")
