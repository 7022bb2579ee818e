"""What the CUDA driver is asked and how its answers are read, with a fake library; and one real child process."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anyattn.platforms import cuda_driver

GIB = 1 << 30
U, V = (uuid.UUID(f"{digit * 8}-d72c-4106-c12f-20bd9faed9f6") for digit in "ab")


@dataclass
class Device:
    uuid: uuid.UUID
    name: str = "NVIDIA H100 80GB HBM3"
    attributes: dict[int, int] = field(default_factory=lambda: {75: 9, 76: 0, 16: 132})
    memory_bytes: int = 80 * GIB
    trouble: int = 0
    """CUresult of everything that is asked of it."""


class FakeDriver:
    """libcuda.so.1 as ctypes would load it: functions fill what they are given by reference and return a CUresult."""

    def __init__(self, *devices: Device, trouble: int = 0) -> None:
        self.devices, self.trouble, self.is_started = devices, trouble, False

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        self.is_started = not self.trouble
        return self.trouble

    def fill(self, place: Any, value: Any, trouble: int = 0) -> int:
        assert self.is_started, "asked before cuInit"
        if not trouble:
            place._obj.value = value
        return trouble

    def write(self, buffer: Any, size: int, text: str) -> int:
        assert len(text) < size
        buffer.value = text.encode()
        return 0

    def cuDriverGetVersion(self, place: Any) -> int:
        return self.fill(place, 12080)

    def cuDeviceGetCount(self, place: Any) -> int:
        return self.fill(place, len(self.devices))

    def cuDeviceGet(self, place: Any, index: int) -> int:
        return self.fill(place, index, self.devices[index].trouble)

    def cuDeviceGetAttribute(self, place: Any, attribute: int, device: int) -> int:
        return self.fill(place, self.devices[device].attributes[attribute])

    def cuDeviceTotalMem_v2(self, place: Any, device: int) -> int:
        return self.fill(place, self.devices[device].memory_bytes)

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        return self.write(buffer, size, self.devices[device].name)

    def cuDeviceGetUuid_v2(self, place: Any, device: int) -> int:
        place._obj[:] = self.devices[device].uuid.bytes
        return 0


def test_the_driver_tells_each_device_and_the_cuda_that_it_knows() -> None:
    answer = cuda_driver.read(FakeDriver(Device(U), Device(V, name="NVIDIA T4", attributes={75: 7, 76: 5, 16: 40})))
    assert answer["cuda_version"] == [12, 8]
    first, second = answer["devices"]
    assert first == {
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{U}",
        "compute_capability": [9, 0],
        "num_cores": 132,
        "memory_total_bytes": 80 * GIB,
    }
    assert (second["compute_capability"], second["num_cores"]) == ([7, 5], 40)
    assert json.loads(json.dumps(answer)) == answer


def test_a_mig_slice_is_told_by_its_own_uuid() -> None:
    (device,) = cuda_driver.read(FakeDriver(Device(U, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")))["devices"]
    assert device["uuid"] == f"MIG-{U}"


def test_a_driver_that_is_too_old_for_uuids_of_slices_tells_none() -> None:
    class OldDriver(FakeDriver):
        cuDeviceGetUuid_v2 = None  # type: ignore[assignment]

    assert cuda_driver.read(OldDriver(Device(U)))["devices"][0]["uuid"] is None


def test_a_device_that_does_not_answer_keeps_its_place() -> None:
    first, second = cuda_driver.read(FakeDriver(Device(U, trouble=999), Device(V)))["devices"]
    assert "CUDA_ERROR_UNKNOWN (999)" in first["error"]
    assert second["uuid"] == f"GPU-{V}"


@pytest.mark.parametrize(
    ("code", "name", "remedy"),
    [
        (34, "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
        (100, "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
        (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "compat"),
        (999, "CUDA_ERROR_UNKNOWN", "dmesg"),
        (3, "CUresult 3", ""),
    ],
)
def test_a_driver_that_does_not_start_says_why_and_what_to_do(code: int, name: str, remedy: str) -> None:
    with pytest.raises(cuda_driver.DriverError) as error:
        cuda_driver.read(FakeDriver(trouble=code))
    assert error.value.code == code
    assert name in str(error.value)
    assert remedy in str(error.value)


class Child:
    """The edge of the child process: what it was started with, and what comes back of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stdout, self.stderr, self.returncode, self.raises = "", "", 0, None
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **options: Any) -> Any:
        self.command, self.options = command, options
        if self.raises is not None:
            raise self.raises
        return SimpleNamespace(stdout=self.stdout, stderr=self.stderr, returncode=self.returncode)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    return Child(monkeypatch)


def test_the_child_is_this_python_shut_off_from_our_streams_and_from_the_environments_packages(child: Child) -> None:
    child.stdout = '{"cuda_version": [13, 0], "devices": []}'
    assert cuda_driver.ask() == {"cuda_version": [13, 0], "devices": []}
    assert child.command == [sys.executable, "-I", "-S", cuda_driver.__file__]
    assert child.options["stdin"] is subprocess.DEVNULL
    assert child.options["capture_output"] is True
    assert 0 < child.options["timeout"] <= 60


def test_what_a_library_prints_before_the_answer_does_not_matter(child: Child) -> None:
    child.stdout = 'a word from a library\n{"error": "does not start"}\n'
    assert cuda_driver.ask() == {"error": "does not start"}


@pytest.mark.parametrize("stdout", ["", "no JSON", "[]", "{}"])
def test_a_child_that_dies_is_an_error_with_its_last_words(child: Child, stdout: str) -> None:
    child.stdout, child.stderr, child.returncode = stdout, "Traceback\nSegmentation fault\n", -11
    error = cuda_driver.ask()["error"]
    assert "-11" in error
    assert "Segmentation fault" in error


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (subprocess.TimeoutExpired("python", 30), "did not answer within"),
        (PermissionError("not allowed to start processes"), "not allowed to start processes"),
    ],
)
def test_a_child_that_hangs_or_cannot_be_started_is_an_error(child: Child, trouble: Exception, text: str) -> None:
    child.raises = trouble
    assert text in cuda_driver.ask()["error"]


@pytest.mark.parametrize(("attribute", "value"), [("executable", None), ("executable", ""), ("frozen", True)])
def test_a_program_without_a_python_interpreter_does_not_start_itself_again(
    child: Child, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object
) -> None:
    monkeypatch.setattr(sys, attribute, value, raising=False)
    assert "no Python interpreter" in cuda_driver.ask()["error"]
    assert not hasattr(child, "command")


def test_a_real_child_answers_and_leaves_the_driver_out_of_this_process() -> None:
    answer = cuda_driver.ask()
    if "error" in answer:
        assert answer["error"].startswith(("cannot be loaded: ", "does not start: "))
        name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        assert name in answer["error"] or "code" in answer
    else:
        assert all({"name", "uuid", "compute_capability"} <= set(device) for device in answer["devices"])


def test_it_runs_as_a_module_too_with_one_line_of_json_and_no_package_of_others() -> None:
    root = Path(cuda_driver.__file__).parents[2]
    command = [sys.executable, "-S", "-m", "anyattn.platforms.cuda_driver"]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    (line,) = child.stdout.splitlines()
    assert {"error", "devices"} & set(json.loads(line))
