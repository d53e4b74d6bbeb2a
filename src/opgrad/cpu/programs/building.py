"""Puts the program of a problem together: steps in order, with their working memory and their tables."""

import math
from collections.abc import Callable
from typing import Any

from opgrad.contract import DTYPES
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.loops.map import BLOCK, fill_zeros
from opgrad.cpu.programs.layout import Loops, precision
from opgrad.cpu.runtime.plan import Program, Step, ceil_div, round_up, shared_out, streams


class ProgramSteps(Program):
    """The program of a problem, whose steps are added one after the other.

    A kernel's parameter that is not among a step's arguments is the operand of its name, or else the attribute of its
    name; `stream` says by default whether the call's arrays exceed the cache. A step without units is left out.

    item, lanes: the bytes of a number that is computed with, and how many a vector has.
    """

    def __init__(self, problem: Problem, computed_in: str = ""):
        """computed_in: the dtype of the computation; by default that of all operands together."""
        super().__init__(precision=computed_in or precision(problem))
        self.problem, self.lanes = problem, vector_lanes(self.workspace.precision)
        self.item = DTYPES[self.workspace.precision].itemsize

    def add(self, kernel: Kernel, units: int, unit_bytes: float | None = None, /, **arguments: Any) -> None:
        """Add a step whose parts are large enough to be handed to threads.

        unit_bytes: the bytes that a unit touches; by default an equal share of the call's arrays.
        """
        if units:
            each = self.problem.bytes / units if unit_bytes is None else unit_bytes
            self.steps.append(shared_out(kernel, units, each, self._given(kernel, arguments)))

    def add_parts(self, kernel: Kernel, units: int = 1, per_part: int = 1, /, **arguments: Any) -> None:
        """Add a step whose parts have so many units each."""
        if units:
            self.steps.append(Step(kernel, units, self._given(kernel, arguments), per_part))

    def add_loops(self, loops: Loops, kernel: Kernel, /, **arguments: Any) -> None:
        """Add the step that runs a kernel over all units of a layout's loops, which have its operands."""
        self.steps.append(loops.step(kernel, **arguments))

    def _given(self, kernel: Kernel, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of all parameters of a kernel."""
        found = {}
        for name in kernel.parameters:
            if name in arguments:
                found[name] = arguments[name]
            elif name == "stream":
                found[name] = streams(self.problem.bytes)
            else:
                operands = self.problem.operands
                found[name] = operands[name] if name in operands else self.problem.attributes[name]
        return found

    def clear(self, name: str) -> None:
        """Add the step that writes zeros to a result."""
        spec = self.problem.specs[name]
        n, item = math.prod(spec.shape), spec.dtype.itemsize
        self.add(fill_zeros, n, item, y=self.problem[name], stream=streams(n * item))

    def given(self, name: str) -> bool:
        """Whether an operand is given or, of a result, wanted."""
        return self.problem.operands.get(name) is not None


def row_sizes(problem: Problem, name: str) -> tuple[int, int]:
    """How many rows an operand has, whose elements are those from the attribute `axis` on, and how long they are."""
    shape, start = problem.specs[name].shape, problem.attributes["axis"].start
    return math.prod(shape[:start]), math.prod(shape[start:])


def elementwise_operator(kernel: Kernel, result: str, *inputs: str) -> Callable[[Problem], Program]:
    """The function from problem to program of an elementwise operator. `inputs` are the formula's, in order."""

    def of_problem(problem: Problem) -> Program:
        return elementwise_program(problem, kernel, result, *inputs, alpha=problem.attributes.get("alpha", 0.0))

    return of_problem


def elementwise_program(problem: Problem, kernel: Kernel, result: str, *inputs: str, alpha: Any = 0.0) -> Program:
    """The one step of an elementwise operator, which computes a result from inputs in the formula's order."""
    steps, blocks, given = ProgramSteps(problem), ceil_div(problem.n, BLOCK), [as_rows(problem, x) for x in inputs]
    y = as_rows(problem, result)
    steps.add(kernel, problem.outer * blocks, blocks=blocks, n=problem.n, inputs=given, y=y, alpha=alpha)
    return steps


def as_rows(problem: Problem, name: str) -> Rows:
    """An operand as rows."""
    operand: Any = problem[name]
    return Rows(operand, operand.outer)


class ProductSteps(ProgramSteps):
    """The steps of a program that multiplies matrices. width: columns of a panel of packed rows."""

    def __init__(self, problem: Problem, computed_in: str = ""):
        from opgrad.cpu.kernels.gemm import (
            VECTORS,
        )  # this import asks for the CPU, which programs of all kinds need not

        super().__init__(problem, computed_in)
        self.width = VECTORS * self.lanes

    def panels(self, depth: int, columns: int) -> tuple[int, int]:
        """How many panels so many columns of packed rows take, and the numbers of a panel of `depth` rows."""
        return -(-columns // self.width), round_up(depth, self.lanes // 2) * self.width
