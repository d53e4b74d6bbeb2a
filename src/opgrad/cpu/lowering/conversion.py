"""Between elements as they stand in memory and the precision of the computation."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from opgrad.cpu.lowering.words import ELEMENT, I1, I16, I32, PointerType, VectorType, constant, has, intrinsic, is_x86


def half_to_float(builder: Any, h: Any, lanes: int) -> Any:
    """float16 bits to float32 without F16C: move the bits and multiply by 2**112, which also scales denormals."""
    word = VectorType("i32", lanes)
    number = VectorType("f32", lanes)
    wide = builder.zext(h, word.llvm)
    magnitude = builder.and_(wide, constant(word, 0x7FFF))
    sign = builder.shl(builder.and_(wide, constant(word, 0x8000)), constant(word, 16))
    shifted = builder.bitcast(builder.shl(magnitude, constant(word, 13)), number.llvm)
    scaled = builder.bitcast(builder.fmul(shifted, constant(number, 2.0**112)), word.llvm)
    special = builder.icmp_unsigned(">=", magnitude, constant(word, 0x7C00))
    scaled = builder.select(special, builder.or_(scaled, constant(word, 0x7F800000)), scaled)
    return builder.bitcast(builder.or_(scaled, sign), number.llvm)


def float_to_half(builder: Any, v: Any, lanes: int) -> Any:
    """float32 to float16 bits without F16C, to nearest even."""
    word, number = VectorType("i32", lanes), VectorType("f32", lanes)
    bits = builder.bitcast(v, word.llvm)
    magnitude = builder.and_(bits, constant(word, 0x7FFFFFFF))
    sign = builder.lshr(builder.and_(bits, constant(word, 0x80000000)), constant(word, 16))
    odd = builder.and_(builder.lshr(magnitude, constant(word, 13)), constant(word, 1))
    rebiased = builder.add(builder.add(magnitude, constant(word, 0x100000000 - (112 << 23) + 0xFFF)), odd)
    normal = builder.lshr(rebiased, constant(word, 13))
    # Adding 0.5 leaves a float16 denormal's bits at the bottom of the mantissa, rounded by the addition.
    moved = builder.fadd(builder.bitcast(magnitude, number.llvm), constant(number, 0.5))
    denormal = builder.sub(builder.bitcast(moved, word.llvm), constant(word, 126 << 23))
    nan = builder.icmp_unsigned(">", magnitude, constant(word, 0x7F800000))
    infinite = builder.select(nan, constant(word, 0x7E00), constant(word, 0x7C00))
    small = builder.icmp_unsigned("<", magnitude, constant(word, 113 << 23))
    large = builder.icmp_unsigned(">=", magnitude, constant(word, 143 << 23))
    result = builder.select(large, infinite, builder.select(small, denormal, normal))
    return builder.trunc(builder.or_(result, sign), ir.VectorType(I16, lanes))


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def float_to_bfloat(builder: Any, v: Any, lanes: int) -> Any:
    """float32 to bfloat16 bits, to nearest even.

    AVX-512 has an instruction for two registers full; as it flushes denormals, vectors with one take the long way.
    """
    if lanes != 32 or not has("avx512bf16"):
        return _float_to_bfloat(builder, v, lanes)
    result = cgutils.alloca_once(builder, ir.VectorType(I16, lanes))
    halves = [part_of(builder, v, start, 16) for start in (0, 16)]
    only_denormal = I32(0x20)
    masks = [
        intrinsic(builder, "llvm.x86.avx512.fpclass", ir.VectorType(I1, 16), [half, only_denormal], "ps.512")
        for half in halves
    ]
    denormal = builder.bitcast(builder.or_(*masks), I16)
    with builder.if_else(builder.icmp_unsigned("!=", denormal, I16(0)), likely=False) as (rare, usual):
        with rare:
            builder.store(_float_to_bfloat(builder, v, lanes), result)
        with usual:
            kind = ir.VectorType(BFloat(), lanes)
            packed = intrinsic(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16", kind, halves[::-1], "512")
            builder.store(builder.bitcast(packed, ir.VectorType(I16, lanes)), result)
    return builder.load(result)


def part_of(builder: Any, v: Any, start: int, lanes: int) -> Any:
    """`lanes` neighbouring lanes of a vector."""
    pick = ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
    return builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), pick)


def _float_to_bfloat(builder: Any, v: Any, lanes: int) -> Any:
    word = VectorType("i32", lanes)
    bits = builder.bitcast(v, word.llvm)
    odd = builder.and_(builder.lshr(bits, constant(word, 16)), constant(word, 1))
    rounded = builder.add(builder.add(bits, constant(word, 0x7FFF)), odd)
    nan = builder.fcmp_unordered("uno", v, v)
    quiet = builder.or_(bits, constant(word, 0x400000))
    result = builder.lshr(builder.select(nan, quiet, rounded), constant(word, 16))
    return builder.trunc(result, ir.VectorType(I16, lanes))


def to_odd_float(builder: Any, v: Any, lanes: int) -> Any:
    """float64 to float32 rounded to odd, so that a second rounding to 16 bits gives the value rounded once."""
    word, number, double = (VectorType(e, lanes) for e in ("i32", "f32", "f64"))
    near = builder.fptrunc(v, number.llvm)
    back = builder.fpext(near, double.llvm)
    bits = builder.bitcast(near, word.llvm)
    even = builder.icmp_unsigned("==", builder.and_(bits, constant(word, 1)), constant(word, 0))
    inexact = builder.and_(builder.fcmp_ordered("one", v, back), even)
    magnitude = [intrinsic(builder, "llvm.fabs", double.llvm, [x]) for x in (v, back)]
    larger = builder.fcmp_ordered(">", *magnitude)
    step = builder.select(larger, constant(word, 1), constant(word, -1))
    return builder.bitcast(builder.select(inexact, builder.add(bits, step), bits), number.llvm)


def widen(builder: Any, p: PointerType, v: Any, lanes: int) -> Any:
    """Elements as they stand in memory to the precision of the computation."""
    target = ir.VectorType(ELEMENT[p.element], lanes)
    if p.storage == "bfloat16":
        word = VectorType("i32", lanes)
        v = builder.bitcast(
            builder.shl(builder.zext(v, word.llvm), constant(word, 16)), ir.VectorType(ir.FloatType(), lanes)
        )
    elif p.storage == "float16":
        if is_x86() and not has("f16c"):
            v = half_to_float(builder, builder.bitcast(v, ir.VectorType(I16, lanes)), lanes)
        else:
            v = builder.fpext(v, ir.VectorType(ir.FloatType(), lanes))
    elif p.element == "i32":
        return builder.trunc(v, target)
    elif p.element == "i64":
        return builder.sext(v, target)
    return builder.fpext(v, target) if v.type.element == ir.FloatType() else v


def narrow(builder: Any, p: PointerType, v: Any, lanes: int) -> Any:
    """From the precision of the computation to elements as they stand in memory, rounded once."""
    if p.storage in ("float64", "float32"):
        target = ir.VectorType(p.memory, lanes)
        if v.type.element == p.memory:
            return v
        return builder.fptrunc(v, target) if p.storage == "float32" else builder.fpext(v, target)
    if v.type.element == ir.DoubleType():
        v = to_odd_float(builder, v, lanes)
    if p.storage == "bfloat16":
        return float_to_bfloat(builder, v, lanes)
    if is_x86() and not has("f16c"):
        return builder.bitcast(float_to_half(builder, v, lanes), ir.VectorType(ir.HalfType(), lanes))
    return builder.fptrunc(v, ir.VectorType(ir.HalfType(), lanes))
