"""NVIDIA GPUs as CUDA would number them for this process: no CUDA context, no import of torch.

Three sources, the best that answers: NVML; the CUDA driver, in a process of its own; the driver's files. Torch would be
none the wiser than the driver, which is what it asks: it may be missing or built without CUDA, takes seconds to import,
and would need a process of its own as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from anyattn.platforms import cuda_driver, cuda_files, cuda_nvml, host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.platforms.cuda_visible import UUID_PREFIXES, Unit, visible_units
from anyattn.types import GraphLevel

Facts = dict[str, Any]
"""Fields of Platform by their names: what a source tells of one device."""

_RUN_ON = frozenset({(9, 0)})
"""Compute capabilities where what NVML and the driver tell was held against torch on hardware, whole GPUs only."""

_TRITON_MINIMUM = (7, 0)
"""Compute capability from which torch lets Triton compile (`torch.utils._triton.has_triton`)."""


def probe() -> ProbeResult:
    """The NVIDIA devices that CUDA shows to this process, in CUDA's order. Never raises; trouble is a problem text.

    A machine without a sign of an NVIDIA device gives an empty result without problems, and no process is started.
    """
    try:
        return _by_nvml()
    except Exception as error:
        reason = str(error)
    try:
        sign = cuda_files.sign()
        if sign is None:
            return ProbeResult(problems=cuda_files.missing_driver())
        return _without_nvml(f"an NVIDIA device is here ({sign} exists), but {reason}")
    except Exception as error:
        return ProbeResult(problems=(reason, f"the probe of NVIDIA devices failed: {error}"))


def _by_nvml() -> ProbeResult:
    with cuda_nvml.session() as nvml:
        units, problems = cuda_nvml.units(nvml)
        found, trouble = _shown(units, partial(cuda_nvml.facts, nvml))
        driver_version, cuda_version = cuda_nvml.versions(nvml)
    runtime_version, device_problems = _torch_facts(cuda_version)
    devices = _devices(found, _RUN_ON, driver_version, runtime_version, device_problems)
    return ProbeResult(devices=devices, problems=(*problems, *trouble))


def _without_nvml(reason: str) -> ProbeResult:
    answer = cuda_driver.ask()
    error = answer.get("error")
    found: list[Facts] = []
    if error is None:
        problems = [reason]
        for index, facts in enumerate(answer["devices"]):
            if "error" in facts:  # its number stays taken, so that the others keep theirs
                problems.append(f"cuda:{index} does not answer and is left out: {facts['error']}")
                continue
            found.append({**facts, "index": index, "compute_capability": tuple(facts["compute_capability"])})
        runtime_version, device_problems = _torch_facts(tuple(answer["cuda_version"]))
    else:
        problems = [reason, f"the CUDA driver, which was asked instead, {error}"]
        units = cuda_files.units()
        if units and answer.get("code") == cuda_driver.NO_DEVICE and not visible_units(units, _visible_setting())[0]:
            problems.pop()  # as CUDA_VISIBLE_DEVICES wants it
        found, trouble = _shown(units, cuda_files.facts)
        problems += trouble
        runtime_version, device_problems = _torch_facts(None)
        device_problems += (f"the CUDA driver, which torch needs, {error}",)
    devices = _devices(
        found, _RUN_ON if error is None else frozenset(), cuda_files.driver_version(), runtime_version, device_problems
    )
    return ProbeResult(devices=devices, problems=tuple(problems))


def _visible_setting() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _shown(units: list[Unit], tell: Callable[[Unit], Facts]) -> tuple[list[Facts], list[str]]:
    """The facts that `tell` gives of the units that CUDA shows, with CUDA's index, and what went wrong."""
    setting = _visible_setting()
    visible, problems = visible_units(units, setting)
    by_index = setting is None or not setting.startswith(UUID_PREFIXES)
    models = {unit.model for unit in units}
    if visible and by_index and len(models) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        problems.append(
            f"the NVIDIA GPUs differ ({', '.join(sorted(models))}) and CUDA numbers the fastest first by a measure of "
            "its own, so cuda:N may be another one than shown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    found = []
    for index, unit in enumerate(visible):
        try:
            found.append({**tell(unit), "index": index})
        except Exception as error:  # its number stays taken, so that the others keep theirs
            problems.append(f"cuda:{index} ({unit.model}) is left out, as its facts cannot be told: {error}")
    return found, problems


def _devices(
    found: Iterable[Facts],
    run_on: frozenset[tuple[int, int]],
    driver_version: str | None,
    runtime_version: str | None,
    problems: tuple[str, ...],
) -> tuple[Platform, ...]:
    devices = []
    for facts in found:
        major, minor = facts["compute_capability"]
        whole = not (facts["uuid"] or "").startswith("MIG-")
        devices.append(
            Platform(
                kind="cuda",
                vendor="nvidia",
                arch=f"sm{major}{minor}",
                torch_device=f"cuda:{facts['index']}",
                driver_version=driver_version,
                runtime_version=runtime_version,
                collective="nccl",
                graph=GraphLevel.ALWAYS,
                triton=(major, minor) >= _TRITON_MINIMUM,
                status="run on hardware" if (major, minor) in run_on and whole else "contract-tested",
                torch_remedy=host.TORCH_REMEDIES["cuda"],
                problems=problems,
                **facts,
            )
        )
    return tuple(devices)


def _torch_facts(cuda_version: tuple[int, int] | None) -> tuple[str | None, tuple[str, ...]]:
    """The CUDA version that the installed torch was built for, and why that torch cannot drive a GPU here.

    cuda_version: the newest CUDA that the driver knows; None when that could not be told.
    """
    runtime_version, problems = host.torch_facts("cuda", "cuda", "CUDA")
    major = (runtime_version or "").partition(".")[0]
    # Within a major version newer programs run on older drivers (NVIDIA, "CUDA Compatibility").
    if cuda_version is not None and major.isdigit() and int(major) > cuda_version[0]:
        known = ".".join(map(str, cuda_version))
        problem = (
            f"the installed torch was built for CUDA {runtime_version}, but the driver knows CUDA {known} and older; "
            'update the driver, or take the torch for it from PyTorch\'s "Start Locally" page'
        )
        return runtime_version, (*problems, problem)
    return runtime_version, problems
