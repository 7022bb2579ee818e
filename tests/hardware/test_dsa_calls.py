"""The adapter of FlashMLA's sparse decode on the CPU, against emulations of the builds that it knows.

They have the parameters of the real ones, compute with the reference, and refuse what these refuse or would get wrong:
other numbers of heads and keys, rows that are not aligned, slots outside of the pool, metadata of other shapes.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import anyattn
from anyattn import AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.attention.reference import sparse_attention
from anyattn.hardware_backend.cuda import dsa, flashmla_providers
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.sparse_pools import DSAPool, dsa_rows
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.sparse_cases import sparse_cases
from anyattn.types import ints

HOPPER = Platform(
    kind="cuda", vendor="nvidia", name="emulated", arch="sm90", torch_device="cpu", graph=GraphLevel.ALWAYS
)
Backend = dsa.DSABackend
TOPK = 64
SPEC = AttentionSpec.mla(
    num_qo_heads=5, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.07, kv_dtype="float8_e4m3fn", topk=TOPK,
    return_lse=True,
)  # fmt: skip
calls = []  # rows and heads of each


@dataclasses.dataclass
class FlashMLASchedMeta:
    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def new_object(*args, **kwargs):
    return FlashMLASchedMeta(), None


def decode_kernel(q, k_cache, indices, scheduler, num_splits, scale, sink):
    rows, qo_len, heads, dim = q.shape
    assert (qo_len, dim) == (1, 576)
    assert heads in (64, 128)
    assert rows <= 2048
    assert k_cache.shape[1:] == (64, 1, 656)
    assert indices.shape == (rows, 1, indices.shape[2])
    assert indices.shape[2] % 64 == 0
    assert (q.dtype, k_cache.dtype, indices.dtype) == (torch.bfloat16, torch.uint8, torch.int32)
    assert all(tensor.is_contiguous() for tensor in (q, k_cache, indices))
    assert q.data_ptr() % 16 == 0
    assert int(indices.min()) >= -1
    assert int(indices.max()) < k_cache.shape[0] * 64
    assert sink is None or (sink.shape, sink.dtype) == ((heads,), torch.float32)
    assert scheduler.shape == (132 // (heads // 64), 8)
    assert num_splits.tolist() == [rows] * (rows + 1)
    calls.append((rows, heads))
    slots = indices[:, 0].clamp(min=0)
    k = dsa_rows(k_cache[slots // 64, slots % 64, 0])
    spec = SPEC.replace(num_qo_heads=heads, sm_scale=scale)
    out, lse = sparse_attention(spec, q[:, 0], k, indices[:, 0] >= 0, sinks=sink)
    lse = lse.float().masked_fill(lse.isneginf(), float("inf"))
    return out.to(q.dtype)[:, None].contiguous(), lse[..., None].contiguous()


LIBRARY = torch.library.Library("anyattn_dsa_calls", "DEF")
LIBRARY.define(
    "decode(Tensor q, Tensor k_cache, Tensor indices, Tensor scheduler, Tensor num_splits, float scale, Tensor? sink) "
    "-> (Tensor, Tensor)"
)
LIBRARY.impl("decode", decode_kernel, "CPU")


def sparse_decode(q, k_cache, indices, sched_meta, softmax_scale, attn_sink):
    rows, _, heads, _ = q.shape
    shape = (rows, heads, indices.shape[2], k_cache.shape[1])
    assert sched_meta.config in (None, shape), "metadata of other shapes"
    if sched_meta.tile_scheduler_metadata is None:
        assert _get_current_dispatch_mode() is None, "metadata that only one graph computes"
        sched_meta.tile_scheduler_metadata = torch.zeros(132 // (heads // 64), 8, dtype=torch.int32)
        sched_meta.num_splits = torch.full((rows + 1,), rows, dtype=torch.int32)
    sched_meta.config, sched_meta.have_initialized = shape, True
    tensors = sched_meta.tile_scheduler_metadata, sched_meta.num_splits
    return torch.ops.anyattn_dsa_calls.decode(q, k_cache, indices, *tensors, softmax_scale, attn_sink)


def vllm_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None,
):  # fmt: skip
    assert (block_table, cache_seqlens, head_dim_v, num_splits) == (None, None, 512, None)
    assert (causal, is_fp8_kvcache, out) == (False, True, None)
    return sparse_decode(q, k_cache, indices, tile_scheduler_metadata, softmax_scale, attn_sink)


def sgl_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
    use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
):  # fmt: skip
    assert use_legacy, "the current kernels accept the V4.1 formats only"
    arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits)
    return vllm_decode(*arguments, softmax_scale, causal, is_fp8_kvcache, indices, attn_sink)


def sgl_metadata(
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, use_legacy=False
):  # fmt: skip
    raise AssertionError("sparse decode fills its metadata itself")


def upstream_since_september(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=True, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
):  # fmt: skip
    raise AssertionError


def older_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None,
):  # fmt: skip
    raise AssertionError


def older_metadata(
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
):
    raise AssertionError


def dense_decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False,
):  # fmt: skip
    raise AssertionError


def build(decode, metadata=new_object, **more):
    return SimpleNamespace(__name__="flash_mla", flash_mla_with_kvcache=decode, get_mla_metadata=metadata, **more)


VLLM = build(vllm_decode)
SGL = build(sgl_decode, get_mla_decoding_metadata=sgl_metadata, has_legacy=lambda: True)
BUILDS = {"vllm": VLLM, "sgl": SGL}


@pytest.fixture
def installed(monkeypatch):
    return lambda *builds: monkeypatch.setattr(flashmla_providers, "_MODULES", builds)


@pytest.fixture(autouse=True)
def vllm_is_installed(installed):
    installed(VLLM)
    calls.clear()


class FewHeads(Backend):
    """All but the sizes is the same with few heads, and takes less time to judge."""

    capabilities = dataclasses.replace(Backend.capabilities, group_sizes=ints(2))


def cases():
    """All of a few heads, and of each other number one."""
    yield from sparse_cases(FewHeads.capabilities)
    for case in sparse_cases(Backend.capabilities):
        if case.capability == "group_sizes":
            yield dataclasses.replace(case, steps=case.steps[1:3])


def graphs():
    """Some of the highest level, which has whole steps of any kind, as a graph holds nothing here but shapes."""
    for check in graph_checks(FewHeads, HOPPER):
        if check.name.startswith("always: ") and check.name.endswith(
            ("other lengths, across the ends of pages", "fewer sequences than were captured", "stores nothing",
             "in the graph for good", "waits for the device")
        ):  # fmt: skip
            yield check


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_the_adapter_is_right_in_every_case_that_it_declares(case):
    assert check_case(Backend, case, HOPPER, torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize("check", list(graphs()), ids=lambda check: check.name)
def test_a_graph_serves_every_later_step(check):
    check.run(torch.seed() % (1 << 31))


class Engine:
    """One layer with a pool of random rows, whose steps name slots as a runtime makes them."""

    def __init__(self, **fields):
        self.spec = SPEC.replace(**fields)
        cache = self.spec.cache_spec(num_layers=1, page_size=64, layout="NHD")
        self.pool = DSAPool(cache, 3, "cpu")
        self.pool.store(0, torch.randn(192, 576).bfloat16(), None, torch.arange(64, 256))
        self.kv: LayerKV = self.pool.layers[0]
        self.backend = Backend(self.spec, cache, HOPPER)

    def batch(self, num_tokens):
        return SimpleNamespace(num_tokens=num_tokens, block_table=torch.zeros(1, 1, dtype=torch.int32))

    def inputs(self, num_tokens, heads=None):
        q = torch.randn(num_tokens, heads or self.spec.num_qo_heads, 576).bfloat16()
        slots = torch.randint(64, 256, (num_tokens, TOPK), dtype=torch.int32)
        return q, slots.masked_fill(torch.rand(slots.shape) < 0.3, -1)

    def run(self, q, slots, plan=None, **given):
        plan = self.backend.plan(self.batch(q.shape[0])) if plan is None else plan
        out = torch.full((*q.shape[:2], 512), float("nan"), dtype=q.dtype)
        return out, self.backend.run(q, self.kv, plan, out, indices=slots, **given)

    def right(self, q, slots, sinks=None):
        read = slots.clamp(min=0)
        k = dsa_rows(self.kv.k[read // 64, read % 64, 0])
        return sparse_attention(self.spec, q, k, slots >= 0, sinks=sinks)


def assert_right(got, wanted):
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("heads", [1, 64, 65, 128])
@pytest.mark.parametrize("sinks", [None, torch.bfloat16, torch.float32], ids=["no sinks", "bf16 sinks", "f32 sinks"])
def test_heads_are_filled_up_to_what_the_kernel_takes_and_cut_off_again(installed, name, heads, sinks):
    installed(BUILDS[name])
    engine = Engine(num_qo_heads=heads, sinks=sinks is not None)
    given = None if sinks is None else torch.randn(heads).to(sinks)
    q, slots = engine.inputs(4)
    got = engine.run(q, slots, **({} if given is None else {"sinks": given}))
    assert_right(got, engine.right(q, slots, None if given is None else given.double()))
    assert calls == [(4, 64 if heads <= 64 else 128)]


@pytest.mark.parametrize("heads", [5, 64])
def test_a_part_of_a_fused_projection_or_an_odd_address_is_copied_first(heads):
    engine = Engine(num_qo_heads=heads)
    fused, slots = engine.inputs(3, heads=2 * heads)
    odd = torch.empty(1 + 3 * heads * 576, dtype=torch.bfloat16)[1:].view(3, heads, 576)
    for q in (fused[:, :heads], odd.copy_(fused[:, heads:])):
        assert_right(engine.run(q, slots), engine.right(q, slots))


def test_a_row_of_no_key_gives_output_0_and_lse_minus_infinity():
    engine = Engine()
    q, slots = engine.inputs(3)
    slots[1] = -1
    out, lse = engine.run(q, slots)
    assert (out[1] == 0).all()
    assert lse[1].isneginf().all()
    assert lse[[0, 2]].isfinite().all()
    assert lse.shape == (3, 5)


def test_the_lse_is_given_where_it_is_wanted_only():
    engine = Engine(return_lse=False)
    assert engine.run(*engine.inputs(2))[1] is None


def test_more_rows_than_a_call_takes_are_divided_and_calls_of_one_size_share_metadata(monkeypatch):
    monkeypatch.setattr(dsa, "_MOST_ROWS", 3)
    engine = Engine()
    plan = engine.backend.plan(engine.batch(8))
    assert plan.calls[0][2] is plan.calls[1][2]
    assert plan.calls[0][2] is not plan.calls[2][2]
    for _ in range(2):  # layers of one step
        q, slots = engine.inputs(8)
        assert_right(engine.run(q, slots, plan), engine.right(q, slots))
    assert calls == [(3, 64), (3, 64), (2, 64)] * 2


def test_a_graphs_metadata_are_there_before_its_capture_and_stay(monkeypatch):
    monkeypatch.setattr(dsa, "_MOST_ROWS", 3)
    engine = Engine()
    with torch.inference_mode():
        plan = engine.backend.init_graph(engine.batch(5))
    kept = [metadata.tile_scheduler_metadata for _, _, metadata in plan.calls]
    assert all(tensor is not None and not tensor.is_inference() for tensor in kept)
    engine.backend.refresh_graph(plan, engine.batch(5))
    q, slots = engine.inputs(5)
    assert_right(engine.run(q, slots, plan), engine.right(q, slots))
    now = [metadata.tile_scheduler_metadata for _, _, metadata in plan.calls]
    assert all(tensor is before for tensor, before in zip(now, kept, strict=True))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (build(upstream_since_september), "sparse decode alone, of other rows"),
        (build(older_decode, older_metadata), "before sparse decode took sinks"),
        (build(dense_decode), "no sparse decode, or another one"),
        (build(sgl_decode, has_legacy=lambda: False), "without its legacy kernels"),
    ],
    ids=["upstream since September", "two tensors", "dense alone", "sgl without legacy"],
)
def test_builds_without_this_sparse_decode_are_refused_with_what_they_lack(installed, module, message):
    installed(module)
    with pytest.raises(ContractError, match=f"no FlashMLA is installed whose sparse decode dsa.*{message}"):
        Engine()


def test_it_is_chosen_on_hopper_for_sparse_mla_alone():
    for level in ("never", "decode", "always"):
        found = anyattn.survey(SPEC.replace(num_qo_heads=128, topk=2048, graph=level), device="sim:h200").selection
        assert (found.prefill, found.decode, found.pool, found.page_size) == ("dsa", "dsa", "dsa", 64)
    dense = anyattn.survey(SPEC.replace(num_qo_heads=128, topk=None, kv_dtype="auto"), device="sim:h200").selection
    assert "dsa" not in (dense.prefill, dense.decode, dense.pool)
    fields = {r.field for v in dense.verdicts if v.name == "dsa" for r in v.reasons}
    assert fields == {"kv_lora_rank"}


@pytest.mark.parametrize(
    ("device", "fields", "field"),
    [
        ("sim:h200", {"topk": 32}, "topk"),
        ("sim:h200", {"num_qo_heads": 129}, "num_qo_heads"),
        ("sim:h200", {"dtype": "float16"}, "dtype"),
        ("sim:h200", {"logits_soft_cap": 3.0}, "logits_soft_cap"),
        ("sim:h200", {"deterministic": True}, "deterministic"),
        ("sim:b200", {}, "arch"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(device, fields, field):
    found = anyattn.survey(SPEC.replace(**fields), device=device, backend="dsa")
    assert found.selection is None
    assert field in str(found.error)
