"""Floats of 8 and 16 bits, from and to float32, in plain integer and float32 instructions."""

from typing import Any, NamedTuple

from llvmlite import ir

from opgrad.cpu.compiler.lowering.operations import I8, I16, VectorType, constant, has, is_x86


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
