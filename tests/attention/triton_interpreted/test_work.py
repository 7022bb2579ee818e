"""How a step's work is divided: every block is somebody's, nobody's twice, and what is divided is merged."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyattn.attention.triton_attention import work

BLOCK_N, OVERHEAD = 16, 1
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

sequences = st.tuples(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 900)).map(lambda pair: (pair[0], sum(pair) if pair[0] else 0)),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([1] * 5 + [40]),  # some times more sequences than are looked at together
).map(lambda drawn: drawn[0] * drawn[1])
"""New tokens of each sequence, and all of its tokens; padding has neither."""


def tables(seqs):
    qo_indptr = np.concatenate([[0], np.cumsum([new for new, _ in seqs])]).astype(np.int32)
    return torch.from_numpy(qo_indptr), torch.tensor([length for _, length in seqs], dtype=torch.int32)


def blocks_of(new, length, window):
    first = 0 if window is None else max(length - new + 1 - window, 0) // BLOCK_N
    return max(-(-length // BLOCK_N) - first, 1)


def ranges(seqs, programs, least, most_new, window=None):
    records = torch.full((programs, work.RECORD), -7, dtype=torch.int32)
    merges = torch.full((min(len(seqs), programs), work.MERGE), -7, dtype=torch.int32)
    grid = (-(-programs // work.PROGRAMS), 1, 1)
    work.ranges_kernel[grid](
        *tables(seqs), len(seqs), programs, 1, most_new, window, least, records, merges, BLOCK_N, OVERHEAD, work.SEQS,
        work.PROGRAMS,
    )  # fmt: skip
    return records.tolist(), merges.tolist()


@few
@given(sequences, st.integers(1, 40), st.integers(1, 4), st.sampled_from([None, 1, 30]), st.sampled_from([16, 40]))
def test_ranges_cover_every_block_of_every_served_sequence_once(seqs, programs, least, window, most_new):
    records, merges = ranges(seqs, programs, least, most_new, window)
    served = {i: blocks_of(*seq, window) for i, seq in enumerate(seqs) if 0 < seq[0] <= most_new}
    covered = {i: np.zeros(count + OVERHEAD, dtype=int) for i, count in served.items()}
    parts = {i: [] for i in served}
    slots = []
    for program, (seq, _, place, left, *_) in enumerate(records):
        while seq >= 0 and left > 0:
            if seq in served:
                taken = min(served[seq] + OVERHEAD - place, left)
                assert taken > 0
                covered[seq][place : place + taken] += 1
                parts[seq].append(program)
                if taken < served[seq] + OVERHEAD:
                    slots.append(2 * program + (place == 0))
                left, place = left - taken, 0
            seq += 1
    assert all((each == 1).all() for each in covered.values())
    assert len(slots) == len(set(slots))
    assert all(given == list(range(given[0], given[0] + len(given))) for given in parts.values())
    listed = {seq: (count, first) for count, first, seq, _ in merges if count}
    assert listed == {seq: (len(given), given[0]) for seq, given in parts.items() if len(given) > 1}


@few
@given(sequences, st.integers(1, 40))
def test_ranges_differ_by_one_block_at_most(seqs, programs):
    records, _ = ranges(seqs, programs, 1, 40)
    lengths = [record[3] for record in records if record[0] >= 0]
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_sequences_of_one_length_are_divided_at_their_ends():
    records, merges = ranges([(1, 160)] * 8, 33, 1, 1)
    assert sum(record[0] >= 0 for record in records) == 32
    assert [count for count, *_ in merges] == [4] * 8
    records, merges = ranges([(1, 160)] * 32, 17, 1, 1)
    assert sum(record[0] >= 0 for record in records) == 16
    assert not any(count for count, *_ in merges)


def parts(seqs, programs, num_merges, *, least, most_parts, slots, block_m=16, rows=4):
    records = torch.full((programs, work.RECORD), -7, dtype=torch.int32)
    merges = torch.full((max(num_merges, 1), work.MERGE), -7, dtype=torch.int32)
    grid = (-(-programs // work.PROGRAMS), 1, 1)
    work.parts_kernel[grid](
        *tables(seqs), len(seqs), programs, 1, 1 << 30, None, least, most_parts, slots, records, merges, num_merges,
        BLOCK_N, block_m, rows, work.SEQS, work.PROGRAMS,
    )  # fmt: skip
    return records.tolist(), merges.tolist()


@few
@given(sequences, st.integers(1, 3), st.integers(0, 20))
def test_parts_cover_every_tile_of_every_sequence_once(seqs, least, slots):
    tiles = {i: -(-new * 4 // 16) for i, (new, _) in enumerate(seqs) if new}
    num_tiles = sum(tiles.values())
    most = 8 if slots == 0 else 1 << 30
    room = num_tiles * 8 if slots == 0 else num_tiles + 2 * slots
    records, merges = parts(seqs, room + 3, num_tiles + 2, least=least, most_parts=most, slots=slots)
    found = {}
    for program, (seq, tile, part, count, *lengths) in enumerate(records):
        if seq >= 0:
            found.setdefault((seq, tile), []).append((part, count, program))
            assert lengths[1:3] == [seqs[seq][0], seqs[seq][1]]
    assert found.keys() == {(seq, tile) for seq, count in tiles.items() for tile in range(count)}
    for given_parts in found.values():
        count, first = given_parts[0][1], given_parts[0][2]
        assert given_parts == [(part, count, first + part) for part in range(count)]
    listed = {(seq, tile): (count, first) for count, first, seq, tile in merges[:num_tiles] if count}
    assert listed == {key: (each[0][1], each[0][2]) for key, each in found.items() if len(each) > 1}
    assert all(merge[0] == 0 for merge in merges[num_tiles:])


@few
@given(sequences, sequences)
def test_deterministic_parts_of_a_sequence_do_not_depend_on_the_others(seqs, others):
    def counts(batch):
        num_tiles = sum(-(-new * 4 // 16) for new, _ in batch)
        records, _ = parts(batch, num_tiles * 8 + 1, num_tiles, least=2, most_parts=8, slots=0)
        return {(record[0], record[1]): record[3] for record in records if record[0] >= 0}

    alone, together = counts(seqs), counts(seqs + others)
    assert all(together[key] == count for key, count in alone.items())
