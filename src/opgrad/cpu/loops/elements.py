"""Kernels over single elements, made from the formula of one vector.

Arrays are outer x n, each with its own row stride. A unit of work is a block of one row.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import Float, Pointer, Vector
from opgrad.cpu.loops.rows import map_one, map_two
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, Step
from opgrad.problem import Operand, Problem

BLOCK: Final = 1 << 15  # elements: long enough that starting a block costs nothing, short enough to share out


def unary(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(x, alpha)."""

    @inline
    def with_alpha(x: Vector, alpha: float, unused: float, i: Vector) -> Vector:
        return formula(x, alpha)

    write = map_one(with_alpha)

    @kernel
    def elements(part, per_part, units, blocks, n, x: Pointer, x_row, y: Pointer, y_row, alpha: Float, stream):
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y + row * y_row, begin, end, stream, x + row * x_row, alpha, 0.0)

    return elements


def binary(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(a, b, alpha)."""

    @inline
    def with_alpha(a: Vector, b: Vector, alpha: float, unused: float, i: Vector) -> Vector:
        return formula(a, b, alpha)

    write = map_two(with_alpha)

    @kernel
    def elements(
        part, per_part, units, blocks, n,
        a: Pointer, a_row, b: Pointer, b_row, y: Pointer, y_row, alpha: Float, stream,
    ):  # fmt: skip
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y + row * y_row, begin, end, stream, a + row * a_row, b + row * b_row, alpha, 0.0)

    return elements


def program(
    problem: Problem,
    made: Kernel,
    result: str,
    alpha: float = 0.0,
    extra: Mapping[str, Any] = MappingProxyType({}),
    **inputs: Operand,
) -> Program:
    """The one step of an elementwise operator; `inputs` maps the kernel's pointers to operands."""
    blocks = partition.count(problem.n, BLOCK)
    units = problem.outer * blocks
    if not problem.outer * problem.n:
        return Program(())
    per = partition.per_part(units, problem.bytes / units)
    pointers = {**inputs, "y": problem[result]}
    rows = {f"{name}_row": operand.outer for name, operand in pointers.items()}
    sizes = {"per_part": per, "units": units, "blocks": blocks, "n": problem.n}
    stream = partition.streams(problem.bytes)
    arguments = {**sizes, **pointers, **rows, **extra, "alpha": alpha, "stream": stream}
    step = Step(made, partition.count(units, per), arguments)
    return Program((step,))
