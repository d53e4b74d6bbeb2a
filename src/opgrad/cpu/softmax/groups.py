"""Rows of middling length, as many at a time as a vector has lanes.

What is done once for each row, which would take as long as some hundred elements, is done for the whole group in one
vector: a row leaves a vector of maxima or of sums, and the group's vectors are transposed, so that each lane is a row.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.columns import column_max
from opgrad.cpu.loops.rows import MINUS_INFINITY, write_log, write_scaled
from opgrad.cpu.loops.transpose import TILES, transpose_in
from opgrad.cpu.numerics.logsumexp import (
    add_below,
    add_exact,
    add_pairs,
    column_log_of_sum,
    scale_for,
    sum_end,
    sum_start,
)
from opgrad.cpu.softmax import forms
from opgrad.cpu.softmax.columns import log_sum_exp

# --- one row: what is left to be done across the lanes --------------------------------------------------------------


@inline
def _top(x: Any, n: int) -> Vector:
    w, m, i = v.lanes(x), v.full(x, MINUS_INFINITY), 0
    while i + w <= n:
        m = v.maximum(v.load(x, i), m)
        i += w
    return v.maximum(v.load_masked(x, i, v.first(x, n - i), MINUS_INFINITY), m) if i < n else m


@inline
def row_exponentials(x: Any, n: int, scale: Any, e: Any, ahead: Any) -> Any:
    """Their sums; they go to `e`."""
    w, i = v.lanes(x), 0
    total, lost = sum_start(x)
    while i + w <= n:
        value, total, lost = add_exact(x, total, lost, v.load(x, i), scale)
        v.prefetch(ahead, i)
        v.store(e, i, value)
        i += w
    if i < n:
        mask = v.first(x, n - i)
        value, total, lost = add_exact(x, total, lost, v.load_masked(x, i, mask, MINUS_INFINITY), scale)
        v.store_masked(e, i, value, mask)
    return sum_end(x, total, lost)


@inline
def row_rest(x: Any, n: int, m: Vector, scale: Any, ahead: Any) -> Any:
    """The sums of the exponentials of what is not m, and how many are m."""
    w, i, zero, one = v.lanes(x), 0, v.full(x, 0.0), v.full(x, 1.0)
    rest, lost, count = zero, zero, zero
    while i + w <= n:
        value = v.load(x, i)
        v.prefetch(ahead, i)
        rest, lost = add_below(x, rest, lost, value, m, scale)
        count = count + v.select(value == m, one, 0.0)
        i += w
    if i < n:
        value = v.load_masked(x, i, v.first(x, n - i), MINUS_INFINITY)
        rest, lost = add_below(x, rest, lost, value, m, scale)
        count = count + v.select(value == m, one, 0.0)
    return rest, lost, count


# --- a group -------------------------------------------------------------------------------------------------------


@inline
def keep_numbers(numbers: Any, vectors: Any) -> None:
    """Put vectors of numbers of rows where `_of_row` finds them."""
    w = v.lanes(numbers)
    for place, value in enumerate(vectors):
        v.store(numbers, place * w, value)


@inline
def of_row(x: Any, numbers: Any, place: int, row: int) -> Vector:
    return v.full(x, v.load_one(numbers, place * v.lanes(x) + row))


@inline
def scale_of_row(x: Any, numbers: Any, row: int) -> Any:
    return of_row(x, numbers, 0, row), of_row(x, numbers, 1, row), of_row(x, numbers, 2, row)


@inline
def divisor_of_row(x: Any, numbers: Any, row: int) -> Any:
    high, low, top = scale_of_row(x, numbers, row)
    return high, low, top, of_row(x, numbers, 3, row)


@inline
def group_maxima(x: Any, x_row: int, n: int, filled: int, tile: Any, transposed: Any) -> Vector:
    w = v.lanes(x)
    for r in range(filled):
        v.store(tile, r * w, _top(x + r * x_row, n))
    transpose_in(transposed, tile, w, w, filled)
    return column_max(transposed, w, w, True, v.first(x, w))


@inline
def sums_across(x: Any, high: Any, low: Any, transposed: Any, filled: int) -> Any:
    """The sums across the lanes of two-part numbers, for each row."""
    w, zero = v.lanes(x), v.full(x, 0.0)
    transpose_in(transposed, high, w, w, filled)
    if v.is_fine(x):
        transpose_in(high, low, w, w, filled)
        sums = zero, zero
        for i in range(w):
            sums = add_pairs(sums, (v.load(transposed, i * w), v.load(high, i * w)))
        return sums
    for i in range(w):
        zero = zero + v.load(transposed, i * w)
    return zero, v.full(x, 0.0)


@inline
def counts_across(x: Any, counts: Any, transposed: Any, filled: int) -> Vector:
    """The sums across the lanes of whole numbers, for each row."""
    w, total = v.lanes(x), v.full(x, 0.0)
    transpose_in(transposed, counts, w, w, filled)
    for i in range(w):
        total = total + v.load(transposed, i * w)
    return total


# --- the kernels ---------------------------------------------------------------------------------------------------


def softmax_group(
    buffer: Callable[..., Any], subtracted: Callable[..., Vector], divide: Callable[..., Any]
) -> Callable[..., Any]:
    """y = softmax(x) for as many rows as a vector has lanes, or fewer, in one of the forms.

    `e` has room for the exponentials, `e_row` from one row to the next. Returns the largest of each row, what was
    subtracted, the sums.
    """

    @inline
    def group(
        x: Any, x_row: int, y: Any, y_row: int, n: int, filled: int, tile: Any, e: Any, e_row: int, fine: Any,
        stream: int, inf_as_zero: int,
    ) -> Any:  # fmt: skip
        w = v.lanes(x)
        low, transposed, numbers = tile + w * w, tile + 2 * w * w, tile + TILES * w * w
        largest = group_maxima(x, x_row, n, filled, tile, transposed)
        m = subtracted(largest)
        keep_numbers(numbers, scale_for(m))
        for r in range(filled):
            row = x + r * x_row
            exps = buffer(row, e + r * e_row)
            sums = row_exponentials(row, n, scale_of_row(x, numbers, r), exps, row + w * x_row)
            v.store(tile, r * w, sums[0])
            v.store(low, r * w, sums[1])
        s = sums_across(x, tile, low, transposed, filled)
        keep_numbers(numbers, divide(s, m, inf_as_zero))
        for r in range(filled):
            exps = buffer(x + r * x_row, e + r * e_row)
            write_scaled(y + r * y_row, 0, n, stream, (exps,), (divisor_of_row(x, numbers, r), fine))
        return largest, m, s

    return group


def log_softmax_group(subtracted: Callable[..., Vector], count_of: Callable[..., Vector]) -> Callable[..., Vector]:
    """y = log_softmax(x) for as many rows as a vector has lanes, or fewer, in one of the forms; their log-sum-exp."""

    @inline
    def group(x: Any, x_row: int, y: Any, y_row: int, n: int, filled: int, tile: Any, stream: int) -> Vector:
        w = v.lanes(x)
        low, counts, transposed, numbers = tile + w * w, tile + 2 * w * w, tile + 3 * w * w, tile + TILES * w * w
        largest = group_maxima(x, x_row, n, filled, tile, transposed)
        m = subtracted(largest)
        scale = scale_for(m)
        keep_numbers(numbers, (scale[0], scale[1], scale[2], m))
        for r in range(filled):
            row = x + r * x_row
            rest, low_rest, equal = row_rest(
                row, n, of_row(x, numbers, 3, r), scale_of_row(x, numbers, r), row + w * x_row
            )
            v.store(tile, r * w, rest)
            v.store(low, r * w, low_rest)
            v.store(counts, r * w, equal)
        rests = sums_across(x, tile, low, transposed, filled)
        count = count_of(largest, counts_across(x, counts, transposed, filled))
        log_s = column_log_of_sum(rests[0] + rests[1], count, m)
        keep_numbers(numbers, (largest, log_s))
        for r in range(filled):
            numbers_of_row = of_row(x, numbers, 0, r), of_row(x, numbers, 1, r)
            write_log(y + r * y_row, 0, n, stream, (x + r * x_row,), numbers_of_row)
        return largest + log_s

    return group


_softmax = softmax_group(forms.beside, forms.largest_of_column, forms.divisor_of_column)
_softmax_in_place = softmax_group(forms.over, forms.finite_of_column, forms.divisor_of_column_or_zero)
_log_softmax = log_softmax_group(forms.largest_of_column, forms.count_of_column)
_log_softmax_in_place = log_softmax_group(forms.finite_of_column, forms.count_of_column_or_one)


@kernel
def softmax_groups(units: Units, count, n, x: Rows, y: Rows, tile: Private, e: Private, stream):
    w, e_row = v.lanes(tile), (n + v.lanes(tile) - 1) // v.lanes(tile) * v.lanes(tile)
    for row in range(units.start * w, units.stop * w, w):
        xs, ys = x.data + row * x.step, y.data + row * y.step
        _softmax(xs, x.step, ys, y.step, n, min(w, count - row), tile, e, e_row, v.is_fine(xs), stream, 0)


@kernel
def log_softmax_groups(units: Units, count, n, x: Rows, y: Rows, tile: Private, stream):
    w = v.lanes(tile)
    for row in range(units.start * w, units.stop * w, w):
        xs, ys = x.data + row * x.step, y.data + row * y.step
        _log_softmax(xs, x.step, ys, y.step, n, min(w, count - row), tile, stream)


@kernel
def softmax_groups_in_place(
    values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
):
    w = v.lanes(values)
    for row in range(0, rows, w):
        xs, filled = values + row * n, min(w, rows - row)
        largest, m, s = _softmax_in_place(xs, n, xs, n, n, filled, tile, xs, n, True, 0, inf_as_zero)
        v.store_masked(stats, row, log_sum_exp(largest, m, s) if keeps_stats else largest, v.first(stats, filled))


@kernel
def log_softmax_groups_in_place(
    values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
):
    w = v.lanes(values)
    for row in range(0, rows, w):
        xs, filled = values + row * n, min(w, rows - row)
        v.store_masked(stats, row, _log_softmax_in_place(xs, n, xs, n, n, filled, tile, 0), v.first(stats, filled))
