"""The simulated devices that the built-in plugin offers: complete, and nothing that anything could run on."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from anyattn.platforms import cpu, simulated
from anyattn.platforms.base import Platform
from anyattn.plugins.manager import PluginManager
from anyattn.types import GraphLevel

OFFERS = PluginManager(entry_points=[]).simulated_devices()
DEVICES = {name: offer.load() for name, offer in OFFERS.items()}

ARCHS = {
    "h100": ("cuda", "sm90"),
    "h200": ("cuda", "sm90"),
    "a100": ("cuda", "sm80"),
    "l40s": ("cuda", "sm89"),
    "b200": ("cuda", "sm100"),
    "rtx5090": ("cuda", "sm120"),
    "mi300x": ("rocm", "gfx942"),
    "mi355x": ("rocm", "gfx950"),
    "ascend910b": ("ascend", "ascend910b"),
    "ascend910_93": ("ascend", "ascend910_93"),
    "ascend310p": ("ascend", "ascend310p"),
    "xeon-amx": ("cpu", "x86_64"),
    "xeon-avx2": ("cpu", "x86_64"),
    "epyc": ("cpu", "x86_64"),
    "graviton4": ("cpu", "aarch64"),
    "pvc": ("xpu", "pvc"),
    "b580": ("xpu", "bmg_g21"),
    "mtt-s5000": ("musa", "mp_31"),
    "m3": ("apple", "apple9"),
}
COLLECTIVES = {
    "cuda": "nccl", "rocm": "rccl", "ascend": "hccl", "xpu": "xccl", "musa": "mccl", "cpu": "gloo", "apple": "gloo",
}  # fmt: skip


def test_there_is_one_for_each_name_with_its_kind_and_architecture():
    assert {name: (device.kind, device.arch) for name, device in DEVICES.items()} == ARCHS


@pytest.mark.parametrize("name", ARCHS)
def test_a_device_is_a_frozen_platform_that_says_that_it_is_simulated(name):
    device = DEVICES[name]
    assert getattr(simulated, name.upper().replace("-", "_")) is device
    assert type(device) is Platform
    assert device.simulated
    assert device.torch_device == f"sim:{name}"
    assert str(device) == f"sim:{name} ({device.name}, {device.arch})"
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.arch = "x"


@pytest.mark.parametrize("name", ARCHS)
def test_the_facts_are_plausible_and_what_the_machine_would_decide_is_open(name):
    device = DEVICES[name]
    assert json.loads(json.dumps(device.to_json()))["simulated"]
    assert device.collective == COLLECTIVES[device.kind]
    assert device.num_cores >= 8
    assert device.memory_total_bytes is None or 1 << 33 < device.memory_total_bytes < 1 << 39
    assert (device.memory_total_bytes is None) == (device.kind == "cpu")
    assert (device.num_threads is None) == (device.kind != "cpu")
    assert device.memory_free_bytes is device.uuid is device.driver_version is device.runtime_version is None
    assert device.cpus is device.numa_nodes is device.memory_nodes is None
    assert device.problems == ()
    assert device.index == 0


def test_what_holds_for_a_whole_kind_is_the_same_for_each_of_its_devices():
    told = {
        "cuda": (GraphLevel.ALWAYS, True, "nvidia", "contract-tested"),
        "rocm": (GraphLevel.ALWAYS, True, "amd", "contract-tested"),
        "ascend": (GraphLevel.ALWAYS, True, "huawei", "contract-tested"),
        "xpu": (GraphLevel.ALWAYS, True, "intel", "contract-tested"),
        "musa": (GraphLevel.ALWAYS, True, "moore threads", "declared"),
        "cpu": (GraphLevel.NEVER, False, "intel", "run on hardware"),
        "apple": (GraphLevel.NEVER, False, "apple", "contract-tested"),
    }
    for device in DEVICES.values():
        graph, triton, vendor, status = told[device.kind]
        if device.kind == "ascend" and device.arch != "ascend910b":  # and the 310P is the one small chip among them
            graph, triton = GraphLevel.NEVER, device.arch != "ascend310p"
        if device.kind == "cpu":  # of several vendors; the probe was run on x86 alone
            vendor = {"EPYC": "amd", "Xeon": "intel", "Arm": "arm"}[re.search("EPYC|Xeon|Arm", device.name)[0]]
            status = "run on hardware" if device.arch == "x86_64" else "contract-tested"
        assert (device.graph, device.triton, device.vendor) == (graph, triton, vendor)
        assert device.status == ("run on hardware" if device.arch == "sm90" else status)


def test_only_nvidia_devices_have_a_compute_capability_and_it_is_their_architecture():
    for device in DEVICES.values():
        capability = device.compute_capability
        assert (capability is not None) == (device.kind == "cuda")
        assert capability is None or device.arch == f"sm{capability[0]}{capability[1]}"


def test_features_are_names_that_the_cpu_probe_looks_for_and_only_the_cpu_has_some():
    cpus = {name: device.features for name, device in DEVICES.items() if device.features}
    assert cpus.keys() == {name for name, device in DEVICES.items() if device.kind == "cpu"}
    assert all(features <= cpu._FEATURES for features in cpus.values())
    assert {"amx_bf16", "avx512_bf16", "avx512_fp16"} <= cpus["xeon-amx"]
    assert "amx_fp16" not in cpus["xeon-amx"]  # only its successor has it
    assert cpus["epyc"] == cpus["xeon-amx"] - {"avx_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}
    assert cpus["xeon-avx2"] == {"avx", "avx2", "fma", "f16c"}
    assert {"asimd", "bf16", "i8mm", "sve2"} <= cpus["graviton4"]


def test_torch_takes_none_of_them_for_a_device():
    torch = pytest.importorskip("torch", reason="needs torch")
    for device in DEVICES.values():
        with pytest.raises(RuntimeError):
            torch.device(device.torch_device)


def test_reading_them_imports_no_torch_and_no_numpy():
    program = "import sys, anyattn.platforms.simulated; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
