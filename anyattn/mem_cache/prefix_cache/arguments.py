"""What callers give a prefix cache, checked: tokens, page ids and numbers."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.handles import array

if TYPE_CHECKING:
    import numpy as np

    from anyattn.mem_cache.indices import Int32s
else:
    np = lazy_import("numpy")

_LARGEST = 2**62


def token_bytes(tokens: Any, page_size: int, most_tokens: int | None = None) -> bytes:
    """The tokens of whole pages, no more than `most_tokens`, as little-endian int32."""
    tokens = array("tokens", tokens)
    if tokens.ndim != 1 or (tokens.size and (tokens.dtype.kind != "i" or tokens.itemsize < 4)):
        raise ContractError(
            f"tokens must be a flat array or list of int32 or int64, not {tokens.dtype} in {tokens.ndim} dimensions."
        )
    num_tokens: int = tokens.size
    if most_tokens is not None:
        num_tokens = min(num_tokens, integer("most_tokens", most_tokens))
        if num_tokens < 0:
            raise ContractError(f"most_tokens must not be negative: {most_tokens} given.")
    tokens = tokens[: num_tokens - num_tokens % page_size]
    ids = tokens.astype("<i4", copy=False)
    if tokens.itemsize > 4 and (ids != tokens).any():
        raise ContractError(f"token {tokens[ids != tokens][0]} does not fit into int32.")
    data: bytes = ids.tobytes()
    return data


def page_ids(pages: Any, num_pages: int) -> Int32s:
    """A copy of page ids, which must be 1 to `num_pages` and differ."""
    pages = array("pages", pages)
    if pages.ndim != 1 or (pages.size and pages.dtype.kind not in "iu"):
        raise ContractError("pages must be a flat list of page ids.")
    if pages.size:
        ordered = np.sort(pages)
        if ordered[0] < 1 or ordered[-1] > num_pages:
            raise ContractError(f"page ids are 1 to {num_pages}: {ordered[0]} to {ordered[-1]} given.")
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise ContractError("a page is named twice in one call.")
    ids: Int32s = pages.astype(np.int32)
    return ids


def integer(name: str, value: Any) -> int:
    """A number that fits into int64."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ContractError(f"{name} must be an integer, not {value!r}.") from error
    if not -_LARGEST < number < _LARGEST:
        raise ContractError(f"{name} must lie between {-_LARGEST} and {_LARGEST}, not be {number}.")
    return number


def is_extra_key(key: Any) -> bool:
    """Whether keys of this sort are equal only where they mean the same: 1, True and 1.0 are not told apart."""
    return key is None or type(key) in (int, str, bytes) or (type(key) is tuple and all(map(is_extra_key, key)))
