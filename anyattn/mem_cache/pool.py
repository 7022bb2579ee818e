"""The pools that run anywhere torch does: keys and values of heads, and MLA's latents; stores in plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import KVPool, LayerKV, PoolCapabilities
from anyattn.types import FP8_DTYPES

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.spec import CacheSpec
else:
    torch = lazy_import("torch")

_KV_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"}) | FP8_DTYPES


class _TorchPool(KVPool):
    """What both pools share: one zeroed tensor a layer for each part, and writes through index_put."""

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        self.cache = cache
        self.num_pages = num_pages
        self.layers = [self._new_layer(device) for _ in range(cache.num_layers)]

    def _new_layer(self, device: Any) -> LayerKV:
        raise NotImplementedError

    def _zeros(self, dim: int, device: Any) -> torch.Tensor:
        """One layer's pages. Zeroed, as some kernels read past a sequence's end and multiply what is there by 0."""
        cache = self.cache
        page = {
            "NHD": (cache.page_size, cache.num_kv_heads, dim),
            "HND": (cache.num_kv_heads, cache.page_size, dim),
        }[cache.layout]
        with torch.inference_mode(False):  # a pool may be made in inference mode and be written outside of it
            return torch.zeros((self.num_pages + 1, *page), dtype=getattr(torch, cache.kv_dtype), device=device)

    def _write(self, pages: torch.Tensor, new: torch.Tensor, scale: float | torch.Tensor, slots: torch.Tensor) -> None:
        """pages: [num_pages, page_size, num_kv_heads, dim], any strides. new: [num_tokens, num_kv_heads, dim]."""
        stored = quantize(new, scale, pages.dtype)
        if pages.dtype.itemsize == 1:  # torch has no scatter for fp8; the bytes are what matters
            pages, stored = pages.view(torch.uint8), stored.view(torch.uint8)
        if pages.is_contiguous():
            pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, stored)
        else:
            page_size = self.cache.page_size
            pages[slots // page_size, slots % page_size] = stored

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        if not 0 <= layer < len(self.layers):
            raise ContractError(f"layer must be 0 to {len(self.layers) - 1}, not {layer}.")
        if self.cache.kv_dtype not in FP8_DTYPES:
            raise ContractError(f"only fp8 KV has scales, and this pool stores {self.cache.kv_dtype}.")
        self.layers[layer] = replace(
            self.layers[layer], k_scale=self._scale("k_scale", k_scale), v_scale=self._scale("v_scale", v_scale)
        )

    def _scale(self, name: str, scale: float | torch.Tensor) -> float | torch.Tensor:
        device = self.layers[0].k.device
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device:
                raise ContractError(f"{name} must be a float or a float32 tensor of one element on {device}.")
            # A scalar, as one of one dimension would widen what it is multiplied with. Its value stays on the device.
            return scale.detach().reshape(())
        if not isinstance(scale, float | int) or not 0 < scale < math.inf:
            raise ContractError(f"{name} must be positive and finite, not {scale!r}.")
        return float(scale)


class MHAPool(_TorchPool):
    """Keys and values of heads, in two tensors a layer, whose last dimensions may differ."""

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(mla=False, kv_dtypes=_KV_DTYPES)

    def _new_layer(self, device: Any) -> LayerKV:
        cache = self.cache
        return LayerKV(
            k=self._zeros(cache.head_dim, device), v=self._zeros(cache.v_head_dim, device), layout=cache.layout
        )

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        kv = self.layers[layer]
        k_pages, v_pages = kv.nhd()
        assert v is not None
        self._write(k_pages, k, kv.k_scale, slots)
        self._write(v_pages, v, kv.v_scale, slots)


class MLAPool(_TorchPool):
    """MLA's latents and rope parts, joined in one row a token; the values are a view of the keys."""

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(mla=True, kv_dtypes=_KV_DTYPES)

    def _new_layer(self, device: Any) -> LayerKV:
        k = self._zeros(self.cache.head_dim, device)
        return LayerKV(k=k, v=k[..., : self.cache.v_head_dim], layout=self.cache.layout)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        kv = self.layers[layer]
        self._write(kv.nhd()[0], k.unsqueeze(1), kv.k_scale, slots)

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        if k_scale is not v_scale and k_scale != v_scale:
            raise ContractError("MLA stores keys and values once, so k_scale and v_scale must be the same.")
        super().set_scales(layer, k_scale, v_scale)


def quantize(x: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x / scale` in the storage dtype; fp8 saturates at its largest value, where torch's own cast gives NaN."""
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        x = x.float() / scale
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def dequantize(x: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x * scale` in a computing dtype."""
    x = x.to(dtype)
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        x = x * scale
    return x
