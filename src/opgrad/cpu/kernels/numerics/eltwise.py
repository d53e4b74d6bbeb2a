"""The formulas f(s, alpha, beta) of the eltwise post-ops, and of their gradients g * f'(s), for one vector.

Where a slope jumps at a * s + b = 0 or 1, that sum is rounded as anyone would compute it: hardswish bends at -3 and 3.
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics import elementary
from opgrad.cpu.kernels.numerics import special as f
from opgrad.cpu.kernels.numerics.special import power

MISH_IS_LINEAR = 20.0  # from here on mish(s) is s


@inline
def gelu_erf(s: Vector, alpha: float, beta: float) -> Vector:
    """s * P(X < s) = max(s, 0) - x * P(X > x) with x = |s|; NaN for minus infinity, -0 for -0."""
    x = f.minimum(v.absolute(s), f.BELL_ENDS(s))
    power, q = f.bell_parts(x)
    tail = x * f.tail_ratio(x) * power
    return v.select(s >= 0.0, s, s * 0.0) - v.fma(tail, q, tail) * power


@inline
def coarse_gelu_erf(s: Vector, alpha: float, beta: float) -> Vector:
    """`gelu_erf` with enough digits for a result of 16 bits, whose tail is 0 long before x is 16."""
    x = f.minimum(v.absolute(s), 16.0)
    lifted = x * f.coarse_tail_ratio(x) * f.coarse_lifted_bell(x)
    return v.fma(lifted, -elementary.LOWERED(s), v.select(s >= 0.0, s, s * 0.0))


@inline
def gelu_tanh(s: Vector, alpha: float, beta: float) -> Vector:
    """(1 + tanh(u)) / 2 is the logistic function of 2u."""
    high, low = f.gelu_argument(s)
    return f.logistic_times(s, high, low)


@inline
def _mish(s: Vector, alpha: float, beta: float) -> Vector:
    """With e = exp(s), tanh(log(1 + e)) is e * (e + 2) / (e * (e + 2) + 2)."""
    p, n = f.exp_parts(f.minimum(s, MISH_IS_LINEAR), v.like(s, 0.0))
    e = f.times_parts(v.like(s, 1.0), p, n)
    ratio = (e + 2.0) / (e * (e + 2.0) + 2.0)
    return v.select(s > MISH_IS_LINEAR, s, f.unless_infinite(f.times_parts(s * ratio, p, n), s))


@inline
def _relu(s: Vector, alpha: float, beta: float) -> Vector:
    """Leaky ReLU; with slope 0 the result for -inf is 0, and not the NaN of -inf * 0."""
    if alpha == 0.0:
        return v.select(s <= 0.0, 0.0, s)
    return v.select(s > 0.0, s, s * alpha)


@inline
def _swish(s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.product(s, alpha)
    return f.logistic_times(s, high, low)


FORMULAS: dict[str, Callable[..., Vector]] = {
    "abs": lambda s, alpha, beta: v.absolute(s),
    "clip": lambda s, alpha, beta: f.between(s, alpha, beta),
    "clip_v2": lambda s, alpha, beta: f.between(s, alpha, beta),
    "elu": lambda s, alpha, beta: v.select(s > 0.0, s, f.expm1_up_to_zero(f.minimum(s, 0.0)) * alpha),
    "exp": lambda s, alpha, beta: elementary.exp(s),
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "hardsigmoid": lambda s, alpha, beta: f.between(f.line(s, alpha, beta), 0.0, 1.0),
    "hardswish": lambda s, alpha, beta: s * f.between(f.line(s, alpha, beta), 0.0, 1.0),
    "linear": lambda s, alpha, beta: f.line(s, alpha, beta),
    "log": lambda s, alpha, beta: f.log_any(s),
    "logistic": lambda s, alpha, beta: elementary.sigmoid(s),
    "mish": _mish,
    "pow": lambda s, alpha, beta: power(s, v.like(s, alpha), beta),
    "relu": _relu,
    "round": lambda s, alpha, beta: v.round_even(s),
    "soft_relu": lambda s, alpha, beta: f.softplus(s, alpha),
    "sqrt": lambda s, alpha, beta: v.sqrt(s),
    "square": lambda s, alpha, beta: s * s,
    "swish": _swish,
    "tanh": lambda s, alpha, beta: elementary.tanh(s),
}


FAR = 2000.0  # logistic(-FAR) and exp(-FAR) are 0


@inline
def gelu_erf_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """P(X < s) + s * density(s), of which exp(-s*s/2) is a common factor."""
    x = f.minimum(v.absolute(s), f.BELL_ENDS(s))
    power, q = f.bell_parts(x)
    # The power comes first, so that no large g overflows on the way; g is in no sum, as it may be infinite.
    tail = g * power * v.fma(x, v.like(x, -f.BELL_PEAK), f.tail_ratio(x)) * v.fma(power, q, power)
    return f.unless_infinite(v.select(s > 0.0, g - tail, tail), s)


@inline
def gelu_tanh_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.gelu_argument(s)
    growth = f.between(s, -f.NO_TAIL, f.NO_TAIL) * f.gelu_argument_slope(s)
    slope = v.fma(growth, elementary.sigmoid(-high), 1.0)
    return f.unless_infinite(f.logistic_times(g * slope, high, low), s)


@inline
def _hardsigmoid_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    y = s * alpha + beta
    return v.select(y > 0.0, v.select(y < 1.0, g * alpha, 0.0), 0.0)


@inline
def _hardswish_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    y = s * alpha + beta
    return v.select(y <= 0.0, 0.0, v.select(y >= 1.0, g, g * (y + s * alpha)))


@inline
def _logistic_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    e = elementary.exp_up_to_zero(-v.absolute(s))
    return g / (e + 1.0) * (e / (e + 1.0))


@inline
def _mish_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """With e = exp(s) and d = e*e + 2*e + 2: e * (e + 2 + 4 s (1 + e) / d) / d."""
    x = f.between(s, -FAR, MISH_IS_LINEAR)
    p, n = f.exp_parts(x, v.like(x, 0.0))
    e = f.times_parts(v.like(x, 1.0), p, n)
    d = e * (e + 2.0) + 2.0
    slope = ((e + 2.0) + x * 4.0 * (e + 1.0) / d) / d
    return f.unless_infinite(v.select(s > MISH_IS_LINEAR, g, f.times_parts(g * slope, p, n)), s)


@inline
def _pow_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    if beta == 0.0:
        return g * 0.0
    return power(s, g * (alpha * beta), beta - 1.0)


@inline
def _soft_relu_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.product(s, alpha)
    return f.logistic_times(g, high, low)


@inline
def _swish_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    high, low = f.product(s, alpha)
    slope = v.fma(f.between(high, -FAR, FAR), elementary.sigmoid(-high), 1.0)
    return f.unless_infinite(f.logistic_times(g * slope, high, low), s)


@inline
def _tanh_grad(g: Vector, s: Vector, alpha: float, beta: float) -> Vector:
    """1 - tanh(s)**2 = 4 * logistic(2 s) * logistic(-2 s)."""
    e = elementary.exp_up_to_zero(v.absolute(s) * -2.0)
    return g / (e + 1.0) * (e * 4.0 / (e + 1.0))


GRADIENTS: dict[str, Callable[..., Vector]] = {
    "abs": lambda g, s, alpha, beta: v.select(s > 0.0, g, v.select(s < 0.0, -g, s * 0.0)),
    "clip": lambda g, s, alpha, beta: v.select(s > alpha, v.select(s <= beta, g, 0.0), 0.0),
    "clip_v2": lambda g, s, alpha, beta: v.select(s > alpha, v.select(s < beta, g, 0.0), 0.0),
    "elu": lambda g, s, alpha, beta: v.select(s > 0.0, g, g * (elementary.exp_up_to_zero(f.minimum(s, 0.0)) * alpha)),
    "exp": lambda g, s, alpha, beta: f.exp_times(g, s, v.like(s, 0.0)),
    "gelu_erf": gelu_erf_grad,
    "gelu_tanh": gelu_tanh_grad,
    "hardsigmoid": _hardsigmoid_grad,
    "hardswish": _hardswish_grad,
    "linear": lambda g, s, alpha, beta: g * alpha,
    "log": lambda g, s, alpha, beta: g / s,
    "logistic": _logistic_grad,
    "mish": _mish_grad,
    "pow": _pow_grad,
    "relu": lambda g, s, alpha, beta: v.select(s > 0.0, g, g * alpha),
    "soft_relu": _soft_relu_grad,
    "sqrt": lambda g, s, alpha, beta: g * 0.5 / v.sqrt(s),
    "square": lambda g, s, alpha, beta: g * (s * 2.0),
    "swish": _swish_grad,
    "tanh": _tanh_grad,
}
