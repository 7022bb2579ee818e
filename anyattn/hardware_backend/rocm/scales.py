"""A layer's scales as aiter takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")


def scale_on_device(scale: float | torch.Tensor, kv: LayerKV) -> torch.Tensor:
    """[1], float32, on the device of the layer's pages."""
    if isinstance(scale, torch.Tensor):
        return scale.reshape(1)
    return torch.full((1,), scale, dtype=torch.float32, device=kv.k.device)
