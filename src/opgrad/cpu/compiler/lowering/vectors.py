"""Loads and stores of vectors, whole, masked, and of blocks that are transposed in registers; vectors from numbers."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types

from opgrad.cpu.compiler import simd
from opgrad.cpu.compiler.lowering.conversion import narrow, widen
from opgrad.cpu.compiler.lowering.operations import (
    ELEMENT,
    I1,
    I32,
    I64,
    LANE,
    NUMBER,
    SCALAR,
    PointerType,
    VectorType,
    at,
    defines,
    definition,
    emits,
    has,
    integers,
    intrinsic,
    is_x86,
    lanes_of,
    mangled,
    same,
    shuffled,
    splat,
)
from opgrad.cpu.compiler.words import CACHE_LINE

WORD = 4  # bytes: AVX2 has no instruction that masks anything smaller


def masked_load(builder: Any, address: Any, kind: ir.VectorType, size: int, mask: Any) -> Any:
    """The elements of `size` bytes for which the mask holds; 0 elsewhere, where memory is not touched."""
    if not _in_words(size):
        return _load(builder, address, kind, mask)
    words, whole, single = _parts(builder, kind.count, size, mask)
    found = builder.bitcast(_load(builder, address, words, whole), kind)
    lanes, so_far = VectorType("i32", kind.count), cgutils.alloca_once_value(builder, found)
    with _each_lane(builder, single) as lane:
        one = builder.load(_element(builder, address, kind, lane), align=1)
        here = builder.icmp_signed("==", integers(lanes, range(kind.count)), splat(builder, kind.count, lane))
        builder.store(builder.select(here, splat(builder, kind.count, one), builder.load(so_far)), so_far)
    return builder.load(so_far)


def masked_store(builder: Any, value: Any, address: Any, size: int, mask: Any) -> None:
    """Write the elements of `size` bytes for which the mask holds; elsewhere memory is not touched."""
    if not _in_words(size):
        _store(builder, value, address, mask)
        return
    words, whole, single = _parts(builder, value.type.count, size, mask)
    _store(builder, builder.bitcast(value, words), address, whole)
    with _each_lane(builder, single) as lane:
        one = builder.extract_element(value, lane)
        builder.store(one, _element(builder, address, value.type, lane), align=1)


def load_first(builder: Any, addresses: list[Any], kind: ir.VectorType, size: int, count: Any) -> list[Any]:
    """The first `count` elements at each address, at least one and not all, and 0 behind them.

    Where masks take long, the elements are loaded in pieces of 1, 2, 4 …, of which each moves those before it up.
    """
    if _masks_at_once(size, loads=True):
        mask = _first(builder, kind.count, count)
        return [_load(builder, address, kind, mask) for address in addresses]
    values = [ir.Constant(kind, None) for _ in addresses]
    for piece in _pieces(kind.count):
        up = [*range(kind.count, kind.count + piece), *range(kind.count - piece)]
        before, skipped = builder.block, values
        with _if_counted(builder, count, piece):
            begin, part = builder.and_(count, count.type(-2 * piece)), ir.VectorType(kind.element, piece)
            loaded = [
                _widened(builder, builder.load(_element(builder, address, part, begin, part), align=1), kind.count)
                for address in addresses
            ]
            pairs = zip(values, loaded, strict=True)
            taken = [shuffled(builder, *pair, up) for pair in pairs]
            inside = builder.block
        values = joined(builder, kind, [(skipped, before), (taken, inside)])
    return values


def store_first(builder: Any, values: list[Any], addresses: list[Any], size: int, count: Any) -> None:
    """Write the first `count` elements of each value to its address, at least one and not all.

    Where masks take long, as the stores of AMD's processors before Zen 5 do, they are written in pieces of …, 4, 2, 1.
    """
    kind = values[0].type
    if _masks_at_once(size, loads=False):
        mask = _first(builder, kind.count, count)
        for value, address in zip(values, addresses, strict=True):
            _store(builder, value, address, mask)
        return
    for piece in reversed(_pieces(kind.count)):
        before, skipped = builder.block, values
        with _if_counted(builder, count, piece):
            begin = builder.and_(count, count.type(-2 * piece))
            down = [*range(piece, kind.count), *range(piece)]
            taken = []
            for value, address in zip(values, addresses, strict=True):
                stored = lanes_of(builder, value, range(piece))
                builder.store(stored, _element(builder, address, kind, begin, stored.type), align=1)
                taken.append(lanes_of(builder, value, down))
            inside = builder.block
        values = joined(builder, kind, [(skipped, before), (taken, inside)])


def joined(builder: Any, kind: Any, found: list[tuple[list[Any], Any]]) -> list[Any]:
    """The values of that list whose block has led here."""
    values = [builder.phi(kind) for _ in found[0][0]]
    for those, block in found:
        for value, incoming in zip(values, those, strict=True):
            value.add_incoming(incoming, block)
    return values


def _masks_at_once(size: int, loads: bool) -> bool:
    """Whether a masked load, or store, of elements of this size is one short instruction."""
    return is_x86() and has("avx512bw" if size < WORD else "avx2" if loads else "avx512f")


def _first(builder: Any, lanes: int, count: Any) -> Any:
    limit = splat(builder, lanes, builder.trunc(count, I32))
    return builder.icmp_signed("<", integers(VectorType("i32", lanes), range(lanes)), limit)


def _pieces(lanes: int) -> list[int]:
    return [1 << bit for bit in range(lanes.bit_length() - 1)]


def _if_counted(builder: Any, count: Any, piece: int) -> Any:
    """A block that is executed if a count has a piece of so many elements."""
    return builder.if_then(builder.icmp_signed("!=", builder.and_(count, count.type(piece)), count.type(0)))


def _widened(builder: Any, part: Any, lanes: int) -> Any:
    """A vector of which the first lanes are those of the part."""
    return shuffled(builder, part, part, [*range(part.type.count), *[0] * (lanes - part.type.count)])


def _in_words(size: int) -> bool:
    """Whether elements of this size are moved by words of four bytes, and by themselves where a word is incomplete.

    LLVM would test each lane and jump: 16 times for a vector with AVX2, each time with a copy of the loop's rest behind
    it.
    """
    return size < WORD and is_x86() and not has("avx512bw")


def _parts(builder: Any, lanes: int, size: int, mask: Any) -> tuple[ir.VectorType, Any, Any]:
    """The type of the vector as words, which words the mask holds whole, and the other lanes that it holds, as bits."""
    words = ir.VectorType(I32, lanes * size // WORD)
    elements = ir.VectorType(ir.IntType(8 * size), lanes)
    filled = builder.bitcast(builder.sext(mask, elements), words)
    whole = builder.icmp_signed("==", filled, ir.Constant(words, [-1] * words.count))
    in_whole = builder.bitcast(builder.sext(whole, words), elements)
    in_whole = builder.icmp_signed("!=", in_whole, ir.Constant(elements, None))
    single = builder.bitcast(builder.and_(mask, builder.not_(in_whole)), ir.IntType(lanes))
    return words, whole, builder.zext(single, I32) if lanes < 32 else single


@contextmanager
def _each_lane(builder: Any, bits: Any) -> Iterator[Any]:
    """A loop over the lanes whose bits are set, of which it yields the number.

    At the end of a row there is at most one such lane in elements of two bytes, and three in those of one.
    """
    before = builder.block
    begin, body, end = (builder.append_basic_block(name) for name in ("lanes", "lane", "lanes.end"))
    builder.branch(begin)
    builder.position_at_end(begin)
    left = builder.phi(I32)
    builder.cbranch(builder.icmp_unsigned("!=", left, I32(0)), body, end)
    builder.position_at_end(body)
    yield intrinsic(builder, "llvm.cttz", I32, [left, I1(1)])
    left.add_incoming(bits, before)
    left.add_incoming(builder.and_(left, builder.sub(left, I32(1))), builder.block)
    builder.branch(begin)
    builder.position_at_end(end)


def _element(builder: Any, address: Any, kind: ir.VectorType, lane: Any, part: Any = None) -> Any:
    """The address of an element of a vector, or of the part that begins with it."""
    element = builder.gep(builder.bitcast(address, kind.element.as_pointer()), [lane])
    return builder.bitcast(element, part.as_pointer()) if part else element


def _load(builder: Any, address: Any, kind: ir.VectorType, mask: Any) -> Any:
    arguments = [builder.bitcast(address, kind.as_pointer()), I32(1), mask, ir.Constant(kind, None)]
    return intrinsic(builder, "llvm.masked.load", kind, arguments, f"{mangled(kind)}.p0")


def _store(builder: Any, value: Any, address: Any, mask: Any) -> None:
    arguments = [value, builder.bitcast(address, value.type.as_pointer()), I32(1), mask]
    intrinsic(builder, "llvm.masked.store", ir.VoidType(), arguments, f"{mangled(value.type)}.p0")


def vector_of(p: PointerType) -> VectorType:
    return VectorType(p.element, p.lanes)


emits(simd.lanes, types.int64)(lambda builder, p, base: I64(p.lanes))
emits(simd.line, types.int64)(lambda builder, p, base: I64(CACHE_LINE // p.size))
emits(simd.is_fine, types.boolean)(lambda builder, p, base: I1(p.size * 8 >= p.bits))
emits(simd.at_byte, same, types.int64)(lambda builder, p, base, offset: builder.gep(base, [offset]))
emits(simd.address_of, types.int64)(lambda builder, p, base: builder.ptrtoint(base, I64))
emits(simd.number, lambda p: SCALAR[p.element], NUMBER)(lambda builder, p, base, x: x)
emits(simd.full, vector_of, LANE)(lambda builder, p, base, x: splat(builder, p.lanes, x))
emits(simd.like, same, LANE)(lambda builder, v, like, x: splat(builder, v.lanes, x))


@defines(operator.add)
def _(p: Any, i: Any) -> Any:
    if not isinstance(p, PointerType) or not isinstance(i, types.Integer):
        return None

    def emit(context: Any, builder: Any, base: Any, offset: Any) -> Any:
        return builder.gep(base, [builder.mul(context.cast(builder, offset, i, types.int64), I64(p.size))])

    return p, emit


@emits(simd.load, vector_of)
def _(builder: Any, p: Any, base: Any, i: Any) -> Any:
    address = at(builder, p, base, i, ir.VectorType(p.memory, p.lanes))
    return widen(builder, p, builder.load(address, align=1), p.lanes)


@emits(simd.load_masked, vector_of, None, None, LANE)
def _(builder: Any, p: Any, base: Any, i: Any, mask: Any, fill: Any) -> Any:
    kind = ir.VectorType(p.memory, p.lanes)
    loaded = masked_load(builder, at(builder, p, base, i, kind), kind, p.size, mask)
    return builder.select(mask, widen(builder, p, loaded, p.lanes), splat(builder, p.lanes, fill))


@emits(simd.load_one, lambda p: SCALAR[p.element])
def _(builder: Any, p: Any, base: Any, i: Any) -> Any:
    if p.element[0] == "i":
        whole = builder.load(at(builder, p, base, i, p.memory), align=1)
        return builder.sext(whole, I64) if p.size < 8 else whole
    value = builder.load(at(builder, p, base, i, ir.VectorType(p.memory, 1)), align=1)
    return builder.extract_element(widen(builder, p, value, 1), I32(0))


@emits(simd.store, types.none)
def _(builder: Any, p: Any, base: Any, i: Any, v: Any) -> None:
    value = narrow(builder, p, v, p.lanes)
    builder.store(value, at(builder, p, base, i, value.type), align=1)


@emits(simd.store_streaming, types.none)
def _(builder: Any, p: Any, base: Any, i: Any, v: Any) -> None:
    value = narrow(builder, p, v, p.lanes)
    aligned = min(CACHE_LINE, p.lanes * p.size)
    instruction = builder.store(value, at(builder, p, base, i, value.type), align=aligned)
    instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


@emits(simd.store_masked, types.none)
def _(builder: Any, p: Any, base: Any, i: Any, v: Any, mask: Any) -> None:
    value = narrow(builder, p, v, p.lanes)
    masked_store(builder, value, at(builder, p, base, i, value.type), p.size, mask)


@emits(simd.store_one, types.none, None, NUMBER)
def _(builder: Any, p: Any, base: Any, i: Any, number: Any) -> None:
    if p.element[0] == "i":
        whole = builder.trunc(number, p.memory) if p.size < 8 else number
        builder.store(whole, at(builder, p, base, i, p.memory), align=1)
        return
    one = ir.VectorType(ELEMENT[p.element], 1)
    vector = builder.insert_element(ir.Constant(one, ir.Undefined), number, I32(0))
    stored = narrow(builder, p, vector, 1)
    builder.store(stored, at(builder, p, base, i, stored.type), align=1)


def _row_of(operand: Any, row: int) -> Any:
    """The pointer to a row of one operand."""


@emits(_row_of, lambda operand: operand[0])
def _(builder: Any, operand: Any, given: Any, row: Any) -> Any:
    data, step = cgutils.unpack_tuple(builder, given, 2)
    return builder.gep(data, [builder.mul(builder.mul(row, step), I64(operand[0].size))])


def for_each(operation: Any, one: Any) -> None:
    """Define an operation on a tuple: it applies the operation `one` to each element."""

    @defines(operation)
    def _(several: Any, *rest: Any) -> Any:
        found = [definition(one, (each, *rest)) for each in several]
        result = types.BaseTuple.from_types([kind for kind, _ in found])

        def emit(context: Any, builder: Any, given: Any, *others: Any) -> Any:
            inside = cgutils.unpack_tuple(builder, given, len(found))
            made = [code(context, builder, value, *others) for (_, code), value in zip(found, inside, strict=True)]
            return context.make_tuple(builder, result, made)

        return result, emit


def store_several(operation: Any, one: Any) -> None:
    """Define an operation on a tuple of pointers and one of vectors: it applies `one` to each pair."""

    @defines(operation)
    def _(pointers: Any, i: Any, vectors: Any, *rest: Any) -> Any:
        found = [definition(one, (p, i, v, *rest)) for p, v in zip(pointers, vectors, strict=True)]

        def emit(context: Any, builder: Any, places: Any, i: Any, values: Any, *others: Any) -> None:
            pairs = zip(cgutils.unpack_tuple(builder, places), cgutils.unpack_tuple(builder, values), strict=True)
            for (_, code), (place, value) in zip(found, pairs, strict=True):
                code(context, builder, place, i, value, *others)

        return types.none, emit


for_each(simd.each_row, _row_of)
for one, each in simd.ON_EACH.items():
    for_each(getattr(simd, each), getattr(simd, one))
for one, each in simd.ON_PAIRS.items():
    store_several(getattr(simd, each), getattr(simd, one))


@emits(simd.to_line, types.int64)
def _(builder: Any, p: Any, base: Any, i: Any) -> Any:
    address = builder.ptrtoint(builder.gep(base, [builder.mul(i, I64(p.size))]), I64)
    bytes_left = builder.and_(builder.neg(address), I64(CACHE_LINE - 1))
    whole = builder.icmp_unsigned("==", builder.urem(bytes_left, I64(p.size)), I64(0))
    return builder.select(whole, builder.udiv(bytes_left, I64(p.size)), I64(-1))


@emits(simd.prefetch, types.none)
def _(builder: Any, p: Any, base: Any, i: Any) -> None:
    start = builder.gep(base, [builder.add(builder.mul(i, I64(p.size)), I64(CACHE_LINE - p.size))])
    for line in range(0, p.lanes * p.size, CACHE_LINE):
        _ask_for(builder, builder.gep(start, [I64(line)]))


@emits(simd.prefetch_line, types.none)
def _(builder: Any, p: Any, base: Any, i: Any) -> None:
    _ask_for(builder, builder.gep(base, [builder.mul(i, I64(p.size))]))


def _ask_for(builder: Any, address: Any) -> None:
    read, keep_in_l2, data = I32(0), I32(2), I32(1)
    intrinsic(builder, "llvm.prefetch", ir.VoidType(), [address, read, keep_in_l2, data], "p0")


@emits(simd.first, lambda p: VectorType("i1", p.lanes))
def _(builder: Any, p: Any, base: Any, count: Any) -> Any:
    word = VectorType("i32", p.lanes)
    small = builder.icmp_signed("<", count, I64(p.lanes))
    limit = builder.trunc(builder.select(small, count, I64(p.lanes)), I32)
    negative = builder.icmp_signed("<", count, I64(0))
    limit = splat(builder, word.lanes, builder.select(negative, I32(0), limit))
    return builder.icmp_signed("<", integers(word, range(p.lanes)), limit)


@emits(simd.index, lambda p: VectorType(f"i{p.bits}", p.lanes))
def _(builder: Any, p: Any, base: Any, i: Any) -> Any:
    start = builder.trunc(i, I32) if p.bits == 32 else i
    return builder.add(splat(builder, p.lanes, start), integers(VectorType(f"i{p.bits}", p.lanes), range(p.lanes)))


@defines(simd.interleave)
def _(a: Any, b: Any) -> Any:
    result = types.UniTuple(a, 2)

    def emit(context: Any, builder: Any, first: Any, second: Any) -> Any:
        turns = [side * a.lanes + lane for lane in range(a.lanes) for side in (0, 1)]
        halves = turns[: a.lanes], turns[a.lanes :]
        return context.make_tuple(builder, result, [shuffled(builder, first, second, pick) for pick in halves])

    return result, emit


PART_BITS: Final = 128  # of a register


def transposed(builder: Any, rows: list[Any], bits: int) -> list[Any]:
    """The columns of a square block whose elements have so many bits.

    Neighbouring rows are interleaved inside of the parts of a register, for which there are the cheapest shuffles. That
    leaves a column's elements in the same part of several vectors, and each column is gathered from its parts.
    """
    size = len(rows)
    inside = min(PART_BITS // bits, size)
    across = size // inside
    mixed = [_interleaved(builder, rows[first : first + inside]) for first in range(0, size, inside)]
    gathered = [_parts_gathered(builder, [vectors[column] for vectors in mixed], inside) for column in range(inside)]
    return [gathered[column][part] for part in range(across) for column in range(inside)]


def _interleaved(builder: Any, rows: list[Any]) -> list[Any]:
    """Of as many rows as a part has elements, the vectors whose parts are columns of their parts."""
    inside, size = len(rows), rows[0].type.count
    low = [part * inside + lane // 2 + lane % 2 * size for part in range(size // inside) for lane in range(inside)]
    high, half = [lane + inside // 2 for lane in low], inside // 2
    for _ in range(inside.bit_length() - 1):
        rows = [shuffled(builder, rows[i], rows[i + half], pick) for i in range(half) for pick in (low, high)]
    return rows


def _parts_gathered(builder: Any, rows: list[Any], inside: int) -> list[Any]:
    """The transpose of a square block whose elements are parts, of so many elements each."""
    parts = len(rows)
    even = [part * inside + lane for part in range(0, 2 * parts, 2) for lane in range(inside)]
    odd = [lane + inside for lane in even]
    for _ in range(parts.bit_length() - 1):
        rows = [shuffled(builder, rows[i], rows[i + 1], pick) for pick in (even, odd) for i in range(0, parts, 2)]
    return rows


def row_masks(builder: Any, size: int, rows: Any, columns: Any) -> list[Any]:
    """For each row of a block, the lanes that exist: none in rows from `rows` on."""
    word = VectorType("i32", size)
    lane = ir.Constant(word.llvm, list(range(size)))
    width = builder.trunc(columns, I32)
    masks = []
    for row in range(size):
        exists = builder.icmp_signed("<", I64(row), rows)
        limit = splat(builder, word.lanes, builder.select(exists, width, I32(0)))
        masks.append(builder.icmp_signed("<", lane, limit))
    return masks


def plain(builder: Any, base: Any, p: PointerType, i: Any, size: int) -> Any:
    return at(builder, p, base, i, ir.VectorType(ELEMENT[p.element], size))


@contextmanager
def _ways(builder: Any, size: int, rows: Any, columns: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Three branches: for a whole block, for one that lacks columns alone, and for any other; they meet afterwards."""
    all_rows = builder.icmp_signed(">=", rows, I64(size))
    whole = builder.and_(all_rows, builder.icmp_signed(">=", columns, I64(size)))
    tall = builder.and_(all_rows, builder.icmp_signed(">", columns, I64(0)))
    blocks = [builder.append_basic_block(name) for name in ("whole", "other", "tall", "any", "block.end")]
    builder.cbranch(whole, blocks[0], blocks[1])
    builder.position_at_end(blocks[1])
    builder.cbranch(tall, blocks[2], blocks[3])

    @contextmanager
    def branch(begin: Any) -> Iterator[None]:
        builder.position_at_end(begin)
        yield
        builder.branch(blocks[4])

    yield branch(blocks[0]), branch(blocks[2]), branch(blocks[3])
    builder.position_at_end(blocks[4])


@defines(simd.transpose_block_in)
def _(tile: Any, stride: Any, x: Any, row: Any, rows: Any, columns: Any) -> Any:
    size = x.lanes // 2
    kind = ir.VectorType(x.memory, size)

    def emit(context: Any, builder: Any, to: Any, step: Any, base: Any, row: Any, rows: Any, columns: Any) -> None:
        addresses = [at(builder, x, base, builder.mul(row, I64(r)), kind) for r in range(size)]
        found = []
        with _ways(builder, size, rows, columns) as (whole, tall, other):
            with whole:
                found.append(([builder.load(address, align=1) for address in addresses], builder.block))
            with tall:
                loaded = load_first(builder, addresses, kind, x.size, columns)
                found.append((loaded, builder.block))
            with other:
                masks = zip(addresses, row_masks(builder, size, rows, columns), strict=True)
                loaded = [masked_load(builder, address, kind, x.size, mask) for address, mask in masks]
                found.append((loaded, builder.block))
        loaded = [widen(builder, x, value, size) for value in joined(builder, kind, found)]
        for c, column in enumerate(transposed(builder, loaded, x.bits)):
            builder.store(column, plain(builder, to, tile, builder.mul(step, I64(c)), size), align=1)

    return types.none, emit


@defines(simd.transpose_block_out)
def _(y: Any, row: Any, tile: Any, stride: Any, rows: Any, columns: Any) -> Any:
    size = y.lanes // 2

    def emit(context: Any, builder: Any, to: Any, row: Any, base: Any, step: Any, rows: Any, columns: Any) -> None:
        loaded = [
            builder.load(plain(builder, base, tile, builder.mul(step, I64(c)), size), align=1) for c in range(size)
        ]
        values = [narrow(builder, y, value, size) for value in transposed(builder, loaded, y.bits)]
        addresses = [at(builder, y, to, builder.mul(row, I64(r)), value.type) for r, value in enumerate(values)]
        with _ways(builder, size, rows, columns) as (whole, tall, other):
            with whole:
                for value, address in zip(values, addresses, strict=True):
                    builder.store(value, address, align=1)
            with tall:
                store_first(builder, values, addresses, y.size, columns)
            with other:
                masks = row_masks(builder, size, rows, columns)
                for value, address, mask in zip(values, addresses, masks, strict=True):
                    masked_store(builder, value, address, y.size, mask)

    return types.none, emit
