"""Floating-point arithmetic, rounded once as the hardware does.

Approximations are off by as much as NVIDIA documents, by a share of it that depends on the value alone: what holds
here does not lean on this machine's better functions.
"""

import numpy as np
from ml_dtypes import bfloat16
from numba import vectorize
from numba.extending import intrinsic

from ptx.opcodes import Formula, opcode
from ptx.opcodes.integer import COMPARISONS, combined, compared
from ptx.types import PRED, Type, halves, split

SMALLEST = {np.float32: np.finfo(np.float32).smallest_normal, np.float64: np.finfo(np.float64).smallest_normal}

# The documented largest relative errors (PTX manual, "Floating Point Instructions").
ERRORS = {"ex2": 2.0**-22, "lg2": 2.0**-22, "rsqrt": 2.0**-22.4, "sqrt": 2.0**-23, "rcp": 2.0**-23, "tanh": 2.0**-11}
DIVISION = 2.0**-23 * 1.5  # div.full and div.approx: 2 units in the last place, half of one by rounding


# --- values and bits --------------------------------------------------------------------------------------------------


def widened(of):
    """Operands of a type as float32 or float64 values: bfloat16 and float16 exactly."""
    if of.kind == "bf":
        return lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return lambda a: a


def to_bfloat16(value):
    """float64 or float32 to the nearest bfloat16, rounded once."""
    value = np.asarray(value)
    narrow = (value if value.dtype == np.float32 else to_odd32(value)).astype(bfloat16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), narrow.view(np.uint16))


def to_odd32(value):
    """float64 as float32 towards 0, with the last bit set where something was lost: rounding that again is exact."""
    near = value.astype(np.float32)
    lost = near.astype(np.float64) != value
    toward = np.where(np.abs(near.astype(np.float64)) > np.abs(value), np.nextafter(near, np.float32(0)), near)
    return np.where(lost & np.isfinite(value), (toward.view(np.uint32) | np.uint32(1)).view(np.float32), near)


def narrowed(value, of):
    """float64 as a type, rounded once to the nearest."""
    return to_bfloat16(value) if of.kind == "bf" else np.asarray(value).astype(of.dtype)


def canonical(value, of):
    """With NaN as arithmetic gives it."""
    if of.kind == "bf":
        nan = (value & np.uint16(0x7FFF)) > np.uint16(0x7F80)
        return np.where(nan, np.uint16(0x7FFF), value)
    if of.bits == 64:
        return value
    nan = np.array(0x7FFFFFFF if of.bits == 32 else 0x7FFF, of.raw).view(of.dtype)
    return np.where(np.isnan(value), nan, value)


def flushed(value):
    """With denormals as zeros of their sign."""
    return np.where(np.abs(value) < SMALLEST[value.dtype.type], np.copysign(value.dtype.type(0), value), value)


def odd_sum(a, b):
    """a + b in float64, rounded to odd (Boldo and Melquiond 2008): rounded again to less, it is exact."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = np.isfinite(error) & (error != 0)
    if not inexact.any():
        return total
    even = total.view(np.uint64) & np.uint64(1) == 0
    away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, away, total)


# --- one operation ----------------------------------------------------------------------------------------------------

EXACT = {"add": odd_sum, "sub": lambda a, b: odd_sum(a, -b), "mul": np.multiply}
DIRECT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def finished(m, of, ftz, sat, formula):
    """A formula with what the modifiers add to it: denormals as zeros, results clamped to [0, 1], packed values."""
    single = of.half if of.packed else of

    def compute(*operands):
        value = formula(*[flushed(each) if ftz else each for each in operands])
        value = flushed(value) if ftz else value
        if sat:
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(single.dtype)
        return canonical(value, single)

    if (ftz or sat) and single.dtype not in SMALLEST:
        raise m.unknown("expected float32 or float64 with .ftz or .sat")
    return halves(compute, of) if of.packed else compute


@opcode("add", "sub", "mul", floating=True)
def arithmetic(m):
    m.one("rn", default="rn")
    ftz, sat, of = m.take("ftz"), m.take("sat"), m.type(packed=True)
    name = m.instruction.opcode
    if len(m.types) > 1:  # add.f32.bf16: the first operand is narrower
        return _mixed(m, name, of, m.type())
    single = of.half if of.packed else of
    if single.bits > 16:
        return Formula([of], [of, of], finished(m, of, ftz, sat, DIRECT[name]))
    wide = widened(single)

    def formula(a, b):
        return narrowed(EXACT[name](wide(a).astype(np.float64), wide(b).astype(np.float64)), single)

    return Formula([of], [of, of], finished(m, of, ftz, sat, formula))


def _mixed(m, name, of, narrow):
    wide = widened(narrow)
    if of.bits != 32 or narrow.bits != 16 or name == "mul":
        raise m.unknown("expected float32 and a type of 16 bits")
    formula = finished(m, of, False, False, DIRECT[name])
    return Formula([of], [narrow, of], lambda a, b: formula(wide(a).astype(np.float32), b))


@opcode("fma", floating=True)
def fused(m):
    m.one("rn")
    ftz, sat, of = m.take("ftz"), m.take("sat"), m.type(packed=True)
    single = of.half if of.packed else of
    if single.bits == 64:
        return Formula([of], [of, of, of], finished(m, of, ftz, sat, fma64))
    wide = widened(single)

    def formula(a, b, c):
        product = wide(a).astype(np.float64) * wide(b).astype(np.float64)  # exact
        return narrowed(odd_sum(product, wide(c).astype(np.float64)), single)

    return Formula([of], [of, of, of], finished(m, of, ftz, sat, formula))


@intrinsic
def _fma(_, a, b, c):
    return a(a, b, c), lambda context, builder, signature, operands: builder.fma(*operands)


@vectorize(["f8(f8, f8, f8)"])
def fma64(a, b, c):
    """a * b + c rounded once, as LLVM has it."""
    return _fma(a, b, c)


@opcode("div", "sqrt", "rcp", "rsqrt", floating=True)
def quotient(m):
    name = m.instruction.opcode
    way, ftz, of = m.one("rn", "full", "approx"), m.take("ftz"), m.type()
    count = 2 if name == "div" else 1
    if of.bits == 64 and way == "approx":
        return _gross(m, name, ftz, of)
    formulas = {"div": np.divide, "sqrt": np.sqrt, "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a)}
    if (way == "full" and name != "div") or (way == "rn" and name == "rsqrt") or of.bits < 32:
        raise m.unknown("no such rounding")
    if way == "rn":
        formula = {**formulas, "rcp": lambda a: of.dtype(1) / a}[name]
    else:
        error = DIVISION if name == "div" else ERRORS[name]

        def formula(*operands):
            return approximated(formulas[name](*[each.astype(np.float64) for each in operands]), error)

    return Formula([of], [of] * count, finished(m, of, ftz, False, formula))


def _gross(m, name, ftz, of):
    """Of float64 in 20 bits of mantissa: of the operand and of the result only the upper words count."""
    if not ftz or name not in ("rcp", "rsqrt"):
        raise m.unknown("expected rcp.approx.ftz.f64 or rsqrt.approx.ftz.f64")
    upper = np.uint64(0xFFFFFFFF00000000)

    def formula(a):
        a = (flushed(a).view(np.uint64) & upper).view(np.float64)
        exact = 1 / a if name == "rcp" else 1 / np.sqrt(a)
        found = (exact.view(np.uint64) + np.uint64(1 << 31) & upper).view(np.float64)
        return np.where(np.isfinite(exact), flushed(found), exact)

    return Formula([of], [of], formula)


def approximated(exact, error):
    """Off by up to a relative error, as a hash of the value says; rounded to float32."""
    exact = np.asarray(exact)
    noise = (exact.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)).astype(np.float64)
    return (exact * (1 + error * (noise / (1 << 23) - 1))).astype(np.float32)


@opcode("ex2", "lg2", "tanh", floating=True)
def transcendental(m):
    name = m.instruction.opcode
    m.one("approx")
    ftz, of = m.take("ftz"), m.type()
    if of.bits != 32 or (name == "tanh" and ftz):
        raise m.unknown("expected f32")
    function = {"ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh}[name]

    def formula(a):
        exact = np.asarray(function(a.astype(np.float64)))
        near = approximated(exact, ERRORS[name])
        return np.where(a == 0, exact.astype(np.float32), near)

    return Formula([of], [of], finished(m, of, ftz, False, formula))


@opcode("min", "max", floating=True)
def extreme(m):
    """Of two, or of three; the number where one operand is NaN, or NaN with .NaN; -0 is below +0."""
    ftz, propagates, of = m.take("ftz"), m.take("NaN"), m.type(packed=True)
    single = of.half if of.packed else of
    wide, greatest = widened(single), m.instruction.opcode == "max"

    def formula(a, b):
        x, y = wide(a), wide(b)
        first = (x > y) | ((x == y) & ~np.signbit(x)) if greatest else (x < y) | ((x == y) & np.signbit(x))
        nan_first, nan_second = (np.isnan(x), np.isnan(y)) if propagates else (np.isnan(y), np.isnan(x))
        return np.where((first | nan_first) & ~nan_second | (nan_first & nan_second), a, b)

    def of_all(a, *others):
        for each in others:
            a = formula(a, each)
        return a

    count = len(m.instruction.operands) - 1
    if count > 2 and of != Type("f", 32):
        raise m.unknown("only f32 has three operands")
    return Formula([of], [of] * count, finished(m, of, ftz, False, of_all))


@opcode("neg", "abs", floating=True)
def sign(m):
    ftz, of = m.take("ftz"), m.type(packed=True)
    single = of.half if of.packed else of
    top, negate = single.raw(1 << (single.bits - 1)), m.instruction.opcode == "neg"

    def formula(a):
        raw = a.view(single.raw)
        value = (raw ^ top if negate else raw & ~top).view(single.dtype)
        return flushed(value) if ftz else value

    return Formula([of], [of], halves(formula, of) if of.packed else formula)


@opcode("setp", floating=True)
def compare(m):
    """equ, neu, ltu …: true where an operand is NaN. Of packed values each of the two results is of one half."""
    ordered = [name for name in COMPARISONS if name not in ("lo", "ls", "hi", "hs")]
    name = m.one(*ordered, *[f"{name}u" for name in ordered], "num", "nan")
    with_, ftz, of = m.one("and", "or", "xor", default=""), m.take("ftz"), m.type(packed=True)
    single = of.half if of.packed else of
    wide = widened(single)
    test = compared(name.removesuffix("u"), name.endswith("u"), (lambda a: flushed(wide(a))) if ftz else wide)
    if not of.packed:
        return combined(m, test, with_, of)
    if with_:
        raise m.unknown("packed comparisons are not combined")

    def compute(a, b):
        pairs = zip(split(a, of), split(b, of), strict=True)
        return tuple(test(x.view(single.dtype), y.view(single.dtype)) for x, y in pairs)

    return Formula([PRED, PRED], [of, of], compute)
