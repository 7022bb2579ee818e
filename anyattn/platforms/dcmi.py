"""Huawei's DCMI through ctypes, as far as a probe needs it: the driver's own management library, as npu-smi uses it.

Signatures, layouts and units: hicann/driver (src/custom/include/dcmi_interface_api.h, src/custom/dev_prod/user/dcmi)
and Ascend/mind-cluster (component/ascend-common/devmanager/dcmi). Starting DCMI reads what the driver knows of the
boards and opens no compute context; it cannot be shut down. It lists the NPUs of this container only, and it does not
look at ASCEND_RT_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

from anyattn.platforms import host

_LIBRARIES = ("usr/local/dcmi/libdcmi.so", "usr/local/Ascend/driver/lib64/driver/libdcmi.so")
"""Where the driver's package puts it; the loader's own search path comes last."""

_MAXIMUM_CARDS = 64
_VERSION_BYTES = 64
_MIB = 1 << 20

Place = tuple[int, ...]
"""How DCMI finds an NPU: (card, chip on the card), or (logic id,) in the interface of the Ascend 950."""


class DcmiError(Exception):
    """DCMI did not give an answer; the text names the function."""


class _ChipInfo(ctypes.Structure):
    """struct dcmi_chip_info_v2; the first four fields are struct dcmi_chip_info."""

    _fields_ = [
        ("chip_type", ctypes.c_char * 32),
        ("chip_name", ctypes.c_char * 32),
        ("chip_ver", ctypes.c_char * 32),
        ("aicore_cnt", ctypes.c_uint),
        ("npu_name", ctypes.c_char * 32),
    ]


class _HbmInfo(ctypes.Structure):
    """struct dcmi_hbm_info; size and usage in MiB."""

    _fields_ = [
        ("memory_size", ctypes.c_ulonglong),
        ("freq", ctypes.c_uint),
        ("memory_usage", ctypes.c_ulonglong),
        ("temp", ctypes.c_int),
        ("bandwith_util_rate", ctypes.c_uint),
    ]


class _MemoryInfo(ctypes.Structure):
    """struct dcmi_get_memory_info_stru; size and available in MiB."""

    _fields_ = [
        ("memory_size", ctypes.c_ulonglong),
        ("memory_available", ctypes.c_ulonglong),
        ("freq", ctypes.c_uint),
        ("hugepagesize", ctypes.c_ulong),
        ("hugepages_total", ctypes.c_ulong),
        ("hugepages_free", ctypes.c_ulong),
        ("utiliza", ctypes.c_uint),
        ("reserve", ctypes.c_ubyte * 60),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What DCMI knows of one NPU."""

    chip_type: str
    """ "Ascend", or the maker's other brand."""
    chip_name: str
    """ "910B3", "310P3"; "Ascend910" for every A3."""
    npu_name: str
    """What follows the underscore in the SoC's name: "9392" of Ascend910_9392; empty from a driver that has it not."""
    num_cores: int | None
    """AI cores."""
    memory_total_bytes: int | None
    memory_free_bytes: int | None


class Dcmi:
    """The library, loaded and started. Raises OSError where it cannot be loaded, DcmiError where it does not start."""

    def __init__(self) -> None:
        self._library = _load()
        self._prefix = "dcmi"
        try:
            self._call("init")
        except DcmiError as reason:
            self._prefix = "dcmiv2"  # an Ascend 950 answers to this interface only, every other NPU to the first only
            try:
                self._call("init")
            except DcmiError:
                raise reason from None

    def driver_version(self) -> str | None:
        version = ctypes.create_string_buffer(_VERSION_BYTES)
        try:
            self._call("get_driver_version", version, ctypes.c_uint(_VERSION_BYTES))
        except DcmiError:
            return None
        return _text(version.value) or None

    def places(self) -> tuple[list[Place], list[str]]:
        """The NPUs by logic id, which is how CANN numbers them, and what went wrong with a card or a chip of it."""
        numbers, count = (ctypes.c_int * _MAXIMUM_CARDS)(), ctypes.c_int()
        if self._prefix == "dcmiv2":
            self._call("get_device_list", numbers, ctypes.byref(count), _MAXIMUM_CARDS)
            return [(logic_id,) for logic_id in sorted(numbers[: count.value])], []
        self._call("get_card_list", ctypes.byref(count), numbers, _MAXIMUM_CARDS)
        found: list[tuple[int, Place]] = []
        problems: list[str] = []
        for card in numbers[: count.value]:
            try:
                num_chips, others = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())  # others: a card's MCU and CPU
                self._call("get_device_id_in_card", card, *(ctypes.byref(number) for number in (num_chips, *others)))
                for chip in range(num_chips.value):
                    logic_id = ctypes.c_int()
                    self._call("get_device_logic_id", ctypes.byref(logic_id), card, chip)
                    found.append((logic_id.value, (card, chip)))
            except DcmiError as error:
                problems.append(f"NPU card {card} does not answer and what is left of it takes no number: {error}")
        return [place for _, place in sorted(found)], problems

    def chip(self, place: Place) -> Chip:
        """Raises DcmiError where the NPU does not tell what it is; a memory size that it does not tell is None."""
        info = _ChipInfo()
        try:
            self._call("get_device_chip_info" + ("_v2" if self._prefix == "dcmi" else ""), *place, ctypes.byref(info))
        except DcmiError:  # a driver from before the second version, which only adds npu_name
            self._call("get_device_chip_info", *place, ctypes.byref(info))
        total, free = self._memory_mib(place)
        return Chip(
            chip_type=_text(info.chip_type),
            chip_name=_text(info.chip_name),
            npu_name=_text(info.npu_name),
            num_cores=info.aicore_cnt or None,  # not told for the 310B
            memory_total_bytes=total * _MIB if total else None,
            memory_free_bytes=free * _MIB if total else None,
        )

    def _memory_mib(self, place: Place) -> tuple[int, int]:
        """Size and what is free of it; (0, 0) when not told. The 310 and the 310P have no HBM, the others no DDR."""
        with contextlib.suppress(DcmiError):
            hbm = _HbmInfo()
            self._call("get_device_hbm_info", *place, ctypes.byref(hbm))
            if hbm.memory_size:
                return hbm.memory_size, max(0, hbm.memory_size - hbm.memory_usage)
        with contextlib.suppress(DcmiError):
            ddr = _MemoryInfo()
            self._call("get_device_memory_info_v3", *place, ctypes.byref(ddr))
            return ddr.memory_size, ddr.memory_available
        return 0, 0

    def _call(self, function: str, *arguments: Any) -> None:
        name = f"{self._prefix}_{function}"
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise DcmiError(f"{name} is not in this driver") from None
        if code != 0:
            raise DcmiError(f"{name} returned {code}")


def _load() -> ctypes.CDLL:
    files = [str(host.ROOT / file) for file in _LIBRARIES if host.exists(file)]
    reason: OSError | None = None
    for file in [*files, "libdcmi.so"]:
        try:
            return ctypes.CDLL(file)
        except OSError as error:
            reason = reason or error  # what is wrong with the first file that is there says most
    raise reason or OSError("libdcmi.so was not found")


def _text(value: bytes) -> str:
    return value.decode(errors="replace").strip()
