"""Plain Triton: attention of a program's tiles over paged keys and values, and the merge of what was divided."""

# Kernels have no Python types: their arguments become the compiler's.
# ruff: noqa: ANN001, ANN201, ANN202, SIM102, SIM108
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # below every score, and finite, so that differences of two are no NaN


@triton.jit
def decoded(x, DTYPE: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Elements of the cache in the dtype of the products.

    FP8: "" for none; otherwise x are bytes of that format. Where the device cannot convert them (NATIVE), their bits
    are moved into those of a float16, whose exponent is 8 larger for e4m3, 7 for e4m3fnuz and the same for e5m2.
    """
    if FP8 == "":
        return x.to(DTYPE)
    elif FP8 == "e4m3fnuz":  # which few devices convert; what would be -0 is NaN, and nothing else
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = tl.where((bits & 0xFF) == 0x80, 0x7E00, half.to(tl.int32)).to(tl.int16)
        return (half.to(tl.float16, bitcast=True) * 128.0).to(DTYPE)
    elif NATIVE:
        if FP8 == "e4m3":
            return x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            return x.to(tl.float8e5, bitcast=True).to(DTYPE)
    elif FP8 == "e4m3":
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half.to(tl.int32)).to(tl.int16)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:
        return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def block_part(
    pages, desc, page, head, token_in_page, PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, WIDTH]: elements FIRST on of a block's keys or values, of which the first DIM are there.

    page, token_in_page: of every key; or with `desc`, one page that holds the whole block, and where it begins there.
    """
    if desc is not None:
        return desc.load([page, head, token_in_page, FIRST]).reshape(BLOCK_N, WIDTH)
    else:
        dim = tl.arange(0, WIDTH)
        row = page.to(tl.int64) * PAGE_STRIDE + token_in_page * TOKEN_STRIDE
        address = pages + head * HEAD_STRIDE + FIRST + row[:, None] + dim[None, :]
        if DIM < WIDTH:
            return tl.load(address, mask=dim[None, :] < DIM, other=0)
        else:
            return tl.load(address)


@triton.jit
def attended(
    acc1, acc2, most, total, first_block, last_block, q1, q2, k, v, k_desc1, k_desc2, v_desc1, v_desc2, table_row,
    kv_head, kv_len, first_key, position, qo_len, scale, cap, window, slope, tree_row, D: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr, V_IN_K: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr, V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Goes over the blocks from first_block to last_block.

    acc1, acc2: [BLOCK_M, DV1 and DV2], float32, not yet divided by `total`. most: each row's largest score, in base 2.
    position: [BLOCK_M], of each row's token in its sequence. first_key: the first that any row sees.
    """
    lane = tl.arange(0, BLOCK_N)
    TMA: tl.constexpr = k_desc1 is not None
    BENT: tl.constexpr = cap is not None or slope is not None
    if TMA:
        page = tl.load(table_row + first_block * BLOCK_N // PAGE_SIZE)
    else:
        token = tl.minimum(tl.maximum(first_block * BLOCK_N + lane, first_key), kv_len - 1)
        page = tl.load(table_row + token // PAGE_SIZE)
        place = token % PAGE_SIZE
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        # The next block's pages are looked up here, so that loads of keys do not wait for it.
        this_page = page
        if TMA:
            this_place = block * BLOCK_N % PAGE_SIZE
            page = tl.load(table_row + tl.minimum(block + 1, last_block - 1) * BLOCK_N // PAGE_SIZE)
        else:
            this_place = place
            token = tl.minimum(tl.maximum((block + 1) * BLOCK_N + lane, first_key), kv_len - 1)
            page = tl.load(table_row + token // PAGE_SIZE)
            place = token % PAGE_SIZE
        k1 = block_part(k, k_desc1, this_page, kv_head, this_place, K_PAGE, K_TOKEN, K_HEAD, 0, D, D1, BLOCK_N)
        k1 = decoded(k1, q1.dtype, FP8, NATIVE)
        score = tl.dot(q1, k1.T, input_precision=PRECISION)
        if D2 > 0:
            k2 = block_part(
                k, k_desc2, this_page, kv_head, this_place, K_PAGE, K_TOKEN, K_HEAD, D1, D - D1, D2, BLOCK_N
            )
            score = tl.dot(q2, decoded(k2, q1.dtype, FP8, NATIVE).T, score, input_precision=PRECISION)
        if BENT:
            score *= scale
            if cap is not None:
                score = (1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 * LOG2_E) / cap))) * (cap * LOG2_E)
        key = block * BLOCK_N + lane
        if slope is not None:
            score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            seen = (key < kv_len)[None, :]
            if tree_row is not None:
                prefix = kv_len - qo_len
                new = key - prefix
                is_new = (new >= 0) & (key < kv_len)
                has_tree = tree_row >= 0
                bit = tl.load(
                    tree_row.to(tl.pointer_type(tl.int8))[:, None] + new[None, :],
                    mask=is_new[None, :] & has_tree[:, None], other=0,
                )  # fmt: skip
                in_tree = (new < 0)[None, :] | (bit != 0)
                seen = seen & tl.where(has_tree[:, None], in_tree, key[None, :] <= position[:, None])
            elif CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        if BENT:
            new_most = tl.maximum(most, tl.max(score, 1))
            weight = tl.exp2(score - new_most[:, None])
        else:  # the product with the scale and the difference are one instruction
            new_most = tl.maximum(most, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - new_most[:, None])
        kept = tl.exp2(most - new_most)
        total = total * kept + tl.sum(weight, 1)
        most = new_most
        acc1 = acc1 * kept[:, None]
        weight = weight.to(q1.dtype)
        if V_IN_K:
            v1 = k1
        else:
            v1 = block_part(v, v_desc1, this_page, kv_head, this_place, V_PAGE, V_TOKEN, V_HEAD, 0, DV, DV1, BLOCK_N)
            v1 = decoded(v1, q1.dtype, FP8, NATIVE)
        acc1 = tl.dot(weight, v1, acc1, input_precision=PRECISION)
        if DV2 > 0:
            v2 = block_part(
                v, v_desc2, this_page, kv_head, this_place, V_PAGE, V_TOKEN, V_HEAD, DV1, DV - DV1, DV2, BLOCK_N
            )
            acc2 = acc2 * kept[:, None]
            acc2 = tl.dot(weight, decoded(v2, q1.dtype, FP8, NATIVE), acc2, input_precision=PRECISION)
    return acc1, acc2, most, total


@triton.jit(
    do_not_specialize=[
        "block_table", "qo_indptr", "kv_lens", "k_scale", "v_scale", "sinks", "slopes", "tree_bits", "tree_starts",
        "table_stride", "window", "least_qo_len", "most_qo_len", "q_token", "q_head", "tiles", "k_step",
        "v_step",
    ]
)  # fmt: skip
def attend_kernel(
    q, k, v, out, lse, k_desc1, k_desc2, v_desc1, v_desc2, records, block_table, table_stride, qo_indptr, kv_lens,
    partial_out, partial_lse, q_token, q_head, scale, cap, window, k_scale, k_step, v_scale, v_step, sinks, slopes,
    tree_bits, tree_starts, least_qo_len, most_qo_len, tiles, HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr,
    DV2: tl.constexpr, V_IN_K: tl.constexpr, K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr, Q_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, RANGES: tl.constexpr,
    OVERHEAD: tl.constexpr, SPLIT_MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program computes what its record says (see `work`), for one KV head, or a part of its group's query heads.

    It reads each key and value of its blocks once, and writes its rows of `out`, or where others have parts of a tile
    too, those of `partial_out` in float32 and `partial_lse` in base 2.

    Rows are the HEAD_TILE heads of a token, then those of the next one. Programs of one record are neighbours, as they
    read the same pages. q_token, q_head: strides in units of Q_UNIT elements. cap: None where there is none, and so on
    for what the spec may want. scale: of scores, in base 2 where there is no cap.
    """
    if CHAINED:
        gdc_launch_dependents()  # the merge may start, and waits
    head_tiles: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    heads: tl.constexpr = HEADS // GROUP * head_tiles
    pid = tl.program_id(0)
    lane = pid % (tiles * heads)
    program = pid // (tiles * heads)
    kv_head = lane % heads // head_tiles
    first_head = kv_head * GROUP + lane % head_tiles * HEAD_TILE  # of the query heads
    record = records + program * 8
    seq = tl.load(record)
    tile = tl.load(record + 1)
    place = tl.load(record + 2)
    left = tl.load(record + 3)
    qo_begin = tl.load(record + 4)
    qo_len = tl.load(record + 5)
    kv_len = tl.load(record + 6)
    if seq < 0:
        return
    if RANGES:
        tile = lane // heads
        while left > 0:
            if (qo_len >= least_qo_len) & (qo_len <= most_qo_len) & (qo_len > 0):
                first_block = 0
                if window is not None:
                    first_block = tl.maximum(kv_len - qo_len + 1 - window, 0) // BLOCK_N
                cost = tl.maximum(tl.cdiv(kv_len, BLOCK_N) - first_block, 1) + OVERHEAD
                taken = tl.minimum(cost - place, left)
                begin = first_block + tl.maximum(place - OVERHEAD, 0)
                end = first_block + tl.maximum(place + taken - OVERHEAD, 0)
                slot = tl.where(taken < cost, 2 * program + (place == 0).to(tl.int32), -1)
                if tile * BLOCK_M < qo_len * HEAD_TILE:
                    _tile(
                        q, k, v, out, lse, k_desc1, k_desc2, v_desc1, v_desc2,
                        block_table + seq.to(tl.int64) * table_stride,
                        partial_out, partial_lse, q_token, q_head, scale, cap, window, k_scale, k_step, v_scale,
                        v_step, sinks,
                        slopes, tree_bits, tree_starts, seq, qo_begin, qo_len, kv_len, tile * BLOCK_M, begin, end, slot,
                        slot * (tiles * heads) + lane, kv_head, first_head, HEADS, GROUP, HEAD_TILE, D, D1, D2, DV,
                        DV1, DV2, V_IN_K,
                        K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, Q_UNIT, PAGE_SIZE, FP8, NATIVE, PRECISION,
                        CAUSAL,
                        SPLIT_MASK, BLOCK_M, BLOCK_N, STAGES,
                    )  # fmt: skip
                left -= taken
                place = 0
            if left > 0:
                seq += 1
                qo_begin = tl.load(qo_indptr + seq)
                qo_len = tl.load(qo_indptr + seq + 1) - qo_begin
                kv_len = tl.load(kv_lens + seq)
    else:
        first_token = tile * BLOCK_M // HEAD_TILE
        last_token = (tl.minimum((tile + 1) * BLOCK_M, qo_len * HEAD_TILE) - 1) // HEAD_TILE
        first_block = 0
        if window is not None:
            first_block = tl.maximum(kv_len - qo_len + first_token + 1 - window, 0) // BLOCK_N
        seen = kv_len
        if CAUSAL and tree_bits is None:
            seen = kv_len - qo_len + last_token + 1
        length = tl.cdiv(tl.cdiv(seen, BLOCK_N) - first_block, left)
        begin = first_block + place * length
        slot = tl.where(left > 1, program, -1)
        _tile(
            q, k, v, out, lse, k_desc1, k_desc2, v_desc1, v_desc2, block_table + seq.to(tl.int64) * table_stride,
            partial_out, partial_lse, q_token, q_head, scale, cap, window, k_scale, k_step, v_scale, v_step, sinks,
            slopes, tree_bits, tree_starts, seq, qo_begin, qo_len, kv_len, tile * BLOCK_M, begin, begin + length, slot,
            slot * heads + lane, kv_head, first_head, HEADS, GROUP, HEAD_TILE, D, D1, D2, DV, DV1, DV2, V_IN_K,
            K_PAGE, K_TOKEN,
            K_HEAD, V_PAGE, V_TOKEN, V_HEAD, Q_UNIT, PAGE_SIZE, FP8, NATIVE, PRECISION, CAUSAL, SPLIT_MASK, BLOCK_M,
            BLOCK_N,
            STAGES,
        )  # fmt: skip


@triton.jit
def _tile(
    q, k, v, out, lse, k_desc1, k_desc2, v_desc1, v_desc2, table_row, partial_out, partial_lse, q_token, q_head, scale,
    cap, window, k_scale, k_step, v_scale, v_step, sinks, slopes, tree_bits, tree_starts, seq, qo_begin, qo_len, kv_len,
    first_row, begin, end, slot, partial, kv_head, first_head, HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV1: tl.constexpr,
    DV2: tl.constexpr, V_IN_K: tl.constexpr, K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr, Q_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, SPLIT_MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The rows of one tile over the blocks from begin to end of what they see.

    slot: negative where the result is final; otherwise it is written to place `partial`.
    """
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // HEAD_TILE
    head = first_head + row % HEAD_TILE
    mine = (token < qo_len) & (head < (kv_head + 1) * GROUP)
    prefix = kv_len - qo_len
    position = prefix + token
    first_token = first_row // HEAD_TILE
    last_token = (tl.minimum(first_row + BLOCK_M, qo_len * HEAD_TILE) - 1) // HEAD_TILE

    dim1 = tl.arange(0, D1)
    q_row = q + ((qo_begin + token).to(tl.int64) * q_token + head * q_head) * Q_UNIT
    if D < D1:
        q1 = tl.load(q_row[:, None] + dim1[None, :], mask=mine[:, None] & (dim1 < D)[None, :], other=0.0)
    else:
        q1 = tl.load(q_row[:, None] + dim1[None, :], mask=mine[:, None], other=0.0)
    q2 = q1
    if D2 > 0:
        dim2 = tl.arange(0, D2)
        q2 = tl.load(q_row[:, None] + (D1 + dim2)[None, :], mask=mine[:, None] & (dim2 < D - D1)[None, :], other=0.0)
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * k_step)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=mine, other=0.0) * LOG2_E
    tree_row = None
    if tree_bits is not None:
        start = tl.load(tree_starts + seq)
        address = tree_bits.to(tl.int64) + start + token.to(tl.int64) * qo_len
        tree_row = tl.where((start >= 0) & (token < qo_len), address, -1)

    # Blocks from `begin` to `full_begin` and from `full_end` to `end` are seen in part by some row.
    seen = kv_len
    full_end = kv_len // BLOCK_N
    if tree_bits is not None:
        full_end = prefix // BLOCK_N
    elif CAUSAL:
        seen = prefix + last_token + 1
        full_end = (prefix + first_token + 1) // BLOCK_N
    first_key = 0
    full_begin = 0
    if window is not None:
        first_key = tl.maximum(prefix + first_token + 1 - window, 0)
        full_begin = tl.cdiv(tl.maximum(prefix + last_token + 1 - window, 0), BLOCK_N)
    begin = tl.maximum(begin, first_key // BLOCK_N)
    end = tl.minimum(end, tl.cdiv(seen, BLOCK_N))

    most = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1], tl.float32)
    acc2 = most
    if DV2 > 0:
        acc2 = tl.zeros([BLOCK_M, DV2], tl.float32)
    if begin < end:
        if SPLIT_MASK:
            stop = end
            if window is not None:
                stop = tl.minimum(tl.maximum(full_begin, begin), end)
                acc1, acc2, most, total = attended(
                    acc1, acc2, most, total, begin, stop, q1, q2, k, v, k_desc1, k_desc2, v_desc1, v_desc2, table_row,
                    kv_head,
                    kv_len, first_key, position, qo_len, scale, cap, window, slope, tree_row, D, D1, D2, DV, DV1, DV2,
                    V_IN_K,
                    K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, PAGE_SIZE, FP8, NATIVE, PRECISION, CAUSAL, True,
                    BLOCK_N, STAGES,
                )  # fmt: skip
                begin = stop
            stop = tl.minimum(tl.maximum(full_end, begin), end)
            acc1, acc2, most, total = attended(
                acc1, acc2, most, total, begin, stop, q1, q2, k, v, k_desc1, k_desc2, v_desc1, v_desc2, table_row,
                kv_head,
                kv_len, first_key, position, qo_len, scale, cap, window, slope, tree_row, D, D1, D2, DV, DV1, DV2,
                V_IN_K,
                K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, PAGE_SIZE, FP8, NATIVE, PRECISION, CAUSAL, False,
                BLOCK_N, STAGES,
            )  # fmt: skip
            begin = stop
        acc1, acc2, most, total = attended(
            acc1, acc2, most, total, begin, end, q1, q2, k, v, k_desc1, k_desc2, v_desc1, v_desc2, table_row, kv_head,
            kv_len, first_key, position, qo_len, scale, cap, window, slope, tree_row, D, D1, D2, DV, DV1, DV2, V_IN_K,
            K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, PAGE_SIZE, FP8, NATIVE, PRECISION, CAUSAL, True,
            BLOCK_N, STAGES,
        )  # fmt: skip

    row_lse = tl.where(total > 0, most + tl.log2(total), float("-inf"))
    divisor = total
    if slot >= 0:
        factor = tl.where(total > 0, 1.0 / total, 0.0)
        lane = tl.arange(0, BLOCK_M)
        target = partial_out + (partial.to(tl.int64) * BLOCK_M + lane) * DV
        tl.store(partial_lse + partial * BLOCK_M + lane, row_lse, mask=mine)
        _store(target, acc1, acc2, factor, mine, DV, DV1, DV2)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * LOG2_E
            divisor += tl.exp2(sink - most)
        factor = tl.where(total > 0, 1.0 / divisor, 0.0)
        if v_scale is not None:
            factor *= tl.load(v_scale + kv_head * v_step)
        token_at = (qo_begin + token).to(tl.int64)
        _store(out + token_at * (HEADS * DV) + head * DV, acc1, acc2, factor, mine, DV, DV1, DV2)
        if lse is not None:
            tl.store(lse + token_at * HEADS + head, row_lse * LN_2, mask=mine)


@triton.jit
def _store(target, acc1, acc2, factor, mine, DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr):
    """The rows, divided, to where each begins."""
    dim1 = tl.arange(0, DV1)
    mask = mine[:, None]
    if DV < DV1:
        mask = mask & (dim1 < DV)[None, :]
    tl.store(target[:, None] + dim1[None, :], (acc1 * factor[:, None]).to(target.dtype.element_ty), mask=mask)
    if DV2 > 0:
        dim2 = tl.arange(0, DV2)
        mask = mine[:, None] & (dim2 < DV - DV1)[None, :]
        rest = (acc2 * factor[:, None]).to(target.dtype.element_ty)
        tl.store(target[:, None] + (DV1 + dim2)[None, :], rest, mask=mask)


@triton.jit(do_not_specialize=["qo_indptr", "v_scale", "sinks", "tiles", "wide", "v_step"])
def merge_kernel(
    out, lse, merges, qo_indptr, partial_out, partial_lse, v_scale, v_step, sinks, tiles, wide, HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_TILE: tl.constexpr, DV: tl.constexpr, RANGES: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program merges WIDE elements of one row, or NARROW ones where rows may have many parts.

    It reads 4 bytes for each of these and each of the row's parts.

    With o_i a part's output and l_i its LSE, the result is sum(2^l_i o_i) / sum(2^l_i), a sink's 2^s counting as one
    more part of values 0 (FlashInfer, arXiv:2501.01005, section 2.2).
    """
    if CHAINED:
        gdc_wait()
    head_tiles: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    heads: tl.constexpr = HEADS // GROUP * head_tiles
    pid = tl.program_id(0)
    record = merges + pid // (tiles * heads) * 4
    parts = tl.load(record)
    if parts == 0:
        return
    lane = pid % (tiles * heads)
    first = tl.load(record + 1)
    seq = tl.load(record + 2)
    kv_head = lane % heads // head_tiles
    lane_row = tl.program_id(1)
    if RANGES:
        row = lane // heads * BLOCK_M + lane_row
    else:
        row = tl.load(record + 3) * BLOCK_M + lane_row
    qo_begin = tl.load(qo_indptr + seq)
    token = row // HEAD_TILE
    head = kv_head * GROUP + lane % head_tiles * HEAD_TILE + row % HEAD_TILE
    if (token >= tl.load(qo_indptr + seq + 1) - qo_begin) | (head >= (kv_head + 1) * GROUP):
        return
    if wide:
        _merge_row(
            out, lse, partial_out, partial_lse, v_scale, v_step, sinks, parts, first, lane, tiles * heads, lane_row,
            qo_begin + token, head, kv_head, HEADS, DV, RANGES, BLOCK_M, 4, WIDE,
        )  # fmt: skip
    else:
        _merge_row(
            out, lse, partial_out, partial_lse, v_scale, v_step, sinks, parts, first, lane, tiles * heads, lane_row,
            qo_begin + token, head, kv_head, HEADS, DV, RANGES, BLOCK_M, 32, NARROW,
        )  # fmt: skip


@triton.jit
def _merge_row(
    out, lse, partial_out, partial_lse, v_scale, v_step, sinks, parts, first, lane, lanes, lane_row, token_at, head,
    kv_head, HEADS: tl.constexpr, DV: tl.constexpr, RANGES: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH elements of a row, PARTS parts at a time."""
    dim = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    index = tl.arange(0, PARTS)
    step: tl.constexpr = 2 if RANGES else 1  # a program may have two parts of ranges: one that ends, one that begins
    stride = lanes.to(tl.int64) * BLOCK_M
    row_at = lane.to(tl.int64) * BLOCK_M + lane_row
    part_most = tl.full([PARTS], LOWEST, tl.float32)
    for start in range(0, parts, PARTS):
        part = start + index
        slot = step * (first + part) + (part == 0).to(tl.int32) * (step - 1)
        part_lse = tl.load(partial_lse + slot * stride + row_at, mask=part < parts, other=float("-inf"))
        part_most = tl.maximum(part_most, part_lse)
    most = tl.max(part_most, 0)
    part_total = tl.zeros([PARTS], tl.float32)
    part_acc = tl.zeros([PARTS, WIDTH], tl.float32)  # summed up once, as that is a matter of all warps
    for start in range(0, parts, PARTS):
        part = start + index
        slot = step * (first + part) + (part == 0).to(tl.int32) * (step - 1)
        place = slot * stride + row_at
        part_lse = tl.load(partial_lse + place, mask=part < parts, other=float("-inf"))
        mask = (part_lse > float("-inf"))[:, None] & (dim < DV)[None, :]  # where a part saw nothing, there is anything
        x = tl.load(partial_out + place[:, None] * DV + dim[None, :], mask=mask, other=0.0)
        weight = tl.exp2(part_lse - most)
        part_acc += x * weight[:, None]
        part_total += weight
    acc = tl.sum(part_acc, 0)
    total = tl.sum(part_total, 0)
    divisor = total
    if sinks is not None:
        divisor += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - most)
    factor = tl.where(total > 0, 1.0 / divisor, 0.0)
    if v_scale is not None:
        factor *= tl.load(v_scale + kv_head * v_step)
    token_at = token_at.to(tl.int64)
    target = out + token_at * (HEADS * DV) + head * DV + dim
    tl.store(target, (acc * factor).to(out.dtype.element_ty), mask=dim < DV)
    if lse is not None:
        if tl.program_id(2) == 0:
            row_lse = tl.where(total > 0, most + tl.log2(total), float("-inf"))
            tl.store(lse + token_at * HEADS + head, row_lse * LN_2)
