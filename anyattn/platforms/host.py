"""The host's edges as every probe reads them: files below one root, PCI devices, and the installed torch."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARSER = threading.Lock()
"""Python 3.11's parser counts its depth for all threads together, and fails now and then when two of them are in it."""

ROOT = Path("/")
"""Where /proc, /sys and /dev hang; tests point it at a tree of their own."""


def read(path: str | Path) -> str | None:
    """The text of a file below the root, stripped; None when it cannot be read.

    path: relative to the root ("proc/cpuinfo"), or a path that `ROOT /` or `PciDevice.folder` gave.
    """
    try:
        return (ROOT / path).read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def exists(path: str) -> bool:
    """Whether something is at `path`, relative to the root."""
    try:
        return (ROOT / path).exists()
    except OSError:
        return False


def numbers(text: str) -> frozenset[int]:
    """What a list as Linux writes them holds: "0-3,8" is 0, 1, 2, 3 and 8. Raises ValueError for what is none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        run = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if run is None or int(run[2] or 0) > _MOST:
            raise ValueError(f"no list of CPUs or nodes: {text[:80]}")
        found.update(range(int(run[1]), int(run[2] or run[1]) + 1))
    return frozenset(found)


def number_list(members: Iterable[int]) -> str:
    """The other way round: {0, 1, 2, 3, 8} is "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(members):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


_MOST = 1 << 16  # CPUs or nodes: more than Linux can be built for


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One device of the PCI bus, as Linux's sysfs shows it (Documentation/ABI/testing/sysfs-bus-pci)."""

    address: str
    """Domain, bus, device and function: "0000:18:00.0"."""
    vendor_id: int
    device_id: int
    class_id: int
    """24 bits: base class, subclass, interface; 0x03.... is a display controller, 0x12.... an accelerator."""
    folder: Path


def pci_devices(vendor_id: int) -> list[PciDevice]:
    """The vendor's PCI devices by address; none where sysfs is not there."""
    found = []
    bus = ROOT / "sys/bus/pci/devices"
    with contextlib.suppress(OSError):
        for folder in sorted(bus.iterdir()):
            ids = [_hexadecimal(folder / name) for name in ("vendor", "device", "class")]
            if ids[0] == vendor_id and ids[1] is not None:
                found.append(
                    PciDevice(
                        address=folder.name,
                        vendor_id=vendor_id,
                        device_id=ids[1],
                        class_id=ids[2] or 0,
                        folder=folder,
                    )
                )
    return found


def kernel_driver(device: PciDevice) -> str | None:
    """The kernel driver that a PCI device is bound to, by its module's name; None when there is none."""
    try:
        return Path(os.readlink(device.folder / "driver")).name
    except OSError:
        return None


def _hexadecimal(path: Path) -> int | None:
    try:
        return int(read(path) or "", 16)
    except ValueError:
        return None


TORCH_REMEDIES = {
    "cpu": 'run `pip install "anyattn[cpu]"`',
    "cuda": 'run `pip install "anyattn[cuda]"` (on Windows, the command that PyTorch\'s "Start Locally" page gives)',
    "rocm": 'see "Install PyTorch for ROCm" in AMD\'s ROCm documentation, then run `pip install "anyattn[rocm]"`',
    "ascend": 'run `pip install "anyattn[ascend]"`',
    "xpu": 'see PyTorch\'s "Getting Started on Intel GPU", then run `pip install "anyattn[xpu]"`',
    "musa": 'see "Installation" in the README of Moore Threads\' torch_musa',
    "apple": 'run `pip install "anyattn[apple]"`',
}
"""By device kind: how a torch that drives such a device is installed. Where it comes from an index of the vendor's own,
the page is named by its title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for, read from torch/version.py: importing torch takes seconds.

    runtimes: versions by torch's own names, "cuda", "hip" and "xpu"; None for a runtime that the build has not. A
        name that version.py does not mention is not in it: nothing is known then.
    is_damaged: whether version.py, which torch imports first of all, is not there or no Python.
    """

    version: str
    runtimes: dict[str, str | None]
    is_damaged: bool = False

    def lacks(self, runtime: str) -> bool:
        """Whether the build says that it was made without this runtime."""
        return runtime in self.runtimes and self.runtimes[runtime] is None


def torch_build() -> TorchBuild | None:
    """The installed torch; None when there is none. Nothing is imported."""
    try:
        spec = importlib.util.find_spec("torch")
    except Exception:  # whatever an import hook raises
        spec = None
    if spec is None or spec.origin is None:  # a folder that is merely called torch has no origin
        return None
    values: dict[str, Any] = {}
    is_damaged = True
    with contextlib.suppress(Exception, MemoryError):  # the parser's for what is nested too deeply
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        with _PARSER:
            body = ast.parse(text).body
        is_damaged = False
        for node in body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    values[ast.unparse(target)] = node.value.value
    runtimes: dict[str, str | None] = {name: values[name] for name in ("cuda", "hip", "xpu") if name in values}
    return TorchBuild(version=str(values.get("__version__", "")), runtimes=runtimes, is_damaged=is_damaged)


def torch_has(file: str) -> bool:
    """Whether the installed torch has this file, as "xpu/graphs.py". Nothing is imported."""
    try:
        spec = importlib.util.find_spec("torch")
        return spec is not None and spec.origin is not None and (Path(spec.origin).parent / file).is_file()
    except Exception:  # whatever an import hook raises
        return False


def torch_problems(kind: str) -> tuple[str, ...]:
    """Why no torch at all can drive a device of this kind here: there is none, or it is damaged."""
    build = torch_build()
    if build is None:
        return (f"torch is not installed; {TORCH_REMEDIES[kind]}",)
    if build.is_damaged:
        problem = "the installed torch is damaged (torch/version.py is missing or broken)"
        return (f"{problem}; run `pip uninstall torch`, then {TORCH_REMEDIES[kind]}",)
    return ()


def torch_facts(kind: str, runtime: str, called: str) -> tuple[str | None, tuple[str, ...]]:
    """The version of a runtime that the installed torch was built for, and why that torch cannot drive a device.

    runtime: torch's own name of it. called: its name for people.
    """
    build, problems = torch_build(), torch_problems(kind)
    if build is None or problems:
        return None, problems
    if build.lacks(runtime):
        problem = f"the installed torch {build.version} was built without {called}; run `pip uninstall torch`, then "
        return None, (f"{problem}{TORCH_REMEDIES[kind]}",)
    return build.runtimes.get(runtime), ()
