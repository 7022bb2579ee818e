"""Pages of tensors whose bytes cannot be taken for others: moved, and their ends zeroed, through the elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.kernels.pages import PageMover
from anyattn.types import NULL_PAGE

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.indices import Int64s
else:
    torch = lazy_import("torch")


class ElementMover(PageMover):
    """As its base class moves them; all parts are of one dtype."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._elements = list(parts)
        self._num_pages, self.device = parts[0].shape[0], parts[0].device
        self.record_bytes = sum(part[0].numel() * part.dtype.itemsize for part in parts)

    def read(self, pages: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        pages = self._page_ids("pages", pages)
        records = torch.cat([part.index_select(0, pages).flatten(1) for part in self._elements], dim=1)
        if out is None:
            return records.view(torch.uint8)
        self._check_records("out", out, pages.shape[0])
        return out.copy_(records.view(torch.uint8))

    def write(self, pages: Any, data: torch.Tensor) -> None:
        pages = self._page_ids("pages", pages)
        self._check_records("data", data, pages.shape[0])
        records = data.view(self._elements[0].dtype)
        widths = [part[0].numel() for part in self._elements]
        for part, values in zip(self._elements, records.split_with_sizes(widths, dim=1), strict=True):
            _write(part, pages, torch.unflatten(values, 1, part.shape[1:]))

    def copy(self, src: Any, dst: Any) -> None:
        src, dst = self._page_ids("src", src), self._page_ids("dst", dst)
        self._check_pairs(src, dst)
        for part in self._elements:
            _write(part, dst, part.index_select(0, src))


def zero_tails(parts: Sequence[torch.Tensor], pages: Int64s, used: Int64s) -> None:
    """What `KVPool.zero_tails` does, of parts [num_pages, num_kv_heads, pieces, page_size, elements]."""
    pages_there, used_there = to_device([pages, used], parts[0].device, wide=2)
    token = torch.arange(parts[0].shape[3], device=parts[0].device)
    behind = (token >= used_there[:, None])[:, None, None, :, None]
    for part in parts:
        _write(part, pages_there, part.index_select(0, pages_there).masked_fill(behind, 0))


def _write(part: torch.Tensor, pages: torch.Tensor, values: torch.Tensor) -> None:
    """The null page, which is zero, stays so."""
    nowhere = (pages == NULL_PAGE).view(-1, *[1] * (values.ndim - 1))
    part.index_copy_(0, pages.long(), values.masked_fill(nowhere, 0))
