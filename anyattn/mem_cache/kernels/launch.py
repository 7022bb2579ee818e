"""Launches of Triton kernels: on the tensors' device, and without Triton's own lookup of the compiled variant."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

_NOTHING: AbstractContextManager[None] = nullcontext()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device current where it is not: Triton launches on the current one, whatever the tensors say."""
    if device.type == "cpu" or device.index is None or device.index == torch.accelerator.current_device_index():
        return _NOTHING
    return torch.accelerator.device_index(device.index)


class BoundKernel:
    """A kernel whose variants its caller can tell apart by a key.

    Triton finds the variant by looking at every argument, which takes longer than the launch itself. Arguments that
    are exempt from specialisation never change the variant, so what is left is known to the caller: constants, dtypes,
    which arguments are None, and the device.
    """

    __slots__ = ("_compiled", "_kernel")

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
        """Launches on the current device and stream.

        arguments: all of the kernel's, constants included, in order. options: what the compiler takes besides.
        """
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        compiled = self._kernel[grid](*arguments, **options)
        if compiled is not None:  # None where the kernel is interpreted
            self._compiled[key] = compiled
