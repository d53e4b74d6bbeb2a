"""Functions that post-ops and gelu need besides those in `elementary`; powers by the rules of C's pow."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import constant, inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics.elementary import (
    LIFT,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ROUNDER,
    expm1_reduced,
    log,
    polynomials,
    remainder,
)

INFINITY = float("inf")


@inline
def minimum(value: Vector, limit: float) -> Vector:
    """The smaller of each pair; NaN where the value is."""
    return v.select(value > limit, limit, value)


@inline
def between(value: Vector, low: float, high: float) -> Vector:
    """min(max(value, low), high); NaN where the value is."""
    return v.select(value < low, low, minimum(value, high))


@inline
def unless_infinite(value: Vector, x: Vector) -> Vector:
    """value, but NaN where x is infinite: for what is 0 times x, or x minus itself."""
    return v.select(v.absolute(x) < INFINITY, value, x * 0.0)


# --- numbers and products in two parts -----------------------------------------------------------------------------

REST_COUNTS = 4096.0  # the rest of a larger number is left out: exp of it is 0 or infinite, and the rest may be large


@inline
def rest_of(value: Vector, x: float) -> float:
    """What is left of the number x once it is rounded to the precision of v."""
    return x - v.number(value, x)


@inline
def product(x: Vector, factor: float) -> tuple[Vector, Vector]:
    """x * factor, rounded, and the rest."""
    high = x * factor
    low = v.fma(x, v.like(x, factor), -high) + x * rest_of(x, factor)
    return high, v.select(v.absolute(high) < REST_COUNTS, low, 0.0)


@inline
def line(x: Vector, slope: float, intercept: float) -> Vector:
    """slope * x + intercept."""
    high, low = product(x, slope)
    return (high + intercept) + (low + rest_of(x, intercept))


@inline
def square(x: Vector) -> tuple[Vector, Vector]:
    """x * x, rounded, and the rest."""
    high = x * x
    return high, v.fma(x, x, -high)


# --- exp(high + low) = (1 + p) * 2**n ------------------------------------------------------------------------------

FAR_AWAY = constant(200.0, 1460.0)  # e to this power, and to its opposite: infinite, and 0, times any finite number


@inline
def exp_parts(high: Vector, low: Vector) -> tuple[Vector, Vector]:
    """p and n of e**(high + low) = (1 + p) * 2**n, with |p| < 0.42."""
    x = between(high, -FAR_AWAY(high), FAR_AWAY(high))
    n = v.round_even(x * LOG2_E)
    return expm1_reduced(remainder(x, n) + low), n


@inline
def scaled(value: Vector, n: Vector) -> Vector:
    """value * 2**n for n of exp_parts, twice as far as scale_by_power goes.

    Without an instruction for it by three powers, of which none leaves the normal range.
    """
    if v.scales_at_once(value):
        half = v.round_even(n * 0.5)
        return v.scale_by_power(v.scale_by_power(value, half), n - half)
    rounded = v.fma(n, 1.0 / 3.0, ROUNDER(n))
    power, rest = v.power_of(rounded), v.fma(rounded - ROUNDER(n), -2.0, n)
    return value * power * power * v.power_of(rest + ROUNDER(n))


@inline
def times_parts(value: Vector, p: Vector, n: Vector) -> Vector:
    """value * (1 + p) * 2**n, where the value may be as large as numbers get."""
    half = value * 0.5
    return scaled(v.fma(half, p, half), n + 1.0)


@inline
def exp_times(value: Vector, high: Vector, low: Vector) -> Vector:
    """value * e**(high + low)."""
    p, n = exp_parts(high, low)
    return times_parts(value, p, n)


@inline
def expm1_up_to_zero(x: Vector) -> Vector:
    """e**x - 1 for x that is at most 0, or NaN."""
    p, n = exp_parts(x, v.like(x, 0.0))
    power = scaled(v.like(x, 1.0), n)
    return v.fma(power, p, power - 1.0)


# --- logistic function ---------------------------------------------------------------------------------------------


@inline
def logistic_times(value: Vector, high: Vector, low: Vector) -> Vector:
    """value / (1 + e**-(high + low)); NaN for an infinite value where the quotient is small."""
    p, n = exp_parts(-v.absolute(high), v.select(high > 0.0, -low, low))
    above = value / (times_parts(v.like(value, 1.0), p, n) + 1.0)
    return v.select(high >= 0.0, above, unless_infinite(times_parts(above, p, n), value))


# --- logarithms ----------------------------------------------------------------------------------------------------


SMALLEST_NORMAL = constant(1.17549435e-38, 2.2250738585072014e-308)
DENORMAL_BITS, DENORMAL_SCALE = constant(25.0, 54.0), constant(2.0**25, 2.0**54)  # what makes any denormal normal


@inline
def normal(x: Vector) -> tuple[Vector, Vector]:
    """y and n of x = y * 2**n for positive x, where y is no denormal."""
    tiny = x < SMALLEST_NORMAL(x)
    return v.select(tiny, x * DENORMAL_SCALE(x), x), v.select(tiny, v.like(x, -DENORMAL_BITS(x)), 0.0)


@inline
def log_any(x: Vector) -> Vector:
    """The natural logarithm of any number: -inf for 0, NaN below."""
    y, n = normal(x)
    result = v.fma(n, v.like(x, 0.69314718055994530942), log(y))
    return v.select(x > 0.0, result, v.select(x == 0.0, -INFINITY, v.absolute(x) * float("nan")))


@inline
def log1p_unit(x: Vector) -> Vector:
    """log(1 + x) for x from 0 to 1: that of the rounded sum, and what the rounding took."""
    total = x + 1.0
    return log(total) + (x - (total - 1.0)) / total


@inline
def softplus(s: Vector, factor: float) -> Vector:
    """log(1 + exp(factor * s)) / factor."""
    high, low = product(s, factor)
    p, n = exp_parts(-v.absolute(high), v.select(high > 0.0, -low, low))
    # Far below 0 it is the power alone, which may be a denormal before it is divided.
    one = v.like(s, 1.0)
    small = v.select(n < -60.0, times_parts(one / factor, p, n), log1p_unit(times_parts(one, p, n)) / factor)
    return v.select(high > 0.0, s, 0.0) + small


# --- the normal distribution ---------------------------------------------------------------------------------------

# P(X < -x) = exp(-x*x/2) * h(t) / (x + K), t = (x - K) / (x + K).
TAIL_K = constant(1.75, 4.5)
BELL_PEAK = 0.3989422804014326779399  # the density at 0, 1 / sqrt(2 pi)


_TAIL_SINGLE = (
    8.16660100469e-5, 4.36858928515e-4, 5.59036811554e-4, -9.24397167528e-4, -3.88453072065e-3, -3.39271721527e-3,
    0.0106523030086, 0.0336883671861, -0.0187397659451, -0.267828547012, 0.648310828444,
)  # fmt: skip
_TAIL_DOUBLE = (
    4.60384629826316125097e-10, 1.57430054061818568817e-9, -1.72554796785965699556e-9, -1.34489224228772327789e-8,
    -2.27465736157941082771e-9, 7.46022830933282021249e-8, 6.15298665733892364224e-8, -3.83443179413350282385e-7,
    -5.00320517784244562652e-7, 2.14543316105970827468e-6, 3.19031374443214941276e-6, -1.42368961813013036773e-5,
    -1.59331263555387636272e-5, 1.12042937562286114601e-4, 6.38115902853877631334e-6, -9.17746535397994682259e-4,
    1.74883056719417661583e-3, 4.22361338279950942712e-3, -3.38713261771334453855e-2, 0.111382596570112355414,
    -0.253141799950968366728, 0.446452517055679944123, -0.640257760252617091841, 0.763230528970203128231,
)  # fmt: skip
_tail = polynomials(_TAIL_SINGLE, _TAIL_DOUBLE)
# For results of 16 bits: 7e-6 of the tail.
_TAIL_COARSE = -0.002676693, -0.00409370165, 0.00993540154, 0.0339052894, -0.0186091147, -0.267848756, 0.648307277
_tail_coarse = polynomials(_TAIL_COARSE, _TAIL_DOUBLE)
_EXPM1_COARSE = 0.0412770027, 0.167536879, 0.500051362  # exp(r) within 6e-6 for |r| <= ln(2)/2

NO_TAIL = 54.0  # from here on the approximation by tanh has none: its argument is beyond the range of exp_parts
# From here on exp(-x*x/2) is taken for 0: below, n reaches -127, or -1023, whose power has the bits of 0.
BELL_ENDS = constant(18.76, 53.25)


@inline
def tail_ratio(x: Vector) -> Vector:
    """The normal distribution's tail P(X > x) divided by exp(-x*x/2), for x from 0 on."""
    k = TAIL_K(x)
    d = x + k
    near = d - k
    ratio = _tail((d - 2.0 * k) / d) / d
    # That is the ratio r at d - K; its derivative x*r - density(0) makes good what the sum d has rounded off.
    return v.fma(v.fma(near, ratio, -BELL_PEAK), x - near, ratio)


@inline
def bell_parts(x: Vector) -> tuple[Vector, Vector]:
    """power and q of exp(-x*x/2) = power**2 * (1 + q) for x from 0 to BELL_ENDS: the square of exp(-x*x/4).

    The power is no denormal, so that of a product with a large number no bit is lost on the way.
    """
    high, low = square(x)
    rounded = v.fma(high, -0.25 * LOG2_E, ROUNDER(x))
    p = expm1_reduced(v.fma(low, -0.25, remainder(high * -0.25, rounded - ROUNDER(x))))
    return v.power_of(rounded), v.fma(p, p, p + p)


@inline
def coarse_tail_ratio(x: Vector) -> Vector:
    """`tail_ratio` with enough digits for a result of 16 bits."""
    k = TAIL_K(x)
    inverse = 1.0 / (x + k)
    return _tail_coarse(v.fma(inverse, -2.0 * k, 1.0)) * inverse


@inline
def coarse_lifted_bell(x: Vector) -> Vector:
    """exp(-x*x/2) with enough digits for a result of 16 bits, times LIFTED so that it is no denormal; x up to 16."""
    high, rounder = x * x * -0.5, ROUNDER(x) + LIFT(x)
    rounded = v.fma(high, LOG2_E, rounder)
    r, power = v.fma(rounded - rounder, -LN2, high), v.power_of(rounded)
    return v.fma(power, v.fma(r * r, v.polynomial(r, _EXPM1_COARSE), r), power)


# --- the argument of gelu's approximation: 2 * sqrt(2/pi) * (s + 0.044715 s**3) ------------------------------------

LINEAR, LINEAR_REST = 1.595769121605730711759784, -9.9693088091109203146e-17  # each with what float64 leaves out
CUBIC, CUBIC_REST = 0.07135481627260024877633875, -6.1751499181553154534e-19


@inline
def gelu_argument(s: Vector) -> tuple[Vector, Vector]:
    """The argument, rounded, and the rest; that of NO_TAIL for what lies beyond."""
    x = between(s, -NO_TAIL, NO_TAIL)
    z, z_low = square(x)
    cubic = z * CUBIC
    cubic_low = v.fma(z, v.like(z, CUBIC), -cubic) + (z * (rest_of(z, CUBIC) + CUBIC_REST) + z_low * CUBIC)
    total = cubic + LINEAR
    added = total - cubic
    compensation = (cubic - (total - added)) + (v.like(z, LINEAR) - added)
    total_low = compensation + (cubic_low + (rest_of(z, LINEAR) + LINEAR_REST))
    high = x * total
    return high, v.fma(x, total, -high) + x * total_low


@inline
def gelu_argument_slope(s: Vector) -> Vector:
    """The argument's derivative."""
    x = between(s, -NO_TAIL, NO_TAIL)
    return x * x * (3.0 * CUBIC) + LINEAR


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
