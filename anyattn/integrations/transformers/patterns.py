"""Which pattern a mask function of transformers computes: found from one row, and proven in every entry.

transformers describes a mask by a function of (batch, head, query position, key position), a closure put together from
the model's parts. Its name and origin prove nothing, so it is evaluated and compared, entry by entry, with what a spec
can say: causal, causal with a window, or nothing hidden. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from anyattn.errors import SpecError

MaskFunction = Callable[..., Any]

_MASK_ELEMENTS = 1 << 22  # entries evaluated at a time, which bounds the memory that a proof takes

SERVED = (
    "Served are causal masks, causal masks with a sliding window, and masks that hide nothing, each with padding; "
    "packed training sequences, chunked attention, bidirectional image tokens and custom masks are not."
)


class Pattern(NamedTuple):
    """causal: position p sees no later one; otherwise every query sees every key. window: W, p sees (p - W, p]."""

    causal: bool
    window: int | None


_NOTHING_HIDDEN = Pattern(causal=False, window=None)


def proven_pattern(
    function: MaskFunction, use_vmap: bool, batch_size: int, queries: range, keys: range, device: torch.device
) -> Pattern:
    """The pattern of a mask between `queries` and `keys`, ranges of positions; its window only where that hides
    something. Raises SpecError when no pattern is right in every entry.
    """
    # Queries are the last tokens of what a paged runtime attends to, so a causal mask must have them among its keys.
    may_be_causal = keys.start <= queries.start and queries.stop <= keys.stop
    if function is causal_mask_function and may_be_causal:
        return Pattern(causal=True, window=None)
    if function is bidirectional_mask_function:
        return _NOTHING_HIDDEN
    last = _evaluate(function, use_vmap, 1, queries[-1:], keys, device)
    guess = _guess(last[0, 0], torch.arange(keys.start, keys.stop, device=device), queries[-1])
    for pattern in [guess, _NOTHING_HIDDEN] if guess.causal and may_be_causal else [_NOTHING_HIDDEN]:
        if _holds(pattern, function, use_vmap, batch_size, queries, keys, device):
            return pattern
    raise SpecError(f"The attention mask of this step is not one that anyattn can serve. {SERVED}")


def pattern_up_to(num_positions: int, function: MaskFunction, use_vmap: bool) -> Pattern:
    """The pattern at every length up to `num_positions`.

    For runtimes that are made before the lengths are known. The longest row gives the window; rows around the
    window's edge and spread over all lengths then have to agree with it in every entry.
    Raises SpecError when they do not.
    """
    if function is causal_mask_function:
        return Pattern(causal=True, window=None)
    last, keys = num_positions - 1, torch.arange(num_positions)
    pattern = _NOTHING_HIDDEN
    if not bool(_row_at(0, num_positions, function, use_vmap).all()):
        pattern = Pattern(True, _guess(_row_at(last, num_positions, function, use_vmap), keys, last).window)
    edges = [] if pattern.window is None else [pattern.window - 1, pattern.window, pattern.window + 1]
    spread = [0, 1, 2, 3, *(last * part // 8 for part in range(1, 9))]
    for position in sorted({p for p in (*edges, *spread) if 0 <= p <= last}):
        expected = _expected(pattern, torch.tensor([[position]]), keys)[0]
        if not torch.equal(_row_at(position, num_positions, function, use_vmap), expected):
            raise SpecError(f"The attention mask of this model is not one that anyattn can serve. {SERVED}")
    return pattern


def _row_at(position: int, num_positions: int, function: MaskFunction, use_vmap: bool) -> torch.Tensor:
    """One query's row, [num_positions], bool; on the CPU, where an index out of range is an error to catch."""
    query, keys = range(position, position + 1), range(num_positions)
    return _evaluate(function, use_vmap, 1, query, keys, torch.device("cpu"))[0, 0]


def _guess(row: torch.Tensor, keys: torch.Tensor, query: int) -> Pattern:
    """The pattern that one query's row suggests. row: [num_keys], bool. keys: [num_keys], positions."""
    seen = keys[row]
    if seen.numel() == 0:
        return _NOTHING_HIDDEN  # which is wrong, and will be found so
    first = int(seen[0])
    window = None if first == int(keys[0]) else query - first + 1
    return Pattern(causal=int(seen[-1]) <= query, window=window)


def _holds(
    pattern: Pattern,
    function: MaskFunction,
    use_vmap: bool,
    batch_size: int,
    queries: range,
    keys: range,
    device: torch.device,
) -> bool:
    """Whether every entry of the mask is as the pattern says."""
    key = torch.arange(keys.start, keys.stop, device=device)
    step = max(_MASK_ELEMENTS // (batch_size * len(keys)), 1)
    for start in range(0, len(queries), step):
        rows = queries[start : start + step]
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        mask = _evaluate(function, use_vmap, batch_size, rows, keys, device)
        if not bool((mask == _expected(pattern, query, key)).all()):
            return False
    return True


def _expected(pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[num_queries, num_keys], bool. query: [num_queries, 1]. key: [num_keys]."""
    seen = key <= query
    if not pattern.causal:
        return torch.ones_like(seen)
    return seen if pattern.window is None else seen & (key > query - pattern.window)


def _evaluate(
    function: MaskFunction, use_vmap: bool, batch_size: int, queries: range, keys: range, device: torch.device
) -> torch.Tensor:
    """The mask as transformers' sdpa would have it, without padding: [1 or batch_size, num_queries, num_keys], bool."""
    try:
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=len(queries),
            kv_length=len(keys),
            q_offset=queries.start,
            kv_offset=keys.start,
            mask_function=function,
            attention_mask=None,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    except (IndexError, RuntimeError) as error:
        raise SpecError(f"The mask function cannot be evaluated ({error}). {SERVED}") from error
    if mask is None:
        raise SpecError(f"transformers made no mask where it was asked for one. {SERVED}")
    mask = mask[:, 0]
    return mask[:1] if mask.stride(0) == 0 else mask  # expanded: the same for every row of the batch
