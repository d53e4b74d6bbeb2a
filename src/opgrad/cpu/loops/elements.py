"""Kernels over single elements, made from the formula of one vector.

Arrays are outer x n, each with its own row stride. A unit of work is a block of one row.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, kernel
from opgrad.cpu.compiler.parameters import Float, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.map import mapped
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, shared_out
from opgrad.problem import Problem

BLOCK: Final = 1 << 15  # elements: long enough that starting a block costs nothing, short enough to share out


def elementwise(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(a, b, …, alpha)."""
    count = len(inspect.signature(formula).parameters) - 1
    write = mapped(formula)

    @kernel
    def elements(units: Units, blocks, n, inputs: (Rows,) * count, y: Rows, alpha: Float, stream):
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y.data + row * y.step, begin, end, stream, v.each_row(inputs, row), (alpha,))

    return elements


def program(problem: Problem, made: Kernel, result: str, *inputs: str, alpha: float = 0.0, **extra: Any) -> Program:
    """The one step of an elementwise operator, which computes a result from inputs in the formula's order."""
    blocks = partition.count(problem.n, BLOCK)
    units = problem.outer * blocks
    if not units:
        return Program(())
    arguments = {
        "blocks": blocks,
        "n": problem.n,
        "inputs": [rows(problem, name) for name in inputs],
        "y": rows(problem, result),
        "alpha": alpha,
        "stream": partition.streams(problem.bytes),
        **extra,
    }
    return Program([shared_out(made, units, problem.bytes / units, arguments)])


def rows(problem: Problem, name: str) -> Rows:
    """An operand as rows."""
    operand: Any = problem[name]
    return Rows(operand, operand.outer)
