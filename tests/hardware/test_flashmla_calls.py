"""The FlashMLA adapter on the CPU, against emulations of the builds that it knows, with their signatures.

They compute with the reference, as operators that an emulated graph can replay, and refuse what the real ones would get
wrong: metadata of other lengths, rows that are not aligned, and lengths of 0 where a build reads in front of the table.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from anyattn import AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.attention.reference import reference_attention
from anyattn.hardware_backend.cuda import flashmla, flashmla_providers
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import LayerKV
from anyattn.testing.graphs.capture import capture
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.types import ints

HOPPER = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu", graph=GraphLevel.ALWAYS
)
Backend = flashmla.FlashMLABackend
SPEC = AttentionSpec.mla(num_qo_heads=8, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.07, return_lse=True)
computed = []  # the lengths for which metadata were computed, call by call


def metadata_kernel(kv_lens, num_rows):
    """[num_sm_parts, 8] and [num_seqs + 1], from which `decode_kernel` can tell what they were computed for."""
    assert kv_lens.dtype == torch.int32
    assert kv_lens.is_contiguous()
    computed.append(kv_lens.tolist())
    blocks = -(-num_rows // 64)
    return torch.full((max(132 // blocks, 1), 8), num_rows, dtype=torch.int32), splits_of(kv_lens)


def splits_of(kv_lens):
    return torch.cat([kv_lens.new_zeros(1), (kv_lens + 1).cumsum(0, dtype=torch.int32)])


def decode_kernel(q, k_cache, block_table, kv_lens, scheduler, num_splits, scale, causal, shortest):
    """shortest: sequence that the build can take."""
    num_seqs, qo_len, heads, dim = q.shape
    assert dim == k_cache.shape[3] == 576
    assert k_cache.shape[1:3] == (64, 1)
    assert q.dtype == k_cache.dtype
    assert {x.dtype for x in (block_table, kv_lens, scheduler, num_splits)} == {torch.int32}
    rows = q.view(num_seqs, qo_len, 1, heads, dim).transpose(2, 3).reshape(num_seqs, qo_len * heads, 1, dim)
    for read in (rows, k_cache):
        assert read.stride(-1) == 1
        assert not any(place * 2 % 16 for place in (read.storage_offset(), *read.stride()[:-1]))
    assert int(kv_lens.min()) >= shortest
    assert torch.equal(num_splits, splits_of(kv_lens)), "metadata of other lengths"
    assert scheduler[:, 0].tolist() == [qo_len * heads] * max(132 // -(-qo_len * heads // 64), 1)
    spec = SPEC.replace(num_qo_heads=heads, sm_scale=scale, causal=causal)
    out, lse = q.new_zeros(num_seqs, qo_len, heads, 512), torch.full((num_seqs, heads, qo_len), float("inf"))
    for i, length in enumerate(kv_lens.tolist()):
        if length:
            k = k_cache[block_table[i, : -(-length // 64)]].flatten(0, 1)[:length]
            out[i], lse_here = reference_attention(spec, q[i], k, k[..., :512])
            lse[i] = lse_here.T.masked_fill(lse_here.T.isneginf(), float("inf"))
    return out, lse


LIBRARY = torch.library.Library("anyattn_flashmla_calls", "DEF")
LIBRARY.define("metadata(Tensor kv_lens, int num_rows) -> (Tensor, Tensor)")
LIBRARY.define(
    "decode(Tensor q, Tensor k_cache, Tensor block_table, Tensor kv_lens, Tensor scheduler, Tensor num_splits, "
    "float scale, bool causal, int shortest) -> (Tensor, Tensor)"
)
LIBRARY.impl("metadata", metadata_kernel, "CPU")
LIBRARY.impl("decode", decode_kernel, "CPU")
OPS = torch.ops.anyattn_flashmla_calls


@dataclasses.dataclass
class FlashMLASchedMeta:
    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def new_object(*args, **kwargs):
    return FlashMLASchedMeta(), None


def decode_with(sched_meta, q, k_cache, block_table, cache_seqlens, softmax_scale, causal):
    """As both builds with such an object do: it is filled at its first call, and may be used by calls of that shape."""
    assert isinstance(sched_meta, FlashMLASchedMeta)
    shape = (*q.shape, k_cache.shape[1], causal)
    assert sched_meta.config in (None, shape)
    if sched_meta.tile_scheduler_metadata is None:
        made = OPS.metadata(cache_seqlens, q.shape[1] * q.shape[2])
        sched_meta.tile_scheduler_metadata, sched_meta.num_splits = made
    sched_meta.config = shape
    tensors = sched_meta.tile_scheduler_metadata, sched_meta.num_splits
    return OPS.decode(q, k_cache, block_table, cache_seqlens, *tensors, softmax_scale, causal, 0)


def upstream_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # fmt: skip
    assert (head_dim_v, num_splits, is_fp8_kvcache, indices) == (512, None, False, None)
    return decode_with(tile_scheduler_metadata, q, k_cache, block_table, cache_seqlens, softmax_scale, causal)


def vllm_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None,
):  # fmt: skip
    arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits)
    result, lse = upstream_decode(*arguments, softmax_scale, causal, is_fp8_kvcache, indices)
    if out is None:
        return result, lse
    assert out.shape == (q.shape[0], 1, q.shape[1] * q.shape[2], 512)  # whatever the build's documentation says
    assert out.is_contiguous()
    return out.copy_(result.view(out.shape)), lse


def sgl_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
    use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
):  # fmt: skip
    assert (head_dim_v, num_splits, is_fp8_kvcache, indices) == (512, None, None, None)
    assert use_legacy, "Sparse attention is required"
    return decode_with(tile_scheduler_metadata, q, k_cache, block_table, cache_seqlens, softmax_scale, causal)


def sgl_metadata(
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, use_legacy=False
):  # fmt: skip
    assert (h_k, is_fp8_kvcache, topk, use_legacy) == (1, False, None, True)
    return OPS.metadata(seqlens_k, num_q_tokens_per_head_k)


def first_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
    causal=False,
):  # fmt: skip
    tensors = tile_scheduler_metadata, num_splits
    return OPS.decode(q, k_cache, block_table, cache_seqlens, *tensors, softmax_scale, causal, 1)


def first_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    assert num_heads_k == 1
    return list(OPS.metadata(cache_seqlens, num_heads_per_head_k))


def second_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None,
):  # fmt: skip
    tensors = tile_scheduler_metadata, num_splits
    return first_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, *tensors, softmax_scale, causal)


def second_metadata(
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
):  # fmt: skip
    return first_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def build(decode, metadata, **more):
    return SimpleNamespace(__name__="flash_mla", flash_mla_with_kvcache=decode, get_mla_metadata=metadata, **more)


VLLM = build(vllm_decode, new_object)
UPSTREAM = build(upstream_decode, new_object)
SGL = build(sgl_decode, new_object, get_mla_decoding_metadata=sgl_metadata, has_legacy=lambda: True)
FIRST = build(first_decode, first_metadata)
SECOND = build(second_decode, second_metadata)
BUILDS = {"vllm": VLLM, "upstream": UPSTREAM, "sgl": SGL, "first": FIRST, "second": SECOND}


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    """Of what torch says of the stream, and of vLLM's build; `installed` has others."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: _get_current_dispatch_mode() is not None)
    monkeypatch.setattr(flashmla_providers, "_MODULES", (VLLM,))
    computed.clear()


@pytest.fixture
def installed(monkeypatch):
    return lambda *builds: monkeypatch.setattr(flashmla_providers, "_MODULES", builds)


class FewHeads(Backend):
    """All but the sizes is the same with few heads, and takes less time to judge."""

    capabilities = dataclasses.replace(Backend.capabilities, group_sizes=ints(2))


def cases():
    """Those of few heads, and those of other numbers; their prompts, which are another backend's, are stored only."""
    for case in [*cases_for(FewHeads.capabilities), *cases_for(Backend.capabilities)]:
        if (case.capability == "group_sizes") == (case.spec.num_qo_heads != 2):
            prompts = case.steps[0] if case.stored_before is None and max(case.steps[0]) > 8 else None
            decoded = tuple((count,) * case.num_seqs for count in (1, 3, 1))
            yield case if prompts is None else dataclasses.replace(case, stored_before=prompts, steps=decoded)


def graphs():
    """Those without features, which the cases have: of several tokens each, and some of one each."""
    for check in graph_checks(FewHeads, HOPPER):
        of_several = check.name.startswith("uniform: ") and not any(part in check.name for part in ("MLA", "33", "max"))
        if of_several or check.name.startswith(("decode: padding", "decode: what the plan")):
            yield check


def on_builds(found, builds, *of_all):
    """All of these with vLLM's build; with these others those whose names end so, as they depend on what is called."""
    return [
        pytest.param(name, each, id=f"{name}: {each.name}")
        for each in found
        for name in ("vllm", *builds)
        if name == "vllm" or each.name.endswith(of_all)
    ]


@pytest.mark.parametrize(
    ("name", "case"), on_builds(cases(), list(BUILDS)[1:], "causal False, return_lse=True", "for two layers", "float16")
)
def test_the_adapter_is_right_in_every_case_that_it_declares(installed, name, case):
    installed(BUILDS[name])
    assert check_case(Backend, case, HOPPER, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(
    ("name", "check"),
    on_builds(graphs(), ["sgl", "first"], "with fewer sequences than were captured", "stay where they are"),
)
def test_a_graph_serves_every_later_step(installed, name, check):
    installed(BUILDS[name])
    check.run(torch.seed() % (1 << 31))


class Engine:
    """Two layers and steps of two sequences, without a runtime, so that layers run in any order, or not at all."""

    def __init__(self, **fields):
        self.backend = Backend(
            SPEC.replace(**fields), SPEC.cache_spec(num_layers=2, page_size=64, layout="NHD"), HOPPER
        )
        self.layers = [LayerKV(k=k, v=k[..., :512], layout="NHD", v_in_k=True) for k in torch.randn(2, 9, 64, 1, 576)]
        self.layers = [dataclasses.replace(kv, k=kv.k.bfloat16(), v=kv.v.bfloat16()) for kv in self.layers]

    def batch(self, *kv_lens, qo_len=1):
        """Its `kv_lens` may be changed in place, as those of a graph are."""
        table = torch.randint(1, 9, (len(kv_lens), 3), dtype=torch.int32)
        return SimpleNamespace(block_table=table, kv_lens=torch.tensor(kv_lens, dtype=torch.int32), max_qo_len=qo_len)

    def run(self, layer, plan, q=None):
        """Output and LSE."""
        tokens, heads = plan.kv_lens.shape[0] * plan.qo_len, SPEC.num_qo_heads
        q = torch.randn(tokens, heads, 576).bfloat16() if q is None else q
        return self.backend.run(q, self.layers[layer], plan, None)

    def captured(self, plan, *layers, warm_up=True):
        """What replays these layers. warm_up: whether they run before the capture too."""

        def function():
            if warm_up or torch.cuda.is_current_stream_capturing():
                return [self.run(layer, plan) for layer in layers]

        return capture(function, torch.device("cpu"))[1]

    def refresh(self, plan, batch, *kv_lens):
        """As a runtime does: the batch's tensors hold the step before the backend is asked."""
        batch.kv_lens.copy_(torch.tensor(kv_lens))
        self.backend.refresh_graph(plan, batch)
        computed.clear()


@pytest.mark.parametrize("name", BUILDS)
def test_the_layers_of_a_step_share_what_is_computed_once_and_steps_do_not(installed, name):
    installed(BUILDS[name])
    engine = Engine()
    first, second = (engine.backend.plan(engine.batch(*lens)) for lens in ((5, 70), (6, 7)))
    for layer, plan in ((0, first), (0, second), (1, second), (1, first), (0, first)):
        engine.run(layer, plan)
    assert sorted(computed) == [[5, 70], [6, 7]]


@pytest.mark.parametrize("name", ["upstream", "vllm"])
def test_each_replay_computes_metadata_once_for_all_layers_from_the_lengths_that_it_finds(installed, name):
    installed(BUILDS[name])
    engine = Engine()
    batch = engine.batch(0, 0, qo_len=2)
    plan = engine.backend.init_graph(batch)
    replay = engine.captured(plan, 0, 1)
    for lens in ((5, 70), (71, 0)):
        engine.refresh(plan, batch, *lens)
        replay()
        assert computed == [list(lens)]


@pytest.mark.parametrize("name", ["sgl", "first", "second"])
def test_metadata_that_can_be_computed_before_are_put_into_tensors_that_stay(installed, name):
    installed(BUILDS[name])
    engine = Engine()
    batch = engine.batch(0, 0)
    plan = engine.backend.init_graph(batch)
    tensors = plan.metadata
    replay = engine.captured(plan, 0, 1)
    engine.refresh(plan, batch, 5, 70)
    replay()
    engine.refresh(plan, batch, 71, 0)
    replay()
    assert computed == []
    assert all(kept is before for kept, before in zip(plan.metadata, tensors, strict=True))


def test_each_of_two_graphs_of_a_plan_computes_its_own_metadata():
    engine = Engine()
    batch = engine.batch(3, 4)
    plan = engine.backend.init_graph(batch)
    replays = [engine.captured(plan, 0, 1, warm_up=False) for _ in range(2)]
    for lens, replay in (((5, 6), replays[1]), ((7, 8), replays[0]), ((9, 70), replays[1])):
        engine.refresh(plan, batch, *lens)
        replay()
        assert computed == [list(lens)]


def test_a_graph_of_another_layer_than_ran_first_computes_its_own_metadata():
    engine = Engine()
    batch = engine.batch(3, 4)
    plan = engine.backend.init_graph(batch)
    engine.run(0, plan)
    replay = engine.captured(plan, 1)
    engine.refresh(plan, batch, 5, 70)
    replay()
    assert computed == [[5, 70]]


def test_a_layer_that_runs_without_a_graph_finds_neither_the_metadata_of_one_nor_those_of_an_earlier_step():
    engine = Engine()
    batch = engine.batch(3, 4)
    plan = engine.backend.init_graph(batch)
    replay = engine.captured(plan, 0, 1)
    engine.run(1, plan)  # what is in the graph holds nothing before the first replay
    for lens in ((5, 70), (71, 1)):
        engine.refresh(plan, batch, *lens)
        engine.run(1, plan)
        replay()
        assert computed == [list(lens)] * 2


def test_metadata_in_graphs_are_kept_when_others_take_their_place():
    engine = Engine()
    plan = engine.backend.init_graph(engine.batch(3, 4))
    engine.captured(plan, 0, 1)
    in_graph = plan.metadata
    engine.run(0, plan)
    assert plan.metadata is not in_graph
    assert plan.in_graphs == [in_graph]


@pytest.mark.parametrize("qo_len", [1, 3])
def test_a_row_that_sees_nothing_gives_output_0_and_lse_minus_infinity(qo_len):
    engine = Engine()
    out, lse = engine.run(0, engine.backend.plan(engine.batch(0, 9, qo_len=qo_len)))
    assert (out[:qo_len] == 0).all()
    assert lse[:qo_len].isneginf().all()
    assert lse[qo_len:].isfinite().all()
    assert lse.shape == (2 * qo_len, SPEC.num_qo_heads)


def watched(module, seen):
    """A build whose decode notes its arguments."""

    @functools.wraps(module.flash_mla_with_kvcache)
    def decode(**arguments):
        seen.append(arguments)
        return module.flash_mla_with_kvcache(**arguments)

    return SimpleNamespace(**{**vars(module), "flash_mla_with_kvcache": decode})


def test_an_output_is_what_the_kernel_made_and_no_copy(installed):
    seen = []
    installed(watched(VLLM, seen))
    engine = Engine()
    for qo_len in (1, 2):
        out, _ = engine.run(0, engine.backend.plan(engine.batch(5, 70, qo_len=qo_len)))
        assert "out" not in seen[-1]
        assert out.shape == (2 * qo_len, SPEC.num_qo_heads, 512)
        assert out.is_contiguous()


def test_q_is_copied_only_where_its_rows_are_not_aligned(installed):
    seen = []
    installed(watched(SGL, seen))
    engine = Engine()
    fused, odd = (torch.randn(2, SPEC.num_qo_heads + 3, dim).bfloat16() for dim in (584, 577))
    for q, is_aligned in ((fused[:, 1:9, :576], True), (fused[:, 1:9, 4:580], False), (odd[:, :8, :576], False)):
        engine.run(0, engine.backend.plan(engine.batch(5, 70)), q=q)
        assert (seen[-1]["q"].data_ptr() == q.data_ptr()) == is_aligned


def test_a_build_is_told_by_its_signatures():
    kinds = {name: type(flashmla_providers._provider_of(module)).__name__ for name, module in BUILDS.items()}
    assert kinds == {
        "vllm": "SelfFilling", "upstream": "SelfFilling", "sgl": "Legacy", "first": "TwoTensors",
        "second": "TwoTensors",
    }  # fmt: skip


def sparse_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=True, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
):  # fmt: skip
    raise AssertionError("Sparse attention is required: `indices` must be provided")


class Damaged:
    __name__ = "flash_mla"

    def __getattr__(self, name):
        raise OSError("undefined symbol")


UNFIT = {
    "sparse decode alone": build(sparse_decode, new_object),
    "without its legacy kernels": build(sgl_decode, new_object, has_legacy=lambda: False),
    "undefined symbol": Damaged(),
    "unknown signatures, flash_mla_with_kvcache(q, kv)": build(lambda q, kv: None, new_object),
    "get_mla_metadata(lens, heads)": build(first_decode, lambda lens, heads: None),
    "get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k, page_size)": build(
        first_decode, lambda cache_seqlens, num_heads_per_head_k, num_heads_k, page_size: None
    ),
    "unknown signatures": build(
        sgl_decode, new_object, has_legacy=lambda: True, get_mla_decoding_metadata=first_metadata
    ),
    "No module named": lazy_import("anyattn_flashmla_that_is_not_there"),
}


@pytest.mark.parametrize("why", UNFIT)
def test_a_build_that_cannot_be_called_is_refused_with_what_was_found(installed, why):
    installed(UNFIT[why])
    with pytest.raises(ContractError, match=re.escape(why)) as refused:
        Engine()
    assert "pip install" in str(refused.value)


def test_the_next_build_serves_where_the_first_does_not(installed):
    installed(*UNFIT.values(), SGL)
    assert isinstance(Engine().backend._provider, flashmla_providers.Legacy)
