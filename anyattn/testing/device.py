"""What checks ask of a device: whether it still computes, and how much of its memory is free."""

from __future__ import annotations

from anyattn.platforms.base import Platform


def answers(device: Platform | None) -> bool:
    """Whether it computes: after a kernel that went wrong, every later one may fail with the same error.

    Waits for all that was launched, and computes something; True where there is nothing that could be lost."""
    if device is None or device.torch_device == "cpu":
        return True
    import torch

    try:
        return float((torch.ones(1, device=device.torch_device) + 1).cpu()) == 2.0
    except Exception:
        return False


def free_bytes(device: Platform) -> int | None:
    """Memory that is free there now; None where nobody can tell. Of a CPU, what a container may still take."""
    import torch

    place = torch.device(device.torch_device)
    if place.type != "cpu":
        module = torch.get_device_module(place)
        return int(module.mem_get_info(place)[0]) if hasattr(module, "mem_get_info") else None
    import psutil

    available = int(psutil.virtual_memory().available)
    return available if device.memory_free_bytes is None else min(available, device.memory_free_bytes)
