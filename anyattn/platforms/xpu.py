"""Intel GPUs as torch.xpu would number them for this process, told by Linux's sysfs: no Level Zero, no import of torch.

Elsewhere nothing is found: on Windows and WSL torch.xpu runs too, but no file tells which GPU is there.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from anyattn.platforms import host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.platforms.xpu_models import MODELS, Model
from anyattn.platforms.xpu_visible import Card, Unit, visible_units
from anyattn.types import GraphLevel

_INTEL, _DISPLAY = 0x8086, 0x03
_DRIVERS = ("xe", "i915")
_GUIDE = 'PyTorch\'s "Getting Started on Intel GPU"'
_WSL_FILES = ("dev/dxg", "usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1")
"""Windows' GPUs under WSL, and Intel's Level Zero driver where Debian's packages have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """One Intel GPU with a kernel driver, and its render node where it has one."""

    pci: host.PciDevice
    driver: str
    model: Model | None
    node: str | None
    """Below the root: "dev/dri/renderD128"."""

    def __str__(self) -> str:
        name = f"Intel GPU {self.pci.device_id:#06x}" if self.model is None else self.model.name
        return f"{name}, PCI {self.pci.address}"


def probe() -> ProbeResult:
    """The Intel GPUs that torch.xpu shows to this process, in its order. Never raises; trouble is a problem text.

    Graphics that torch.xpu is not documented to drive are passed over: a laptop or server that has only these gives an
    empty result.
    """
    try:
        return _probe()
    except Exception as error:
        return ProbeResult(problems=(f"the probe of Intel GPUs failed: {error}",))


def _probe() -> ProbeResult:
    gpus, problems = _gpus()
    if not gpus and all(host.exists(file) for file in _WSL_FILES):
        problems.append(
            f"Intel's GPU runtime is installed for WSL (/{_WSL_FILES[0]} and /{_WSL_FILES[1]} exist), but Intel GPUs "
            "are read from Linux's own drivers, which WSL has not; run without WSL"
        )
    cards = [_card(gpu) for gpu in gpus]
    visible, complaints = visible_units(cards, os.environ)
    if any(gpu.model is not None for gpu in gpus):
        problems += complaints
    runtime_version, device_problems = host.torch_facts("xpu", "xpu", "XPU")
    devices = []
    for index, unit in enumerate(visible):
        gpu = unit.card.handle
        assert isinstance(gpu, _Gpu)
        if gpu.model is None:  # its number stays taken, so that the others keep theirs
            if unit.card.is_discrete:
                problems.append(f"xpu:{index} ({gpu}) is not known to anyattn and is left out")
            continue
        devices.append(
            Platform(
                kind="xpu",
                vendor="intel",
                name=gpu.model.name,
                arch=gpu.model.arch,
                torch_device=f"xpu:{index}",
                index=index,
                memory_total_bytes=_memory_bytes(gpu, unit),
                num_cores=_num_cores(gpu.model, unit),
                driver_version=host.read(f"sys/module/{gpu.driver}/version") or None,  # Intel's own packages have one
                runtime_version=runtime_version,
                collective="xccl",
                # torch.xpu.XPUGraph, which torch 2.13 has; nothing here has used one.
                graph=GraphLevel.ALWAYS if host.torch_has("xpu/graphs.py") else GraphLevel.NEVER,
                triton=True,  # for every Intel GPU that torch takes (torch.utils._triton.has_triton)
                status="contract-tested",
                torch_remedy=host.TORCH_REMEDIES["xpu"],
                problems=device_problems,
            )
        )
    return ProbeResult(devices=tuple(devices), problems=tuple(problems))


def _gpus() -> tuple[list[_Gpu], list[str]]:
    """The GPUs that this process can open, even where torch does not drive them (Level Zero counts them), and problems.

    sysfs shows in a container what the host has; what the container was given of it are the nodes in /dev/dri.
    """
    found: list[_Gpu] = []
    hidden: list[_Gpu] = []
    problems: list[str] = []
    for pci in host.pci_devices(_INTEL):
        if pci.class_id >> 16 != _DISPLAY:
            continue
        driver, model = host.kernel_driver(pci), MODELS.get(pci.device_id)
        if driver not in _DRIVERS:
            if driver is None and model is not None:
                problems.append(
                    f"{model.name} (PCI {pci.address}) is here, but Linux's drivers xe and i915 do not drive it; see "
                    f"`dmesg` for the reason, and {_GUIDE} for the kernels that know it"
                )
            continue
        node = next((f"dev/dri/{name}" for name in _names(pci.folder / "drm") if name.startswith("renderD")), None)
        gpu = _Gpu(pci=pci, driver=driver, model=model, node=node)
        if node is None or not host.exists(node):
            hidden.append(gpu)
        elif os.access(host.ROOT / node, os.R_OK | os.W_OK):
            found.append(gpu)
        elif model is not None:
            problems.append(
                f"/{node} ({gpu}) may not be opened; run `sudo usermod -aG render $USER` (or the group that `ls -l "
                "/dev/dri` shows) and log in again, and give a container the group's number (`--group-add`)"
            )
    wanted = [gpu for gpu in hidden if gpu.model is not None]
    if wanted and not found and not problems:
        node = wanted[0].node or "dev/dri/renderD*"
        problems.append(
            f"an Intel GPU is here ({wanted[0]}), but not its /{node}; "
            "give the container its nodes (`--device /dev/dri`)"
        )
    return found, problems


def _card(gpu: _Gpu) -> Card:
    if gpu.model is None:  # integrated graphics are device 2 of the first bus, on every machine
        is_discrete = not gpu.pci.address.endswith(":00:02.0")
        return Card(handle=gpu, address=gpu.pci.address, is_discrete=is_discrete)
    is_max = gpu.model.arch.startswith("pvc")
    return Card(
        handle=gpu,
        address=gpu.pci.address,
        is_discrete=gpu.model.is_discrete,
        num_tiles=max(1, len(_tile_folders(gpu))) if is_max else 1,
        is_flat=is_max,
    )


def _tile_folders(gpu: _Gpu) -> list[Path]:
    """One folder for each tile: tileN of xe (drivers/gpu/drm/xe/xe_tile_sysfs.c), gt/gtN of i915, of a Max card."""
    if gpu.driver == "xe":
        return [gpu.pci.folder / name for name in _names(gpu.pci.folder) if name.startswith("tile")]
    card = _card_folder(gpu)
    return [] if card is None else [card / "gt" / name for name in _names(card / "gt") if name.startswith("gt")]


def _card_folder(gpu: _Gpu) -> Path | None:
    drm = gpu.pci.folder / "drm"
    return next((drm / name for name in _names(drm) if name.startswith("card")), None)


def _memory_bytes(gpu: _Gpu, unit: Unit) -> int | None:
    """Memory of the unit's tiles in bytes, where the driver tells it: Intel's own packages do, Linux's drivers do not.

    Both files are of one tile: physical_vram_size_bytes (IGT, tests/intel/xe_sysfs_tile.c), and lmem_total_bytes as
    Intel's device plugins for Kubernetes read it.
    """
    if gpu.driver == "xe":
        files = [gpu.pci.folder / f"tile{tile}" / "physical_vram_size_bytes" for tile in unit.tiles]
    elif (card := _card_folder(gpu)) is not None:
        files = [card / "lmem_total_bytes"] * len(unit.tiles)
    else:
        return None
    sizes = [host.read(file) or "" for file in files]
    return sum(map(int, sizes)) if sizes and all(size.isdecimal() for size in sizes) else None


def _num_cores(model: Model, unit: Unit) -> int | None:
    return None if model.num_cores is None else model.num_cores * len(unit.tiles) // unit.card.num_tiles


def _names(folder: Path) -> list[str]:
    """What a folder has, by name; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in folder.iterdir())
    return []
