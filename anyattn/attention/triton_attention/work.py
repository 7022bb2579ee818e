"""Who computes what: kernels that divide a step's work among programs, from lengths that only the device knows.

A sequence's query tokens, times the heads of a group that share a KV head, are rows; BLOCK_M of them are a tile. Keys
are counted in blocks of BLOCK_N. There are two ways to divide the work:

Ranges, for steps of few rows: all sequences' blocks lie on one line, which is cut into equal lengths, one a program.
A program so has the end of one sequence, some whole ones, and the beginning of another; what it has of a sequence that
others have parts of too is a part, to be merged. A sequence costs `OVERHEAD` blocks beside its own.

Parts, for steps of many rows: each tile is a program, or several where the tiles are too few for the device. In how
many parts a sequence's tiles are divided follows from its own length and a length that all have in common, which in
deterministic mode is a constant.

Both write records, int32 [num_programs, 8], one for each program:
0  sequence of its first tile; -1 for nothing to do
1  parts: number of its tile among the sequence's tiles; of ranges all tiles of a sequence are in the grid
2  ranges: place in the sequence where it begins, in blocks with overhead; parts: which part
3  ranges: blocks with overhead that it has, of all its sequences; parts: how many parts
4  first new token, new tokens and tokens of that sequence, so that nobody has to wait for them
5
6

and what is to be merged then, int32 [num_merges, 4]:
0  how many parts; 0 for nothing to do
1  the program that has the first part
2  the sequence
3  parts: number of the tile
"""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

RECORD, MERGE = 8, 4  # int32 in a record, and in an entry of what is to be merged
SEQS = 128  # sequences that are looked at together
PROGRAMS = 16  # records that one program writes


@triton.jit
def _lengths(qo_indptr, kv_lens, seq, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N: tl.constexpr):
    """New tokens of each sequence, 0 for those that are not to be served, and blocks of keys that they see."""
    begin = tl.load(qo_indptr + seq, mask=seq < num_seqs, other=0)
    end = tl.load(qo_indptr + seq + 1, mask=seq < num_seqs, other=0)
    kv_len = tl.load(kv_lens + seq, mask=seq < num_seqs, other=0)
    qo_len = end - begin
    qo_len = tl.where((qo_len >= least_qo_len) & (qo_len <= most_qo_len), qo_len, 0)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(kv_len - qo_len + 1 - WINDOW, 0) // BLOCK_N
    blocks = tl.where(qo_len > 0, tl.maximum(tl.cdiv(kv_len, BLOCK_N) - first, 1), 0)
    return qo_len, blocks


@triton.jit
def _program_of(place, ranges, whole):
    """Whose range a place lies in: range p begins at p * whole // ranges."""
    return (((place + 1) * ranges - 1) // whole).to(tl.int32)


@triton.jit
def _store_lengths(record, qo_indptr, kv_lens, seq, mask):
    begin = tl.load(qo_indptr + seq, mask=mask, other=0)
    tl.store(record + 4, begin, mask=mask)
    tl.store(record + 5, tl.load(qo_indptr + seq + 1, mask=mask, other=0) - begin, mask=mask)
    tl.store(record + 6, tl.load(kv_lens + seq, mask=mask, other=0), mask=mask)


@triton.jit(
    do_not_specialize=[
        "qo_indptr", "kv_lens", "num_seqs", "num_programs", "least_qo_len", "most_qo_len", "WINDOW", "least_blocks",
    ]
)  # fmt: skip
def ranges_kernel(
    qo_indptr, kv_lens, num_seqs, num_programs, least_qo_len, most_qo_len, WINDOW, least_blocks, records, merges,
    BLOCK_N: tl.constexpr, OVERHEAD: tl.constexpr, SEQS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One program writes PROGRAMS records. Every program reads all lengths, 12 bytes a sequence, twice.

    What is to be merged is listed by sequence, or where these are more than programs, by the program that has the first
    part: num_merges is the smaller number.
    """
    lanes = tl.arange(0, SEQS)
    total = tl.zeros([], dtype=tl.int32)
    served = tl.zeros([], dtype=tl.int32)
    for start in range(0, num_seqs, SEQS):
        _, blocks = _lengths(qo_indptr, kv_lens, start + lanes, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N)
        total += tl.sum(tl.where(blocks > 0, blocks + OVERHEAD, 0))
        served += tl.sum((blocks > 0).to(tl.int32))
    # As many ranges as give every sequence equally many, or equally many sequences to each, if that is most of them:
    # where sequences are of one length, they are then divided as little as can be.
    served = tl.maximum(served, 1)
    ranges = tl.maximum(tl.minimum(num_programs, total // least_blocks), 1)
    rounds = tl.cdiv(served, ranges)
    even = tl.where(served <= ranges, ranges // served * served, tl.cdiv(served, rounds))
    ranges = tl.where(even * 10 >= ranges * 9, even, ranges).to(tl.int64)
    whole = tl.maximum(total, 1).to(tl.int64)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    begin = tl.where(program < ranges, program * whole // ranges, total).to(tl.int32)
    end = tl.where(program < ranges, (program + 1) * whole // ranges, total).to(tl.int32)
    begin = tl.minimum(begin, total)
    end = tl.minimum(end, total)
    last = tl.maximum(end - 1, 0)
    # The sequence in which a place lies is the number of those that end at it or before.
    first_seq = tl.zeros([PROGRAMS], dtype=tl.int32)
    last_seq = tl.zeros([PROGRAMS], dtype=tl.int32)
    first_start = tl.zeros([PROGRAMS], dtype=tl.int32)
    last_start = tl.zeros([PROGRAMS], dtype=tl.int32)
    before = tl.zeros([], dtype=tl.int32)
    for start in range(0, num_seqs, SEQS):
        _, blocks = _lengths(qo_indptr, kv_lens, start + lanes, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N)
        cost = tl.where(blocks > 0, blocks + OVERHEAD, 0)
        own_ends = before + tl.cumsum(cost, 0)
        ends = tl.where(start + lanes < num_seqs, own_ends, 2147483647)
        before += tl.sum(cost)
        if (num_seqs <= num_programs) & (start // SEQS % tl.num_programs(0) == tl.program_id(0)):
            merge = merges + (start + lanes) * 4
            mask = start + lanes < num_seqs
            first_program = _program_of(own_ends - cost, ranges, whole)
            parts = _program_of(own_ends - 1, ranges, whole) - first_program + 1
            tl.store(merge, tl.where((cost > 0) & (parts > 1), parts, 0), mask=mask)
            tl.store(merge + 1, first_program, mask=mask)
            tl.store(merge + 2, start + lanes, mask=mask)
            tl.store(merge + 3, tl.zeros_like(lanes), mask=mask)
        behind_first = ends[:, None] <= begin[None, :]
        behind_last = ends[:, None] <= last[None, :]
        first_seq += tl.sum(behind_first.to(tl.int32), 0)
        last_seq += tl.sum(behind_last.to(tl.int32), 0)
        first_start = tl.maximum(first_start, tl.max(tl.where(behind_first, ends[:, None], 0), 0))
        last_start = tl.maximum(last_start, tl.max(tl.where(behind_last, ends[:, None], 0), 0))
    busy = begin < end
    _, blocks = _lengths(qo_indptr, kv_lens, last_seq, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N)
    last_end = last_start + blocks + OVERHEAD
    record = records + program * 8
    mask = program < num_programs
    _store_lengths(record, qo_indptr, kv_lens, first_seq, mask & busy)
    tl.store(record, tl.where(busy, first_seq, -1), mask=mask)
    tl.store(record + 1, tl.zeros_like(program), mask=mask)
    tl.store(record + 2, begin - first_start, mask=mask)
    tl.store(record + 3, end - begin, mask=mask)
    if num_seqs > num_programs:
        continues = busy & (last_start >= begin) & (last_end > end)
        merge = merges + program * 4
        tl.store(merge, tl.where(continues, _program_of(last_end - 1, ranges, whole) - program + 1, 0), mask=mask)
        tl.store(merge + 1, program, mask=mask)
        tl.store(merge + 2, last_seq, mask=mask)
        tl.store(merge + 3, tl.zeros_like(program), mask=mask)


@triton.jit
def _parts_of(qo_len, blocks, common, most_parts, ROWS_PER_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tiles of a sequence, and the parts of each."""
    tiles = tl.cdiv(qo_len * ROWS_PER_TOKEN, BLOCK_M)
    parts = tl.minimum(tl.cdiv(blocks, common), most_parts)
    return tiles, tl.where(tiles > 0, tl.maximum(parts, 1), 0)


@triton.jit(
    do_not_specialize=[
        "qo_indptr", "kv_lens", "num_seqs", "num_programs", "least_qo_len", "most_qo_len", "WINDOW", "least_blocks",
        "most_parts", "slots", "num_merges",
    ]
)  # fmt: skip
def parts_kernel(
    qo_indptr, kv_lens, num_seqs, num_programs, least_qo_len, most_qo_len, WINDOW, least_blocks, most_parts, slots,
    records, merges, num_merges, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
    SEQS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One program writes PROGRAMS records. Every program reads all lengths, 12 bytes a sequence, twice.

    least_blocks: in a part. slots: programs that the device runs at a time, for one KV head; 0 in deterministic mode,
    in which parts have just `least_blocks`, unless they would be more than most_parts.
    """
    lanes = tl.arange(0, SEQS)
    common = least_blocks
    if slots > 0:
        total = tl.zeros([], dtype=tl.int64)
        for start in range(0, num_seqs, SEQS):
            qo_len, blocks = _lengths(
                qo_indptr, kv_lens, start + lanes, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N
            )
            total += tl.sum(tl.cdiv(qo_len * ROWS_PER_TOKEN, BLOCK_M).to(tl.int64) * blocks)
        common = tl.maximum(common, tl.cdiv(total, slots).to(tl.int32))
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    seq = tl.zeros([PROGRAMS], dtype=tl.int32)
    seq_start = tl.zeros([PROGRAMS], dtype=tl.int32)
    seq_tiles = tl.zeros([PROGRAMS], dtype=tl.int32)  # tiles of the sequences before
    before = tl.zeros([], dtype=tl.int32)
    num_tiles = tl.zeros([], dtype=tl.int32)
    for start in range(0, num_seqs, SEQS):
        qo_len, blocks = _lengths(
            qo_indptr, kv_lens, start + lanes, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N
        )
        tiles, parts = _parts_of(qo_len, blocks, common, most_parts, ROWS_PER_TOKEN, BLOCK_M)
        items = tiles * parts
        ends = tl.where(start + lanes < num_seqs, before + tl.cumsum(items, 0), 2147483647)
        before += tl.sum(items)
        num_tiles += tl.sum(tiles)
        behind = ends[:, None] <= program[None, :]
        seq += tl.sum(behind.to(tl.int32), 0)
        seq_start = tl.maximum(seq_start, tl.max(tl.where(behind, ends[:, None], 0), 0))
        seq_tiles += tl.sum(tl.where(behind, tiles[:, None], 0), 0)
    busy = program < before
    qo_len, blocks = _lengths(qo_indptr, kv_lens, seq, num_seqs, least_qo_len, most_qo_len, WINDOW, BLOCK_N)
    tiles, parts = _parts_of(qo_len, blocks, common, most_parts, ROWS_PER_TOKEN, BLOCK_M)
    parts = tl.maximum(parts, 1)
    place = program - seq_start
    part = place % parts
    tile = tiles - 1 - place // parts  # a sequence's last tile sees most: it is first
    record = records + program * 8
    mask = program < num_programs
    _store_lengths(record, qo_indptr, kv_lens, seq, mask & busy)
    tl.store(record, tl.where(busy, seq, -1), mask=mask)
    tl.store(record + 1, tile, mask=mask)
    tl.store(record + 2, part, mask=mask)
    tl.store(record + 3, parts, mask=mask)
    number = seq_tiles + place // parts
    merge = merges + number * 4
    first = busy & (part == 0) & (number < num_merges)
    tl.store(merge, tl.where(parts > 1, parts, 0), mask=first)
    tl.store(merge + 1, program, mask=first)
    tl.store(merge + 2, seq, mask=first)
    tl.store(merge + 3, tile, mask=first)
    tl.store(merges + program * 4, tl.zeros_like(program), mask=(program >= num_tiles) & (program < num_merges))
