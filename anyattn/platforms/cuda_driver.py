"""NVIDIA devices as the CUDA driver itself tells them; `python -m anyattn.platforms.cuda_driver` shows it.

The driver must be started (cuInit) before it answers, and a process that has started it cannot fork and go on with CUDA
in the child. So `ask` has another process do it, which ends at once. The driver applies CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER itself, which makes its numbers true by definition. Standard library only: the child runs this file
alone. Functions and numbers: cuda.h, described in NVIDIA's "CUDA Driver API".
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import uuid
from typing import Any

NO_DEVICE = 100
_RESULTS = {
    34: ("STUB_LIBRARY", "the toolkit's stub is loaded; take its folder out of LD_LIBRARY_PATH"),
    NO_DEVICE: (
        "NO_DEVICE",
        "no device can be used; see CUDA_VISIBLE_DEVICES, and whether a container has /dev/nvidia0 or the like",
    ),
    802: (
        "SYSTEM_NOT_READY",
        "the system is not ready; where GPUs are joined by NVSwitch, start `systemctl start nvidia-fabricmanager`",
    ),
    803: (
        "SYSTEM_DRIVER_MISMATCH",
        "the driver's library and its kernel module are of different versions; reboot after an update of the driver, "
        "and start containers anew",
    ),
    804: (
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "a CUDA compatibility package is in use that this GPU does not support; take its folder (.../compat) out of "
        "LD_LIBRARY_PATH, or update the driver",
    ),
    999: ("UNKNOWN", "the driver gives no reason; see `dmesg`, run `nvidia-modprobe -u`, or reboot"),
}
"""CUresult, without CUDA_ERROR_: what cuInit usually fails with, and what to do about it."""

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS = 75, 76, 16
"""CUdevice_attribute."""

_TIMEOUT_SECONDS = 8
"""Without persistence mode the driver wakes the GPUs one by one, which takes a second or more for each."""


class DriverError(Exception):
    """A function of the driver that did not return CUDA_SUCCESS."""

    def __init__(self, code: int) -> None:
        name, remedy = _RESULTS.get(code, ("", ""))
        super().__init__(f"CUDA_ERROR_{name} ({code}): {remedy}" if name else f"CUresult {code}")
        self.code = code


def ask() -> dict[str, Any]:
    """What `read` tells in a process of its own: `devices` and `cuda_version`, or else `error` in words. Never raises.

    error goes on where "the CUDA driver" begins. code is the CUresult, where the driver gave one.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself again
        return {"error": "was not asked, as this program has no Python interpreter to run"}
    # -I and -S: nothing of the user's, of this folder or of the site's packages can get in the way of a plain answer.
    command = [sys.executable, "-I", "-S", __file__]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not answer within {_TIMEOUT_SECONDS} seconds; see whether `nvidia-smi` hangs too"}
    except (OSError, ValueError) as error:
        return {"error": f"could not be asked: {error}"}
    try:
        answer = json.loads(child.stdout.splitlines()[-1])  # the last line: libraries may print before it
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict) or not ("error" in answer or "devices" in answer):
        last_words = (child.stderr.strip().splitlines() or ["no error text"])[-1]
        return {"error": f"could not be asked: the process ended with {child.returncode} ({last_words})"}
    return answer


def read(library: Any) -> dict[str, Any]:
    """The devices that the driver shows, in CUDA's order; starts the driver.

    library: libcuda.so.1 or nvcuda.dll as ctypes loads it.
    Returns JSON values: cuda_version [major, minor], the newest CUDA that the driver knows; devices, each with fields
    of Platform, or with an error. Raises DriverError when the driver does not start.
    """
    _check(library.cuInit(0))
    version = _value(library.cuDriverGetVersion, ctypes.c_int())  # 1000 * major + 10 * minor
    devices: list[dict[str, Any]] = []
    for index in range(_value(library.cuDeviceGetCount, ctypes.c_int())):
        try:
            devices.append(_device(library, index))
        except DriverError as error:
            devices.append({"error": str(error)})
    return {"cuda_version": [version // 1000, version % 1000 // 10], "devices": devices}


def _device(library: Any, index: int) -> dict[str, Any]:
    device = _value(library.cuDeviceGet, ctypes.c_int(), index)
    major, minor, multiprocessors = (
        _value(library.cuDeviceGetAttribute, ctypes.c_int(), attribute, device)
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS)
    )
    name = _text(library.cuDeviceGetName, 256, device)
    return {
        "name": name,
        "uuid": _uuid(library, device, is_slice=" MIG " in name),
        "compute_capability": [major, minor],
        "num_cores": multiprocessors,
        "memory_total_bytes": _value(library.cuDeviceTotalMem_v2, ctypes.c_size_t(), device),
    }


def _uuid(library: Any, device: int, *, is_slice: bool) -> str | None:
    """As NVML writes it. The driver gives sixteen bytes; a MIG slice shows in its name ("... MIG 1g.10gb") only."""
    function = getattr(library, "cuDeviceGetUuid_v2", None)  # new in CUDA 11.4: a slice has its own
    if function is None:
        return None
    number = (ctypes.c_ubyte * 16)()
    _check(function(ctypes.byref(number), device))
    return f"{'MIG' if is_slice else 'GPU'}-{uuid.UUID(bytes=bytes(number))}"


def _value(function: Any, place: Any, *arguments: int) -> int:
    _check(function(ctypes.byref(place), *arguments))
    return int(place.value)


def _text(function: Any, size: int, device: int) -> str:
    buffer = ctypes.create_string_buffer(size)
    _check(function(buffer, size, device))
    return buffer.value.decode(errors="replace")


def _check(code: int) -> None:
    if code:
        raise DriverError(code)


def _answer() -> dict[str, Any]:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return {"error": f"cannot be loaded: {error}"}
    try:
        return read(library)
    except DriverError as error:
        return {"error": f"does not start: {error}", "code": error.code}


if __name__ == "__main__":
    print(json.dumps(_answer()))
