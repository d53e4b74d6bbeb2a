"""Small operators of training graphs, element by element."""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.elements import BLOCK, elementwise, program
from opgrad.cpu.loops.map import mapped, times
from opgrad.cpu.runtime.execute import Program
from opgrad.problem import Problem


@inline
def _sum(buffer: Vector, value: Vector, alpha: float) -> Vector:
    return buffer + value


@inline
def _value(value: Vector, alpha: float) -> Vector:
    return value


@inline
def _divided(x: Vector, factor: float) -> Vector:
    return x / factor


def scaling(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(x, factor) whose factor stands in an array."""
    write = mapped(formula)

    @kernel
    def elements(units: Units, blocks, n, inputs: (Rows,), y: Rows, factor: Pointer, stream):
        multiplier = v.number(y.data, v.load_one(factor, 0))
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y.data + row * y.step, begin, end, stream, v.each_row(inputs, row), (multiplier,))

    return elements


SUM, VALUE = elementwise(_sum), elementwise(_value)
TIMES, DIVIDED = scaling(times), scaling(_divided)


def in_place_accumulator(problem: Problem) -> Program:
    if problem.attributes["overwrite"]:
        return program(problem, VALUE, "sum", "value")
    return program(problem, SUM, "sum", "buffer", "value")


def scale(problem: Problem) -> Program:
    made = DIVIDED if problem.attributes["scale_down"] else TIMES
    return program(problem, made, "y", "x", factor=problem["factor"])
