"""Gluon, for Hopper: long new parts of sequences, with 128 rows of queries a program, three roles beside each other.

A producer brings blocks of 128 keys and values into shared memory; two warpgroups compute, of 64 rows each. These start
the next block's scores before they add up the last one's values, so that the matrix unit works while they take maxima
and exponents. Blocks are visited from the last to the first.

Work is divided as `work` says, in parts; what is computed is what `attend.attend_kernel` computes, which is this one's
oracle.
"""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202, SIM102, RUF059
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

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of a warpgroup, and keys that are copied and multiplied at a time
STAGES = gl.constexpr(2)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)


@gluon.jit
def _copy_blocks(
    table_row, k_desc1, k_desc2, v_desc, kv_head, begin, count, kv_len, k1, k2, v, k_full, k_empty, v_full, v_empty,
    D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, PAGE_SIZE: gl.constexpr, K_PAGE: gl.constexpr,
    K_HEAD_ROWS: gl.constexpr, K_HEAD_COLUMNS: gl.constexpr, V_PAGE: gl.constexpr, V_HEAD_ROWS: gl.constexpr,
    V_HEAD_COLUMNS: gl.constexpr,
):  # fmt: skip
    """By TMA, of pages that hold 64 keys. Behind the end the last such half comes once more."""
    last = (kv_len - 1) // HALF
    k_column = kv_head * K_HEAD_COLUMNS
    v_column = kv_head * V_HEAD_COLUMNS
    for i in range(count):
        half = gl.minimum((begin + count - 1 - i) * 2, last)
        next_half = gl.minimum(half + 1, last)
        page0 = gl.load(table_row + half * HALF // PAGE_SIZE)
        page1 = gl.load(table_row + next_half * HALF // PAGE_SIZE)
        token0 = half * HALF % PAGE_SIZE
        token1 = next_half * HALF % PAGE_SIZE
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        row0 = page0 * K_PAGE + kv_head * K_HEAD_ROWS + token0
        row1 = page1 * K_PAGE + kv_head * K_HEAD_ROWS + token1
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), BLOCK_N * (D1 + D2) * 2)
        copy_tile(k_desc1, [row0, k_column], k_full.index(stage), k1.index(2 * stage))
        copy_tile(k_desc1, [row1, k_column], k_full.index(stage), k1.index(2 * stage + 1))
        if D2 > 0:
            copy_tile(k_desc2, [row0, k_column + D1], k_full.index(stage), k2.index(2 * stage))
            copy_tile(
                k_desc2, [row1, k_column + D1], k_full.index(stage), k2.index(2 * stage + 1)
            )
        row0 = page0 * V_PAGE + kv_head * V_HEAD_ROWS + token0
        row1 = page1 * V_PAGE + kv_head * V_HEAD_ROWS + token1
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), BLOCK_N * DV * 2)
        copy_tile(v_desc, [row0, v_column], v_full.index(stage), v.index(2 * stage))
        copy_tile(v_desc, [row1, v_column], v_full.index(stage), v.index(2 * stage + 1))


@gluon.jit
def _copy_rows(
    target, source, page, place, LAYOUT: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, TOKEN: gl.constexpr,
):  # fmt: skip
    """64 rows of WIDTH elements by cp.async. PAGE, TOKEN: elements from a page and from a token to the next."""
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    row = page.to(gl.int64) * PAGE + place * TOKEN
    copy_elements(target, source + row[:, None] + column[None, :])


@gluon.jit
def _gather_blocks(
    table_row, k, v, begin, count, first_key, kv_len, k1, k2, v_room, k_full, k_empty, v_full, v_empty,
    D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, PAGE_SIZE: gl.constexpr, K_PAGE: gl.constexpr,
    K_TOKEN: gl.constexpr, V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr,
):  # fmt: skip
    """By cp.async of four warps, of smaller pages. k, v: of the head, in page 0.

    What nobody sees is replaced by what somebody does.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # few rows, so few addresses, a thread
    lane = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    for i in range(count):
        first = (begin + count - 1 - i) * BLOCK_N
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        key0 = gl.minimum(gl.maximum(first + lane, first_key), kv_len - 1)
        key1 = gl.minimum(gl.maximum(first + HALF + lane, first_key), kv_len - 1)
        page0 = gl.load(table_row + key0 // PAGE_SIZE)
        page1 = gl.load(table_row + key1 // PAGE_SIZE)
        mbarrier.wait(k_empty.index(stage), phase)
        _copy_rows(k1.index(2 * stage), k, page0, key0 % PAGE_SIZE, LAYOUT, D1, K_PAGE, K_TOKEN)
        _copy_rows(k1.index(2 * stage + 1), k, page1, key1 % PAGE_SIZE, LAYOUT, D1, K_PAGE, K_TOKEN)
        if D2 > 0:
            _copy_rows(k2.index(2 * stage), k + D1, page0, key0 % PAGE_SIZE, LAYOUT, D2, K_PAGE, K_TOKEN)
            _copy_rows(k2.index(2 * stage + 1), k + D1, page1, key1 % PAGE_SIZE, LAYOUT, D2, K_PAGE, K_TOKEN)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        mbarrier.wait(v_empty.index(stage), phase)
        _copy_rows(v_room.index(2 * stage), v, page0, key0 % PAGE_SIZE, LAYOUT, DV, V_PAGE, V_TOKEN)
        _copy_rows(v_room.index(2 * stage + 1), v, page1, key1 % PAGE_SIZE, LAYOUT, DV, V_PAGE, V_TOKEN)
        async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _produce(
    table_row, k_desc1, k_desc2, v_desc, k, v, kv_head, begin, count, first_key, kv_len, k1, k2, v_room, k_full,
    k_empty, v_full, v_empty, D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, PAGE_SIZE: gl.constexpr,
    K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr, V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr,
    V_HEAD: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    if GATHER:
        _gather_blocks(
            table_row, k + kv_head * K_HEAD, v + kv_head * V_HEAD, begin, count, first_key, kv_len, k1, k2, v_room,
            k_full,
            k_empty, v_full, v_empty, D1, D2, DV, PAGE_SIZE, K_PAGE, K_TOKEN, V_PAGE, V_TOKEN,
        )  # fmt: skip
    else:  # rows are tokens; heads lie beside each other in a row, or in rows of their own
        k_rows: gl.constexpr = K_HEAD // K_TOKEN
        v_rows: gl.constexpr = V_HEAD // V_TOKEN
        _copy_blocks(
            table_row, k_desc1, k_desc2, v_desc, kv_head, begin, count, kv_len, k1, k2, v_room, k_full, k_empty, v_full,
            v_empty, D1, D2, DV, PAGE_SIZE, K_PAGE // K_TOKEN, k_rows, K_HEAD % K_TOKEN, V_PAGE // V_TOKEN, v_rows,
            V_HEAD % V_TOKEN,
        )  # fmt: skip


@gluon.jit
def _scores(q1, q2, k1, k2, stage, zeros, D2: gl.constexpr):
    """Of both halves of a block, begun."""
    a = warpgroup_mma(q1, k1.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D2 > 0:
        a = warpgroup_mma(q2, k2.index(2 * stage).permute((1, 0)), a, is_async=True)
    b = warpgroup_mma(q1, k1.index(2 * stage + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if D2 > 0:
        b = warpgroup_mma(q2, k2.index(2 * stage + 1).permute((1, 0)), b, is_async=True)
    return a, b


@gluon.jit
def _masked(s, first, lane, most_key, window, position, WINDOWED: gl.constexpr):
    """Scores of 64 keys from `first` on; most_key: [rows], the last that each row sees."""
    key = first + lane
    s = gl.where(key[None, :] <= most_key[:, None], s, float("-inf"))
    if WINDOWED:
        s = gl.where(key[None, :] > (position - window)[:, None], s, float("-inf"))
    return s


@gluon.jit
def _weights(a, b, most, total, scale):
    new_most = gl.maximum(most, gl.maximum(gl.max(a, 1), gl.max(b, 1)) * scale)
    kept = gl.exp2(most - new_most)
    a = gl.exp2(a * scale - new_most[:, None])
    b = gl.exp2(b * scale - new_most[:, None])
    return a, b, new_most, total * kept + gl.sum(a + b, 1), kept


@gluon.jit
def _blocks(
    acc, p0, p1, most, total, start, stop, begin, count, scale, lane, most_key, window, position, full_begin, q1, q2,
    k1, k2, v, k_full, k_empty, v_full, v_empty, zeros, D2: gl.constexpr, MASKED: gl.constexpr, WINDOWED: gl.constexpr,
    GATHER: gl.constexpr, OUT_ROWS: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Blocks number start to stop, counted from the last one on.

    p0, p1: weights of the block before, not added up yet.
    """
    dtype: gl.constexpr = v.dtype
    for i in range(start, stop):
        stage = i % STAGES
        before = (i - 1) % STAGES
        first = (begin + count - 1 - i) * BLOCK_N
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        a, b = _scores(q1, q2, k1, k2, stage, zeros, D2)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        acc = warpgroup_mma(p0, v.index(2 * before), acc, is_async=True)
        acc = warpgroup_mma(p1, v.index(2 * before + 1), acc, is_async=True)
        a, b = warpgroup_mma_wait(2, deps=[a, b])
        barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            a = _masked(a, first, lane, most_key, window, position, WINDOWED)
            b = _masked(b, first + HALF, lane, most_key, window, position, WINDOWED)
        elif WINDOWED:
            if first < full_begin:
                a = _masked(a, first, lane, most_key, window, position, WINDOWED)
                b = _masked(b, first + HALF, lane, most_key, window, position, WINDOWED)
        a, b, most, total, kept = _weights(a, b, most, total, scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        p0 = gl.convert_layout(a.to(dtype), DP)
        p1 = gl.convert_layout(b.to(dtype), DP)
        acc = acc * gl.convert_layout(kept, OUT_ROWS)[:, None]
    return acc, p0, p1, most, total


@gluon.jit
def _consume(
    q, q_token, q_head, out, lse, partial_out, partial_lse, sinks, scale, window, tile, first_head, qo_begin, qo_len,
    kv_len, begin, count, full_begin, full_end, last_key, partial, whole, q1, q2, k1, k2, v, k_full, k_empty, v_full,
    v_empty, HEADS: gl.constexpr, HEAD_TILE: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr,
    Q_UNIT: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, GATHER: gl.constexpr, LSE: gl.constexpr,
    SINKS: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that compute: rows 64 * NUMBER on of the tile."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    LQ: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D1, D1 // 8], [4, 1], [1, 0])
    DP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LS)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, LO)
    dtype: gl.constexpr = v.dtype
    first_row = tile * BLOCK_M + NUMBER * HALF

    q_row = first_row + gl.arange(0, HALF, layout=gl.SliceLayout(1, LQ))
    q_mine = q_row // HEAD_TILE < qo_len
    q_place = (qo_begin + q_row // HEAD_TILE).to(gl.int64) * q_token + (first_head + q_row % HEAD_TILE) * q_head
    column1 = gl.arange(0, D1, layout=gl.SliceLayout(0, LQ))
    q_at = q + (q_place * Q_UNIT)[:, None]
    q1.store(gl.load(q_at + column1[None, :], mask=q_mine[:, None], other=0.0))
    if D2 > 0:
        column2 = D1 + gl.arange(0, D2, layout=gl.SliceLayout(0, LQ))
        q2.store(gl.load(q_at + column2[None, :], mask=q_mine[:, None], other=0.0))
    fence_async_shared()
    barrier()

    row = first_row + gl.arange(0, HALF, layout=ROWS)
    token = row // HEAD_TILE
    position = kv_len - qo_len + token
    most_key = last_key + gl.zeros([HALF], gl.int32, ROWS)
    if CAUSAL:
        most_key = gl.minimum(position, most_key)
    lane = gl.arange(0, HALF, layout=gl.SliceLayout(0, LS))
    zeros = gl.zeros([HALF, HALF], gl.float32, LS)
    most = gl.full([HALF], LOWEST, gl.float32, ROWS)
    total = gl.zeros([HALF], gl.float32, ROWS)
    acc = gl.zeros([HALF, DV], gl.float32, LO)
    if count > 0:
        first = (begin + count - 1) * BLOCK_N
        mbarrier.wait(k_full.index(0), 0)
        if GATHER:
            fence_async_shared()
        a, b = _scores(q1, q2, k1, k2, 0, zeros, D2)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        barrier()
        mbarrier.arrive(k_empty.index(0), count=1)
        a = _masked(a, first, lane, most_key, window, position, WINDOWED)
        b = _masked(b, first + HALF, lane, most_key, window, position, WINDOWED)
        a, b, most, total, kept = _weights(a, b, most, total, scale)
        p0 = gl.convert_layout(a.to(dtype), DP)
        p1 = gl.convert_layout(b.to(dtype), DP)
        # Then blocks that some row sees in part, at the end, and all others: the mask is looked at again for windows.
        masked = gl.minimum(gl.maximum(gl.cdiv(first + BLOCK_N - full_end, BLOCK_N), 1), count)
        acc, p0, p1, most, total = _blocks(
            acc, p0, p1, most, total, 1, masked, begin, count, scale, lane, most_key, window, position, full_begin,
            q1, q2,
            k1, k2, v, k_full, k_empty, v_full, v_empty, zeros, D2, True, WINDOWED, GATHER, OUT_ROWS, DP,
        )  # fmt: skip
        acc, p0, p1, most, total = _blocks(
            acc, p0, p1, most, total, masked, count, begin, count, scale, lane, most_key, window, position,
            full_begin, q1,
            q2, k1, k2, v, k_full, k_empty, v_full, v_empty, zeros, D2, False, WINDOWED, GATHER, OUT_ROWS, DP,
        )  # fmt: skip
        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        acc = warpgroup_mma(p0, v.index(2 * before), acc, is_async=True)
        acc = warpgroup_mma(p1, v.index(2 * before + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    mine = token < qo_len
    row_lse = gl.where(total > 0, most + gl.log2(total), float("-inf"))
    divisor = total
    if SINKS:
        if whole:
            sink = gl.load(sinks + first_head + row % HEAD_TILE, mask=mine, other=0.0).to(gl.float32) * LOG2_E
            divisor = divisor + gl.exp2(sink - most)
    factor = gl.where(total > 0, 1.0 / divisor, 0.0)
    acc = acc * gl.convert_layout(factor, OUT_ROWS)[:, None]
    lane_row = gl.arange(0, HALF, layout=OUT_ROWS)
    column = gl.arange(0, DV, layout=gl.SliceLayout(0, LO))
    if whole:
        at = first_row + lane_row
        place = (qo_begin + at // HEAD_TILE).to(gl.int64) * (HEADS * DV) + (first_head + at % HEAD_TILE) * DV
        gl.store(
            out + place[:, None] + column[None, :],
            acc.to(out.dtype.element_ty),
            mask=(at // HEAD_TILE < qo_len)[:, None],
        )
        if LSE:
            head = first_head + row % HEAD_TILE
            gl.store(lse + (qo_begin + token).to(gl.int64) * HEADS + head, row_lse * LN_2, mask=mine)
    else:
        start = partial.to(gl.int64) * BLOCK_M + NUMBER * HALF
        gl.store(partial_out + ((start + lane_row) * DV)[:, None] + column[None, :], acc)
        gl.store(partial_lse + start + gl.arange(0, HALF, layout=ROWS), row_lse)


@gluon.jit(do_not_specialize=["block_table", "sinks", "table_stride", "window", "q_token", "q_head"])
def hopper_extend_kernel(
    q, k, v, out, lse, k_desc1, k_desc2, v_desc, records, block_table, table_stride, partial_out, partial_lse, q_token,
    q_head, scale, window, sinks, HEADS: gl.constexpr, GROUP: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
    DV: gl.constexpr, K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr, V_PAGE: gl.constexpr,
    V_TOKEN: gl.constexpr, V_HEAD: gl.constexpr, Q_UNIT: gl.constexpr, PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, GATHER: gl.constexpr, LSE: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One program computes what its record says, for one KV head and 128 rows: the group's heads of a token, then those
    of the next one. It reads each key and value of its blocks once.

    Arguments are those of `attend.attend_kernel`; descriptors are of pages as rows of a token each, by 64 of them.
    """
    gdc_launch_dependents()
    heads: gl.constexpr = HEADS // GROUP
    pid = gl.program_id(0)
    kv_head = pid % heads
    program = pid // heads
    record = records + program * 8
    seq = gl.load(record)
    tile = gl.load(record + 1)
    part = gl.load(record + 2)
    parts = gl.load(record + 3)
    qo_begin = gl.load(record + 4)
    qo_len = gl.load(record + 5)
    kv_len = gl.load(record + 6)
    if seq < 0:
        return
    prefix = kv_len - qo_len
    first_token = tile * BLOCK_M // GROUP
    last_token = (gl.minimum((tile + 1) * BLOCK_M, qo_len * GROUP) - 1) // GROUP
    last_key = kv_len - 1
    full_end = kv_len
    if CAUSAL:
        last_key = prefix + last_token
        full_end = prefix + first_token + 1
    first_key = 0
    full_begin = 0
    if WINDOWED:
        first_key = gl.maximum(prefix + first_token + 1 - window, 0)
        full_begin = prefix + last_token + 1 - window
    first_block = first_key // BLOCK_N
    length = gl.cdiv(gl.cdiv(last_key + 1, BLOCK_N) - first_block, parts)
    begin = first_block + part * length
    count = gl.maximum(gl.minimum(begin + length, gl.cdiv(last_key + 1, BLOCK_N)) - begin, 0)
    whole = parts == 1
    partial = program * heads + kv_head

    SH: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = k.dtype.element_ty
    q1 = gl.allocate_shared_memory(dtype, [2, HALF, D1], SH)
    k1 = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, D1], SH)
    q2 = q1
    k2 = k1
    if D2 > 0:
        q2 = gl.allocate_shared_memory(dtype, [2, HALF, D2], SH)
        k2 = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, D2], SH)
    v_room = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, DV], SH)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128 if GATHER else 1)
        mbarrier.init(v_full.index(i), count=128 if GATHER else 1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    table_row = block_table + seq.to(gl.int64) * table_stride
    first_head = kv_head * GROUP
    gl.warp_specialize(
        [
            (_produce, (
                table_row, k_desc1, k_desc2, v_desc, k, v, kv_head, begin, count, first_key, kv_len, k1, k2, v_room,
                k_full, k_empty, v_full, v_empty, D1, D2, DV, PAGE_SIZE, K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN,
                V_HEAD, GATHER,
            )),
            (_consume, (
                q, q_token, q_head, out, lse, partial_out, partial_lse, sinks, scale, window, tile,
                first_head, qo_begin, qo_len, kv_len, begin, count, full_begin, full_end, last_key, partial, whole,
                q1.index(0), q2.index(0), k1, k2, v_room, k_full, k_empty, v_full, v_empty, HEADS, GROUP, D1, D2,
                DV, Q_UNIT, CAUSAL, WINDOWED, GATHER, LSE, SINKS, 0,
            )),
            (_consume, (
                q, q_token, q_head, out, lse, partial_out, partial_lse, sinks, scale, window, tile,
                first_head, qo_begin, qo_len, kv_len, begin, count, full_begin, full_end, last_key, partial, whole,
                q1.index(1), q2.index(1), k1, k2, v_room, k_full, k_empty, v_full, v_empty, HEADS, GROUP, D1, D2,
                DV, Q_UNIT, CAUSAL, WINDOWED, GATHER, LSE, SINKS, 1,
            )),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
