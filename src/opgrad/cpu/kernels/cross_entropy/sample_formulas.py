"""The parts of losses with options that rows and columns share: their arguments, and the formulas of a vector.

The function from the logits to z is chosen when a kernel is compiled. An option that a call does not use, smoothing or
probabilities, costs one branch for each row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.parameters import Float, Pointer
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.math import exp_up_to_zero, tanh


class Scale(NamedTuple):
    """z = x * inner, or tanh(x * inner) * outer."""

    inner: Float
    outer: Float


class Target(NamedTuple):
    """weight * q: `base` + share * weight[label] at the label, or base + share * factors * probabilities."""

    base: Pointer
    factors: Pointer
    probabilities: Pointer
    outer: int
    step: int
    is_dense: int
    smooths: int
    share: Float


class Upstream(NamedTuple):
    """The gradients that are given, as a bit in `given` says of each."""

    dloss: Pointer
    dlse: Pointer
    dlse_square: Pointer
    dlog_prob: Pointer
    dentropy: Pointer
    given: int


class Results(NamedTuple):
    loss: Pointer
    lse: Pointer
    log_prob: Pointer
    entropy: Pointer
    predicted: Pointer


# --- z of the logits: by temperature alone, or bounded first -------------------------------------------------------


class Bend(NamedTuple):
    """The function z(x), and its derivative as a function of z."""

    z: Callable[..., Vector]
    slope: Callable[..., Any]


STRAIGHT = Bend(inline(lambda x, scale: x * scale[0]), inline(lambda z, scale: scale[0]))


@inline
def _capped_slope(z: Vector, scale) -> Vector:
    bent = z * (1.0 / scale[1])
    return (1.0 - bent * bent) * (scale[0] * scale[1])


CAPPED = Bend(inline(lambda x, scale: tanh(x * scale[0]) * scale[1]), _capped_slope)


# --- formulas of a vector, along a row or across rows --------------------------------------------------------------


@inline
def add_term(total, d: Vector):
    """Sums over d = z - m: of the exponentials of what is not m, how many are m, of exponentials times d."""
    rest, count, slack = total
    e = exp_up_to_zero(d)
    return (
        rest + v.select(d == 0.0, 0.0, e),
        count + v.select(d == 0.0, v.like(d, 1.0), 0.0),
        slack + e * v.maximum(d, lse.LOWEST_DIFFERENCE(d)),
    )


@inline
def add_target(total, d: Vector, target: Vector):
    """Sums of target * (m - z), 0 where the target is 0, and of targets."""
    spread, mass = total
    return spread - v.select(target == 0.0, 0.0, target * d), mass + target


@inline
def gradient_of(i, z: Vector, coefficients, target) -> Vector:
    """dz for the coefficients of a row: its label, m, 1/sum, of p, of p * (z - m), of targets, of the label."""
    label, m, inverse, constant, curved, of_target, of_label = coefficients
    d = z - m
    p = exp_up_to_zero(d) * inverse
    dz = p * (constant + curved * v.maximum(d, lse.LOWEST_DIFFERENCE(d))) - of_target * target
    return dz + v.select(i == label, of_label, 0.0)
