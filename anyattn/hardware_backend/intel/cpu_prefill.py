"""Prefill on the CPU: torch's flash attention over pieces of one sequence, gathered from its pages.

`scaled_dot_product_attention` uses AMX or AVX-512 where there are, which compute binds prefill to. It costs what it
costs on contiguous tensors, as gathering takes a hundredth of it. New tokens attend to themselves with its causal mask
and to what was there before with none, which is faster than a mask over both; the results are merged by their LSE.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import
from anyattn.mem_cache.pool import dequantize
from anyattn.types import DTYPE_BYTES

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")
    F = lazy_import("torch.nn.functional")

_BUFFER_BYTES = 1 << 25
"""Of keys and values that are gathered together: 8192 tokens of 8 heads of 128 bfloat16; and of the results of a block
of queries in float32: 2048 tokens of 32 heads."""
_WINDOW_QUERIES = 512  # of a block with a window's mask: bounds it, and lets keys outside be left out


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Keys that a block's queries see.

    pages: [num_pages], int32. tokens: which of those pages' tokens. is_causal: whether query i sees keys 0 to i.
    mask: [num_queries, num_keys], bool; None where all keys are seen.
    """

    pages: torch.Tensor
    tokens: slice
    is_causal: bool = False
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """rows: of the step's tokens, of one sequence. pieces: the keys that they see, in disjoint parts."""

    rows: slice
    pieces: list[_Piece]


class _Masks(dict[tuple[int, int, int], "torch.Tensor"]):
    """A step's masks by the number of queries, and by the first and last key's distance from the first query."""


class GatheredPrefill:
    """Attends to whole sequences, whose values are no longer than their keys: they are padded to these.

    It gathers 32 MiB at a time, in two copies, and has a block's results several times, in 32 MiB each at most, however
    long the sequences are.
    """

    def __init__(self, spec: AttentionSpec, page_size: int) -> None:
        self._spec = spec
        self._page_size = page_size
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        token_bytes = spec.num_kv_heads * spec.head_dim * (1 if spec.is_mla else 2) * DTYPE_BYTES[spec.dtype]
        pages = max(_BUFFER_BYTES // (token_bytes * page_size), 1)
        self._tokens = pages * page_size  # gathered at a time
        self._rows = max(_BUFFER_BYTES // (spec.num_qo_heads * spec.head_dim * 4), 1)
        self._buffers: dict[str, torch.Tensor] = {}

    def plan(self, batch: Batch, seq: int) -> list[Block]:
        """The blocks of one sequence, by number."""
        host, spec = batch.host, self._spec
        num_new, prefix, length = int(host.qo_lens[seq]), int(host.prefix_lens[seq]), int(host.kv_lens[seq])
        first = int(host.qo_indptr[seq])
        pages = batch.kv_indices[int(host.kv_indptr[seq]) : int(host.kv_indptr[seq + 1])]
        window = spec.sliding_window
        step = min(self._rows, self._tokens if window is None else min(_WINDOW_QUERIES, max(self._tokens // 2, 1)))
        blocks, masks = [], _Masks()
        for start in range(0, num_new, step):
            stop = min(start + step, num_new)
            if window is not None:
                pieces = self._windowed(pages, prefix + start, prefix + stop, window, masks)
            elif spec.causal:
                pieces = [self._piece(pages, *ends) for ends in self._cut(0, prefix + start)]
                pieces.append(self._piece(pages, prefix + start, prefix + stop, is_causal=True))
            else:
                pieces = [self._piece(pages, *ends) for ends in self._cut(0, length)]
            blocks.append(Block(rows=slice(first + start, first + stop), pieces=pieces))
        return blocks

    def _cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Nearly equal parts of a range of keys: each more than half as long as may be."""
        count = -(-(stop - start) // self._tokens)
        ends = [start + (stop - start) * i // count for i in range(count + 1)] if count else []
        return list(itertools.pairwise(ends))

    def _piece(
        self, pages: torch.Tensor, start: int, stop: int, *, is_causal: bool = False, mask: torch.Tensor | None = None
    ) -> _Piece:
        first, last = start // self._page_size, -(-stop // self._page_size)
        offset = first * self._page_size
        return _Piece(pages[first:last], slice(start - offset, stop - offset), is_causal, mask)

    def _windowed(self, pages: torch.Tensor, start: int, stop: int, window: int, masks: _Masks) -> list[_Piece]:
        """For the queries at `start` to `stop`. To a window of 4096, one mask is over all their keys; over more,
        whose masks would be large, just those keys have one that only some queries see.

        A query that sees nothing of a piece would get NaN. Of the parts of one mask none has fewer keys than there are
        queries, so that the last query sees the end of the first, and the first one the beginning of the last; the
        other kind ends behind the first key that the last query sees. Most blocks share a mask, as it depends on
        distances alone.
        """
        first, common = (max(query + 1 - window, 0) for query in (start, stop - 1))
        if window <= 8 * _WINDOW_QUERIES:
            return [self._masked(pages, (start, stop), ends, window, masks) for ends in self._cut(first, stop)]
        pieces = []
        if first < common:
            pieces.append(self._masked(pages, (start, stop), (first, common + 1), window, masks))
            first = common + 1
        pieces += [self._piece(pages, *ends) for ends in self._cut(first, start)]
        return [*pieces, self._piece(pages, start, stop, is_causal=True)]

    def _masked(
        self, pages: torch.Tensor, queries: tuple[int, int], keys: tuple[int, int], window: int, masks: _Masks
    ) -> _Piece:
        place = (queries[1] - queries[0], keys[0] - queries[0], keys[1] - queries[0])
        if place not in masks:
            query, key = torch.arange(place[0])[:, None], torch.arange(*place[1:])
            seen = (key <= query) & (key > query - window)
            masks[place] = torch.where(seen, 0.0, float("-inf")).to(self._dtype)
        return self._piece(pages, *keys, mask=masks[place])

    def run(
        self, q: torch.Tensor, kv: LayerKV, blocks: list[Block], out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """q, out: as for `AttentionBackend.run`. lse: [num_tokens, num_qo_heads], float32, written where given."""
        for block in blocks:
            merged = block_lse = None
            for piece in block.pieces:
                part, part_lse = self._attend(q[block.rows], kv, piece)
                if merged is None or block_lse is None:
                    merged, block_lse = part, part_lse
                else:
                    merged, block_lse = _merge(merged, block_lse, part, part_lse)
            assert merged is not None
            assert block_lse is not None
            out[block.rows] = merged[..., : out.shape[-1]]
            if lse is not None:
                lse[block.rows] = block_lse

    def _attend(self, q: torch.Tensor, kv: LayerKV, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """q: [num_queries, num_qo_heads, head_dim]. Returns results of that shape, in q's dtype, and their LSE."""
        k_pages, v_pages = kv.nhd()
        k = self._gather("k", k_pages, kv.k_scale, piece)
        # MLA's values are the first part of its keys: with all of them one product is longer, and nothing is copied.
        v = k if kv.v_in_k else self._gather("v", v_pages, kv.v_scale, piece)
        # Between a head's rows lie a power of 2 of bytes, which the caches' lines share: copied, it is far faster.
        queries, scale = q.transpose(0, 1).contiguous(), self._spec.scale
        # What scaled_dot_product_attention calls on CPUs; by its own name, as it alone returns the LSE. From torch 2.9
        # on it takes groups of query heads (pytorch pull request 157893).
        result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries[None], k[None], v[None], 0.0, piece.is_causal, attn_mask=piece.mask, scale=scale
        )
        return result[0].transpose(0, 1), lse[0].T

    def _gather(self, name: str, pages: torch.Tensor, scale: float | torch.Tensor, piece: _Piece) -> torch.Tensor:
        """[num_kv_heads, num_tokens, head_dim], in q's dtype, contiguous."""
        indices = piece.pages
        raw = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages  # torch has no index_select for fp8
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < indices.numel():
            size = max(indices.numel(), 0 if buffer is None else 2 * buffer.shape[0])
            size = max(min(size, self._tokens // self._page_size + 1), indices.numel())
            with torch.inference_mode(False):  # later steps may run outside of inference mode
                buffer = torch.empty((size, *raw.shape[1:]), dtype=raw.dtype)
            self._buffers[name] = buffer
        taken = torch.index_select(raw, 0, indices, out=buffer[: indices.numel()])
        plain = dequantize(taken.view(pages.dtype), scale, self._dtype).flatten(0, 1)[piece.tokens].transpose(0, 1)
        missing = self._spec.head_dim - plain.shape[2]  # torch's operator has one size for keys and values
        return F.pad(plain, (0, missing)) if missing else plain.contiguous()


def _merge(
    left: torch.Tensor, left_lse: torch.Tensor, right: torch.Tensor, right_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two disjoint sets of keys. All rows see something in one of them."""
    weight = torch.sigmoid(right_lse - left_lse).unsqueeze(-1)
    return torch.lerp(left.float(), right.float(), weight), torch.logaddexp(left_lse, right_lse)
