"""Gluon, for Hopper: MLA with 64 rows of queries a program, three roles beside each other.

A producer brings blocks of 64 latents into shared memory, two at a time; two warpgroups compute. Each of these takes
one block's scores and softmax, and half of the output's 512 columns for both blocks, so that a latent is read from
shared memory as keys and as values, and no accumulator is larger than registers. They agree on maxima and hand each
other their weights through shared memory, for which the blocks' rope parts, read by then, give the room.

Work is divided as `work` says; what is computed is what `attend.attend_kernel` computes, which is this one's oracle.
"""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202, SIM102, SIM108, RUF059
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 renamed both
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

BLOCK = gl.constexpr(64)  # keys of a block, and rows of queries
HALF = gl.constexpr(256)  # columns that a warpgroup accumulates
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)


@gluon.jit
def _piece(
    record, place, left, tile, qo_len, kv_len, HEAD_TILE: gl.constexpr, CAUSAL: gl.constexpr, RANGES: gl.constexpr,
    OVERHEAD: gl.constexpr,
):  # fmt: skip
    """Blocks from begin to end of a sequence that are this program's, what is left behind, and whether that is all."""
    last_row = gl.minimum((tile + 1) * BLOCK, qo_len * HEAD_TILE) - 1
    seen = kv_len
    if CAUSAL:
        seen = kv_len - qo_len + last_row // HEAD_TILE + 1
    if RANGES:
        cost = gl.maximum(gl.cdiv(kv_len, BLOCK), 1) + OVERHEAD
        taken = gl.minimum(cost - place, left)
        begin = gl.maximum(place - OVERHEAD, 0)
        end = gl.maximum(place + taken - OVERHEAD, 0)
        whole = taken == cost
        rest = left - taken
    else:
        length = gl.cdiv(gl.cdiv(seen, BLOCK), left)
        begin = place * length
        end = begin + length
        whole = left == 1
        rest = left * 0
    end = gl.minimum(end, gl.cdiv(seen, BLOCK))
    return begin, end, rest, whole


@gluon.jit
def _produce(
    records, block_table, table_stride, qo_indptr, kv_lens, least_qo_len, most_qo_len, program, tile, q_row, q_descs,
    k_descs, pages, q, q_rope, left_half, right_half, rope, full, empty, q_full, q_empty, HEADS: gl.constexpr,
    HEAD_TILE: gl.constexpr, CAUSAL: gl.constexpr, RANGES: gl.constexpr, OVERHEAD: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Brings queries and blocks. full, empty: barriers of the left halves and the right ones with the rope part, of the
    first block and of the second: L0, R0, L1, R1.
    """
    record = records + program * 8
    seq = gl.load(record)
    place = gl.load(record + 2)
    left = gl.load(record + 3)
    left = gl.where(seq < 0, 0, left)
    qo_begin = gl.load(record + 4)
    qo_len = gl.load(record + 5)
    kv_len = gl.load(record + 6)
    if not RANGES:
        tile = gl.load(record + 1)
    pair = 0
    piece = 0
    while left > 0:
        if (qo_len >= least_qo_len) & (qo_len <= most_qo_len) & (qo_len > 0):
            begin, end, rest, whole = _piece(
                record, place, left, tile, qo_len, kv_len, HEAD_TILE, CAUSAL, RANGES, OVERHEAD
            )
            if (tile * BLOCK < qo_len * HEAD_TILE) & (begin < end):
                row = qo_begin * HEADS + q_row + tile * BLOCK
                if HEADS > HEAD_TILE:
                    row = (qo_begin + tile) * HEADS + q_row
                mbarrier.wait(q_empty, (piece & 1) ^ 1)
                mbarrier.expect(q_full, BLOCK * (LATENT + ROPE) * 2)
                copy_tile(q_descs[0], [row, 0], q_full, q.index(0))
                copy_tile(q_descs[0], [row, HALF], q_full, q.index(1))
                copy_tile(q_descs[1], [row, 0], q_full, q_rope)
                table_row = block_table + seq.to(gl.int64) * table_stride
                pairs = gl.cdiv(end - begin, 2)
                if GATHER:
                    _gather_pairs(
                        table_row, pages, begin, pairs, kv_len, pair, left_half, right_half, rope, full, empty,
                        PAGE_SIZE, PAGE_ROWS, ROW,
                    )  # fmt: skip
                else:
                    _copy_pairs(
                        table_row, k_descs, begin, end, pairs, pair, left_half, right_half, rope, full, empty,
                        PAGE_SIZE, PAGE_ROWS,
                    )  # fmt: skip
                pair += pairs
                piece += 1
            left = rest
            place = 0
        if left > 0:
            seq += 1
            qo_begin = gl.load(qo_indptr + seq)
            qo_len = gl.load(qo_indptr + seq + 1) - qo_begin
            kv_len = gl.load(kv_lens + seq)


@gluon.jit
def _copy_pairs(
    table_row, k_descs, begin, end, pairs, pair, left_half, right_half, rope, full, empty, PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
):  # fmt: skip
    """By TMA, of pages that hold whole blocks. The second of a pair may be the last block once more."""
    next0 = gl.load(table_row + begin * BLOCK // PAGE_SIZE)
    next1 = gl.load(table_row + gl.minimum(begin + 1, end - 1) * BLOCK // PAGE_SIZE)
    for i in range(pairs):
        phase = ((pair + i) & 1) ^ 1
        block0 = begin + 2 * i
        row0 = next0 * PAGE_ROWS + block0 * BLOCK % PAGE_SIZE
        row1 = next1 * PAGE_ROWS + gl.minimum(block0 + 1, end - 1) * BLOCK % PAGE_SIZE
        next0 = gl.load(table_row + gl.minimum(block0 + 2, end - 1) * BLOCK // PAGE_SIZE)
        next1 = gl.load(table_row + gl.minimum(block0 + 3, end - 1) * BLOCK // PAGE_SIZE)
        mbarrier.wait(empty.index(0), phase)
        mbarrier.expect(full.index(0), BLOCK * HALF * 2)
        copy_tile(k_descs[0], [row0, 0], full.index(0), left_half.index(0))
        mbarrier.wait(empty.index(3), phase)
        mbarrier.expect(full.index(3), BLOCK * HALF * 2)
        copy_tile(k_descs[0], [row1, HALF], full.index(3), right_half.index(1))
        mbarrier.wait(empty.index(1), phase)
        mbarrier.expect(full.index(1), BLOCK * (HALF + ROPE) * 2)
        copy_tile(k_descs[1], [row0, 0], full.index(1), rope.index(0))
        copy_tile(k_descs[0], [row0, HALF], full.index(1), right_half.index(0))
        mbarrier.wait(empty.index(2), phase)  # and empty.index(3): both have read what lay where the rope part comes
        mbarrier.expect(full.index(2), BLOCK * (HALF + ROPE) * 2)
        copy_tile(k_descs[1], [row1, 0], full.index(2), rope.index(1))
        copy_tile(k_descs[0], [row1, 0], full.index(2), left_half.index(1))


@gluon.jit
def _rows(table_row, first, kv_len, LANES: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr):
    """Rows among all pages of 64 keys; behind the end, the last one's."""
    key = gl.minimum(first + gl.arange(0, BLOCK, layout=LANES), kv_len - 1)
    return gl.load(table_row + key // PAGE_SIZE) * PAGE_ROWS + key % PAGE_SIZE


@gluon.jit
def _copy_rows(target, pages, rows, first, LAYOUT: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr):
    """64 rows of WIDTH elements, from the first on, by cp.async."""
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    copy_elements(target, pages + rows.to(gl.int64)[:, None] * ROW + column[None, :])


@gluon.jit
def _gather_pairs(
    table_row, pages, begin, pairs, kv_len, pair, left_half, right_half, rope, full, empty, PAGE_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """By cp.async of four warps, of smaller pages."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # few rows, so few addresses, a thread
    LANES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    rows0 = _rows(table_row, begin * BLOCK, kv_len, LANES, PAGE_SIZE, PAGE_ROWS)
    rows1 = _rows(table_row, (begin + 1) * BLOCK, kv_len, LANES, PAGE_SIZE, PAGE_ROWS)
    for i in range(pairs):
        phase = ((pair + i) & 1) ^ 1
        mbarrier.wait(empty.index(0), phase)
        _copy_rows(left_half.index(0), pages, rows0, 0, LAYOUT, HALF, ROW)
        async_copy.mbarrier_arrive(full.index(0), increment_count=False)
        mbarrier.wait(empty.index(1), phase)
        _copy_rows(rope.index(0), pages, rows0, LATENT, LAYOUT, ROPE, ROW)
        _copy_rows(right_half.index(0), pages, rows0, HALF, LAYOUT, HALF, ROW)
        async_copy.mbarrier_arrive(full.index(1), increment_count=False)
        key = (begin + 2 * i + 2) * BLOCK
        rows0 = _rows(table_row, key, kv_len, LANES, PAGE_SIZE, PAGE_ROWS)
        mbarrier.wait(empty.index(2), phase)
        mbarrier.wait(empty.index(3), phase)  # both warpgroups have read what lay where the rope part comes
        _copy_rows(rope.index(1), pages, rows1, LATENT, LAYOUT, ROPE, ROW)
        _copy_rows(left_half.index(1), pages, rows1, 0, LAYOUT, HALF, ROW)
        async_copy.mbarrier_arrive(full.index(2), increment_count=False)
        _copy_rows(right_half.index(1), pages, rows1, HALF, LAYOUT, HALF, ROW)
        async_copy.mbarrier_arrive(full.index(3), increment_count=False)
        rows1 = _rows(table_row, key + BLOCK, kv_len, LANES, PAGE_SIZE, PAGE_ROWS)
    async_copy.wait_group(0)


@gluon.jit
def _pairs0(
    acc, most, total, limit, key, pairs, pair, scale, q, q_rope, left_half, right_half, rope, full, empty, agreed,
    maxima, LS: gl.constexpr, LO: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores of the first block, left half of the output. agreed: barriers of what they exchange:
    the first block's maxima, both blocks', and the weights of the first and of the second.
    """
    DP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LS)
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, LS)
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LS))
    dtype: gl.constexpr = left_half.dtype
    for i in range(pairs):
        phase = (pair + i) & 1
        mbarrier.wait(full.index(0), phase)
        if GATHER:
            fence_async_shared()
        s = warpgroup_mma(q.index(0), left_half.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(full.index(1), phase)
        if GATHER:
            fence_async_shared()
        s = warpgroup_mma(q_rope, rope.index(0).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q.index(1), right_half.index(0).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where((key + i * 2 * BLOCK + lane)[None, :] < limit[:, None], s * scale, float("-inf"))
        most0 = gl.maximum(most, gl.max(s, 1))
        maxima.index(0).store(most0)
        barrier()
        mbarrier.arrive(agreed.index(0), count=1)
        kept0 = gl.exp2(most - most0)
        p = gl.exp2(s - most0[:, None])
        total = total * kept0 + gl.sum(p, 1)
        acc = acc * gl.convert_layout(kept0, gl.SliceLayout(1, LO))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), DP), left_half.index(0), acc, is_async=True)
        mbarrier.wait(agreed.index(1), phase)
        most1 = maxima.index(1).load(ROWS)
        kept1 = gl.exp2(most0 - most1)
        rope.index(0).store((p * kept1[:, None]).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(agreed.index(2), count=1)
        total = total * kept1
        most = most1
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(0), count=1)
        acc = acc * gl.convert_layout(kept1, gl.SliceLayout(1, LO))[:, None]
        mbarrier.wait(agreed.index(3), phase)
        acc = warpgroup_mma(rope.index(1), left_half.index(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(2), count=1)
    return acc, most, total


@gluon.jit
def _pairs1(
    acc, most, total, limit, key, pairs, pair, scale, q, q_rope, left_half, right_half, rope, full, empty, agreed,
    maxima, LS: gl.constexpr, LO: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: scores of the second block, right half of the output."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LS)
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, LS)
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LS))
    dtype: gl.constexpr = left_half.dtype
    for i in range(pairs):
        phase = (pair + i) & 1
        if GATHER:  # in the order in which they come
            mbarrier.wait(full.index(2), phase)
            fence_async_shared()
            s = warpgroup_mma(q_rope, rope.index(1).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma(q.index(0), left_half.index(1).permute((1, 0)), s, is_async=True)
            mbarrier.wait(full.index(3), phase)
            fence_async_shared()
            s = warpgroup_mma(q.index(1), right_half.index(1).permute((1, 0)), s, is_async=True)
        else:
            mbarrier.wait(full.index(3), phase)
            s = warpgroup_mma(q.index(1), right_half.index(1).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(full.index(2), phase)
            s = warpgroup_mma(q_rope, rope.index(1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q.index(0), left_half.index(1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where((key + i * 2 * BLOCK + BLOCK + lane)[None, :] < limit[:, None], s * scale, float("-inf"))
        own_most = gl.max(s, 1)
        mbarrier.wait(agreed.index(0), phase)
        most1 = gl.maximum(maxima.index(0).load(ROWS), own_most)
        maxima.index(1).store(most1)
        barrier()
        mbarrier.arrive(agreed.index(1), count=1)
        kept = gl.exp2(most - most1)
        p = gl.exp2(s - most1[:, None])
        rope.index(1).store(p.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(agreed.index(3), count=1)
        total = total * kept + gl.sum(p, 1)
        most = most1
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None]
        if GATHER:
            mbarrier.wait(agreed.index(2), phase)
            acc = warpgroup_mma(rope.index(0), right_half.index(0), acc, is_async=True)
            acc = warpgroup_mma(rope.index(1), right_half.index(1), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(1), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(3), count=1)
        else:
            acc = warpgroup_mma(rope.index(1), right_half.index(1), acc, is_async=True)
            mbarrier.wait(agreed.index(2), phase)
            acc = warpgroup_mma(rope.index(0), right_half.index(0), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(3), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(1), count=1)
    return acc, most, total


@gluon.jit
def _consume(
    records, qo_indptr, kv_lens, least_qo_len, most_qo_len, program, tile, lane, lanes, first_head, scale, out, lse,
    partial_out, partial_lse, sinks, q, q_rope, left_half, right_half, rope, full, empty, agreed, maxima, totals,
    summed, q_full, q_empty, HEADS: gl.constexpr, HEAD_TILE: gl.constexpr, CAUSAL: gl.constexpr, RANGES: gl.constexpr,
    OVERHEAD: gl.constexpr, GATHER: gl.constexpr, LSE: gl.constexpr, SINKS: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that compute."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LS)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, LO)
    record = records + program * 8
    seq = gl.load(record)
    place = gl.load(record + 2)
    left = gl.load(record + 3)
    left = gl.where(seq < 0, 0, left)
    qo_begin = gl.load(record + 4)
    qo_len = gl.load(record + 5)
    kv_len = gl.load(record + 6)
    if not RANGES:
        tile = gl.load(record + 1)
    pair = 0
    piece = 0
    while left > 0:
        if (qo_len >= least_qo_len) & (qo_len <= most_qo_len) & (qo_len > 0):
            begin, end, rest, whole = _piece(
                record, place, left, tile, qo_len, kv_len, HEAD_TILE, CAUSAL, RANGES, OVERHEAD
            )
            if RANGES:
                slot = 2 * program + (place == 0).to(gl.int32)
            else:
                slot = program
            partial = slot.to(gl.int64) * lanes + lane
            if tile * BLOCK < qo_len * HEAD_TILE:
                row = tile * BLOCK + gl.arange(0, BLOCK, layout=ROWS)
                token = row // HEAD_TILE
                head = first_head + row % HEAD_TILE
                if begin < end:
                    limit = gl.minimum(kv_len, end * BLOCK)
                    limits = limit + gl.zeros([BLOCK], gl.int32, ROWS)
                    if CAUSAL:
                        limits = gl.minimum(kv_len - qo_len + token + 1, limits)
                    most = gl.full([BLOCK], LOWEST, gl.float32, ROWS)
                    total = gl.zeros([BLOCK], gl.float32, ROWS)
                    acc = gl.zeros([BLOCK, HALF], gl.float32, LO)
                    pairs = gl.cdiv(end - begin, 2)
                    mbarrier.wait(q_full, piece & 1)
                    if NUMBER == 0:
                        acc, most, total = _pairs0(
                            acc, most, total, limits, begin * BLOCK, pairs, pair, scale, q, q_rope, left_half,
                            right_half,
                            rope, full, empty, agreed, maxima, LS, LO, GATHER,
                        )  # fmt: skip
                    else:
                        acc, most, total = _pairs1(
                            acc, most, total, limits, begin * BLOCK, pairs, pair, scale, q, q_rope, left_half,
                            right_half,
                            rope, full, empty, agreed, maxima, LS, LO, GATHER,
                        )  # fmt: skip
                    totals.index(NUMBER).store(total)
                    barrier()
                    mbarrier.arrive(q_empty, count=1)
                    mbarrier.arrive(summed.index(NUMBER), count=1)
                    mbarrier.wait(summed.index(1 - NUMBER), piece & 1)
                    total = total + totals.index(1 - NUMBER).load(ROWS)
                    row_lse = gl.where(total > 0, most + gl.log2(total), float("-inf"))
                    divisor = total
                    mine = token < qo_len
                    if SINKS:
                        if whole:
                            sink = gl.load(sinks + head, mask=mine, other=0.0).to(gl.float32) * LOG2_E
                            divisor = divisor + gl.exp2(sink - most)
                    factor = gl.where(total > 0, 1.0 / divisor, 0.0)
                    acc = acc * gl.convert_layout(factor, OUT_ROWS)[:, None]
                    out_row = gl.arange(0, BLOCK, layout=OUT_ROWS)
                    column = NUMBER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LO))
                    if whole:
                        at = tile * BLOCK + out_row
                        place_of = (qo_begin + at // HEAD_TILE).to(gl.int64) * (HEADS * LATENT) + (
                            first_head + at % HEAD_TILE
                        ) * LATENT
                        gl.store(
                            out + place_of[:, None] + column[None, :], acc.to(out.dtype.element_ty),
                            mask=(at // HEAD_TILE < qo_len)[:, None],
                        )  # fmt: skip
                        if LSE and NUMBER == 0:
                            gl.store(lse + (qo_begin + token).to(gl.int64) * HEADS + head, row_lse * LN_2, mask=mine)
                    else:
                        target = partial_out + (partial * BLOCK + out_row) [:, None] * LATENT + column[None, :]
                        gl.store(target, acc)
                        if NUMBER == 0:
                            gl.store(partial_lse + partial * BLOCK + gl.arange(0, BLOCK, layout=ROWS), row_lse)
                    pair += pairs
                    piece += 1
                else:  # nothing of it, so that the merge finds a part that weighs nothing
                    if NUMBER == 0:
                        nothing = gl.full([BLOCK], float("-inf"), gl.float32, ROWS)
                        gl.store(partial_lse + partial * BLOCK + gl.arange(0, BLOCK, layout=ROWS), nothing)
            left = rest
            place = 0
        if left > 0:
            seq += 1
            qo_begin = gl.load(qo_indptr + seq)
            qo_len = gl.load(qo_indptr + seq + 1) - qo_begin
            kv_len = gl.load(kv_lens + seq)


@gluon.jit(
    do_not_specialize=[
        "block_table", "qo_indptr", "kv_lens", "sinks", "table_stride", "least_qo_len", "most_qo_len", "tiles",
    ]
)  # fmt: skip
def hopper_mla_kernel(
    q_latent_desc, q_rope_desc, k_latent_desc, k_rope_desc, pages, out, lse, records, block_table, table_stride,
    qo_indptr, kv_lens, partial_out, partial_lse, scale, sinks, least_qo_len, most_qo_len, tiles, HEADS: gl.constexpr,
    HEAD_TILE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_ROWS: gl.constexpr, ROW: gl.constexpr, CAUSAL: gl.constexpr,
    RANGES: gl.constexpr, OVERHEAD: gl.constexpr, GATHER: gl.constexpr, LSE: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One program computes what its record says, for 64 rows: HEAD_TILE heads of a token, then those of the next one.

    It reads each latent of its blocks once, 1152 bytes. q_latent_desc: of q as [rows, 512], blocks of [64, 256], and so
    on. ROW: elements from a latent to the next; PAGE_ROWS: from a page to the next, in rows of that size.
    """
    gdc_launch_dependents()
    SH: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SF: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_latent_desc.dtype
    head_tiles: gl.constexpr = HEADS // HEAD_TILE
    pid = gl.program_id(0)
    lanes = tiles * head_tiles
    lane = pid % lanes
    program = pid // lanes
    tile = lane // head_tiles
    first_head = lane % head_tiles * HEAD_TILE

    q = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], SH)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK, ROPE], SH)
    left_half = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], SH)
    right_half = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], SH)
    rope = gl.allocate_shared_memory(dtype, [2, BLOCK, ROPE], SH)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK], SF)
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCK], SF)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    agreed = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=128 if GATHER else 1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(agreed.index(i), count=1)
    mbarrier.init(summed.index(0), count=1)
    mbarrier.init(summed.index(1), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    fence_async_shared()

    q_descs = (q_latent_desc, q_rope_desc)
    k_descs = (k_latent_desc, k_rope_desc)
    gl.warp_specialize(
        [
            (_produce, (
                records, block_table, table_stride, qo_indptr, kv_lens, least_qo_len, most_qo_len, program, tile,
                first_head, q_descs, k_descs, pages, q, q_rope, left_half, right_half, rope, full, empty, q_full,
                q_empty, HEADS, HEAD_TILE, CAUSAL, RANGES, OVERHEAD, PAGE_SIZE, PAGE_ROWS, ROW, GATHER,
            )),
            (_consume, (
                records, qo_indptr, kv_lens, least_qo_len, most_qo_len, program, tile, lane, lanes, first_head, scale,
                out, lse, partial_out, partial_lse, sinks, q, q_rope, left_half, right_half, rope, full,
                empty, agreed, maxima, totals, summed, q_full, q_empty, HEADS, HEAD_TILE, CAUSAL, RANGES, OVERHEAD,
                GATHER, LSE, SINKS, 0,
            )),
            (_consume, (
                records, qo_indptr, kv_lens, least_qo_len, most_qo_len, program, tile, lane, lanes, first_head, scale,
                out, lse, partial_out, partial_lse, sinks, q, q_rope, left_half, right_half, rope, full,
                empty, agreed, maxima, totals, summed, q_full, q_empty, HEADS, HEAD_TILE, CAUSAL, RANGES, OVERHEAD,
                GATHER, LSE, SINKS, 1,
            )),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
