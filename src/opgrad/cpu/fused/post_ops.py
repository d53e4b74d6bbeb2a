"""Post-ops on buffers, and their gradients: one formula and one kernel each.

A kernel's buffers are contiguous and of the computation's precision. It works in place on `values`: s, which becomes
f(s), or the gradient g of f(s), which becomes that of s or of the operand t.

    VALUES:                          values s; operand t, or select's condition; third select's t
    GRADIENTS, OPERAND_GRADIENTS:    values g; operand s; third t, or select's condition
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.map import mapped
from opgrad.cpu.numerics import eltwise, eltwise_grad

# --- kernels --------------------------------------------------------------------------------------------------------


def of_values(formula: Callable[..., Vector]) -> Kernel:
    """values = formula(values, alpha, beta)."""
    write = mapped(formula)

    @kernel
    def post_op(values: Pointer, operand: Pointer, third: Pointer, count, alpha: Float, beta: Float):
        write(values, 0, count, 0, (values,), (alpha, beta))

    return post_op


@inline
def _operand(operand: Any, third: Any) -> Any:
    return operand


@inline
def _third(operand: Any, third: Any) -> Any:
    return third


def with_one(formula: Callable[..., Vector], chosen: Callable[..., Any]) -> Kernel:
    """values = formula(values, operand or third, alpha, beta)."""
    write = mapped(formula)

    @kernel
    def post_op(values: Pointer, operand: Pointer, third: Pointer, count, alpha: Float, beta: Float):
        write(values, 0, count, 0, (values, chosen(operand, third)), (alpha, beta))

    return post_op


def with_operand(formula: Callable[..., Vector]) -> Kernel:
    return with_one(formula, _operand)


def with_third(formula: Callable[..., Vector]) -> Kernel:
    return with_one(formula, _third)


def with_both(formula: Callable[..., Vector]) -> Kernel:
    """values = formula(values, operand, third)."""
    write = mapped(formula)

    @kernel
    def post_op(values: Pointer, operand: Pointer, third: Pointer, count, alpha: Float, beta: Float):
        write(values, 0, count, 0, (values, operand, third), ())

    return post_op


# --- binary --------------------------------------------------------------------------------------------------------


@inline
def _add(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return s + t


@inline
def _sub(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return s - t


@inline
def _mul(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return s * t


@inline
def _div(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return s / t


@inline
def _max(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s == s, v.maximum(s, t), s)


@inline
def _min(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return v.select(s == s, v.select(s < t, s, t), s)


@inline
def _ge(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return eltwise.truth(s, s >= t)


@inline
def _gt(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return eltwise.truth(s, s > t)


@inline
def _le(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return eltwise.truth(s, s <= t)


@inline
def _lt(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return eltwise.truth(s, s < t)


@inline
def _eq(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return eltwise.truth(s, s == t)


@inline
def _ne(s: Vector, t: Vector, alpha: float, beta: float) -> Vector:
    return eltwise.truth(s, s != t)


@inline
def _select(s: Vector, condition: Vector, t: Vector) -> Vector:
    return v.select(condition != 0.0, s, t)


# --- their gradients -----------------------------------------------------------------------------------------------


@inline
def _same(g: Vector, alpha: float, beta: float) -> Vector:
    return g


@inline
def _negative(g: Vector, alpha: float, beta: float) -> Vector:
    return -g


@inline
def _larger(g: Vector, s: Vector, t: Vector) -> Vector:
    """The share of the gradient that goes to the larger one, if that is s; on a tie half."""
    return v.select(s > t, g, v.select(s == t, g * 0.5, 0.0))


@inline
def _smaller(g: Vector, s: Vector, t: Vector) -> Vector:
    return _larger(g, t, s)


@inline
def _div_operand(g: Vector, s: Vector, t: Vector) -> Vector:
    return -(g * s / t / t)


@inline
def _where(g: Vector, condition: Vector, alpha: float, beta: float) -> Vector:
    return v.select(condition != 0.0, g, 0.0)


@inline
def _where_not(g: Vector, condition: Vector, alpha: float, beta: float) -> Vector:
    return v.select(condition == 0.0, g, 0.0)


# --- tables --------------------------------------------------------------------------------------------------------

BINARY = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "max": _max, "min": _min,
    "ge": _ge, "gt": _gt, "le": _le, "lt": _lt, "eq": _eq, "ne": _ne,
}  # fmt: skip

VALUES: dict[str, Kernel] = {
    **{name: of_values(formula) for name, formula in eltwise.FORMULAS.items()},
    **{name: with_operand(formula) for name, formula in BINARY.items()},
    "select": with_both(_select),
}
GRADIENTS: dict[str, Kernel] = {
    **{name: with_operand(formula) for name, formula in eltwise_grad.FORMULAS.items()},
    "add": of_values(_same),
    "sub": of_values(_same),
    "mul": with_third(_mul),
    "div": with_third(_div),
    "max": with_both(_larger),
    "min": with_both(_smaller),
    "select": with_third(_where),
}
OPERAND_GRADIENTS: dict[str, Kernel] = {
    "add": of_values(_same),
    "sub": of_values(_negative),
    "mul": with_operand(_mul),
    "div": with_both(_div_operand),
    "max": with_both(_smaller),
    "min": with_both(_larger),
    "select": with_third(_where_not),
}
