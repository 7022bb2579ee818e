"""The FlashInfer adapter on the CPU, against an emulation of the two wrappers with the signatures of 0.6.13 and 0.7.4.

It holds the adapter's own work: arguments, conventions, one wrapper a live plan, masks, scales, sinks, graphs. The
kernels are test_cuda.py's.
"""

import dataclasses
import math
import secrets
import types

import numpy as np
import pytest
import torch

from anyattn import AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.hardware_backend.cuda import flashinfer as adapter
from anyattn.hardware_backend.cuda.flashinfer_workspace import PlannerStep, most_mask_words, packed_tree_masks
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime
from anyattn.types import TYPICAL_LOAD

CORES = 132
HOPPER = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu", num_cores=CORES,
    graph=GraphLevel.ALWAYS,
)  # fmt: skip
ADA = dataclasses.replace(HOPPER, arch="sm89")
CASES = {case.name: case for case in cases_for(adapter.FlashInferBackend.capabilities)}
MINUS_INFINITY = -5e4  # of the fa2 kernels, in base 2

in_flight = []
"""Wrappers whose last plan is on its way from their pinned buffers, and not yet behind an event."""


class Event:
    behind = ()

    def record(self, stream):
        assert stream == "stream of cpu"
        self.behind = tuple(in_flight)
        in_flight.clear()

    def synchronize(self):
        for wrapper in self.behind:
            wrapper.pinned_buffer_is_free = True


def partial_bytes(qo_lens, num_pages, rows, heads, page_size, window_left, graph):
    """What 0.6.13 takes of the workspace for one plan of the fa2 kernels (`PrefillPlan`)."""
    num_qo_heads, num_kv_heads, head_dim = heads
    group, most = num_qo_heads // num_kv_heads, 2 * CORES // num_kv_heads
    packed = [length * group for length in qo_lens]
    longest = (rows - len(packed) + 1) * group if graph else sum(packed) // len(packed)
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    tiles = [-(-length // tile) for length in packed]
    if window_left >= 0:
        num_pages = [min(pages, -(-(window_left + tile) // page_size)) for pages in num_pages]
    low, high = max(128 // page_size, 1), max(1, *num_pages)
    while low < high:
        middle = (low + high) // 2
        if sum(n * -(-max(pages, 1) // middle) for n, pages in zip(tiles, num_pages, strict=True)) > most:
            low = middle + 1
        else:
            high = middle
    blocks = sum(n * -(-max(pages, 1) // low) for n, pages in zip(tiles, num_pages, strict=True))
    if graph:
        padded = max(most, -(-rows * group // tile) + len(packed) - 1)
        assert blocks <= padded, "new batch size should not exceed padded batch size"
        blocks = padded
    elif low >= max(1, *num_pages):
        return 0
    return num_qo_heads * blocks * tile * (head_dim + 1) * 4


class Wrapper:
    """What both wrappers share: a plan is state of the wrapper, the window excludes the token, the LSE is in base 2."""

    def make(self, workspace, kv_layout, graph, qo_indptr, kv_indptr, kv_indices, last_page_len, mask, mask_indptr):
        assert workspace.dtype == torch.uint8
        self.room, self.kv_layout, self.graph = workspace.numel(), kv_layout, graph
        self._qo_indptr_buf, self._custom_mask_buf, self._mask_indptr_buf = qo_indptr, mask, mask_indptr
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = kv_indptr, kv_indices
        self._paged_kv_last_page_len_buf = last_page_len
        self.most_rows, self.pinned_buffer_is_free = None, True

    def keep(self, qo_indptr, indptr, indices, last_page_len, heads, page_size, options, mask=None, mask_indptr=None):
        assert self.pinned_buffer_is_free, "the last plan's copy may still read the buffer that this one fills"
        self.pinned_buffer_is_free = False
        in_flight.append(self)
        assert {t.dtype for t in (qo_indptr, indptr, indices, last_page_len)} == {torch.int32}
        num_pages = indptr.diff()
        lengths = torch.where(num_pages == 0, 0, (num_pages - 1) * page_size + last_page_len)
        assert options["seq_lens"].dtype == torch.int32
        assert options["seq_lens"].tolist() == lengths.tolist()
        assert (num_pages == -(-lengths // page_size)).all()
        rows = int(qo_indptr[-1])
        if self.graph:
            self.most_rows = self.most_rows or rows
            assert rows == self.most_rows, "kernels and grids are in the graph for good"
            assert len(indptr) == len(self._paged_kv_indptr_buf)
            assert max(len(indices), int(indptr[-1])) <= len(self._paged_kv_indices_buf)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
            for kept, given in (
                (self._qo_indptr_buf, qo_indptr),
                (self._paged_kv_indptr_buf, indptr),
                (self._paged_kv_last_page_len_buf, last_page_len),
            ):
                kept.copy_(given)
        else:
            assert len(indices) >= int(indptr[-1])
            assert 0 not in indices[: int(indptr[-1])], "the null page may hold NaN, which kernels multiply by 0"
            self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf = qo_indptr, indptr, indices
            self._paged_kv_last_page_len_buf = last_page_len
            self._custom_mask_buf, self._mask_indptr_buf = mask, mask_indptr
        self.rows, self.heads, self.options = rows, heads, {**options, "seq_lens": None}
        if self.kernel == "fa2":
            needed = partial_bytes(
                qo_indptr.diff().tolist(), num_pages.tolist(), self.most_rows or rows, heads, page_size,
                options["window_left"], self.graph,
            )  # fmt: skip
            assert needed <= self.room, f"Failed to allocate memory for batch_prefill_tmp_v with size {needed}"
        else:
            assert self.kernel == "fa3"
            assert mask is None
            assert options["kv_data_type"] == options["q_data_type"]

    def seen(self, causal, q_rows, seq, owner, position, length, qo_indptr):
        """[rows, keys], bool: which keys of its own sequence each row sees."""
        row = q_rows - qo_indptr[seq]
        at = (length[seq] - qo_indptr.diff()[seq] + row)[:, None]
        seen = (owner == seq[:, None]) & (position < length[owner.clamp(max=len(length) - 1)])
        inside = seen
        if self._custom_mask_buf is not None:
            bit = (row * length[seq])[:, None] + position
            byte = (self._mask_indptr_buf[seq][:, None] + bit // 8).clamp(0, len(self._custom_mask_buf) - 1)
            seen = seen & ((self._custom_mask_buf[byte].int() >> (bit % 8)) & 1 == 1)
        elif causal:
            seen = seen & (position <= at)
        if self.options["window_left"] >= 0:
            seen = seen & (position >= at - self.options["window_left"])
        return seen, inside

    def attend(self, q, paged_kv_cache, k_scale, out, return_lse, causal):
        num_qo_heads, num_kv_heads, head_dim = self.heads
        assert q.shape == (self.rows, num_qo_heads, head_dim)
        assert q.is_contiguous()
        assert q.dtype == out.dtype == self.options["q_data_type"]
        assert k_scale is None or isinstance(k_scale, float)
        pages = [part if self.kv_layout == "NHD" else part.transpose(1, 2) for part in paged_kv_cache]
        assert {part.dtype for part in pages} == {self.options["kv_data_type"]}
        indices, indptr, qo_indptr = self._paged_kv_indices_buf, self._paged_kv_indptr_buf, self._qo_indptr_buf
        page_size, place = pages[0].shape[1], torch.arange(len(indices))
        length = torch.where(indptr.diff() == 0, 0, (indptr.diff() - 1) * page_size + self._paged_kv_last_page_len_buf)
        owner = torch.searchsorted(indptr[1:], place.int(), right=True)
        position = ((place - indptr[owner])[:, None] * page_size + torch.arange(page_size)).flatten()
        owner = owner.repeat_interleave(page_size, output_size=len(owner) * page_size)
        q_rows = torch.arange(self.rows)
        seq = torch.searchsorted(qo_indptr[1:], q_rows.int(), right=True)
        seen, inside = self.seen(causal, q_rows, seq, owner, position, length, qo_indptr)
        k, v = (part.view(torch.uint8)[indices].view(part.dtype).flatten(0, 1).float() for part in pages)
        scores = torch.einsum("thgd,khd->thgk", q.float().unflatten(1, (num_kv_heads, -1)), k).flatten(1, 2)
        scores = scores * (self.options["sm_scale"] * (1.0 if k_scale is None else k_scale))
        if cap := self.options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        blind = lse.isneginf()
        weights = torch.exp(scores - lse.masked_fill(blind, 0.0)[..., None]).unflatten(1, (num_kv_heads, -1))
        result = torch.einsum("thgk,khd->thgd", weights, v.nan_to_num(0.0)).flatten(1, 2)
        times_nan = (inside & v.isnan().flatten(1).any(dim=1)).any(dim=1)  # masked keys are multiplied too
        out.copy_(result.masked_fill(times_nan[:, None, None], math.nan))
        in_base_2 = torch.where(blind, MINUS_INFINITY + 3.0, lse / math.log(2))
        return (out, in_base_2) if return_lse else out


class Decode6(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        assert use_tensor_cores
        self.kernel = backend
        qo_indptr = torch.zeros_like(paged_kv_indptr_buffer) if use_cuda_graph else None
        self.make(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr, paged_kv_indptr_buffer,
                  paged_kv_indices_buffer, paged_kv_last_page_len_buffer, None, None)  # fmt: skip

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None,
        seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    ):  # fmt: skip
        options = {
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "sm_scale": sm_scale, "seq_lens": seq_lens,
        }  # fmt: skip
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self.keep(rows, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim), page_size, options)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        assert sinks is None, "the fa2 kernels leave them out without a word"
        return self.attend(q, paged_kv_cache, k_scale, out, return_lse, causal=False)


class Prefill6(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        self.kernel = backend
        self.make(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
                  paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf)  # fmt: skip

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        assert custom_mask is None, "0.6 packs it with pointers that it takes on the device, and reads those back"
        assert max_sequence_kv is None, "0.6 then leaves out what it hands to the planner"
        assert max_token_per_sequence in (None, max(qo_indptr.diff().tolist()))
        options = {
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "sm_scale": sm_scale, "seq_lens": seq_lens,
        }  # fmt: skip
        mask_indptr = None
        if packed_custom_mask is not None:  # bits, where kernels want bytes
            mask_indptr = torch.cat([torch.zeros(1), torch.cumsum(qo_indptr.diff() * seq_lens, 0)]).int()
        self.causal = causal
        self.keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                  (num_qo_heads, num_kv_heads, head_dim_qk), page_size, options, packed_custom_mask,
                  mask_indptr)  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        assert sinks is None, "the fa2 and fa3 kernels leave them out without a word"
        return self.attend(q, paged_kv_cache, k_scale, out, return_lse, self.causal)


class Decode7(Decode6):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, use_tensor_cores, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend,
        )  # fmt: skip

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
        non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,
        q_len_per_req=1, is_causal=None, use_token_head_sf=False,
    ):  # fmt: skip
        super().plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left=window_left,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
            seq_lens=seq_lens,
        )  # fmt: skip


class Prefill7(Prefill6):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
        max_total_num_rows=None,
    ):  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
        use_token_head_sf=False,
    ):  # fmt: skip
        super().plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, packed_custom_mask=packed_custom_mask, custom_mask=custom_mask, causal=causal,
            sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type, seq_lens=seq_lens, max_token_per_sequence=max_token_per_sequence,
        )  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        assert (lse_base, lse_layout) == ("log2", "NH")
        return super().run(q, paged_kv_cache, k_scale=k_scale, out=out, return_lse=return_lse, sinks=sinks)


GENERATIONS = {"0.6": (Decode6, Prefill6), "0.7": (Decode7, Prefill7)}
made = []


def emulated(monkeypatch, generation):
    decode, prefill = GENERATIONS[generation]

    def recorded(kind):
        def make(*args, **options):
            made.append(kind(*args, **options))
            return made[-1]

        return make

    made.clear()
    in_flight.clear()
    wrappers = {
        "BatchDecodeWithPagedKVCacheWrapper": recorded(decode),
        "BatchPrefillWithPagedKVCacheWrapper": recorded(prefill),
    }
    monkeypatch.setattr(adapter, "flashinfer", types.SimpleNamespace(**wrappers))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    emulated(monkeypatch, "0.6")


def representative():
    """Of what is alike (sizes of pages and windows, phases) every sixth case, and none that takes long."""
    alike = {"page_sizes", "layouts", "sliding_window", "phases", "contract", "head_dims", "group_sizes", "lse"}
    alike |= {"combinations"}
    quick = [case for case in CASES.values() if case.page_size <= 16 and case.num_seqs < 10]
    found = [case for case in quick if case.capability not in alike and case.num_layers == 1]
    small = [case for case in quick if case.spec.group_size < 8 and sum(case.steps[0]) < 300]
    return [*found, *[case for case in small if case.capability in alike][::6]]


QUICK = [pytest.param(case, id=case.name) for case in representative()]
GRAPHS = {check.name: check for check in graph_checks(adapter.FlashInferBackend, HOPPER)}
REPLAYS = [
    "decode: replays with fewer sequences than were captured",
    "decode: replays with max_kv_len tokens, and nothing of them is left after",
    "decode: graphs of several sizes do not disturb one another",
    "decode: replays with sliding_window=33",
    "uniform: replays with other lengths, across the ends of pages",
    "uniform: the tensors of a plan stay where they are",
    "uniform: graphs and plans without graph do not disturb one another",
    "uniform: replays with KV float8_e4m3fn, tensor scales",
    "uniform: replays with tree_mask=True",
]


@pytest.mark.parametrize("case", QUICK)
def test_the_adapter_is_right_in_the_cases_that_it_declares(case):
    assert check_case(adapter.FlashInferBackend, case, HOPPER, 0).failure is None


@pytest.mark.parametrize("case", QUICK[::8])
def test_it_is_right_with_the_signatures_of_the_next_generation_too(case, monkeypatch):
    emulated(monkeypatch, "0.7")
    assert check_case(adapter.FlashInferBackend, case, HOPPER, 0).failure is None


@pytest.mark.parametrize("name", REPLAYS)
def test_graphs_replay_later_steps(name):
    GRAPHS[name].run(secrets.randbelow(1 << 31))


@pytest.mark.parametrize("name", REPLAYS[2::6])
def test_graphs_replay_later_steps_with_the_next_generation_too(name, monkeypatch):
    emulated(monkeypatch, "0.7")
    GRAPHS[name].run(secrets.randbelow(1 << 31))


def backend_of(spec=None, page_size=16, platform=HOPPER):
    spec = spec or AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    cache = spec.cache_spec(num_layers=1, page_size=page_size, layout="NHD")
    return adapter.FlashInferBackend(spec, cache, platform)


def runtime(spec, lengths, platform=HOPPER):
    """With room for so many tokens of each sequence, and its sequences."""
    case = dataclasses.replace(CASES["plain"], spec=spec, steps=(lengths,))
    rt = build_runtime(adapter.FlashInferBackend, case, platform, 0)
    return rt, rt.new_sequences(len(lengths))


def wrapper_of(plan):
    return plan.steps[0].plan.wrapper


PLAIN = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    ("fields", "platform", "tokens", "kernel"),
    [
        pytest.param({}, HOPPER, 65, "fa3", id="a long new part on Hopper"),
        pytest.param({}, HOPPER, 64, "fa2", id="short ones on Hopper"),
        pytest.param({}, ADA, 65, "fa2", id="elsewhere"),
        pytest.param({"kv_dtype": "float8_e4m3fn"}, HOPPER, 65, "fa2", id="an fp8 cache"),
        pytest.param({"tree_mask": True}, HOPPER, 65, "fa2", id="tree masks"),
        pytest.param({}, HOPPER, 1, "fa2", id="decode"),
    ],
)
def test_the_kernels_are_named_and_never_left_to_auto(fields, platform, tokens, kernel):
    spec = PLAIN.replace(**fields)
    rt, seqs = runtime(spec, (tokens, 3), platform)
    masks = [torch.ones(tokens, tokens, dtype=torch.bool), None] if spec.tree_mask else None
    counts = [tokens, min(tokens, 3)]
    wrapper = wrapper_of(rt.plan(rt.extend(seqs, counts, tree_masks=masks)))
    assert (wrapper.kernel, type(wrapper)) == (kernel, Decode6 if tokens == 1 else Prefill6)


def test_a_long_new_part_beside_long_sequences_that_decode_goes_to_their_kernels():
    rt, seqs = runtime(PLAIN, (101, 101, 101, 101))
    assert wrapper_of(rt.plan(rt.extend(seqs[:3], [100, 100, 100]))).kernel == "fa3"
    assert wrapper_of(rt.plan(rt.extend(seqs, [1, 1, 1, 100]))).kernel == "fa2"


def test_a_step_without_masks_after_one_with_masks_is_causal_again():
    rt, seqs = runtime(PLAIN.replace(tree_mask=True), (9, 9))
    plan = rt.plan(rt.extend(seqs, [4, 3], tree_masks=[torch.eye(4, dtype=torch.bool), None]))
    with_masks = wrapper_of(plan)
    assert with_masks._custom_mask_buf is not None
    del plan
    assert wrapper_of(rt.plan(rt.extend(seqs, [2, 3]))) is with_masks
    assert with_masks._custom_mask_buf is None


def test_a_wrapper_serves_another_plan_only_when_its_own_is_gone():
    rt, seqs = runtime(PLAIN, (9, 9, 9))
    first = rt.plan(rt.extend(seqs[:1], [5]))
    second = rt.plan(rt.extend(seqs[1:2], [5]))
    used = [wrapper_of(plan) for plan in (first, second)]
    assert used[0] is not used[1]
    del first
    assert wrapper_of(rt.plan(rt.extend(seqs[2:], [5]))) is used[0]


def test_masks_are_packed_as_numpy_packs_them():
    generator = torch.Generator().manual_seed(secrets.randbelow(1 << 31))
    qo_lens, prefix_lens = [1, 0, 5, 9, 33, 2], [0, 7, 3, 64, 1, 100]
    masks = [torch.rand(n, n, generator=generator) < 0.5 for n in qo_lens]
    masks[3] = None
    kv_lens = [n + prefix for n, prefix in zip(qo_lens, prefix_lens, strict=True)]
    step = PlannerStep._made(
        np.cumsum([0, *qo_lens], dtype=np.int32), np.zeros(7, np.int32), torch.zeros(0), np.array(kv_lens), 16
    )
    words, starts = packed_tree_masks(step, masks, torch.device("cpu"))
    data = words.view(torch.uint8)
    for i, (n, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        mask = torch.ones(n, n, dtype=torch.bool).tril() if masks[i] is None else masks[i]
        dense = torch.cat([torch.ones(n, kv_len - n, dtype=torch.bool), mask], dim=1).numpy()
        wanted = np.packbits(dense.flatten(), bitorder="little")
        got = data[starts[i] : starts[i] + wanted.size].numpy().copy()
        if spare := -dense.size % 8:
            got[-1] &= 0xFF >> spare
        np.testing.assert_array_equal(got, wanted)
    assert words.numel() <= sum(most_mask_words(1, n, kv_len) for n, kv_len in zip(qo_lens, kv_lens, strict=True))


class KeepsMasksElsewhere(Prefill6):
    def plan(self, *args, **options):
        super().plan(*args, **options)
        del self._mask_indptr_buf


def test_a_flashinfer_that_keeps_its_masks_elsewhere_is_refused_rather_than_run_without_them(monkeypatch):
    monkeypatch.setattr(adapter.flashinfer, "BatchPrefillWithPagedKVCacheWrapper", KeepsMasksElsewhere)
    rt, seqs = runtime(PLAIN.replace(tree_mask=True), (4,))
    with pytest.raises(ContractError, match="keeps custom masks in a way that is not known here"):
        rt.plan(rt.extend(seqs, [4], tree_masks=[None]))


def test_a_graph_has_the_workspace_that_its_planner_asks_for():
    spec = AttentionSpec(num_qo_heads=64, num_kv_heads=8, head_dim=128, graph="uniform")
    backend, rooms = backend_of(spec), []
    for num_seqs, qo_len in ((4, 3), (512, 1), (256, 4), (8, 1)):
        rooms.append(backend._graph_bytes(num_seqs, num_seqs * qo_len))
        needed = partial_bytes([qo_len] * num_seqs, [64] * num_seqs, num_seqs * qo_len, (64, 8, 128), 16, -1, True)
        assert needed <= rooms[-1] <= needed + 64
    wrappers = backend._wrappers
    first = wrappers.workspace(rooms[0])
    larger = wrappers.workspace(rooms[1])
    assert first.numel() < rooms[1] == larger.numel()
    assert wrappers.workspace(rooms[3]) is larger


@pytest.mark.parametrize("name", ["decode", "uniform"])
def test_a_graph_that_needs_more_workspace_than_plans_do_gets_it(name, monkeypatch):
    monkeypatch.setattr(adapter, "RECOMMENDED_BYTES", 0)
    GRAPHS[f"{name}: replays with fewer sequences than were captured"].run(0)


def test_eager_plans_never_need_more_workspace_than_there_is():
    generator = np.random.default_rng(secrets.randbelow(1 << 31))
    for group, num_kv_heads, head_dim in ((1, 8, 64), (4, 8, 128), (8, 1, 256), (16, 4, 128), (71, 1, 64)):
        spec = AttentionSpec(num_qo_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        room = backend_of(spec)._partial_bytes(128 if head_dim < 256 else 64)
        for _ in range(20):
            size = int(generator.integers(1, 40))
            qo_lens = generator.integers(1, 200, size).tolist()
            num_pages = generator.integers(1, 4000, size).tolist()
            heads = (spec.num_qo_heads, num_kv_heads, head_dim)
            assert partial_bytes(qo_lens, num_pages, sum(qo_lens), heads, 16, -1, False) <= room


def test_it_is_first_in_decode_and_behind_flash_attention_3_in_prefill_on_hopper():
    priority = adapter.FlashInferBackend.capabilities.priority_for
    assert [priority(HOPPER, PLAIN, role, TYPICAL_LOAD) for role in ("decode", "prefill")] == [85, 70]
    assert [priority(ADA, PLAIN, role, TYPICAL_LOAD) for role in ("decode", "prefill")] == [85, 80]
