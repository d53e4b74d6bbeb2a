"""Kernels that apply one formula to a buffer: post-ops, their gradients, and the other stages that need no table.

A kernel's buffers are contiguous and have the precision of the computation. A kernel overwrites its first buffer,
`values`. A kernel of VALUES replaces s by f(s), where a post-op f may take an operand t. A kernel of GRADIENTS replaces
the gradient g with respect to f(s) by the gradient with respect to s, and one of OPERAND_GRADIENTS by that with respect
to t. The three buffers hold:

    VALUES:                          values s; operand t, or select's condition; third select's t
    GRADIENTS, OPERAND_GRADIENTS:    values g; operand s; third t, or select's condition
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline
from opgrad.cpu.compiler.parameters import Float, Pointer
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.numerics import eltwise, eltwise_grad


@inline
def with_numbers(vectors, numbers):
    return vectors + numbers


class OnBuffers(Kernel):
    """A kernel on buffers, and `on_vectors`, its formula: (values, operand, third, alpha, beta) -> the new values."""

    on_vectors: Callable[..., Vector]


def buffer_kernel(formula: Callable[..., Vector], read: Callable[..., Any]) -> OnBuffers:
    """values = formula(*read(values, operand, third), alpha, beta)."""
    write, arrays = mapped(formula), inline(read)

    @OnBuffers
    def post_op(values: Pointer, operand: Pointer, third: Pointer, count, alpha: Float, beta: Float):
        write(values, 0, count, 0, arrays(values, operand, third), (alpha, beta))

    @inline
    def on_vectors(s: Vector, operand: Vector, third: Vector, alpha: float, beta: float) -> Vector:
        return formula(*with_numbers(arrays(s, operand, third), (alpha, beta)))

    post_op.on_vectors = on_vectors
    return post_op


def of_values(formula: Callable[..., Vector]) -> OnBuffers:
    return buffer_kernel(formula, lambda values, operand, third: (values,))


def with_operand(formula: Callable[..., Vector]) -> OnBuffers:
    return buffer_kernel(formula, lambda values, operand, third: (values, operand))


def with_third(formula: Callable[..., Vector]) -> OnBuffers:
    return buffer_kernel(formula, lambda values, operand, third: (values, third))


def with_both(formula: Callable[..., Vector]) -> OnBuffers:
    return buffer_kernel(formula, lambda values, operand, third: (values, operand, third))


multiply = of_values(lambda s, alpha, beta: s * alpha)
fill = of_values(lambda s, alpha, beta: v.like(s, alpha))
copy = with_operand(lambda s, t, alpha, beta: t)
mask_out = with_operand(lambda s, mask, alpha, beta: v.select(mask != 0.0, s, alpha))
drop = with_operand(lambda s, kept, alpha, beta: v.select(kept != 0.0, s * alpha, 0.0))


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


VALUES: dict[str, OnBuffers] = {
    **{name: of_values(formula) for name, formula in eltwise.FORMULAS.items()},
    **{name: with_operand(formula) for name, formula in BINARY.items()},
    "select": with_both(lambda s, condition, t, alpha, beta: v.select(condition != 0.0, s, t)),
}
GRADIENTS: dict[str, OnBuffers] = {
    **{name: with_operand(formula) for name, formula in eltwise_grad.FORMULAS.items()},
    "add": of_values(lambda g, alpha, beta: g),
    "sub": of_values(lambda g, alpha, beta: g),
    "mul": with_third(BINARY["mul"]),
    "div": with_third(BINARY["div"]),
    "max": with_both(_larger),
    "min": with_both(_smaller),
    "select": with_third(lambda g, condition, alpha, beta: v.select(condition != 0.0, g, 0.0)),
}
OPERAND_GRADIENTS: dict[str, OnBuffers] = {
    "add": GRADIENTS["add"],
    "sub": of_values(lambda g, alpha, beta: -g),
    "mul": with_operand(BINARY["mul"]),
    "div": with_both(lambda g, s, t, alpha, beta: -(g * s / t / t)),
    "max": with_both(_smaller),
    "min": with_both(_larger),
    "select": with_third(lambda g, condition, alpha, beta: v.select(condition == 0.0, g, 0.0)),
}
