"""What files tell of NVIDIA GPUs without NVML and CUDA: whether one is here, and the models that the driver has."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from anyattn.platforms import host
from anyattn.platforms.cuda_visible import Unit

_SIGNS = (
    ("dev/nvidiactl",),
    ("proc/driver/nvidia/version",),
    ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"),
    ("dev/nvhost-gpu",),
    ("dev/nvgpu",),
    ("Windows/System32/nvcuda.dll",),
)
"""Files that say together that an NVIDIA device and its driver are here: two of the Linux driver's, then WSL's, then
Jetson's older and newer driver, then Windows's on the current drive."""

_CAPABILITIES = {
    (12, 1): r"GB10",
    (12, 0): r"RTX PRO (6000|5000|4500|4000|2000) Blackwell|GeForce RTX 50[5-9]0",
    (10, 3): r"GB300|B300",
    (10, 0): r"GB200|B200",
    (9, 0): r"GH200|H200|H100",
    (8, 9): r"L40S?|L4|RTX (6000|5000|4500|4000|4000 SFF|2000) Ada|GeForce RTX 40[5-9]0",
    (8, 6): r"A40|A16|A10|A2|RTX A[2-6]000|GeForce RTX 30[5-9]0",
    (8, 0): r"A100|A30",
    (7, 5): r"T4|T1000|T600|T400|Quadro RTX (8000|6000|5000|4000)|TITAN RTX|GeForce (RTX 20[678]0|GTX 16[56]0)",
    (7, 0): r"V100|Quadro GV100|TITAN V",
    (6, 1): r"P40|P4|Quadro P[0-9]+|TITAN (Xp|X)|GeForce GTX 10[5-8]0",
    (6, 0): r"P100|Quadro GP100",
}
"""Compute capability by the beginning of the model's name, as NVIDIA's pages "CUDA GPU Compute Capability" and, below
7.5, "Legacy CUDA GPU Compute Capability" have them. A name that is not there says nothing of its generation."""

_NVIDIA, _DISPLAY = 0x10DE, 0x03


def sign() -> str | None:
    """A file that shows that an NVIDIA device with a driver is here, from the root on; None when there is none."""
    return next((f"/{files[0]}" for files in _SIGNS if all(map(host.exists, files))), None)


def missing_driver() -> tuple[str, ...]:
    """Where there is no sign of a driver: what keeps a GPU on the PCI bus from use. Empty when there is no such GPU."""
    for device in host.pci_devices(_NVIDIA):
        driver = host.kernel_driver(device)
        if device.class_id >> 16 != _DISPLAY or driver == "vfio-pci":  # vfio-pci: lent to a virtual machine
            continue
        gpu = f"an NVIDIA GPU is on the PCI bus ({device.address})"
        if driver == "nvidia":
            return (f"{gpu}, but not for this container (no /dev/nvidiactl); give it one (`docker run --gpus all`)",)
        held = "; Linux's nouveau drives it, which has no CUDA" if driver == "nouveau" else ""
        return (f"{gpu}, but NVIDIA's driver is not installed or not loaded{held}; install it and reboot",)
    return ()


def driver_version() -> str | None:
    """Release of the kernel driver, as "580.65.06"; None on WSL and Windows, where no file tells it."""
    version = re.search(r"Kernel Module.*?([0-9]+\.[0-9][0-9.]*)", host.read("proc/driver/nvidia/version") or "")
    return version[1] if version else host.read("sys/module/nvidia/version") or None


def units() -> list[Unit]:
    """The GPUs of the Linux driver by PCI bus. That one is partitioned (MIG) these files do not say.

    Files: NVIDIA's driver README, "Using the /proc File System Interface".
    """
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted((host.ROOT / "proc/driver/nvidia/gpus").iterdir()):
            lines = (host.read(folder / "information") or "").splitlines()
            facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
            if "Model" in facts and facts.get("GPU Excluded", "No") == "No":
                uuid = facts.get("GPU UUID", "")
                # Question marks stand for what is not known before the GPU is first used.
                names = ("" if "?" in uuid else uuid,)
                found.append(Unit(handle=folder.name, gpu=folder.name, model=facts["Model"], names=names))
    return found


def facts(unit: Unit) -> dict[str, Any]:
    """What these files tell of a unit, as fields of Platform. Raises LookupError for a model that no table has."""
    for capability, models in _CAPABILITIES.items():
        if re.match(rf"(NVIDIA |Tesla )*({models})(?![0-9A-Za-z])", unit.model):
            return {"name": unit.model, "uuid": unit.names[0] or None, "compute_capability": capability}
    raise LookupError("without NVML and the CUDA driver, this model's compute capability is not known")
