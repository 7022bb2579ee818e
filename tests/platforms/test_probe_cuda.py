"""The NVIDIA probe, with the machine faked at its edges: the pynvml module, the process that asks the CUDA driver, the
files below /dev, /proc and /sys, the environment, torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anyattn.platforms import cuda, host
from anyattn.platforms.base import ProbeResult
from anyattn.types import GraphLevel

GIB = 1 << 30


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


@dataclass
class Gpu:
    """A GPU, or a MIG slice of one, and at once NVML's handle of it."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    cuda_cores: int = 132 * 128
    memory: Any = field(default_factory=lambda: SimpleNamespace(total=80 * GIB, free=79 * GIB))
    slices: list[Gpu | None] | None = None
    """None: not in MIG mode. A None in the list is a place where a slice could be."""
    instances: tuple[int, int] = (0, 0)
    multiprocessors: int = 16
    errors: dict[str, NVMLError] = field(default_factory=dict)
    """By the name of the function that raises."""


class FakeNvml(ModuleType):
    """pynvml with these GPUs. Attributes that a test sets on it replace functions."""

    def __init__(self, gpus: list[Gpu]) -> None:
        super().__init__("pynvml")
        self.gpus, self.sessions = gpus, 0
        self.NVMLError, self.NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
        self.NVMLError_NoPermission, self.NVMLError_FunctionNotFound = (
            NVMLError_NoPermission,
            NVMLError_FunctionNotFound,
        )
        self.answer("Name", lambda gpu: gpu.name)
        self.answer("UUID", lambda gpu: gpu.uuid)
        self.answer("CudaComputeCapability", lambda gpu: gpu.capability)
        self.answer("MemoryInfo", lambda gpu: gpu.memory)
        self.answer("NumGpuCores", lambda gpu: gpu.cuda_cores)
        self.answer("Attributes", lambda gpu: SimpleNamespace(multiprocessorCount=gpu.multiprocessors))
        self.answer("MigMode", lambda gpu: [int(gpu.slices is not None)] * 2)
        self.answer("MaxMigDeviceCount", lambda gpu: len(gpu.slices))
        self.answer("GpuInstanceId", lambda gpu: gpu.instances[0])
        self.answer("ComputeInstanceId", lambda gpu: gpu.instances[1])

    def answer(self, fact: str, read: Any) -> None:
        def function(gpu: Gpu) -> Any:
            assert self.sessions == 1, "asked outside of nvmlInit and nvmlShutdown"
            if fact in gpu.errors:
                raise gpu.errors[fact]
            return read(gpu)

        setattr(self, f"nvmlDeviceGet{fact}", function)

    def nvmlInit(self) -> None:
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        if "Handle" in gpu.errors:
            raise gpu.errors["Handle"]
        return gpu

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        assert gpu.slices is not None
        found = gpu.slices[index]
        if found is None:
            raise NVMLError_NotFound("Not Found")
        return found


def driver_device(uuid: str, name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0)) -> dict:
    """One device as the child process that asks the CUDA driver tells it."""
    return {
        "name": name,
        "uuid": uuid,
        "compute_capability": list(capability),
        "num_cores": 132,
        "memory_total_bytes": 80 * GIB,
    }


NO_LIBRARY = {"error": "cannot be loaded: libcuda.so.1: cannot open shared object file"}
MISMATCH = {"error": "does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803): reboot", "code": 803}
NO_DEVICE = {"error": "does not start: CUDA_ERROR_NO_DEVICE (100): no device can be used", "code": 100}

A, B, C = (f"GPU-{digit * 3}{digit}937-d72c-4106-c12f-20bd9faed9f6" for digit in "abc")
M, N = (f"MIG-{digit * 4}4a58-ed3a-5e19-8f0e-5f6b1f4d3c2b" for digit in "12")


class Machine:
    """A machine with the driver, torch for CUDA 13.0, and no variable set."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        monkeypatch.setattr(host, "ROOT", root)
        for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(variable, raising=False)
        self.write("site/torch/__init__.py", "raise ImportError('a probe must not import torch')")
        self.torch("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(root / "site")
        self.gpus(Gpu(A), Gpu(B), Gpu(C))
        self.driver: dict[str, Any] = NO_LIBRARY
        """What the child process answers."""
        self.num_children = 0
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **options: Any) -> Any:
        assert command[0] == sys.executable
        assert command[-1].endswith("cuda_driver.py")
        self.num_children += 1
        return SimpleNamespace(stdout=json.dumps(self.driver), stderr="", returncode=0)

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def torch(self, version_py: str) -> None:
        self.write("site/torch/version.py", f"from typing import Optional\n{version_py}")

    def gpus(self, *gpus: Gpu) -> FakeNvml:
        self.nvml = FakeNvml(list(gpus))
        self.monkeypatch.setitem(sys.modules, "pynvml", self.nvml)
        return self.nvml

    def without_nvml(self, *models: str, sign: str = "dev/nvidiactl") -> None:
        """NVML does not start; the driver's files show these models."""

        def fail() -> None:
            raise NVMLError("Driver/library version mismatch")

        self.nvml.nvmlInit = fail  # type: ignore[method-assign]
        self.write(sign)
        for number, model in enumerate(models):
            self.information(number, model)

    def information(self, number: int, model: str, uuid: str | None = None, excluded: str = "No") -> None:
        lines = {
            "Model": model,
            "IRQ": "10",
            "GPU UUID": (A, B, C)[number] if uuid is None else uuid,
            "Bus Location": f"0000:{number + 1}8:00.0",
            "Device Minor": str(number),
            "GPU Excluded": excluded,
        }
        text = "".join(f"{key}: \t {value}\n" for key, value in lines.items())
        self.write(f"proc/driver/nvidia/gpus/0000:{number + 1}8:00.0/information", text)

    def pci(self, class_id: int, driver: str | None, address: str = "0000:65:00.0") -> None:
        folder = f"sys/bus/pci/devices/{address}"
        for name, number in (("vendor", 0x10DE), ("device", 0x2330), ("class", class_id)):
            self.write(f"{folder}/{name}", f"{number:#x}")
        if driver is not None:
            (self.root / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")

    def probe(self, visible: str | None = None, order: str | None = None) -> ProbeResult:
        for variable, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
            if value is not None:
                self.monkeypatch.setenv(variable, value)
        result = cuda.probe()
        assert self.nvml.sessions == 0, "NVML was left open"
        return result


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def uuids(result: ProbeResult) -> list[str | None]:
    return [device.uuid for device in result.devices]


def test_each_visible_gpu_is_one_device_in_cudas_order(machine: Machine) -> None:
    result = machine.probe()
    assert uuids(result) == [A, B, C]
    assert result.problems == ()
    first, second, _ = result.devices
    assert (first.kind, first.vendor, first.name) == ("cuda", "nvidia", "NVIDIA H100 80GB HBM3")
    assert (first.arch, first.compute_capability, first.num_cores) == ("sm90", (9, 0), 132)
    assert (first.memory_total_bytes, first.memory_free_bytes) == (80 * GIB, 79 * GIB)
    assert (first.driver_version, first.runtime_version) == ("580.65.06", "13.0")
    assert (first.collective, first.graph, first.triton) == ("nccl", GraphLevel.ALWAYS, True)
    assert first.problems == ()
    assert (second.index, second.torch_device) == (1, "cuda:1")


# Held against cuDeviceGetCount and cuDeviceGetUuid of driver 580, with two GPUs, for every rule named here.
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param("1", [B], id="an index chooses one"),
        pytest.param("2,0", [C, A], id="the order of the list is the order of the devices"),
        pytest.param("", [], id="empty hides all"),
        pytest.param(" ", [], id="blank hides all"),
        pytest.param("-1", [], id="minus one hides all"),
        pytest.param("NoDevFiles", [], id="NoDevFiles hides all"),
        pytest.param("-1,0", [], id="what follows minus one is hidden"),
        pytest.param("0,-1,1", [A], id="minus one ends the list"),
        pytest.param("0,3,1", [A], id="an index out of range ends the list"),
        pytest.param("0,,1", [A], id="an empty entry ends the list"),
        pytest.param("0,x,1", [A], id="a word ends the list"),
        pytest.param("0,1,0", [], id="a repeat voids the list"),
        pytest.param("0,-1,0", [A], id="a repeat after the end is not seen"),
        pytest.param("0, 1", [A, B], id="spaces before an index are skipped"),
        pytest.param("1gpu,+0,0x2", [], id="digits are read as far as they go"),
        pytest.param("1gpu,+2", [B, C], id="a sign and trailing letters do not matter"),
        pytest.param("-0", [A], id="minus zero is zero"),
        pytest.param(B, [B], id="a UUID chooses one"),
        pytest.param(f"{C},{A}", [C, A], id="UUIDs in their order"),
        pytest.param(f"{C[:8]},{A[:6]}", [C, A], id="beginnings of UUIDs that are unique"),
        pytest.param("GPU-BBBB937D72C", [B], id="case and dashes after GPU- do not matter"),
        pytest.param(B.lower(), [], id="the prefix itself is in capitals"),
        pytest.param(B[4:], [], id="a UUID without its prefix is none"),
        pytest.param("GPU-", [], id="a beginning that several share is none"),
        pytest.param(f"{A},GPU-ffff,{B}", [A], id="an unknown UUID ends the list"),
        pytest.param(f"{A},{B},{A[:8]}", [], id="a repeat under a shorter name voids the list"),
        pytest.param(f"0,{B}", [A], id="a UUID ends a list of indices"),
        pytest.param(f"{B},0", [B], id="an index ends a list of UUIDs"),
        pytest.param(f"{A}, {B}", [A], id="a space before a UUID ends the list"),
        pytest.param(f"{A} ,{B}", [A, B], id="a space after a UUID is skipped"),
        pytest.param(f"{A},MIG-1111", [A], id="an unknown MIG UUID ends the list"),
    ],
)
def test_visible_devices_follows_the_drivers_rules(machine: Machine, setting: str, expected: list[str]) -> None:
    result = machine.probe(setting)
    assert uuids(result) == expected
    assert [device.torch_device for device in result.devices] == [f"cuda:{i}" for i in range(len(expected))]


@pytest.mark.parametrize("setting", ["", "-1", "NoDevFiles", "1,0", "0,-1,1", A])
def test_a_setting_that_hides_devices_on_purpose_is_no_problem(machine: Machine, setting: str) -> None:
    assert machine.probe(setting).problems == ()


@pytest.mark.parametrize(("setting", "text"), [("0,7", 'no device "7"'), ("0,0", "twice"), ("GPU-ffff", '"GPU-ffff"')])
def test_a_setting_that_names_the_wrong_devices_is_a_problem(machine: Machine, setting: str, text: str) -> None:
    (problem,) = machine.probe(setting).problems
    assert text in problem
    assert f'CUDA_VISIBLE_DEVICES="{setting}"' in problem


def mig_machine(machine: Machine) -> None:
    first = Gpu(M, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", instances=(9, 0))
    second = Gpu(N, name="NVIDIA H100 80GB HBM3 MIG 2g.20gb", instances=(3, 0), multiprocessors=32)
    first.memory = SimpleNamespace(total=10 * GIB, free=9 * GIB)
    # NVML does not tell these of a slice; they are its GPU's.
    first.errors = {fact: NVMLError_NotSupported("Not Supported") for fact in ("CudaComputeCapability", "NumGpuCores")}
    second.errors = first.errors
    # In a container that was given slices only, the GPU's own memory is not for this process to see.
    whole = Gpu(A, slices=[None, first, None, second], errors={"MemoryInfo": NVMLError_NoPermission("No Permission")})
    machine.gpus(whole, Gpu(B))


def test_a_mig_uuid_gives_the_slice_with_its_own_memory_and_cores(machine: Machine) -> None:
    mig_machine(machine)
    result = machine.probe(M)
    (device,) = result.devices
    assert (device.uuid, device.name) == (M, "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert (device.arch, device.compute_capability) == ("sm90", (9, 0))
    assert (device.memory_total_bytes, device.memory_free_bytes) == (10 * GIB, 9 * GIB)
    assert (device.num_cores, device.torch_device) == (16, "cuda:0")
    assert result.problems == ()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param(N, [N], id="a later slice by its UUID"),
        pytest.param(f"MIG-{A}/3/0", [N], id="a slice by its GPU and instances"),
        pytest.param(A, [M], id="the partitioned GPU stands for its first slice"),
        pytest.param(f"{N},{M}", [N], id="only the first slice of a list"),
        pytest.param(B, [B], id="the GPU that is not partitioned"),
        pytest.param("0", [B], id="indices count whole GPUs first"),
        pytest.param("1", [M], id="then one slice of each partitioned GPU"),
        pytest.param("2", [], id="and no further slices"),
        pytest.param(None, [M], id="beside a slice no other device is shown"),
    ],
)
def test_a_process_sees_one_mig_slice_or_whole_gpus(machine: Machine, setting: str | None, expected: list[str]) -> None:
    mig_machine(machine)
    assert uuids(machine.probe(setting)) == expected


def test_a_gpu_in_mig_mode_without_a_slice_is_a_problem_and_not_a_device(machine: Machine) -> None:
    machine.gpus(Gpu(A, slices=[None]), Gpu(B))
    result = machine.probe()
    assert uuids(result) == [B]
    assert "NVIDIA GPU 0" in result.problems[0]
    assert "MIG" in result.problems[0]


def test_a_machine_without_any_nvidia_device_is_silent(machine: Machine) -> None:
    machine.gpus()
    assert machine.probe() == ProbeResult()


SIGNS = [
    ["dev/nvidiactl"],
    ["proc/driver/nvidia/version"],
    ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"],  # WSL
    ["dev/nvhost-gpu"],  # Jetson
    ["dev/nvgpu/igpu0/ctrl"],  # Jetson, newer
    ["Windows/System32/nvcuda.dll"],
]


@pytest.mark.parametrize("sign", [*SIGNS, ["dev/dxg"], []], ids=str)
@pytest.mark.parametrize("trouble", ["pynvml is missing", "pynvml is broken", "NVML fails"])
def test_without_nvml_it_says_so_and_asks_on_only_where_a_device_is_evidently_there(
    machine: Machine, sign: list[str], trouble: str
) -> None:
    for file in sign:
        machine.write(file)
    if trouble == "pynvml is missing":
        machine.monkeypatch.setitem(sys.modules, "pynvml", None)
        expected = "pip install nvidia-ml-py"
    elif trouble == "pynvml is broken":
        machine.monkeypatch.delitem(sys.modules, "pynvml")
        machine.write("site/pynvml.py", "raise RuntimeError('half an upgrade')")
        expected = "half an upgrade"
    else:

        def fail() -> None:
            raise NVMLError("Driver Not Loaded")

        machine.nvml.nvmlInit = fail
        expected = "Driver Not Loaded"
    result = machine.probe()
    assert result.devices == ()
    if sign in SIGNS:
        reason, driver = result.problems
        assert "/" + "/".join(sign[0].split("/")[:2]) in reason
        assert expected in reason
        assert "libcuda.so.1: cannot open shared object file" in driver
        assert machine.num_children == 1
    else:
        assert result.problems == ()
        assert machine.num_children == 0


def test_without_nvml_the_cuda_driver_tells_the_devices_that_it_shows(machine: Machine) -> None:
    machine.without_nvml()
    machine.write(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n"
    )
    machine.driver = {"cuda_version": [13, 0], "devices": [driver_device(B), driver_device(A, "NVIDIA T4", (7, 5))]}
    result = machine.probe()
    first, second = result.devices
    assert (first.name, first.uuid, first.arch, first.compute_capability) == (
        "NVIDIA H100 80GB HBM3",
        B,
        "sm90",
        (9, 0),
    )
    assert (first.memory_total_bytes, first.memory_free_bytes, first.num_cores) == (80 * GIB, None, 132)
    assert (first.driver_version, first.runtime_version, first.problems) == ("535.129.03", "13.0", ())
    assert (first.status, first.collective, first.triton) == ("run on hardware", "nccl", True)
    assert (second.index, second.torch_device, second.uuid, second.arch) == (1, "cuda:1", A, "sm75")
    (problem,) = result.problems
    assert "Driver/library version mismatch" in problem
    assert "nvidia-smi" in problem


def test_the_drivers_numbers_are_taken_as_they_are_whatever_the_variables_say(machine: Machine) -> None:
    machine.without_nvml("NVIDIA H100 80GB HBM3", "NVIDIA T4")
    machine.driver = {"cuda_version": [13, 0], "devices": [driver_device(C)]}
    result = machine.probe("2", "FASTEST_FIRST")  # the child has applied them
    assert [(device.uuid, device.torch_device) for device in result.devices] == [(C, "cuda:0")]
    assert len(result.problems) == 1


def test_a_device_that_does_not_answer_the_driver_is_a_problem_and_the_others_keep_their_numbers(
    machine: Machine,
) -> None:
    machine.without_nvml()
    machine.driver = {"cuda_version": [13, 0], "devices": [{"error": "CUDA_ERROR_UNKNOWN (999)"}, driver_device(B)]}
    result = machine.probe()
    assert [(device.uuid, device.torch_device) for device in result.devices] == [(B, "cuda:1")]
    assert "cuda:0" in result.problems[1]
    assert "CUDA_ERROR_UNKNOWN (999)" in result.problems[1]


def test_without_the_driver_too_its_files_tell_the_models_and_torch_cannot_use_them(machine: Machine) -> None:
    machine.without_nvml("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    machine.write("sys/module/nvidia/version", "580.65.06\n")
    machine.driver = MISMATCH
    result = machine.probe()
    assert uuids(result) == [A, B]
    first = result.devices[0]
    assert (first.name, first.arch, first.compute_capability) == ("NVIDIA H100 80GB HBM3", "sm90", (9, 0))
    assert (first.memory_total_bytes, first.memory_free_bytes, first.num_cores) == (None, None, None)
    assert (first.driver_version, first.status) == ("580.65.06", "contract-tested")
    (device_problem,) = first.problems
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)" in device_problem
    nvml_problem, driver_problem = result.problems
    assert "NVML does not start" in nvml_problem
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)" in driver_problem


def test_visible_devices_is_applied_to_what_the_files_tell(machine: Machine) -> None:
    machine.without_nvml(*["NVIDIA A100-SXM4-40GB"] * 3)
    result = machine.probe("2,0,7")
    assert [(device.uuid, device.torch_device) for device in result.devices] == [(C, "cuda:0"), (A, "cuda:1")]
    assert 'no device "7"' in result.problems[-1]


def test_files_of_different_models_are_told_to_be_in_another_order_than_cudas(machine: Machine) -> None:
    machine.without_nvml("NVIDIA T4", "NVIDIA L40S")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in machine.probe().problems[-1]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" not in machine.probe(order="PCI_BUS_ID").problems[-1]


@pytest.mark.parametrize(("setting", "is_told"), [(None, True), ("", False), ("-1", False), ("0", True)])
def test_a_driver_without_a_device_is_a_problem_unless_visible_devices_wants_none(
    machine: Machine, setting: str | None, is_told: bool
) -> None:
    machine.without_nvml("NVIDIA T4")
    machine.driver = NO_DEVICE
    told = [problem for problem in machine.probe(setting).problems if "CUDA_ERROR_NO_DEVICE" in problem]
    assert len(told) == is_told


def test_a_model_that_the_table_does_not_know_is_a_problem_and_left_out(machine: Machine) -> None:
    machine.without_nvml("NVIDIA Next 1000", "NVIDIA T4")
    result = machine.probe()
    assert [(device.uuid, device.torch_device) for device in result.devices] == [(B, "cuda:1")]
    assert any("cuda:0 (NVIDIA Next 1000) is left out" in problem for problem in result.problems)


def test_a_gpu_that_the_driver_excludes_takes_no_number_and_one_that_was_never_used_has_no_uuid(
    machine: Machine,
) -> None:
    machine.without_nvml()
    machine.information(0, "NVIDIA T4", excluded="Yes")
    machine.information(1, "NVIDIA T4", uuid="GPU-????????-????-????-????-????????????")
    (device,) = machine.probe().devices
    assert (device.torch_device, device.uuid) == ("cuda:0", None)


@pytest.mark.parametrize(
    ("model", "arch"),
    [
        ("NVIDIA GB10", "sm121"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm120"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "sm120"),
        ("NVIDIA B300 SXM6 AC", "sm103"),
        ("NVIDIA GB200", "sm100"),
        ("NVIDIA GH200 480GB", "sm90"),
        ("NVIDIA H100 PCIe", "sm90"),
        ("NVIDIA L4", "sm89"),
        ("NVIDIA L40S", "sm89"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "sm89"),
        ("NVIDIA GeForce RTX 4080 SUPER", "sm89"),
        ("NVIDIA A10", "sm86"),
        ("NVIDIA RTX A6000", "sm86"),
        ("NVIDIA A100-SXM4-80GB", "sm80"),
        ("Tesla T4", "sm75"),
        ("Quadro RTX 4000", "sm75"),
        ("NVIDIA TITAN RTX", "sm75"),
        ("Tesla V100-SXM2-32GB", "sm70"),
        ("NVIDIA TITAN V", "sm70"),
        ("Quadro P5000", "sm61"),
        ("Tesla P100-PCIE-16GB", "sm60"),
        ("NVIDIA A10X", None),
        ("NVIDIA A1000", None),
        ("GeForce GTX TITAN X", None),
    ],
)
def test_the_table_knows_a_model_by_the_beginning_of_its_name(machine: Machine, model: str, arch: str | None) -> None:
    machine.without_nvml(model)
    assert [device.arch for device in machine.probe().devices] == ([] if arch is None else [arch])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.80.02  Wed Sep 23 01:13:39 UTC 2020", "450.80.02"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root)", "580.65.06"),
        ("", None),
    ],
)
def test_the_drivers_release_is_read_from_its_file(machine: Machine, text: str, expected: str | None) -> None:
    machine.without_nvml("NVIDIA T4", sign="proc/driver/nvidia/version")
    machine.write("proc/driver/nvidia/version", text)
    assert machine.probe().devices[0].driver_version == expected


@pytest.mark.parametrize(
    ("class_id", "driver", "text"),
    [
        (0x030000, None, "NVIDIA's driver is not installed or not loaded; install it"),
        (0x030200, "nouveau", "nouveau drives it, which has no CUDA"),
        (0x030200, "nvidia", "docker run --gpus all"),
        (0x030200, "vfio-pci", None),  # lent to a virtual machine
        (0x040300, "snd_hda_intel", None),  # the sound that goes out over HDMI
    ],
)
def test_a_gpu_on_the_bus_without_a_driver_is_a_problem_and_no_process_is_started(
    machine: Machine, class_id: int, driver: str | None, text: str | None
) -> None:
    machine.monkeypatch.setitem(sys.modules, "pynvml", None)
    machine.pci(class_id, driver)
    result = machine.probe()
    assert result.devices == ()
    assert [text in problem and "0000:65:00.0" in problem for problem in result.problems] == ([True] if text else [])
    assert machine.num_children == 0


def test_a_gpu_that_cannot_be_opened_is_a_problem_and_takes_no_number(machine: Machine) -> None:
    machine.gpus(Gpu(A, errors={"Handle": NVMLError("GPU is lost")}), Gpu(B))
    result = machine.probe()
    assert [(device.uuid, device.torch_device) for device in result.devices] == [(B, "cuda:0")]
    assert "NVIDIA GPU 0" in result.problems[0]
    assert "GPU is lost" in result.problems[0]


def test_a_gpu_that_stops_answering_is_a_problem_and_the_others_keep_their_numbers(machine: Machine) -> None:
    machine.gpus(Gpu(A, errors={"CudaComputeCapability": NVMLError("Unknown Error")}), Gpu(B))
    result = machine.probe()
    assert [(device.uuid, device.torch_device) for device in result.devices] == [(B, "cuda:1")]
    assert "cuda:0" in result.problems[0]
    assert "Unknown Error" in result.problems[0]


def test_nvml_that_fails_altogether_is_a_problem_and_not_a_crash(machine: Machine) -> None:
    def fail() -> int:
        raise NVMLError("Unknown Error")

    machine.write("dev/nvidiactl")
    machine.nvml.nvmlDeviceGetCount = fail
    result = machine.probe()
    assert result.devices == ()
    assert "Unknown Error" in result.problems[0]


def test_facts_that_a_device_does_not_have_are_unknown(machine: Machine) -> None:
    unsupported = {fact: NVMLError_NotSupported("Not Supported") for fact in ("MemoryInfo", "NumGpuCores", "MigMode")}
    machine.gpus(Gpu(A, name="Orin (nvgpu)", capability=(8, 7), errors=unsupported))
    result = machine.probe()
    (device,) = result.devices
    assert (device.memory_total_bytes, device.memory_free_bytes, device.num_cores) == (None, None, None)
    assert result.problems == ()


def test_a_binding_that_lacks_newer_functions_and_returns_bytes_will_do(machine: Machine) -> None:
    nvml = machine.gpus(Gpu(A.encode(), name=b"Tesla V100-SXM2-32GB", capability=(7, 0)))  # type: ignore[arg-type]
    del nvml.nvmlDeviceGetMigMode, nvml.nvmlDeviceGetNumGpuCores
    machine.monkeypatch.delattr(FakeNvml, "nvmlSystemGetCudaDriverVersion")
    nvml.nvmlSystemGetDriverVersion = lambda: b"450.80.02"
    (device,) = machine.probe(A).devices
    assert (device.uuid, device.name, device.driver_version) == (A, "Tesla V100-SXM2-32GB", "450.80.02")
    assert device.num_cores is None


@pytest.mark.parametrize(
    ("capability", "cuda_cores", "arch", "num_cores", "triton"),
    [
        ((6, 1), 3584, "sm61", 28, False),  # GeForce GTX 1080 Ti
        ((7, 5), 2560, "sm75", 40, True),  # T4
        ((8, 0), 6912, "sm80", 108, True),  # A100
        ((8, 9), 18176, "sm89", 142, True),  # L40S
        ((12, 0), 21760, "sm120", 170, True),  # GeForce RTX 5090
        ((99, 0), 12800, "sm990", None, True),
    ],
)
def test_multiprocessors_are_cores_by_the_generations_width(
    machine: Machine, capability: tuple[int, int], cuda_cores: int, arch: str, num_cores: int | None, triton: bool
) -> None:
    machine.gpus(Gpu(A, capability=capability, cuda_cores=cuda_cores))
    (device,) = machine.probe().devices
    assert (device.arch, device.num_cores, device.triton) == (arch, num_cores, triton)


@pytest.mark.parametrize(
    ("setting", "order", "is_told"),
    [
        (None, None, True),
        (None, "FASTEST_FIRST", True),
        ("1", None, True),  # which of the two is number 1?
        (None, "PCI_BUS_ID", False),
        (f"{B},{A}", None, False),
        ("", None, False),
    ],
)
def test_different_gpus_without_pci_order_are_told_where_the_numbers_matter(
    machine: Machine, setting: str | None, order: str | None, is_told: bool
) -> None:
    machine.gpus(Gpu(A, name="NVIDIA T4", capability=(7, 5)), Gpu(B))
    problems = machine.probe(setting, order).problems
    assert [("CUDA_DEVICE_ORDER=PCI_BUS_ID" in problem) for problem in problems] == ([True] if is_told else [])


def test_without_torch_it_says_what_to_install(machine: Machine) -> None:
    machine.monkeypatch.setitem(sys.modules, "torch", None)
    (device, *_) = machine.probe().devices
    (problem,) = device.problems
    assert problem.startswith('torch is not installed; run `pip install "anyattn[cuda]"`')
    assert device.runtime_version is None


@pytest.mark.parametrize("assignment", ["cuda: Optional[str] = None", "cuda = None"])
def test_a_torch_built_without_cuda_is_a_problem_of_the_device(machine: Machine, assignment: str) -> None:
    machine.torch(f"__version__ = '2.13.0+cpu'\n{assignment}\n")
    (device, *_) = machine.probe().devices
    assert device.runtime_version is None
    (problem,) = device.problems
    assert "torch 2.13.0+cpu was built without CUDA" in problem
    assert 'pip install "anyattn[cuda]"' in problem


@pytest.mark.parametrize(
    ("known", "runtime", "is_told"), [(12080, "13.0", True), (12080, "12.9", False), (13000, "12.6", False)]
)
@pytest.mark.parametrize("source", ["NVML", "driver"])
def test_a_torch_for_a_newer_major_version_of_cuda_than_the_driver_knows_is_a_problem_of_the_device(
    machine: Machine, source: str, known: int, runtime: str, is_told: bool
) -> None:
    machine.torch(f"__version__ = '2.13.0'\ncuda = '{runtime}'\n")
    machine.nvml.nvmlSystemGetCudaDriverVersion = lambda: known
    if source == "driver":
        machine.without_nvml()
        machine.driver = {"cuda_version": [known // 1000, known % 1000 // 10], "devices": [driver_device(A)]}
    device = machine.probe().devices[0]
    assert device.runtime_version == runtime
    assert [("CUDA 12.8 and older" in problem) for problem in device.problems] == ([True] if is_told else [])


def test_a_torch_whose_version_file_cannot_be_read_is_damaged(machine: Machine) -> None:
    machine.torch("cuda = (")
    (device, *_) = machine.probe().devices
    (problem,) = device.problems
    assert device.runtime_version is None
    assert "the installed torch is damaged" in problem


def test_the_probe_may_be_called_again_and_sees_what_changed(machine: Machine) -> None:
    assert uuids(machine.probe("0")) == [A]
    assert uuids(machine.probe("2,1")) == [C, B]


@pytest.mark.cuda
def test_after_a_probe_and_a_fork_the_child_may_probe_and_start_cuda() -> None:
    devices = cuda.probe().devices
    if not devices or devices[0].problems:
        pytest.skip("no NVIDIA device" if not devices else devices[0].problems[0])
    code = (
        "import os\n"
        "from anyattn.platforms.cuda import probe\n"
        "devices = probe().devices\n"
        "if os.fork():\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "assert [device.uuid for device in probe().devices] == [device.uuid for device in devices]\n"
        "import torch\n"
        "assert torch.cuda.device_count() == len(devices)\n"
        "for device in devices:\n"
        "    facts = torch.cuda.get_device_properties(device.index)\n"
        "    assert (facts.major, facts.minor) == device.compute_capability\n"
        "    assert facts.multi_processor_count == device.num_cores\n"
        "    assert torch.ones(2, device=device.torch_device).sum().item() == 2\n"
    )
    root = Path(cuda.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root)})


@pytest.mark.cuda
def test_on_hardware_the_driver_tells_what_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    by_nvml = cuda.probe()
    if not by_nvml.devices or by_nvml.problems:
        pytest.skip("no NVIDIA device that NVML tells")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    by_driver = cuda.probe()
    assert len(by_driver.devices) == len(by_nvml.devices)
    for told, expected in zip(by_driver.devices, by_nvml.devices, strict=True):
        for fact in (
            "name",
            "uuid",
            "arch",
            "compute_capability",
            "num_cores",
            "torch_device",
            "driver_version",
            "runtime_version",
        ):
            assert getattr(told, fact) == getattr(expected, fact), fact
        if expected.memory_total_bytes is not None:  # the driver keeps a little for itself
            assert told.memory_total_bytes == pytest.approx(expected.memory_total_bytes, rel=0.05)
