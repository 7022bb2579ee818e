"""CSR, dense table and slots of a batch are views of one page table."""

import pytest
import torch

import anyattn


def runtime(page_size):
    spec = anyattn.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32", tree_mask=True)
    return anyattn.create_runtime(spec, num_layers=1, num_pages=200, page_size=page_size, device="cpu")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_csr_dense_and_slots_agree(page_size):
    rt = runtime(page_size)
    seqs = rt.new_sequences(3)
    rt.extend(seqs, [7, 0, 31])
    batch = rt.extend(seqs, [2, 1, 5])
    assert batch.qo_indptr.tolist() == [0, 2, 3, 8]
    assert batch.kv_lens.tolist() == [9, 1, 36]
    assert batch.positions.tolist() == [7, 8, 0, *range(31, 36)]
    slots = []
    for i in range(3):
        pages = batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]].tolist()
        dense = batch.block_table[i].tolist()
        assert dense == pages + [0] * (batch.block_table.shape[1] - len(pages))
        assert 0 not in pages
        length = (len(pages) - 1) * page_size + batch.kv_last_page_len[i].item()
        assert length == batch.kv_lens[i]
        own = batch.positions[batch.qo_indptr[i] : batch.qo_indptr[i + 1]].tolist()
        slots += [pages[position // page_size] * page_size + position % page_size for position in own]
    assert batch.out_slots.tolist() == slots
    assert {t.dtype for t in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.block_table)} == {torch.int32}
    assert batch.out_slots.dtype == batch.positions.dtype == torch.int64


@pytest.mark.parametrize(
    ("prefixes", "counts", "trees", "phase"),
    [
        ([0, 0], [4, 1], False, "prefill"),
        ([3, 0], [4, 2], False, "prefill"),
        ([3, 2], [1, 4], False, "mixed"),
        ([3, 2], [1, 1], False, "decode"),
        ([3, 2], [0, 1], False, "mixed"),
        ([3, 2], [0, 4], False, "prefill"),
        ([0, 0], [0, 0], False, "prefill"),
        ([3, 2], [2, 2], True, "verify"),
    ],
)
def test_the_phase_follows_from_the_lengths(prefixes, counts, trees, phase):
    rt = runtime(4)
    seqs = rt.new_sequences(2)
    rt.extend(seqs, prefixes)
    assert rt.extend(seqs, counts, tree_masks=[None, None] if trees else None).phase == phase
