"""Gelu, its approximation by tanh, and their gradients, by the formulas of the post-ops."""

import math
from collections.abc import Callable

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.elements import BLOCK, elementwise, program
from opgrad.cpu.loops.map import mapped
from opgrad.cpu.numerics import eltwise, eltwise_grad
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, shared_out
from opgrad.problem import Problem


def _value(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(x)."""

    @inline
    def value(x: Vector, alpha: float) -> Vector:
        return formula(x, alpha, 0.0)

    return elementwise(value)


def _gradient(formula: Callable[..., Vector]) -> Kernel:
    """The kernel dx = formula(dy, x)."""

    @inline
    def gradient(dy: Vector, x: Vector, alpha: float) -> Vector:
        return formula(dy, x, alpha, 0.0)

    return elementwise(gradient)


def _gradient_behind_bias(formula: Callable[..., Vector]) -> Kernel:
    """The kernel dx = formula(dy, x + bias), by rows of the bias's length."""

    @inline
    def gradient(dy: Vector, x: Vector, bias: Vector) -> Vector:
        return formula(dy, x + bias, 0.0, 0.0)

    write = mapped(gradient)

    @kernel
    def bias_gradient(units: Units, blocks, n, dy: Pointer, x: Pointer, bias: Pointer, dx: Pointer, stream):
        for unit in units:
            row, begin = unit // blocks * n, unit % blocks * BLOCK
            write(dx + row, begin, min(begin + BLOCK, n), stream, (dy + row, x + row, bias), ())

    return bias_gradient


GELU, FAST_GELU = (_value(eltwise.FORMULAS[name]) for name in ("gelu_erf", "gelu_tanh"))
GELU_GRAD, FAST_GELU_GRAD = (_gradient(eltwise_grad.FORMULAS[name]) for name in ("gelu_erf", "gelu_tanh"))
BIAS_GELU_GRAD, BIAS_FAST_GELU_GRAD = (
    _gradient_behind_bias(eltwise_grad.FORMULAS[name]) for name in ("gelu_erf", "gelu_tanh")
)


def gelu(problem: Problem) -> Program:
    return program(problem, GELU, "y", "x")


def gelu_grad(problem: Problem) -> Program:
    return program(problem, GELU_GRAD, "dx", "dy", "x")


def fast_gelu(problem: Problem) -> Program:
    return program(problem, FAST_GELU, "y", "x")


def fast_gelu_grad(problem: Problem) -> Program:
    return program(problem, FAST_GELU_GRAD, "dx", "dy", "x")


def bias_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, BIAS_GELU_GRAD)


def bias_fast_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, BIAS_FAST_GELU_GRAD)


def _behind_bias(problem: Problem, made: Kernel) -> Program:
    shape = problem.specs["dy"].shape
    rows, n = math.prod(shape[:-1]), shape[-1]
    if not rows * n:
        return Program(())
    blocks = partition.count(n, BLOCK)
    item = DTYPES[problem["dy"].dtype].itemsize
    pointers = {name: problem[name] for name in ("dy", "x", "bias", "dx")}
    sizes = {"blocks": blocks, "n": n, "stream": partition.streams(problem.bytes)}
    return Program([shared_out(made, rows * blocks, 3 * item * min(n, BLOCK), sizes | pointers)])
