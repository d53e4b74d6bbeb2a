"""Post-ops in kernels: the value of each operation, its slope, and that of its operand (`ops.reference.post_ops`).

s is the running value, t the operand, `condition` select's; a and b are alpha and beta. The operation is chosen by its
name when a kernel is compiled, so that a chain of them becomes one straight piece of code.
"""

import triton
import triton.language as tl

from opgrad.cuda.numbers import (
    divide,
    exp,
    expm1,
    hyperbolic_tangent,
    logistic,
    normal_density,
    normal_distribution,
    power,
    round_to_even,
    softplus,
)

TWICE_ROOT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
CUBIC: tl.constexpr = tl.constexpr(0.044715)
THRICE_CUBIC: tl.constexpr = tl.constexpr(0.134145)
FAR: tl.constexpr = tl.constexpr(40.0)  # gelu is the identity or 0 from here on


@triton.jit
def larger(s, t):
    """The larger number; NaN where either is."""
    return tl.maximum(s, t, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(s, t):
    return tl.minimum(s, t, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def wins(s, t):
    """1 where s is larger, 1/2 where they are equal."""
    return tl.where(s > t, 1.0, tl.where(s == t, 0.5, tl.zeros_like(s)))


@triton.jit
def square_root(s):
    """The square root, rounded to the nearest; in float32 Triton's own errs."""
    if s.dtype == tl.float64:
        root = tl.sqrt(s)
    else:
        root = tl.sqrt_rn(s)
    return root


@triton.jit
def gelu_argument(s):
    """gelu_tanh is s * logistic of this."""
    return s * TWICE_ROOT_2_OVER_PI * (s * s * CUBIC + 1.0)


@triton.jit
def tanh_of_softplus(s):
    """tanh(log(1 + exp(s))) = (e^2 + 2 e) / (e^2 + 2 e + 2) for e = exp(s); for s > 0 divided by e^2."""
    e = exp(-tl.abs(s))
    right = (1.0 + 2.0 * e) / (1.0 + 2.0 * e + 2.0 * e * e)
    left = e * (e + 2.0) / (e * (e + 2.0) + 2.0)
    return tl.where(s > 0, right, left)


@triton.jit
def value(NAME: tl.constexpr, s, t, condition, a, b):
    """What an operation makes of s."""
    if NAME == "add":
        v = s + t
    elif NAME == "sub":
        v = s - t
    elif NAME == "mul":
        v = s * t
    elif NAME == "div":
        v = divide(s, t)
    elif NAME == "max":
        v = larger(s, t)
    elif NAME == "min":
        v = smaller(s, t)
    elif NAME == "ge":
        v = (s >= t).to(s.dtype)
    elif NAME == "gt":
        v = (s > t).to(s.dtype)
    elif NAME == "le":
        v = (s <= t).to(s.dtype)
    elif NAME == "lt":
        v = (s < t).to(s.dtype)
    elif NAME == "eq":
        v = (s == t).to(s.dtype)
    elif NAME == "ne":
        v = (s != t).to(s.dtype)
    elif NAME == "select":
        v = tl.where(condition != 0, s, t)
    elif NAME == "abs":
        v = tl.abs(s)
    elif NAME == "clip" or NAME == "clip_v2":
        v = smaller(larger(s, a), b)
    elif NAME == "elu":
        v = tl.where(s > 0, s, a * expm1(smaller(s, 0.0)))
    elif NAME == "exp":
        v = exp(s)
    elif NAME == "gelu_erf":
        v = s * normal_distribution(s)
    elif NAME == "gelu_tanh":
        v = s * logistic(gelu_argument(s))
    elif NAME == "hardsigmoid":
        v = larger(smaller(a * s + b, 1.0), 0.0)
    elif NAME == "hardswish":
        v = s * larger(smaller(a * s + b, 1.0), 0.0)
    elif NAME == "linear":
        v = a * s + b
    elif NAME == "log":
        v = tl.log(s)
    elif NAME == "logistic":
        v = logistic(s)
    elif NAME == "mish":
        v = s * tanh_of_softplus(s)
    elif NAME == "pow":
        v = a * power(s, b)
    elif NAME == "relu":
        # 0 * s would be NaN for -inf.
        v = tl.where(s > 0, s, tl.where((a == 0) & (s == s), 0.0, a * s))
    elif NAME == "round":
        v = round_to_even(s)
    elif NAME == "soft_relu":
        v = softplus(a * s) / a
    elif NAME == "sqrt":
        v = square_root(s)
    elif NAME == "square":
        v = s * s
    elif NAME == "swish":
        v = s * logistic(a * s)
    else:
        tl.static_assert(NAME == "tanh")
        v = hyperbolic_tangent(s)
    return v


@triton.jit
def slope(NAME: tl.constexpr, s, t, condition, a, b):
    """The derivative of an operation's value with respect to s."""
    if NAME == "add" or NAME == "sub":
        d = tl.full(s.shape, 1.0, s.dtype)
    elif NAME == "mul":
        d = t
    elif NAME == "div":
        d = divide(tl.full(t.shape, 1.0, t.dtype), t)
    elif NAME == "max":
        d = wins(s, t)
    elif NAME == "min":
        d = wins(t, s)
    elif NAME == "select":
        d = (condition != 0).to(s.dtype)
    elif NAME == "abs":
        d = tl.where(s > 0, 1.0, tl.where(s < 0, -1.0, s))
    elif NAME == "clip":
        d = ((s > a) & (s <= b)).to(s.dtype)
    elif NAME == "clip_v2":
        d = ((s > a) & (s < b)).to(s.dtype)
    elif NAME == "elu":
        d = tl.where(s > 0, 1.0, a * exp(smaller(s, 0.0)))
    elif NAME == "exp":
        d = exp(s)
    elif NAME == "gelu_erf":
        d = normal_distribution(s) + s * normal_density(s)
    elif NAME == "gelu_tanh":
        near = smaller(larger(s, -FAR), FAR)
        u = gelu_argument(near)
        r = logistic(u)
        d = r + r * logistic(-u) * (near * TWICE_ROOT_2_OVER_PI * (near * near * THRICE_CUBIC + 1.0))
    elif NAME == "hardsigmoid":
        u = a * s + b
        d = tl.where((u > 0) & (u < 1.0), a, tl.zeros_like(s))
    elif NAME == "hardswish":
        u = a * s + b
        d = tl.where(u <= 0, 0.0, tl.where(u >= 1.0, 1.0, u + a * s))
    elif NAME == "linear":
        d = tl.zeros_like(s) + a
    elif NAME == "log":
        d = 1.0 / s
    elif NAME == "logistic":
        d = logistic(s) * logistic(-s)
    elif NAME == "mish":
        h = tanh_of_softplus(s)
        d = h + s * (1.0 - h) * (1.0 + h) * logistic(s)
    elif NAME == "pow":
        d = a * b * power(s, b - 1.0)
    elif NAME == "relu":
        d = tl.where(s > 0, 1.0, tl.zeros_like(s) + a)
    elif NAME == "soft_relu":
        d = logistic(a * s)
    elif NAME == "sqrt":
        d = 0.5 / square_root(s)
    elif NAME == "square":
        d = 2.0 * s
    elif NAME == "swish":
        r = logistic(a * s)
        d = r + a * s * r * logistic(-a * s)
    else:
        tl.static_assert(NAME == "tanh")
        h = hyperbolic_tangent(s)
        d = (1.0 - h) * (1.0 + h)
    return d


@triton.jit
def operand_slope(NAME: tl.constexpr, s, t, condition):
    """The derivative of a binary operation's value with respect to its operand t."""
    if NAME == "add":
        d = tl.full(s.shape, 1.0, s.dtype)
    elif NAME == "sub":
        d = tl.full(s.shape, -1.0, s.dtype)
    elif NAME == "mul":
        d = s
    elif NAME == "div":
        d = divide(-s, t * t)
    elif NAME == "max":
        d = wins(t, s)
    elif NAME == "min":
        d = wins(s, t)
    else:
        tl.static_assert(NAME == "select")
        d = (condition == 0).to(s.dtype)
    return d
