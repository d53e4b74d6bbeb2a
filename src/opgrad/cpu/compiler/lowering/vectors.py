"""Loads, stores, and vectors made from numbers."""

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from opgrad.cpu.compiler import simd
from opgrad.cpu.compiler.lowering.conversion import narrow, widen
from opgrad.cpu.compiler.lowering.masks import masked_load, masked_store
from opgrad.cpu.compiler.lowering.operations import (
    ELEMENT,
    I1,
    I32,
    I64,
    SCALAR,
    PointerType,
    VectorType,
    at,
    defines,
    definition,
    integers,
    intrinsic,
    splat,
)
from opgrad.cpu.compiler.words import CACHE_LINE


def vector_of(p: PointerType) -> VectorType:
    return VectorType(p.element, p.lanes)


@defines(simd.lanes)
def _(p: Any) -> Any:
    return types.int64, lambda context, builder, base: I64(p.lanes)


@defines(simd.line)
def _(p: Any) -> Any:
    return types.int64, lambda context, builder, base: I64(CACHE_LINE // p.size)


@defines(simd.is_fine)
def _(p: Any) -> Any:
    return types.boolean, lambda context, builder, base: I1(p.size * 8 >= p.bits)


@defines(operator.add)
def _(p: Any, i: Any) -> Any:
    if not isinstance(p, PointerType) or not isinstance(i, types.Integer):
        return None

    def emit(context: Any, builder: Any, base: Any, offset: Any) -> Any:
        return builder.gep(base, [builder.mul(context.cast(builder, offset, i, types.int64), I64(p.size))])

    return p, emit


@defines(simd.at_byte)
def _(p: Any, offset: Any) -> Any:
    return p, lambda context, builder, base, i: builder.gep(base, [context.cast(builder, i, offset, types.int64)])


@defines(simd.load)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        address = at(builder, p, base, i, ir.VectorType(p.memory, p.lanes))
        return widen(builder, p, builder.load(address, align=1), p.lanes)

    return vector_of(p), emit


@defines(simd.load_masked)
def _(p: Any, i: Any, mask: Any, fill: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, mask: Any, fill_value: Any) -> Any:
        kind = ir.VectorType(p.memory, p.lanes)
        address = at(builder, p, base, i, kind)
        wide = widen(builder, p, masked_load(builder, address, kind, p.size, mask), p.lanes)
        other = splat(builder, p.lanes, element_of(context, builder, fill_value, fill, p.element))
        return builder.select(mask, wide, other)

    return vector_of(p), emit


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


def _row_of(operand: Any, row: int) -> Any:
    """The pointer to a row of one operand."""


@defines(_row_of)
def _(operand: Any, row: Any) -> Any:
    def emit(context: Any, builder: Any, given: Any, row: Any) -> Any:
        data, step = cgutils.unpack_tuple(builder, given, 2)
        return builder.gep(data, [builder.mul(builder.mul(row, step), I64(operand[0].size))])

    return operand[0], emit


for_each(simd.load_each, simd.load)
for_each(simd.load_each_masked, simd.load_masked)
for_each(simd.each_row, _row_of)


@defines(simd.load_one)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        if p.element[0] == "i":
            whole = builder.load(at(builder, p, base, i, p.memory), align=1)
            return builder.sext(whole, I64) if p.size < 8 else whole
        one = ir.VectorType(p.memory, 1)
        value = builder.load(at(builder, p, base, i, one), align=1)
        return builder.extract_element(widen(builder, p, value, 1), I32(0))

    return SCALAR[p.element], emit


for_each(simd.load_one_each, simd.load_one)


@defines(simd.store)
def _(p: Any, i: Any, v: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, v: Any) -> None:
        value = narrow(builder, p, v, p.lanes)
        builder.store(value, at(builder, p, base, i, value.type), align=1)

    return types.none, emit


@defines(simd.store_streaming)
def _(p: Any, i: Any, v: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, v: Any) -> None:
        value = narrow(builder, p, v, p.lanes)
        aligned = min(CACHE_LINE, p.lanes * p.size)
        instruction = builder.store(value, at(builder, p, base, i, value.type), align=aligned)
        instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))

    return types.none, emit


@defines(simd.store_masked)
def _(p: Any, i: Any, v: Any, mask: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, v: Any, mask: Any) -> None:
        value = narrow(builder, p, v, p.lanes)
        masked_store(builder, value, at(builder, p, base, i, value.type), p.size, mask)

    return types.none, emit


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


store_several(simd.store_each, simd.store)
store_several(simd.store_each_masked, simd.store_masked)


@defines(simd.store_one)
def _(p: Any, i: Any, x: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any, value: Any) -> None:
        number = context.cast(builder, value, x, SCALAR[p.element])
        if p.element[0] == "i":
            whole = builder.trunc(number, p.memory) if p.size < 8 else number
            builder.store(whole, at(builder, p, base, i, p.memory), align=1)
            return
        one = ir.VectorType(ELEMENT[p.element], 1)
        vector = builder.insert_element(ir.Constant(one, ir.Undefined), number, I32(0))
        stored = narrow(builder, p, vector, 1)
        builder.store(stored, at(builder, p, base, i, stored.type), align=1)

    return types.none, emit


store_several(simd.store_one_each, simd.store_one)


@defines(simd.to_line)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        address = builder.ptrtoint(builder.gep(base, [builder.mul(i, I64(p.size))]), I64)
        bytes_left = builder.and_(builder.neg(address), I64(CACHE_LINE - 1))
        whole = builder.icmp_unsigned("==", builder.urem(bytes_left, I64(p.size)), I64(0))
        return builder.select(whole, builder.udiv(bytes_left, I64(p.size)), I64(-1))

    return types.int64, emit


@defines(simd.address_of)
def _(p: Any) -> Any:
    return types.int64, lambda context, builder, base: builder.ptrtoint(base, I64)


@defines(simd.prefetch)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> None:
        start = builder.gep(base, [builder.add(builder.mul(i, I64(p.size)), I64(CACHE_LINE - p.size))])
        for line in range(0, p.lanes * p.size, CACHE_LINE):
            _ask_for(builder, builder.gep(start, [I64(line)]))

    return types.none, emit


@defines(simd.prefetch_line)
def _(p: Any, i: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, i: Any) -> None:
        _ask_for(builder, builder.gep(base, [builder.mul(i, I64(p.size))]))

    return types.none, emit


def _ask_for(builder: Any, address: Any) -> None:
    read, keep_in_l2, data = I32(0), I32(2), I32(1)
    intrinsic(builder, "llvm.prefetch", ir.VoidType(), [address, read, keep_in_l2, data], "p0")


@defines(simd.full)
def _(p: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, x: Any) -> Any:
        return splat(builder, p.lanes, element_of(context, builder, x, value, p.element))

    return vector_of(p), emit


for_each(simd.full_each, simd.full)


@defines(simd.like)
def _(v: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _: Any, x: Any) -> Any:
        return splat(builder, v.lanes, element_of(context, builder, x, value, v.element))

    return v, emit


@defines(simd.number)
def _(p: Any, value: Any) -> Any:
    return SCALAR[p.element], lambda context, builder, base, x: context.cast(builder, x, value, SCALAR[p.element])


@defines(simd.first)
def _(p: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, base: Any, count: Any) -> Any:
        word = VectorType("i32", p.lanes)
        small = builder.icmp_signed("<", count, I64(p.lanes))
        limit = builder.trunc(builder.select(small, count, I64(p.lanes)), I32)
        negative = builder.icmp_signed("<", count, I64(0))
        limit = splat(builder, word.lanes, builder.select(negative, I32(0), limit))
        return builder.icmp_signed("<", integers(word, range(p.lanes)), limit)

    return VectorType("i1", p.lanes), emit


@defines(simd.index)
def _(p: Any, i: Any) -> Any:
    kind = VectorType(f"i{p.bits}", p.lanes)

    def emit(context: Any, builder: Any, base: Any, i: Any) -> Any:
        start = builder.trunc(i, I32) if p.bits == 32 else i
        return builder.add(splat(builder, kind.lanes, start), integers(kind, range(p.lanes)))

    return kind, emit


@defines(simd.interleave)
def _(a: Any, b: Any) -> Any:
    result = types.UniTuple(a, 2)

    def emit(context: Any, builder: Any, first: Any, second: Any) -> Any:
        turns = [side * a.lanes + lane for lane in range(a.lanes) for side in (0, 1)]
        halves = [ir.Constant(ir.VectorType(I32, a.lanes), part) for part in (turns[: a.lanes], turns[a.lanes :])]
        return context.make_tuple(builder, result, [builder.shuffle_vector(first, second, pick) for pick in halves])

    return result, emit


def element_of(context: Any, builder: Any, value: Any, kind: Any, element: str) -> Any:
    """A number of Numba type `kind` as an LLVM scalar for lanes of `element`."""
    number = context.cast(builder, value, kind, SCALAR[element])
    return builder.trunc(number, I32) if element == "i32" else number
