"""Bits of vectors, and the integer arithmetic of random numbers."""

import operator
from typing import Any

from llvmlite import ir
from numba.core import types

from opgrad.cpu.compiler import simd
from opgrad.cpu.compiler.lowering.arithmetic import arithmetic, lifted, same
from opgrad.cpu.compiler.lowering.operations import I32, VectorType, constant, defines, integers, splat

for name, instruction in {"and_": "and_", "or_": "or_", "xor": "xor", "rshift": "lshr"}.items():
    lifted(getattr(operator, name), same, arithmetic(instruction, instruction))


@defines(simd.progression)
def _(p: Any, start: Any, step: Any) -> Any:
    kind = VectorType("i64", p.lanes // 4)

    def emit(context: Any, builder: Any, base: Any, first: Any, by: Any) -> Any:
        first, by = (
            splat(builder, kind.lanes, context.cast(builder, x, t, types.int64))
            for x, t in ((first, start), (by, step))
        )
        return builder.add(first, builder.mul(integers(kind, range(kind.lanes)), by))

    return kind, emit


def _word_product(builder: Any, kind: VectorType, x: Any, y: Any) -> Any:
    low = constant(kind, 0xFFFFFFFF)
    return builder.mul(builder.and_(x, low), builder.and_(y, low))


lifted(simd.word_product, same, _word_product)


@defines(simd.interleave_words)
def _(a: Any, b: Any, c: Any, d: Any) -> Any:
    result = VectorType("i32", 4 * a.lanes)

    def shuffle(builder: Any, x: Any, y: Any, pick: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(pick)), pick))

    def emit(context: Any, builder: Any, *vectors: Any) -> Any:
        # Words are shuffled, not masked: LLVM computes the lower half of a product a second time if the product is
        # masked.
        words = [builder.bitcast(v, ir.VectorType(I32, 2 * a.lanes)) for v in vectors]
        lower = [half * 2 * a.lanes + 2 * lane for lane in range(a.lanes) for half in (0, 1)]
        pairs = [builder.bitcast(shuffle(builder, *two, lower), a.llvm) for two in (words[:2], words[2:])]
        turns = [half * a.lanes + lane for lane in range(a.lanes) for half in (0, 1)]
        return builder.bitcast(shuffle(builder, *pairs, turns), result.llvm)

    return result, emit
