"""The vector loops that write a row, out[i] = formula(a[i], b[i], …, numbers), for any number of arrays."""

import inspect
from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_word


@inline
def get(p, i: int, whole: bool, mask) -> Vector:
    """The vector p[i:i + lanes]; if not `whole`, only the lanes of the mask are read, and the others are 0."""
    return get_or(p, i, whole, mask, 0.0)


@inline
def get_or(p, i: int, whole: bool, mask, fill) -> Vector:
    """The same as `get`, with `fill` in the lanes outside the mask."""
    return v.load(p, i) if whole else v.load_masked(p, i, mask, fill)


@inline
def put(p, i: int, value: Vector, whole: bool, mask, stream: int) -> None:
    if not whole:
        v.store_masked(p, i, value, mask)
    elif stream:
        v.store_streaming(p, i, value)
    else:
        v.store(p, i, value)


def of_each(formula: Callable[..., Vector]) -> Callable[..., Vector]:
    """value(arrays, i, whole, mask, numbers) = formula(a[i], b[i], …, *numbers)."""
    inline(formula)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        if whole:
            return formula(*(v.load_each(arrays, i) + numbers))
        return formula(*(v.load_each_masked(arrays, i, mask, 0.0) + numbers))

    return value


def mapped(formula: Callable[..., Vector]) -> Callable[..., None]:
    """The row writer of out[i] = formula(a[i], b[i], …, *numbers)."""
    return row_writer(of_each(formula))


def mapped_by_index(formula: Callable[..., Vector]) -> Callable[..., None]:
    """The row writer of out[i] = formula(i, a[i], b[i], …, *numbers)."""
    inline(formula)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        if whole:
            return formula(v.index(arrays[0], i), *(v.load_each(arrays, i) + numbers))
        return formula(v.index(arrays[0], i), *(v.load_each_masked(arrays, i, mask, 0.0) + numbers))

    return row_writer(value)


def mapped_to_each(formula: Callable[..., tuple[Vector, ...]]) -> Callable[..., None]:
    """The loop outs[k][i] = result k of formula(a[i], b[i], …, *numbers), for any number of results.

    Results may be written to the arrays: a vector of each is read before any result is written.
    """
    inline(formula)

    @inline
    def write(outs, begin: int, end: int, arrays, numbers) -> None:
        w, i = v.lanes(arrays[0]), begin
        while i + w <= end:
            v.store_each(outs, i, formula(*(v.load_each(arrays, i) + numbers)))
            i += w
        if i < end:
            mask = v.first(arrays[0], end - i)
            v.store_each_masked(outs, i, formula(*(v.load_each_masked(arrays, i, mask, 0.0) + numbers)), mask)

    return write


def row_writer(value: Callable[..., Vector]) -> Callable[..., None]:
    """out[i] = value(arrays, i, whole, mask, numbers) for i in [begin, end); with non-temporal stores if `stream`.

    `value` reads its arrays itself: a whole vector, or the lanes of the mask.
    """
    inline(value)

    @inline
    def write(out, begin: int, end: int, stream: int, arrays, numbers) -> None:
        w, i = v.lanes(out), begin
        every = v.full(out, 0.0) == v.full(out, 0.0)
        if stream:
            head = min(v.to_line(out, i), end - i)
            if head >= 0:
                body = i + head
                while i < body:  # two turns if a cache line holds more elements than a vector
                    mask = v.first(out, body - i)
                    v.store_masked(out, i, value(arrays, i, False, mask, numbers), mask)
                    i = min(i + w, body)
                while i + w <= end:
                    v.store_streaming(out, i, value(arrays, i, True, every, numbers))
                    i += w
        while i + w <= end:
            v.store(out, i, value(arrays, i, True, every, numbers))
            i += w
        if i < end:
            mask = v.first(out, end - i)
            v.store_masked(out, i, value(arrays, i, False, mask, numbers), mask)

    return write


@inline
def times(x: Vector, factor) -> Vector:
    return x * factor


write_same, write_sum, write_times = mapped(lambda x: x), mapped(lambda a, b: a + b), mapped(times)


# --- zeros -----------------------------------------------------------------------------------------------------------

_write_zeros = mapped(lambda x: v.like(x, 0.0))


@inline
def write_zeros(out, begin: int, end: int, stream: int) -> None:
    """out[begin:end] = 0"""
    _write_zeros(out, begin, end, stream, (out,), ())


@inline
def clear(out, n: int) -> None:
    """out[0:n] = 0, in whole vectors: up to a vector more may be written."""
    for i in range(0, n, v.lanes(out)):
        v.store(out, i, v.full(out, 0.0))


@kernel
def fill_zeros(elements: Units, y: Pointer, stream):
    write_zeros(y, elements.start, elements.stop, stream)


# --- elementwise operators: arrays are outer x n, each with its own row stride; a unit is a block of a row -----------

BLOCK: Final = 1 << 15  # elements: so many that starting a block costs nothing, and so few that threads can share a row


def elementwise(formula: Callable[..., Vector], coarse: Callable[..., Vector] | None = None) -> Kernel:
    """The kernel y = formula(a, b, …, alpha). coarse: a faster formula for results that do not show all digits."""
    return _elementwise(formula, Float, lambda y, alpha: alpha, coarse)


def scaling(formula: Callable[..., Vector]) -> Kernel:
    """The kernel y = formula(a, b, …, alpha) whose alpha is the first element of an array."""
    return _elementwise(formula, Pointer, lambda y, alpha: v.number(y, v.load_one(alpha, 0)))


def _elementwise(
    formula: Callable[..., Vector],
    kind: Any,
    number_of: Callable[..., Any],
    coarse: Callable[..., Vector] | None = None,
) -> Kernel:
    count = len(inspect.signature(formula).parameters) - 1
    write, number = _fine_or_coarse(formula, coarse), inline(number_of)

    @kernel
    def elements(units: Units, blocks, n, inputs: (Rows,) * count, y: Rows, alpha: kind, stream):
        factor = number(y.data, alpha)
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            write(y.data + row * y.step, begin, end, stream, v.each_row(inputs, row), (factor,))

    return elements


def _fine_or_coarse(formula: Callable[..., Vector], coarse: Callable[..., Vector] | None) -> Callable[..., None]:
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


# --- arrays with any strides -----------------------------------------------------------------------------------------


@inline
def both_offsets(table: int, axes: int, number: int) -> tuple[int, int]:
    """Where element `number`, in C order, lies in two arrays that are walked through together.

    For each axis, the innermost first, the table has its size and its stride in each of the arrays.
    """
    a, b, rest = 0, 0, number
    for each in range(axes):
        axis = table + 24 * each
        above = rest // load_word(axis, 0)
        index = rest - above * load_word(axis, 0)
        a += index * load_word(axis, 1)
        b += index * load_word(axis, 2)
        rest = above
    return a, b
