"""The programs of elementwise operators: one step, whose units are blocks of rows; and the step that writes zeros."""

from collections.abc import Callable
from typing import Any

from opgrad.contract.problem import Operand, Problem
from opgrad.cpu.compiler.native import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.loops.fill import fill_zeros
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.program import Program, Step, shared_out


def operator(kernel: Kernel, result: str, *inputs: str) -> Callable[[Problem], Program]:
    """The function from problem to program of an elementwise operator. `inputs` are the formula's, in order."""

    def of_problem(problem: Problem) -> Program:
        return program(problem, kernel, result, *inputs, alpha=problem.attributes.get("alpha", 0.0))

    return of_problem


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


def zero_step(y: Operand, n: int, size: int) -> Step:
    """The step that writes n zeros, `size` bytes in all."""
    return shared_out(fill_zeros, n, size / n, {"y": y, "stream": partition.streams(size)})
