"""The formulas f(s, alpha, beta) of the eltwise post-ops, for one vector."""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics import elementary
from opgrad.cpu.kernels.numerics import special as f
from opgrad.cpu.kernels.numerics.power import power

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
