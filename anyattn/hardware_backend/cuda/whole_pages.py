"""Dense page tables for kernels that load whole tiles of pages and multiply the values of masked keys by 0.

0 times NaN is NaN. Such a kernel must find finite values in every page that a tile may touch: in the slots behind a
sequence's end, where a page of an earlier sequence may hold NaN, and in the pages that fill up a tile's row of the
table. The pool has zeroed pages at first, and never again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.attention.window import GraphWindow, table_within_window
from anyattn.lazy import lazy_import
from anyattn.types import dtype_name

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")

_NOT_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float8_e4m3fn": 0x7F}
"""The bits that are all set in NaN and infinity, and in no other value."""


class WholePages:
    """One step's table, or that of a graph's steps: its tensors stay where they are.

    block_table: [num_seqs, columns], int32; behind a sequence's pages, its last one again, so that no page of others
        is read and the null page only for sequences without tokens.
    kv_lens: [num_seqs], int32. max_kv_len: as in the batch, but for what lies behind the window.
    """

    def __init__(self, batch: Batch, window: int | None, tile: int, *, for_graph: bool = False) -> None:
        """window: of the layers; pages wholly behind it are left out. tile: tokens whose pages a kernel loads at once.

        for_graph: whether `batch` is the one that `AttentionBackend.init_graph` is given; `refresh` then follows it.
        """
        self._page_size = batch.page_size
        self._window = GraphWindow(batch, window) if for_graph and window is not None else None
        table, kv_lens, self.max_kv_len = self._source(batch) if for_graph else table_within_window(batch, window)
        pages_per_tile = -(-tile // batch.page_size)
        columns = max(-(-table.shape[1] // pages_per_tile), 1) * pages_per_tile
        with torch.inference_mode(False):  # steps may come outside of inference mode
            self.block_table = table.new_zeros(table.shape[0], columns)
            self.kv_lens = torch.zeros_like(kv_lens)
            # Of each sequence's last page all slots but the first, which holds a token: where they are, and which of
            # them are behind the end.
            self._offsets = torch.arange(1, batch.page_size, device=table.device)
            self._pages = torch.zeros(table.shape[0], 1, dtype=torch.int64, device=table.device)
            self._behind = torch.zeros(table.shape[0], batch.page_size - 1, dtype=torch.bool, device=table.device)
        self._fill(batch, table, kv_lens)

    def refresh(self, batch: Batch) -> None:
        """Follows the graph's batch, on the device alone."""
        if self._window is not None:
            self._window.refresh(batch)
        table, kv_lens, _ = self._source(batch)
        self._fill(batch, table, kv_lens)

    def _source(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
        source = self._window or batch
        return source.block_table, source.kv_lens, source.max_kv_len

    def _fill(self, batch: Batch, table: torch.Tensor, kv_lens: torch.Tensor) -> None:
        device, page_size = table.device, self._page_size
        if table.shape[1] == 0:  # no sequence has a token
            return
        self.kv_lens.copy_(kv_lens)
        last = (kv_lens.long() - 1).clamp_(min=0)[:, None] // page_size  # column of each sequence's last page
        columns = torch.arange(self.block_table.shape[1], device=device)
        self.block_table.copy_(table.gather(1, torch.minimum(columns, last)))
        self._pages.copy_(table.gather(1, last))
        # Of sequences with new tokens only, as their last page is theirs alone.
        is_behind = self._offsets >= kv_lens[:, None] - last * page_size
        self._behind.copy_(is_behind & (batch.qo_indptr.diff() > 0)[:, None])

    def make_finite(self, kv: LayerKV) -> None:
        """Writes 0 over what is not finite in one layer's slots behind the ends of sequences, before a kernel reads.

        Nothing else changes: finite values stay, as a later step may have stored its tokens there.
        """
        keys, values = kv.nhd()
        for part in (keys,) if kv.v_in_k else (keys, values):
            bits = _NOT_FINITE[dtype_name(part.dtype)]
            words = part.view(torch.uint8 if part.element_size() == 1 else torch.int16)
            tails = words[self._pages, self._offsets]  # [num_seqs, page_size - 1, heads, dim]
            left_behind = ((tails & bits) == bits) & self._behind[:, :, None, None]
            words.index_put_((self._pages, self._offsets), tails.masked_fill_(left_behind, 0))
