"""The formulas of post-ops and of their gradients, for one vector.

A formula of VALUES gives f(s), where a post-op f may take an operand t. One of GRADIENTS gives the gradient with
respect to s from the gradient g with respect to f(s), and one of OPERAND_GRADIENTS that with respect to t. All have
the same parameters:

    VALUES:                          s; operand t, or select's condition; third select's t; alpha; beta
    GRADIENTS, OPERAND_GRADIENTS:    g; operand s; third t, or select's condition; alpha; beta
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.numerics import eltwise


def of_values(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    inline(formula)
    return inline(lambda values, operand, third, alpha, beta: formula(values, alpha, beta))


def with_operand(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    inline(formula)
    return inline(lambda values, operand, third, alpha, beta: formula(values, operand, alpha, beta))


def with_third(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    inline(formula)
    return inline(lambda values, operand, third, alpha, beta: formula(values, third, alpha, beta))


@inline
def _truth(s: Vector, holds) -> Vector:
    """1.0 in the lanes for which the mask holds, 0.0 in the others."""
    return v.select(holds, v.like(s, 1.0), 0.0)


BINARY: dict[str, Callable[..., Vector]] = {
    "add": lambda s, t, alpha, beta: s + t,
    "sub": lambda s, t, alpha, beta: s - t,
    "mul": lambda s, t, alpha, beta: s * t,
    "div": lambda s, t, alpha, beta: s / t,
    "max": lambda s, t, alpha, beta: v.select(s == s, v.maximum(s, t), s),
    "min": lambda s, t, alpha, beta: v.select(s == s, v.select(s < t, s, t), s),
    "ge": lambda s, t, alpha, beta: _truth(s, s >= t),
    "gt": lambda s, t, alpha, beta: _truth(s, s > t),
    "le": lambda s, t, alpha, beta: _truth(s, s <= t),
    "lt": lambda s, t, alpha, beta: _truth(s, s < t),
    "eq": lambda s, t, alpha, beta: _truth(s, s == t),
    "ne": lambda s, t, alpha, beta: _truth(s, s != t),
}


@inline
def _larger(g: Vector, s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    """The gradient of max(s, t) with respect to s: g where s is larger, 0 where it is smaller, half of g on a tie."""
    return v.select(s > t, g, v.select(s == t, g * 0.5, 0.0))


@inline
def _smaller(g: Vector, s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return _larger(g, t, s, alpha, beta)


VALUES: dict[str, Callable[..., Vector]] = {
    **{name: of_values(formula) for name, formula in eltwise.FORMULAS.items()},
    **{name: with_operand(formula) for name, formula in BINARY.items()},
    "select": inline(lambda s, condition, t, alpha, beta: v.select(condition != 0.0, s, t)),
}
GRADIENTS: dict[str, Callable[..., Vector]] = {
    **{name: with_operand(formula) for name, formula in eltwise.GRADIENTS.items()},
    "add": of_values(lambda g, alpha, beta: g),
    "sub": of_values(lambda g, alpha, beta: g),
    "mul": with_third(BINARY["mul"]),
    "div": with_third(BINARY["div"]),
    "max": _larger,
    "min": _smaller,
    "select": with_third(lambda g, condition, alpha, beta: v.select(condition != 0.0, g, 0.0)),
}
OPERAND_GRADIENTS: dict[str, Callable[..., Vector]] = {
    "add": GRADIENTS["add"],
    "sub": of_values(lambda g, alpha, beta: -g),
    "mul": with_operand(BINARY["mul"]),
    "div": inline(lambda g, s, t, alpha, beta: -(g * s / t / t)),
    "max": _smaller,
    "min": _larger,
    "select": with_third(lambda g, condition, alpha, beta: v.select(condition == 0.0, g, 0.0)),
}
