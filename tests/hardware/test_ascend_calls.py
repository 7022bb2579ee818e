"""The Ascend adapters on the CPU, against an emulation of torch-npu that is bound to the wheel's declarations."""

import dataclasses
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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
from paged_kernel import chosen
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
        if backend.capabilities.mla_dims:
            found = (case for case in found if case.spec.num_qo_heads <= 16)
        yield from chosen(backend, found, names)


def graphs():
    for backend in FUSED:
        names = MLA_GRAPHS if backend.capabilities.mla_dims else GRAPHS
        yield from chosen(backend, graph_checks(backend, A2), names)


def scenes():
    for backend in BACKENDS:
        yield from chosen(backend, scenarios(backend, on(backend)), SCENARIOS)


def stores():
    for pool in POOLS:
        yield from chosen(pool, pool_checks(pool, on(pool)), STORES)


@pytest.mark.parametrize(("backend", "case"), list(cases()))
def test_a_backend_is_right_in_every_case_that_it_declares(backend, case, monkeypatch):
    use(monkeypatch, on(backend).arch)
    assert check_case(backend, case, on(backend), torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(("backend", "check"), list(graphs()))
def test_a_graph_serves_later_steps(backend, check, monkeypatch):
    use(monkeypatch, A2.arch)
    check.run(torch.seed() % (1 << 31))


@pytest.mark.parametrize(("backend", "check"), list(scenes()))
def test_sequences_and_plans_do_not_disturb_each_other(backend, check, monkeypatch):
    use(monkeypatch, on(backend).arch)
    check.run(torch.seed() % (1 << 31))


@pytest.mark.parametrize(("pool", "check"), list(stores()))
def test_a_pool_keeps_what_is_stored(pool, check, monkeypatch):
    use(monkeypatch, on(pool).arch)
    check.run(torch.seed() % (1 << 31))


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


REPLAYS = {check.name: check for check in graph_checks(FusedInferAttentionV2Backend, A2)}
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


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_qo_heads": 258, "num_kv_heads": 6, "head_dim": 128}, "up to 256 query heads"),
        ({"num_qo_heads": 256, "num_kv_heads": 256, "head_dim": 256}, "65535 elements of all KV heads"),
        ({"num_qo_heads": 256, "num_kv_heads": 16, "head_dim": 256}, "up to 65534 elements of a token's query heads"),
    ],
)
def test_more_heads_than_a_call_takes_are_refused(fields, text):
    with pytest.raises(ContractError, match=f"{text}.*divide the heads among more devices"):
        built(FusedInferAttentionBackend, **fields)


HEADS = {"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize("backend", FUSED[:2])
def test_decode_of_more_keys_than_a_call_takes_is_refused(backend):
    host = SimpleNamespace(qo_lens=np.ones(1, dtype=np.int64))
    batch = SimpleNamespace(max_qo_len=1, max_kv_len=262145, num_seqs=1, num_tokens=1, host=host)
    with pytest.raises(ContractError, match="up to 262144 tokens, and one has 262145"):
        built(backend, **HEADS).plan(batch)


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
