"""Rows of middling length, as many at a time as a vector has lanes.

What is done once for each row, which would take as long as some hundred elements, is done for the whole group in one
vector: a row leaves a vector of maxima or of sums, and the group's vectors are turned, so that each lane is a row.
"""

from typing import Any

from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import (
    Pointer,
    Vector,
    first,
    full,
    is_fine,
    lanes,
    load,
    load_masked,
    load_one,
    maximum,
    prefetch,
    select,
    store,
    store_masked,
)
from opgrad.cpu.loops.columns import column_max
from opgrad.cpu.loops.rows import MINUS_INFINITY, write_log, write_scaled
from opgrad.cpu.loops.transpose import TILES, VECTORS, turn_in
from opgrad.cpu.numerics.logsumexp import (
    add_below,
    add_exact,
    add_pairs,
    column_divisor,
    column_log_of_sum,
    scale_for,
    sum_end,
    sum_start,
)
from opgrad.cpu.runtime.workspace import release_slot, take_slot

# --- one row: what is left to be done across the lanes ---------------------------------------------------------------


@inline
def _top(x: Any, n: int) -> Vector:
    w, m, i = lanes(x), full(x, MINUS_INFINITY), 0
    while i + w <= n:
        m = maximum(load(x, i), m)
        i += w
    return maximum(load_masked(x, i, first(x, n - i), MINUS_INFINITY), m) if i < n else m


@inline
def row_exponentials(x: Any, n: int, scale: Any, e: Any, ahead: Any) -> Any:
    """Their sums; they go to `e`."""
    w, i = lanes(x), 0
    total, lost = sum_start(x)
    while i + w <= n:
        v, total, lost = add_exact(x, total, lost, load(x, i), scale)
        prefetch(ahead, i)
        store(e, i, v)
        i += w
    if i < n:
        mask = first(x, n - i)
        v, total, lost = add_exact(x, total, lost, load_masked(x, i, mask, MINUS_INFINITY), scale)
        store_masked(e, i, v, mask)
    return sum_end(x, total, lost)


@inline
def row_rest(x: Any, n: int, m: Vector, scale: Any, ahead: Any) -> Any:
    """The sums of the exponentials of what is not m, and how many are m."""
    w, i, zero, one = lanes(x), 0, full(x, 0.0), full(x, 1.0)
    rest, lost, count = zero, zero, zero
    while i + w <= n:
        v = load(x, i)
        prefetch(ahead, i)
        rest, lost = add_below(x, rest, lost, v, m, scale)
        count = count + select(v == m, one, 0.0)
        i += w
    if i < n:
        v = load_masked(x, i, first(x, n - i), MINUS_INFINITY)
        rest, lost = add_below(x, rest, lost, v, m, scale)
        count = count + select(v == m, one, 0.0)
    return rest, lost, count


# --- a group ---------------------------------------------------------------------------------------------------------


@inline
def keep_numbers(numbers: Any, vectors: Any) -> None:
    """Put vectors of numbers of rows where `_of_row` finds them."""
    w = lanes(numbers)
    for place, v in enumerate(vectors):
        store(numbers, place * w, v)


@inline
def of_row(x: Any, numbers: Any, place: int, row: int) -> Vector:
    return full(x, load_one(numbers, place * lanes(x) + row))


@inline
def scale_of_row(x: Any, numbers: Any, row: int) -> Any:
    return of_row(x, numbers, 0, row), of_row(x, numbers, 1, row), of_row(x, numbers, 2, row)


@inline
def divisor_of_row(x: Any, numbers: Any, row: int) -> Any:
    high, low, top = scale_of_row(x, numbers, row)
    return high, low, top, of_row(x, numbers, 3, row)


@inline
def group_maxima(x: Any, x_row: int, n: int, filled: int, tile: Any, turned: Any) -> Vector:
    w = lanes(x)
    for r in range(filled):
        store(tile, r * w, _top(x + r * x_row, n))
    turn_in(turned, tile, w, w, filled)
    return column_max(turned, w, w, True, first(x, w))


@inline
def sums_across(x: Any, high: Any, low: Any, turned: Any, filled: int) -> Any:
    """The sums across the lanes of two-part numbers, for each row."""
    w, zero = lanes(x), full(x, 0.0)
    turn_in(turned, high, w, w, filled)
    if is_fine(x):
        turn_in(high, low, w, w, filled)
        sums = zero, zero
        for i in range(w):
            sums = add_pairs(sums, (load(turned, i * w), load(high, i * w)))
        return sums
    for i in range(w):
        zero = zero + load(turned, i * w)
    return zero, full(x, 0.0)


@inline
def counts_across(x: Any, counts: Any, turned: Any, filled: int) -> Vector:
    """The sums across the lanes of whole numbers, for each row."""
    w, total = lanes(x), full(x, 0.0)
    turn_in(turned, counts, w, w, filled)
    for i in range(w):
        total = total + load(turned, i * w)
    return total


@kernel
def softmax_groups(
    part, per_part, units, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size,
    stream,
):  # fmt: skip
    w = lanes(x)
    slot = take_slot(scratch, slots)
    high = space + slot * space_size
    low, turned, numbers = high + w * w, high + 2 * w * w, high + TILES * w * w
    e, e_row = numbers + VECTORS * w, (n + w - 1) // w * w
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        filled = min(w, count - unit * w)
        xs, ys = x + unit * w * x_row, y + unit * w * y_row
        m = group_maxima(xs, x_row, n, filled, high, turned)
        keep_numbers(numbers, scale_for(m))
        for r in range(filled):
            scale, row = scale_of_row(x, numbers, r), xs + r * x_row
            sums = row_exponentials(row, n, scale, e + r * e_row, row + w * x_row)
            store(high, r * w, sums[0])
            store(low, r * w, sums[1])
        keep_numbers(numbers, column_divisor(sums_across(x, high, low, turned, filled), m))
        for r in range(filled):
            divisor = divisor_of_row(x, numbers, r)
            write_scaled(ys + r * y_row, 0, n, stream, (e + r * e_row,), (divisor, is_fine(x)))
    release_slot(scratch, slot)


@kernel
def log_softmax_groups(
    part, per_part, units, count, n, x: Pointer, x_row, y: Pointer, y_row, scratch, slots, space: Pointer, space_size,
    stream,
):  # fmt: skip
    w = lanes(x)
    slot = take_slot(scratch, slots)
    high = space + slot * space_size
    low, counts, turned, numbers = high + w * w, high + 2 * w * w, high + 3 * w * w, high + TILES * w * w
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        filled = min(w, count - unit * w)
        xs, ys = x + unit * w * x_row, y + unit * w * y_row
        m = group_maxima(xs, x_row, n, filled, high, turned)
        scale = scale_for(m)
        keep_numbers(numbers, (scale[0], scale[1], scale[2], m))
        for r in range(filled):
            scale, row = scale_of_row(x, numbers, r), xs + r * x_row
            rest, lost, equal = row_rest(row, n, of_row(x, numbers, 3, r), scale, row + w * x_row)
            store(high, r * w, rest)
            store(low, r * w, lost)
            store(counts, r * w, equal)
        rests = sums_across(x, high, low, turned, filled)
        equal = counts_across(x, counts, turned, filled)
        store(numbers, 0, column_log_of_sum(rests[0] + rests[1], equal, m))
        for r in range(filled):
            m_row, log_s = of_row(x, numbers, 3, r), of_row(x, numbers, 0, r)
            write_log(ys + r * y_row, 0, n, stream, (xs + r * x_row,), (m_row, log_s))
    release_slot(scratch, slot)
