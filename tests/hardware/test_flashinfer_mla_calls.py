"""FlashInfer's MLA on the CPU, against emulations of its wrapper with the signatures of 0.6.13 and of 0.7.4.

They hold the adapter's own work: arguments, how q and latents are cut, the LSE, graphs. The kernels are test_cuda.py's.
"""

import dataclasses
import math
import secrets
import types

import numpy as np
import pytest
import torch

from anyattn import ContractError, GraphLevel, Platform
from anyattn.hardware_backend.cuda import flashinfer_mla as adapter
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime
from anyattn.types import TYPICAL_LOAD

HOPPER = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu", num_cores=132,
    graph=GraphLevel.ALWAYS,
)  # fmt: skip
CASES = {case.name.removeprefix("MLA 512+64 "): case for case in cases_for(adapter.FlashInferMLABackend.capabilities)}

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


class Wrapper6:
    """0.6.13. A plan is state of the wrapper; the LSE is in base 2 where nothing else is asked for."""

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 2 * 132 * 64 * (2 * 512 + 4)
        self.graph, self.backend = use_cuda_graph, backend
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self.cluster, self.pinned_buffer_is_free = None, True

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        assert self.pinned_buffer_is_free, "the last plan's copy may still read the buffer that this one fills"
        self.pinned_buffer_is_free = False
        in_flight.append(self)
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert q_data_type == kv_data_type
        qo_lens, num_pages = qo_indptr.diff(), kv_indptr.diff()
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert int(qo_indptr[0]) == int(kv_indptr[0]) == 0
        assert (num_pages == -(-kv_len_arr // page_size)).all()
        rows = 128 if int(qo_lens.sum()) * num_heads // len(qo_lens) > 64 else 64
        assert not causal or rows % num_heads == 0, "a row of tiles shares a token, and its last key may be left out"
        assert int((-(-qo_lens * num_heads // rows)).sum()) <= 16384, "more pieces of work than there is room for"
        if self.graph:
            assert self.cluster in (None, rows), "the grid is in the graph for good"
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
            for kept, given in (
                (self._qo_indptr_buf, qo_indptr),
                (self._kv_indptr_buf, kv_indptr),
                (self._kv_len_arr_buf, kv_len_arr),
            ):
                kept.copy_(given)
        else:
            assert 0 not in kv_indices[: int(kv_indptr[-1])]
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
            self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        assert int(kv_indptr[-1]) <= len(self._kv_indices_buf)
        self.cluster, self.dtype, self.causal = rows, q_data_type, causal
        self.page_size, self.sm_scale, self.shape = page_size, sm_scale, (int(qo_indptr[-1]), num_heads)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
        kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None,
    ):  # fmt: skip
        assert q_nope.shape == out.shape == (*self.shape, 512)
        assert q_pe.shape == (*self.shape, 64)
        assert ckv_cache.shape[1:] == (self.page_size, 512)
        assert kpe_cache.shape[1:] == (self.page_size, 64)
        assert {x.dtype for x in (q_nope, q_pe, ckv_cache, kpe_cache, out)} == {self.dtype}
        assert {x.stride(-1) for x in (q_nope, q_pe, ckv_cache, kpe_cache)} == {1}
        qo_indptr, kv_indptr, length = self._qo_indptr_buf, self._kv_indptr_buf, self._kv_len_arr_buf
        pages = torch.cat([ckv_cache, kpe_cache], dim=-1)[self._kv_indices_buf].float()
        place = torch.arange(len(pages))
        owner = torch.searchsorted(kv_indptr[1:], place.int(), right=True)
        position = ((place - kv_indptr[owner])[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        owner = owner.repeat_interleave(self.page_size, output_size=len(owner) * self.page_size)
        row = torch.arange(self.shape[0])
        seq = torch.searchsorted(qo_indptr[1:], row.int(), right=True)
        inside = (owner == seq[:, None]) & (position < length[owner.clamp(max=len(length) - 1)])
        at = length[seq] - qo_indptr[seq + 1] + row
        seen = inside & (position <= at[:, None]) if self.causal else inside
        keys = pages.flatten(0, 1)
        scores = torch.einsum("thd,kd->thk", torch.cat([q_nope, q_pe], dim=-1).float(), keys) * self.sm_scale
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        result = torch.softmax(scores, dim=-1) @ keys[:, :512].nan_to_num(0.0)
        times_nan = (inside & keys.isnan().any(dim=1)).any(dim=1)  # masked keys are multiplied too
        out.copy_(result.masked_fill(times_nan[:, None, None], math.nan))
        of_rows = torch.logsumexp(scores, dim=-1)
        return (out, of_rows if return_lse_base_on_e else of_rows / math.log(2)) if return_lse else out


@dataclasses.dataclass(frozen=True)
class Metadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class Wrapper7(Wrapper6):
    """0.7.4, whose flat arguments still work but warn."""

    def plan(
        self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None,
        head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None,
        use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None,
        query_layout=None, kv_cache_layout=None, lse_mode="none", output_dtype=None, output_scale="none",
        scale_mode="default", skip_softmax=False, enable_pdl=None, use_sinks=False,
    ):  # fmt: skip
        assert isinstance(metadata, Metadata)
        assert qo_indptr is kv_indptr is kv_indices is kv_len_arr is None
        assert len(metadata.kv_indices) >= int(metadata.kv_indptr[-1])
        if self.graph:
            assert len(metadata.kv_indices) <= len(self._kv_indices_buf)
            assert metadata.qo_indptr.shape == self._qo_indptr_buf.shape
            assert metadata.kv_len_arr.shape == self._kv_len_arr_buf.shape
        self.lse_mode, self.layouts = lse_mode, (query_layout or "packed", kv_cache_layout or "packed")
        super().plan(
            metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr, num_heads, head_dim_ckv,
            head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
        )  # fmt: skip
        self.indices_at = metadata.kv_indices.data_ptr()

    def run(
        self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None,
        kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None,
        skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None,
    ):  # fmt: skip
        assert q_nope is q_pe is ckv_cache is kpe_cache is None
        assert [type(given) for given in (query, kv_cache)] == [tuple, tuple]
        assert self.layouts == ("split", "split")
        asked = ("basee" if return_lse_base_on_e else "base2") if return_lse or return_lse_base_on_e else "none"
        assert asked == self.lse_mode
        return super().run(*query, *kv_cache, out=out, return_lse=return_lse, return_lse_base_on_e=return_lse_base_on_e)


GENERATIONS = {
    "0.6": {"BatchMLAPagedAttentionWrapper": Wrapper6},
    "0.7": {"BatchMLAPagedAttentionWrapper": Wrapper7, "MLAPlanMetadata": Metadata},
}


@pytest.fixture(params=GENERATIONS)
def generation(request, monkeypatch):
    in_flight.clear()
    monkeypatch.setattr(adapter, "mla", types.SimpleNamespace(**GENERATIONS[request.param]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return request.param


REPRESENTATIVE = [
    case
    for case in CASES.values()
    if case.page_size <= 64 and sum(case.steps[0]) < 300 and case.num_seqs < 10 and case.spec.num_qo_heads <= 16
]
GRAPHS = {check.name: check for check in graph_checks(adapter.FlashInferMLABackend, HOPPER)}
REPLAYS = [
    "decode: replays with fewer sequences than were captured",
    "decode: what the plan held at the capture is not in the graph for good",
    "uniform: replays with other lengths, across the ends of pages",
    "uniform: the tensors of a plan stay where they are",
    "uniform: graphs and plans without graph do not disturb one another",
    "uniform: padding reaches no result and stores nothing",
]


ALTERNATING = [*GENERATIONS] * len(REPRESENTATIVE)


@pytest.mark.parametrize(
    ("case", "generation"),
    [pytest.param(*pair, id=pair[0].name) for pair in zip(REPRESENTATIVE, ALTERNATING, strict=False)][::3],
    indirect=["generation"],
)
def test_the_adapter_is_right_in_the_cases_that_it_declares(case, generation):
    assert check_case(adapter.FlashInferMLABackend, case, HOPPER, 0).failure is None


@pytest.mark.parametrize(("name", "generation"), [*zip(REPLAYS, ALTERNATING, strict=False)], indirect=["generation"])
def test_graphs_replay_later_steps(name, generation):
    GRAPHS[name].run(secrets.randbelow(1 << 31))


PLAIN = CASES["plain"].spec


def runtime(spec, lengths, platform=HOPPER):
    """With room for so many tokens of each sequence, and its sequences."""
    case = dataclasses.replace(CASES["plain"], spec=spec, steps=(lengths,))
    rt = build_runtime(adapter.FlashInferMLABackend, case, platform, 0)
    return rt, rt.new_sequences(len(lengths))


def wrapper_of(plan):
    return plan.steps[0].plan.wrapper


def test_with_128_heads_no_tile_ends_within_a_token_whoever_rests(generation):
    """Planners look at how many rows each sequence has on average, and those without tokens count."""
    case = dataclasses.replace(
        CASES["sequences without tokens"],
        spec=PLAIN.replace(num_qo_heads=128),
        steps=((5, 0, 3, 0), (0, 0, 1, 0), (1, 0, 0, 0)),
        stored_before=(9, 70, 0, 3),
    )
    assert check_case(adapter.FlashInferMLABackend, case, HOPPER, 0).failure is None


@pytest.mark.parametrize("num_qo_heads", [16, 64, 128])
@pytest.mark.parametrize("name", ["decode", "uniform"])
def test_the_grid_of_a_graph_does_not_depend_on_how_many_sequences_a_step_has(name, num_qo_heads, generation):
    case = dataclasses.replace(CASES["plain"], spec=PLAIN.replace(num_qo_heads=num_qo_heads, graph=name))
    rt = build_runtime(adapter.FlashInferMLABackend, dataclasses.replace(case, steps=((20,) * 4,)), HOPPER, 0)
    tokens = 1 if name == "decode" else 3
    plan = rt.init_graph(4, num_tokens=None if name == "decode" else 12, max_kv_len=20)
    seqs = rt.new_sequences(4)
    for size in (1, 4, 2):
        rt.refresh_graph(plan, rt.extend(seqs[:size], [tokens] * size))
    assert wrapper_of(plan)._qo_indptr_buf.tolist() == [tokens * i for i in range(5)]


def test_a_step_of_more_tiles_than_a_plan_has_room_for_is_refused(generation):
    rt, seqs = runtime(PLAIN.replace(num_qo_heads=128), (16300, 300))
    rt.plan(rt.extend(seqs[1:], [300]))
    with pytest.raises(ContractError, match="up to 16252 tiles of 128 query rows, and 16300 new tokens of 128 heads"):
        rt.plan(rt.extend(seqs[:1], [16300]))


@pytest.mark.parametrize(("arch", "backend"), [("sm90", "fa3"), ("sm89", "fa2"), ("sm100", "fa2")])
def test_the_kernels_are_those_of_the_arch(arch, backend, generation):
    rt, seqs = runtime(PLAIN, (3,), dataclasses.replace(HOPPER, arch=arch))
    assert wrapper_of(rt.plan(rt.extend(seqs, [3]))).backend == backend


def test_a_wrapper_serves_another_plan_only_when_its_own_is_gone(generation):
    rt, seqs = runtime(PLAIN, (9, 9, 9))
    first = rt.plan(rt.extend(seqs[:1], [5]))
    second = rt.plan(rt.extend(seqs[1:2], [1]))
    used = [wrapper_of(plan) for plan in (first, second)]
    assert used[0] is not used[1]
    del first
    assert wrapper_of(rt.plan(rt.extend(seqs[2:], [5]))) is used[0]


@pytest.mark.parametrize("generation", ["0.7"], indirect=True)
def test_page_ids_come_from_the_host_where_they_would_be_waited_for(generation):
    """0.7 reads the largest back. Of a step that is not the last, the host no longer has them."""
    rt, seqs = runtime(PLAIN, (200, 90))
    earlier, last = rt.extend(seqs[:1], [150]), rt.extend(seqs, [50, 90])
    of_last, of_earlier = rt.plan(last), rt.plan(earlier)
    assert wrapper_of(of_last).indices_at != last.kv_indices.data_ptr()
    np.testing.assert_array_equal(wrapper_of(of_last)._kv_indices_buf, last.kv_indices)
    assert wrapper_of(of_earlier).indices_at == earlier.kv_indices.data_ptr()


def test_its_priorities():
    priority = adapter.FlashInferMLABackend.capabilities.priority_for
    assert [priority(HOPPER, PLAIN, role, TYPICAL_LOAD) for role in ("decode", "prefill")] == [80, 70]
