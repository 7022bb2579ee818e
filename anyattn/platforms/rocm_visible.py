"""Which of a machine's AMD GPUs this process sees: those that its container leaves it, under the three variables."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyattn.platforms import host

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"
"""One numbered folder for each CPU and each GPU, or compute partition of a GPU (libhsakmt, topology.c)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A CPU or a GPU that is open to this process."""

    folder: str
    number: int
    """Position among the open nodes, which is the runtime's number of it."""
    facts: dict[str, int]

    @property
    def uuid(self) -> str | None:
        unique_id = self.facts.get("unique_id")  # 0 where the GPU has none
        return f"GPU-{unique_id:016x}" if unique_id else None

    @property
    def render_device(self) -> str:
        return f"dev/dri/renderD{self.facts.get('drm_render_minor', 0)}"


def open_nodes() -> tuple[list[Node], int]:
    """The nodes open to this process, in the runtime's order, and how many GPUs a container hides from it.

    A GPU is hidden where its properties must not be read, or where its render device is not there; the runtime then
    numbers the others without it (libhsakmt, `topology_sysfs_check_node_supported`).
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [folder.name for folder in (host.ROOT / TOPOLOGY).iterdir() if folder.name.isdecimal()]
    nodes: list[Node] = []
    for name in sorted(names, key=int):
        properties = host.read(f"{TOPOLOGY}/{name}/properties")
        node = Node(folder=f"{TOPOLOGY}/{name}", number=len(nodes), facts=numbers(properties or ""))
        if properties is not None and (not node.facts.get("simd_count") or host.exists(node.render_device)):
            nodes.append(node)
    return nodes, len(names) - len(nodes)


def numbers(text: str) -> dict[str, int]:
    """What lines of a name and a number say; other lines are passed over."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and re.fullmatch("[0-9]{1,20}", pair[1])}


def visible_gpus(uuids: Sequence[str | None], environment: Mapping[str, str]) -> tuple[list[int], list[str]]:
    """Positions in `uuids` of the GPUs that HIP shows under these variables, in HIP's order, and any complaint.

    uuids: of the open GPUs, "GPU-" and 16 small hexadecimal digits; None for a GPU without one.

    Two filters, one after the other: the ROC runtime (ROCr) applies ROCR_VISIBLE_DEVICES, and HIP numbers what is left
    anew. AMD's page "GPU isolation techniques" says the same of GPU_DEVICE_ORDINAL, but HIP does not read it.
    """
    left, complaints = _left_by_rocr(uuids, environment.get("ROCR_VISIBLE_DEVICES"))
    variable, setting = _hip_setting(environment)
    if not setting:
        return left, complaints
    shown: list[int] = []
    # Rules: Device::init in rocclr/device/rocm/rocdevice.cpp of ROCm/clr.
    for entry in _entries(setting):
        position = _hip_position(entry, [uuids[index] for index in left])
        if position is None:  # ends the list; what came before stays
            if entry.strip() not in ("", "-1"):
                counted = f" of the {len(left)} that ROCR_VISIBLE_DEVICES leaves" if len(left) < len(uuids) else ""
                complaints.append(f'{variable}="{setting}": no device "{entry}"{counted}, so the list ends before it')
            break
        if left[position] not in shown:  # a repeat is skipped
            shown.append(left[position])
    return shown, complaints


def _left_by_rocr(uuids: Sequence[str | None], setting: str | None) -> tuple[list[int], list[str]]:
    """Rules: RvdFilter in core/inc/amd_filter_device.h and core/runtime/amd_filter_device.cpp of ROCR-Runtime."""
    if setting is None:
        return list(range(len(uuids))), []
    left: list[int] = []
    for entry in _entries(setting):
        token = entry.strip().upper()
        if not token and len(left) < len(uuids):  # ROCr asks for its first character, which throws
            text = f'ROCR_VISIBLE_DEVICES="{setting}" has an empty entry, with which the ROC runtime does not start'
            return [], [text]
        position = _rocr_position(token, uuids)
        if position is None or position in left:  # ends the list; what came before stays
            if token in ("", "-1", "GPU-XX"):  # the usual ways of saying "none", or "no more"
                return left, []
            why = f'no device "{entry}"' if position is None else f'"{entry}" again'
            return left, [f'ROCR_VISIBLE_DEVICES="{setting}": {why}, so the list ends before it']
        left.append(position)
    return left, []


def _entries(setting: str) -> list[str]:
    return setting.removesuffix(",").split(",") if setting else []  # a comma at the end begins no entry


def _rocr_position(token: str, uuids: Sequence[str | None]) -> int | None:
    if token.startswith("G"):  # the beginning of a UUID; more than one match is none
        matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.upper().startswith(token)]
        return matches[0] if len(matches) == 1 and len(token) > len("GPU-") else None
    number = re.fullmatch(r"([+-]?)(?:0X([0-9A-F]+)|(0[0-7]*)|([1-9][0-9]{0,8}))", token)  # C's strtol with base 0
    if number is None:
        return None
    sign, hexadecimal, octal, decimal = number.groups()
    index = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    return index if index < len(uuids) and (sign != "-" or index == 0) else None


def _hip_setting(environment: Mapping[str, str]) -> tuple[str, str]:
    """The variable that HIP heeds and its value, "" for no filter (Flag::init in rocclr/utils/flags.cpp of ROCm/clr).

    A variable that is set to nothing reads as a blank, which names no device; quotes around a value are dropped.
    """
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environment:
            value = environment[variable] or " "
            quoted = re.fullmatch(r' *"(.*)" *', value, re.DOTALL)
            setting = quoted.group(1) if quoted else value
            if setting:
                return variable, setting
    return "", ""


def _hip_position(entry: str, uuids: Sequence[str | None]) -> int | None:
    if "GPU-" in entry:  # any part of a UUID, in small letters; the first match counts
        return next((i for i, uuid in enumerate(uuids) if entry in (uuid or "GPU-XX")), None)
    is_index = re.fullmatch(r"0|[1-9][0-9]{0,8}", entry) is not None and int(entry) < len(uuids)
    return int(entry) if is_index else None
