"""What NVML tells of NVIDIA GPUs and their MIG slices: no CUDA context, and nothing left open when the session ends."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from anyattn.platforms.cuda_visible import Unit

_CORES_PER_MULTIPROCESSOR = {
    **dict.fromkeys([(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)], 64),
    **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 1), (6, 2), (8, 6), (8, 7), (8, 9)], 128),
    **dict.fromkeys([(9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)], 128),
}
"""By compute capability, as in `_ConvertSMVer2Cores` of the CUDA samples (helper_cuda.h): NVML counts cores only."""


@contextlib.contextmanager
def session() -> Iterator[ModuleType]:
    """NVML, started, to be given to the functions below. Raises RuntimeError with a remedy where it does not answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except Exception as error:  # a broken package is a reason, like a missing one
        problem = f"Python's binding to NVML cannot be imported ({error}); run `pip install nvidia-ml-py`"
        raise RuntimeError(problem) from error
    try:
        nvml.nvmlInit()
    except Exception as error:
        problem = (
            f"NVML does not start ({error}); see whether `nvidia-smi` runs, and give a container "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        raise RuntimeError(problem) from error
    try:
        yield nvml
    except Exception as error:
        raise RuntimeError(f"NVML failed: {error}") from error
    finally:
        with contextlib.suppress(Exception):  # left open, NVML would be shared with children after a fork
            nvml.nvmlShutdown()


def versions(nvml: ModuleType) -> tuple[str | None, tuple[int, int] | None]:
    """Release of the driver, and the newest CUDA that it knows."""
    release = _text(_optional(nvml, "nvmlSystemGetDriverVersion") or "")
    cuda = _optional(nvml, "nvmlSystemGetCudaDriverVersion")  # 1000 * major + 10 * minor
    return release or None, (cuda // 1000, cuda % 1000 // 10) if cuda else None


def units(nvml: ModuleType) -> tuple[list[Unit], list[str]]:
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


def facts(nvml: ModuleType, unit: Unit) -> dict[str, Any]:
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
        "uuid": unit.names[0] or None,
        "compute_capability": (major, minor),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_free_bytes": None if memory is None else int(memory.free),
        "num_cores": num_cores,
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
