"""The vector code of paged attention on CPUs, as numba intrinsics that write LLVM IR: no compiler is needed.

Compiled loops alone reach half of this: they convert a row's elements one by one, and reduce each score for itself.
LLVM makes of each vector here what the CPU has: AVX-512 registers for 16 lanes, AVX2 ones for 8.

Rows are read as pieces (`row_pieces`), of two vectors where that saves instructions. 2 * LANES bfloat16 are loaded as
integers, whose lower halves, shifted, are the even elements and whose upper halves are the odd ones: two instructions
where conversion in order takes four. As many fp8 become float16 in one vector of 16-bit words. Queries and results are
kept in that order of elements and converted at the ends.

Addresses are integers (uintp), strides and offsets bytes. What is named in capital letters is a literal, and compiled
in: LANES float32 of a vector; DIM elements of a row; DTYPE, an index of `DTYPES`; GROUP query rows that share a
key or a value once it is loaded.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from anyattn.types import DTYPE_BYTES

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_F32, _BF16, _F16, _E4M3, _E5M2 = range(5)
_BYTES = tuple(DTYPE_BYTES[name] for name in DTYPES)

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_LOG2E = 1.44269504088896341
_LEAST = -87.0  # exp of less is 0 here; float32 has no normal number for it

E4M3_FACTOR = 256.0
"""What float8_e4m3fn, its bits read as those of a float16, has to be multiplied with: the exponents' biases differ."""

Piece = tuple[int, int, bool]
"""First element, number of elements, and whether that is 2 * LANES, which make two vectors."""


def row_pieces(dim: int, lanes: int, dtype: int) -> list[Piece]:
    """How a row is read, from its beginning to its end."""
    pieces = []
    first = 0
    while first < dim:
        pairs = dtype in (_BF16, _E4M3, _E5M2) and dim - first >= 2 * lanes
        count = 2 * lanes if pairs else min(lanes, dim - first)
        pieces.append((first, count, pairs))
        first += count
    return pieces


def row_vectors(dim: int, lanes: int, dtype: int) -> int:
    """Vectors that a row of a cache of this dtype fills."""
    return sum(1 + pairs for _, _, pairs in row_pieces(dim, lanes, dtype))


class _Code:
    """What the intrinsics write with: vectors of `lanes` float32 in one function."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.floats = ir.VectorType(_FLOAT, lanes)
        self.ints = ir.VectorType(_I32, lanes)

    def const(self, value: float) -> Any:
        return ir.Constant(self.floats, [value] * self.lanes)

    def iconst(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.lanes)

    def call(self, name: str, *arguments: Any, result: Any = None, fastmath: tuple[str, ...] = ()) -> Any:
        result = self.floats if result is None else result
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.{name}")
        return self.b.call(function, arguments, fastmath=fastmath)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call(f"fma.v{self.lanes}f32", x, y, z)

    def at(self, address: Any, offset: int | Any, kind: Any) -> Any:
        if not isinstance(offset, int):
            address = self.b.add(address, offset)
        elif offset:
            address = self.b.add(address, ir.Constant(_I64, offset))
        return self.b.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, offset: int | Any, kind: Any, align: int) -> Any:
        loaded = self.b.load(self.at(address, offset, kind))
        loaded.align = align
        return loaded

    def store(self, value: Any, address: Any, offset: int | Any, align: int = 4) -> None:
        self.b.store(value, self.at(address, offset, value.type)).align = align

    def prefetch(self, address: Any, offset: int) -> None:
        """Into L2, as what is prefetched are the next tokens, and the current ones fill L1."""
        pointer = self.at(address, offset, _I8)
        zero, locality, is_data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        self.call("prefetch.p0", pointer, zero, locality, is_data, result=ir.VoidType())

    def shuffle(self, x: Any, y: Any, lanes: list[int]) -> Any:
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    def splat(self, scalar: Any) -> Any:
        kind = ir.VectorType(scalar.type, self.lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.shuffle(one, one, [0] * self.lanes)

    def widened(self, short: Any) -> Any:
        """A vector of LANES with zeros behind a shorter one's elements."""
        count = short.type.count
        if count == self.lanes:
            return short
        zeros = ir.Constant(short.type, [0.0] * count)
        return self.shuffle(short, zeros, [min(i, count) for i in range(self.lanes)])

    def loaded(self, address: Any, piece: Piece, dtype: int) -> list[Any]:
        """The vectors of a piece of a row: one or two; of bfloat16 the even elements, then the odd ones."""
        first, count, pairs = piece
        offset, align = first * _BYTES[dtype], _BYTES[dtype]
        if pairs and dtype == _BF16:
            both = self.load(address, offset, self.ints, align)
            even, odd = self.b.shl(both, self.iconst(16)), self.b.and_(both, self.iconst(0xFFFF0000))
            return [self.b.bitcast(even, self.floats), self.b.bitcast(odd, self.floats)]
        floats, halves = ir.VectorType(_FLOAT, count), ir.VectorType(_HALF, count)
        if dtype == _F32:
            return [self.widened(self.load(address, offset, floats, align))]
        if dtype == _F16:
            return [self.widened(self.b.fpext(self.load(address, offset, halves, align), floats))]
        words = ir.VectorType(_I16, count)
        if dtype == _BF16:
            wide = ir.VectorType(_I32, count)
            bits = self.b.zext(self.load(address, offset, words, align), wide)
            bits = self.b.shl(bits, ir.Constant(wide, [16] * count))
            return [self.widened(self.b.bitcast(bits, floats))]
        bits = self.b.sext(self.load(address, offset, ir.VectorType(_I8, count), align), words)

        def every(value: int) -> Any:
            return ir.Constant(words, [value] * count)

        if dtype == _E5M2:  # a float16 without its lower byte
            bits = self.b.shl(bits, every(8))
        else:  # the sign at its place and behind it, three places of zeros
            is_nan = self.b.icmp_unsigned("==", self.b.and_(bits, every(0x7F)), every(0x7F))
            bits = self.b.and_(self.b.shl(bits, every(7)), every(0xBFFF))
            bits = self.b.select(is_nan, every(0x7E00), bits)
        both = self.b.bitcast(bits, halves)
        if not pairs:
            return [self.widened(self.b.fpext(both, floats))]
        parts = [list(range(self.lanes)), list(range(self.lanes, 2 * self.lanes))]
        return [self.b.fpext(self.shuffle(both, both, part), self.floats) for part in parts]

    def sums(self, vectors: list[Any]) -> Any:
        """Of LANES vectors the sum of each one's elements: a vector.

        Two rounds add within 128 bits, where neighbours meet; the others add across them.
        """
        blocks = range(self.lanes // 4)
        other = self.lanes

        def added(low: list[int], high: list[int]) -> list[Any]:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            return [self.b.fadd(self.shuffle(x, y, low), self.shuffle(x, y, high)) for x, y in pairs]

        for low, high in (((0, other, 1, other + 1), (2, other + 2, 3, other + 3)),
                          ((0, 1, other, other + 1), (2, 3, other + 2, other + 3))):  # fmt: skip
            vectors = added(*([4 * block + i for block in blocks for i in lanes] for lanes in (low, high)))
        while len(vectors) > 1:
            halves = [range(start, 2 * len(blocks), 2) for start in (0, 1)]
            vectors = added(*([4 * block + i for block in half for i in range(4)] for half in halves))
        return vectors[0]

    def exp(self, x: Any) -> Any:
        """exp of x <= 0, to 2e-7 of itself; 0 below -87. Cephes' expf: x = n log 2 + r, a polynomial of r, times 2^n.

        Adding 1.5 * 2^23 rounds to the integer n, and leaves it in the lowest bits.
        """
        magic = self.const(12582912.0)
        limited = self.b.select(self.b.fcmp_ordered("<", x, self.const(_LEAST)), self.const(_LEAST), x)
        shifted = self.fma(limited, self.const(_LOG2E), magic)
        n = self.b.fsub(shifted, magic)
        r = self.fma(n, self.const(-0.693359375), limited)
        r = self.fma(n, self.const(2.12194440e-4), r)
        p = self.const(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, self.const(coefficient))
        p = self.fma(self.b.fmul(p, r), r, self.b.fadd(r, self.const(1.0)))
        exponent = self.b.add(self.b.bitcast(shifted, self.ints), self.iconst(127))
        power = self.b.bitcast(self.b.shl(exponent, self.iconst(23)), self.floats)
        below = self.b.fcmp_ordered("<", x, self.const(_LEAST))
        return self.b.select(below, self.const(0.0), self.b.fmul(p, power))

    def tanh(self, x: Any) -> Any:
        """To 3e-7 of itself. Cephes' tanhf: up to 0.625 x times a polynomial of x^2; behind that by e = exp(-2 |x|) as
        (1 - e) / (1 + e) with the sign of x, which near 0 would leave an absolute error, which a soft cap multiplies.
        """
        magnitude = self.call(f"fabs.v{self.lanes}f32", x)
        e = self.exp(self.b.fmul(magnitude, self.const(-2.0)))
        one = self.const(1.0)
        large = self.b.fdiv(self.b.fsub(one, e), self.b.fadd(one, e))
        large = self.call(f"copysign.v{self.lanes}f32", large, x)
        square, p = self.b.fmul(x, x), self.const(-5.70498872745e-3)
        for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
            p = self.fma(p, square, self.const(coefficient))
        small = self.fma(self.b.fmul(p, square), x, x)
        return self.b.select(self.b.fcmp_ordered("<", magnitude, self.const(0.625)), small, large)

    def rounded(self, x: Any, dtype: int) -> Any:
        """In the bits of bfloat16 or float16, to nearest and ties to even; NaN stays one."""
        count = x.type.count
        if dtype == _F32:
            return x
        if dtype == _F16:
            return self.b.fptrunc(x, ir.VectorType(_HALF, count))
        wide, words = ir.VectorType(_I32, count), ir.VectorType(_I16, count)

        def every(value: int) -> Any:
            return ir.Constant(wide, [value] * count)

        bits = self.b.bitcast(x, wide)
        odd = self.b.and_(self.b.lshr(bits, every(16)), every(1))
        up = self.b.add(self.b.add(bits, odd), every(0x7FFF))
        up = self.b.select(self.b.fcmp_unordered("uno", x, x), every(0x7FC00000), up)
        return self.b.trunc(self.b.lshr(up, every(16)), words)


def _literals(*kinds: Any) -> list[int]:
    return [kind.literal_value for kind in kinds]


def _no_value(context: Any) -> Any:
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)
def load_query(
    typing: Any, source: Any, target: Any, scale: Any, DIM: Any, LANES: Any, DTYPE: Any, Q_DTYPE: Any,
) -> Any:  # fmt: skip
    """target[row_vectors, LANES] = scale * source[DIM], float32, in the order in which rows of DTYPE are read."""
    dim, lanes, dtype, q_dtype = _literals(DIM, LANES, DTYPE, Q_DTYPE)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, (source, target, scale, *_) = _Code(builder, lanes), arguments
        factor, number = code.splat(scale), 0
        for first, count, pairs in row_pieces(dim, lanes, dtype):
            natural = [(first + i, min(lanes, count - i), False) for i in range(0, count, lanes)]
            vectors = [vector for piece in natural for vector in code.loaded(source, piece, q_dtype)]
            if pairs and dtype == _BF16:
                ends = list(range(2 * lanes))
                vectors = [code.shuffle(vectors[0], vectors[1], ends[i::2]) for i in (0, 1)]
            for vector in vectors:
                code.store(code.b.fmul(vector, factor), target, number * lanes * 4)
                number += 1
        return _no_value(context)

    return types.void(types.uintp, types.uintp, types.float32, DIM, LANES, DTYPE, Q_DTYPE), generate


@intrinsic(prefer_literal=True)
def store_row(
    typing: Any, source: Any, target: Any, scale: Any, DIM: Any, LANES: Any, DTYPE: Any, OUT_DTYPE: Any,
) -> Any:  # fmt: skip
    """target[DIM] = scale * source, which is as `load_query` leaves it; rounded to nearest."""
    dim, lanes, dtype, out_dtype = _literals(DIM, LANES, DTYPE, OUT_DTYPE)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, (source, target, scale, *_) = _Code(builder, lanes), arguments
        factor, number = code.splat(scale), 0
        for first, count, pairs in row_pieces(dim, lanes, dtype):
            vectors = []
            for _ in range(1 + pairs):
                vectors.append(code.b.fmul(code.load(source, number * lanes * 4, code.floats, 4), factor))
                number += 1
            if pairs and dtype == _BF16:
                both = [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]
                vectors = [code.shuffle(vectors[0], vectors[1], part) for part in (both[:lanes], both[lanes:])]
            for i, vector in enumerate(vectors):
                kept = min(lanes, count - i * lanes)
                part = vector if kept == lanes else code.shuffle(vector, vector, list(range(kept)))
                code.store(code.rounded(part, out_dtype), target, (first + i * lanes) * _BYTES[out_dtype], 1)
        return _no_value(context)

    return types.void(types.uintp, types.uintp, types.float32, DIM, LANES, DTYPE, OUT_DTYPE), generate


@intrinsic(prefer_literal=True)
def scores(
    typing: Any, keys: Any, head: Any, head_stride: Any, queries: Any, target: Any, stride: Any, ahead: Any,
    DIM: Any, LANES: Any, DTYPE: Any, HEADS: Any, GROUP: Any, PREFETCH: Any,
) -> Any:  # fmt: skip
    """target[keys, HEADS * GROUP] = the products of as many keys as `keys_of` says with GROUP queries of each KV head.

    keys, ahead: of addresses of rows; `head` bytes to the first KV head, `head_stride` from one to the next. The lines
    of the rows at `ahead` are prefetched. queries: HEADS * GROUP rows in `load_query`'s order. target: `stride` bytes
    from key to key.
    """
    dim, lanes, dtype, heads, group, prefetch = _literals(DIM, LANES, DTYPE, HEADS, GROUP, PREFETCH)
    block, pieces = keys_of(lanes, heads * group), row_pieces(dim, lanes, dtype)
    row_bytes = row_vectors(dim, lanes, dtype) * lanes * 4

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, (keys, head, head_stride, queries, target, stride, ahead, *_) = _Code(builder, lanes), arguments
        total: list[Any] = [None] * (block * heads * group)
        for h in range(heads):
            offset = code.b.add(head, code.b.mul(head_stride, ir.Constant(_I64, h)))
            rows, next_rows = (
                [code.b.add(code.load(addresses, 8 * i, _I64, 8), offset) for i in range(block)]
                for addresses in (keys, ahead)
            )
            sums = [[code.const(0.0)] * block for _ in range(group)]
            number = 0
            for piece in pieces:
                if prefetch:
                    for line in _lines_of([piece], dtype):
                        for row in next_rows:
                            code.prefetch(row, line * 64)
                loaded = [code.loaded(row, piece, dtype) for row in rows]
                for part in range(len(loaded[0])):
                    for g in range(group):
                        place = (h * group + g) * row_bytes + number * lanes * 4
                        query = code.load(queries, place, code.floats, 4)
                        for i in range(block):
                            sums[g][i] = code.fma(loaded[i][part], query, sums[g][i])
                    number += 1
            for g in range(group):
                for i in range(block):
                    total[(i * heads + h) * group + g] = sums[g][i]
        result = code.sums(total + [code.const(0.0)] * (lanes - len(total)))
        together = heads * group
        for i in range(block):
            part = result
            if together < lanes:
                part = code.shuffle(result, result, [i * together + row for row in range(together)])
            code.store(part, target, code.b.mul(stride, ir.Constant(_I64, i)))
        return _no_value(context)

    return types.void(*[types.uintp] * 7, DIM, LANES, DTYPE, HEADS, GROUP, PREFETCH), generate


def _lines_of(pieces: list[Piece], dtype: int) -> range:
    """Cache lines of a row, by number, that begin in these neighbouring pieces."""
    (begin, _, _), (last, count, _) = pieces[0], pieces[-1]
    return range(-(-begin * _BYTES[dtype] // 64), -(-(last + count) * _BYTES[dtype] // 64))


def keys_of(lanes: int, rows: int) -> int:
    """Keys that `scores` takes at a time with so many query rows: a power of 2."""
    return 1 << int(math.log2(lanes // rows))


@intrinsic(prefer_literal=True)
def softmax(
    typing: Any, scores: Any, stride: Any, count: Any, maximum: Any, total: Any, correction: Any, soft_cap: Any,
    LANES: Any, CAPPED: Any,
) -> Any:  # fmt: skip
    """For LANES query rows, `count` keys' scores become exp(score - maximum); that and `total` are carried along.

    scores: `stride` bytes from key to key. maximum, total, correction: of LANES float32; the last becomes exp(old
    maximum - new maximum). Scores of what a row does not see are -inf. CAPPED: whether scores are
    soft_cap * tanh(score / soft_cap) first.
    """
    lanes, is_capped = _literals(LANES, CAPPED)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, (scores, stride, count, maximum, total, correction, soft_cap, *_) = _Code(builder, lanes), arguments
        b = code.b
        highest, added = (cgutils.alloca_once(b, code.floats) for _ in range(2))
        old = code.load(maximum, 0, code.floats, 4)
        b.store(old, highest)
        cap, hidden = code.splat(soft_cap), code.const(-math.inf)
        with cgutils.for_range(b, count, intp=_I64) as loop:
            place = b.mul(loop.index, stride)
            score, most = code.load(scores, place, code.floats, 4), b.load(highest)
            if is_capped:
                capped = b.fmul(cap, code.tanh(b.fdiv(score, cap)))
                score = b.select(b.fcmp_ordered("==", score, hidden), hidden, capped)
                code.store(score, scores, place)
            b.store(b.select(b.fcmp_ordered(">", score, most), score, most), highest)
        new = b.load(highest)
        factor = code.exp(b.fsub(old, new))
        b.store(b.fmul(code.load(total, 0, code.floats, 4), factor), added)
        with cgutils.for_range(b, count, intp=_I64) as loop:
            place = b.mul(loop.index, stride)
            weight = code.exp(b.fsub(code.load(scores, place, code.floats, 4), new))
            b.store(b.fadd(b.load(added), weight), added)
            code.store(weight, scores, place)
        code.store(b.load(added), total, 0)
        code.store(new, maximum, 0)
        code.store(factor, correction, 0)
        return _no_value(context)

    return types.void(*[types.uintp] * 6, types.float32, LANES, CAPPED), generate


@intrinsic(prefer_literal=True)
def accumulate(
    typing: Any, values: Any, head: Any, weights: Any, stride: Any, corrections: Any, target: Any, count: Any,
    ahead: Any, DIM: Any, LANES: Any, DTYPE: Any, GROUP: Any, PREFETCH: Any,
) -> Any:  # fmt: skip
    """target[GROUP, DIM] = corrections[GROUP] * target + weights[count, GROUP].T @ rows of `count` values.

    values, ahead: of addresses, as for `scores`. weights: `stride` bytes from key to key. target: in `load_query`'s
    order.
    """
    dim, lanes, dtype, group, prefetch = _literals(DIM, LANES, DTYPE, GROUP, PREFETCH)
    pieces = row_pieces(dim, lanes, dtype)
    row_bytes = row_vectors(dim, lanes, dtype) * lanes * 4

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, (values, head, weights, stride, corrections, target, count, ahead, *_) = _Code(builder, lanes), arguments
        b, number = code.b, 0
        for start in range(0, len(pieces), _pieces_at_a_time(pieces, lanes, group)):
            chosen = pieces[start : start + _pieces_at_a_time(pieces, lanes, group)]
            width = sum(1 + pairs for _, _, pairs in chosen)
            places = [(g, g * row_bytes + (number + i) * lanes * 4) for g in range(group) for i in range(width)]
            sums = []
            for g, place in places:
                factor = code.splat(code.load(corrections, g * 4, _FLOAT, 4))
                kept = cgutils.alloca_once(b, code.floats)
                b.store(b.fmul(code.load(target, place, code.floats, 4), factor), kept)
                sums.append(kept)
            with cgutils.for_range(b, count, intp=_I64) as loop:
                token = b.mul(loop.index, ir.Constant(_I64, 8))
                row = b.add(code.load(values, token, _I64, 8), head)
                next_row = b.add(code.load(ahead, token, _I64, 8), head)
                if prefetch:
                    for line in _lines_of(chosen, dtype):
                        code.prefetch(next_row, line * 64)
                vectors = [vector for piece in chosen for vector in code.loaded(row, piece, dtype)]
                key_weights = b.add(weights, b.mul(loop.index, stride))
                for g in range(group):
                    weight = code.splat(code.load(key_weights, g * 4, _FLOAT, 4))
                    for i, vector in enumerate(vectors):
                        kept = sums[g * width + i]
                        b.store(code.fma(weight, vector, b.load(kept)), kept)
            for kept, (_, place) in zip(sums, places, strict=True):
                code.store(b.load(kept), target, place)
            number += width
        return _no_value(context)

    return types.void(*[types.uintp] * 8, DIM, LANES, DTYPE, GROUP, PREFETCH), generate


def _pieces_at_a_time(pieces: list[Piece], lanes: int, group: int) -> int:
    """So that the sums stay in registers: LANES of them, half of AVX-512's 32 or of AVX2's 16."""
    vectors = lanes // group
    return max(vectors // (2 if pieces[0][2] else 1), 1)


@intrinsic
def next_number(typing: Any, counter: Any) -> Any:
    """Adds 1 to the int64 at an address, for all threads as one, and returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "seq_cst")

    return types.int64(types.uintp), generate


def _pointer_to(element: Any) -> Any:
    return types.CPointer(element)  # type: ignore[attr-defined]  # numba fills its module when it is imported


def _array_at(element: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(_pointer_to(element)))

        return _pointer_to(element)(types.uintp), generate

    return pointer


floats_at, int32s_at, int64s_at = (_array_at(element) for element in (types.float32, types.int32, types.int64))
"""Pointers from addresses, for `numba.carray`."""
