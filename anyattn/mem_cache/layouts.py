"""The order of elements within a page: what each layout is, one way to see them all, and ways from one to another.

NHD   [page_size, num_kv_heads, dim]
HND   [num_kv_heads, page_size, dim]
NZ    [num_kv_heads, dim / 16, page_size, 16]: Ascend's FRACTAL_NZ, as torch-npu's operators take a paged cache
5D    keys [num_kv_heads, dim / x, page_size, x], values [num_kv_heads, page_size / x, dim, x], with x elements in 16
      bytes: what `pa_fwd_asm` of ROCm's aiter reads
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from anyattn.errors import SpecError
from anyattn.lazy import lazy_import
from anyattn.types import ALL_LAYOUTS, KVLayout

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

Part = Literal["k", "v"]

_NZ_DIM = 16
_5D_BYTES = 16


def page_shape(
    layout: KVLayout, part: Part, *, page_size: int, num_kv_heads: int, dim: int, itemsize: int
) -> tuple[int, ...]:
    """The shape of one page of keys or values.

    itemsize: bytes of one element. Raises SpecError, with what would do, when the layout cannot hold these sizes.
    """
    if layout == "NHD":
        return (page_size, num_kv_heads, dim)
    if layout == "HND":
        return (num_kv_heads, page_size, dim)
    if layout == "NZ":
        return (num_kv_heads, _divided(layout, part, "dim", dim, _NZ_DIM), page_size, _NZ_DIM)
    if layout == "5D":
        x = max(_5D_BYTES // itemsize, 1)
        if part == "k":
            return (num_kv_heads, _divided(layout, part, "dim", dim, x), page_size, x)
        return (num_kv_heads, _divided(layout, part, "page_size", page_size, x), dim, x)
    raise SpecError(f"layout must be one of {', '.join(ALL_LAYOUTS)}, not {layout!r}.")


def _divided(layout: KVLayout, part: Part, name: str, size: int, by: int) -> int:
    if size % by:
        part_name = {"k": "keys", "v": "values"}[part]
        raise SpecError(
            f"layout {layout} keeps {part_name} in pieces of {by}, so their {name} must be a multiple of {by}, "
            f"as {-(-size // by) * by}; {size} is not. Layouts NHD and HND take every size."
        )
    return size // by


def tokens_view(pages: torch.Tensor, layout: KVLayout, part: Part) -> torch.Tensor:
    """All layouts seen alike: a view [num_pages, token_hi, token_lo, num_kv_heads, dim_hi, dim_lo].

    pages: [num_pages, *page_shape(...)], any strides. The token at an offset in its page is at
    `divmod(offset, view.shape[2])`, and element d of a head at `divmod(d, view.shape[5])`; where a layout splits
    nothing, the high axis has one entry.
    """
    if layout == "NHD":
        return pages[:, None, :, :, None]
    if layout == "HND":
        return pages.transpose(1, 2)[:, None, :, :, None]
    if layout == "5D" and part == "v":
        return pages.permute(0, 2, 4, 1, 3)[:, :, :, :, None]
    return pages.permute(0, 3, 1, 2, 4)[:, None]


def dims_of(view: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The part of a `tokens_view` that holds `count` elements of each head from `first` on.

    Raises SpecError when the layout's pieces do not begin and end there.
    """
    piece = view.shape[5]
    if view.shape[4] == 1:
        return view[..., first : first + count]
    if first % piece or count % piece:
        raise SpecError(f"pieces of {piece} elements cannot be cut at {first} and {first + count}: use NHD or HND.")
    return view[..., first // piece : (first + count) // piece, :]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as uint8 where they are fp8, for which torch has few operators; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def gather(pages: torch.Tensor, layout: KVLayout, part: Part, page_ids: torch.Tensor) -> torch.Tensor:
    """Some pages in plain order: a copy, contiguous, [len(page_ids), page_size, num_kv_heads, dim]."""
    taken = as_bytes(pages).index_select(0, page_ids)
    return _plain(tokens_view(taken, layout, part)).contiguous().view(pages.dtype)


def convert(pages: torch.Tensor, source: KVLayout, target: KVLayout, part: Part) -> torch.Tensor:
    """A copy of all pages in another layout. Raises SpecError when that cannot hold their sizes."""
    plain = _plain(tokens_view(as_bytes(pages), source, part))
    num_pages, page_size, num_kv_heads, dim = plain.shape
    shape = page_shape(
        target, part, page_size=page_size, num_kv_heads=num_kv_heads, dim=dim, itemsize=pages.dtype.itemsize
    )
    converted = plain.new_empty((num_pages, *shape))
    view = tokens_view(converted, target, part)
    view.copy_(plain.reshape(view.shape))
    return converted.view(pages.dtype)


def _plain(view: torch.Tensor) -> torch.Tensor:
    num_pages, token_hi, token_lo, num_kv_heads, dim_hi, dim_lo = view.shape
    return view.reshape(num_pages, token_hi * token_lo, num_kv_heads, dim_hi * dim_lo)
