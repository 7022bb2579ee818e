"""Whole pages, all layers at once: copied out as records, in from records, or from page to page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.kernels import pages_torch, triton_runs_on
from anyattn.mem_cache.kernels.launch import on

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.kernels.pages_triton import TritonMover
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


class PageMover:
    """Moves pages of the tensors that together hold a pool; `KVPool.read_pages`, `write_pages`, `copy_pages` say how.

    parts: each [num_pages + 1, ...], a page contiguous, pages any number of bytes apart. A record is a page's bytes in
        all of them, in their order.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        sizes = {(part.shape[0], part.device) for part in parts}
        if len(sizes) != 1 or not all(part[0].is_contiguous() for part in parts):
            raise ContractError(
                "a pool's parts are tensors of one device and equally many pages, of which each is contiguous; given: "
                + ", ".join(f"{tuple(part.shape)} with strides {part.stride()} on {part.device}" for part in parts)
            )
        self.parts = [part.view(torch.uint8) if part.dtype != torch.uint8 else part for part in parts]
        self.parts = [part.flatten(1) if part.ndim != 2 else part for part in self.parts]
        ((self._num_pages, self.device),) = sizes
        self.record_bytes = sum(part.shape[1] for part in self.parts)
        self._triton: TritonMover | None = None
        if triton_runs_on(self.device):
            from anyattn.mem_cache.kernels.pages_triton import TritonMover

            self._triton = TritonMover(self.parts)

    def read(self, pages: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """The pages' records; see `KVPool.read_pages`."""
        pages = self._page_ids("pages", pages)
        if out is None:
            out = torch.empty((pages.shape[0], self.record_bytes), dtype=torch.uint8, device=self.device)
        self._check_records("out", out, pages.shape[0])
        if self._triton is not None:
            with on(self.device):
                self._triton.read(pages, out)
        else:
            pages_torch.read(self.parts, pages, out)
        return out

    def write(self, pages: Any, data: torch.Tensor) -> None:
        """Pages from records; see `KVPool.write_pages`."""
        pages = self._page_ids("pages", pages)
        self._check_records("data", data, pages.shape[0])
        if self._triton is not None:
            with on(self.device):
                self._triton.write(pages, data)
        else:
            pages_torch.write(self.parts, pages, data)

    def copy(self, src: Any, dst: Any) -> None:
        """Pages from pages; see `KVPool.copy_pages`."""
        src, dst = self._page_ids("src", src), self._page_ids("dst", dst)
        self._check_pairs(src, dst)
        if self._triton is not None:
            with on(self.device):
                self._triton.copy(src, dst)
        else:
            pages_torch.copy(self.parts, src, dst)

    def _page_ids(self, name: str, pages: Any) -> torch.Tensor:
        if isinstance(pages, np.ndarray):
            if pages.ndim != 1 or pages.dtype.kind not in "iu":
                raise ContractError(f"{name} must be integers of one axis, not {pages.dtype} of shape {pages.shape}.")
            if pages.size and not 0 <= pages.min() <= pages.max() < self._num_pages:
                raise ContractError(
                    f"{name} must be 0 to {self._num_pages - 1}: {pages.min()} to {pages.max()} are given."
                )
            moved = torch.from_numpy(pages.astype(np.int64))
            if self.device.type != "cpu":
                # From pinned memory the copy runs behind the host's back; the allocator of pinned memory keeps the
                # source until it is done.
                moved = moved.pin_memory().to(self.device, non_blocking=True)
            return moved
        if not isinstance(pages, torch.Tensor) or pages.ndim != 1 or pages.dtype not in (torch.int32, torch.int64):
            raise ContractError(f"{name} must be a numpy array or a tensor of int32 or int64, with one axis.")
        if pages.device != self.device:
            raise ContractError(f"{name} must be on the pool's device, {self.device}, not on {pages.device}.")
        return pages.contiguous()

    def _check_pairs(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        if src.shape != dst.shape:
            raise ContractError(f"src and dst must name equally many pages, not {src.shape[0]} and {dst.shape[0]}.")

    def _check_records(self, name: str, records: torch.Tensor, count: int) -> None:
        shape = (count, self.record_bytes)
        if records.shape != shape or records.dtype != torch.uint8 or records.device != self.device:
            raise ContractError(
                f"{name} must be uint8 of shape {shape} on {self.device}, not {records.dtype} of shape "
                f"{tuple(records.shape)} on {records.device}."
            )
        if records.shape[1] > 1 and records.stride(1) != 1:
            raise ContractError(f"{name} must have contiguous rows; its strides are {records.stride()}.")
