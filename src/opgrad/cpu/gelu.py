"""Gelu, its approximation by tanh, and their gradients, by the formulas of the post-ops."""

import math
from collections.abc import Callable

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.numerics import eltwise, eltwise_grad
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import operator
from opgrad.cpu.programs.program import Program, shared_out


@operator("y", "x")
def gelu(x: Vector, alpha: float) -> Vector:
    return eltwise.gelu_erf(x, alpha, 0.0)


@operator("y", "x")
def fast_gelu(x: Vector, alpha: float) -> Vector:
    return eltwise.gelu_tanh(x, alpha, 0.0)


@operator("dx", "dy", "x")
def gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return eltwise_grad.gelu_erf(dy, x, alpha, 0.0)


@operator("dx", "dy", "x")
def fast_gelu_grad(dy: Vector, x: Vector, alpha: float) -> Vector:
    return eltwise_grad.gelu_tanh(dy, x, alpha, 0.0)


def _gradient_behind_bias(formula: Callable[..., Vector]) -> Kernel:
    """The kernel dx = formula(dy, x + bias), by rows of the bias's length."""
    write = mapped(lambda dy, x, bias: formula(dy, x + bias, 0.0, 0.0))

    @kernel
    def bias_gradient(units: Units, blocks, n, dy: Pointer, x: Pointer, bias: Pointer, dx: Pointer, stream):
        for unit in units:
            row, begin = unit // blocks * n, unit % blocks * BLOCK
            write(dx + row, begin, min(begin + BLOCK, n), stream, (dy + row, x + row, bias), ())

    return bias_gradient


BIAS_GELU_GRAD, BIAS_FAST_GELU_GRAD = map(_gradient_behind_bias, (eltwise_grad.gelu_erf, eltwise_grad.gelu_tanh))


def bias_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, BIAS_GELU_GRAD)


def bias_fast_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, BIAS_FAST_GELU_GRAD)


def _behind_bias(problem: Problem, kernel: Kernel) -> Program:
    shape = problem.specs["dy"].shape
    rows, n = math.prod(shape[:-1]), shape[-1]
    if not rows * n:
        return Program(())
    blocks = partition.count(n, BLOCK)
    item = DTYPES[problem["dy"].dtype].itemsize
    pointers = {name: problem[name] for name in ("dy", "x", "bias", "dx")}
    sizes = {"blocks": blocks, "n": n, "stream": partition.streams(problem.bytes)}
    return Program([shared_out(kernel, rows * blocks, 3 * item * min(n, BLOCK), sizes | pointers)])
