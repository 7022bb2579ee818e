"""AMD GPUs as HIP numbers them for this process, told by the kernel driver's files: no HIP context, no torch."""

from __future__ import annotations

import os
import re
from typing import Any

from anyattn.platforms import host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.platforms.rocm_visible import TOPOLOGY, Node, numbers, open_nodes, visible_gpus
from anyattn.types import GraphLevel

_VENDOR_ID = 0x1002
_ACCELERATOR_CLASSES = (0x1200, 0x0380)
"""PCI base class and subclass of Instinct: processing accelerator, display controller that drives no display."""

_NAME_FILES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")
"""libdrm's table of marketing names, where distributions and AMD's own packages have it."""

_WSL_DEVICE = "dev/dxg"
_WSL_LIBRARIES = ("opt/rocm/lib/librocdxg.so", "opt/rocm/lib/libamdhip64.so")
"""ROCm under WSL (ROCprofiler-SDK documentation, "Using rocprofv3 on WSL2"); before that library, the package
hsa-runtime-rocr4wsl-amdgpu had what it does in the ROC runtime itself, and HIP tells that ROCm is installed."""

_TRITON_ARCHS = frozenset(
    {"gfx908", "gfx90a", "gfx942", "gfx950", "gfx1250"}
    | {f"gfx{number}" for number in (1010, 1011, 1012, 1013, *range(1030, 1037))}
    | {f"gfx{number}" for number in (*range(1100, 1104), *range(1150, 1154), 1200, 1201)}
)
"""What Triton's AMD backend knows and does not refuse (`deduceISAFamily` in its TargetUtils.cpp): CDNA and RDNA."""

_CONTAINER = "give a container --device=/dev/kfd --device=/dev/dri"


def probe() -> ProbeResult:
    """The AMD GPUs that HIP shows to this process, in HIP's order. Never raises; trouble is a problem text.

    A machine without a sign of an AMD GPU that ROCm could use gives an empty result without problems.
    """
    try:
        return _probe()
    except Exception as error:
        return ProbeResult(problems=(f"the probe of AMD GPUs failed: {error}",))


def _probe() -> ProbeResult:
    nodes, num_hidden = open_nodes()
    gpus = [node for node in nodes if node.facts.get("simd_count")]
    if not gpus:
        return ProbeResult(problems=_why_none(num_hidden))
    shown, problems = visible_gpus([gpu.uuid for gpu in gpus], os.environ)
    runtime_version, torch_problems = host.torch_facts("rocm", "hip", "ROCm")
    device_problems = _access_problems(gpus) + torch_problems
    devices = tuple(
        Platform(
            kind="rocm",
            vendor="amd",
            torch_device=f"cuda:{index}",
            index=index,
            uuid=gpus[position].uuid,
            driver_version=_driver_version(),
            runtime_version=runtime_version,
            collective="rccl",
            graph=GraphLevel.ALWAYS,
            status="contract-tested",
            torch_remedy=host.TORCH_REMEDIES["rocm"],
            problems=device_problems,
            **_facts(gpus[position]),
        )
        for index, position in enumerate(shown)
    )
    return ProbeResult(devices=devices, problems=tuple(problems))


def _why_none(num_hidden: int) -> tuple[str, ...]:
    if num_hidden:
        gpus = "an AMD GPU is" if num_hidden == 1 else f"{num_hidden} AMD GPUs are"
        return (f"{gpus} here (/{TOPOLOGY}), but not open to this process; {_CONTAINER}",)
    libraries = [file for file in _WSL_LIBRARIES if host.exists(file)]
    if libraries and host.exists(_WSL_DEVICE) and not host.exists("dev/kfd"):
        found = f"ROCm is installed for WSL (/{_WSL_DEVICE} and /{libraries[0]} exist)"
        return (f"{found}, but AMD GPUs are read from Linux's own driver, which WSL has not; run without WSL",)
    if not host.exists(TOPOLOGY):
        for device in host.pci_devices(_VENDOR_ID):
            if device.class_id >> 8 in _ACCELERATOR_CLASSES:
                found = f"an AMD accelerator is here (PCI device {device.address}), but its driver is not loaded"
                return (f"{found}; run `sudo modprobe amdgpu`, or install AMD's driver",)
    return ()


def _access_problems(gpus: list[Node]) -> tuple[str, ...]:
    """The device file that cannot be opened, if any: the runtime then does not start, not even for the other GPUs."""
    if not host.exists("dev/kfd"):
        return (f"/dev/kfd is missing; {_CONTAINER}",)
    for file in ("dev/kfd", *(gpu.render_device for gpu in gpus)):
        if not os.access(host.ROOT / file, os.R_OK | os.W_OK):
            remedy = "run `sudo usermod -a -G render,video $LOGNAME` and log in again, or give a container --group-add"
            return (f"this user may not open /{file}; {remedy} for the groups that own it",)
    return ()


def _facts(gpu: Node) -> dict[str, Any]:
    """What the driver tells of one GPU, as fields of Platform."""
    arch, card = _arch(gpu), _card(gpu)
    total_bytes, free_bytes = _memory_bytes(gpu, card)
    simds_per_unit = gpu.facts.get("simd_per_cu")
    return {
        "name": host.read(f"{card}/product_name") or _marketing_name(card) or "AMD GPU",
        "arch": arch,
        "memory_total_bytes": total_bytes,
        "memory_free_bytes": free_bytes,
        "num_cores": gpu.facts["simd_count"] // simds_per_unit if simds_per_unit else None,
        "triton": arch in _TRITON_ARCHS,
    }


def _arch(gpu: Node) -> str:
    """What the runtime takes the GPU for: HSA_OVERRIDE_GFX_VERSION, for all or for one node, is what kernels meet.

    gfx_target_version 90402 is gfx942, and 90010 is gfx90a: minor version and stepping become hexadecimal digits.
    """
    version = gpu.facts.get("gfx_target_version", 0)  # old kernels do not tell
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    setting = os.environ.get("HSA_OVERRIDE_GFX_VERSION", "")
    override = re.fullmatch(
        r"([0-9]+)\.([0-9]+)\.([0-9]+)", os.environ.get(f"HSA_OVERRIDE_GFX_VERSION_{gpu.number}", setting)
    )
    if override:
        major, minor, stepping = map(int, override.groups())
    return f"gfx{major}{minor:x}{stepping:x}" if major else "unknown"


def _card(gpu: Node) -> str:
    """The folder of the GPU's PCI device. A compute partition has its number where the PCI function stands."""
    location = gpu.facts.get("location_id", 0)
    bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 0x7
    folder = f"sys/bus/pci/devices/{gpu.facts.get('domain', 0):04x}:{bus:02x}:{slot:02x}"
    return f"{folder}.{function}" if host.exists(f"{folder}.{function}") else f"{folder}.0"


def _marketing_name(card: str) -> str | None:
    """By PCI device and revision, as libdrm looks it up for the runtime; a line is "744C,<tab>C8,<tab>the name"."""
    wanted = [(host.read(f"{card}/{file}") or "").removeprefix("0x").upper() for file in ("device", "revision")]
    for file in _NAME_FILES:
        for line in (host.read(file) or "").splitlines():
            fields = [field.strip() for field in line.split(",", 2)]
            if len(fields) == 3 and fields[:2] == wanted:
                return fields[2]
    return None


def _memory_bytes(gpu: Node, card: str) -> tuple[int | None, int | None]:
    """Total and free. The total is KFD's, as HIP reports it; what is in use is told of the whole card only."""
    banks = [numbers(host.read(file) or "") for file in (host.ROOT / gpu.folder).glob("mem_banks/*/properties")]
    # Heap types 1 and 2 are the GPU's own memory, open to the host or not (kfd_sysfs.h in Linux's uapi headers).
    total_bytes = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2))
    card_bytes, used_bytes, host_used_bytes = (
        _number(f"{card}/mem_info_{name}") for name in ("vram_total", "vram_used", "gtt_used")
    )
    total_bytes = total_bytes or card_bytes or 0
    if card_bytes is None or used_bytes is None or total_bytes < card_bytes:  # less: one of several partitions
        return total_bytes or None, None
    if total_bytes == card_bytes:
        return total_bytes, max(0, total_bytes - used_bytes)
    # More: an APU that allocates in the host's memory, not in the small part set aside for it (`apu_prefer_gtt`).
    available = re.search(r"MemAvailable: *([0-9]+) kB", host.read("proc/meminfo") or "")
    if available is None or host_used_bytes is None:
        return total_bytes, None
    return total_bytes, max(0, min(total_bytes - host_used_bytes, int(available.group(1)) << 10))


def _number(path: str) -> int | None:
    return numbers(f"value {host.read(path)}").get("value")


def _driver_version() -> str | None:
    """Of AMD's own amdgpu package; the driver that comes with Linux has no version but Linux's."""
    kernel = host.read("proc/sys/kernel/osrelease")
    return host.read("sys/module/amdgpu/version") or (f"Linux {kernel}" if kernel else None)
