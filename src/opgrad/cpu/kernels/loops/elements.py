"""Elementwise operators, each made from a formula for one vector.

Arrays are outer x n, each with its own row stride. A unit of work is a block of one row.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import mapped

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
