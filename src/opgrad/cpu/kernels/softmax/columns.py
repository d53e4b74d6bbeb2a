"""Softmax, log-softmax and their gradients along axes that are not the last in memory: each lane is a row.

A unit is a strip of columns as wide as a vector. A kernel writes each strip past the cache while it reduces the next
one (`loops.columns.write_strip_behind`).
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Private, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.columns import Line, Strip
from opgrad.cpu.kernels.loops.map import get
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, SoftmaxReduction, of_columns

# --- in a tile of transposed rows ------------------------------------------------------------------------------------


def forward_lines(reduction: SoftmaxReduction, meanwhile: Callable[..., None]) -> Callable[..., Any]:
    """x = softmax(x) down as many columns as a vector has lanes; returns what `SoftmaxReduction.log_sum_exp` takes.

    step: the numbers from a line of the columns to the next. fine: whether the result shows the sums' last digits.
    ahead, waiting: as for `column_sum_exp`.
    """
    add_up, subtracted = reduction.loop(meanwhile), reduction.subtracted
    numbers_of, result = reduction.numbers, reduction.result

    @inline
    def lines(x, step: int, n: int, fine, inf_as_zero: int, ahead, waiting):
        strip = Strip(x, step, True, v.first(x, v.lanes(x)))
        largest = loops.column_max(strip, n)
        m = subtracted(x, largest)
        sums = add_up(x, strip, n, m, x, strip.step, ahead, waiting)
        numbers = numbers_of(x, sums, largest, m, inf_as_zero)
        for i in range(n):
            v.store(x, i * strip.step, result(v.load(x, i * strip.step), numbers, fine))
        return sums, largest, m, numbers

    return lines


def gradient_lines(operator: str, meanwhile: Callable[..., None]) -> Callable[..., None]:
    """The gradient replaces dy, down as many columns as a vector has lanes; step as of `forward_lines`."""
    term, formula = GRADIENTS[operator]

    @inline
    def value(arrays, i: int, whole: bool, mask, step: int) -> Vector:
        dy, y, dy_ahead, y_ahead = arrays
        v.prefetch(dy_ahead, i * step)
        v.prefetch(y_ahead, i * step)
        return term(v.load(dy, i * step), v.load(y, i * step))

    add_up = loops.column_sum(value, meanwhile)

    @inline
    def lines(dy, y, step: int, n: int, ahead, waiting) -> None:
        s = add_up(dy, n, (dy, y, ahead[0], ahead[1]), True, v.first(dy, v.lanes(dy)), step, waiting)
        for i in range(n):
            v.store(dy, i * step, formula(v.load(dy, i * step), v.load(y, i * step), s))

    return lines


# --- forward -------------------------------------------------------------------------------------------------------


def forward(operator: str, is_kept: bool) -> Callable[..., None]:
    """The loop that writes the result of each strip while it reduces the next one.

    is_kept: whether softmax's exponentials wait in a buffer until they are written. If not, x is read again, and
    softmax computes its exponentials twice.
    """
    reduction = of_columns(operator, recomputed=not is_kept)
    result, subtracted, numbers_of = reduction.result, reduction.subtracted, reduction.numbers
    no_numbers = reduction.no_numbers
    source_of = inline((lambda x, e: Line(e, v.lanes(e))) if is_kept else (lambda x, e: x))

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        (of_strip, fine), (line,) = numbers, arrays
        return result(get(line.data, i * line.step, whole, mask), of_strip, fine)

    meanwhile, begin, finish = loops.write_strip_behind(value)
    add_up = reduction.loop(meanwhile)

    @inline
    def write_strips(units, strips, n: int, x, y, e, done, stream: int) -> None:
        w, fine, keep = v.lanes(x.data), v.is_fine(x.data), v.lanes(x.data) if is_kept else 0
        first = source_of(Line(x.data, x.step), done)
        waiting = loops.no_strip(y, (first,), (no_numbers(x.data), fine))
        for unit in units:
            o, j, whole, mask = loops.aligned_strip(unit, strips, y, y, w, stream)
            if j >= strips.inner:
                continue
            xs = x.data + (o * x.outer + j)
            strip, ahead = Strip(xs, x.step, whole, mask), Line(xs + w, x.step)
            largest = loops.column_max(strip, n)
            m = subtracted(xs, largest)
            sums = add_up(x.data, strip, n, m, e, keep, ahead, waiting)
            numbers = numbers_of(xs, sums, largest, m, 0), fine
            out = Strip(y.data + (o * y.outer + j), y.step, whole, mask)
            waiting = begin(out, n, (source_of(Line(xs, x.step), e),), numbers, stream)
            e, done = done, e
        finish(waiting, n)

    return write_strips


_softmax = forward("softmax", is_kept=True)
_log_softmax, _long_softmax = forward("log_softmax", is_kept=False), forward("softmax", is_kept=False)


@kernel
def softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, e: Private, done: Private, stream):
    _softmax(units, strips, n, x, y, e, done, stream)


@kernel
def softmax_long_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, stream):
    _long_softmax(units, strips, n, x, y, x.data, x.data, stream)


@kernel
def log_softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, stream):
    _log_softmax(units, strips, n, x, y, x.data, x.data, stream)


# --- gradients -----------------------------------------------------------------------------------------------------


@inline
def _both(arrays, i: int, whole: bool, mask):
    dy, y = arrays
    return get(dy.data, i * dy.step, whole, mask), get(y.data, i * y.step, whole, mask)


def gradient_columns(operator: str) -> Kernel:
    term, formula = GRADIENTS[operator]

    @inline
    def term_at(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        for each in arrays:
            v.prefetch(each.data, i * each.step + v.lanes(each.data))
        dy, y = _both(arrays, i, whole, mask)
        return term(dy, y)

    @inline
    def value(arrays, i: int, whole: bool, mask, s) -> Vector:
        dy, y = _both(arrays, i, whole, mask)
        return formula(dy, y, s)

    meanwhile, begin, finish = loops.write_strip_behind(value)
    add_up = loops.column_sum(term_at, meanwhile)

    @inline
    def line_of(x: Any, o: int, j: int):
        return Line(x.data + (o * x.outer + j), x.step)

    @kernel
    def by_columns(units: Units, strips: Strips, n, dy: Columns, y: Columns, dx: Columns, stream):
        like = dy.data
        w = v.lanes(like)
        waiting = loops.no_strip(dx, (line_of(dy, 0, 0), line_of(y, 0, 0)), v.full(like, 0.0))
        for unit in units:
            o, j, whole, mask = loops.aligned_strip(unit, strips, dy, dx, w, stream)
            if j >= strips.inner:
                continue
            arrays = line_of(dy, o, j), line_of(y, o, j)
            s = add_up(like, n, arrays, whole, mask, (), waiting)
            out = Strip(dx.data + (o * dx.outer + j), dx.step, whole, mask)
            waiting = begin(out, n, arrays, s, stream)
        finish(waiting, n)

    return by_columns
