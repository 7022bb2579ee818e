"""How `intel_cpu` divides a step, without its kernels: every key that a token sees is attended just once."""

import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyattn import AttentionSpec
from anyattn.attention.reference import visible
from anyattn.hardware_backend.intel import cpu_prefill, cpu_work
from anyattn.hardware_backend.intel.cpu_prefill import GatheredPrefill
from anyattn.hardware_backend.intel.cpu_work import ITEM, divide

SMALL_PARTS = {"_LEAST_PART": 3, "_FIXED_PART": 5}
"""So that short sequences are cut as long ones are."""
SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 23)), min_size=1, max_size=5)
"""Tokens of each sequence before the step, and its new ones."""
MASKS = st.sampled_from([(True, None), (False, None), (True, 1), (True, 2), (True, 7), (True, 500)])
"""Whether causal, and the window."""


def step_of(sequences, page_size=1):
    """What a step's host view says of them."""
    before, new = (np.array(lens, dtype=np.int64) for lens in zip(*sequences, strict=True))
    pages = -(-(before + new) // page_size)
    qo_indptr, kv_indptr = (np.concatenate([[0], lens.cumsum()]).astype(np.int32) for lens in (new, pages))
    return SimpleNamespace(
        qo_lens=new, prefix_lens=before, kv_lens=before + new, qo_indptr=qo_indptr, kv_indptr=kv_indptr
    )


def spec_of(mask, *, num_kv_heads=2, **fields):
    causal, window = mask
    heads = {"num_qo_heads": 2 * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": 8}
    return AttentionSpec(**heads, causal=causal, sliding_window=window, **fields)


def divided(spec, host, seqs=None, *, num_tokens=1, num_heads=1, num_threads=2):
    """The work, and its items by the names of their fields."""
    seqs = np.arange(host.kv_lens.size) if seqs is None else np.array(seqs)
    with mock.patch.multiple(cpu_work, **SMALL_PARTS):
        work = divide(spec, host, seqs, num_tokens=num_tokens, num_heads=num_heads, num_threads=num_threads)
    assert work.items.dtype == np.int32
    assert work.items.flags.c_contiguous
    return work, [SimpleNamespace(**dict(zip(ITEM, row, strict=True))) for row in work.items.tolist()]


@given(
    SEQUENCES, MASKS, st.booleans(), st.integers(1, 8), st.sampled_from([(4, 1), (4, 2), (4, 4), (3, 3)]),
    st.integers(1, 9), st.data(),
)  # fmt: skip
def test_each_key_that_a_token_sees_is_in_one_part_of_one_item(
    sequences, mask, deterministic, num_tokens, heads, num_threads, data
):
    num_kv_heads, num_heads = heads
    spec, host = spec_of(mask, num_kv_heads=num_kv_heads, deterministic=deterministic), step_of(sequences)
    seqs = sorted(data.draw(st.sets(st.integers(0, len(sequences) - 1), min_size=1)))
    work, items = divided(
        spec, host, seqs, num_tokens=num_tokens, num_heads=num_heads, num_threads=num_threads
    )
    times = {seq: np.zeros((host.qo_lens[seq], num_kv_heads, host.kv_lens[seq]), dtype=int) for seq in seqs}
    for item in items:
        seq = int(np.searchsorted(host.qo_indptr, item.first_row, side="right")) - 1
        row = item.first_row - host.qo_indptr[seq]
        assert seq in seqs
        assert 1 <= item.num_rows <= num_tokens
        assert (item.position, item.kv_len) == (host.prefix_lens[seq] + row, host.kv_lens[seq])
        assert item.first_page == host.kv_indptr[seq]
        assert item.kv_head % num_heads == 0
        rows, kv_heads = slice(row, row + item.num_rows), slice(item.kv_head, item.kv_head + num_heads)
        assert times[seq][rows, kv_heads].shape[:2] == (item.num_rows, num_heads)
        times[seq][rows, kv_heads, item.key_start : item.key_stop] += 1
        seen = visible(spec, host.qo_lens[seq], host.kv_lens[seq], "cpu")[rows].any(dim=0).nonzero()
        assert seen.min() <= item.key_start < item.key_stop <= seen.max() + 1, "what none of its tokens sees is read"
    for seq in seqs:
        seen = visible(spec, host.qo_lens[seq], host.kv_lens[seq], "cpu").numpy()[:, None]
        assert (times[seq][np.broadcast_to(seen, times[seq].shape)] == 1).all()
    assert work.num_slots == sum(item.num_parts > 1 for item in items)


@given(SEQUENCES, MASKS, st.booleans(), st.integers(1, 8), st.integers(1, 9))
def test_what_is_split_has_a_counter_and_slots_of_its_own(sequences, mask, deterministic, num_tokens, num_threads):
    spec, host = spec_of(mask, deterministic=deterministic), step_of(sequences)
    work, items = divided(spec, host, num_tokens=num_tokens, num_threads=num_threads)
    pieces, slots = {}, []
    for item in items:
        if item.num_parts > 1:
            pieces.setdefault(item.split, []).append(item)
            slots.append(item.first_slot + item.part)
    assert sorted(pieces) == list(range(work.num_splits))
    assert sorted(slots) == list(range(work.num_slots))
    for parts in pieces.values():
        parts.sort(key=lambda item: item.part)
        assert [item.part for item in parts] == list(range(parts[0].num_parts))
        for one, following in itertools.pairwise(parts):
            assert one.key_stop == following.key_start
            for name in ("first_row", "num_rows", "kv_head", "num_parts", "first_slot"):
                assert getattr(one, name) == getattr(following, name)


@given(SEQUENCES, MASKS, st.integers(1, 8), st.integers(1, 9), st.data())
def test_in_deterministic_mode_parts_follow_from_the_sequence_alone(sequences, mask, num_tokens, num_threads, data):
    spec = spec_of(mask, deterministic=True)
    of_seq = data.draw(st.integers(0, len(sequences) - 1))
    host, alone = step_of(sequences), step_of([sequences[of_seq]])

    def cuts(host, seq, num_threads):
        """The items of one sequence, without what numbers the step's."""
        rows = range(host.qo_indptr[seq], host.qo_indptr[seq + 1])
        fields = ("num_rows", "position", "key_start", "key_stop", "kv_head", "part", "num_parts")
        items = divided(spec, host, num_tokens=num_tokens, num_threads=num_threads)[1]
        return [tuple(getattr(item, name) for name in fields) for item in items if item.first_row in rows]

    assert cuts(host, of_seq, num_threads) == cuts(alone, 0, 1)


@pytest.mark.parametrize("num_threads", [1, 2, 64])
def test_one_long_sequence_is_cut_for_all_threads_and_many_short_ones_not_at_all(num_threads):
    spec, many = spec_of((True, None)), 8 * 64
    long = divide(spec, step_of([(99_999, 1)]), np.arange(1), num_tokens=1, num_heads=2, num_threads=num_threads)
    assert num_threads <= len(long.items) <= 8 * num_threads
    short = divide(
        spec, step_of([(299, 1)] * many), np.arange(many), num_tokens=1, num_heads=2, num_threads=num_threads
    )
    assert (len(short.items), short.num_splits, short.num_slots) == (many, 0, 0)


@pytest.mark.parametrize("deterministic", [False, True], ids=["as fast as may be", "deterministic"])
def test_a_prompt_s_parts_are_no_more_than_its_tiles_and_its_length_ask_for(deterministic):
    """As each part has a slot in memory: with as many parts for each tile, a prompt of 32k tokens would fill 8 GiB."""
    spec, tokens = spec_of((True, None), deterministic=deterministic), 32_768
    work = divide(spec, step_of([(0, tokens)]), np.arange(1), num_tokens=8, num_heads=1, num_threads=2)
    assert work.num_slots <= spec.num_kv_heads * (tokens // 8 + tokens // 1024)


def prefill_step(before, new, page_size):
    """A batch of two sequences whose second has these tokens; its pages are numbered from 0."""
    host = step_of([(0, 3), (before, new)], page_size)
    others, pages = host.kv_indptr[1], host.kv_indptr[2] - host.kv_indptr[1]
    kv_indices = torch.cat([torch.full((int(others),), -1), torch.arange(int(pages))]).int()
    return SimpleNamespace(host=host, kv_indices=kv_indices)


def keys_of(piece, page_size):
    """The positions of a piece's keys, in the order in which it has them."""
    return (piece.pages[:, None] * page_size + torch.arange(page_size)).flatten()[piece.tokens]


@given(
    st.integers(0, 70), st.integers(1, 70), MASKS, st.sampled_from([1, 3, 16]), st.integers(1, 90), st.integers(1, 40)
)
def test_each_query_of_a_prompt_sees_each_of_its_keys_in_one_piece(before, new, mask, page_size, room, queries):
    """room: tokens that buffers hold. queries: of a block with a window."""
    spec = spec_of(mask)
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * 2
    with mock.patch.multiple(cpu_prefill, _BUFFER_BYTES=room * token_bytes, _WINDOW_QUERIES=queries):
        blocks = GatheredPrefill(spec, page_size).plan(prefill_step(before, new, page_size), 1)
    seen = visible(spec, new, before + new, "cpu")
    times = torch.zeros(seen.shape, dtype=torch.int64)
    rows = [row for block in blocks for row in range(block.rows.start, block.rows.stop)]
    assert rows == list(range(3, 3 + new)), "the step's other tokens are the first three"
    for block in blocks:
        query = torch.arange(block.rows.start, block.rows.stop) - 3
        for piece in block.pieces:
            keys = keys_of(piece, page_size)
            assert 0 < keys.numel() <= max(room, page_size)
            attended = torch.ones(query.numel(), keys.numel(), dtype=torch.bool)
            if piece.is_causal:
                assert query.numel() == keys.numel(), "torch aligns its causal mask top-left"
                attended = attended.tril()
            if piece.mask is not None:
                assert piece.mask.dtype == torch.bfloat16
                assert ((piece.mask == 0) | piece.mask.isneginf()).all()
                attended = piece.mask == 0
            assert attended.any(dim=1).all(), "a query that sees nothing of a piece gets NaN of it"
            times[query[:, None], keys] += attended
    assert torch.equal(times, seen.long())


def test_masks_of_a_long_prompt_s_window_take_no_more_than_one_gathered_copy():
    """A plan keeps them until the step is done, of all blocks."""
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, sliding_window=4096)
    blocks = GatheredPrefill(spec, 16).plan(prefill_step(0, 40_000, 16), 1)
    masks = {piece.mask.data_ptr(): piece.mask for block in blocks for piece in block.pieces if piece.mask is not None}
    assert sum(mask.numel() * mask.element_size() for mask in masks.values()) <= 1 << 25
