"""Which of a machine's Intel GPUs torch numbers, and how: Level Zero's rules, then SYCL's, then torch's.

Level Zero: the specification's Core Programming Guide, "Environment Variables"; what it leaves to the driver is as
Intel's does it (compute-runtime, execution_environment.cpp). SYCL: DPC++'s EnvironmentVariables.md,
ONEAPI_DEVICE_SELECTOR; the order is as its runtime does it (platform_impl.cpp). All on Linux, where one driver has all
GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_BACKENDS = frozenset({"*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "offload"})
_TYPES = frozenset({"gpu", "cpu", "fpga", "acc"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU that Level Zero can open, supported by torch or not."""

    handle: object
    address: str
    """On the PCI bus: "0000:18:00.0"."""
    is_discrete: bool
    num_tiles: int = 1
    is_flat: bool = False
    """Whether its tiles are devices unless ZE_FLAT_DEVICE_HIERARCHY says otherwise: so for Data Center GPU Max."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a program sees as one device: a card with some or all of its tiles."""

    card: Card
    tiles: tuple[int, ...]


def visible_units(cards: Sequence[Card], environment: Mapping[str, str]) -> tuple[list[Unit], list[str]]:
    """The devices in torch's order under these environment variables, and any complaints about them."""
    units, complaints = _level_zero(cards, environment)
    selector = environment.get("ONEAPI_DEVICE_SELECTOR", "")
    if selector:
        units, complaint = _selected(units, selector)
        complaints += complaint
    # From 2.7 on torch takes integrated GPUs only where there is no other (pytorch/pytorch, pull request 144378).
    return [unit for unit in units if unit.card.is_discrete] or units, complaints


def _level_zero(cards: Sequence[Card], environment: Mapping[str, str]) -> tuple[list[Unit], list[str]]:
    """What zeDeviceGet gives. The mask chooses, and does not order."""
    by_bus = environment.get("ZE_ENABLE_PCI_ID_DEVICE_ORDER") == "1"
    cards = sorted(cards, key=lambda card: (not by_bus and not card.is_discrete, card.address))
    hierarchy = environment.get("ZE_FLAT_DEVICE_HIERARCHY")
    if hierarchy not in ("FLAT", "COMBINED", "COMPOSITE"):
        hierarchy = "FLAT" if cards and cards[0].is_flat else "COMPOSITE"
    every = [Unit(card=card, tiles=tuple(range(card.num_tiles))) for card in cards]
    if hierarchy != "COMPOSITE":
        every = [replace(unit, tiles=(tile,)) for unit in every for tile in unit.tiles]
    mask = environment.get("ZE_AFFINITY_MASK", "")
    if mask in ("", "default"):
        return every, []
    chosen: dict[int, set[int]] = {}
    complaints = []
    for entry in mask.split(","):
        number, dot, tile = entry.strip().partition(".")
        unit = every[int(number)] if _is_index(number) and int(number) < len(every) else None
        if unit is not None and not dot:
            chosen.setdefault(int(number), set()).update(unit.tiles)
        elif unit is not None and hierarchy == "COMPOSITE" and _is_index(tile) and int(tile) in unit.tiles:
            chosen.setdefault(int(number), set()).add(int(tile))
        elif number != "-1":  # a usual way of saying "none"
            complaints.append(f'ZE_AFFINITY_MASK="{mask}": no device "{entry.strip()}" ({hierarchy} device hierarchy)')
    return [replace(every[number], tiles=tuple(sorted(chosen[number]))) for number in sorted(chosen)], complaints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """One device of a selector: "gpu", "1", "1.0" or "*.*"."""

    device: str
    tile: str | None
    is_discard: bool

    def matches(self, number: int) -> bool:
        return self.device in ("*", "gpu", str(number))


def _selected(units: Sequence[Unit], selector: str) -> tuple[list[Unit], list[str]]:
    """What ONEAPI_DEVICE_SELECTOR leaves of Level Zero's devices, whose numbers are their positions."""
    try:
        terms = _terms(selector)
    except ValueError as error:
        return [], [f'ONEAPI_DEVICE_SELECTOR="{selector}" cannot be read ({error}), so SYCL shows no device']
    discards = [term for term in terms if term.is_discard]
    accepts = [term for term in terms if not term.is_discard]
    if all(part.startswith("!") for part in selector.split(";") if part):  # then all others are accepted
        accepts = [_Term(device="*", tile=None, is_discard=False)]
    selected: list[Unit] = []
    for number, unit in enumerate(units):
        against = [term.tile for term in discards if term.matches(number)]
        if None in against:
            continue
        is_added = False
        for term in accepts:
            if not term.matches(number):
                continue
            if term.tile is None:
                selected += [] if is_added else [unit]
                is_added = True
            elif len(unit.tiles) > 1:  # a device without sub-devices has none to give
                for position, tile in enumerate(unit.tiles):
                    if term.tile in ("*", str(position)) and not {"*", str(position)} & set(against):
                        selected.append(replace(unit, tiles=(tile,)))
    nothing = f'ONEAPI_DEVICE_SELECTOR="{selector}" leaves no Intel GPU of Level Zero, which is what torch uses'
    return selected, [nothing] if units and not selected else []


def _terms(selector: str) -> list[_Term]:
    """The terms that are about Level Zero. Raises ValueError where SYCL would refuse the selector."""
    terms = []
    was_discard = False
    for part in filter(None, selector.lower().split(";")):
        backend, colon, devices = part.removeprefix("!").partition(":")
        is_discard = part.startswith("!")
        if backend not in _BACKENDS or not colon or not devices or ":" in devices:
            raise ValueError(f'"{part}" is not of the form backend:devices')
        if was_discard and not is_discard:
            raise ValueError("what is discarded must come last")
        was_discard = is_discard
        for device in filter(None, devices.split(",")):
            match = re.fullmatch(r"([a-z]+)|(\*|[0-9]+)(?:\.(\*|[0-9]+))?(\.(?:\*|[0-9]+))?", device)
            if match is None or (match[1] or "gpu") not in _TYPES or re.match(r"\*\.[0-9]", device):
                raise ValueError(f'"{device}" is no device')
            if match[4]:
                raise ValueError(f'"{device}" asks for parts of a tile, which anyattn does not know')
            if backend in ("*", "level_zero"):
                name = match[1] or match[2].lstrip("0") or "0"
                terms.append(_Term(device=name, tile=match[3], is_discard=is_discard))
    return terms


def _is_index(text: str) -> bool:
    """Whether it is a number that could be one of a device: Python reads no longer ones than 4300 digits."""
    return text.isascii() and text.isdecimal() and len(text) < 10
