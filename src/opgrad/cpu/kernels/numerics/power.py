"""Powers by the rules of C's pow: exp(exponent * log|s|), with the logarithm in two parts, and what it leaves out."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics.elementary import LN2_HIGH, LN2_LOW, polynomials
from opgrad.cpu.kernels.numerics.special import INFINITY, REST_COUNTS, exp_times, normal, rest_of

# --- log(x) = e * ln 2 + 2 * atanh(q), q = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)) -----------------------------

TWO_THIRDS = 0.66666666666666666667
TWO_THIRDS_REST = 3.7007434154171884681e-17  # beyond float64


_SERIES_SINGLE = 0.19120357575, 0.22204765666, 0.285715317908, 0.39999999905
_SERIES_DOUBLE = (
    0.117230510280977529196, 0.11706248540922385336, 0.133348042382253445234, 0.153845949708954578174,
    0.181818183353144030776, 0.22222222221656231531, 0.2857142857142936567, 0.399999999999999998173,
)  # fmt: skip
_series = polynomials(_SERIES_SINGLE, _SERIES_DOUBLE)  # (2 atanh(q) / q - 2 - 2/3 z) / z**2, z = q*q


@inline
def log_parts(x: Vector) -> tuple[Vector, Vector]:
    """The logarithm of positive finite x as a sum of two numbers, with half as many bits again as one has."""
    y, shift = normal(x)
    m = v.mantissa_of(y)
    f, d = m - 1.0, m + 1.0
    d_low = m - (d - 1.0)
    q = f / d
    q_low = (v.fma(-q, d, f) - q * d_low) / d
    z = q * q
    z_low = v.fma(q, q, -z) + q * q_low * 2.0
    # c = 2/3 + z * series, and the cubic term q * z * c.
    w = _series(z) * z
    c = w + TWO_THIRDS
    c_low = (v.like(c, TWO_THIRDS) - c) + w + (rest_of(c, TWO_THIRDS) + TWO_THIRDS_REST)
    cube = q * z
    cube_low = v.fma(q, z, -cube) + (q * z_low + q_low * z)
    cubic = cube * c
    cubic_low = v.fma(cube, c, -cubic) + (cube * c_low + cube_low * c)
    linear = q * 2.0
    part = linear + cubic
    part_low = ((linear - part) + cubic) + (cubic_low + q_low * 2.0)
    e = v.exponent_of(y) + shift
    whole = e * LN2_HIGH(e)  # exact
    total = whole + part
    return total, ((whole - total) + part) + (part_low + e * LN2_LOW(e))


# --- powers --------------------------------------------------------------------------------------------------------

EXACT_INTEGERS = 2.0**53  # from here on every float64 is an even integer


@inline
def is_whole(x: float) -> bool:
    return abs(x) >= EXACT_INTEGERS or (abs(x) < EXACT_INTEGERS and float(int(x)) == x)


@inline
def is_odd(x: float) -> bool:
    return abs(x) < EXACT_INTEGERS and float(int(x)) == x and int(x) & 1 == 1


@inline
def _magnitude_power(s: Vector, factor: Vector, exponent: float) -> Vector:
    """factor * |s|**exponent for a number s and an exponent that is not 0."""
    magnitude = v.absolute(s)
    log_high, log_low = log_parts(magnitude)
    high = log_high * exponent
    low = v.fma(log_high, v.like(s, exponent), -high) + (log_high * rest_of(s, exponent) + log_low * exponent)
    result = exp_times(factor, high, v.select(v.absolute(high) < REST_COUNTS, low, 0.0))
    at_zero, at_infinity = (0.0, INFINITY) if exponent > 0.0 else (INFINITY, 0.0)
    result = v.select(magnitude == 0.0, factor * at_zero, result)
    result = v.select(magnitude == INFINITY, factor * at_infinity, result)
    return v.select(magnitude == 1.0, factor, result)


@inline
def power(s: Vector, factor: Vector, exponent: float) -> Vector:
    """factor * s**exponent; for s = 1 and for exponent 0 it is factor, even if the other is NaN."""
    if exponent == 0.0:
        return factor
    if exponent != exponent:
        return v.select(s == 1.0, factor, v.like(s, exponent))
    result = v.select(s == s, _magnitude_power(s, factor, exponent), s)
    if is_odd(exponent):
        return result * v.copy_sign(v.like(s, 1.0), s)
    if is_whole(exponent):
        return result
    return v.select(s < 0.0, v.select(s > -INFINITY, v.like(s, float("nan")), result), result)
