"""Whether a device still computes: after a kernel that went wrong, every later one may fail with the same error."""

from __future__ import annotations

from anyattn.platforms.base import Platform


def answers(device: Platform | None) -> bool:
    """Waits for all that was launched, and computes something; True where there is nothing that could be lost."""
    if device is None or device.torch_device == "cpu":
        return True
    import torch

    try:
        return float((torch.ones(1, device=device.torch_device) + 1).cpu()) == 2.0
    except Exception:
        return False
