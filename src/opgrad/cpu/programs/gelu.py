"""The programs of gelu, its approximation by tanh, and their gradients."""

import math

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.kernels import gelu as kernels
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.elements import operator
from opgrad.cpu.runtime.program import Program, ceil_div

gelu = operator(kernels.gelu, "y", "x")
fast_gelu = operator(kernels.fast_gelu, "y", "x")
gelu_grad = operator(kernels.gelu_grad, "dx", "dy", "x")
fast_gelu_grad = operator(kernels.fast_gelu_grad, "dx", "dy", "x")


def bias_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, kernels.BIAS_GELU_GRAD)


def bias_fast_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, kernels.BIAS_FAST_GELU_GRAD)


def _behind_bias(problem: Problem, kernel: Kernel) -> Program:
    steps, spec = ProgramSteps(problem), problem.specs["dy"]
    rows, n = math.prod(spec.shape[:-1]), spec.shape[-1]
    blocks, unit_bytes = ceil_div(n, BLOCK), 3 * spec.dtype.itemsize * min(n, BLOCK)
    steps.add(kernel, rows * blocks, unit_bytes, blocks=blocks, n=n)
    return steps.program()
