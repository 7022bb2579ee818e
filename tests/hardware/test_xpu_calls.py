"""The adapter of vllm-xpu-kernels on the CPU: against an emulation, and against the wheel's own Python where it is.

Where the wheel can be imported, its Python runs in two ways: over the emulated operator, as over the real one, and with
an operator that has no kernel at all, so that the reference in torch runs which the wheel then falls back to.
"""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError, Platform
from anyattn.hardware_backend.intel import xpu_flash_attn as adapter
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.spec import CacheSpec
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case

sys.path.append(str(Path(__file__).parent))
import xpu_emulation as emulated
from paged_kernel import HEAD_CASES, chosen
from vendor_calls import declaration, wheel

BATTLEMAGE = Platform(kind="xpu", vendor="intel", name="emulated", arch="bmg_g21", torch_device="cpu")
Backend, Grouped = adapter.IntelXPUBackend, adapter.IntelXPUGroupedBackend
GQA = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
CASES = [
    *chosen(Backend, cases_for(Backend.capabilities), HEAD_CASES),
    *chosen(Grouped, cases_for(Grouped.capabilities), ("plain", "16 query heads a KV head", "decode of 33", "return")),
]


@pytest.fixture
def emulation(monkeypatch):
    emulated.calls.clear()
    monkeypatch.setattr(adapter, "flash_attn", emulated.MODULE)


def check(backend, case):
    return check_case(backend, case, BATTLEMAGE, torch.seed() % (1 << 31)).failure


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_the_adapter_is_right_in_cases_of_each_kind(emulation, backend, case):
    assert check(backend, case) is None


def test_the_declaration_names_the_wheel_whose_signatures_the_calls_are_bound_to():
    for backend in (Backend, Grouped):
        assert backend.capabilities.contract_tested_with == wheel("xpu")


def kernels_of(spec, qo_lens, page_size):
    """The kernels that a step is launched with, by the emulation."""
    emulated.calls.clear()
    cache = CacheSpec(
        num_layers=1, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, v_head_dim=spec.vo_head_dim,
        kv_dtype=spec.storage_dtype, page_size=page_size,
    )  # fmt: skip
    backend = (Backend if spec.group_size <= 8 else Grouped)(spec, cache, BATTLEMAGE)
    kv = torch.zeros(len(qo_lens) + 1, page_size, spec.num_kv_heads, spec.head_dim).to(backend_dtype(spec))
    lens = np.asarray(qo_lens)
    host = SimpleNamespace(
        qo_lens=lens, kv_lens=lens, prefix_lens=np.zeros_like(lens), page_size=page_size, num_pages=np.ones_like(lens)
    )
    batch = SimpleNamespace(
        host=host, num_seqs=lens.size, max_qo_len=int(lens.max()), max_kv_len=int(lens.max()),
        phase="decode" if lens.max() == 1 else "mixed" if (lens == 1).any() else "prefill",
        qo_indptr=torch.tensor([0, *lens.cumsum()], dtype=torch.int32), kv_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.arange(1, lens.size + 1, dtype=torch.int32)[:, None],
    )  # fmt: skip
    q = torch.zeros(int(lens.sum()), spec.num_qo_heads, spec.head_dim, dtype=getattr(torch, spec.dtype))
    backend.run(q, LayerKV(k=kv, v=kv.clone(), layout="NHD"), backend.plan(batch), torch.empty_like(q))
    return list(emulated.calls)


def backend_dtype(spec):
    return getattr(torch, spec.storage_dtype)


def served():
    """Specs of each size, and with each feature, that a declaration has."""
    for backend, group in ((Backend, 8), (Grouped, 16)):
        for head_dim in sorted(backend.capabilities.head_dims.values):
            spec = GQA.replace(num_qo_heads=2 * group, head_dim=head_dim)
            yield spec
            yield spec.replace(return_lse=True)
            yield spec.replace(kv_dtype="float8_e5m2", dtype="float16")
            if backend.capabilities.sliding_window:
                yield spec.replace(sliding_window=33)


@pytest.mark.parametrize("spec", [*served()], ids=str)
@pytest.mark.parametrize(
    ("qo_lens", "launched"),
    [([1, 1], ["paged_decode"]), ([4, 4], ["either"]), ([40, 2], ["chunk"]), ([40, 1], ["chunk", "paged_decode"])],
    ids=str,
)
@pytest.mark.parametrize("page_size", [64, 128])
def test_every_declared_size_and_feature_has_its_kernels_in_the_wheel(emulation, spec, qo_lens, launched, page_size):
    names = kernels_of(spec, qo_lens, page_size)
    short = "chunk" if spec.return_lse else "paged_decode"  # as the wheel's Python makes decodes of short steps
    assert [name.startswith(short if part == "either" else part) for name, part in zip(names, launched, strict=True)]


@pytest.mark.parametrize(
    ("fields", "page_size", "field"),
    [
        ({"head_dim": 112}, None, "head_dim"),
        ({"head_dim": 192}, None, "head_dim"),  # its window has no kernel, nor has its decode for pages of 16
        ({"num_qo_heads": 24}, None, "num_qo_heads"),
        ({"logits_soft_cap": 30.0}, None, "logits_soft_cap"),
        ({"alibi": True}, None, "alibi"),
        ({"causal": False}, None, "causal"),
        ({"dtype": "float32"}, None, "dtype"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale_per_head": True}, None, "kv_scale_per_head"),
        ({"sliding_window": 64, "sinks": True}, None, "sinks"),
        ({"sliding_window": 64, "return_lse": True}, None, "return_lse"),
        ({"graph": "decode"}, None, "graph"),
        ({}, 16, "page_size"),
        ({}, 32, "page_size"),
    ],
    ids=str,
)
def test_what_has_no_kernel_in_the_wheel_is_refused(fields, page_size, field):
    spec, device = GQA.replace(**fields), anyattn.survey(GQA, device="sim:b580").device
    reasons = Backend.capabilities.reject_reasons(spec, device, "decode", page_size=page_size)
    assert field in {reason.field for reason in reasons}


def arguments(**changed):
    """A call that the emulation takes, of two sequences of 3 and 70 tokens, with changes."""
    kv = torch.zeros(4, 64, 2, 64, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(73, 8, 64, dtype=torch.bfloat16), "k": kv, "v": kv.clone(), "max_seqlen_q": 70,
        "cu_seqlens_q": torch.tensor([0, 3, 73], dtype=torch.int32), "max_seqlen_k": 70,
        "seqused_k": torch.tensor([3, 70], dtype=torch.int32), "softmax_scale": 0.1, "causal": True,
        "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32), "is_mix_batch": False, **changed,
    }  # fmt: skip


def test_the_call_that_the_violations_change_is_taken():
    assert emulated.flash_attn_varlen_func(**arguments()).shape == (73, 8, 64)


def pages(*shape, dtype=torch.bfloat16):
    kv = torch.zeros(shape, dtype=dtype)
    return {"k": kv, "v": kv.clone()}


def rows(num_heads, head_dim, dtype=torch.bfloat16):
    return {"q": torch.zeros(73, num_heads, head_dim, dtype=dtype)}


ONE = torch.ones(())
VIOLATIONS = {
    "an argument it has not": {"alibi": None},
    "q of float32": {**rows(8, 64, torch.float32), **pages(4, 64, 2, 64, dtype=torch.float32)},
    "keys of another dtype than q's": pages(4, 64, 2, 64, dtype=torch.float16),
    "values of another dtype than keys'": {"v": torch.zeros(4, 64, 2, 64, dtype=torch.float16)},
    "q of one row for each sequence": {"q": torch.zeros(1, 73, 8, 64, dtype=torch.bfloat16)},
    "pages of 40 tokens": pages(4, 40, 2, 64),
    "heads that are no multiple of 16 bytes": {**rows(8, 60), **pages(4, 64, 2, 60)},
    "heads of 1024": {**rows(8, 1024), **pages(4, 64, 2, 1024)},
    "a last dimension with gaps": {"q": torch.zeros(73, 8, 128, dtype=torch.bfloat16)[..., ::2]},
    "q's rows between multiples of 16 bytes": {"q": torch.zeros(73, 520, dtype=torch.bfloat16)[:, 1:513].view(73, 8, 64)
                                               .as_strided((73, 8, 64), (516, 64, 1))},
    "tables of int64": {"block_table": torch.tensor([[1, 0], [2, 3]])},
    "a table with gaps": {"block_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
    "pointers of int64": {"cu_seqlens_q": torch.tensor([0, 3, 73])},
    "pointers with gaps": {"cu_seqlens_q": torch.tensor([0, 0, 3, 0, 73, 0], dtype=torch.int32)[::2]},
    "no lengths": {"seqused_k": None},
    "fewer new tokens at most than there are": {"max_seqlen_q": 30},
    "fewer tokens at most than there are": {"max_seqlen_k": 30},
    "a page stride between tokens": pages(4, 64, 2, 64) | {"k": torch.zeros(4, 8200, dtype=torch.bfloat16)
                                                           .as_strided((4, 64, 2, 64), (8200, 128, 64, 1))},
    "pages of keys and values apart in another way": {"k": torch.zeros(8, 64, 2, 64, dtype=torch.bfloat16)[::2]},
    "a soft cap, which reaches no kernel": {"softcap": 30.0},
    "slopes, which reach no kernel": {"alibi_slopes": torch.zeros(8)},
    "an LSE with a window": {"return_softmax_lse": True, "window_size": [31, 0]},
    "an LSE with a sink": {"return_softmax_lse": True, "s_aux": torch.zeros(8, dtype=torch.bfloat16)},
    "a sink of another dtype than q's": {"s_aux": torch.zeros(8)},
    "a kernel that is not in the wheel": {**rows(8, 192), **pages(4, 64, 2, 192), "window_size": [31, 0]},
    "a scale that is a part of other storage": {"k_descale": torch.ones(2)[0], "v_descale": ONE},
    "a scale of an integer": {"k_descale": torch.ones((), dtype=torch.int32), "v_descale": ONE},
    "one scale of two": {"k_descale": ONE},
    "a scale of several elements": {**pages(4, 64, 2, 64, dtype=torch.float8_e4m3fn),
                                    "k_descale": torch.ones(2), "v_descale": torch.ones(2)},
    "more splits than FlashAttention 2 has": {"num_splits": 2},
    "metadata of FlashAttention 3": {"scheduler_metadata": ONE},
    "determinism, which it does not look at": {"deterministic": True},
    "an output of another shape": {"out": torch.zeros(73, 8, 128, dtype=torch.bfloat16)},
    "a sequence without new tokens among decodes": {
        "cu_seqlens_q": torch.tensor([0, 0, 73], dtype=torch.int32), "max_seqlen_q": 73,
        "seqused_k": torch.tensor([3, 73], dtype=torch.int32), "max_seqlen_k": 73, "is_mix_batch": True},
}  # fmt: skip


@pytest.mark.parametrize("what", VIOLATIONS)
def test_the_emulation_refuses_what_is_documented_not_to_be_taken(what):
    with pytest.raises((AssertionError, TypeError, RuntimeError, StopIteration)):
        emulated.flash_attn_varlen_func(**arguments(**VIOLATIONS[what]))


def test_a_pool_of_more_tokens_than_a_surface_has_rows_is_refused_before_a_call(emulation):
    cache = CacheSpec(num_layers=1, num_kv_heads=2, head_dim=64, v_head_dim=64, kv_dtype="bfloat16", page_size=64)
    kv = torch.zeros(1, dtype=torch.bfloat16).expand((1 << 18) + 1, 64, 2, 64)
    backend = Backend(GQA, cache, BATTLEMAGE)
    with pytest.raises(ContractError, match="up to 16777216 tokens, not of 16777280: give num_pages=262143 or fewer"):
        backend.run(None, LayerKV(k=kv, v=kv, layout="NHD"), SimpleNamespace(arguments={}), None)


@pytest.fixture
def package(monkeypatch):
    """The wheel's Python over an operator of the caller's."""
    if importlib.util.find_spec("vllm_xpu_kernels") is None:
        pytest.skip("needs vllm-xpu-kernels")
    from vllm_xpu_kernels import flash_attn_interface

    if not hasattr(torch.ops._vllm_fa2_C, "varlen_fwd"):  # which its library registers, where Level Zero is there
        LIBRARY.define(emulated.OPERATOR_SCHEMA)
        LIBRARY.impl("varlen_fwd", lambda *given: OPERATOR["runs"](*given), "CPU")
    monkeypatch.setattr(adapter, "flash_attn", flash_attn_interface)
    return flash_attn_interface


LIBRARY = torch.library.Library("_vllm_fa2_C", "FRAGMENT")
OPERATOR = {"runs": emulated.varlen_fwd}


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_the_wheels_own_python_gets_along_with_the_adapter(package, monkeypatch, backend, case):
    monkeypatch.setitem(OPERATOR, "runs", emulated.varlen_fwd)
    assert check(backend, case) is None


def without_kernels(*given):
    raise RuntimeError("not compiled")


@pytest.mark.parametrize(("backend", "case"), CASES)
def test_the_wheels_reference_in_torch_says_the_same(package, monkeypatch, backend, case):
    if case.spec.sliding_window == 1:
        pytest.skip("version 0.1.16.2 takes a window of one token for none in its reference")
    monkeypatch.setattr(package, "_SPEC_DECODE_MAX_QLEN", 0)  # that path has no reference
    monkeypatch.setitem(OPERATOR, "runs", without_kernels)
    assert check(backend, case) is None


def test_the_wheels_function_has_the_signature_that_calls_are_bound_to(package):
    ours = declaration("xpu", "flash_attn_varlen_func").parameters
    theirs = inspect.signature(package.flash_attn_varlen_func).parameters
    assert [*ours] == [*theirs]
    assert [each.kind for each in ours.values()] == [each.kind for each in theirs.values()]
