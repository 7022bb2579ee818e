"""The backends on AMD's aiter, on the CPU, against emulations that each call's arguments are first bound for.

What a graph is captured from, too: the emulated functions are recorded with everything that they read on the device.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyattn import AttentionSpec, ContractError, GraphLevel, Platform
from anyattn.hardware_backend.rocm import aiter as prefill
from anyattn.hardware_backend.rocm import aiter_asm, aiter_mla, aiter_mla_prefill, aiter_paged, batch_prefill
from anyattn.hardware_backend.rocm.token_slots import rows_of
from anyattn.mem_cache.base import LayerKV
from anyattn.testing.graphs.checks import checks as graph_checks
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.scenarios import checks as scenarios

sys.path.append(str(Path(__file__).parent))
import aiter_emulation
from paged_kernel import GRAPHS, HEAD_CASES, MLA_CASES, chosen
from vendor_calls import wheel

BACKENDS = [
    prefill.AiterBackend, aiter_paged.AiterPagedBackend, aiter_paged.AiterPagedOCPBackend, aiter_asm.AiterAsmBackend,
    aiter_mla.AiterMLABackend, aiter_mla.AiterMLAOCPBackend, aiter_mla_prefill.AiterMLAPrefillBackend,
]  # fmt: skip
OF_BOTH_GENERATIONS = (aiter_mla.AiterMLABackend, aiter_mla.AiterMLAOCPBackend)
OF_LARGE_POOLS = (aiter_paged.AiterPagedBackend, aiter_paged.AiterPagedOCPBackend)
MODULES = (prefill, aiter_asm, aiter_mla, aiter_mla_prefill, aiter_paged, batch_prefill)


def device_of(backend):
    arch = min(backend.capabilities.archs)
    facts = {"kind": "rocm", "vendor": "amd", "torch_device": "cpu", "graph": GraphLevel.ALWAYS, "num_cores": 304}
    return Platform(name="emulated", arch=arch, **facts)


@pytest.fixture
def emulate(monkeypatch):
    """Has the backends' modules find aiter as it is on a backend's device, and returns that."""

    def emulate(backend, generation="wheel"):
        vendor = aiter_emulation.module(device_of(backend).arch, generation=generation)
        for module in MODULES:
            monkeypatch.setattr(module, "aiter", vendor, raising=False)
        return vendor

    return emulate


def of_each_generation(backend, found, names):
    """What is `chosen`, with each generation of aiter that the backend tells apart."""
    for parameters in chosen(backend, found, names):
        for generation in ("wheel", "repository") if backend in OF_BOTH_GENERATIONS else ("wheel",):
            yield pytest.param(*parameters.values, generation, id=f"{parameters.id}, {generation}")


def cases():
    for backend in BACKENDS:
        names = MLA_CASES if backend.capabilities.mla_dims else HEAD_CASES
        yield from of_each_generation(backend, cases_for(backend.capabilities), names)


def graphs():
    for backend in BACKENDS:
        if backend.capabilities.graph:
            yield from of_each_generation(backend, graph_checks(backend, device_of(backend)), GRAPHS)


def scenes():
    for backend in BACKENDS:
        parts = ("NaN in one sequence", "several plans", "random order")
        found = list(scenarios(backend, device_of(backend)))
        if backend not in OF_LARGE_POOLS:  # the others refuse what that check makes
            found = [check for check in found if "64-bit offsets" not in check.name]
        yield from of_each_generation(backend, found, parts)


@pytest.mark.parametrize(("backend", "case", "generation"), list(cases()))
def test_a_backend_is_right_in_cases_of_each_kind(emulate, backend, case, generation):
    emulate(backend, generation)
    assert check_case(backend, case, device_of(backend), torch.seed() % (1 << 31)).failure is None


@pytest.mark.parametrize(("backend", "check", "generation"), list(graphs()))
def test_a_graph_serves_later_steps(emulate, backend, check, generation):
    emulate(backend, generation)
    check.run(torch.seed() % (1 << 31))


@pytest.mark.parametrize(("backend", "check", "generation"), list(scenes()))
def test_sequences_and_plans_do_not_disturb_each_other(emulate, backend, check, generation):
    emulate(backend, generation)
    check.run(torch.seed() % (1 << 31))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_declaration_names_the_wheel_that_the_calls_are_bound_to(backend):
    assert backend.capabilities.contract_tested_with == wheel("aiter")


def test_pages_that_the_kernels_cannot_count_are_refused_before_they_are_called():
    pages = torch.empty(1, dtype=torch.bfloat16).expand(1 << 20, 16, 8, 128)
    with pytest.raises(ContractError, match=r"hold 17179869184: give num_pages=131070 or fewer, or backend='triton'"):
        rows_of(pages)
    assert rows_of(torch.empty(131071, 16, 8, 128, dtype=torch.bfloat16, device="meta")).shape == (2097136, 8, 128)


@pytest.mark.parametrize("sm_scale", [None, 0.1])
def test_what_differs_from_the_scale_that_the_asm_kernels_have_goes_into_q(emulate, sm_scale):
    """And where nothing does q is passed as it is, as another rounding would cost something."""
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=1, head_dim=128, sm_scale=sm_scale)
    backend = aiter_asm.AiterAsmBackend(spec, spec.cache_spec(num_layers=1, page_size=16, layout="5D"), None)
    emulate(aiter_asm.AiterAsmBackend).pa_fwd_asm = lambda **arguments: called.update(arguments)
    q, called = torch.randn(2, 8, 128), {}
    lens, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    kv = LayerKV(k=torch.empty(1), v=torch.empty(1), layout="5D")
    buffer = None if sm_scale is None else torch.empty_like(q)
    plan = SimpleNamespace(step=SimpleNamespace(block_table=table, kv_lens=lens), q=buffer)
    backend.run(q, kv, plan, None)
    if sm_scale is None:
        assert called["Q"] is q
    else:
        torch.testing.assert_close(called["Q"] * 128**-0.5, q * sm_scale)
