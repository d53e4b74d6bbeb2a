"""Softmax, log-softmax and their gradients of contiguous rows: vectors run along a row.

A kernel writes each row past the cache while it reduces the next one (`loops.rows.write_behind`).
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.map import get
from opgrad.cpu.kernels.loops.rows import combining
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, of_rows

# Rows up to this length that are not written past the cache are written after the exponentials of the next row.
LATE: Final = 2048


def forward(operator: str, in_result: bool = False) -> Callable[..., None]:
    """The loop that writes the result of each row while it reduces the next one.

    in_result: whether softmax's exponentials wait in the row's own place in y until they are divided, so that its lines
    are fetched while they are computed; log-softmax, which stores none, prefetches the place. Nothing is written past
    the cache then.
    """
    reduction, is_softmax = of_rows(operator), operator == "softmax"
    result, subtracted, numbers_of = reduction.result, reduction.subtracted, reduction.numbers
    no_numbers, fetches_early = reduction.no_numbers, int(is_softmax or in_result)

    @inline
    def value(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        of_row, fine = numbers
        return result(get(arrays[0], i, whole, mask), of_row, fine)

    step, complete, begin, finish = loops.write_behind(value)
    add_up = reduction.loop(loops.no_step if in_result else step)
    buffer_of = inline((lambda y, e: y) if in_result else (lambda y, e: e))
    source_of = inline((lambda x, e: e) if is_softmax else (lambda x, e: x))

    @inline
    def write_rows(rows, n: int, x, y, e, done, stream: int) -> None:
        fine, late = v.is_fine(x.data), n <= LATE and not stream
        first = source_of(x.data, buffer_of(y.data, done))
        waiting = loops.no_row(y.data, n, (first,), (no_numbers(x.data), fine))
        for row in rows:
            xs, ys = x.data + row * x.step, y.data + row * y.step
            buffer, largest = buffer_of(ys, e), loops.row_max(xs, 0, n)
            m = subtracted(xs, largest)
            sums, written = add_up(xs, n, m, buffer, fetches_early, xs + x.step, waiting)
            complete(waiting, written, n)
            numbers = numbers_of(xs, sums, largest, m, 0), fine
            waiting = begin(ys, n, (source_of(xs, buffer),), numbers, late, stream)
            e, done = done, e
        finish(waiting, n, stream)

    return write_rows


_softmax, _softmax_in_result = forward("softmax"), forward("softmax", in_result=True)
_log_softmax, _log_softmax_in_result = forward("log_softmax"), forward("log_softmax", in_result=True)


@kernel
def softmax_rows(rows: Units, n, x: Rows, y: Rows, e: Private, done: Private, stream):
    _softmax(rows, n, x, y, e, done, stream)


@kernel
def softmax_rows_in_result(rows: Units, n, x: Rows, y: Rows):
    """For results that are written through the cache and have the digits of the computation."""
    _softmax_in_result(rows, n, x, y, 0, 0, 0)


@kernel
def log_softmax_rows(rows: Units, n, x: Rows, y: Rows, stream):
    _log_softmax(rows, n, x, y, x.data, x.data, stream)  # no exponentials are stored


@kernel
def log_softmax_rows_in_result(rows: Units, n, x: Rows, y: Rows):
    """For results that are written through the cache."""
    _log_softmax_in_result(rows, n, x, y, 0, 0, 0)


def gradient_rows(operator: str) -> Kernel:
    """ahead: how many elements further dy and y are prefetched; 0 for not at all."""
    term, formula = GRADIENTS[operator]

    @inline
    def term_at(arrays, i: int, whole: bool, mask, ahead: int) -> Vector:
        dy, y = arrays
        if ahead:
            v.prefetch(dy, i + ahead)
            v.prefetch(y, i + ahead)
        found = term(get(dy, i, whole, mask), get(y, i, whole, mask))
        return found if whole else v.select(mask, found, 0.0)

    @inline
    def value(arrays, i: int, whole: bool, mask, s) -> Vector:
        dy, y = arrays
        return formula(get(dy, i, whole, mask), get(y, i, whole, mask), s)

    step, complete, begin, finish = loops.write_behind(value)
    add_up = loops.row_sum_of(term_at, step)

    @inline
    def write_rows(first: int, stop: int, n: int, out, stream: int, arguments: Any) -> None:
        dy, y, dx_step, ahead = arguments
        waiting = loops.no_row(out, n, (dy.data, y.data), v.number(dy.data, 0.0))
        for row in range(first, stop):
            arrays = dy.data + row * dy.step, y.data + row * y.step
            s, written = add_up(dy.data, n, arrays, ahead, waiting)
            complete(waiting, written, n)
            waiting = begin(out + (row - first) * dx_step, n, arrays, s, False, stream)
        finish(waiting, n, stream)

    write = combining(write_rows)

    @kernel
    def by_rows(rows: Units, n, dy: Rows, y: Rows, dx: Rows, buffer: Private, stream, ahead):
        write(rows.start, rows.stop, n, dx, buffer, stream, (dy, y, dx.step, ahead))

    return by_rows
