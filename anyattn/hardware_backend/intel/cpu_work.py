"""The host's work for a step on the CPU: which sequences the paged kernel serves, and its items of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.step_view import StepView

    Int32s = npt.NDArray[np.int32]
    Int64s = npt.NDArray[np.int64]
else:
    np = lazy_import("numpy")

ARGUMENTS = (
    "counters", "num_items", "items", "kv_indices", "q", "q_token_stride", "q_head_stride", "out", "lse", "k",
    "k_page_stride", "k_token_stride", "k_head_stride", "v", "v_page_stride", "v_token_stride", "v_head_stride",
    "page_size", "sinks", "k_scale", "k_scale_stride", "v_scale", "v_scale_stride", "scratch", "scratch_bytes",
    "partials", "finished", "window", "causal", "num_qo_heads", "factors",
)  # fmt: skip
"""What a thread of `paged_kernel` is given: int64 each; tensors by their address, 0 for none; strides in bytes.

counters: int64 [2], items and threads so far, zeros at first. items: int32 [num_items, len(ITEM)]. sinks: float32.
k_scale, v_scale: float32, `stride` elements from one KV head to the next. scratch: `scratch_bytes` for each thread.
partials: float32, `Shape.partial_floats` for each slot. finished: int64, zeros, for each split piece of work; left as
it was. window: 0 for none. factors: float32 [6], the score scale, the soft cap and 4 ones.
"""

ITEM = (
    "first_row", "num_rows", "position", "kv_len", "first_page", "key_start", "key_stop", "kv_head", "split", "part",
    "num_parts", "first_slot",
)  # fmt: skip
"""first_row, num_rows: of the query tokens. position: of the first of them in its sequence. first_page: in kv_indices.
kv_head: the first. split: which of `finished`; part, num_parts: which of how many; first_slot: of its partials."""

_LEAST_PART = 256  # keys: of fewer the merging costs more than another thread gains
_FIXED_PART = 1024  # in deterministic mode, where a sequence's parts must not follow from its batch-mates
_MOST_FIXED_PARTS = 16
_PARTS_A_THREAD = 4  # so that no thread waits long for the last one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """items: [num_items, len(ITEM)], int32, for `paged_kernel`. num_splits: pieces of work that are in several parts.
    num_slots: parts of these."""

    items: Int32s
    num_splits: int
    num_slots: int


def divide(
    spec: AttentionSpec, host: StepView, seqs: Int64s, *, num_tokens: int, num_heads: int, num_threads: int
) -> Work:
    """The items for some of a step's sequences.

    seqs: [n], int64, by number; each has new tokens. num_tokens, num_heads: query tokens and KV heads of an item.

    A piece of work is some query tokens, some KV heads and all keys that these see. It is cut into equal parts where
    the step has too few pieces to keep the threads busy.
    """
    tiles = -(-host.qo_lens[seqs] // num_tokens)
    of = np.repeat(seqs, tiles)
    token = num_tokens * (np.arange(of.size) - np.repeat(tiles.cumsum() - tiles, tiles))
    num_rows = np.minimum(num_tokens, host.qo_lens[of] - token)
    position = host.prefix_lens[of] + token
    stop = position + num_rows if spec.causal else host.kv_lens[of]
    start = np.zeros_like(stop)
    if spec.sliding_window is not None:  # the first key that the first token sees
        seen_from = position + 1 if spec.causal else host.kv_lens[of]
        start = np.maximum(seen_from - spec.sliding_window, 0)
    slices = spec.num_kv_heads // num_heads
    length = stop - start
    if spec.deterministic:
        # A prompt has pieces enough, and a long sequence parts: neither may fill memory with their results.
        part = np.maximum(_FIXED_PART * np.repeat(tiles, tiles), -(-length // _MOST_FIXED_PARTS))
    else:
        least = int(length.sum()) * slices // (num_threads * _PARTS_A_THREAD)
        part = np.full_like(length, max(least, _LEAST_PART))
    num_parts = np.maximum(-(-length // part), 1)

    first = np.stack([host.qo_indptr[of] + token, num_rows, position, host.kv_lens[of], host.kv_indptr[of]], axis=1)
    piece = np.repeat(np.arange(of.size), slices)
    kv_head = np.tile(np.arange(slices) * num_heads, of.size)
    parts = num_parts[piece]
    is_split = parts > 1
    split = np.where(is_split, is_split.cumsum() - 1, 0)
    slots = np.where(is_split, parts, 0)
    slot = slots.cumsum() - slots
    row = np.repeat(np.arange(piece.size), parts)  # of the pieces, for each item
    number = np.arange(row.size) - np.repeat(parts.cumsum() - parts, parts)
    piece, parts = piece[row], parts[row]
    bounds = [start[piece] + length[piece] * (number + i) // parts for i in (0, 1)]
    items = np.concatenate(
        [first[piece], np.stack([*bounds, kv_head[row], split[row], number, parts, slot[row]], axis=1)], axis=1
    )
    return Work(items=items.astype(np.int32), num_splits=int(is_split.sum()), num_slots=int(slots.sum()))
