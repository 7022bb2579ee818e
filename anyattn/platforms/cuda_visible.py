"""What CUDA_VISIBLE_DEVICES shows of a machine's NVIDIA devices, by the driver's rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

UUID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What CUDA can number: a whole GPU, or one MIG slice (a compute instance) of a partitioned one."""

    handle: object
    gpu: object
    """NVML's handle of the physical GPU; the same as `handle` for a whole one."""
    model: str
    """Name of the physical GPU."""
    names: tuple[str, ...]
    """What CUDA_VISIBLE_DEVICES may call it; the UUID comes first."""
    is_slice: bool = False
    is_numbered: bool = True
    """Whether an index may mean it: of one GPU's slices, only the first has an index."""


def visible_units(units: Sequence[Unit], setting: str | None) -> tuple[list[Unit], list[str]]:
    """The units that CUDA shows under CUDA_VISIBLE_DEVICES=`setting` (None: not set), in order, and any complaint.

    Rules: CUDA Programming Guide, "CUDA Environment Variables", and MIG User Guide, "CUDA Device Enumeration". What
    they leave open (repeats, mixed lists, spaces, case) is as the driver 580 does it.
    """
    numbered = [unit for unit in units if unit.is_numbered]
    chosen: list[Unit] = []
    complaint: list[str] = []
    # The first entry says whether the list holds indices, GPU UUIDs or MIG UUIDs; an entry of another sort ends it.
    prefix = next((prefix for prefix in UUID_PREFIXES if setting and setting.startswith(prefix)), None)
    for entry in [] if setting is None else setting.split(","):
        unit = _indexed(entry, numbered) if prefix is None else _named(entry, prefix, units)
        if unit is None:  # ends the list; what came before stays
            if entry.strip() not in ("", "-1", "NoDevFiles"):  # the usual ways of saying "none", or "no more"
                complaint = [f'CUDA_VISIBLE_DEVICES="{setting}": no device "{entry}", so the list ends before it']
            break
        if unit in chosen:
            return [], [f'CUDA_VISIBLE_DEVICES="{setting}" names a device twice, so CUDA shows none']
        chosen.append(unit)
    shown = numbered if setting is None else chosen
    # A process sees one slice only, and beside it no other device.
    return [unit for unit in shown if unit.is_slice][:1] or shown, complaint


def _indexed(entry: str, numbered: Sequence[Unit]) -> Unit | None:
    digits = re.match(r"\s*([+-]?[0-9]{1,9})(?![0-9])", entry)  # read as C's strtol reads: "1gpu" is 1, and " -0" is 0
    index = int(digits.group(1)) if digits else -1
    return numbered[index] if 0 <= index < len(numbered) else None


def _named(entry: str, prefix: str, units: Sequence[Unit]) -> Unit | None:
    """The only unit with a name that starts with `entry`; case and dashes after the prefix do not matter."""

    def plain(name: str) -> str:
        return name[len(prefix) :].replace("-", "").lower()

    if not entry.startswith(prefix):
        return None
    wanted = plain(entry.rstrip())
    matches = [
        unit for unit in units if any(name.startswith(prefix) and plain(name).startswith(wanted) for name in unit.names)
    ]
    return matches[0] if len(matches) == 1 else None
