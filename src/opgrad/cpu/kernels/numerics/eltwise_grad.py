"""Gradients of eltwise post-ops: the formula of one vector for g * f'(s).

Where a slope jumps at a * s + b = 0 or 1, that sum is rounded as anyone would compute it: hardswish bends at -3 and 3.
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics import elementary
from opgrad.cpu.kernels.numerics import special as f
from opgrad.cpu.kernels.numerics.eltwise import MISH_IS_LINEAR
from opgrad.cpu.kernels.numerics.power import power

FAR = 2000.0  # logistic(-FAR) and exp(-FAR) are 0


@inline
def gelu_erf(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """P(X < s) + s * density(s), of which exp(-s*s/2) is a common factor."""
    x = f.minimum(v.absolute(s), f.BELL_ENDS(s))
    power, q = f.bell_parts(x)
    # The power comes first, so that no large g overflows on the way; g is in no sum, as it may be infinite.
    tail = g * power * v.fma(x, v.like(x, -f.BELL_PEAK), f.tail_ratio(x)) * v.fma(power, q, power)
    return f.unless_infinite(v.select(s > 0.0, g - tail, tail), s)


@inline
def gelu_tanh(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.gelu_argument(s)
    growth = f.between(s, -f.NO_TAIL, f.NO_TAIL) * f.gelu_argument_slope(s)
    slope = v.fma(growth, elementary.sigmoid(-high), 1.0)
    return f.unless_infinite(f.logistic_times(g * slope, high, low), s)


@inline
def _hardsigmoid(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    y = s * alpha + beta
    return v.select(y > 0.0, v.select(y < 1.0, g * alpha, 0.0), 0.0)


@inline
def _hardswish(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    y = s * alpha + beta
    return v.select(y <= 0.0, 0.0, v.select(y >= 1.0, g, g * (y + s * alpha)))


@inline
def _logistic(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    e = elementary.exp_up_to_zero(-v.absolute(s))
    return g / (e + 1.0) * (e / (e + 1.0))


@inline
def _mish(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """With e = exp(s) and d = e*e + 2*e + 2: e * (e + 2 + 4 s (1 + e) / d) / d."""
    x = f.between(s, -FAR, MISH_IS_LINEAR)
    p, n = f.exp_parts(x, v.like(x, 0.0))
    e = f.times_parts(v.like(x, 1.0), p, n)
    d = e * (e + 2.0) + 2.0
    slope = ((e + 2.0) + x * 4.0 * (e + 1.0) / d) / d
    return f.unless_infinite(v.select(s > MISH_IS_LINEAR, g, f.times_parts(g * slope, p, n)), s)


@inline
def _pow(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    if beta == 0.0:
        return g * 0.0
    return power(s, g * (alpha * beta), beta - 1.0)


@inline
def _soft_relu(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.product(s, alpha)
    return f.logistic_times(g, high, low)


@inline
def _swish(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.product(s, alpha)
    slope = v.fma(f.between(high, -FAR, FAR), elementary.sigmoid(-high), 1.0)
    return f.unless_infinite(f.logistic_times(g * slope, high, low), s)


@inline
def _tanh(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """1 - tanh(s)**2 = 4 * logistic(2 s) * logistic(-2 s)."""
    e = elementary.exp_up_to_zero(v.absolute(s) * -2.0)
    return g / (e + 1.0) * (e * 4.0 / (e + 1.0))


FORMULAS: dict[str, Callable[..., Vector]] = {
    "abs": lambda g, s, alpha, beta: v.select(s > 0.0, g, v.select(s < 0.0, -g, s * 0.0)),
    "clip": lambda g, s, alpha, beta: v.select(s > alpha, v.select(s <= beta, g, 0.0), 0.0),
    "clip_v2": lambda g, s, alpha, beta: v.select(s > alpha, v.select(s < beta, g, 0.0), 0.0),
    "elu": lambda g, s, alpha, beta: v.select(s > 0.0, g, g * (elementary.exp_up_to_zero(f.minimum(s, 0.0)) * alpha)),
    "exp": lambda g, s, alpha, beta: f.exp_times(g, s, v.like(s, 0.0)),
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "linear": lambda g, s, alpha, beta: g * alpha,
    "log": lambda g, s, alpha, beta: g / s,
    "logistic": _logistic,
    "mish": _mish,
    "pow": _pow,
    "relu": lambda g, s, alpha, beta: v.select(s > 0.0, g, g * alpha),
    "soft_relu": _soft_relu,
    "sqrt": lambda g, s, alpha, beta: g * 0.5 / v.sqrt(s),
    "square": lambda g, s, alpha, beta: g * (s * 2.0),
    "swish": _swish,
    "tanh": _tanh,
}
