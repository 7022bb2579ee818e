"""NVIDIA GPUs as CUDA would number them for this process, told by NVML: no CUDA context, no import of torch."""

from __future__ import annotations

import contextlib
import importlib
import os
from types import ModuleType
from typing import Any

from anyattn.platforms import host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.platforms.cuda_visible import UUID_PREFIXES, Unit, visible_units
from anyattn.types import GraphLevel

_DEVICE_SIGNS = (("dev/nvidiactl",), ("proc/driver/nvidia/version",), ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"))
"""Files that say together that an NVIDIA device is here, NVML or not: two of the Linux driver's, then WSL's."""

_CORES_PER_MULTIPROCESSOR = {
    **dict.fromkeys([(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)], 64),
    **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 1), (6, 2), (8, 6), (8, 7), (8, 9)], 128),
    **dict.fromkeys([(9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)], 128),
}
"""By compute capability, as in `_ConvertSMVer2Cores` of the CUDA samples (helper_cuda.h): NVML counts cores only."""

_TRITON_MINIMUM = (7, 0)
"""Compute capability from which torch lets Triton compile (`torch.utils._triton.has_triton`)."""


def probe() -> ProbeResult:
    """The NVIDIA devices that CUDA shows to this process, in CUDA's order. Never raises; trouble is a problem text.

    A machine without a sign of an NVIDIA device gives an empty result without problems.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except Exception as error:  # a broken package is a reason, like a missing one
        return _unreachable(f"Python's binding to NVML cannot be imported ({error}); run `pip install nvidia-ml-py`")
    try:
        nvml.nvmlInit()
    except Exception as error:
        return _unreachable(
            f"NVML does not start ({error}); see whether `nvidia-smi` runs, and give a container "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    try:
        return _probe(nvml)
    except Exception as error:
        return ProbeResult(problems=(f"NVML failed: {error}",))
    finally:
        with contextlib.suppress(Exception):  # left open, NVML would be shared with children after a fork
            nvml.nvmlShutdown()


def _unreachable(reason: str) -> ProbeResult:
    for sign in _DEVICE_SIGNS:
        if all(host.exists(file) for file in sign):
            return ProbeResult(problems=(f"an NVIDIA device is here (/{sign[0]} exists), but {reason}",))
    return ProbeResult()


def _probe(nvml: ModuleType) -> ProbeResult:
    units, problems = _units(nvml)
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible, complaint = visible_units(units, setting)
    problems += complaint
    by_index = setting is None or not setting.startswith(UUID_PREFIXES)
    models = {unit.model for unit in units}
    if visible and by_index and len(models) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        problems.append(
            f"the NVIDIA GPUs differ ({', '.join(sorted(models))}) and CUDA numbers the fastest first by a measure of "
            "its own, so cuda:N may be another one than shown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    driver_version = _text(_optional(nvml, "nvmlSystemGetDriverVersion") or "")
    runtime_version, device_problems = _torch_facts()
    devices = []
    for index, unit in enumerate(visible):
        try:
            facts = _facts(nvml, unit)
        except Exception as error:  # its number stays taken, so that the others keep theirs
            problems.append(f"cuda:{index} ({unit.model}) does not answer and is left out: {error}")
            continue
        devices.append(
            Platform(
                kind="cuda",
                vendor="nvidia",
                torch_device=f"cuda:{index}",
                index=index,
                uuid=unit.names[0] or None,
                driver_version=driver_version or None,
                runtime_version=runtime_version,
                collective="nccl",
                graph=GraphLevel.ALWAYS,
                status="run on hardware",
                problems=device_problems,
                **facts,
            )
        )
    return ProbeResult(devices=tuple(devices), problems=tuple(problems))


def _units(nvml: ModuleType) -> tuple[list[Unit], list[str]]:
    """All units in the order of their indices, and what went wrong: whole GPUs by PCI bus, then slices.

    That slices come last is what programs saw (nvitop, Datadog's agent); NVIDIA's guides do not say.
    """
    whole: list[Unit] = []
    slices: list[Unit] = []
    problems: list[str] = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            model, uuid = _name(nvml, gpu), _text(_optional(nvml, "nvmlDeviceGetUUID", gpu) or "")
            if not (_optional(nvml, "nvmlDeviceGetMigMode", gpu) or (0,))[0]:
                whole.append(Unit(handle=gpu, gpu=gpu, model=model, names=(uuid,)))
                continue
            found = _slices(nvml, gpu, model, uuid)
        except Exception as error:  # CUDA does not number a GPU that cannot be opened
            problems.append(f"NVIDIA GPU {number} does not answer and is left out: {error}")
            continue
        slices += found
        if not found:
            problems.append(f"NVIDIA GPU {number} ({model}) is in MIG mode without a compute instance to run on")
    return whole + slices, problems


def _slices(nvml: ModuleType, gpu: object, model: str, gpu_uuid: str) -> list[Unit]:
    units: list[Unit] = []
    for position in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, position)
        except nvml.NVMLError:  # the count is of what could exist, with gaps
            continue
        instances = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
        names = [_text(nvml.nvmlDeviceGetUUID(handle)), f"MIG-{gpu_uuid}/{instances[0]}/{instances[1]}"]
        if not units:
            names.append(gpu_uuid)  # the partitioned GPU's own name gives its first slice
        units.append(
            Unit(handle=handle, gpu=gpu, model=model, names=tuple(names), is_slice=True, is_numbered=not units)
        )
    return units


def _facts(nvml: ModuleType, unit: Unit) -> dict[str, Any]:
    """What NVML knows of one unit, as fields of Platform. Raises NVMLError where it does not answer."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(unit.gpu)
    memory = _optional(nvml, "nvmlDeviceGetMemoryInfo", unit.handle)  # not told where host and GPU share memory
    if unit.is_slice:
        attributes = _optional(nvml, "nvmlDeviceGetAttributes", unit.handle)
        num_cores = None if attributes is None else int(attributes.multiprocessorCount)
    else:
        cuda_cores = _optional(nvml, "nvmlDeviceGetNumGpuCores", unit.handle)
        per_multiprocessor = _CORES_PER_MULTIPROCESSOR.get((major, minor))
        num_cores = cuda_cores // per_multiprocessor if cuda_cores and per_multiprocessor else None
    return {
        "name": _name(nvml, unit.handle),
        "arch": f"sm{major}{minor}",
        "compute_capability": (major, minor),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_free_bytes": None if memory is None else int(memory.free),
        "num_cores": num_cores,
        "triton": (major, minor) >= _TRITON_MINIMUM,
    }


def _optional(nvml: ModuleType, function: str, *arguments: object) -> Any:
    """The answer, or None where this binding, driver, device or container does not give it."""
    ask = getattr(nvml, function, None)
    try:
        return None if ask is None else ask(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def _name(nvml: ModuleType, handle: object) -> str:
    return _text(_optional(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # old bindings return bytes


def _torch_facts() -> tuple[str | None, tuple[str, ...]]:
    """The CUDA version that the installed torch was built for, and why that torch cannot drive a GPU here."""
    build = host.torch_build()
    if build is None:
        return None, ('torch is not installed; run `pip install "anyattn[cuda]"`',)
    if build.lacks("cuda"):
        problem = (
            f"the installed torch {build.version} was built without CUDA; run `pip uninstall torch`, "
            'then `pip install "anyattn[cuda]"` (on Windows, the command that PyTorch\'s "Start Locally" page gives)'
        )
        return None, (problem,)
    return build.runtimes.get("cuda"), ()
