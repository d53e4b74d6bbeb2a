"""The programs of elementwise operators: one step, whose units are blocks of rows."""

from collections.abc import Callable
from typing import Any

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import Program, ceil_div


def operator(kernel: Kernel, result: str, *inputs: str) -> Callable[[Problem], Program]:
    """The function from problem to program of an elementwise operator. `inputs` are the formula's, in order."""

    def of_problem(problem: Problem) -> Program:
        return program(problem, kernel, result, *inputs, alpha=problem.attributes.get("alpha", 0.0))

    return of_problem


def program(problem: Problem, kernel: Kernel, result: str, *inputs: str, alpha: Any = 0.0) -> Program:
    """The one step of an elementwise operator, which computes a result from inputs in the formula's order."""
    steps, blocks, given = ProgramSteps(problem), ceil_div(problem.n, BLOCK), [rows(problem, x) for x in inputs]
    y = rows(problem, result)
    steps.add(kernel, problem.outer * blocks, blocks=blocks, n=problem.n, inputs=given, y=y, alpha=alpha)
    return steps.program()


def rows(problem: Problem, name: str) -> Rows:
    """An operand as rows."""
    operand: Any = problem[name]
    return Rows(operand, operand.outer)
