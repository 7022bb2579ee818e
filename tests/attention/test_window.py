"""Pages behind a window are left out of a step's tables, and nothing else changes."""

import secrets

import numpy as np
import pytest
import torch

from anyattn.attention.batch import Batch
from anyattn.attention.graph import GraphBatch, GraphSizes
from anyattn.attention.window import GraphWindow, csr_within_window, table_within_window
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.windows import WindowPages
from anyattn.types import GraphLevel

MOST_PAGES = 5 * (3 * 39 + 8)
"""Of five sequences, at one token a page."""


def random_step(page_size, window, counts=None):
    """A table with a window's pages, and a batch of its last step."""
    random = np.random.default_rng(secrets.randbelow(1 << 31))
    allocators = [PagedAllocator(MOST_PAGES, page_size) for _ in range(2)]
    windows = [WindowPages(window, allocators[1], num_pages=MOST_PAGES, page_size=page_size)]
    table = PageTable(allocators[0], page_size, windows=windows)
    seqs = table.new_sequences(5)
    for _ in range(3):
        view = table.extend(seqs, random.integers(0, 40, 5).tolist())
        view.tensors()
    view = table.extend(seqs, counts or random.integers(0, 9, 5).tolist())
    return table, Batch.from_view(view, view.tensors())


def needed(batch, window, i):
    """Page ids of the pages that some new token of a sequence sees."""
    first = max(int(batch.host.prefix_lens[i]) + 1 - window, 0) // batch.page_size
    return batch.windows[0].block_table[i, first : int(batch.host.num_pages[i])].tolist()


@pytest.mark.parametrize("window", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_table_keeps_the_pages_that_are_seen_and_lengths_that_end_where_they_did(page_size, window):
    _, batch = random_step(page_size, window)
    block_table, kv_lens, max_kv_len = table_within_window(batch.windows[0], window)
    indptr, indices, lens = csr_within_window(batch.windows[0], window)
    assert max_kv_len == kv_lens.max() == lens.max()
    assert block_table.dtype == kv_lens.dtype == indices.dtype == torch.int32
    for i in range(5):
        pages = needed(batch, window, i)
        assert 0 not in pages
        assert block_table[i, : len(pages)].tolist() == indices[indptr[i] : indptr[i + 1]].tolist() == pages
        assert kv_lens[i] == lens[i] == batch.host.kv_lens[i] - page_size * (batch.host.num_pages[i] - len(pages))


@pytest.mark.parametrize("window", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("qo_len", [1, 4])
def test_a_graph_keeps_them_in_tensors_that_stay(page_size, window, qo_len):
    table, batch = random_step(page_size, window, [qo_len] * 5)
    sizes = GraphSizes(level=GraphLevel.UNIFORM, num_seqs=7, num_tokens=7 * qo_len, max_kv_len=200)
    graph = GraphBatch(table, sizes)
    static = GraphWindow(graph.batch.windows[0], window)
    addresses = static.block_table.data_ptr(), static.kv_lens.data_ptr()
    static.refresh(graph.refresh(batch).windows[0])
    assert addresses == (static.block_table.data_ptr(), static.kv_lens.data_ptr())
    block_table, kv_lens, max_kv_len = table_within_window(batch.windows[0], window)
    assert static.kv_lens.tolist() == [*kv_lens.tolist(), 0, 0]
    assert static.max_kv_len >= max_kv_len
    for i in range(5):
        pages = needed(batch, window, i)
        assert static.block_table[i, : len(pages)].tolist() == block_table[i, : len(pages)].tolist() == pages


def test_nothing_is_copied_where_nothing_is_behind():
    _, batch = random_step(4, 1000)
    assert table_within_window(batch, None)[0] is batch.block_table
    assert table_within_window(batch.windows[0], 1000)[0] is batch.windows[0].block_table
    assert csr_within_window(batch, None)[1] is batch.kv_indices
