"""Elementwise operators, each made from a formula for one vector.

Arrays are outer x n, each with its own row stride. A unit of work is a block of one row.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

from opgrad.contract.problem import Problem
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.map import mapped
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.program import Program, shared_out

BLOCK: Final = 1 << 15  # elements: so many that starting a block costs nothing, and so few that threads can share a row


def elementwise(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(a, b, …, alpha)."""
    return _kernel(formula, Float, lambda y, alpha: alpha)


def scaling(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(a, b, …, alpha) whose alpha is the first element of an array."""
    return _kernel(formula, Pointer, lambda y, alpha: v.number(y, v.load_one(alpha, 0)))


def _kernel(formula: Callable[..., Vector], kind: Any, number_of: Callable[..., Any]) -> Kernel:
    count = len(inspect.signature(formula).parameters) - 1
    write, number = mapped(formula), inline(number_of)

    @kernel
    def elements(units: Units, blocks, n, inputs: (Rows,) * count, y: Rows, alpha: kind, stream):
        factor = number(y.data, alpha)
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y.data + row * y.step, begin, end, stream, v.each_row(inputs, row), (factor,))

    return elements


def operator(result: str, *inputs: str) -> Callable[[Callable[..., Vector]], Callable[[Problem], Program]]:
    """A decorator that makes, of a formula, the function from problem to program.

    `inputs` are the formula's, in order.
    """

    def decorate(formula: Callable[..., Vector]) -> Callable[[Problem], Program]:
        compiled = elementwise(formula)

        def of_problem(problem: Problem) -> Program:
            return program(problem, compiled, result, *inputs, alpha=problem.attributes.get("alpha", 0.0))

        of_problem.kernel = compiled
        return of_problem

    return decorate


def program(problem: Problem, kernel: Kernel, result: str, *inputs: str, alpha: Any = 0.0) -> Program:
    """The one step of an elementwise operator, which computes a result from inputs in the formula's order."""
    blocks = partition.count(problem.n, BLOCK)
    units = problem.outer * blocks
    if not units:
        return Program(())
    arguments = {"blocks": blocks, "n": problem.n, "inputs": [rows(problem, name) for name in inputs]}
    arguments |= {"y": rows(problem, result), "alpha": alpha, "stream": partition.streams(problem.bytes)}
    return Program([shared_out(kernel, units, problem.bytes / units, arguments)])


def rows(problem: Problem, name: str) -> Rows:
    """An operand as rows."""
    operand: Any = problem[name]
    return Rows(operand, operand.outer)
