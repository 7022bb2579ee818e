"""The slots behind a sequence's end in its last page, zeroed in all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import ranges
from anyattn.mem_cache.kernels import triton_runs_on
from anyattn.mem_cache.kernels.launch import on
from anyattn.mem_cache.layouts import as_bytes
from anyattn.types import KV_LAYOUTS

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
    """`KVPool.zero_tails`, for these layers.

    Raises ContractError for pages in vendors' orders, in which a page's last tokens do not lie together.
    """

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        if strange := {kv.layout for kv in layers}.difference(KV_LAYOUTS):
            raise ContractError(
                f"what lies behind a sequence's end can be zeroed in layouts {' and '.join(KV_LAYOUTS)}, not in "
                f"{', '.join(sorted(strange))}: name another layout, or a backend that does not need it."
            )
        self._parts = [as_bytes(part) for kv in layers for part in (kv.nhd()[:1] if kv.v_in_k else kv.nhd())]
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
            return
        left = self._page_size - used
        pages_there, offsets = to_device([pages.repeat(left), ranges(used, left)], self._device, wide=2)
        for part in self._parts:
            part[pages_there, offsets] = 0
