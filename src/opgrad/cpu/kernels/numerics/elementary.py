"""exp, log, sigmoid and tanh on vectors, each for float32 and float64.

The polynomials are Chebyshev fits on the reduced range; tests/cpu/test_elementary.py holds the errors against higher
precision to 2 ulp, those of sigmoid and tanh to 2.75. Infinities, NaN and denormal results come out as IEEE arithmetic
would have them.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import by_precision, constant, inline
from opgrad.cpu.compiler.simd import Vector

LOG2_E = 1.44269504088896341
# ln 2 in two parts, of which the first has few enough digits for exact products with exponents.
LN2_HIGH = constant(0.693145751953125, 0.693147180369123816490)
LN2_LOW = constant(1.42860682030941723e-6, 1.90821492927058770002e-10)


def polynomials(single: tuple[float, ...], double: tuple[float, ...]) -> Callable[..., Any]:
    """The polynomial with these coefficients, of the highest power first, in each precision."""
    return by_precision(inline(lambda x: v.polynomial(x, single)), inline(lambda x: v.polynomial(x, double)))


# --- exp(x) = 2**n * exp(r), n = round(x / ln 2), |r| <= ln(2)/2; exp(r) - 1 = r + r*r*q(r) -------------------------


_EXPM1_TAIL_SINGLE = 1.38636273683e-3, 8.36765432407e-3, 4.1667243967e-2, 1.66665326837e-1, 0.5
_EXPM1_TAIL_DOUBLE = (
    2.5100472505694996003e-8, 2.7620201591031548792e-7, 2.7557268276905696187e-6, 2.4801521057868205199e-5,
    1.9841269863171556026e-4, 1.3888888917367080562e-3, 8.3333333333300381973e-3, 4.1666666666623820532e-2,
    1.666666666666666746e-1, 0.50000000000000010314,
)  # fmt: skip
_expm1_tail = polynomials(_EXPM1_TAIL_SINGLE, _EXPM1_TAIL_DOUBLE)


@inline
def expm1_reduced(r: Vector) -> Vector:
    """exp(r) - 1 for |r| <= ln(2)/2."""
    return v.fma(r * r, _expm1_tail(r), r)


@inline
def remainder(x: Vector, n: Vector) -> Vector:
    """x - n * ln 2, for n = round(x / ln 2)."""
    return v.fma(n, -LN2_LOW(n), v.fma(n, -LN2_HIGH(n), x))


@inline
def expm1_parts(x: Vector, n: Vector):
    """exp(x - n * ln 2) - 1 for n = round(x / ln 2), in two parts; their sum's rounding is the only one that counts."""
    high, low = v.fma(n, -LN2_HIGH(n), x), n * -LN2_LOW(n)
    r = high + low
    return high, v.fma(r * r, _expm1_tail(r), low)


# Beyond these exp is 0, and infinite; between them n stays where the reduction is exact.
LOWEST, HIGHEST = constant(-104.5, -746.0), constant(89.5, 710.5)
# Added to a number, they leave its nearest integer plus the exponent's bias in the lowest bits.
ROUNDER = constant(1.5 * 2**23 + 127, 1.5 * 2**52 + 1023)
# Without an instruction that multiplies by a power of two, powers are computed so many powers too large, where all that
# count are normal numbers; one product, which rounds denormal results, takes them back. Two products by half the power
# each took 7 operations more with AVX2. With AVX-512 the instruction is faster: losses of 10 classes take 0.9 of the
# time.
LIFT, LIFTED, LOWERED = constant(64.0, 256.0), constant(2.0**64, 2.0**256), constant(2.0**-64, 2.0**-256)


@inline
def _exp_by_scaling(d: Vector) -> Vector:
    """e**d for LOWEST <= d <= HIGHEST."""
    n = v.round_even(d * LOG2_E)
    return v.scale_by_power(expm1_reduced(remainder(d, n)) + 1.0, n)


@inline
def _exp_lowered(d: Vector) -> Vector:
    """e**d for LOWEST <= d <= 0; the same bits."""
    rounder = ROUNDER(d) + LIFT(d)
    rounded = v.fma(d, LOG2_E, rounder)
    power = v.power_of(rounded)
    return v.fma(power, expm1_reduced(remainder(d, rounded - rounder)), power) * LOWERED(d)


@inline
def exp_up_to_zero(x: Vector) -> Vector:
    """e**x for x that is at most 0, or NaN."""
    d = v.maximum(LOWEST(x), x)
    return _exp_by_scaling(d) if v.scales_at_once(d) else _exp_lowered(d)


@inline
def exp(x: Vector) -> Vector:
    """e**x."""
    return _exp_by_scaling(v.maximum(LOWEST(x), v.select(x > HIGHEST(x), HIGHEST(x), x)))


LN2, LOWEST_POWER = 0.693147180559945309, constant(-151.0, -1076.0)


@inline
def exp2_up_to_one(x: Vector) -> Vector:
    """2**x for x that is at most 1, or NaN. The whole part of x is an exact factor."""
    d = v.maximum(LOWEST_POWER(x), x)
    if v.scales_at_once(d):
        n = v.round_even(d)
        return v.scale_by_power(expm1_reduced((d - n) * LN2) + 1.0, n)
    rounder = ROUNDER(d) + LIFT(d)
    rounded = d + rounder
    power = v.power_of(rounded)
    return v.fma(power, expm1_reduced((d - (rounded - rounder)) * LN2), power) * LOWERED(d)


# --- log(x) = e * ln 2 + log(m), m in [sqrt(1/2), sqrt(2)) ---------------------------------------------------------


_LOG_SINGLE = (
    0.0697161147145, -0.114797338466, 0.116854199235, -0.124256873315, 0.142490576457, -0.166678023195,
    0.200007157489, -0.24999996958, 0.3333333118,
)  # fmt: skip
_LOG_DOUBLE = (
    0.1308803485092755383, 0.13268638369266823879, 0.15386244737621666606, 0.18181795547521136235,
    0.22222222392581045097, 0.28571428570799785031, 0.40000000000000883236, 0.66666666666666666463,
)  # fmt: skip


@inline
def _log_single(x: Vector) -> Vector:
    e, f = v.exponent_of(x), v.mantissa_of(x) - 1.0
    square = f * f
    tail = v.fma(square * f, v.polynomial(f, _LOG_SINGLE), e * LN2_LOW(e))
    return v.fma(e, LN2_HIGH(e), v.fma(square, -0.5, tail) + f)


@inline
def _log_double(x: Vector) -> Vector:
    e, f = v.exponent_of(x), v.mantissa_of(x) - 1.0
    s = f / (f + 2.0)
    z = s * s
    # log(m) = f - (f*f/2 - s*(f*f/2 + z*p)): the small corrections are added to the exact f last.
    half_square = f * f * 0.5
    tail = v.fma(e, LN2_LOW(e), s * v.fma(z, v.polynomial(z, _LOG_DOUBLE), half_square))
    return v.fma(e, LN2_HIGH(e), f - (half_square - tail))


_log_finite = by_precision(_log_single, _log_double)


@inline
def log(x: Vector) -> Vector:
    """The natural logarithm of positive normal numbers; NaN for NaN, inf for inf."""
    return v.select(v.absolute(x) < float("inf"), _log_finite(x), x)


# --- sigmoid and tanh, by e**x = 2**n * (1 + t) / (1 - t), t = tanh(r / 2), r = x - n * ln 2, |r| <= ln(2)/2 ----------
#
# One division serves the power and the quotient, and t needs fewer constants than exp(r). Where n is 0, tanh(x) is t,
# so that small results keep their digits.

# tanh(h) / h - 1 in powers of h**2, over h**2, for |h| <= ln(2)/4; the errors are 1.6e-10 and 4.1e-18.
_TANH_SINGLE = -0.0527270269409, 0.133311835989, -0.333333227181
_TANH_DOUBLE = (
    0.0034448377289699771, -0.0088573087618025452, 0.021869370714323856, -0.05396825278200754, 0.13333333332783744,
    -0.33333333333332485,
)  # fmt: skip


def _tanh_of(factor: float) -> Callable[..., Any]:
    """The function tanh(factor * h), for a power of two."""

    def scaled(coefficients: tuple[float, ...]) -> tuple[float, ...]:
        powers = range(2 * len(coefficients) + 1, 1, -2)
        return tuple(each * factor**power for each, power in zip(coefficients, powers, strict=True))

    tail = polynomials(scaled(_TANH_SINGLE), scaled(_TANH_DOUBLE))

    @inline
    def near_zero(h: Vector) -> Vector:
        square = h * h
        return h * v.fma(square, tail(square), factor)

    return near_zero


_tanh_near_zero, _tanh_of_half = _tanh_of(1.0), _tanh_of(0.5)
SIGMOID_IS_ONE = 40.0  # from here on, and before; a power so large is still a normal number when it is lifted


@inline
def sigmoid(x: Vector) -> Vector:
    """1 / (1 + exp(-x)) = e / (e + 1), without cancellation or overflow on either side."""
    d = v.maximum(LOWEST(x), v.select(x > SIGMOID_IS_ONE, SIGMOID_IS_ONE, x))
    rounder = ROUNDER(d) + LIFT(d)
    rounded = v.fma(d, LOG2_E, rounder)
    power, t = v.power_of(rounded), _tanh_of_half(remainder(d, rounded - rounder))
    # Both are lifted, by the power and by a constant, so that nothing but the quotient can be denormal.
    e = v.fma(power, t, power)
    return e / (e + v.fma(t, -LIFTED(d), LIFTED(d)))


TANH_IS_ONE = constant(9.1, 19.1)  # from here on


@inline
def tanh(x: Vector) -> Vector:
    """The hyperbolic tangent, (e - 1) / (e + 1) for e = exp(2x). A zero keeps its sign."""
    most = TANH_IS_ONE(x)
    d = v.maximum(-most, v.select(x > most, most, x))
    rounded = v.fma(d, 2.0 * LOG2_E, ROUNDER(x))
    power, t = v.power_of(rounded), _tanh_near_zero(v.fma(rounded - ROUNDER(x), -0.5 * LN2, d))
    above, below = power + 1.0, 1.0 - power
    return v.fma(above, t, -below) / v.fma(-below, t, above)
