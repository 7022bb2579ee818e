"""The Moore Threads probe, with the machine faked at its edges: a tree of /sys and /dev, the environment, torch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from anyattn.platforms import host, musa
from anyattn.platforms.base import ProbeResult
from anyattn.types import GraphLevel

S80, S3000, S4000, S5000 = 0x0201, 0x0222, 0x0323, 0x0400


class Machine:
    """A machine with the driver, torch and torch_musa, and no variable set. GPUs are added by tests."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch, self.num_gpus = root, monkeypatch, 0
        monkeypatch.setattr(host, "ROOT", root)
        monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
        for package in ("torch", "torch_musa"):
            self.write(f"site/{package}/__init__.py", f"raise ImportError('a probe must not import {package}')")
            self.write(f"site/{package}/version.py", "__version__ = '2.9.0'")
            monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.syspath_prepend(root / "site")
        self.write("sys/module/mtgpu/version", "5.2.0\n")

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def gpu(self, device_id: int, *, is_open: bool = True) -> None:
        """One card, and its sound device."""
        address = f"sys/bus/pci/devices/0000:{self.num_gpus + 8:02x}:00"
        for function, pci_device, pci_class in ((0, device_id, 0x030200), (1, device_id | 0xFF, 0x040100)):
            for name, value in (("vendor", 0x1ED5), ("device", pci_device), ("class", pci_class)):
                self.write(f"{address}.{function}/{name}", f"{value:#06x}\n")
        self.write(f"{address}.0/misc/mtgpu.{self.num_gpus}/dev", "10:120\n")
        if is_open:
            self.write(f"dev/mtgpu.{self.num_gpus}")
        self.num_gpus += 1

    def probe(self, visible: str | None = None) -> ProbeResult:
        if visible is not None:
            self.monkeypatch.setenv("MUSA_VISIBLE_DEVICES", visible)
        return musa.probe()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_each_gpu_is_one_device(machine: Machine) -> None:
    machine.gpu(S5000)
    machine.gpu(S5000)
    result = machine.probe()
    first, second = result.devices
    assert result.problems == ()
    assert (first.kind, first.vendor, first.name) == ("musa", "moore threads", "MTT S5000")
    assert (first.arch, first.driver_version, first.torch_device) == ("mp_31", "5.2.0", "musa:0")
    assert (first.collective, first.graph, first.triton) == ("mccl", GraphLevel.ALWAYS, True)
    assert (first.memory_total_bytes, first.num_cores, first.uuid) == (None, None, None)
    assert (first.status, first.problems) == ("declared", ())
    assert (second.index, second.torch_device) == (1, "musa:1")


@pytest.mark.parametrize(
    ("device_id", "name", "arch", "collective", "graph", "triton"),
    [
        (S80, "MTT S80", "mp_21", "gloo", GraphLevel.NEVER, False),
        (S3000, "MTT S3000", "mp_21", "gloo", GraphLevel.NEVER, False),
        (S4000, "MTT S4000", "mp_22", "mccl", GraphLevel.NEVER, True),
        (0x0123, "Moore Threads GPU 0123", "mp_10", "gloo", GraphLevel.NEVER, False),
        (0x0999, "Moore Threads GPU 0999", "unknown", "gloo", GraphLevel.NEVER, False),
    ],
)
def test_the_generation_follows_from_the_pci_id(
    machine: Machine, device_id: int, name: str, arch: str, collective: str, graph: GraphLevel, triton: bool
) -> None:
    machine.gpu(device_id)
    (device,) = machine.probe().devices
    assert (device.name, device.arch, device.collective) == (name, arch, collective)
    assert (device.graph, device.triton) == (graph, triton)


@pytest.mark.parametrize(
    ("setting", "expected", "complaint"),
    [
        pytest.param("1", ["mp_22"], None, id="an index chooses one"),
        pytest.param("2,0", ["mp_31", "mp_21"], None, id="the order of the list is the order of the devices"),
        pytest.param("", [], None, id="empty hides all"),
        pytest.param("0,-1,1", ["mp_21"], None, id="minus one ends the list"),
        pytest.param("0,7", ["mp_21"], 'no device "7"', id="an index out of range ends the list"),
        pytest.param("1,1", ["mp_22"], '"1" again', id="a repeat ends the list"),
        pytest.param("x", [], 'no device "x"', id="a word ends the list"),
    ],
)
def test_visible_devices_is_a_list_of_numbers(
    machine: Machine, setting: str, expected: list[str], complaint: str | None
) -> None:
    for device_id in (S80, S4000, S5000):
        machine.gpu(device_id)
    result = machine.probe(setting)
    assert [device.arch for device in result.devices] == expected
    assert [device.torch_device for device in result.devices] == [f"musa:{i}" for i in range(len(expected))]
    assert [complaint in problem for problem in result.problems if complaint] == ([True] if complaint else [])
    assert len(result.problems) == bool(complaint)


def test_gpus_that_the_container_does_not_have_are_not_counted(machine: Machine) -> None:
    machine.gpu(S4000, is_open=False)
    machine.gpu(S5000)
    assert [device.arch for device in machine.probe().devices] == ["mp_31"]


def test_a_container_without_any_of_the_gpus_is_told_what_it_lacks(machine: Machine) -> None:
    machine.gpu(S5000, is_open=False)
    result = machine.probe()
    assert result.devices == ()
    assert "0000:08:00.0" in result.problems[0]
    assert "MTHREADS_VISIBLE_DEVICES=all" in result.problems[0]


def test_without_the_driver_the_device_says_so(machine: Machine) -> None:
    machine.gpu(S5000)
    (machine.root / "sys/module/mtgpu").rename(machine.root / "elsewhere")
    (device,) = machine.probe().devices
    assert device.driver_version is None
    assert "modprobe mtgpu" in device.problems[0]


@pytest.mark.parametrize("package", ["torch", "torch_musa"])
def test_without_torch_or_torch_musa_it_says_what_to_install(machine: Machine, package: str) -> None:
    machine.gpu(S5000)
    shutil.rmtree(machine.root / "site" / package)
    machine.monkeypatch.setattr(sys, "path", [str(machine.root / "site")])  # an environment that has nothing else
    (device,) = machine.probe().devices
    assert device.problems[0].startswith(package)
    assert "is not installed" in device.problems[0]
    assert "README of Moore Threads' torch_musa" in device.problems[0]


def test_a_machine_without_any_moore_threads_gpu_is_silent(machine: Machine) -> None:
    assert machine.probe("7") == ProbeResult()


def test_files_that_are_broken_hide_the_gpu_and_are_no_crash(machine: Machine) -> None:
    machine.gpu(S5000)
    machine.gpu(S4000)
    machine.write("sys/bus/pci/devices/0000:08:00.0/device", "what?\n")
    machine.write("sys/module/mtgpu/version")
    (device,) = machine.probe().devices
    assert (device.arch, device.driver_version) == ("mp_22", None)
