"""Whole pages moved by vectorised torch, part by part, for devices on which Triton does not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anyattn.types import NULL_PAGE

if TYPE_CHECKING:
    import torch


def read(parts: Sequence[torch.Tensor], pages: torch.Tensor, out: torch.Tensor) -> None:
    """parts: each [num_pages + 1, bytes], uint8. out: [len(pages), bytes of all parts], uint8."""
    for part, records in _with_records(parts, out):
        records.copy_(part.index_select(0, pages))


def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, data: torch.Tensor) -> None:
    """data: as `out` of `read`."""
    for part, records in _with_records(parts, data):
        _put(part, pages, records)


def copy(parts: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Pages src to pages dst."""
    for part in parts:
        _put(part, dst, part.index_select(0, src))


def _with_records(parts: Sequence[torch.Tensor], records: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    first = 0
    for part in parts:
        yield part, records[:, first : first + part.shape[1]]
        first += part.shape[1]


def _put(part: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    is_null = pages == NULL_PAGE
    # As for stores: the null page stays zero, and whether it is named is looked up only where that is no sync.
    if pages.device.type != "cpu" or bool(is_null.any()):
        rows = rows.masked_fill(is_null[:, None], 0)
    part.index_copy_(0, pages.long(), rows)
