"""The Ascend adapters on the CPU, against an emulation of torch-npu that is bound to the wheel's declarations."""

import dataclasses
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.hardware_backend.ascend import fused_infer, paged_attention, pools
from anyattn.hardware_backend.ascend.fused_infer_attention import (
    FusedInferAttentionBackend,
    FusedInferAttentionV2Backend,
)
from anyattn.hardware_backend.ascend.fused_infer_attention_mla import FusedInferAttentionMLABackend
from anyattn.hardware_backend.ascend.paged_attention import NPUPagedAttentionBackend
from anyattn.mem_cache.base import LayerKV
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics import driver
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.scenarios import checks as scenarios
from anyattn.testing.pools.checks import checks as pool_checks

sys.path.append(str(Path(__file__).parent))
import ascend_emulation
from ascend_emulation import Npu, RefusedError
from paged_kernel import WHOLE_KIT, chosen, run_check
from vendor_calls import wheel


def device(arch):
    level = GraphLevel.NEVER if arch == "ascend310p" else GraphLevel.ALWAYS
    return Platform(kind="ascend", vendor="huawei", name="emulated", arch=arch, torch_device="cpu", graph=level)


A2, INFERENCE = device("ascend910b"), device("ascend310p")
FUSED = (FusedInferAttentionBackend, FusedInferAttentionV2Backend, FusedInferAttentionMLABackend)
BACKENDS = (*FUSED, NPUPagedAttentionBackend)
MLA = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
POOLS = (pools.AscendMHAPool, pools.AscendMLAPool, pools.AscendNZPool)


def on(tested):
    return INFERENCE if "ascend310p" in tested.capabilities.archs else A2


@functools.cache
def poisoned(pool):
    """Keeps what its null page holds, as the kit's own pools do."""

    class Poisoned(pool):
        def store(self, layer, k, v, slots):
            with driver._null_page_kept(self.layers[layer]):
                super().store(layer, k, v, slots)

    return Poisoned


def use(monkeypatch, arch):
    """torch-npu on such a chip, for all that calls it, and its pools for the kit."""
    npu = Npu(arch)
    for module in (fused_infer, paged_attention, pools):
        monkeypatch.setattr(module, "torch_npu", npu)
    heads = pools.AscendNZPool if arch == "ascend310p" else pools.AscendMHAPool
    classes = {True: poisoned(pools.AscendMLAPool), False: poisoned(heads)}
    monkeypatch.setattr(driver, "_pool_class", lambda case: classes[case.spec.is_mla])
    return npu


CASES = {
    FusedInferAttentionBackend: (
        "plain", "float16", "causal False", "sinks=True, return", "page size 512", "head dim 512, 512", "KV heads: 3",
        "16 query heads a KV head", "mixed", "decode of 33", "without tokens", "3000 tokens, return", "beyond 100",
        "random order", "strides", "behind a sequence's end", "two layers", "matrix: prefill", "matrix: mixed",
    ),
    FusedInferAttentionV2Backend: (
        "plain", "causal False", "sinks=True, return", "page size 384", "mixed", "2 to 13", "decode of 33",
        "16 new tokens", "without tokens", "3000 tokens, return", "behind a sequence's end",
        "strides", "two layers", "matrix: chunked",
    ),
    FusedInferAttentionMLABackend: (
        "plain", "float16", "prefill of 600", "mixed", "decode of 33", "16 new tokens", "without tokens",
        "random order", "behind a sequence's end", "two layers",
    ),
    NPUPagedAttentionBackend: (
        "plain", "page size 16", "head dim 80, 80", "KV heads: 3", "mixed", "decode of 33", "3 new tokens",
        "without tokens", "behind a sequence's end", "strides", "two layers", "matrix: prefill",
    ),
}  # fmt: skip
GRAPHS = (
    "across the ends of pages", "other sequences", "fewer sequences", "stay where they are", "at the capture",
    "waits for the device", "does not serve",
)  # fmt: skip
MLA_GRAPHS = ("across the ends of pages", "stay where they are")
SCENARIOS = ("NaN in one sequence", "several plans", "random order")
STORES = (
    "and nothing else", "out of it", "any strides", "no tokens", "apart", "copy_pages", "zero_tails", "read_pages"
)  # fmt: skip


def cases():
    for backend, names in CASES.items():
        found = cases_for(backend.capabilities)
        if backend.capabilities.mla_dims and not WHOLE_KIT:
            found = (case for case in found if case.spec.num_qo_heads <= 16)
        yield from chosen(backend, found, names)


def graphs():
    for backend in (FusedInferAttentionBackend, FusedInferAttentionMLABackend):
        names = MLA_GRAPHS if backend.capabilities.mla_dims else GRAPHS
        yield from chosen(backend, graph_checks(backend, A2), names)


def scenes():
    for backend in BACKENDS:
        found = scenarios(backend, on(backend))
        if backend in FUSED:  # they refuse pools that large
            found = (check for check in found if "64-bit offsets" not in check.name)
        yield from chosen(backend, found, SCENARIOS)


def stores():
    for pool in POOLS:
        yield from chosen(pool, pool_checks(pool, on(pool)), STORES)


@pytest.mark.parametrize(("backend", "case"), list(cases()))
def test_a_backend_is_right_in_cases_of_each_kind(backend, case, monkeypatch):
    use(monkeypatch, on(backend).arch)
    assert check_case(backend, case, on(backend), torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(("backend", "check"), list(graphs()))
def test_a_graph_serves_later_steps(backend, check, monkeypatch):
    use(monkeypatch, A2.arch)
    run_check(check)


@pytest.mark.parametrize(("backend", "check"), list(scenes()))
def test_sequences_and_plans_do_not_disturb_each_other(backend, check, monkeypatch):
    use(monkeypatch, on(backend).arch)
    run_check(check)


@pytest.mark.parametrize(("pool", "check"), list(stores()))
def test_a_pool_keeps_what_is_stored(pool, check, monkeypatch):
    use(monkeypatch, on(pool).arch)
    run_check(check)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_declaration_names_the_wheel_that_the_calls_are_bound_to(backend):
    assert backend.capabilities.contract_tested_with == wheel("ascend")


def calls_of(backend, npu, steps, **fields):
    """Calls of the operator that these steps of the plain case make."""
    plain = next(iter(cases_for(backend.capabilities)))
    case = dataclasses.replace(plain, steps=steps, **fields)
    assert check_case(backend, case, A2, 1).failure is None
    return npu.calls


def test_the_first_version_is_called_once_for_neighbours_with_as_many_new_tokens(monkeypatch):
    calls = calls_of(FusedInferAttentionBackend, use(monkeypatch, A2.arch), ((3, 3, 0, 5, 3), (1, 1, 1, 1, 1)))
    assert [call.q_lens for call in calls] == [[3, 3], [5], [3], [1, 1, 1, 1, 1]]
    assert [call.sparse_mode for call in calls] == [3, 3, 3, 0]


def test_the_second_version_is_called_once_for_a_step(monkeypatch):
    calls = calls_of(FusedInferAttentionV2Backend, use(monkeypatch, A2.arch), ((3, 3, 0, 5, 3), (1, 1, 1, 1, 1)))
    assert [call.q_lens for call in calls] == [[3, 6, 6, 11, 14], [1, 2, 3, 4, 5]]
    assert [call.kv_lens for call in calls] == [[3, 3, 0, 5, 3], [4, 4, 1, 6, 4]]


def test_a_prompt_of_mla_is_divided_among_sequences_of_16_tokens(monkeypatch):
    (call,) = calls_of(FusedInferAttentionMLABackend, use(monkeypatch, A2.arch), ((35, 0, 2),), stored_before=(7, 0, 5))
    assert (call.q_lens, call.kv_lens) == ([16, 32, 35, 37], [23, 39, 42, 7])
    assert torch.equal(call.block_table[0], call.block_table[2])


def test_mla_in_nz_keeps_rope_parts_in_pages_of_their_own(monkeypatch):
    use(monkeypatch, A2.arch)
    (kv,) = pools.AscendMLAPool(MLA.cache_spec(num_layers=1, page_size=128, layout="NZ"), 2, "cpu").layers
    assert (kv.k.shape, kv.rope.shape) == ((3, 1, 32, 128, 16), (3, 1, 4, 128, 16))
    assert kv.k.is_contiguous()
    assert kv.rope.is_contiguous()
    assert kv.v.data_ptr() == kv.k.data_ptr()


REPLAYS = {check.name: check for check in graph_checks(FusedInferAttentionBackend, A2)}
REPLAY = REPLAYS["decode: replays with other lengths, across the ends of pages"]


def test_replays_wait_for_the_updates_of_their_tasks(monkeypatch):
    npu = use(monkeypatch, A2.arch)
    REPLAY.run(0)
    assert npu.default.waited_for
    assert all(update.waited_for[-1] is npu.default for update in npu.default.waited_for)


def test_an_update_that_does_not_wait_for_replays_is_refused(monkeypatch):
    use(monkeypatch, A2.arch)
    monkeypatch.setattr(ascend_emulation.Stream, "_wait_stream", lambda self, stream: None)
    with pytest.raises(RefusedError, match="could still be running"):
        REPLAY.run(0)


def test_an_update_on_the_stream_of_the_capture_is_refused(monkeypatch):
    npu = use(monkeypatch, A2.arch)
    npu.npu.Stream = lambda device: npu.default
    with pytest.raises(RefusedError, match="another stream"):
        REPLAY.run(0)


def test_an_update_without_its_workspace_is_refused(monkeypatch):
    use(monkeypatch, A2.arch)
    monkeypatch.setattr(fused_infer.Operator, "workspace", lambda self, arguments: torch.empty(16, dtype=torch.uint8))
    with pytest.raises(RefusedError, match="no workspace"):
        REPLAY.run(0)


def test_a_task_group_outside_of_a_capture_is_refused():
    npu = Npu("ascend910b")
    with pytest.raises(RefusedError, match="while a stream captures"):
        npu.npu.graph_task_group_begin(npu.default)


def built(backend, layout="NHD", **fields):
    spec = MLA if backend.capabilities.mla_dims else AttentionSpec(**fields)
    return backend(spec, spec.cache_spec(num_layers=1, page_size=128, layout=layout), A2)


HEADS = {"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 128}


def step(qo_lens, kv_lens):
    """A step of so many tokens on the meta device, as far as `plan` reads it."""
    qo_lens, kv_lens = np.array(qo_lens), np.array(kv_lens)
    host = SimpleNamespace(
        qo_lens=qo_lens, kv_lens=kv_lens, prefix_lens=kv_lens - qo_lens, qo_indptr=np.array([0, *np.cumsum(qo_lens)])
    )
    return SimpleNamespace(
        max_qo_len=int(qo_lens.max()), max_kv_len=int(kv_lens.max()), num_seqs=len(qo_lens),
        num_tokens=int(qo_lens.sum()), host=host,
        block_table=torch.empty(len(qo_lens), 1, dtype=torch.int32, device="meta"),
    )  # fmt: skip


TOO_MANY_KEYS = [
    (FusedInferAttentionBackend, [1], [262145]),
    (FusedInferAttentionBackend, [1, 5], [262145, 5]),
    (FusedInferAttentionV2Backend, [1, 1], [5, 262145]),
    (FusedInferAttentionMLABackend, [1, 1], [262145, 5]),
]


@pytest.mark.parametrize(("backend", "qo_lens", "kv_lens"), TOO_MANY_KEYS)
def test_more_keys_than_a_call_with_one_new_token_each_takes_are_refused(backend, qo_lens, kv_lens):
    made = built(backend, layout=backend.capabilities.layouts[0], **HEADS)
    with pytest.raises(ContractError, match=r"up to 262144 keys .*, not 262145: set decode_backend='torch_native'"):
        made.plan(step(qo_lens, kv_lens))
    assert made.plan(step(qo_lens, [min(length, 262144) for length in kv_lens])).calls


@pytest.mark.parametrize("backend", [FusedInferAttentionBackend, FusedInferAttentionMLABackend])
def test_graphs_for_more_keys_than_a_call_takes_are_refused(backend):
    made = built(backend, layout=backend.capabilities.layouts[0], **HEADS)
    with pytest.raises(ContractError, match="up to 262144 keys"):
        made.init_graph(step([1], [262145]))


def test_a_step_of_more_tokens_than_layout_tnd_takes_is_divided():
    made = built(FusedInferAttentionV2Backend, **HEADS)
    lens = [1 << 19, 1 << 19, 1, *[0] * 5000, 2]
    assert [call.q_lens[-1] for call in made.plan(step(lens, lens)).calls] == [1 << 20, 1, 2]
    with pytest.raises(ContractError, match="up to 1048576 new tokens of a sequence"):
        made.plan(step([1, (1 << 20) + 1], [1, (1 << 20) + 1]))


def test_the_mask_of_a_graph_is_made_before_its_capture(monkeypatch):
    made = []
    monkeypatch.setattr(fused_infer, "_causal_mask", lambda device: made.append(device) or torch.empty(0))
    backend = built(FusedInferAttentionMLABackend, layout="NZ")
    assert backend.init_graph(step([2], [2])).calls[0].mask is not None
    assert len(made) == 1


def test_a_pool_makes_a_steps_slots_int32_once(monkeypatch):
    npu = use(monkeypatch, A2.arch)
    seen = []
    monkeypatch.setattr(npu, "_npu_reshape_and_cache", lambda **arguments: seen.append(arguments["slot_indices"]))
    pool = pools.AscendMHAPool(AttentionSpec(**HEADS).cache_spec(num_layers=3, page_size=128, layout="NHD"), 2, "cpu")
    slots, new = torch.arange(128, 130), torch.zeros(2, 8, 128)
    for layer in range(3):
        pool.store(layer, new, new, slots)
    slots += 1  # a graph's slots stay where they are, and hold another step's
    for layer in range(3):
        pool.store(layer, new, new, slots)
    assert [made.tolist() for made in seen] == [[128, 129]] * 3 + [[129, 130]] * 3
    assert len({id(made) for made in seen}) == 2
    npu.npu.is_current_stream_capturing = lambda: True
    pool.store(2, new, new, slots)
    assert seen[-1] is not seen[-2]


GQA = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=128)
V1_ALONE, V2_AND_V1 = ("fused_infer_attention",) * 2, ("fused_infer_attention_v2", "fused_infer_attention")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (GQA, ("fused_infer_attention_v2",) * 2),
        (GQA.replace(graph="decode"), V2_AND_V1),
        (GQA.replace(dtype="float16", graph="decode"), V1_ALONE),
        (GQA.replace(sinks=True, return_lse=True), ("fused_infer_attention_v2",) * 2),
        (GQA.replace(num_qo_heads=320, num_kv_heads=8), ("torch_native",) * 2),
        (GQA.replace(num_qo_heads=128, head_dim=512), ("torch_native",) * 2),
        (GQA.replace(num_qo_heads=128, num_kv_heads=2), ("fused_infer_attention_v2",) * 2),
        (MLA.replace(graph="uniform"), ("fused_infer_attention_mla",) * 2),
    ],
    ids=str,
)
def test_what_is_chosen_on_atlas_a2(spec, names):
    selection = anyattn.survey(spec, device="sim:ascend910b").selection
    assert (selection.prefill, selection.decode) == names


@pytest.mark.parametrize(
    ("device", "spec", "field"),
    [
        ("sim:ascend910b", GQA.replace(graph="decode", sinks=True), "sinks"),
        ("sim:ascend910b", GQA.replace(graph="decode", return_lse=True), "return_lse"),
        ("sim:ascend910b", MLA.replace(graph="decode", return_lse=True), "return_lse"),
        ("sim:ascend910b", GQA.replace(graph="uniform"), "graph"),
        ("sim:ascend910_93", GQA.replace(graph="decode"), "graph"),
        ("sim:ascend910b", GQA.replace(kv_dtype="float8_e4m3fn"), "kv_dtype"),
        ("sim:ascend910_93", GQA.replace(kv_dtype="float8_e5m2"), "kv_dtype"),
    ],
    ids=str,
)
def test_what_nothing_does_on_atlas_is_refused(device, spec, field):
    survey = anyattn.survey(spec, device=device)
    assert survey.selection is None
    assert f"{field}: wanted" in survey.explain()


def test_pages_that_the_operators_cannot_count_are_refused():
    pages = torch.empty(1 << 14, 128, 8, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ContractError, match="give num_pages=16382 or fewer"):
        fused_infer.require_addressable(LayerKV(k=pages, v=pages, layout="NHD"))
    fused_infer.require_addressable(LayerKV(k=pages[1:], v=pages[1:], layout="NHD"))


def test_a_graph_of_mla_for_more_than_16_tokens_of_a_sequence_is_refused():
    backend = built(FusedInferAttentionMLABackend, layout="NZ")
    with pytest.raises(ContractError, match="up to 16 new tokens"):
        backend.init_graph(SimpleNamespace(max_qo_len=17))


@pytest.mark.parametrize("pool", POOLS)
def test_pools_whose_slots_int32_cannot_name_are_refused(pool):
    spec = MLA if pool.capabilities.kind == "mla" else AttentionSpec(**HEADS)
    cache = spec.cache_spec(num_layers=1, page_size=128, layout=pool.capabilities.layouts[0])
    with pytest.raises(ContractError, match="give num_pages=16777214 or fewer"):
        pool(cache, 1 << 24, "meta")
