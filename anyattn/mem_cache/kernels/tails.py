"""The slots behind a sequence's end in its last page, zeroed in all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import ranges
from anyattn.mem_cache.kernels import triton_runs_on
from anyattn.mem_cache.kernels.launch import on
from anyattn.mem_cache.layouts import as_bytes, tokens_view

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.indices import Int64s
    from anyattn.mem_cache.kernels.tails_triton import TritonZeroer
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


class TailZeroer:
    """`KVPool.zero_tails`, for these layers."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self._parts = [as_bytes(part) for kv in layers for part in _by_token(kv)]
        # Of 5D's values, a page's last tokens lie among the others, so that no run of bytes is theirs alone.
        self._mingled = [
            tokens_view(as_bytes(kv.v), "5D", "v") for kv in layers if kv.layout == "5D" and not kv.v_in_k
        ]
        self._device = self._parts[0].device
        self._page_size = self._parts[0].shape[1]
        self._triton: TritonZeroer | None = None
        if triton_runs_on(self._device):
            from anyattn.mem_cache.kernels.tails_triton import TritonZeroer

            self._triton = TritonZeroer(self._parts)
            self(np.zeros(1, dtype=np.int64), np.full(1, self._page_size))  # compiles, and writes nothing

    def __call__(self, pages: Int64s, used: Int64s) -> None:
        """pages, used: [n]; see `KVPool.zero_tails`."""
        if self._triton is not None:
            pages_there, used_there = to_device([pages, used], self._device, wide=2)
            with on(self._device):
                self._triton(pages_there, used_there)
            if not self._mingled:
                return
        left = self._page_size - used
        pages_there, offsets = to_device([pages.repeat(left), ranges(used, left)], self._device, wide=2)
        if self._triton is None:
            for part in self._parts:
                part[pages_there, offsets] = 0
        for view in self._mingled:
            piece = view.shape[2]
            view[pages_there, offsets // piece, offsets % piece] = 0


def _by_token(kv: LayerKV) -> list[torch.Tensor]:
    """What a layer stores, but for 5D's values, as [num_pages, page_size, pieces, elements of a piece]; views."""
    if kv.layout == "NHD":
        return kv.stored
    if kv.layout == "5D":
        return [kv.k.flatten(1, 2).transpose(1, 2)]
    parts = [part.flatten(1, 2) for part in kv.stored] if kv.layout == "NZ" else kv.stored
    return [part.transpose(1, 2) for part in parts]
