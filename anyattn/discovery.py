"""What is here: plugins, the devices that their probes find, and what they offer as candidates."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.selection import BackendCandidate, Candidates
from anyattn.errors import NoDeviceError, PluginLoadError, contained
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator, KVPool, PoolCapabilities
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.plugins.isolation import describe, run_side_by_side
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import Offer
from anyattn.plugins.requirements import missing_packages, missing_programs
from anyattn.plugins.signatures import missing_methods, wrong_signatures
from anyattn.settings import Settings, misspelled_variables

SIMULATED = "sim:"
"""What the names of simulated devices begin with where a device is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Every device that was found, accelerators first, and in words what kept a probe from finding out more."""

    devices: tuple[Platform, ...]
    problems: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    """Of devices that were looked for."""


def plugin_manager(settings: Settings | None = None) -> PluginManager:
    """The plugins that the settings allow."""
    settings = settings or Settings.from_env()
    return PluginManager(allow=settings.plugins, strict=settings.strict)


def detect(plugins: PluginManager | None = None) -> Detection:
    """Runs every platform probe, side by side. Starts no device context, leaves no thread that could have ended.

    No probe takes another down, or holds it up for longer than the plugins' time limit.

    plugins: whose `problems` then tell what failed to load; without it they are among the detection's.
    """
    if plugins is None:
        plugins = plugin_manager()
        found = detect(plugins)
        return replace(found, problems=(*found.problems, *plugins.problems))
    devices: list[Platform] = []
    problems: list[str] = []
    offers = list(plugins.platforms().values())
    outcomes = run_side_by_side([functools.partial(_probed, offer) for offer in offers], plugins.time_limit_s)
    for offer, outcome in zip(offers, outcomes, strict=True):
        try:
            result: ProbeResult = outcome.result()
        except PluginLoadError as error:
            plugins.report(str(error), error, plugin=offer.plugin)
        except Exception as error:
            text = f"the {offer.name} probe of {offer.owner} failed: {describe(error)}"
            plugins.report(text, error, plugin=offer.plugin)
        else:
            devices += _accepted(plugins, offer, result.devices)
            problems += result.problems
    kinds = tuple(offer.name for offer in offers)
    return Detection(devices=tuple(devices), problems=tuple(problems), kinds=kinds)


def _probed(offer: Offer) -> ProbeResult:
    """Runs in a thread of its own."""
    function = offer.load()
    if not callable(function):
        raise TypeError(f"{offer.target} is no function")
    result = function()
    if not isinstance(result, ProbeResult):
        raise TypeError(f"it returned {type(result).__name__}, not ProbeResult")
    return result


def _accepted(plugins: PluginManager, offer: Offer, devices: Iterable[Platform]) -> list[Platform]:
    """The devices that the offered probe may find; the others are problems of its plugin."""
    accepted: dict[str, Platform] = {}
    for device in devices:
        if device.kind != offer.name:
            found, remedy = f"a device of kind {device.kind!r}", "give every kind a probe of its own"
        elif device.simulated:
            found, remedy = f"{device.torch_device!r} simulated", "offer it in anyattn_simulated_devices"
        elif device.torch_device in accepted:
            found, remedy = f"{device.torch_device!r} twice", "torch must tell devices of one kind apart"
        else:
            accepted[device.torch_device] = device
            continue
        text = f"the {offer.name} probe of {offer.owner} found {found}, which is left out: {remedy}."
        plugins.report(text, plugin=offer.plugin)
    return list(accepted.values())


def load_offers(plugins: PluginManager) -> None:
    """Loads all that is offered and runs the probes, so that the plugins' `records` tell what does not fit."""
    candidates(plugins)
    detect(plugins)
    for offer in plugins.simulated_devices().values():
        try:
            _simulated(offer)
        except PluginLoadError as error:
            plugins.report(str(error), error, plugin=offer.plugin)


def current_platform(settings: Settings | None = None, plugins: PluginManager | None = None) -> Platform:
    """The device to use: the one asked for (ANYATTN_PLATFORM), otherwise the first that torch can drive here.

    Raises NoDeviceError when that is not found or cannot be driven.
    """
    settings = settings or Settings.from_env()
    return usable_device(settings.platform, plugins or plugin_manager(settings))


def usable_device(wanted: str | None, plugins: PluginManager | None = None) -> Platform:
    """The device of that kind or name; None for the first usable one. Raises NoDeviceError when it cannot be used."""
    plugins = plugins or plugin_manager()
    return require_usable(find_device(plugins, wanted, detect(plugins)))


def find_device(plugins: PluginManager, wanted: str | None, detection: Detection) -> Platform:
    """wanted: a device kind, a torch device or a simulated device ("sim:h100"); None for the first usable device.

    Raises NoDeviceError when it is not there, with what is.
    """
    offers = plugins.simulated_devices()
    if wanted is None or not wanted.startswith(SIMULATED):
        try:
            return _choose_device(detection, wanted)
        except NoDeviceError as error:
            if wanted in offers:
                raise NoDeviceError(f"{error} Was {SIMULATED}{wanted}, the simulated one, meant?") from None
            raise
    offer = offers.get(wanted.removeprefix(SIMULATED))
    if offer is None:
        known = ", ".join(f"{SIMULATED}{name}" for name in sorted(offers))
        raise NoDeviceError(f"There is no simulated device {wanted!r}: there are {known}.")
    try:
        return _simulated(offer)
    except PluginLoadError as error:
        raise NoDeviceError(f"{wanted} cannot be used: {error}") from error


def _simulated(offer: Offer) -> Platform:
    """Raises PluginLoadError when it cannot be loaded, or is something else."""
    device = offer.load()
    if not (isinstance(device, Platform) and device.simulated):
        raise PluginLoadError(f"{offer.name!r} of {offer.owner}: {offer.target} is no Platform with simulated=True.")
    return device


def require_usable(platform: Platform) -> Platform:
    """The platform. Raises NoDeviceError when it is a simulated one, or torch cannot drive it."""
    if platform.simulated:
        raise NoDeviceError(
            f"{platform} is simulated: nothing runs on it. anyattn.survey(spec, device=...) and `anyattn backends "
            "--device ...` say what would be chosen there."
        )
    if platform.problems:
        raise NoDeviceError(f"{platform} cannot be used here: {'; '.join(platform.problems)}.")
    return platform


def _choose_device(detection: Detection, wanted: str | None) -> Platform:
    """wanted: a device kind or a torch device; None for the first usable device.

    Raises NoDeviceError when there is none, with what was found.
    """
    found = "; ".join(f"{d} ({'; '.join(d.problems) or 'usable'})" for d in detection.devices) or "nothing"
    matching = [d for d in detection.devices if wanted is None or wanted in device_names(d)]
    matching.sort(key=lambda device: device.kind != (wanted or "").partition(":")[0])  # others may be "cpu" to torch
    usable = [device for device in matching if not device.problems]
    if usable:
        return usable[0]
    asked = f"No device {wanted!r} can be used here" if wanted else "No device can be used here"
    looked = f" Looked for: {', '.join(detection.kinds)}; `anyattn doctor` shows more." if detection.kinds else ""
    raise NoDeviceError(f"{asked}. Found: {found}.{looked} {' '.join(detection.problems)}".rstrip())


def device_names(device: Platform) -> tuple[str, ...]:
    """What a device may be asked for by: its kind, and what torch calls it, with or without an index of 0."""
    name = device.torch_device
    return device.kind, name, name.removesuffix(":0"), *([] if ":" in name else [f"{name}:0"])


def candidates(plugins: PluginManager, detection: Detection | None = None) -> Candidates:
    """What the plugins offer, with what is missing here for each backend.

    detection: whose devices that torch cannot drive here are told among the candidates' problems.
    """
    backends = []
    for offer in plugins.attention_backends().values():
        capabilities = _capabilities(plugins, offer, AttentionBackend, Capabilities)
        if capabilities is None:
            continue
        try:
            missing = missing_packages(capabilities.packages, capabilities.extra)
            missing += missing_programs(capabilities.programs)
        except Exception as error:
            text = f"{offer.name!r} of {offer.owner} declares packages that cannot be read: {error}"
            plugins.report(text, error, plugin=offer.plugin)
            continue
        backends.append(
            BackendCandidate(
                name=offer.name, distribution=offer.distribution, capabilities=capabilities, missing=missing
            )
        )
    allocators = {
        offer.name: capabilities
        for offer in plugins.kv_allocators().values()
        if (capabilities := _capabilities(plugins, offer, KVAllocator, AllocatorCapabilities)) is not None
    }
    pools = {
        offer.name: capabilities
        for offer in plugins.kv_pools().values()
        if (capabilities := _capabilities(plugins, offer, KVPool, PoolCapabilities)) is not None
    }
    unusable = [d for d in detection.devices if d.problems] if detection else []
    return Candidates(
        backends=backends,
        allocators=allocators,
        pools=pools,
        problems=(
            *(f"{device} cannot be used here: {'; '.join(device.problems)}" for device in unusable),
            *plugins.problems,
            *misspelled_variables(os.environ),
        ),
        kept_out=tuple(record.name for record in plugins.records if record.state == "not allowed"),
    )


def _capabilities(plugins: PluginManager, offer: Offer, base: type[Any], declared: type[Any]) -> Any | None:
    """What the offered class declares; None, and a problem, when it cannot be loaded or is not what the hook promises.

    base: what the class must derive from. declared: of what type its `capabilities` must be.
    """
    loaded = plugins.load(offer)
    if loaded is None:
        return None
    try:
        misfit = contained(_misfit, loaded, base, declared)
    except Exception as error:
        misfit = f"cannot be read: {describe(error)}"
    if misfit is not None:
        plugins.report(f"{offer.name!r} of {offer.owner}: {offer.target} {misfit}.", plugin=offer.plugin)
        return None
    return loaded.capabilities


def _misfit(loaded: Any, base: type[Any], declared: type[Any]) -> str | None:
    """What is wrong with an offered class; None where nothing is."""
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        return f"is no subclass of {base.__name__}"
    if missing := missing_methods(loaded):
        return f"lacks {', '.join(missing)} of {base.__name__}: implement {'it' if len(missing) == 1 else 'them'}"
    if wrong := wrong_signatures(loaded, base):
        return f"has methods that do not fit {base.__name__}: {'; '.join(wrong)}"
    capabilities = getattr(loaded, "capabilities", None)
    if not isinstance(capabilities, declared):
        return f"has no capabilities of type {declared.__name__}: set capabilities = {declared.__name__}(...) in it"
    try:
        json.dumps(capabilities.to_json(), allow_nan=False)
    except Exception as error:
        return (
            f"has capabilities without a JSON form ({describe(error)}): their fields hold numbers, texts, tuples and "
            "frozensets of them, and IntSets"
        )
    return None
