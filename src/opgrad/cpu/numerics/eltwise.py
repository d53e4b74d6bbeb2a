"""Eltwise post-ops: the formula f(s, alpha, beta) of one vector for each."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Mask, Vector
from opgrad.cpu.numerics import math
from opgrad.cpu.numerics.functions import (
    NO_TAIL,
    bell_times,
    between,
    exp_parts,
    expm1_up_to_zero,
    gelu_argument,
    line,
    log_any,
    logistic_times,
    minimum,
    product,
    softplus,
    tail_ratio,
    times_parts,
    unless_infinite,
)
from opgrad.cpu.numerics.power import power

# From here on gelu(s) is s, and so is mish.
GELU_IS_LINEAR, MISH_IS_LINEAR = 10.0, 20.0


@inline
def truth(s: Vector, holds: Mask) -> Vector:
    """1 where the mask holds, else 0."""
    return v.select(holds, v.like(s, 1.0), 0.0)


@inline
def _abs(s: Vector, alpha: float, beta: float) -> Vector:
    return v.absolute(s)


@inline
def _clip(s: Vector, alpha: float, beta: float) -> Vector:
    return between(s, alpha, beta)


@inline
def _elu(s: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s > 0.0, s, expm1_up_to_zero(minimum(s, 0.0)) * alpha)


@inline
def _exp(s: Vector, alpha: float, beta: float) -> Vector:
    return math.exp(s)


@inline
def _gelu_erf(s: Vector, alpha: float, beta: float) -> Vector:
    """s * P(X < s), where the probability on the far side is computed: 1 less it for positive s."""
    x = minimum(v.absolute(s), NO_TAIL)
    tail = unless_infinite(bell_times(v.absolute(s) * tail_ratio(x), x), s)
    return v.select(s > GELU_IS_LINEAR, s, v.select(s > 0.0, s - tail, v.copy_sign(tail, s)))


@inline
def _gelu_tanh(s: Vector, alpha: float, beta: float) -> Vector:
    """(1 + tanh(u)) / 2 is the logistic function of 2u."""
    high, low = gelu_argument(s)
    return logistic_times(s, high, low)


@inline
def _hardsigmoid(s: Vector, alpha: float, beta: float) -> Vector:
    return between(line(s, alpha, beta), 0.0, 1.0)


@inline
def _hardswish(s: Vector, alpha: float, beta: float) -> Vector:
    return s * between(line(s, alpha, beta), 0.0, 1.0)


@inline
def _linear(s: Vector, alpha: float, beta: float) -> Vector:
    return line(s, alpha, beta)


@inline
def _log(s: Vector, alpha: float, beta: float) -> Vector:
    return log_any(s)


@inline
def _logistic(s: Vector, alpha: float, beta: float) -> Vector:
    return math.sigmoid(s)


@inline
def _mish(s: Vector, alpha: float, beta: float) -> Vector:
    """With e = exp(s), tanh(log(1 + e)) is e * (e + 2) / (e * (e + 2) + 2)."""
    p, n = exp_parts(minimum(s, MISH_IS_LINEAR), v.like(s, 0.0))
    e = times_parts(v.like(s, 1.0), p, n)
    ratio = (e + 2.0) / (e * (e + 2.0) + 2.0)
    return v.select(s > MISH_IS_LINEAR, s, unless_infinite(times_parts(s * ratio, p, n), s))


@inline
def _pow(s: Vector, alpha: float, beta: float) -> Vector:
    return power(s, v.like(s, alpha), beta)


@inline
def _relu(s: Vector, alpha: float, beta: float) -> Vector:
    """The slope 0 takes -inf to 0, too."""
    if alpha == 0.0:
        return v.select(s <= 0.0, 0.0, s)
    return v.select(s > 0.0, s, s * alpha)


@inline
def _round(s: Vector, alpha: float, beta: float) -> Vector:
    return v.round_even(s)


@inline
def _soft_relu(s: Vector, alpha: float, beta: float) -> Vector:
    return softplus(s, alpha)


@inline
def _sqrt(s: Vector, alpha: float, beta: float) -> Vector:
    return v.sqrt(s)


@inline
def _square(s: Vector, alpha: float, beta: float) -> Vector:
    return s * s


@inline
def _swish(s: Vector, alpha: float, beta: float) -> Vector:
    high, low = product(s, alpha)
    return logistic_times(s, high, low)


@inline
def _tanh(s: Vector, alpha: float, beta: float) -> Vector:
    return math.tanh(s)


FORMULAS = {
    "abs": _abs, "clip": _clip, "clip_v2": _clip, "elu": _elu, "exp": _exp, "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh, "hardsigmoid": _hardsigmoid, "hardswish": _hardswish, "linear": _linear, "log": _log,
    "logistic": _logistic, "mish": _mish, "pow": _pow, "relu": _relu, "round": _round, "soft_relu": _soft_relu,
    "sqrt": _sqrt, "square": _square, "swish": _swish, "tanh": _tanh,
}  # fmt: skip
