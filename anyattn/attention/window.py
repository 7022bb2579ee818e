"""A step's page tables without the pages that lie wholly behind every query's window.

Where layers keep their window's pages only, the null page stands for the others, and many kernels multiply whatever a
masked key's value holds by 0, which is NaN where that is NaN. Causal masks and windows count from the sequences' ends,
so that leaving out whole pages at their beginnings changes nothing else, and there is less to look up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import indptr, token_positions

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.mem_cache.indices import Int32s, Int64s
    from anyattn.mem_cache.step_view import StepView
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


def pages_behind_window(host: StepView, window: int | None) -> Int64s | None:
    """[num_seqs]: how many pages at each sequence's beginning no new token sees. None where that is none at all."""
    if window is None:
        return None
    behind: Int64s = np.maximum(host.prefix_lens + 1 - window, 0) // host.page_size
    return behind if behind.any() else None


def csr_within_window(batch: Batch, window: int | None) -> tuple[Int32s, torch.Tensor, Int64s]:
    """The batch's kv_indptr on the host, kv_indices on the device and kv_lens on the host, without such pages."""
    host = batch.host
    behind = pages_behind_window(host, window)
    if behind is None:
        return host.kv_indptr, batch.kv_indices, host.kv_lens
    owner, column = token_positions(behind, host.num_pages)
    (places,) = to_device([host.kv_indptr[owner] + column], batch.kv_indices.device, wide=1)
    return indptr(host.num_pages - behind), batch.kv_indices[places], host.kv_lens - behind * host.page_size


def table_within_window(batch: Batch, window: int | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The batch's block_table and kv_lens on the device, and its max_kv_len, without such pages."""
    behind = pages_behind_window(batch.host, window)
    if behind is None:
        return batch.block_table, batch.kv_lens, batch.max_kv_len
    host = batch.host
    kv_lens = host.kv_lens - behind * host.page_size
    lens, first = to_device([kv_lens, behind], batch.block_table.device, wide=1)
    columns = int((host.num_pages - behind).max(initial=0))
    return _shifted(batch.block_table, first, columns), lens, int(kv_lens.max(initial=0))


class GraphWindow:
    """`table_within_window` of a graph's steps, in tensors that stay.

    block_table: [num_seqs, max_pages], int32. kv_lens: [num_seqs], int32. max_kv_len: of any step.
    """

    def __init__(self, batch: Batch, window: int) -> None:
        """batch: the one that `AttentionBackend.init_graph` is given."""
        self._window = window
        # Of a page that is partly behind the window of the first new token, as little as one token may be within it.
        reach = window + batch.max_qo_len - 1 + batch.page_size - 1
        self.max_kv_len = min(batch.max_kv_len, reach)
        columns = min(-(-reach // batch.page_size), batch.block_table.shape[1])
        with torch.inference_mode(False):
            self.block_table = torch.zeros_like(batch.block_table[:, :columns])
            self.kv_lens = torch.zeros_like(batch.kv_lens)
        self.refresh(batch)

    def refresh(self, batch: Batch) -> None:
        """Follows the batch's tensors, on the device alone."""
        qo_lens = batch.qo_indptr.diff()
        behind = (batch.kv_lens - qo_lens + (1 - self._window)).clamp_(min=0) // batch.page_size
        torch.sub(batch.kv_lens, behind * batch.page_size, out=self.kv_lens)
        self.block_table.copy_(_shifted(batch.block_table, behind.long(), self.block_table.shape[1]))


def _shifted(block_table: torch.Tensor, first: torch.Tensor, columns: int) -> torch.Tensor:
    """[num_seqs, columns]: each row from its first page on; what is behind its last page is any page of its row."""
    places = first[:, None] + torch.arange(columns, device=first.device)
    return block_table.gather(1, places.clamp_(max=block_table.shape[1] - 1))
