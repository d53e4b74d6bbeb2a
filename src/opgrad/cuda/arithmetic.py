"""Accumulation and scaling, element by element."""

import triton
import triton.language as tl

from opgrad.contract.signature import Problem
from opgrad.cuda import elements
from opgrad.cuda.execute import Program
from opgrad.cuda.numbers import divide


@triton.jit
def _sum(buffer, value, alpha):
    return buffer + value


@triton.jit
def _value(value, alpha):
    return value


@triton.jit
def _times(x, factor):
    return x * factor


@triton.jit
def _divided(x, factor):
    return divide(x, tl.broadcast_to(factor, x.shape))


def in_place_accumulator(problem: Problem) -> Program:
    if problem.attributes["overwrite"]:
        return elements.program(problem, _value, "sum", a=problem["value"])
    return elements.program(problem, _sum, "sum", a=problem["buffer"], b=problem["value"])


def scale(problem: Problem) -> Program:
    formula = _divided if problem.attributes["scale_down"] else _times
    return elements.program(problem, formula, "y", a=problem["x"], number=problem["factor"])
