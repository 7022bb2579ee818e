"""The contract tier of platform probes and simulated devices: facts as frozen data, found without starting a device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial

from anyattn.platforms.base import Platform, ProbeResult
from anyattn.plugins.isolation import TimeLimitError, describe, run_side_by_side
from anyattn.plugins.manager import PluginManager
from anyattn.testing.check import CannotRunError, Check, CheckFailedError
from anyattn.testing.contract.classes import (
    contract_check,
    require_frozen,
    require_json,
    require_light,
    require_version,
)
from anyattn.testing.contract.fresh_process import call
from anyattn.testing.contract.probing import probed, probed_in_a_fork
from anyattn.testing.device import answers
from anyattn.testing.target import Target

_PYTHONS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")
"""Variables without which Python itself may not start."""


def checks(target: Target, *, time_limit_s: float | None = None) -> Iterator[Check]:
    """All checks of a probe or a simulated device, on whatever machine this is.

    time_limit_s: that a probe may take; by default what all probes together have in `anyattn.detect`.
    """
    if target.kind == "simulated device":
        yield from _simulated_checks(target)
        return
    limit_s = PluginManager(entry_points=()).time_limit_s if time_limit_s is None else time_limit_s
    every_time: list[tuple[str, str, Callable[[Target, float], None]]] = [
        ("contract", "it returns a ProbeResult within the time limit of all probes", _require_result),
        ("contract", "it finds the same when it is asked again", _require_same),
        ("kind", "its devices are of the kind that it is offered for", _require_kind),
        ("simulated", "its devices are not simulated", _require_real),
        ("torch_device", "its devices differ in torch_device", _require_distinct),
        ("contract", "its devices are frozen", _require_frozen),
        ("contract", "its devices can be written as JSON", _require_json),
        ("problems", "the problems are lines of text", _require_texts),
        ("problems", "a device's problems say what is wrong; what mends it", _require_remedies),
        ("torch_device", "torch computes on a device without problems", _require_torch),
        ("contract", "it runs without importing torch", _require_no_torch),
        ("contract", "it finds the same in a forked process", _require_same_in_a_fork),
        ("contract", "it runs without any environment variable", _require_no_environment),
    ]
    yield from _import_checks(target)
    for capability, name, function in every_time:
        yield contract_check(name, capability, partial(function, target, limit_s))


def _simulated_checks(target: Target) -> Iterator[Check]:
    yield from _import_checks(target)
    device = target.loaded
    yield contract_check("is a Platform with simulated=True", "simulated", partial(_require_simulated, target))
    if isinstance(device, Platform):
        yield contract_check("its facts are frozen", "contract", partial(require_frozen, device))
        yield contract_check("its facts can be written as JSON", "contract", partial(require_json, device))
        yield contract_check("it has no problems", "problems", partial(_require_no_problems, device))


def _import_checks(target: Target) -> Iterator[Check]:
    yield contract_check("its plugin states this contract version", "contract", partial(require_version, target))
    yield contract_check("its module is imported without torch", "contract", partial(require_light, target))


def _require_simulated(target: Target) -> None:
    device = target.loaded
    if not (isinstance(device, Platform) and device.simulated):
        raise CheckFailedError(f"{target.place} is {device!r}: a simulated device is a Platform with simulated=True.")


def _require_no_problems(device: Platform) -> None:
    if device.problems:
        raise CheckFailedError(
            f"{device} has problems ({'; '.join(device.problems)}): they speak against every backend, and a device "
            "that is not here has none."
        )


def _result(target: Target, limit_s: float) -> ProbeResult:
    """What the probe finds here. Raises CheckFailedError where it does not end in time, raises or finds no result."""
    (outcome,) = run_side_by_side([target.loaded], limit_s)
    if isinstance(outcome.error, TimeLimitError):
        raise CheckFailedError(f"the probe did not end within {limit_s:g} s, which all probes have together.")
    if outcome.error is not None:
        raise CheckFailedError(
            f"the probe raised {describe(outcome.error)}: what it cannot tell belongs into the result's problems."
        ) from outcome.error
    if not isinstance(outcome.value, ProbeResult):
        raise CheckFailedError(f"the probe returned {outcome.value!r}, which is no anyattn.ProbeResult.")
    return outcome.value


def _require_result(target: Target, limit_s: float) -> None:
    _result(target, limit_s)


def _devices(target: Target, limit_s: float) -> tuple[Platform, ...]:
    """Raises CannotRunError where the probe finds none."""
    found = _result(target, limit_s).devices
    if not found:
        raise CannotRunError("the probe finds no device here.")
    return found


def _lasting(result: ProbeResult) -> ProbeResult:
    """Without what changes from one moment to the next."""
    return dataclasses.replace(
        result, devices=tuple(dataclasses.replace(device, memory_free_bytes=None) for device in result.devices)
    )


def _require_same(target: Target, limit_s: float) -> None:
    first, again = (_lasting(_result(target, limit_s)) for _ in range(2))
    if first != again:
        raise CheckFailedError(f"the probe found {first}, and when it was asked again {again}.")


def _require_kind(target: Target, limit_s: float) -> None:
    if target.offer is None:
        raise CannotRunError("not offered by an installed plugin, which would offer it for one kind.")
    for device in _devices(target, limit_s):
        if device.kind != target.offer.name:
            raise CheckFailedError(
                f"{device} is of kind {device.kind!r}, and the probe is offered for {target.offer.name!r}: it would be "
                "left out. Give every kind a probe of its own."
            )


def _require_real(target: Target, limit_s: float) -> None:
    for device in _devices(target, limit_s):
        if device.simulated:
            raise CheckFailedError(f"{device} is simulated: offer it in anyattn_simulated_devices instead.")


def _require_distinct(target: Target, limit_s: float) -> None:
    names = [device.torch_device for device in _devices(target, limit_s)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckFailedError(f"several devices are {', '.join(twice)} to torch, which tells them apart by that name.")


def _require_torch(target: Target, limit_s: float) -> None:
    for device in _devices(target, limit_s):
        if not device.problems and not answers(device):
            raise CheckFailedError(
                f"{target.place} found {device}, which has no problems, and torch cannot add two numbers on "
                f"{device.torch_device!r}: say in `problems` why it cannot be used, and what mends that."
            )


def _require_frozen(target: Target, limit_s: float) -> None:
    for device in _devices(target, limit_s):
        require_frozen(device)


def _require_json(target: Target, limit_s: float) -> None:
    for device in _devices(target, limit_s):
        require_json(device)


def _require_texts(target: Target, limit_s: float) -> None:
    result = _result(target, limit_s)
    for problem in (*result.problems, *(problem for device in result.devices for problem in device.problems)):
        if not problem.strip() or "\n" in problem:
            raise CheckFailedError(f"{problem!r} is a problem's text: it is one line that says what is wrong.")


def _require_remedies(target: Target, limit_s: float) -> None:
    problems = [problem for device in _devices(target, limit_s) for problem in device.problems]
    for problem in problems:
        if not all(part.strip() for part in (problem.partition(";")[0], problem.partition(";")[2])):
            raise CheckFailedError(
                f"{problem!r} keeps a device from being used and does not say what mends that: write what is wrong, a "
                'semicolon and what to do, as "torch_mine is not installed; run `pip install torch-mine`".'
            )
    if not problems:
        raise CannotRunError("no device here has a problem.")


def _require_no_torch(target: Target, limit_s: float) -> None:
    if heavy := call(probed, place=target.place, probe_limit_s=limit_s)["heavy"]:
        raise CheckFailedError(
            f"the probe imports {', '.join(heavy)}: detection starts no device, and has to answer where torch is "
            "broken. Read the driver's files or ask its management library."
        )


def _require_same_in_a_fork(target: Target, limit_s: float) -> None:
    if not hasattr(os, "fork"):
        raise CannotRunError("this system cannot fork a process.")
    here, forked = call(probed_in_a_fork, place=target.place, probe_limit_s=limit_s)
    for part in ("devices", "problems"):
        if here[part] != forked[part]:
            raise CheckFailedError(
                f"the probe found {part} {here[part]}, and then in a forked process {forked[part]}: processes that "
                "were forked, as data loaders are, ask too, and what a driver has started does not live on there."
            )


def _require_no_environment(target: Target, limit_s: float) -> None:
    kept = {name: os.environ[name] for name in _PYTHONS if name in os.environ}
    call(probed, environment=kept, place=target.place, probe_limit_s=limit_s)
