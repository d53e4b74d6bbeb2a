"""Gradients of eltwise post-ops: the formula of one vector for g * f'(s).

Where a slope jumps at a * s + b = 0 or 1, that sum is rounded as anyone would compute it: hardswish bends at -3 and 3.
"""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.numerics import math
from opgrad.cpu.numerics.eltwise import MISH_IS_LINEAR
from opgrad.cpu.numerics.functions import (
    BELL_PEAK,
    NO_TAIL,
    bell_times,
    between,
    exp_parts,
    exp_times,
    gelu_argument,
    gelu_argument_slope,
    logistic_times,
    minimum,
    product,
    tail_ratio,
    times_parts,
    unless_infinite,
)
from opgrad.cpu.numerics.power import power

FAR = 2000.0  # logistic(-FAR) and exp(-FAR) are 0


@inline
def logistic_complement(x: Vector) -> Vector:
    """1 - logistic(x)."""
    return math.sigmoid(-x)


@inline
def _abs(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s > 0.0, g, v.select(s < 0.0, -g, s * 0.0))


@inline
def _clip(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s > alpha, v.select(s <= beta, g, 0.0), 0.0)


@inline
def _clip_v2(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s > alpha, v.select(s < beta, g, 0.0), 0.0)


@inline
def _elu(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s > 0.0, g, g * (math.exp_up_to_zero(minimum(s, 0.0)) * alpha))


@inline
def _exp(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return exp_times(g, s, v.like(s, 0.0))


@inline
def _gelu_erf(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """P(X < s) + s * density(s), of which exp(-s*s/2) is a common factor."""
    x = minimum(v.absolute(s), NO_TAIL)
    tail = bell_times(g * v.fma(x, v.like(x, -BELL_PEAK), tail_ratio(x)), x)
    return unless_infinite(v.select(s > 0.0, g - tail, tail), s)


@inline
def _gelu_tanh(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = gelu_argument(s)
    growth = between(s, -NO_TAIL, NO_TAIL) * gelu_argument_slope(s)
    slope = v.fma(growth, logistic_complement(high), 1.0)
    return unless_infinite(logistic_times(g * slope, high, low), s)


@inline
def _hardsigmoid(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    y = s * alpha + beta
    return v.select(y > 0.0, v.select(y < 1.0, g * alpha, 0.0), 0.0)


@inline
def _hardswish(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    y = s * alpha + beta
    return v.select(y <= 0.0, 0.0, v.select(y >= 1.0, g, g * (y + s * alpha)))


@inline
def _linear(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return g * alpha


@inline
def _log(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return g / s


@inline
def _logistic(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    e = math.exp_up_to_zero(-v.absolute(s))
    return g / (e + 1.0) * (e / (e + 1.0))


@inline
def _mish(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """With e = exp(s) and d = e*e + 2*e + 2: e * (e + 2 + 4 s (1 + e) / d) / d."""
    x = between(s, -FAR, MISH_IS_LINEAR)
    p, n = exp_parts(x, v.like(x, 0.0))
    e = times_parts(v.like(x, 1.0), p, n)
    d = e * (e + 2.0) + 2.0
    slope = ((e + 2.0) + x * 4.0 * (e + 1.0) / d) / d
    return unless_infinite(v.select(s > MISH_IS_LINEAR, g, times_parts(g * slope, p, n)), s)


@inline
def _pow(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    if beta == 0.0:
        return g * 0.0
    return power(s, g * (alpha * beta), beta - 1.0)


@inline
def _relu(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s > 0.0, g, g * alpha)


@inline
def _soft_relu(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = product(s, alpha)
    return logistic_times(g, high, low)


@inline
def _sqrt(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return g * 0.5 / v.sqrt(s)


@inline
def _square(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    return g * (s * 2.0)


@inline
def _swish(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = product(s, alpha)
    slope = v.fma(between(high, -FAR, FAR), logistic_complement(high), 1.0)
    return unless_infinite(logistic_times(g * slope, high, low), s)


@inline
def _tanh(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """1 - tanh(s)**2 = 4 * logistic(2 s) * logistic(-2 s)."""
    e = math.exp_up_to_zero(v.absolute(s) * -2.0)
    return g / (e + 1.0) * (e * 4.0 / (e + 1.0))


FORMULAS = {
    "abs": _abs, "clip": _clip, "clip_v2": _clip_v2, "elu": _elu, "exp": _exp, "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh, "hardsigmoid": _hardsigmoid, "hardswish": _hardswish, "linear": _linear, "log": _log,
    "logistic": _logistic, "mish": _mish, "pow": _pow, "relu": _relu, "soft_relu": _soft_relu, "sqrt": _sqrt,
    "square": _square, "swish": _swish, "tanh": _tanh,
}  # fmt: skip
