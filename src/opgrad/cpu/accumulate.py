"""Small operators of training graphs, element by element."""

from collections.abc import Callable

from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import Pointer, Vector, load_one, number
from opgrad.cpu.loops import elements
from opgrad.cpu.loops.elements import BLOCK
from opgrad.cpu.loops.rows import map_one, times
from opgrad.cpu.runtime.execute import Program
from opgrad.problem import Problem


@inline
def _sum(buffer: Vector, value: Vector, alpha: float) -> Vector:
    return buffer + value


@inline
def _value(value: Vector, alpha: float) -> Vector:
    return value


@inline
def _divided(x: Vector, factor: float, unused: float, i: Vector) -> Vector:
    return x / factor


def scaling(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(x, factor) whose factor stands in an array."""
    write = map_one(formula)

    @kernel
    def elements(part, per_part, units, blocks, n, x: Pointer, x_row, y: Pointer, y_row, factor: Pointer, stream):
        multiplier = number(y, load_one(factor, 0))
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y + row * y_row, begin, end, stream, x + row * x_row, multiplier, 0.0)

    return elements


SUM, VALUE = elements.binary(_sum), elements.unary(_value)
TIMES, DIVIDED = scaling(times), scaling(_divided)


def in_place_accumulator(problem: Problem) -> Program:
    if problem.attributes["overwrite"]:
        return elements.program(problem, VALUE, "sum", x=problem["value"])
    return elements.program(problem, SUM, "sum", a=problem["buffer"], b=problem["value"])


def scale(problem: Problem) -> Program:
    made = DIVIDED if problem.attributes["scale_down"] else TIMES
    return elements.program(problem, made, "y", x=problem["x"], extra={"factor": problem["factor"]})
