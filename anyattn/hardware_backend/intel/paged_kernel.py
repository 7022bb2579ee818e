"""Paged attention on the CPU: what each of torch's OpenMP threads computes, compiled by numba when it is first needed.

An item of work is some query tokens of one sequence, all or one of its KV heads, and a range of its keys. The threads
take items until none is left. One reads CHUNK keys at a time in place, wherever their pages lie, all heads of one token
before the next, as they lie in NHD pages; multiplies them with the queries, which are float32 in the scratch memory;
brings the softmax up to date; and adds the values. Meanwhile the next chunk is prefetched, as a processor's own
prefetching ends with the page. Whoever finishes a sequence's last part merges its parts.

What is read are a sequence's keys and values, once for all of the item's query tokens; everything else stays in L1 and
L2. The arithmetic is float32.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, cfunc, types

from anyattn.hardware_backend.intel import cpu_work, vectors
from anyattn.hardware_backend.intel.cpu_work import ARGUMENTS, ITEM
from anyattn.hardware_backend.intel.vectors import (
    accumulate,
    floats_at,
    int32s_at,
    int64s_at,
    load_query,
    next_number,
    scores,
    softmax,
    store_row,
)
from anyattn.types import DTYPE_BYTES

(
    COUNTERS, NUM_ITEMS, ITEMS, KV_INDICES, Q, Q_TOKEN_STRIDE, Q_HEAD_STRIDE, OUT, LSE, K, K_PAGE_STRIDE,
    K_TOKEN_STRIDE, K_HEAD_STRIDE, V, V_PAGE_STRIDE, V_TOKEN_STRIDE, V_HEAD_STRIDE, PAGE_SIZE, SINKS, K_SCALE,
    K_SCALE_STRIDE, V_SCALE, V_SCALE_STRIDE, SCRATCH, SCRATCH_BYTES, PARTIALS, FINISHED, WINDOW, CAUSAL,
    NUM_QO_HEADS, FACTORS,
) = range(len(ARGUMENTS))  # fmt: skip
(
    FIRST_ROW, NUM_ROWS, POSITION, KV_LEN, FIRST_PAGE, KEY_START, KEY_STOP, KV_HEAD, SPLIT, PART, NUM_PARTS,
    FIRST_SLOT,
) = range(len(ITEM))  # fmt: skip

_ALIGN = 64
_NOTHING = -3.0e38  # the maximum of a row that has seen nothing: finite, as the difference to itself has to be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is compiled in.

    num_heads: KV heads of an item. group_size: query heads of each. num_tokens: most query tokens of an item.
    lanes: float32 of the CPU's vectors.
    """

    num_heads: int
    group_size: int
    num_tokens: int
    head_dim: int
    vo_head_dim: int
    dtype: str
    kv_dtype: str
    capped: bool
    lanes: int

    @property
    def group(self) -> int:
        """Query rows that are multiplied at a time."""
        return min(self.group_size * self.num_tokens, 4)

    @property
    def rows(self) -> int:
        """Query rows of a KV head, some at the end unused."""
        return -(-self.group_size * self.num_tokens // self.group) * self.group

    @property
    def heads_at_once(self) -> int:
        """KV heads of a token that are multiplied together, so that it is read as it lies: as a vector has room for."""
        if self.rows > self.group:
            return 1  # several rows of one head use a key several times, and several keys use a row several times
        most = 1 << int(math.log2(self.lanes // self.group))
        return math.gcd(self.num_heads, most)

    @property
    def line(self) -> int:
        """Float32 of one key's scores, some at the end unused."""
        return -(-self.num_heads * self.rows // self.lanes) * self.lanes

    @property
    def chunk(self) -> int:
        """Keys that are looked at together: 64 KiB of them, which leaves L2 to the next chunk's keys and values."""
        row_bytes = self.num_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]
        return min(max(1 << int(math.log2(65536 // row_bytes or 1)), 16), 64)

    @property
    def widths(self) -> tuple[int, int]:
        """Float32 of a row of queries and of results."""
        dims, kv_dtype = (self.head_dim, self.vo_head_dim), vectors.DTYPES.index(self.kv_dtype)
        query, result = (vectors.row_vectors(dim, self.lanes, kv_dtype) * self.lanes for dim in dims)
        return query, result

    @property
    def partial_floats(self) -> int:
        """Of one item that is a part: results, maxima and sums."""
        return self.num_heads * self.rows * (self.widths[1] + 2)

    def scratch_layout(self) -> tuple[int, ...]:
        """Where queries, results, scores, maxima, sums, corrections and addresses begin, in bytes; at last the size."""
        rows, (query, result) = self.num_heads * self.rows, self.widths
        keys = self.chunk + self.lanes  # with room for the last ones that are taken together
        sizes = [rows * query, rows * result, keys * self.line, self.line, self.line, self.line, 4 * keys * 2]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size * 4 // _ALIGN) * _ALIGN)
        return tuple(ends)


@functools.cache
def kernel(shape: Shape) -> int:
    """The address of `void worker(int64 *arguments)` for a shape; compiled, or taken from numba's cache on disk."""
    dtype, kv_dtype = (vectors.DTYPES.index(name) for name in (shape.dtype, shape.kv_dtype))
    numbers: tuple[int, ...] = (
        shape.num_heads, shape.group_size, shape.rows, shape.group, shape.head_dim, shape.vo_head_dim, dtype,
        kv_dtype, int(shape.capped), shape.lanes, shape.chunk, shape.line, shape.heads_at_once,
        *shape.widths,
    )  # fmt: skip
    worker: Callable[..., Any] = _worker
    numbers += (*shape.scratch_layout()[:-1], _edition())
    try:
        return int(worker(*numbers, cached=True).address)
    except RuntimeError as error:  # nowhere to write to: neither beside this file nor in the user's own folders
        if "no locator" not in str(error):
            raise
        return int(worker(*numbers, cached=False).address)


@functools.cache
def _edition() -> int:
    """Of all that is compiled: numba's cache on disk knows when this file changed, and nothing of the others."""
    files = (vectors.__file__, cpu_work.__file__, __file__)
    return zlib.crc32(b"".join(Path(file).read_bytes() for file in files))


@numba.njit
def _address_rows(a: Any, table: Any, start: Any, stop: Any, chunk: Any, keys: Any, values: Any) -> None:
    """Addresses of the rows of `chunk` tokens from `start` on, the last one's again behind `stop`."""
    last = min(start + chunk, stop) - 1
    for t in range(keys.size):
        token = min(start + t, last)
        page, offset = table[token // a[PAGE_SIZE]], token % a[PAGE_SIZE]
        keys[t] = a[K] + page * a[K_PAGE_STRIDE] + offset * a[K_TOKEN_STRIDE]
        values[t] = a[V] + page * a[V_PAGE_STRIDE] + offset * a[V_TOKEN_STRIDE]


@numba.njit
def _hide_unseen(
    a: Any, item: Any, start: Any, count: Any, heads: Any, rows: Any, group_size: Any, scores: Any
) -> None:
    """Scores of keys before a query's window or, where masks are causal, behind the query become -inf.

    scores: [count, heads * rows at least], of the keys from `start` on.
    """
    for h in range(heads):
        for r in range(item[NUM_ROWS] * group_size):
            end = np.int64(item[KV_LEN])
            if a[CAUSAL] != 0:
                end = np.int64(item[POSITION]) + r // group_size + 1
            for t in range(max(end - start, 0), count):
                scores[t, h * rows + r] = -np.inf
            if a[WINDOW] != 0:
                for t in range(min(max(end - a[WINDOW] - start, 0), count)):
                    scores[t, h * rows + r] = -np.inf


@numba.njit
def _merge(parts: Any, results: Any, maxima: Any, sums: Any) -> None:
    """All parts of the same queries become one result.

    parts: [num_parts, rows, width + 2], the last two being maxima and sums. results: [rows, width].
    """
    num_parts, rows, width = parts.shape[0], results.shape[0], results.shape[1]
    for row in range(rows):
        most = np.float32(_NOTHING)
        for part in range(num_parts):
            most = max(most, parts[part, row, width])
        total = np.float32(0.0)
        results[row, :] = np.float32(0.0)
        for part in range(num_parts):
            weight = np.float32(math.exp(parts[part, row, width] - most))
            total += weight * parts[part, row, width + 1]
            for d in range(width):
                results[row, d] += weight * parts[part, row, d]
        maxima[row] = most
        sums[row] = total


def _worker(
    HEADS: int, GROUP_SIZE: int, ROWS: int, GROUP: int, DIM: int, VO_DIM: int, DTYPE: int, KV_DTYPE: int, CAPPED: int,
    LANES: int, CHUNK: int, LINE: int, TOGETHER: int, QUERY: int, RESULT: int, Q_AT: int, RESULT_AT: int,
    SCORES_AT: int, MAXIMA_AT: int, SUMS_AT: int, CORRECTIONS_AT: int, ADDRESSES_AT: int, EDITION: int, *, cached: bool,
) -> Any:  # fmt: skip
    """Capitals are compiled in: `Shape`'s fields and properties, and its scratch layout. EDITION: `_edition()`."""
    KEYS = vectors.keys_of(LANES, TOGETHER * GROUP)
    VALUES = 8  # tokens whose values are added, all heads', before the next ones: nearly as they lie
    ADDRESSES = CHUNK + LANES
    ALL = HEADS * ROWS
    FACTOR = vectors.E4M3_FACTOR if vectors.DTYPES[KV_DTYPE] == "float8_e4m3fn" else 1.0
    BYTES = DTYPE_BYTES[vectors.DTYPES[DTYPE]]
    FIELDS, NUM_ARGUMENTS = len(ITEM), len(ARGUMENTS)
    LINE_BYTES = LINE * 4

    def worker(arguments: Any) -> None:
        a = carray(int64s_at(arguments), NUM_ARGUMENTS + 0 * EDITION)
        memory = np.uintp(a[SCRATCH] + next_number(np.uintp(a[COUNTERS] + 8)) * a[SCRATCH_BYTES])
        queries, results, line = memory + np.uintp(Q_AT), memory + np.uintp(RESULT_AT), memory + np.uintp(SCORES_AT)
        maxima_at, sums_at = memory + np.uintp(MAXIMA_AT), memory + np.uintp(SUMS_AT)
        corrections, lists = memory + np.uintp(CORRECTIONS_AT), memory + np.uintp(ADDRESSES_AT)
        query_rows = carray(floats_at(queries), (ALL, QUERY))
        result_rows = carray(floats_at(results), (ALL, RESULT))
        score_rows = carray(floats_at(line), (ADDRESSES, LINE))
        maxima, sums = carray(floats_at(maxima_at), LINE), carray(floats_at(sums_at), LINE)
        addresses = carray(int64s_at(lists), (4, ADDRESSES))  # of this chunk's keys, the next one's, values likewise
        items = carray(int32s_at(np.uintp(a[ITEMS])), (a[NUM_ITEMS], FIELDS))
        factors, ones = carray(floats_at(np.uintp(a[FACTORS])), 2), np.uintp(a[FACTORS] + 8)
        key_stride = np.uintp(a[K_HEAD_STRIDE])
        k_scales = carray(floats_at(np.uintp(a[K_SCALE])), a[NUM_QO_HEADS])
        v_scales = carray(floats_at(np.uintp(a[V_SCALE])), a[NUM_QO_HEADS])
        sinks = carray(floats_at(np.uintp(a[SINKS])), a[NUM_QO_HEADS])
        lses = carray(floats_at(np.uintp(a[LSE])), (1 << 62) // a[NUM_QO_HEADS])
        while True:
            number = next_number(np.uintp(a[COUNTERS]))
            if number >= a[NUM_ITEMS]:
                break
            item = items[number]
            used = item[NUM_ROWS] * GROUP_SIZE
            used_rows = (used + GROUP - 1) // GROUP * GROUP
            is_masked = a[WINDOW] != 0 or (a[CAUSAL] != 0 and item[NUM_ROWS] > 1)
            for row in range(ALL):
                kv_head, r = item[KV_HEAD] + row // ROWS, row % ROWS
                if r < used:
                    token, head = item[FIRST_ROW] + r // GROUP_SIZE, kv_head * GROUP_SIZE + r % GROUP_SIZE
                    source = np.uintp(a[Q] + token * a[Q_TOKEN_STRIDE] + head * a[Q_HEAD_STRIDE])
                    scale = factors[0] * np.float32(FACTOR) * k_scales[kv_head * a[K_SCALE_STRIDE]]
                    load_query(source, queries + np.uintp(row * QUERY * 4), scale, DIM, LANES, KV_DTYPE, DTYPE)
                else:
                    query_rows[row, :] = np.float32(0.0)
            result_rows[:, :] = np.float32(0.0)
            maxima[:] = np.float32(_NOTHING)
            sums[:] = np.float32(0.0)

            first_page = np.uintp(a[KV_INDICES] + 4 * item[FIRST_PAGE])
            table = carray(int32s_at(first_page), item[KV_LEN] // a[PAGE_SIZE] + 1)
            start, stop = np.int64(item[KEY_START]), np.int64(item[KEY_STOP])
            side = 0
            _address_rows(a, table, start, stop, CHUNK, addresses[0], addresses[2])
            while start < stop:
                count: Any = min(CHUNK, stop - start)
                following = start + CHUNK if start + CHUNK < stop else start
                _address_rows(a, table, following, stop, CHUNK, addresses[1 - side], addresses[3 - side])
                keys, keys_ahead = lists + np.uintp(side * ADDRESSES * 8), lists + np.uintp((1 - side) * ADDRESSES * 8)
                values, values_ahead = keys + np.uintp(2 * ADDRESSES * 8), keys_ahead + np.uintp(2 * ADDRESSES * 8)
                for key in range(0, count, KEYS):
                    here, ahead = keys + np.uintp(key * 8), keys_ahead + np.uintp(key * 8)
                    for h in range(0, HEADS, TOGETHER):
                        offset = np.uintp((item[KV_HEAD] + h) * a[K_HEAD_STRIDE])
                        for r in range(0, used_rows, GROUP):
                            query = queries + np.uintp((h * ROWS + r) * QUERY * 4)
                            target = line + np.uintp(key * LINE_BYTES + (h * ROWS + r) * 4)
                            if r == 0:
                                scores(
                                    here, offset, key_stride, query, target, np.uintp(LINE_BYTES), ahead,
                                    DIM, LANES, KV_DTYPE, TOGETHER, GROUP, 1,
                                )  # fmt: skip
                            else:
                                scores(
                                    here, offset, key_stride, query, target, np.uintp(LINE_BYTES), ahead,
                                    DIM, LANES, KV_DTYPE, TOGETHER, GROUP, 0,
                                )  # fmt: skip
                if is_masked:
                    _hide_unseen(a, item, start, count, HEADS, ROWS, GROUP_SIZE, score_rows)
                for row in range(0, LINE, LANES):
                    at = np.uintp(row * 4)
                    softmax(
                        line + at, np.uintp(LINE_BYTES), np.uintp(count), maxima_at + at, sums_at + at,
                        corrections + at, factors[1], LANES, CAPPED,
                    )  # fmt: skip
                for value in range(0, count, VALUES):
                    here, ahead = values + np.uintp(value * 8), values_ahead + np.uintp(value * 8)
                    length = np.uintp(min(VALUES, count - value))
                    for h in range(HEADS):
                        offset = np.uintp((item[KV_HEAD] + h) * a[V_HEAD_STRIDE])
                        for r in range(0, used_rows, GROUP):
                            row = h * ROWS + r
                            weights = line + np.uintp(value * LINE_BYTES + row * 4)
                            target = results + np.uintp(row * RESULT * 4)
                            at = corrections + np.uintp(row * 4) if value == 0 else ones
                            if r == 0:
                                accumulate(
                                    here, offset, weights, np.uintp(LINE_BYTES), at, target, length, ahead,
                                    VO_DIM, LANES, KV_DTYPE, GROUP, 1,
                                )  # fmt: skip
                            else:
                                accumulate(
                                    here, offset, weights, np.uintp(LINE_BYTES), at, target, length, ahead,
                                    VO_DIM, LANES, KV_DTYPE, GROUP, 0,
                                )  # fmt: skip
                start += CHUNK
                side = 1 - side

            if item[NUM_PARTS] > 1:
                first = np.uintp(a[PARTIALS]) + np.uintp(4 * ALL * (RESULT + 2)) * np.uintp(item[FIRST_SLOT])
                parts = carray(floats_at(first), (np.int64(item[NUM_PARTS]), ALL, RESULT + 2))
                slot = parts[item[PART]]
                slot[:, :RESULT] = result_rows
                slot[:, RESULT] = maxima[:ALL]
                slot[:, RESULT + 1] = sums[:ALL]
                finished = np.uintp(a[FINISHED] + 8 * item[SPLIT])
                if next_number(finished) != item[NUM_PARTS] - 1:
                    continue  # whoever is last merges
                carray(int64s_at(finished), 1)[0] = 0
                _merge(parts, result_rows, maxima, sums)
            for row in range(ALL):
                kv_head, r = item[KV_HEAD] + row // ROWS, row % ROWS
                if r >= used:
                    continue
                token, head = item[FIRST_ROW] + r // GROUP_SIZE, kv_head * GROUP_SIZE + r % GROUP_SIZE
                place = token * a[NUM_QO_HEADS] + head
                denominator = sums[row]
                if a[SINKS] != 0:
                    denominator += np.float32(math.exp(sinks[head] - maxima[row]))
                factor = np.float32(0.0)
                if denominator != np.float32(0.0):
                    factor = v_scales[kv_head * a[V_SCALE_STRIDE]] * np.float32(FACTOR) / denominator
                result = np.uintp(a[OUT] + place * VO_DIM * BYTES)
                store_row(results + np.uintp(row * RESULT * 4), result, factor, VO_DIM, LANES, KV_DTYPE, DTYPE)
                if a[LSE] != 0:
                    lses[place] = -np.inf
                    if sums[row] != np.float32(0.0):
                        lses[place] = maxima[row] + np.float32(math.log(sums[row]))

    # Files of its own on disk: numba reads and writes an index without a lock, and in one of all shapes two processes
    # that compile at once leave one shape's key with the other's code.
    compiled_in = (HEADS, GROUP_SIZE, ROWS, DIM, VO_DIM, DTYPE, KV_DTYPE, CAPPED, LANES)
    worker.__qualname__ = "worker_" + "_".join(map(str, compiled_in))
    return cfunc(types.void(types.uintp), nopython=True, cache=cached, error_model="numpy", boundscheck=False)(worker)
