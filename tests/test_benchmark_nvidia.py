"""The benchmark of NVIDIA GPUs on the CPU: its rows and limits, its calls of the vendors' kernels, and its verdicts.

The vendors' interfaces are emulated with the parameters of vllm 0.25, sglang-kernel 0.4.10, flashinfer 0.6.13 and 0.7.4
and sgl-flash-mla 1.0, so that a wrong keyword fails; what they compute is the reference's.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from anyattn import AttentionSpec
from anyattn.attention.reference import reference_attention
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.discovery import usable_device

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# What the limits were worked out to be, to two digits or to about two percent, by group and row.
LIMITS_US = {
    "MLA decode, 128 heads": {
        "batch 1, length 1024": "0.4",
        "batch 1, length 8192": "2.9",
        "batch 1, length 131072": "46",
        "batch 8, length 4096": "12",
        "batch 32, length 8192": "92",
        "batch 128, length 8192": "370",
    },
    "MLA decode, 16 heads": {
        "batch 1, length 1024": "0.3",
        "batch 1, length 8192": "2.2",
        "batch 1, length 131072": "35",
        "batch 8, length 4096": "8.8",
        "batch 32, length 8192": "70",
        "batch 128, length 8192": "281",
    },
    "GQA decode": {
        "batch 1, length 1024": "1.0",
        "batch 1, length 8192": "7.8",
        "batch 1, length 131072": "125",
        "batch 8, length 4096": "31",
        "batch 32, length 1024": "31",
        "batch 64, length 8192": "488",
        "batch 256, length 1024": "250",
    },
    "GQA prefill": {
        "1 x 4096": "174",
        "4 x 8192": "2784",
        "512 new after 15872, batch 4": "685",
        "4 new after 4092, batch 32": "125",
    },
}


def load(name):
    """A file of the benchmarks; nvidia.py under another name, as vendors have a package called nvidia."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(monkeypatch):
    """The benchmark's files, by what follows "nvidia_" in their names; nvidia.py is `main`."""
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "torch_native")  # where a row names none: nothing to compile
    monkeypatch.syspath_prepend(BENCHMARKS)
    main = load("nvidia")
    names = ("rows", "raw", "results", "runtimes", "measure", "report")
    found = {name: importlib.import_module(f"nvidia_{name}") for name in names}
    found["raw"]._first_importable.cache_clear()
    yield types.SimpleNamespace(main=main, graph=load("nvidia_graph"), **found)
    found["raw"]._first_importable.cache_clear()


def test_the_grid_has_the_rows_that_peers_were_measured_with(files):
    assert {group.name: [str(row) for row in group.rows] for group in files.rows.GROUPS} == {
        name: list(rows) for name, rows in LIMITS_US.items()
    }
    assert all(kernel in files.raw.KERNELS for group in files.rows.GROUPS for kernel in group.kernel_names)


def test_the_limits_are_those_that_peers_were_held_against(files):
    for group in files.rows.GROUPS:
        for row in group.rows:
            told = LIMITS_US[group.name][str(row)]
            half_a_digit = 0.5 * 10.0 ** -len(told.partition(".")[2])
            assert group.limit_us(row) == pytest.approx(float(told), rel=0.03, abs=half_a_digit), (group.name, str(row))


@pytest.mark.parametrize("file", ["nvidia.py", "nvidia_graph.py"])
def test_without_an_nvidia_gpu_it_says_so_and_exits_with_2(file):
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / file)],
        cwd=BENCHMARKS.parent, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.startswith(f"{file} needs an NVIDIA GPU: ")
    assert "Traceback" not in run.stderr


def attend(q, k, v, qo_indptr, pages_of, kv_lens, sm_scale, out):
    """Causal attention over pages, by the reference. k, v: [num_pages, page_size, num_kv_heads, dim]."""
    spec = AttentionSpec(
        num_qo_heads=q.shape[1], num_kv_heads=k.shape[2], head_dim=q.shape[2], v_head_dim=v.shape[3], sm_scale=sm_scale
    )
    for i, length in enumerate(kv_lens.tolist()):
        rows, pages = slice(int(qo_indptr[i]), int(qo_indptr[i + 1])), pages_of[i].long()
        keys, values = (part[pages].flatten(0, 1)[:length] for part in (k, v))
        out[rows] = reference_attention(spec, q[rows], keys, values)[0].to(out.dtype)
    return out


def dense(q, k, v, latent, qo_indptr, table, kv_lens, sm_scale, out):
    """The FlashAttention family's view of it."""
    if latent is not None:
        q, k = torch.cat([latent, q], dim=-1), torch.cat([v, k], dim=-1)
    return attend(q, k, v, qo_indptr, table, kv_lens, sm_scale, torch.empty_like(out) if out is None else out)


def vllm_flash_attn():
    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
        q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None,
        cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, aux_tensors=None, dynamic_causal=None,
    ):  # fmt: skip
        assert (fa_version, causal, max_seqlen_k) == (3, True, int(seqused_k.max()))
        return dense(q, k, v, q_v, cu_seqlens_q, block_table, seqused_k, softmax_scale, out)

    return {"vllm.vllm_flash_attn": types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)}


def sgl_flash_attn():
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=False,
        sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None,
    ):  # fmt: skip
        assert causal
        return dense(q, k_cache, v_cache, qv, cu_seqlens_q, page_table, cache_seqlens, softmax_scale, out)

    return {"sgl_kernel.flash_attn": types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)}


def flash_mla(q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, num_splits, softmax_scale, causal, out):
    assert (schedule, num_splits, causal) == ("schedule", None, True)
    num_seqs, qo_len = q.shape[:2]
    result = q.new_empty(*q.shape[:3], head_dim_v) if out is None else out
    attend(
        q.flatten(0, 1), k_cache, k_cache[..., :head_dim_v], torch.arange(num_seqs + 1) * qo_len, block_table,
        cache_seqlens, softmax_scale, result.flatten(0, 1),
    )  # fmt: skip
    return result, None


def vllm_flash_mla():
    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None,
    ):  # fmt: skip
        return flash_mla(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale,
            causal, out,
        )  # fmt: skip

    module = types.SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda *args, **kwargs: ("schedule", None)
    )
    return {"vllm.third_party.flashmla.flash_mla_interface": module}


def sgl_flash_mla():
    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
        use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
    ):  # fmt: skip
        assert use_legacy, "dense attention is there only"
        return flash_mla(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale,
            causal, None,
        )  # fmt: skip

    module = types.SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda *args, **kwargs: ("schedule", None)
    )
    return {"flash_mla": module}


class Wrapper:
    """What FlashInfer's wrappers share: run attends to what was planned."""

    def planned(self, qo_indptr, indptr, indices, kv_lens, sm_scale):
        pages = [indices[indptr[i] : indptr[i + 1]] for i in range(len(kv_lens))]
        self.state = (qo_indptr, pages, kv_lens, sm_scale)

    def attended(self, q, k, v, out):
        return attend(q, k, v, *self.state, out)


class Decode(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        assert (use_tensor_cores, kv_layout) == (True, "NHD")

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None,
        seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    ):  # fmt: skip
        assert q_data_type == kv_data_type == torch.bfloat16
        kv_lens = (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len
        self.planned(torch.arange(len(indptr)), indptr, indices, kv_lens, sm_scale)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        return self.attended(q, *paged_kv_cache, out)


class Prefill(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        assert (backend in ("fa2", "fa3"), kv_layout) == (True, "NHD")

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        assert (causal, q_data_type, kv_data_type) == (True, torch.bfloat16, torch.bfloat16)
        kv_lens = (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) * page_size + paged_kv_last_page_len
        self.planned(qo_indptr, paged_kv_indptr, paged_kv_indices, kv_lens, sm_scale)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        return self.attended(q, *paged_kv_cache, out)


class MLA06(Wrapper):
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert backend == "fa3"

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        assert causal
        self.planned(qo_indptr, kv_indptr, kv_indices, kv_len_arr, sm_scale)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
        kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None,
    ):  # fmt: skip
        k = torch.cat([ckv_cache, kpe_cache], dim=-1).unsqueeze(2)
        return self.attended(torch.cat([q_nope, q_pe], dim=-1), k, ckv_cache.unsqueeze(2), out)


class MLA07(MLA06):
    def plan(
        self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
        kv_data_type, use_profiler=False, query_layout="packed", kv_cache_layout="packed", lse_mode="none",
        output_dtype=None, output_scale="none", scale_mode="default", skip_softmax=False, enable_pdl=None,
        use_sinks=False,
    ):  # fmt: skip
        assert query_layout == kv_cache_layout == "split"
        self.planned(*metadata, sm_scale)

    def run(
        self, *, query, kv_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, kv_len=None,
        page_table=None, return_lse_base_on_e=False, o_scale=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None,
        sinks=None, skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None,
    ):  # fmt: skip
        return super().run(*query, *kv_cache, out=out)


def csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr):
    return qo_indptr, kv_indptr, kv_indices, kv_len_arr


def flashinfer(mla=MLA06, **more):
    module = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        mla=types.SimpleNamespace(BatchMLAPagedAttentionWrapper=mla, **more),
    )
    return {"flashinfer": module}


def flashinfer_07():
    return flashinfer(MLA07, MLAPlanMetadata=types.SimpleNamespace(csr=csr))


VENDORS = (
    "flash_attn_interface", "sgl_kernel.flash_attn", "vllm.vllm_flash_attn", "flash_mla",
    "vllm.third_party.flashmla.flash_mla_interface", "flashinfer",
)  # fmt: skip

CASES = [
    ("FA3", vllm_flash_attn, "decode"),
    ("FA3", vllm_flash_attn, "prefill"),
    ("FA3", vllm_flash_attn, "mla"),
    ("FA3", sgl_flash_attn, "prefill"),
    ("FA3", sgl_flash_attn, "mla"),
    ("FlashMLA", vllm_flash_mla, "mla"),
    ("FlashMLA", sgl_flash_mla, "mla"),
    ("FlashInfer decode", flashinfer, "decode"),
    ("FlashInfer fa2", flashinfer, "prefill"),
    ("FlashInfer fa3", flashinfer, "prefill"),
    ("FlashInfer MLA fa3", flashinfer, "mla"),
    ("FlashInfer MLA fa3", flashinfer_07, "mla"),
]


def install(monkeypatch, *vendors):
    """Those emulations, and no other vendor's package."""
    for name in VENDORS:
        monkeypatch.setitem(sys.modules, name, None)
    for vendor in vendors:
        for name, module in vendor().items():
            for i in range(name.count(".")):
                package = ".".join(name.split(".")[: i + 1])
                monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def on_the_cpu(files, monkeypatch):
    """Calls take the place of graph replays; all else is as on a GPU."""
    monkeypatch.setattr(files.measure, "captured", lambda call: (call, call()))
    for name in ("synchronize", "set_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(files.measure, "HOST_REPEATS", 2)
    monkeypatch.setattr(files.measure, "HOST_BURST", 2)
    return usable_device("cpu")


def small(files, kind):
    """A group in which the CPU's backends take the places of the GPU's."""
    rows = files.rows
    if kind == "mla":
        spec = AttentionSpec.mla(num_qo_heads=4, kv_lora_rank=32, qk_rope_head_dim=16, sm_scale=0.2)
    else:
        spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16)
    new = 5 if kind == "prefill" else 1
    return rows.Group(
        name=kind, spec=spec, page_size=4, rows=(rows.Row(batch=3, length=22, num_new=new),),
        kernels={"reference": ["FA3"], "torch_native": ["FA3"]}, host_row=rows.Row(batch=2, length=9, num_new=new),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "vendor", "kind"), CASES, ids=[f"{kernel} {vendor.__name__} {kind}" for kernel, vendor, kind in CASES]
)
def test_raw_kernels_are_called_as_the_vendors_take_it(files, on_the_cpu, monkeypatch, kernel, vendor, kind):
    install(monkeypatch, vendor)
    group = dataclasses.replace(small(files, kind), kernels={"reference": [kernel]})
    (row,) = group.rows
    runtimes = files.runtimes.Runtimes(group, [row], on_the_cpu)
    result = files.measure.measure(group, row, runtimes, files.main.Timer(torch.device("cpu"), 2), 2)
    assert (result.failures, result.reasons) == ([], {})
    assert set(result.times_us) == {
        kernel, f"{kernel} after a store", "reference: attention", "reference: run", "auto: attention", "auto: run",
    }  # fmt: skip
    assert all(len(times) == 2 for times in result.times_us.values())
    assert [bound.other for bound in result.bounds()][:2] == [kernel, f"{kernel} after a store"]


def test_what_is_not_installed_is_told_with_the_names_that_were_looked_for(files, on_the_cpu, monkeypatch):
    install(monkeypatch)
    group = small(files, "decode")
    runtimes = files.runtimes.Runtimes(group, group.rows, on_the_cpu)
    result = files.measure.measure(group, group.rows[0], runtimes, files.main.Timer(torch.device("cpu"), 2), 1)
    assert result.failures == []
    assert all(name in result.reasons["FA3"] for name in VENDORS[:3])
    assert result.us("reference: attention") is not None


def test_a_wrong_result_is_a_failure_and_not_timed(files, on_the_cpu, monkeypatch):
    install(monkeypatch, vllm_flash_attn)
    group = small(files, "prefill")
    runtimes = files.runtimes.Runtimes(group, group.rows, on_the_cpu)
    monkeypatch.setattr(TorchNativeBackend, "run", lambda self, q, kv, plan, out, **more: out.normal_())
    result = files.measure.measure(group, group.rows[0], runtimes, files.main.Timer(torch.device("cpu"), 2), 1)
    assert any("torch_native: attention: ArithmeticError: WRONG: differs from FA3" in each for each in result.failures)
    assert "torch_native: attention" not in result.times_us
    assert "reference: attention" in result.times_us


@pytest.mark.parametrize(
    ("ours_us", "other_us", "met"), [(10.5, 10, True), (10.6, 10, False), (102, 100, True), (103, 100, False)]
)
def test_the_more_generous_part_of_a_bound_counts(files, ours_us, other_us, met):
    bound = files.results.Bound(
        where="", what="", ours_us=ours_us, other="", other_us=other_us, ratio=1.02, slack_us=0.5
    )
    assert bound.met is met


def test_ours_is_held_against_the_fastest_kernel_and_auto_against_all(files):
    group = dataclasses.replace(small(files, "prefill"), kernels={"a": ["x", "y"], "b": ["z"]})
    times = {"x": 30, "y": 20, "z": 10, "a: attention": 20, "b: attention": 9, "auto: attention": 11}
    result = files.results.Result(group=group, row=group.rows[0], times_us={way: [us] for way, us in times.items()})
    judged = [(bound.what, bound.other, bound.met) for bound in result.bounds()]
    assert judged == [
        ("a: attention", "y", True), ("b: attention", "z", True), ("auto: attention", "b: attention", False),
    ]  # fmt: skip


def test_the_bounds_are_those_that_the_benchmark_s_help_tells(files):
    group = dataclasses.replace(small(files, "prefill"), kernels={"a": ["x"]})
    ways = ("x", "x after a store", "a: attention", "a: run", "auto: attention")
    allowed = []
    for host, measured in ((False, ways), (True, ways[1:4:2])):  # the host's part has no attention alone
        times = {way: [100.0] for way in measured}
        result = files.results.Result(group=group, row=group.rows[0], host=host, times_us=times)
        allowed += [(bound.what, bound.other, bound.ratio, bound.slack_us) for bound in result.bounds()]
    assert allowed == [
        ("a: attention", "x", 1.02, 0.5),
        ("a: run", "x after a store", 1.02, 0.5),
        ("auto: attention", "x", 1.05, 1.0),
        ("a: run", "x after a store", 1.0, 5.0),
    ]


@pytest.fixture
def whole(files, on_the_cpu, monkeypatch, tmp_path):
    """Runs all of nvidia.py over small groups, whose bounds allow so many microseconds; gives exit code and JSON."""
    install(monkeypatch, vllm_flash_attn)
    monkeypatch.setattr(files.main, "GROUPS", [small(files, kind) for kind in ("mla", "decode", "prefill")])
    monkeypatch.setattr(files.main, "nvidia_gpu", lambda name: on_the_cpu)
    monkeypatch.setattr(files.main, "TURNS", 1)

    def run(most_us, *arguments):
        monkeypatch.setattr(files.results.Bound, "most_us", most_us)
        file = tmp_path / "figures.json"
        return files.main.main(["--rounds", "1", "--json", str(file), *arguments]), json.loads(file.read_text())

    return run


@pytest.mark.parametrize(("most_us", "code"), [(float("inf"), 0), (-1.0, 1)])
def test_the_exit_code_tells_whether_all_bounds_are_met(whole, capsys, most_us, code):
    found, figures = whole(most_us)
    shown = capsys.readouterr().out
    assert found == code, shown
    assert figures["failures"] == []
    assert len(figures["rows"]) == 6  # a row and host time, of each group
    assert {bound["met"] for bound in figures["bounds"]} == {not code}
    assert f"{0 if code else len(figures['bounds'])} of {len(figures['bounds'])} bounds met, 0 failures" in shown


def test_only_limits_what_is_measured(whole):
    _, figures = whole(float("inf"), "--only", "mla, batch")
    assert [(row["group"], row["host"]) for row in figures["rows"]] == [("mla", False)]


def test_the_costs_of_a_step_are_measured_call_by_call(files, on_the_cpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(files.graph, "GROUPS", [small(files, "decode")])
    monkeypatch.setattr(files.graph, "nvidia_gpu", lambda name: on_the_cpu)
    monkeypatch.setattr(files.graph, "BATCHES", (1, 3))
    file = tmp_path / "figures.json"
    assert files.graph.main(["--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["backend"], row["batch"]) for row in rows] == [
        (backend, batch) for backend in ("reference", "torch_native", "auto") for batch in (1, 3)
    ]
    for row in rows:
        assert set(row["calls"]) == {"extend", "plan"}
        assert all(us > 0 for call in row["calls"].values() for us in call.values())
