"""Dense page tables for kernels that load whole tiles of pages and multiply the values of masked keys by 0.

0 times NaN is NaN. Such a kernel must find finite values in every page that a tile may touch. Behind a sequence's end
in its last page the runtime sees to that (`Capabilities.needs_finite_tails`); which pages fill up a tile's row of the
table is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.attention.window import GraphWindow, table_within_window
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
else:
    torch = lazy_import("torch")


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
        self._fill(table, kv_lens)

    def refresh(self, batch: Batch) -> None:
        """Follows the graph's batch, on the device alone."""
        if self._window is not None:
            self._window.refresh(batch)
        table, kv_lens, _ = self._source(batch)
        self._fill(table, kv_lens)

    def _source(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
        source = self._window or batch
        return source.block_table, source.kv_lens, source.max_kv_len

    def _fill(self, table: torch.Tensor, kv_lens: torch.Tensor) -> None:
        if table.shape[1] == 0:  # no sequence has a token
            return
        self.kv_lens.copy_(kv_lens)
        last = (kv_lens.long() - 1).clamp_(min=0)[:, None] // self._page_size  # column of each sequence's last page
        columns = torch.arange(self.block_table.shape[1], device=table.device)
        self.block_table.copy_(table.gather(1, torch.minimum(columns, last)))
