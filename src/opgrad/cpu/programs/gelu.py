"""The programs of gelu, its approximation by tanh, and their gradients."""

import math

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel
from opgrad.cpu.kernels import gelu as kernels
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import operator
from opgrad.cpu.programs.program import Program, shared_out

gelu = operator(kernels.gelu, "y", "x")
fast_gelu = operator(kernels.fast_gelu, "y", "x")
gelu_grad = operator(kernels.gelu_grad, "dx", "dy", "x")
fast_gelu_grad = operator(kernels.fast_gelu_grad, "dx", "dy", "x")


def bias_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, kernels.BIAS_GELU_GRAD)


def bias_fast_gelu_grad_dx(problem: Problem) -> Program:
    return _behind_bias(problem, kernels.BIAS_FAST_GELU_GRAD)


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
