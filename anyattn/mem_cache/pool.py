"""The pools of keys and values of heads, and of MLA's latents: where their bytes lie, their scales, their stores."""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import KVPool, LayerKV, PoolCapabilities
from anyattn.mem_cache.kernels.store import StoreTarget, prepare, store
from anyattn.mem_cache.kernels.store_torch import dequantize as dequantize
from anyattn.mem_cache.kernels.store_torch import quantize as quantize
from anyattn.mem_cache.layouts import dims_of, tokens_view
from anyattn.types import ALL_LAYOUTS, DTYPE_BYTES, FP8_DTYPES, KV_LAYOUTS

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.spec import CacheSpec
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

_SMALLEST, _LARGEST = 1e-37, 1e38  # within float32's normal numbers


class PagedPool(KVPool):
    """What the pools share: zeroed storage, a tensor a layer and part or one for all of them, as views a layer."""

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        if cache.kind != self.capabilities.kind:
            raise ContractError(f"{type(self).__name__} keeps kind {self.capabilities.kind!r}, not {cache.kind!r}.")
        if not cache.num_layers:
            raise ContractError(f"{type(self).__name__} needs layers; for a cache of none there is EmptyPool.")
        if num_pages < 1:
            raise ContractError(f"num_pages must be at least 1, not {num_pages}.")
        self.cache = cache
        self.num_pages = num_pages
        self._parts: list[torch.Tensor] = []
        with torch.inference_mode(False):  # a pool may be made in inference mode and be written outside of it
            self.layers = [self._new_layer(*raw) for raw in self._new_storage(torch.device(device))]
        self.device = self._parts[0].device
        _ = self.page_mover  # now, as the copy of its table to the device would be a sync in a step

    def _new_layer(self, *raw: torch.Tensor) -> LayerKV:
        """One layer's pages. raw: a tensor for each of `cache.page_shapes()`, [num_pages + 1, bytes], uint8."""
        raise NotImplementedError

    def _new_storage(self, device: torch.device) -> list[list[torch.Tensor]]:
        cache = self.cache
        part_bytes = [math.prod(shape) * DTYPE_BYTES[cache.kv_dtype] for shape in cache.page_shapes()]
        if not cache.joined_layers:
            layers = [[self._zeros(num_bytes, device) for num_bytes in part_bytes] for _ in range(cache.num_layers)]
            self._parts = [raw for layer in layers for raw in layer]
            return layers
        self._parts = [self._zeros(cache.bytes_per_page, device)]
        views = self._parts[0].split_with_sizes(part_bytes * cache.num_layers, dim=1)
        return [list(views[i : i + len(part_bytes)]) for i in range(0, len(views), len(part_bytes))]

    def _zeros(self, page_bytes: int, device: torch.device) -> torch.Tensor:
        """Zeroed, as some kernels read past a sequence's end and multiply what is there by 0."""
        shape = (self.num_pages + 1, page_bytes)
        if device.type == "cpu":  # numpy's zeros take memory page by page, when it is written; torch writes zeros
            return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def parts(self) -> list[torch.Tensor]:
        return list(self._parts)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.layers):
            raise ContractError(f"layer must be 0 to {len(self.layers) - 1}, not {layer}.")


class _ScaledPool(PagedPool):
    """Pools whose elements have one dtype, in any layout, and where that is fp8 a scale for keys and one for values."""

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        super().__init__(cache, num_pages, device)
        self._targets = [self._new_targets(kv) for kv in self.layers]
        prepare(self.device, self.layers[0].k.dtype)

    def _new_targets(self, kv: LayerKV) -> tuple[StoreTarget, ...]:
        """Where `store` puts a layer's new tokens."""
        raise NotImplementedError

    def _pages(self, raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.cache.kv_dtype)
        return torch.unflatten(raw.view(dtype), 1, shape)

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        self._check_layer(layer)
        if self.cache.kv_dtype not in FP8_DTYPES:
            raise ContractError(f"only fp8 KV has scales, and this pool stores {self.cache.kv_dtype}.")
        kv = replace(
            self.layers[layer], k_scale=self._scale("k_scale", k_scale), v_scale=self._scale("v_scale", v_scale)
        )
        self._targets[layer] = self._new_targets(kv)
        self.layers[layer] = kv

    def _scale(self, name: str, scale: float | torch.Tensor) -> float | torch.Tensor:
        if not isinstance(scale, torch.Tensor):
            if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not _SMALLEST < scale < _LARGEST:
                raise ContractError(f"{name} must be a number that float32 can divide by, not {scale!r}.")
            return float(scale)
        one_element, heads = scale.numel() == 1, (self.cache.num_kv_heads,)
        per_head = self.capabilities.per_head_scales
        fits = one_element or (per_head and scale.shape == heads)
        if not fits or scale.dtype != torch.float32 or scale.device != self.device:
            shapes = f"of one element or of shape {heads}" if per_head else "of one element"
            raise ContractError(
                f"{name} must be a float or a float32 tensor {shapes} on {self.device}, not {scale.dtype} of shape "
                f"{tuple(scale.shape)} on {scale.device}."
            )
        # A scalar, as one of one dimension would widen what it is multiplied with. Its value stays on the device.
        return scale.detach().reshape(()) if one_element else scale.detach().contiguous()


def _divisor(scale: float | torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """A scale as kernels want it: None for 1, else on the device."""
    if isinstance(scale, torch.Tensor):
        return scale
    return None if scale == 1.0 else torch.full((), scale, dtype=torch.float32, device=device)


class MHAPool(_ScaledPool):
    """Keys and values of heads, in two tensors a layer, whose last dimensions may differ."""

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        kind="mha",
        kv_dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}) | FP8_DTYPES,
        layouts=ALL_LAYOUTS,
        per_head_scales=True,
        joined_layers=True,
    )

    def _new_layer(self, *raw: torch.Tensor) -> LayerKV:
        k, v = (self._pages(*part) for part in zip(raw, self.cache.page_shapes(), strict=True))
        return LayerKV(k=k, v=v, layout=self.cache.layout)

    def _new_targets(self, kv: LayerKV) -> tuple[StoreTarget, ...]:
        return (
            StoreTarget(tokens_view(kv.k, kv.layout, "k"), _divisor(kv.k_scale, kv.k.device)),
            StoreTarget(tokens_view(kv.v, kv.layout, "v"), _divisor(kv.v_scale, kv.v.device)),
        )

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        assert v is not None
        store((k, v), self._targets[layer], slots, self.cache.page_size)


class MLAPool(_ScaledPool):
    """MLA's latents and rope parts, joined in one row a token; in layout NZ in a tensor each, as its readers want.

    The values are a view of the keys.
    """

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        kind="mla", kv_dtypes=MHAPool.capabilities.kv_dtypes, layouts=ALL_LAYOUTS, joined_layers=True
    )

    def _new_layer(self, *raw: torch.Tensor) -> LayerKV:
        layout, rank = self.cache.layout, self.cache.v_head_dim
        k, *apart = (self._pages(*part) for part in zip(raw, self.cache.page_shapes(), strict=True))
        if apart:
            return LayerKV(k=k, v=k, layout=layout, v_in_k=True, rope=apart[0])
        v = k[..., :rank] if layout in KV_LAYOUTS else k[:, :, : rank // k.shape[-1]]
        return LayerKV(k=k, v=v, layout=layout, v_in_k=True)

    def _new_targets(self, kv: LayerKV) -> tuple[StoreTarget, ...]:
        """For latents, for rope parts, and where there are such for joined rows."""
        view, scale = tokens_view(kv.k, kv.layout, "k"), _divisor(kv.k_scale, kv.k.device)
        rank, dim = self.cache.v_head_dim, self.cache.head_dim
        if kv.rope is not None:
            parts = [view, tokens_view(kv.rope, kv.layout, "k")]
        else:
            parts = [dims_of(view, 0, rank), dims_of(view, rank, dim - rank), view]
        return tuple(StoreTarget(part, scale) for part in parts)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        latent, rope, *joined = self._targets[layer]
        if v is None and joined:
            store((k.unsqueeze(1),), joined, slots, self.cache.page_size)
            return
        k, v = self._apart(k, v)
        store((k.unsqueeze(1), v.unsqueeze(1)), (latent, rope), slots, self.cache.page_size)

    def _apart(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [num_tokens, kv_lora_rank] and rope parts [num_tokens, qk_rope_head_dim], however they are given."""
        rank = self.cache.v_head_dim
        return (k[:, :rank], k[:, rank:]) if v is None else (k, v)

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        tensors = isinstance(k_scale, torch.Tensor) or isinstance(v_scale, torch.Tensor)
        if k_scale is not v_scale and (tensors or k_scale != v_scale):
            raise ContractError(
                "MLA stores keys and values once, so k_scale and v_scale must be the same: equal numbers or one tensor."
            )
        super().set_scales(layer, k_scale, v_scale)
