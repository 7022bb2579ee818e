"""Stores of new tokens: where they go, and who writes them there, Triton where it runs and torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels import store_torch, triton_runs_on
from anyattn.mem_cache.kernels.launch import on
from anyattn.mem_cache.layouts import as_bytes

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


class StoreTarget:
    """Where one tensor of a layer's new tokens goes; made once, as everything here stays the same.

    pages: a `layouts.tokens_view`, [num_pages, token_hi, token_lo, num_kv_heads, dim_hi, dim_lo]; fp8 kept as bytes.
    scale: what values are divided by, float32 on the pages' device, of one element or [num_kv_heads]; None for 1.
    """

    __slots__ = ("constants", "dim", "divisor", "dtype", "launch", "num_kv_heads", "pages", "scale")

    def __init__(self, pages: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self.dtype = pages.dtype
        self.pages = as_bytes(pages)
        self.scale = scale
        self.divisor = self.pages if scale is None else scale  # a pointer, that is not read where there is no scale
        self.launch: Any = None  # what the Triton kernel's launches have in common, once it was launched
        _, _, token_piece, self.num_kv_heads, dim_hi, dim_piece = pages.shape
        self.dim = dim_hi * dim_piece
        page_stride, token_hi_stride, token_stride, head_stride, dim_hi_stride, dim_stride = pages.stride()
        self.constants = (
            self.dim, 0 if scale is None else scale.numel(), page_stride, token_piece, token_hi_stride, token_stride,
            head_stride, dim_piece, dim_hi_stride, dim_stride,
        )  # fmt: skip
        """DIM, SCALES, ... DIM_STRIDE of the Triton kernel."""


class RowTarget:
    """Where rows go that are quantised to fp8 in tiles, each with the scale that fits it; views of one storage.

    values: [num_pages, page_size, dim], uint8, the float8_e4m3fn bytes.
    scales: [num_pages, page_size, num_tiles], float32, what a tile's values are to be multiplied with.
    tail: [num_pages, page_size, tail_dim], elements that are kept as they are, or None.
    """

    __slots__ = ("num_tiles", "scales", "tail", "values")

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, tail: torch.Tensor | None = None) -> None:
        self.values, self.scales, self.tail = values, scales, tail
        self.num_tiles = scales.shape[2]


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Finds out what stores of this dtype have to know and could only find out by a sync."""
    if dtype.itemsize == 1 and triton_runs_on(device):
        from anyattn.mem_cache.kernels import store_triton

        with on(device):
            store_triton.casts_rightly(device, dtype)


def store(sources: Sequence[torch.Tensor], targets: Sequence[StoreTarget], slots: torch.Tensor, page_size: int) -> None:
    """Writes one or two tensors of new tokens to their slots, where Triton runs in one launch.

    sources: each [num_tokens, num_kv_heads, dim] of its target's sizes, any strides. Divided by the target's scale in
        float32, saturated where that is fp8, and rounded to nearest, ties to even.
    slots: [num_tokens], int64. Tokens of the null page's slots are not stored.
    """
    if slots.shape[0] == 0:
        return
    if triton_runs_on(slots.device):
        from anyattn.mem_cache.kernels import store_triton

        with on(slots.device):
            store_triton.store(sources, targets, slots, page_size)
    else:
        store_torch.store(sources, targets, slots, page_size)


def store_rows(
    values: torch.Tensor, tail: torch.Tensor | None, target: RowTarget, slots: torch.Tensor, page_size: int
) -> None:
    """Writes rows to their slots, each tile of `dim / num_tiles` values divided by its largest magnitude / 448.

    values: [num_tokens, dim]. tail: [num_tokens, tail_dim], just converted. Any strides. slots: as for `store`.
    """
    if slots.shape[0] == 0:
        return
    if triton_runs_on(slots.device):
        from anyattn.mem_cache.kernels import store_triton

        with on(slots.device):
            store_triton.store_rows(values, tail, target, slots, page_size)
    else:
        store_torch.store_rows(values, tail, target, slots, page_size)
