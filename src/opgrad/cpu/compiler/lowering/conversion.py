"""Converts elements between their dtype in memory and the precision of the computation, 8 and 16 bits included."""

from functools import partial
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from opgrad.cpu.compiler.lowering.operations import (
    I1,
    I8,
    I16,
    I32,
    PointerType,
    VectorType,
    constant,
    has,
    intrinsic,
    is_x86,
    lanes_of,
)


class Format(NamedTuple):
    """A float of a sign, an exponent and a mantissa; what stands for infinity and NaN, without the sign."""

    memory: ir.IntType
    mantissa: int
    bias: int
    infinity: int
    nan: int


FLOAT16 = Format(I16, mantissa=10, bias=15, infinity=0x7C00, nan=0x7E00)
E5M2 = Format(I8, mantissa=2, bias=15, infinity=0x7C, nan=0x7E)
E4M3FN = Format(I8, mantissa=3, bias=7, infinity=0x7F, nan=0x7F)  # it has no infinity: what is too large is NaN


def to_small(builder: Any, v: Any, lanes: int, to: Format) -> Any:
    """float32 to the bits of a smaller float, to nearest even."""
    word, number = VectorType("i32", lanes), VectorType("f32", lanes)
    bits = builder.bitcast(v, word.llvm)
    magnitude = builder.and_(bits, constant(word, 0x7FFFFFFF))
    dropped = 23 - to.mantissa
    above_magnitude = to.memory.width - 1
    sign = builder.lshr(builder.and_(bits, constant(word, 0x80000000)), constant(word, 31 - above_magnitude))
    # Half a unit in the last place less one, and one more where the last bit kept is odd; the carry does the rest.
    odd = builder.and_(builder.lshr(magnitude, constant(word, dropped)), constant(word, 1))
    rebias = (to.bias - 127) * (1 << 23) + (1 << (dropped - 1)) - 1
    normal = builder.lshr(builder.add(builder.add(magnitude, constant(word, rebias)), odd), constant(word, dropped))
    # Added to a number whose last place is the smallest denormal, a denormal is rounded and ends up in its last bits.
    place = 23 - (to.mantissa + to.bias - 1)
    moved = builder.fadd(builder.bitcast(magnitude, number.llvm), constant(number, 2.0**place))
    denormal = builder.sub(builder.bitcast(moved, word.llvm), constant(word, (127 + place) << 23))
    small = builder.icmp_unsigned("<", magnitude, constant(word, (128 - to.bias) << 23))
    result = builder.select(small, denormal, normal)
    limit = constant(word, to.infinity)
    result = builder.select(builder.icmp_unsigned("<", result, limit), result, limit)
    if to.nan != to.infinity:
        nan = builder.icmp_unsigned(">", magnitude, constant(word, 0x7F800000))
        result = builder.select(nan, constant(word, to.nan), result)
    return builder.trunc(builder.or_(result, sign), ir.VectorType(to.memory, lanes))


def float_to_half(builder: Any, v: Any, lanes: int) -> Any:
    """float32 to float16."""
    half = ir.VectorType(ir.HalfType(), lanes)
    if is_x86() and not has("f16c"):
        return builder.bitcast(to_small(builder, v, lanes, FLOAT16), half)
    return builder.fptrunc(v, half)


def half_to_float(builder: Any, v: Any, lanes: int) -> Any:
    """float16 to float32."""
    if is_x86() and not has("f16c"):
        return _half_bits_to_float(builder, builder.bitcast(v, ir.VectorType(I16, lanes)), lanes)
    return builder.fpext(v, ir.VectorType(ir.FloatType(), lanes))


def _half_bits_to_float(builder: Any, h: Any, lanes: int) -> Any:
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


def _half_from(builder: Any, bits: Any, lanes: int) -> Any:
    """Integers of 16 bits, taken for float16, to float32."""
    return half_to_float(builder, builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), lanes)


def e5m2_to_float(builder: Any, v: Any, lanes: int) -> Any:
    """float8_e5m2 to float32: it is the upper byte of a float16."""
    word = VectorType("i16", lanes)
    return _half_from(builder, builder.shl(builder.zext(v, word.llvm), constant(word, 8)), lanes)


def e4m3fn_to_float(builder: Any, v: Any, lanes: int) -> Any:
    """float8_e4m3fn to float32: its bits, moved to those of a float16, stand for 2**-8 times the number.

    The conversion of float16 takes denormals at full speed; a float32 multiplication does not on every CPU.
    """
    word, number = VectorType("i16", lanes), VectorType("f32", lanes)
    wide = builder.sext(v, word.llvm)
    magnitude = builder.shl(builder.and_(wide, constant(word, 0x7F)), constant(word, 7))
    bits = builder.or_(magnitude, builder.and_(wide, constant(word, 0x8000)))
    result = builder.fmul(_half_from(builder, bits, lanes), constant(number, 2.0**8))
    nan = builder.icmp_unsigned("==", magnitude, constant(word, E4M3FN.nan << 7))
    return builder.select(nan, constant(number, float("nan")), result)


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
    halves = [lanes_of(builder, v, range(start, start + 16)) for start in (0, 16)]
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
    """float64 to float32 rounded to odd, so that a second rounding to 16 or 8 bits gives the value rounded once."""
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


def bfloat_to_float(builder: Any, v: Any, lanes: int) -> Any:
    """bfloat16 bits, the upper half of a float32, to float32."""
    word = VectorType("i32", lanes)
    wide = builder.shl(builder.zext(v, word.llvm), constant(word, 16))
    return builder.bitcast(wide, ir.VectorType(ir.FloatType(), lanes))


# --- integers and booleans

LIMITS: Final = {"int8": (-128, 127), "uint8": (0, 255), "int32_number": (-(2**31), 2**31 - 1)}
WHOLE: Final = {*LIMITS, "bool"}


def from_whole(builder: Any, storage: str, v: Any, kind: VectorType) -> Any:
    """Convert integers to floats of `kind`; as a boolean, any byte but 0 is true."""
    if storage == "bool":
        true = builder.icmp_unsigned("!=", v, ir.Constant(v.type, None))
        return builder.select(true, constant(kind, 1.0), constant(kind, 0.0))
    word = ir.VectorType(I32, kind.lanes)
    wide = builder.zext(v, word) if storage == "uint8" else builder.sext(v, word)
    return builder.sitofp(wide, kind.llvm)


def to_whole(builder: Any, storage: str, v: Any, kind: VectorType) -> Any:
    """Floats of `kind` to integers: the nearest, half to even, within the type's limits, 0 for NaN."""
    if storage == "bool":
        true = builder.fcmp_unordered("!=", v, constant(kind, 0.0))
        return builder.zext(true, ir.VectorType(I8, kind.lanes))
    lowest, highest = LIMITS[storage]
    # float32 has no 2**31 - 1: it stops at the number below 2**31, and what lay above is set apart.
    rounds_up = storage == "int32_number" and kind.element == "f32"
    top = constant(kind, 2.0**31 - 128 if rounds_up else float(highest))
    bottom = constant(kind, float(lowest))
    near = intrinsic(builder, "llvm.rint", kind.llvm, [v])
    near = builder.select(builder.fcmp_ordered(">", near, bottom), near, bottom)
    near = builder.select(builder.fcmp_ordered("<", near, top), near, top)
    near = builder.select(builder.fcmp_ordered("ord", v, v), near, constant(kind, 0.0))
    word = VectorType("i32", kind.lanes)
    whole = builder.fptosi(near, word.llvm)
    if rounds_up:
        whole = builder.select(builder.fcmp_ordered(">=", v, constant(kind, 2.0**31)), constant(word, highest), whole)
    return builder.trunc(whole, ir.VectorType(I32 if storage == "int32_number" else I8, kind.lanes))


# --- all dtypes

# dtype in memory -> (to float32, from float32)
SMALL = {
    "float16": (half_to_float, float_to_half),
    "bfloat16": (bfloat_to_float, float_to_bfloat),
    "float8_e5m2": (e5m2_to_float, partial(to_small, to=E5M2)),
    "float8_e4m3fn": (e4m3fn_to_float, partial(to_small, to=E4M3FN)),
}


def widen(builder: Any, p: PointerType, v: Any, lanes: int) -> Any:
    """Convert elements from their dtype in memory to the precision of the computation."""
    kind = VectorType(p.element, lanes)
    if p.element == "i32":
        return builder.trunc(v, kind.llvm)
    if p.element == "i64":
        return builder.sext(v, kind.llvm)
    if p.storage in WHOLE:
        return from_whole(builder, p.storage, v, kind)
    if p.storage in SMALL:
        to_float, _ = SMALL[p.storage]
        v = to_float(builder, v, lanes)
    return builder.fpext(v, kind.llvm) if v.type.element == ir.FloatType() else v


def narrow(builder: Any, p: PointerType, v: Any, lanes: int) -> Any:
    """Convert elements from the precision of the computation to their dtype in memory, rounded once."""
    if p.storage in WHOLE:
        return to_whole(builder, p.storage, v, VectorType(p.element, lanes))
    if p.storage in SMALL:
        if v.type.element == ir.DoubleType():
            v = to_odd_float(builder, v, lanes)
        _, from_float = SMALL[p.storage]
        return from_float(builder, v, lanes)
    target = ir.VectorType(p.memory, lanes)
    if v.type.element == p.memory:
        return v
    return builder.fptrunc(v, target) if p.storage == "float32" else builder.fpext(v, target)
