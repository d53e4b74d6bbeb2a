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


def elementwise(formula: Callable[..., Vector], coarse: Callable[..., Vector] | None = None) -> Kernel:
    """The kernel y = formula(a, b, …, alpha). coarse: a faster formula for results that do not show all digits."""
    return _kernel(formula, Float, lambda y, alpha: alpha, coarse)


def scaling(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(a, b, …, alpha) whose alpha is the first element of an array."""
    return _kernel(formula, Pointer, lambda y, alpha: v.number(y, v.load_one(alpha, 0)))


def _kernel(
    formula: Callable[..., Vector],
    kind: Any,
    number_of: Callable[..., Any],
    coarse: Callable[..., Vector] | None = None,
) -> Kernel:
    count = len(inspect.signature(formula).parameters) - 1
    write, number = _writer(formula, coarse), inline(number_of)

    @kernel
    def elements(units: Units, blocks, n, inputs: (Rows,) * count, y: Rows, alpha: kind, stream):
        factor = number(y.data, alpha)
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y.data + row * y.step, begin, end, stream, v.each_row(inputs, row), (factor,))

    return elements


def _writer(formula: Callable[..., Vector], coarse: Callable[..., Vector] | None) -> Callable[..., None]:
    if coarse is None:
        return mapped(formula)
    write_fine, write_coarse = mapped(formula), mapped(coarse)

    @inline
    def write(out, begin: int, end: int, stream: int, arrays, numbers) -> None:
        if v.is_fine(out):
            write_fine(out, begin, end, stream, arrays, numbers)
        else:
            write_coarse(out, begin, end, stream, arrays, numbers)

    return write
