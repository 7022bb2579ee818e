"""What the room does on a device: for each topic Triton kernels, the same in vectorised torch, and who picks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_runs_on: dict[str, bool] = {}


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton kernels can be launched on tensors of this device: its own driver says so, or it interprets.

    Found out once for each type of device, as Triton too reads TRITON_INTERPRET just once: kernels are launched often.
    """
    runs = _runs_on.get(device.type)
    if runs is None:
        interprets = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        runs = _runs_on[device.type] = interprets or (device.type != "cpu" and _driver_serves(device.type))
    return runs


def _driver_serves(device_type: str) -> bool:
    try:
        from triton.runtime import driver

        serves: bool = driver.active.get_active_torch_device().type == device_type
    except Exception:  # no triton, no driver for it, or one that cannot be loaded: torch then does the work
        return False
    return serves
