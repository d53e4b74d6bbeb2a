"""Arithmetic on vectors, powers of two, reductions across lanes, and the integers of random numbers."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from opgrad.cpu.compiler import simd
from opgrad.cpu.compiler.lowering.operations import (
    ELEMENT,
    I1,
    I32,
    SCALAR,
    VectorType,
    constant,
    defines,
    element_of,
    emits,
    has,
    integers,
    intrinsic,
    lanes_of,
    same,
    shuffled,
    splat,
)


def in_lanes(context: Any, builder: Any, kind: VectorType, values: Sequence[Any], types_: Sequence[Any]) -> list[Any]:
    """The values of these types as vectors of `kind`: vectors as they are, numbers in every lane."""
    return [
        x if isinstance(t, VectorType) else splat(builder, kind.lanes, element_of(context, builder, x, t, kind.element))
        for x, t in zip(values, types_, strict=True)
    ]


def lifted(operation: Any, result: Callable[[VectorType], VectorType], emit_pair: Callable[..., Any]) -> None:
    """Define a binary operator for vector and vector, vector and number, number and vector."""

    @defines(operation)
    def _(a: Any, b: Any) -> Any:
        kind = a if isinstance(a, VectorType) else b
        if not isinstance(kind, VectorType):
            return None

        def emit(context: Any, builder: Any, x: Any, y: Any) -> Any:
            return emit_pair(builder, kind, *in_lanes(context, builder, kind, (x, y), (a, b)))

        return result(kind), emit


def mask_of(kind: VectorType) -> VectorType:
    return kind.of("i1")


def arithmetic(real: str, whole: str) -> Callable[..., Any]:
    return lambda builder, kind, x, y: getattr(builder, real if kind.element[0] == "f" else whole)(x, y)


def comparison(sign: str) -> Callable[..., Any]:
    def emit(builder: Any, kind: VectorType, x: Any, y: Any) -> Any:
        if kind.element[0] != "f":
            return builder.icmp_signed(sign, x, y)
        return builder.fcmp_unordered(sign, x, y) if sign == "!=" else builder.fcmp_ordered(sign, x, y)

    return emit


lifted(operator.add, same, arithmetic("fadd", "add"))
lifted(operator.sub, same, arithmetic("fsub", "sub"))
lifted(operator.mul, same, arithmetic("fmul", "mul"))
lifted(operator.truediv, same, arithmetic("fdiv", "sdiv"))
for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    lifted(getattr(operator, name), mask_of, comparison(sign))


def _maximum(builder: Any, kind: VectorType, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


lifted(simd.maximum, same, _maximum)


@defines(operator.neg)
def _(v: Any) -> Any:
    return (v, lambda context, builder, x: builder.fneg(x)) if isinstance(v, VectorType) else None


@defines(simd.add_each)
def _(several: Any, others: Any) -> Any:
    def emit(context: Any, builder: Any, a: Any, b: Any) -> Any:
        pairs = zip(cgutils.unpack_tuple(builder, a), cgutils.unpack_tuple(builder, b), strict=True)
        return context.make_tuple(builder, several, [builder.fadd(*pair) for pair in pairs])

    return several, emit


@defines(simd.fma)
def _(a: Any, b: Any, c: Any) -> Any:
    kind = next(t for t in (a, b, c) if isinstance(t, VectorType))

    def emit(context: Any, builder: Any, *values: Any) -> Any:
        return intrinsic(builder, "llvm.fma", kind.llvm, in_lanes(context, builder, kind, values, (a, b, c)))

    return kind, emit


@defines(simd.add_products)
def _(sums: Any, factors: Any, v: Any) -> Any:
    def emit(context: Any, builder: Any, totals: Any, values: Any, x: Any) -> Any:
        vectors = in_lanes(context, builder, v, cgutils.unpack_tuple(builder, values), factors)
        pairs = zip(vectors, cgutils.unpack_tuple(builder, totals), strict=True)
        made = [intrinsic(builder, "llvm.fma", v.llvm, [factor, x, total]) for factor, total in pairs]
        return context.make_tuple(builder, sums, made)

    return sums, emit


@defines(simd.polynomial)
def _(v: Any, coefficients: Any) -> Any:
    def emit(context: Any, builder: Any, x: Any, values: Any) -> Any:
        result, *others = in_lanes(context, builder, v, cgutils.unpack_tuple(builder, values), coefficients)
        for each in others:
            result = intrinsic(builder, "llvm.fma", v.llvm, [result, x, each])
        return result

    return v, emit


@defines(simd.select)
def _(mask: Any, a: Any, b: Any) -> Any:
    kind = a if isinstance(a, VectorType) else b

    def emit(context: Any, builder: Any, m: Any, x: Any, y: Any) -> Any:
        return builder.select(m, *in_lanes(context, builder, kind, (x, y), (a, b)))

    return kind, emit


for operation, name in {
    simd.round_even: "llvm.rint", simd.absolute: "llvm.fabs", simd.sqrt: "llvm.sqrt", simd.copy_sign: "llvm.copysign"
}.items():  # fmt: skip
    emits(operation, same)(lambda builder, v, *values, name=name: intrinsic(builder, name, v.llvm, list(values)))


MANTISSA = {"f32": 23, "f64": 52}
BIAS = {"f32": 127, "f64": 1023}
SQRT_HALF = {"f32": 0x3F3504F3, "f64": 0x3FE6A09E667F3BCD}


def _power(builder: Any, v: VectorType, n: Any) -> Any:
    """2**n for integer lanes n inside the normal range."""
    word = v.word()
    biased = builder.add(n, constant(word, BIAS[v.element]))
    return builder.bitcast(builder.shl(biased, constant(word, MANTISSA[v.element])), v.llvm)


def _has_scalef(v: VectorType) -> bool:
    """Whether the vector is two registers of AVX-512, which has an instruction for v * 2**n."""
    return has("avx512f") and v.lanes * v.bits == 1024


emits(simd.scales_at_once, types.boolean)(lambda builder, v, x: I1(_has_scalef(v)))


@emits(simd.scale_by_power, same)
def _(builder: Any, v: VectorType, x: Any, n: Any) -> Any:
    return (_scalef if _has_scalef(v) else _by_halves)(builder, v, x, n)


def _by_halves(builder: Any, v: VectorType, x: Any, n: Any) -> Any:
    """Two multiplications, so that neither power leaves the normal range and denormals are rounded."""
    word = v.word()
    whole = builder.fptosi(n, word.llvm)
    half = builder.ashr(whole, constant(word, 1))
    x = builder.fmul(x, _power(builder, v, half))
    return builder.fmul(x, _power(builder, v, builder.sub(whole, half)))


def _scalef(builder: Any, v: VectorType, x: Any, n: Any) -> Any:
    """AVX-512's one instruction for it, on registers of 512 bits."""
    lanes = 512 // v.bits
    part = ir.VectorType(ELEMENT[v.element], lanes)
    every, current_rounding = ir.Constant(ir.IntType(lanes), -1), I32(4)
    pieces = []
    for start in range(0, v.lanes, lanes):
        a, b = (lanes_of(builder, t, range(start, start + lanes)) for t in (x, n))
        arguments = [a, b, ir.Constant(part, None), every, current_rounding]
        suffix = "ps.512" if v.bits == 32 else "pd.512"
        pieces.append(intrinsic(builder, "llvm.x86.avx512.mask.scalef", part, arguments, suffix))
    return shuffled(builder, *pieces, range(v.lanes))


def _split(builder: Any, v: VectorType, x: Any) -> tuple[Any, Any]:
    """(exponent as integer lanes, mantissa in [sqrt(1/2), sqrt(2)))."""
    word = v.word()
    bits = builder.bitcast(x, word.llvm)
    above = builder.sub(bits, constant(word, SQRT_HALF[v.element]))
    exponent = builder.ashr(above, constant(word, MANTISSA[v.element]))
    mantissa = builder.sub(bits, builder.shl(exponent, constant(word, MANTISSA[v.element])))
    return exponent, builder.bitcast(mantissa, v.llvm)


emits(simd.exponent_of, same)(lambda builder, v, x: builder.sitofp(_split(builder, v, x)[0], v.llvm))
emits(simd.mantissa_of, same)(lambda builder, v, x: _split(builder, v, x)[1])


@emits(simd.power_of, same)
def _(builder: Any, v: VectorType, x: Any) -> Any:
    """The exponent's bits stand lowest; the rest is shifted out."""
    bits = builder.bitcast(x, v.word().llvm)
    return builder.bitcast(builder.shl(bits, constant(v.word(), MANTISSA[v.element])), v.llvm)


def fold(builder: Any, v: VectorType, x: Any, combine: Callable[..., Any]) -> Any:
    """Combine the upper half with the lower half until one lane is left."""
    lanes = v.lanes
    while lanes > 1:
        lanes //= 2
        x = combine(builder, v, lanes_of(builder, x, range(lanes)), lanes_of(builder, x, range(lanes, 2 * lanes)))
    return builder.extract_element(x, I32(0))


def scalar_of(v: VectorType) -> Any:
    return SCALAR[v.element]


emits(simd.first_lane, scalar_of)(lambda builder, v, x: builder.extract_element(x, I32(0)))
emits(simd.reduce_add, scalar_of)(lambda builder, v, x: fold(builder, v, x, arithmetic("fadd", "add")))
emits(simd.reduce_max, scalar_of)(lambda builder, v, x: fold(builder, v, x, _maximum))


@emits(simd.reduce_add_wide, types.float64)
def _(builder: Any, v: VectorType, *values: Any) -> Any:
    wide = v.of("f64")
    if v.element != "f64":
        values = tuple(builder.fpext(x, wide.llvm) for x in values)
    return fold(builder, wide, builder.fadd(*values), arithmetic("fadd", "add"))


for name, instruction in {"and_": "and_", "or_": "or_", "xor": "xor", "rshift": "lshr"}.items():
    lifted(getattr(operator, name), same, arithmetic(instruction, instruction))


@emits(simd.progression, lambda p: VectorType("i64", p.lanes // 4), types.int64, types.int64)
def _(builder: Any, p: Any, base: Any, start: Any, step: Any) -> Any:
    kind = VectorType("i64", p.lanes // 4)
    first, by = (splat(builder, kind.lanes, x) for x in (start, step))
    return builder.add(first, builder.mul(integers(kind, range(kind.lanes)), by))


def _word_product(builder: Any, kind: VectorType, x: Any, y: Any) -> Any:
    low = constant(kind, 0xFFFFFFFF)
    return builder.mul(builder.and_(x, low), builder.and_(y, low))


lifted(simd.word_product, same, _word_product)


@emits(simd.interleave_words, lambda a: VectorType("i32", 4 * a.lanes))
def _(builder: Any, a: VectorType, *vectors: Any) -> Any:
    # Words are shuffled, not masked: LLVM computes the lower half of a product a second time if the product is
    # masked.
    words = [builder.bitcast(v, ir.VectorType(I32, 2 * a.lanes)) for v in vectors]
    lower = [half * 2 * a.lanes + 2 * lane for lane in range(a.lanes) for half in (0, 1)]
    pairs = [builder.bitcast(shuffled(builder, *two, lower), a.llvm) for two in (words[:2], words[2:])]
    turns = [half * a.lanes + lane for lane in range(a.lanes) for half in (0, 1)]
    return builder.bitcast(shuffled(builder, *pairs, turns), ir.VectorType(I32, 4 * a.lanes))
