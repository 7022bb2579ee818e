"""The GPU of an Apple silicon Mac, told by sysctl and ioreg: no Metal device is opened, no import of torch or mlx."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess

from anyattn.platforms import host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.types import FP8_DTYPES, GraphLevel

_METAL_FAMILIES = {"M1": "apple7", "M2": "apple8", "M3": "apple9", "M4": "apple9", "M5": "apple10", "A18": "apple9"}
"""By series of the chip; Pro, Max and Ultra do not differ (Apple, "Metal Feature Set Tables" of May 2026)."""

MPS_MISSING_DTYPES = frozenset({"float64"}) | FP8_DTYPES
"""Metal has no float64, and torch (2.13) no fp8 for MPS: "Trying to convert Float8_e4m3fn to the MPS backend but it
does not have support for that dtype"."""


def probe() -> ProbeResult:
    """The GPU on an Apple silicon Mac, as one device. Never raises; what could not be told is a problem text.

    Anywhere else the result is empty, and only on a Mac is a process started.
    """
    try:
        if platform.system() != "Darwin":
            return ProbeResult()
        if platform.machine() == "arm64":
            return _probe()
        if _sysctl("sysctl.proc_translated").get("sysctl.proc_translated") == "1":  # unknown to an Intel Mac
            return ProbeResult(problems=(_ROSETTA,))
        return ProbeResult()
    except Exception as error:
        return ProbeResult(problems=(f"the probe of Apple's GPU failed: {error}",))


_ROSETTA = (
    "this Mac has Apple silicon, but this Python is built for Intel and runs under Rosetta, where torch and mlx do not "
    "reach the GPU; install an arm64 Python (`python3 -c 'import platform; print(platform.machine())'` then prints "
    "arm64) and make the virtual environment anew with it"
)


def _probe() -> ProbeResult:
    facts = _sysctl("machdep.cpu.brand_string", "hw.memsize")
    name = facts.get("machdep.cpu.brand_string", "")
    # A virtual machine's GPU is another one than the chip's; its name has "(Virtual)" at the end.
    chip = re.fullmatch(r"Apple ([AM][0-9]+)( Pro| Max| Ultra)?", name)
    arch = _METAL_FAMILIES.get(chip.group(1), "unknown") if chip else "unknown"
    memory = facts.get("hw.memsize", "")
    total_bytes = int(memory) if memory.isdigit() else None  # the CPU's too: Apple silicon has one memory
    num_cores = _num_cores()
    told = {"chip": name, "memory": total_bytes, "number of cores": num_cores}
    device = Platform(
        kind="apple",
        vendor="apple",
        name=name or "Apple GPU",
        arch=arch,
        torch_device="mps",
        memory_total_bytes=total_bytes,
        memory_free_bytes=_available_bytes(),
        num_cores=num_cores,
        runtime_version=platform.mac_ver()[0] or None,  # Metal comes with macOS and has no other version
        collective="gloo",
        graph=GraphLevel.NEVER,
        triton=False,
        missing_dtypes=MPS_MISSING_DTYPES,
        status="contract-tested",
        torch_remedy=host.TORCH_REMEDIES["apple"],
        problems=host.torch_problems("apple"),
    )
    problems = tuple(f"the Apple GPU's {what} could not be told" for what, fact in told.items() if not fact)
    return ProbeResult(devices=(device,), problems=problems)


def _sysctl(*keys: str) -> dict[str, str]:
    lines = _output("sysctl", *keys).splitlines()
    return {key: value.strip() for key, _, value in (line.partition(": ") for line in lines)}


def _num_cores() -> int | None:
    """From the registry entry of the GPU's driver; system_profiler says the same, but takes seconds."""
    cores = re.search(r'"gpu-core-count" = ([0-9]+)', _output("ioreg", "-r", "-c", "AGXAccelerator", "-d", "1"))
    return int(cores.group(1)) if cores else None


def _available_bytes() -> int | None:
    try:
        return int(importlib.import_module("psutil").virtual_memory().available)
    except Exception:  # a fact less, and the CPU's probe says why
        return None


def _output(*command: str) -> str:
    """What the command prints; nothing where it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
