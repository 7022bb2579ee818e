"""`anyattn doctor`: what machine this is, what is installed, and whether attention can run here."""

from __future__ import annotations

import dataclasses
import os
import platform as python_platform
from typing import Annotated, Any

import typer

from anyattn.arguments import checked_preference
from anyattn.attention.spec import AttentionSpec
from anyattn.cli.output import Answered, gibibytes, installed_version, section, show, show_json
from anyattn.discovery import SIMULATED, plugin_manager
from anyattn.dry_run import Survey, survey_layers
from anyattn.errors import NoDeviceError
from anyattn.platforms.base import Platform
from anyattn.platforms.threads import Threads, torch_threads
from anyattn.plugins.isolation import stdout_on_stderr
from anyattn.plugins.requirements import package_names
from anyattn.settings import Settings, misspelled_variables

USUAL_SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
"""Llama 3 8B's layers: what a machine that runs language models at all can be expected to serve."""

_PACKAGES = ("anyattn", "torch", "transformers", "gguf", "numpy", "nvidia-ml-py")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what this machine is, and if attention can run here.

    The exit code is 0 when it can: a device is usable and a backend serves the layers of a usual model on it.
    Otherwise the commands that would help are printed. Nothing is imported to find out what is installed.
    """
    settings = Settings.from_env()
    wanted = settings.platform or ""
    with stdout_on_stderr():  # a plugin may print when it is imported
        found = survey_layers(
            (USUAL_SPEC,),
            None if wanted.startswith(SIMULATED) else settings.platform,
            checked_preference(settings),
            plugin_manager(settings),
        )
    if wanted.startswith(SIMULATED):
        error = NoDeviceError(f"ANYATTN_PLATFORM is {wanted}, on which nothing runs: unset it, or name a device above.")
        found = dataclasses.replace(found, device=None, verdicts={}, selections={}, error=error)
    if as_json:
        show_json(_document(found))
    else:
        _report(found)
    if found.error is not None:
        raise Answered(found.error)


def _document(found: Survey) -> dict[str, Any]:
    selection = found.selection
    return {
        "ok": selection is not None,
        "error": None if found.error is None else str(found.error),
        "device": None if found.device is None else found.device.to_json(),
        "spec": USUAL_SPEC.to_json(),
        "choice": None if selection is None else selection.choice_json(),
        "remedies": _remedies(found),
        "devices": [device.to_json() for device in found.detection.devices],
        "threads": None if (threads := _threads(found)) is None else threads.to_json(),
        "problems": _problems(found),
        "plugin_problems": list(found.plugin_problems),
        "versions": _versions(found),
        "settings": _settings(),
    }


def _report(found: Survey) -> None:
    threads = _threads(found)
    for device in found.detection.devices:
        section(device.torch_device, _facts(device, threads if device.kind == "cpu" else None))
    section("versions", ((name, version or "not installed") for name, version in _versions(found).items()))
    section("settings", _settings().items() or [("none", "no ANYATTN_ variable is set")])
    for title, problems in (("problems", _problems(found)), ("plugin problems", found.plugin_problems)):
        if problems:
            section(title, (("-", problem) for problem in problems))
    if remedies := _remedies(found):
        section("what would help", (("-", remedy) for remedy in remedies))
    if found.selection is not None:
        show(dataclasses.replace(found.selection, problems=()).explain())  # which are told above
    elif found.device is not None:
        show(f"device    {found.device}")


def _problems(found: Survey) -> list[str]:
    return [*found.detection.problems, *misspelled_variables(os.environ)]


def _threads(found: Survey) -> Threads | None:
    """Those that torch will have on the CPU; None where no probe found one."""
    return next((torch_threads(device) for device in found.detection.devices if device.kind == "cpu"), None)


def _facts(device: Platform, threads: Threads | None) -> list[tuple[str, str]]:
    """The device's known facts, in words."""
    memory = None if device.memory_total_bytes is None else gibibytes(device.memory_total_bytes)
    if memory and device.memory_free_bytes is not None:
        memory += f", {gibibytes(device.memory_free_bytes)} free"
    facts = {
        "name": f"{device.name} ({device.vendor})",
        "arch": device.arch,
        "features": " ".join(sorted(device.features)),
        "memory": memory,
        "multiprocessors" if device.num_threads is None else "cores": device.num_cores,
        "threads": device.num_threads,
        "cpus": device.cpus,
        "NUMA nodes": device.numa_nodes,
        "memory of nodes": device.memory_nodes,
        "torch threads": None if threads is None else f"{threads.count or 'unknown'} ({threads.counted_by})",
        "pinned by": None if threads is None else "; ".join(threads.pinned_by) or "nothing",
        "driver": device.driver_version,
        "runtime": device.runtime_version,
        "uuid": device.uuid,
        "collective": device.collective,
        "graph": device.graph.name.lower(),
        "triton": "can compile for it" if device.triton else "cannot compile for it",
        "probe": device.status,
        "usable": "no: " + "; ".join(device.problems) if device.problems else "yes",
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _versions(found: Survey) -> dict[str, str | None]:
    """Of Python, of what anyattn runs on and of what the backends ask for; None for what is not installed."""
    asked = [name for each in found.candidates.backends for name in package_names(each.capabilities.packages)]
    versions: dict[str, str | None] = {"python": python_platform.python_version()}
    return versions | {name: installed_version(name) for name in dict.fromkeys([*_PACKAGES, *asked])}


def _settings() -> dict[str, str]:
    """The environment's part in the answer."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("ANYATTN_")}


def _remedies(found: Survey) -> list[str]:
    """What would make the unusable devices usable, what would add backends on the one that is used, and what would
    make its threads faster where it is the CPU."""
    kinds = None  # of devices to speak of: who has an accelerator in use need not give it up for another
    if found.device is not None and found.device.kind != "cpu":
        kinds = {found.device.kind}
    unusable = [
        f"{device.torch_device}: {text}"
        for device in found.detection.devices
        if kinds is None or device.kind in kinds
        for text in device.problems
    ]
    lacking = [
        f"{reason.remedy} adds {verdict.name} ({reason.wanted}: {reason.supported})"
        for verdicts in found.verdicts.values()
        for verdict in verdicts
        if all(reason.field in ("package", "program") for reason in verdict.reasons)
        for reason in verdict.reasons
    ]
    threads = _threads(found) if kinds is None else None
    slow = [f"cpu: {hint}" for hint in threads.hints] if threads is not None else []
    return list(dict.fromkeys([*unusable, *lacking, *slow]))  # a backend stands there once for each role
