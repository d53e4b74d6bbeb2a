"""The sum that softmax divides by, and its logarithm, within an ulp or two, or to the last digits.

exp(x - m) with x - m rounded first would be wrong by |x - m| roundings. Instead the exponentials are scaled by a power
of two, which costs no digit: exp(x) * 2**-k for |m| < NEAR. For larger |m| every x that counts lies within a factor 2
of m, so that x - m is exact. Whatever the scale is, it cancels in exp / sum.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import by_precision, constant, inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics.elementary import LOG2_E, ROUNDER, expm1_parts, expm1_reduced, log, remainder

# --- exp on a row's own scale ---------------------------------------------------------------------------------------

TOP_SINGLE, TOP_DOUBLE = 64, 256
TOP = constant(TOP_SINGLE, TOP_DOUBLE)  # the largest exponential of a row is near 2**TOP: none that counts is denormal
# Exponentials this far below the largest add nothing to its sum, and their quotients round to 0. At this difference,
# 190.98 or 1278.98 powers of two, the power is nearly always the one whose bits are those of 0, and so is the
# exponential: quotients that underflow took 4 times as long where a third of a row was -inf.
LOWEST_DIFFERENCE = constant(-132.377, -886.521)
NEAR = constant(256.0, 1024.0)


@inline
def scale_for(m: Vector):
    """The scale for rows whose largest element is m: what is subtracted from x, the lowest difference, the rounder."""
    close = v.absolute(m) < NEAR(m)
    a = v.select(close, m, 0.0)
    return v.select(close, 0.0, m), a + LOWEST_DIFFERENCE(m), ROUNDER(m) + TOP(m) - v.round_even(a * LOG2_E)


@inline
def _reduced(x: Vector, scale):
    subtracted, lowest, rounder = scale
    d = v.maximum(lowest, x - subtracted)
    rounded = v.fma(d, LOG2_E, rounder)
    return v.power_of(rounded), d, rounded - rounder


@inline
def exp_parts(x: Vector, scale):
    """(power, p) of exp(x) = power * (1 + p), power being a power of two; for x that is at most m, or NaN."""
    power, d, n = _reduced(x, scale)
    return power, expm1_reduced(remainder(d, n))


@inline
def exp_scaled(x: Vector, scale) -> Vector:
    power, p = exp_parts(x, scale)
    return v.fma(p, power, power)


@inline
def exp_pair(x: Vector, scale):
    """exp_scaled, and the error of its last rounding."""
    power, p = exp_parts(x, scale)
    e = v.fma(p, power, power)
    return e, v.fma(p, power, power - e)


@inline
def exp_residue(x: Vector, scale) -> Vector:
    """The error of the roundings of p: exp(x) minus both parts of `exp_pair`."""
    power, d, n = _reduced(x, scale)
    high, low = expm1_parts(d, n)
    return ((high - expm1_reduced(remainder(d, n))) + low) * power


@inline
def in_float64(x) -> float:
    return x * 1.0


@inline
def exp_added(p, x: float, m: float) -> float:
    """One exponential on the scale for m, with the digits that sums keep of it."""
    e, compensation = exp_pair(v.full(p, x), scale_for(v.full(p, m)))
    return in_float64(v.first_lane(e)) + v.first_lane(compensation)


@inline
def exp_wide(p, x: float, m: float) -> float:
    """One exponential on the scale for m, corrected by the errors of all its roundings."""
    return exp_added(p, x, m) + v.first_lane(exp_residue(v.full(p, x), scale_for(v.full(p, m))))


# --- adding up -----------------------------------------------------------------------------------------------------


class Adding(NamedTuple):
    """How exponentials of x are added up. The sums are four vectors: two for a chunk of terms, and the total of the
    chunks before it, in two parts."""

    add: Callable[..., Any]  # (x, sums, value, scale): exp(value), and the sums with it
    add_two: Callable[..., Any]  # (x, sums, value, other, scale): both exponentials, and the sums with them


class AddingBelow(NamedTuple):
    """How the exponentials of those values that differ from m are added up."""

    chunk: int  # calls of either, after which `join_plain` is called
    add: Callable[..., Any]  # (x, sums, value, m, scale): the sums with exp(value)
    add_two: Callable[..., Any]  # (x, sums, value, other, m, scale): the sums with both exponentials


@inline
def add_pairs(a, b):
    """The sum of two numbers of two parts each, again in two parts."""
    (a_high, a_low), (b_high, b_low) = a, b
    high = a_high + b_high
    from_b = high - a_high
    low = (a_high - (high - from_b)) + (b_high - from_b) + a_low + b_low
    total = high + low
    return total, low - (total - high)


@inline
def join_plain(x, sums):
    """Add a chunk's sum to the total, and keep the rounding error."""
    chunk, compensation, high, low = sums
    total = high + chunk
    added = total - high
    zero = v.full(x, 0.0)
    return zero, zero, total, low + (compensation + ((high - (total - added)) + (chunk - added)))


# A chunk starts above every term, so that what an addition rounds off is known. It is kept where x has all the digits
# of the arithmetic: a result of 16 bits does not show them.
START_SINGLE = 2.0 ** (TOP_SINGLE + 1)
START = constant(START_SINGLE, 2.0 ** (TOP_DOUBLE + 1))


@inline
def start(x):
    """The sums of no terms."""
    zero = v.full(x, 0.0)
    return v.like(zero, START(zero)) if v.is_fine(x) else zero, zero, zero, zero


@inline
def join(x, sums):
    """Add a chunk's sum to the total, and start a new chunk."""
    if v.is_fine(x):
        total, compensation, high, low = sums
        first, zero, _, _ = start(x)
        chunk = total - first
        high, low = add_pairs((high, low), (chunk, compensation + ((total - chunk) - first)))
        return first, zero, high, low
    return join_plain(x, sums)


@inline
def rounded(x, sums) -> Vector:
    """A chunk's sum in one vector."""
    total, compensation, _, _ = sums
    return (total - start(x)[0]) + compensation


@inline
def next_chunk(x, sums):
    """Start a new chunk along a row, whose lanes are summed at the end; compensated sums go on without a new start."""
    if v.is_fine(x):
        return sums
    chunk, zero, high, low = sums
    return zero, zero, high + chunk, low


@inline
def _lanes_single(x, total: Vector, sums) -> float:
    """The start is subtracted last, in float64, which makes no error."""
    _, compensation, high, _ = sums
    if v.is_fine(x):
        return v.reduce_add_wide(total, compensation) - v.lanes(x) * START_SINGLE
    return v.reduce_add_wide(total, high)


@inline
def _lanes_double(x, total: Vector, sums) -> float:
    _, _, high, low = join(x, sums)
    return v.reduce_add_wide(high, low)


# sum_lanes(x, sums[0], sums): the sum over all lanes.
sum_lanes = by_precision(_lanes_single, _lanes_double)


@inline
def _kept(x, sums, e: Vector):
    """The sums with e."""
    total, compensation, high, low = sums
    added = total + e
    if v.is_fine(x):
        compensation = compensation + (e - (added - total))
    return added, compensation, high, low


@inline
def _add_rounded(x, sums, value: Vector, scale):
    e = exp_scaled(value, scale)
    return e, _kept(x, sums, e)


@inline
def _add_pair(x, sums, value: Vector, other: Vector, scale):
    a, b = exp_scaled(value, scale), exp_scaled(other, scale)
    return a, b, _kept(x, sums, a + b)


@inline
def _add_exact(x, sums, value: Vector, scale):
    total, compensation, high, low = sums
    power, p = exp_parts(value, scale)
    e = v.fma(p, power, power)
    added = total + e
    if v.is_fine(x):
        compensation = compensation + v.fma(p, power, power - (added - total))
    return e, (added, compensation, high, low)


def _twice(add: Callable[..., Any]) -> Callable[..., Any]:
    @inline
    def add_two(x, sums, value: Vector, other: Vector, scale):
        a, sums = add(x, sums, value, scale)
        b, sums = add(x, sums, other, scale)
        return a, b, sums

    return add_two


# Exact: what rounding takes from an exponential is kept, too. Rounded: exponentials count as they are rounded.
# Plain: two of them are added and rounded before they join the others, which saves a fifth of the time.
EXACT: Final = Adding(_add_exact, _twice(_add_exact))
ROUNDED: Final = Adding(_add_rounded, _twice(_add_rounded))
PLAIN: Final = Adding(_add_rounded, _add_pair)


@inline
def no_sums(x):
    """The sums of no terms, for sums that may stay tiny, so that they start at 0."""
    zero = v.full(x, 0.0)
    return zero, zero, zero, zero


@inline
def _add_exact_below(x, sums, value: Vector, m: Vector, scale):
    rest, compensation, high, low = sums
    power, p = exp_parts(value, scale)
    power = v.select(value == m, 0.0, power)
    added = rest + v.fma(p, power, power)
    if v.is_fine(x):
        compensation = compensation + v.fma(p, power, power - (added - rest))
    return added, compensation, high, low


@inline
def _add_plain_below(x, sums, value: Vector, m: Vector, scale):
    return sums[0] + v.select(value == m, 0.0, exp_scaled(value, scale)), sums[1], sums[2], sums[3]


@inline
def _add_pair_below(x, sums, value: Vector, other: Vector, m: Vector, scale):
    first, second = exp_scaled(value, scale), exp_scaled(other, scale)
    pair = v.select(value == m, 0.0, first) + v.select(other == m, 0.0, second)
    return sums[0] + pair, sums[1], sums[2], sums[3]


EXACT_BELOW: Final = AddingBelow(
    64,
    _add_exact_below,
    inline(lambda x, sums, a, b, m, scale: _add_exact_below(x, _add_exact_below(x, sums, a, m, scale), b, m, scale)),
)
PLAIN_BELOW: Final = AddingBelow(4, _add_plain_below, _add_pair_below)  # 4 pairs err by at most 2 ulp of their sum


# --- dividing by it ------------------------------------------------------------------------------------------------

# Plain: the reciprocal of the sum in two parts, so that 1 stays 1.


@inline
def row_reciprocal(x, s: float):
    r = 1.0 / s
    high = v.number(x, r)
    return v.full(x, high), v.full(x, r - high)


@inline
def column_reciprocal(s):
    high, low = s
    r = 1.0 / high
    return r, v.fma(-low, r, v.fma(-high, r, 1.0)) * r


@inline
def quotient(e: Vector, reciprocal, fine) -> Vector:
    """e / sum; a result of 16 bits does not show the second part."""
    high, low = reciprocal
    return v.fma(e, high, e * low) if fine else e * high


# Exact: a divisor is four vectors, UP / sum in two parts, the largest exponential of the row, and its quotient. Without
# UP the second part's product would be denormal where the quotient is small, though normal: up to 2.25 ulp, not 1.8.
# The largest exponential may be almost all of the sum. So the residue of its p, which the sum lacks, is added here;
# but not for its own quotient: where all are the largest, that is 1/n.
UP, DOWN = 2.0**32, 2.0**-32


@inline
def row_divisor(x, s: float, m: float):
    """The divisor for the sum s over a row whose largest element is m."""
    scale = scale_for(v.full(x, m))
    r = 1.0 / (s + v.first_lane(exp_residue(v.full(x, m), scale)))
    high = v.number(x, r)
    return (
        v.full(x, high * UP),
        v.full(x, (r - high) * UP),
        exp_scaled(v.full(x, m), scale),
        v.full(x, exp_added(x, m, m) / s),
    )


@inline
def column_divisor(s, m: Vector):
    """The divisors for the sums s over columns whose largest elements are m."""
    scale = scale_for(m)
    top, compensation = exp_pair(m, scale)
    high, low = s
    r = 1.0 / high
    missing = v.fma(-high, r, 1.0)
    rest = v.fma(-low, r, missing) * r
    largest = v.fma(top, r, v.fma(top, rest, compensation * r))
    return r * UP, v.fma(-(low + exp_residue(m, scale)), r, missing) * r * UP, top, largest


@inline
def scaled(e: Vector, divisor, fine) -> Vector:
    """e / sum. The largest exponential's quotient is known without e's own rounding: 1 stays 1, and 1/n is 1/n."""
    high, low, top, largest = divisor
    if fine:
        return v.select(e == top, largest, v.fma(e, high, e * low) * DOWN)
    return e * (high * DOWN)


# --- the logarithm -------------------------------------------------------------------------------------------------


@inline
def log_of_sum(count: Vector, t: Vector) -> Vector:
    """log(count + t) for a whole count; right to a few digits relative to itself, however small t is beside 1."""
    s = count + t
    compensation = v.select(count > t, t - (s - count), count - (s - t))
    return log(s) + compensation / s


@inline
def row_log_of_sum(x, rest: float, count: float, m: float) -> Vector:
    """log(sum of exp(x - m)): `count` of the x are m, the scaled exponentials of the others add up to `rest`."""
    return log_of_sum(v.full(x, count), v.full(x, rest / exp_wide(x, m, m)))


@inline
def column_log_of_sum(rest: Vector, count: Vector, m: Vector) -> Vector:
    """`row_log_of_sum` for each lane."""
    scale = scale_for(m)
    top, compensation = exp_pair(m, scale)
    t = rest / top
    return log_of_sum(count, v.fma(-t, (compensation + exp_residue(m, scale)) / top, t))


@inline
def rounded_top(x, m: float) -> float:
    """The exponential of a row's largest element m as ROUNDED adds it."""
    return in_float64(v.first_lane(exp_scaled(v.full(x, m), scale_for(v.full(x, m)))))


@inline
def row_log_of_total(x, s: float, top: float) -> float:
    """log(sum of exp(x - m)) from the sum of all scaled exponentials, of which `top` is that of m."""
    return v.first_lane(log_of_sum(v.full(x, 1.0), v.full(x, max((s - top) / top, 0.0) if s == s else s)))


@inline
def column_log_of_total(s, m: Vector, top: Vector, compensation) -> Vector:
    """`row_log_of_total` for each lane; `compensation`: the rounding error of `top`, or 0 if the sum leaves it out."""
    high, low = s
    return log_of_sum(v.like(m, 1.0), v.maximum(0.0, ((high - top) + (low - compensation)) / top))
