"""The pool of a model's full layers where it has none: page ids without bytes, as all layers keep only a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import KVPool, PoolCapabilities
from anyattn.types import ALL_LAYOUTS, DTYPE_BYTES

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.spec import CacheSpec
else:
    torch = lazy_import("torch")


class EmptyPool(KVPool):
    """Serves whoever moves pages of every pool; no layer is in it, so nothing is stored."""

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        kind="mha", kv_dtypes=frozenset(DTYPE_BYTES), layouts=ALL_LAYOUTS
    )

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        if cache.num_layers:
            raise ContractError(f"an empty pool has no layers, not {cache.num_layers}.")
        self.cache = cache
        self.num_pages = num_pages
        self.layers = []
        self.device = torch.empty(0, device=device).device  # with its index, as pages' tensors would have it

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        raise ContractError(f"this pool has no layer {layer}: it is empty.")

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        raise ContractError(f"this pool has no layer {layer}: it is empty.")

    def parts(self) -> list[torch.Tensor]:
        return []

    def read_pages(self, pages: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Records of no bytes."""
        return torch.empty((len(pages), 0), dtype=torch.uint8, device=self.device) if out is None else out

    def write_pages(self, pages: Any, data: torch.Tensor) -> None:
        """Nothing to write."""

    def copy_pages(self, src: Any, dst: Any) -> None:
        """Nothing to copy."""
