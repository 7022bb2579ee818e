"""What is run of a target: on which device, which checks, and what cannot be run here and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.discovery import Detection, detect, find_device, require_usable
from anyattn.errors import NoDeviceError, contained
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.platforms.base import Platform
from anyattn.plugins.isolation import describe
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.requirements import missing_packages, missing_programs
from anyattn.testing import suite
from anyattn.testing.check import TIERS, Check, Tier
from anyattn.testing.target import Target, TargetKind
from anyattn.types import Reason

_ON_A_DEVICE: dict[TargetKind, tuple[Tier, ...]] = {
    "backend": ("numerics", "memory", "graph", "determinism"),
    "allocator": ("memory",),
    "pool": ("memory",),
    "platform": (),
    "simulated device": (),
}
"""The tiers beside "contract" that a target of a kind has."""

_DECLARATIONS: dict[TargetKind, type] = {
    "backend": Capabilities,
    "allocator": AllocatorCapabilities,
    "pool": PoolCapabilities,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """Tiers of which checks were asked for and did not run; none of them where what is not declared was not tried."""

    tiers: tuple[Tier, ...]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(self.tiers) or 'what is not declared'} did not run: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {"tiers": list(self.tiers), "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """checks: those to run. known: ids of all checks of the target, also of those that were not asked for.

    unmade: tiers whose checks are not, or not all, among the known ones, because there is no device to make them for.
    """

    target: Target
    device: Platform | None
    checks: tuple[Check, ...]
    known: tuple[str, ...]
    unmade: tuple[Tier, ...] = ()
    not_run: tuple[NotRun, ...] = ()


class Devices:
    """Where targets can run. wanted: a device kind or torch device; None for the first that a target can run on."""

    def __init__(self, plugins: PluginManager, wanted: str | None) -> None:
        self.wanted = wanted
        self._plugins = plugins
        self._detection: Detection | None = None

    def require(self) -> None:
        """Raises NoDeviceError where the device that is wanted is not here or cannot be used."""
        if self.wanted is not None:
            self._wanted_device(self.wanted)

    def choose(self, target: Target) -> tuple[Platform | None, str]:
        """The device, or None and what speaks against all of them."""
        devices = self._found().devices if self.wanted is None else (self._wanted_device(self.wanted),)
        try:
            find_device(self._plugins, None, self._found())
        except NoDeviceError as error:
            return None, str(error)
        against = []
        for device in devices:
            reasons = reasons_against(target, device)
            if not reasons and not device.problems:
                return device, ""
            if reasons:
                against.append(f"it does not run on {device}: {'; '.join(reasons)}")
            else:
                against.append(f"{device} cannot be used here: {'; '.join(device.problems)}")
        return None, ". ".join(against)

    def _wanted_device(self, wanted: str) -> Platform:
        return require_usable(find_device(self._plugins, wanted, self._found()))

    def _found(self) -> Detection:
        if self._detection is None:
            self._detection = detect(self._plugins)
        return self._detection


def reasons_against(target: Target, device: Platform) -> list[str]:
    """Why the target cannot run on the device, from its declaration; empty where it can."""
    declared = getattr(target.loaded, "capabilities", None)
    wanted = _DECLARATIONS[target.kind]
    if not isinstance(declared, wanted):
        needed = f"{wanted.__module__}.{wanted.__name__}"
        return [f"it declares no capabilities: set its class attribute capabilities = {needed}(...)"]
    reasons: Iterable[Reason]
    try:
        if isinstance(declared, Capabilities):
            reasons = [
                *declared.device_reasons(device),
                *missing_packages(declared.packages, declared.extra),
                *missing_programs(declared.programs),
            ]
        elif isinstance(declared, AllocatorCapabilities):
            reasons = declared.reject_reasons(device.kind)
        else:
            assert isinstance(declared, PoolCapabilities)
            reasons = declared.reject_reasons(
                device.kind, arch=device.arch, kind=declared.kind, kv_dtype=min(declared.kv_dtypes)
            )
    except Exception as error:  # a requirement string that is none
        return [f"its declaration cannot be read: {describe(error)}"]
    return [str(_with_remedy(reason, device)) for reason in reasons]


def _with_remedy(reason: Reason, device: Platform) -> Reason:
    """A remedy that was left open is that of the torch which such a device needs."""
    return replace(reason, remedy=reason.remedy or device.torch_remedy or f'pip install "{reason.wanted}"')


def prepare(
    target: Target, devices: Devices, *, tiers: Sequence[Tier] = (), only: str = "", probe: bool = False
) -> Verification:
    """Makes the target's checks, for a device where one is needed and there is one.

    tiers: those asked for; none for all. only: a text that the ids of the checks to run must hold, in whatever case.
    probe: whether a backend needs a device in any case, as what it does not declare will be tried.
    """
    on_a_device = _ON_A_DEVICE[target.kind]
    asked = [tier for tier in ("contract", *on_a_device) if not tiers or tier in tiers]
    device, reason = None, ""
    if set(asked) & set(on_a_device) or (probe and target.kind == "backend"):
        device, reason = devices.choose(target)
    made, broken = _made(target, device)
    unmade: tuple[Tier, ...] = on_a_device if device is None else ()
    not_run = []
    if reason:
        not_run.append(NotRun(tiers=tuple(tier for tier in asked if tier in on_a_device), reason=reason))
    if broken is not None:
        reached = TIERS.index(made[-1].tier) if made else 0
        unmade = TIERS[reached:]
        where = f"after {made[-1].id}" if made else "at the first one"
        text = f"making the checks failed {where}: {describe(broken)}"
        if lost := tuple(tier for tier in asked if tier in unmade):
            not_run.append(NotRun(tiers=lost, reason=text))
    return Verification(
        target=target,
        device=device,
        checks=tuple(check for check in made if check.tier in asked and only.lower() in check.id.lower()),
        known=tuple(check.id for check in made),
        unmade=unmade,
        not_run=tuple(not_run),
    )


def _made(target: Target, device: Platform | None) -> tuple[list[Check], Exception | None]:
    """All checks, or those before a declaration that no more can be derived from, and its error."""
    made: list[Check] = []
    checks = suite.checks_for(target, device)
    try:
        while (check := contained(next, checks, None)) is not None:
            made.append(check)
    except Exception as error:
        return made, error
    return made, None
