"""A decode step's table and lengths for aiter's kernels over whole pages, within the layers' window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.attention.window import GraphWindow, table_within_window
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
else:
    torch = lazy_import("torch")


class SingleToken:
    """One step, or a graph's steps: its tensors stay where they are.

    block_table: [num_seqs, columns], int32. kv_lens: [num_seqs], int32, at least 1: rows of a graph's padding attend to
        the null page's first token, as the kernels expect a sequence to have one. max_kv_len: of any.
    """

    def __init__(self, batch: Batch, window: int | None, *, for_graph: bool = False) -> None:
        """window: of the layers; pages wholly behind it are left out, as the null page may stand for them.

        for_graph: whether `batch` is the one that `AttentionBackend.init_graph` is given; `refresh` then follows it.
        """
        self._window = GraphWindow(batch, window) if for_graph and window is not None else None
        if for_graph:
            source = self._window or batch
            self.block_table, self.max_kv_len = source.block_table, max(source.max_kv_len, 1)
            with torch.inference_mode(False):
                self.kv_lens = source.kv_lens.clamp(min=1)
        else:
            self.block_table, self.kv_lens, self.max_kv_len = table_within_window(batch, window)

    def buffer_like_q(self, spec: AttentionSpec) -> torch.Tensor:
        """[num_seqs, num_qo_heads, head_dim], of the queries' dtype: it may be written to in any mode."""
        shape, dtype = (self.kv_lens.shape[0], spec.num_qo_heads, spec.head_dim), getattr(torch, spec.dtype)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self.kv_lens.device)

    def refresh(self, batch: Batch) -> None:
        """Follows the graph's batch, on the device alone."""
        if self._window is not None:
            self._window.refresh(batch)
        torch.clamp((self._window or batch).kv_lens, min=1, out=self.kv_lens)
