"""The probe of Apple's GPU, with the Mac faked at its edges: sysctl and ioreg, the platform module, psutil, torch."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from anyattn.platforms import apple
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.types import GraphLevel

GIB = 1 << 30
AGX = """\
+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, id 0x100000459, registered, matched, active, busy 0, retain 62>
    {
      "IOClass" = "AGXAcceleratorG15X"
      "PerformanceStatistics" = {"In use system memory"=1164967936,"Device Utilization %"=3}
      "model" = "Apple M3 Max"
      "gpu-core-count" = 40
      "vendor-id" = <6b100000>
    }

"""


class Mac:
    """An arm64 Python on an M3 Max with 64 GiB, 40 of them available, macOS 15.5 and torch."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.system("Darwin", "arm64")
        monkeypatch.setattr(platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=40 * GIB))
        monkeypatch.setattr(subprocess, "run", self.run)
        self.sysctl = {"machdep.cpu.brand_string": "Apple M3 Max", "hw.memsize": str(64 * GIB)}
        self.ioreg = AGX
        self.missing: dict[str, Exception] = {}
        """Commands that cannot be run, and what happens instead."""
        self.commands: list[str] = []
        for package in ("torch", "mlx"):
            (root / package).mkdir()
            (root / package / "__init__.py").write_text("raise ImportError('a probe must not import it')")
            (root / package / "version.py").write_text("__version__ = '2.9.0'")
            monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.syspath_prepend(root)

    def system(self, system: str, machine: str) -> None:
        self.monkeypatch.setattr(platform, "system", lambda: system)
        self.monkeypatch.setattr(platform, "machine", lambda: machine)

    def run(self, command: tuple[str, ...], *, timeout: float, **options: Any) -> SimpleNamespace:
        self.commands.append(command[0])
        if command[0] in self.missing:
            raise self.missing[command[0]]
        if command[0] == "ioreg":
            assert command[1:] == ("-r", "-c", "AGXAccelerator", "-d", "1")
            return SimpleNamespace(stdout=self.ioreg)
        assert command[0] == "sysctl"  # of a key that it does not know, sysctl speaks on stderr only
        lines = [f"{key}: {self.sysctl[key]}\n" for key in command[1:] if key in self.sysctl]
        return SimpleNamespace(stdout="".join(lines))

    def device(self) -> Platform:
        (device,) = apple.probe().devices
        return device


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    return Mac(tmp_path, monkeypatch)


def test_an_apple_silicon_mac_has_one_gpu_with_its_facts(mac: Mac) -> None:
    result = apple.probe()
    assert result.problems == ()
    (device,) = result.devices
    assert (device.kind, device.vendor, device.name, device.arch) == ("apple", "apple", "Apple M3 Max", "apple9")
    assert (device.torch_device, device.index, device.num_cores) == ("mps", 0, 40)
    assert (device.memory_total_bytes, device.memory_free_bytes) == (64 * GIB, 40 * GIB)
    assert (device.driver_version, device.runtime_version) == (None, "15.5")
    assert (device.collective, device.graph, device.triton) == ("gloo", GraphLevel.NEVER, False)
    assert {"float64", "float8_e4m3fn", "float8_e5m2"} <= device.missing_dtypes
    assert {"float32", "bfloat16", "float16"}.isdisjoint(device.missing_dtypes)
    assert (device.status, device.problems) == ("contract-tested", ())
    assert "system_profiler" not in mac.commands


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Apple M1", "apple7"),
        ("Apple M1 Ultra", "apple7"),
        ("Apple M2 Pro", "apple8"),
        ("Apple M3", "apple9"),
        ("Apple M4 Max", "apple9"),
        ("Apple M5", "apple10"),
        ("Apple A18 Pro", "apple9"),
        ("Apple M1 (Virtual)", "unknown"),  # a virtual machine's GPU is not the chip's
        ("Apple M10", "unknown"),
        ("Apple M99 Max", "unknown"),
    ],
)
def test_the_architecture_is_the_metal_family_of_the_chip(mac: Mac, name: str, arch: str) -> None:
    mac.sysctl["machdep.cpu.brand_string"] = name
    device = mac.device()
    assert (device.name, device.arch) == (name, arch)


@pytest.mark.parametrize(
    ("system", "machine"), [("Linux", "x86_64"), ("Linux", "aarch64"), ("Windows", "ARM64"), ("", "")]
)
def test_any_other_system_is_silent_and_starts_no_process(mac: Mac, system: str, machine: str) -> None:
    mac.system(system, machine)
    assert apple.probe() == ProbeResult()
    assert mac.commands == []


@pytest.mark.parametrize("translated", [None, "0"])
def test_an_intel_mac_is_silent(mac: Mac, translated: str | None) -> None:
    mac.system("Darwin", "x86_64")
    mac.sysctl = {"machdep.cpu.brand_string": "Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz"}
    if translated is not None:
        mac.sysctl["sysctl.proc_translated"] = translated
    assert apple.probe() == ProbeResult()


def test_a_python_under_rosetta_is_told_to_use_an_arm64_one(mac: Mac) -> None:
    mac.system("Darwin", "x86_64")
    mac.sysctl["sysctl.proc_translated"] = "1"
    result = apple.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert "Rosetta" in problem
    assert "install an arm64 Python" in problem


def test_without_torch_it_says_what_to_install(mac: Mac) -> None:
    mac.monkeypatch.setitem(sys.modules, "torch", None)
    assert mac.device().problems == ('torch is not installed; run `pip install "anyattn[apple]"`',)


def test_without_mlx_nothing_is_wrong_with_the_device(mac: Mac) -> None:
    mac.monkeypatch.setitem(sys.modules, "mlx", None)
    assert mac.device().problems == ()


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("no such command"), PermissionError("not allowed"), subprocess.TimeoutExpired("command", 5)],
    ids=lambda error: type(error).__name__,
)
def test_commands_that_do_not_run_leave_facts_unknown_and_are_told(mac: Mac, error: Exception) -> None:
    mac.missing = {"sysctl": error, "ioreg": error}
    result = apple.probe()
    (device,) = result.devices
    assert (device.name, device.arch) == ("Apple GPU", "unknown")
    assert (device.memory_total_bytes, device.num_cores) == (None, None)
    assert [problem.split("'s ")[1] for problem in result.problems] == [
        "chip could not be told",
        "memory could not be told",
        "number of cores could not be told",
    ]


def test_a_registry_without_the_gpus_driver_leaves_the_cores_unknown(mac: Mac) -> None:
    mac.ioreg = ""
    result = apple.probe()
    assert result.devices[0].num_cores is None
    assert result.problems == ("the Apple GPU's number of cores could not be told",)


def test_without_psutil_the_available_memory_is_unknown(mac: Mac) -> None:
    mac.monkeypatch.setitem(sys.modules, "psutil", None)
    device = mac.device()
    assert (device.memory_total_bytes, device.memory_free_bytes) == (64 * GIB, None)


def test_trouble_that_nobody_foresaw_is_a_problem_and_not_a_crash(mac: Mac) -> None:
    mac.missing = {"sysctl": RuntimeError("out of everything")}
    result = apple.probe()
    assert result.devices == ()
    assert "out of everything" in result.problems[0]
