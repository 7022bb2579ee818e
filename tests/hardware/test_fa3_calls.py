"""The FlashAttention 3 adapter on the CPU, against emulations of three builds' functions with their exact parameters.

Upstream's `flash_attn_interface`, SGLang's `sgl_kernel.flash_attn` (sglang-kernel 0.4.10) and vLLM's
`vllm.vllm_flash_attn` (0.25.0). Their kernels are test_cuda.py's.
"""

import dataclasses
import functools
import sys
import types

import pytest
import torch

from anyattn import AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.attention.reference import reference_attention
from anyattn.hardware_backend.cuda import fa3, fa3_providers
from anyattn.lazy import lazy_import
from anyattn.testing.graphs import replays
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.graphs.setting import Setting
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime, run_step, set_scales
from anyattn.testing.numerics.inputs import PerHead, Step
from anyattn.testing.numerics.scenarios import checks as scenarios
from anyattn.types import Load

HOPPER = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu", graph=GraphLevel.ALWAYS
)
CASES = {case.name: case for case in cases_for(fa3.FA3Backend.capabilities)}
TILES = (80, 112, 128, 144, 160, 176, 192, 224)  # keys of the tiles that kernels have for heads of some size or dtype
FP8 = torch.float8_e4m3fn


LIBRARY = torch.library.Library("anyattn_fa3_calls", "DEF")
LIBRARY.define(
    "kernel(Tensor q, Tensor k, Tensor v, Tensor? qv, Tensor(a!) out, Tensor cu_seqlens_q, Tensor seqused_k, "
    "Tensor page_table, Tensor[] descales, Tensor? sinks, Tensor? metadata, int[] wanted_metadata, "
    "float softmax_scale, bool causal, int window_left, float softcap, int max_seqlen_q, bool reads_tiles) -> Tensor"
)


@torch.library.impl(LIBRARY, "kernel", "CPU")
def kernel(
    q, k, v, qv, out, cu_seqlens_q, seqused_k, page_table, descales, sinks, metadata, wanted_metadata, softmax_scale,
    causal, window_left, softcap, max_seqlen_q, reads_tiles,
):  # fmt: skip
    """Its values, sequence by sequence; the LSE counts sinks too. One operator, as a kernel is in a graph."""
    if metadata is not None:
        assert metadata.tolist() == [*wanted_metadata, *seqused_k.tolist(), *cu_seqlens_q.tolist()], "stale metadata"
    if qv is not None:
        q, k = torch.cat([qv, q], dim=-1), torch.cat([v, k], dim=-1)
    lengths, page_size, group = seqused_k.tolist(), k.shape[1], q.shape[1] // k.shape[2]
    reaches_all = window_left < 0 or (not causal and window_left >= max(lengths))
    spec = AttentionSpec(
        num_qo_heads=q.shape[1], num_kv_heads=k.shape[2], head_dim=q.shape[2], v_head_dim=v.shape[3],
        sm_scale=softmax_scale, causal=causal, sliding_window=None if reaches_all else window_left + 1,
        logits_soft_cap=softcap or None,
    )  # fmt: skip
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    begins = cu_seqlens_q.tolist()
    for i, length in enumerate(lengths):
        rows, pages = slice(begins[i], begins[i + 1]), page_table[i, : -(-length // page_size)]
        if rows.start == rows.stop:
            continue
        assert rows.stop - rows.start <= max_seqlen_q
        assert 0 not in pages, "the null page may hold NaN, and kernels multiply masked values by 0"
        keys, values = (part.view(torch.uint8)[pages].view(part.dtype).flatten(0, 1) for part in (k, v))
        behind = 0 * values[length:].float().sum() if reads_tiles else 0
        keys, values = keys[:length], values[:length]
        queries = q[rows]
        if descales:
            of_q, of_k, of_v = (each[i].double()[:, None] for each in descales)
            queries, keys, values = (
                queries.double() * of_q.repeat_interleave(group, 0),
                keys.double() * of_k,
                values.double() * of_v,
            )
        attended, of_rows = reference_attention(spec, queries, keys, values, sinks=sinks)
        out[rows] = attended + behind
        lse[:, rows] = (of_rows if sinks is None else torch.logaddexp(of_rows, sinks.double())).T
    return lse


def scheduler_metadata(numbers, cache_seqlens, cu_seqlens_q):
    """What a call with the same numbers and lengths takes."""
    numbers = torch.tensor([int(number) for number in numbers], dtype=torch.int32)
    return torch.cat([numbers, cache_seqlens, cu_seqlens_q])


def attend(
    q, k, v, *, qv, out, cu_seqlens_q, seqused_k, page_table, descales, sinks, metadata, softmax_scale, causal,
    window_size, softcap, num_splits, max_seqlen_q, max_seqlen_k,
):  # fmt: skip
    """What the kernels check, and how they choose among themselves, from shapes alone."""
    for tensor in (q, k, v, *([] if qv is None else [qv]), *([] if out is None else [out])):
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16, FP8)
    for table in (cu_seqlens_q, seqused_k, page_table):
        assert table.dtype == torch.int32
        assert table.stride(-1) == 1
    num_seqs, page_size, group = seqused_k.shape[0], k.shape[1], q.shape[1] // k.shape[2]
    assert cu_seqlens_q.shape == (num_seqs + 1,)
    assert page_table.shape[0] == num_seqs
    assert max_seqlen_k >= page_table.shape[1] * page_size
    left, right = window_size
    assert right == (0 if left >= 0 and causal else -1)
    if left >= max_seqlen_k - 1:
        left = -1
    reads_tiles = any(page_size % keys == 0 for keys in ((64,) if qv is not None else TILES))
    reads_tiles = reads_tiles and max_seqlen_q * group > 64
    written = torch.bfloat16 if q.dtype == FP8 else q.dtype
    if q.dtype == FP8:
        assert all(each.shape == (num_seqs, k.shape[2]) and each.dtype == torch.float32 for each in descales)
    else:
        assert descales == [None] * 3
    if qv is not None:
        assert (q.shape[2], v.shape[3]) == (64, 512)
        assert q.dtype != FP8
    if sinks is not None:
        assert sinks.dtype == torch.bfloat16
        assert sinks.shape == (q.shape[1],)
        assert sinks.is_contiguous()
        assert q.shape[1] <= 64
        assert qv is None
        assert q.shape[2] == v.shape[3]
    if out is None:
        out = torch.empty(*q.shape[:2], v.shape[3], dtype=written)
    assert out.dtype == written
    numbers = [num_seqs, max_seqlen_q, max_seqlen_k, q.shape[1], k.shape[2], q.shape[2], v.shape[3], page_size, causal,
               *window_size, softcap > 0, num_splits, q.dtype == FP8]  # fmt: skip
    lse = torch.ops.anyattn_fa3_calls.kernel(
        q, k, v, qv, out, cu_seqlens_q, seqused_k, page_table, [] if descales[0] is None else descales, sinks, metadata,
        [int(number) for number in numbers], softmax_scale, causal, left, float(softcap), max_seqlen_q, reads_tiles,
    )  # fmt: skip
    return out, lse


def upstream_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    result = attend(
        q, k_cache, v_cache, qv=qv, out=None, cu_seqlens_q=cu_seqlens_q, seqused_k=cache_seqlens, page_table=page_table,
        descales=[q_descale, k_descale, v_descale], sinks=None, metadata=scheduler_metadata,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, num_splits=num_splits,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=page_table.shape[1] * k_cache.shape[1],
    )  # fmt: skip
    return (*result, None, None) if return_softmax_lse else result[0]


def upstream_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return scheduler_metadata(
        [batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, page_size, causal,
         *window_size, has_softcap, num_splits, qkv_dtype == FP8],
        cache_seqlens, cu_seqlens_q,
    )  # fmt: skip


def sglang_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=False,
    sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None,
):  # fmt: skip
    result = attend(
        q, k_cache, v_cache, qv=qv, out=out, cu_seqlens_q=cu_seqlens_q, seqused_k=cache_seqlens, page_table=page_table,
        descales=[q_descale, k_descale, v_descale], sinks=sinks, metadata=scheduler_metadata,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, num_splits=num_splits,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=page_table.shape[1] * k_cache.shape[1],
    )  # fmt: skip
    return (*result, None, None) if return_softmax_lse else result[0]


def sglang_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return upstream_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens, qkv_dtype, headdim_v,
        cu_seqlens_q, None, leftpad_k, page_size, 0, causal, window_size, 0, has_softcap, num_splits,
    )  # fmt: skip


def vllm_varlen(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
    q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None,
    cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, aux_tensors=None, dynamic_causal=None,
):  # fmt: skip
    assert fa_version == 3
    result = attend(
        q, k, v, qv=q_v, out=out, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, page_table=block_table,
        descales=[q_descale, k_descale, v_descale], sinks=s_aux, metadata=scheduler_metadata,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, num_splits=num_splits,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return result if return_softmax_lse else result[0]


def vllm_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return upstream_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype, headdim_v,
        cu_seqlens_q, None, cache_leftpad, page_size, 0, causal, window_size, 0, has_softcap, num_splits,
    )  # fmt: skip


MODULES = {
    "flash_attn_interface": {
        "flash_attn_with_kvcache": upstream_with_kvcache,
        "get_scheduler_metadata": upstream_metadata,
    },
    "sgl_kernel.flash_attn": {
        "flash_attn_with_kvcache": sglang_with_kvcache,
        "get_scheduler_metadata": sglang_metadata,
    },
    "vllm.vllm_flash_attn": {
        "FA3_AVAILABLE": True,
        "flash_attn_varlen_func": vllm_varlen,
        "get_scheduler_metadata": vllm_metadata,
    },
}


@pytest.fixture(autouse=True)
def no_capture(monkeypatch):
    """Torch without CUDA cannot say."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Broken(types.ModuleType):
    """A module whose extension does not load, or that imports what is not there."""

    def __init__(self, name, error):
        super().__init__(name)
        self.error = error

    def __getattr__(self, attribute):
        raise self.error


@pytest.fixture
def install(monkeypatch):
    """Puts modules in the place of builds, by name; the others are not installed. Returns a list of their calls."""

    def install(*names, **broken):
        calls, builds = [], []
        for module, kind, archs in fa3_providers._BUILDS:
            name = module.__name__
            builds.append((lazy_import(name), kind, archs))
            there = broken.get(name.replace(".", "_"))
            if name in names:
                there = types.SimpleNamespace(**MODULES[name])
                function = getattr(there, kind.function)
                setattr(there, kind.function, recorded(function, calls))
            monkeypatch.setitem(sys.modules, name, there)
        monkeypatch.setattr(fa3_providers, "_BUILDS", tuple(builds))
        return calls

    return install


def recorded(function, calls):
    @functools.wraps(function)
    def call(*args, **named):
        assert not args, "by keyword alone, as the order differs"
        calls.append(named)
        return function(**named)

    return call


def run_steps(case, counts=((1, 1, 1, 1),), sinks=None, lengths=(40, 3, 17, 50)):
    """Runs steps behind a prompt; returns the plans."""
    rt = build_runtime(fa3.FA3Backend, dataclasses.replace(case, steps=(lengths, *counts)), HOPPER, 0)
    set_scales(rt, case)
    generator, seqs, plans = torch.Generator().manual_seed(0), rt.new_sequences(len(lengths)), []
    for number in (lengths, *counts):
        plans.append(rt.plan(rt.extend(seqs, number)))
        for layer in range(case.num_layers):
            step = Step.draw(case.spec, number, generator)
            run_step(rt, step, plans[-1], PerHead(sinks=sinks, alibi_slopes=None), layer)
    return [plan.steps[0].plan for plan in plans]


SOME = (
    "plain", "float16", "KV float8_e4m3fn, float scales", "KV float8_e4m3fn, q rounded to it",
    "KV float8_e4m3fn, a scale for each head", "float16, KV float8_e4m3fn", "causal False, return_lse=True",
    "sliding_window=33, return_lse=True", "sinks=True, return_lse=True, from -1e4 to 30",
    "sliding_window=64, logits_soft_cap=3.0, sinks=True", "page size 3, HND", "page size 128, HND",
    "joined layers, HND", "joined layers, KV float8_e4m3fn", "joined layers, head dim 192, 128",
    "head dim 80, 80, sliding_window=33", "16 query heads a KV head", "sliding_window=1, in pages that are all kept",
    "sliding_window=16", "sliding_window=4096", "mixed", "decode of 33 sequences",
    "16 new tokens for each sequence, return_lse=True", "sequences without tokens", "q at odd strides",
    "one plan for two layers, sinks=True", "causal=False, KV float8_e4m3fn",
    "sliding_window=33, deterministic=True",
    "deterministic=True, KV float8_e4m3fn", "MLA 512+64 causal False, return_lse=True",
    "MLA 512+64 sliding_window=33", "MLA 512+64 page size 64, NHD", "MLA 512+64 q at odd strides",
    "MLA 512+64 sinks=True, return_lse=True, in bfloat16",
)  # fmt: skip
OF_EACH = (
    "float16, KV float8_e4m3fn", "causal False, return_lse=True", "sinks=True", "sliding_window=33",
    "page size 128, HND", "joined layers, head dim 192, 128", "q at odd strides", "MLA 512+64 page size 64, NHD",
)  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_the_adapter_is_right_with_vllms_build(name, install):
    install("vllm.vllm_flash_attn")
    assert check_case(fa3.FA3Backend, CASES[name], HOPPER, 0).failure is None


@pytest.mark.parametrize("build", ["flash_attn_interface", "sgl_kernel.flash_attn"])
@pytest.mark.parametrize("name", OF_EACH)
def test_the_adapter_is_right_with_other_builds(name, build, install):
    install(build)
    assert check_case(fa3.FA3Backend, CASES[name], HOPPER, 0).failure is None


SCENARIOS = [
    check for check in scenarios(fa3.FA3Backend, HOPPER) if not check.name.startswith(("MLA", "64-bit offsets"))
]


@pytest.mark.parametrize("check", SCENARIOS, ids=lambda check: check.name)
def test_nothing_beside_a_step_matters_to_it_or_is_changed_by_it(check, install):
    install("vllm.vllm_flash_attn")
    check.run(0)


@pytest.mark.parametrize("build", MODULES)
def test_what_lies_behind_a_sequences_end_in_large_pages_reaches_no_result(build, install):
    """A window that is longer than all sequences is none to the kernels."""
    install(build)
    for window in (None, 33, 4096):
        case = dataclasses.replace(CASES["plain"], page_size=128, steps=((129, 40, 3), (1, 1, 1)))
        case = dataclasses.replace(case, spec=case.spec.replace(sliding_window=window))
        assert check_case(fa3.FA3Backend, case, HOPPER, 0).failure is None
        unsaid = dataclasses.replace(fa3.FA3Backend.capabilities, needs_finite_tails=False)
        careless = type("Careless", (fa3.FA3Backend,), {"capabilities": unsaid})
        assert "NaN" in check_case(careless, case, HOPPER, 0).failure


@pytest.mark.parametrize("name", ["plain", "MLA 512+64 plain"])
def test_a_steps_work_is_divided_once_for_all_layers(name, install):
    calls = install("vllm.vllm_flash_attn")
    case = dataclasses.replace(CASES[name], num_layers=3)
    _, plan = run_steps(case)
    assert plan.metadata is not None
    assert [call["scheduler_metadata"] is plan.metadata for call in calls[3:]] == [True] * 3


def test_where_new_tokens_differ_the_kernels_divide_the_work_themselves(install):
    """SGLang's build would divide keys into more parts than it then makes room for."""
    calls = install("sgl_kernel.flash_attn")
    run_steps(CASES["plain"], counts=((1, 3, 1, 1), (2, 2, 2, 2)))
    assert ["scheduler_metadata" in call for call in calls] == [False, False, True]


def test_a_build_without_metadata_is_not_asked_for_any(install, monkeypatch):
    monkeypatch.delitem(MODULES["flash_attn_interface"], "get_scheduler_metadata")
    install("flash_attn_interface")
    assert check_case(fa3.FA3Backend, CASES["decode of 33 sequences"], HOPPER, 0).failure is None


GRAPH_CHECKS = {check.name: check for check in graph_checks(fa3.FA3Backend, HOPPER)}
SOME_GRAPHS = (
    "decode: replays with other lengths, across the ends of pages",
    "decode: graphs of several sizes do not disturb one another",
    "decode: replays with KV float8_e4m3fn, a scale for each head",
    "uniform: the tensors of a plan stay where they are", "uniform: replays with sliding_window=33",
    "uniform: replays with MLA 512+64 sliding_window=33",
    "always: padding reaches no result and stores nothing", "always: replays with KV float8_e4m3fn, tensor scales",
    "always: replays with sliding_window=33", "always: a graph for one sequence serves any",
    "always: replays with sinks=True",
)  # fmt: skip


@pytest.mark.parametrize("name", SOME_GRAPHS)
def test_graphs_serve_later_steps(name, install):
    install("sgl_kernel.flash_attn")
    GRAPH_CHECKS[name].run(0)


def test_nan_in_padding_reaches_no_scale_of_a_graphs_only_sequence(install):
    install("vllm.vllm_flash_attn")
    case = CASES["KV float8_e4m3fn, tensor scales"]
    setting = Setting(backend=fa3.FA3Backend, device=HOPPER, case=case, level=GraphLevel.ALWAYS, seed=0)
    replays.CHECKS["a graph for one sequence serves any"](setting)


@pytest.mark.parametrize("window", [None, 33, 4096])
def test_graphs_serve_later_steps_where_bits_must_not_depend_on_the_batch(window, install):
    install("vllm.vllm_flash_attn")
    case = CASES["deterministic=True"]
    case = dataclasses.replace(case, spec=case.spec.replace(sliding_window=window))
    setting = Setting(backend=fa3.FA3Backend, device=HOPPER, case=case, level=GraphLevel.ALWAYS, seed=0)
    replays.features(setting)


@pytest.mark.parametrize("build", MODULES)
def test_where_bits_must_not_depend_on_the_batch_no_kernel_is_chosen_by_it(build, install):
    calls = install(build)
    case = CASES["deterministic=True"]
    case = dataclasses.replace(case, page_size=3, spec=case.spec.replace(sliding_window=200))
    run_steps(case, counts=((1, 3, 1, 1), (1, 1, 1, 1), (0, 0, 1, 0)))
    assert {(call["num_splits"], call["max_seqlen_q"], call["window_size"]) for call in calls} == {(1, 1024, (199, 0))}
    assert not any("scheduler_metadata" in call for call in calls)
    for call in calls:
        longest = call.get("max_seqlen_k") or call["page_table"].shape[1] * 3
        assert call["window_size"][0] < longest - 1  # where it is not, all are seen, by another kernel


@pytest.mark.parametrize("build", ["sgl_kernel.flash_attn", "vllm.vllm_flash_attn"])
def test_kernels_take_the_sinks_that_they_would_not_round(build, install):
    calls, case = install(build), CASES["sinks=True"]
    for narrow in (True, False):
        calls.clear()
        assert check_case(fa3.FA3Backend, dataclasses.replace(case, narrow_sinks=narrow), HOPPER, 0).failure is None
        assert all(("sinks" in call or "s_aux" in call) == narrow for call in calls)


def test_kernels_take_no_sinks_where_their_lse_would_count_them(install):
    calls = install("vllm.vllm_flash_attn")
    case = dataclasses.replace(CASES["sinks=True, return_lse=True"], narrow_sinks=True)
    assert check_case(fa3.FA3Backend, case, HOPPER, 0).failure is None
    assert not any("s_aux" in call for call in calls)


def test_results_are_written_where_they_are_wanted(install):
    calls = install("vllm.vllm_flash_attn")
    run_steps(CASES["plain"])
    assert all("out" in call for call in calls)
    calls.clear()
    run_steps(CASES["float16, KV float8_e4m3fn"])  # the kernels write bfloat16
    assert not any("out" in call for call in calls)


def test_only_a_q_that_kernels_cannot_read_is_copied(install):
    calls = install("vllm.vllm_flash_attn")
    run_steps(CASES["plain"])
    assert not any(call["q"].is_contiguous() for call in calls)  # parts of fused projections
    calls.clear()
    assert check_case(fa3.FA3Backend, CASES["q at odd strides"], HOPPER, 0).failure is None
    assert all(call["q"].is_contiguous() for call in calls)


def test_scales_that_are_numbers_are_kept_on_the_device_unless_a_graph_is_captured(install, monkeypatch):
    calls, case = install("vllm.vllm_flash_attn"), CASES["KV float8_e4m3fn, float scales"]
    run_steps(case, counts=((1, 1, 1, 1), (1, 1, 1, 1)))
    assert len({call["k_descale"].data_ptr() for call in calls}) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls.clear()
    run_steps(case, counts=((1, 1, 1, 1), (1, 1, 1, 1)))
    assert len({call["k_descale"].data_ptr() for call in calls}) == 3


def test_keys_of_many_sequences_are_divided_into_few_parts(install):
    """Which the kernels would reserve room for as though each sequence were the only one."""
    install("vllm.vllm_flash_attn")
    spec = CASES["MLA 512+64 plain"].spec.replace(num_qo_heads=128)
    backend = fa3.FA3Backend(spec, spec.cache_spec(num_layers=1, page_size=16, layout="NHD"), HOPPER)

    def num_splits(num_seqs, max_qo_len):
        return backend._num_splits(types.SimpleNamespace(num_tokens=num_seqs * max_qo_len, max_qo_len=max_qo_len))

    assert [num_splits(num_seqs, 1) for num_seqs in (1, 32, 33, 256, 8192)] == [0, 0, 32, 16, 1]
    assert num_splits(8, 512) == 0


def test_builds_are_looked_for_in_order(install):
    for first in range(3):
        names = list(MODULES)[first:]
        calls = install(*names)
        run_steps(CASES["plain"], counts=())
        assert set(calls[0]) & {"k_cache", "fa_version"} == ({"fa_version"} if first == 2 else {"k_cache"})
        assert ("out" in calls[0]) == (first > 0)


def test_a_build_that_does_not_load_is_told_of_and_the_next_one_is_taken(install):
    calls = install("vllm.vllm_flash_attn", sgl_kernel_flash_attn=Broken("", ImportError("undefined symbol: x")))
    with pytest.warns(UserWarning, match=r"runs on vllm.*sgl_kernel\.flash_attn: ImportError\('undefined symbol: x'\)"):
        run_steps(CASES["plain"], counts=())
    assert calls


def test_where_no_build_can_be_used_each_ones_reason_is_told(install):
    install(
        flash_attn_interface=Broken("", ModuleNotFoundError("No module named 'einops'", name="einops")),
        sgl_kernel_flash_attn=types.SimpleNamespace(flash_attn_with_kvcache=lambda q, k_cache, v_cache: None),
        vllm_vllm_flash_attn=types.SimpleNamespace(FA3_AVAILABLE=False),
    )
    with pytest.raises(ContractError) as error:
        run_steps(CASES["plain"])
    for text in ("flash_attn_interface needs einops", "takes no cache_seqlens, causal",
                 "built without FlashAttention 3", "pip install"):  # fmt: skip
        assert text in str(error.value)
    install()
    with pytest.raises(
        ContractError, match=r"flash_attn_interface is not installed.*vllm\.vllm_flash_attn is not inst"
    ):
        run_steps(CASES["plain"])


def test_before_hopper_vllms_build_is_not_taken(install):
    sm80 = dataclasses.replace(HOPPER, arch="sm80")
    case = next(cases_for(fa3.FA3Sm8xBackend.capabilities))
    install("vllm.vllm_flash_attn")
    with pytest.raises(ContractError, match=r"vllm\.vllm_flash_attn has no kernels for sm80"):
        check_case(fa3.FA3Sm8xBackend, case, sm80, 0)
    install("sgl_kernel.flash_attn")
    assert check_case(fa3.FA3Sm8xBackend, case, sm80, 0).failure is None


@pytest.mark.parametrize(
    ("arch", "role", "mla_heads", "num_seqs", "wanted"),
    [
        ("sm90", "prefill", None, 32, 90),
        ("sm90", "decode", None, 32, 75),
        ("sm90", "decode", 16, 1, 85),
        ("sm90", "decode", 16, 4, 75),
        ("sm90", "decode", 128, 1, 75),
        ("sm80", "prefill", None, 32, 60),
        ("sm80", "decode", None, 32, 55),
    ],
)
def test_priorities_are_as_measured(arch, role, mla_heads, num_seqs, wanted):
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    if mla_heads:
        spec = AttentionSpec.mla(num_qo_heads=mla_heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
    platform, load = dataclasses.replace(HOPPER, arch=arch), Load(num_seqs=num_seqs, kv_len=4096)
    assert fa3.FA3Backend.capabilities.priority_for(platform, spec, role, load) == wanted
