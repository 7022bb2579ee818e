"""What an NVIDIA GPU can run, run on it: `pytest -m cuda`. FlashInfer compiles its kernels at their first use."""

import dataclasses
import secrets
import sys
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn import discovery
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.attention.triton_attention.backend import TritonBackend
from anyattn.hardware_backend.cuda.dsa import DSABackend
from anyattn.hardware_backend.cuda.fa3 import FA3Backend
from anyattn.hardware_backend.cuda.fa4 import FA4Backend
from anyattn.hardware_backend.cuda.flashinfer import FlashInferBackend
from anyattn.hardware_backend.cuda.flashinfer_mla import FlashInferMLABackend
from anyattn.hardware_backend.cuda.flashmla import FlashMLABackend
from anyattn.hardware_backend.cuda.xqa import XQABackend
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.device_allocator import DeviceAllocator
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.mem_cache.sparse_pools import DSAPool, IndexKPool
from anyattn.platforms.simulated import H200
from anyattn.plugins.requirements import missing_packages
from anyattn.testing.check import CannotRunError
from anyattn.testing.suite import checks_for
from anyattn.testing.target import Target

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "anyattn-example-plugin"))
from anyattn_example_plugin.backend import ExampleBackend  # noqa: E402


class GraphsOnCUDA(ExampleBackend):
    """The example's backend, whose operators a CUDA graph can capture."""

    capabilities = dataclasses.replace(ExampleBackend.capabilities, device_kinds=frozenset({"cuda"}))


TARGETS = {
    "dsa_backend": ("backend", DSABackend),
    "fa3": ("backend", FA3Backend),
    "fa4": ("backend", FA4Backend),
    "flashinfer": ("backend", FlashInferBackend),
    "flashinfer_mla": ("backend", FlashInferMLABackend),
    "flashmla": ("backend", FlashMLABackend),
    "xqa": ("backend", XQABackend),
    "reference": ("backend", ReferenceBackend),
    "torch_native": ("backend", TorchNativeBackend),
    "triton": ("backend", TritonBackend),
    "graphs": ("backend", GraphsOnCUDA),
    "paged": ("allocator", PagedAllocator),
    "device": ("allocator", DeviceAllocator),
    "mha": ("pool", MHAPool),
    "mla": ("pool", MLAPool),
    "dsa": ("pool", DSAPool),
    "index_k": ("pool", IndexKPool),
}
SIM_H200 = dataclasses.replace(H200, simulated=False, torch_device="cuda:0")  # the checks' names follow from facts


def checks():
    for name, (kind, tested) in TARGETS.items():
        place = f"{tested.__module__}:{tested.__qualname__}"
        target = Target(kind=kind, name=name, place=place, loaded=tested)
        for check in checks_for(target, SIM_H200):
            if check.tier != "contract":
                yield pytest.param(name, check.id, id=f"{name} {check.id}")


GQA = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def gpu():
    return discovery.usable_device("cuda")


def require_packages(backend):
    for reason in missing_packages(getattr(backend.capabilities, "packages", ()), ""):
        pytest.skip(f"needs {reason.wanted}: {reason.supported}")


@pytest.fixture
def flashinfer_is_installed():
    require_packages(FlashInferBackend)


@pytest.fixture(scope="module")
def checks_here(gpu):
    """By target and id, for the device that is here."""
    return {
        (name, check.id): check
        for name, (kind, tested) in TARGETS.items()
        for check in checks_for(Target(kind=kind, name=name, place=f"{tested.__module__}:_", loaded=tested), gpu)
    }


@pytest.mark.parametrize(("name", "check_id"), list(checks()))
def test_what_a_declaration_says_holds_on_the_device(checks_here, name, check_id):
    require_packages(TARGETS[name][1])
    seed = secrets.randbelow(1 << 31)
    print("seed", seed)
    try:
        checks_here[name, check_id].run(seed)
    except CannotRunError as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("flashinfer_is_installed")
def test_the_fastest_of_each_role_are_chosen_for_a_plain_model(gpu):
    require_packages(FA3Backend)
    if gpu.arch != "sm90":
        pytest.skip("needs a Hopper GPU")
    rt = anyattn.create_runtime(anyattn.AttentionSpec(**GQA), num_layers=1, num_pages=64, device="cuda")
    assert (rt.selection.prefill, rt.selection.decode) == ("fa3", "flashinfer")


@pytest.mark.usefixtures("flashinfer_is_installed")
def test_a_flashinfer_plan_stays_valid_while_others_are_made_and_run():
    rt = anyattn.create_runtime(
        anyattn.AttentionSpec(**GQA), num_layers=1, num_pages=256, device="cuda", backend="flashinfer"
    )
    q, k, v = (torch.randn(90, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    first, second = rt.new_sequences(1), rt.new_sequences(2)
    plan = rt.plan(rt.extend(first, [90]))
    wanted = rt.run(0, q, k, v, plan).clone()
    other = rt.plan(rt.extend(second, [30, 60]))
    rt.run(0, *(torch.randn_like(x) for x in (q, k, v)), other)
    assert torch.equal(rt.run(0, q, k, v, plan), wanted)


def test_the_pool_and_the_page_table_on_the_device_need_no_host_sync():
    """Extending, planning, storing and attending in torch wait for nothing on the device."""
    rt = anyattn.create_runtime(
        anyattn.AttentionSpec(**GQA), num_layers=1, num_pages=64, device="cuda", backend="torch_native"
    )
    seqs = rt.new_sequences(2)
    tensors = [torch.randn(8, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)]
    rt.run(0, *tensors, rt.plan(rt.extend(seqs, [5, 3])))
    torch.cuda.set_sync_debug_mode("error")
    try:
        rt.run(0, *tensors, rt.plan(rt.extend(seqs, [3, 5])))
        rt.run(0, *(x[:2] for x in tensors), rt.plan(rt.extend(seqs, [1, 1])))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_native_keeps_to_the_flash_kernel():
    """cuDNN, which torch may prefer, plans anew for every length, and every decode step has new ones."""
    rt = anyattn.create_runtime(
        anyattn.AttentionSpec(**GQA), num_layers=1, num_pages=64, device="cuda", backend="torch_native"
    )
    seqs = rt.new_sequences(2)
    q, k, v = (torch.randn(60, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for counts in ([40, 20], [1, 1]):
            tokens = sum(counts)
            rt.run(0, q[:tokens], k[:tokens], v[:tokens], rt.plan(rt.extend(seqs, counts)))
        torch.cuda.synchronize()
    operators = {event.key for event in profile.key_averages() if "scaled_dot_product" in event.key}
    assert any("flash" in name for name in operators), operators
    assert not any("cudnn" in name or "efficient" in name for name in operators), operators
