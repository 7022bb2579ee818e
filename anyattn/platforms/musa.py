"""Moore Threads GPUs as the PCI bus shows them: declared from the vendor's sources, not yet seen on hardware."""

from __future__ import annotations

import importlib.util
import os
import re

from anyattn.platforms import host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.types import GraphLevel

_VENDOR_ID = 0x1ED5
_DISPLAY_CLASS = 0x03
"""PCI base class; the cards' sound devices have another."""

_ARCHS = {0x01: "mp_10", 0x02: "mp_21", 0x03: "mp_22", 0x04: "mp_31"}
"""By the first two digits of the PCI device id (CMakeLists.txt of MooreThreads/gpu-compute-driver-bench)."""

_NAMES = {
    0x0200: "MTT S80ES",
    0x0201: "MTT S80",
    0x0202: "MTT S70",
    0x0222: "MTT S3000",
    0x0225: "MTT S3000E",
    0x0301: "MTT S90",
    0x0323: "MTT S4000",
    0x0327: "MTT S4000",
    0x0400: "MTT S5000",
}
"""By PCI device id: Moore Threads' musa_deploy; for the S5000, `lspci` output in public test data."""


def probe() -> ProbeResult:
    """The Moore Threads GPUs that MUSA_VISIBLE_DEVICES shows, by PCI address. Never raises; trouble is a problem text.

    That MUSA numbers GPUs in this order is assumed. Memory and cores are not told without the vendor's library.
    """
    try:
        return _probe()
    except Exception as error:
        return ProbeResult(problems=(f"the probe of Moore Threads GPUs failed: {error}",))


def _probe() -> ProbeResult:
    present = [device for device in host.pci_devices(_VENDOR_ID) if device.class_id >> 16 == _DISPLAY_CLASS]
    gpus = [device for device in present if _is_open(device)]
    if present and not gpus:
        found = f"a Moore Threads GPU is here (PCI device {present[0].address}), but not open to this process"
        return ProbeResult(problems=(f"{found}; give a container --env MTHREADS_VISIBLE_DEVICES=all",))
    shown, problems = _visible(len(gpus), os.environ.get("MUSA_VISIBLE_DEVICES"))
    device_problems = _driver_problems() + _torch_problems() if shown else ()
    devices = []
    for index, position in enumerate(shown):
        device_id = gpus[position].device_id
        arch = _ARCHS.get(device_id >> 8, "unknown")
        devices.append(
            Platform(
                kind="musa",
                vendor="moore threads",
                name=_NAMES.get(device_id, f"Moore Threads GPU {device_id:04x}"),
                arch=arch,
                torch_device=f"musa:{index}",
                index=index,
                driver_version=host.read("sys/module/mtgpu/version") or None,
                # MCCL comes for S4000 and S5000 only (README of torch_musa; "MUSA SDK 5.2.0" installation guide).
                collective="mccl" if arch in ("mp_22", "mp_31") else "gloo",
                # "MUSAGraph for arch greater than QY2", which is mp_22 (release notes of torch_musa 2.0.0).
                graph=GraphLevel.ALWAYS if arch == "mp_31" else GraphLevel.NEVER,
                triton=arch in ("mp_22", "mp_31"),  # Triton-MUSA, a distribution of its own that is called triton
                status="declared",
                torch_remedy=host.TORCH_REMEDIES["musa"],
                problems=device_problems,
            )
        )
    return ProbeResult(devices=tuple(devices), problems=tuple(problems))


def _is_open(device: host.PciDevice) -> bool:
    """Whether the driver's device file of it, /dev/mtgpu.N, is here: a container has those that it was given.

    sysfs names the file in the PCI device's folder, as Moore Threads' port of ollama reads it there.
    """
    files = [file.name for file in (device.folder / "misc").glob("mtgpu.*")]
    return not files or any(host.exists(f"dev/{file}") for file in files)


def _visible(num_gpus: int, setting: str | None) -> tuple[list[int], list[str]]:
    """Positions under MUSA_VISIBLE_DEVICES: what is documented is a list of numbers, so anything else ends the list."""
    if setting is None or num_gpus == 0:
        return list(range(num_gpus)), []
    shown: list[int] = []
    for entry in setting.split(","):
        position = int(entry) if re.fullmatch(r"\s*[0-9]{1,9}\s*", entry) else num_gpus
        if position >= num_gpus or position in shown:
            if entry.strip() in ("", "-1"):  # the usual ways of saying "none", or "no more"
                return shown, []
            why = f'"{entry}" again' if position in shown else f'no device "{entry}"'
            return shown, [f'MUSA_VISIBLE_DEVICES="{setting}": {why}, so the list ends before it']
        shown.append(position)
    return shown, []


def _driver_problems() -> tuple[str, ...]:
    if host.exists("sys/module/mtgpu"):
        return ()
    return ("the kernel driver mtgpu is not loaded; run `sudo modprobe mtgpu`, or install Moore Threads' driver",)


def _torch_problems() -> tuple[str, ...]:
    if problems := host.torch_problems("musa"):
        return problems
    if importlib.util.find_spec("torch_musa") is None:  # found, not imported
        return (f"torch_musa, which adds musa devices to torch, is not installed; {host.TORCH_REMEDIES['musa']}",)
    return ()
