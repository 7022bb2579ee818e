"""Stores in vectorised torch, for devices on which Triton does not run: what the kernels of `store_triton` do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import
from anyattn.mem_cache.layouts import as_bytes
from anyattn.types import NULL_PAGE

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.kernels.store import RowTarget, StoreTarget
else:
    torch = lazy_import("torch")

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: what a tile of zeros, or of smaller numbers still, is divided by."""


def quantize(x: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x / scale` in the storage dtype; fp8 saturates at its largest value, where torch's own cast gives NaN.

    x: [..., num_kv_heads, dim] where the scale is [num_kv_heads].
    """
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        # Devices differ in how they divide by a number of the host: some multiply with its reciprocal.
        scale = scale if isinstance(scale, torch.Tensor) else torch.full((), scale, device=x.device)
        x = x.float() / _for_heads(scale)
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def dequantize(x: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x * scale` in a computing dtype, rounded once; x: [..., num_kv_heads, dim] where the scale is [num_kv_heads]."""
    x = x.to(dtype)
    if isinstance(scale, torch.Tensor):
        # A float32 tensor of some dimensions has torch multiply in float32, and only write in dtype; one of none would
        # on some devices be rounded to dtype itself.
        factor = _for_heads(scale) if scale.ndim else scale.reshape(1)
        return torch.mul(x, factor, out=torch.empty_like(x))
    return x if scale == 1.0 else x * scale


def _for_heads(scale: torch.Tensor) -> torch.Tensor:
    return scale[:, None] if scale.ndim == 1 else scale


def quantize_tiles(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., dim] as float8_e4m3fn, and what each row was divided by, [..., 1], float32: its largest value / 448."""
    x = x.float()
    largest = torch.full((), torch.finfo(torch.float8_e4m3fn).max, device=x.device)
    scales = (x.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=SMALLEST_SCALE)
    return quantize(x / scales, 1.0, torch.float8_e4m3fn), scales


def store(sources: Sequence[torch.Tensor], targets: Sequence[StoreTarget], slots: torch.Tensor, page_size: int) -> None:
    """See `anyattn.mem_cache.kernels.store.store`."""
    for source, target in zip(sources, targets, strict=True):
        stored = quantize(source, 1.0 if target.scale is None else target.scale, target.dtype)
        _write(target.pages, as_bytes(stored), slots, page_size)


def store_rows(
    values: torch.Tensor, tail: torch.Tensor | None, target: RowTarget, slots: torch.Tensor, page_size: int
) -> None:
    """See `anyattn.mem_cache.kernels.store.store_rows`."""
    fp8, scales = quantize_tiles(torch.unflatten(values, -1, (target.num_tiles, -1)))
    new = [(fp8.flatten(1).view(torch.uint8), target.values), (scales.flatten(1), target.scales)]
    if tail is not None and target.tail is not None:
        new.append((tail.to(target.tail.dtype), target.tail))
    for rows, pages in new:
        _write(pages[:, None, :, None, None], rows[:, None], slots, page_size)


def _write(view: torch.Tensor, stored: torch.Tensor, slots: torch.Tensor, page_size: int) -> None:
    """view: as of `layouts.tokens_view`, of numbers that torch can scatter. stored: [num_tokens, num_kv_heads, dim]."""
    # The null page is all zeros and has to stay so. Whether a token goes there is not asked: the answer would be a
    # sync, and in a captured graph for good. Such tokens become zeros, or the page does, whichever is cheaper.
    masked = slots.shape[0] < page_size
    if masked:
        stored = stored.masked_fill((slots < page_size)[:, None, None], 0)
    num_pages, _, _, num_kv_heads, dim_hi, dim_lo = view.shape
    if view.is_contiguous():
        view.view(num_pages * page_size, num_kv_heads, dim_hi * dim_lo).index_copy_(0, slots, stored)
    else:
        page, offset = slots // page_size, slots % page_size
        piece = view.shape[2]
        view[page, offset // piece, offset % piece] = torch.unflatten(stored, -1, (dim_hi, dim_lo))
    if not masked:
        view[NULL_PAGE].zero_()
