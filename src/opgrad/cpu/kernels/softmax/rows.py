"""Softmax, log-softmax and their gradients of contiguous rows: vectors run along a row.

A kernel writes each row past the cache while it reduces the next one (`loops.rows.write_behind`).
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.columns import column_max, in_buffer
from opgrad.cpu.kernels.loops.fold import fold, folded, sum_products
from opgrad.cpu.kernels.loops.map import get, get_or, mapped, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, TILES, combining, number_equal, row_max, row_top, transpose_in
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp_up_to_zero, log
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS, of_columns, of_rows

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


def forward_rows(operator: str) -> Kernel:
    """e, done: memory for softmax's exponentials, of this row and of the one before.

    Log-softmax has a kernel without: the words of unused memory take four registers in each loop.
    """
    write = forward(operator)

    @kernel
    def by_rows(rows: Units, n, x: Rows, y: Rows, e: Private, done: Private, stream):
        write(rows, n, x, y, e, done, stream)

    @kernel
    def without_memory(rows: Units, n, x: Rows, y: Rows, stream):
        write(rows, n, x, y, x.data, x.data, stream)

    found = by_rows if operator == "softmax" else without_memory
    found.__name__ = f"{operator}_rows"
    return found


def forward_in_result(operator: str) -> Kernel:
    """For results that are written through the cache and, those of softmax, have the digits of the computation."""
    write = forward(operator, in_result=True)

    @kernel
    def in_result(rows: Units, n, x: Rows, y: Rows):
        write(rows, n, x, y, 0, 0, 0)

    in_result.__name__ = f"{operator}_rows_in_result"
    return in_result


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


# --- rows of middling length, as many at a time as a vector has lanes ------------------------------------------------
#
# The work that is done once for each row takes as long as some hundred elements. Here one vector does it for the whole
# group: each row gives a vector of maxima or of sums, and these vectors are transposed, so that each lane is a row.
#
# In the cache, on one thread, the time of groups as a part of that of single rows (Zen 4, rows of 40, 64, 100, 128, 200
# and 256 elements; the second line without AVX-512):
#
#     softmax      float32   0.77 0.85 0.94 0.91 1.10 1.10    bfloat16   0.88 0.75 0.83 0.85 0.89 0.96
#                            0.77 1.00 0.97 1.08 1.04 0.98               0.76 0.75 0.81 0.83 0.88 0.92
#     log-softmax            0.62 0.55 0.74 0.83 0.90 0.88               0.56 0.53 0.66 0.68 0.78 0.79
#                            0.57 0.61 0.78 0.76 0.99 1.07               0.61 0.62 0.75 0.74 0.82 0.85

_add, _ = lse.PLAIN
_, _add_below, _ = lse.PLAIN_BELOW


@fold
def _add_exponentials(sums, arrays, i: int, whole: bool, mask, scale):
    x, e, ahead = arrays
    value, sums = _add(x, sums, get_or(x, i, whole, mask, MINUS_INFINITY), scale)
    v.prefetch(ahead, i)
    put(e, i, value, whole, mask, 0)
    return sums


@fold
def _add_rest(total, arrays, i: int, whole: bool, mask, numbers):
    (sums, count), (x, e, ahead), (m, scale) = total, arrays, numbers
    value = get_or(x, i, whole, mask, MINUS_INFINITY)
    v.prefetch(ahead, i)
    if v.is_fine(x):
        v.prefetch(e, i)
    return _add_below(x, sums, value, m, scale), number_equal(count, value, m)


# The loop that sums a row's exponentials and stores them, and the loop that sums the exponentials of elements other
# than m and counts those equal to m. Both prefetch the row `ahead`, the latter `e`, too, the row's place in the result:
# log-softmax of 32768 x 128 float32 took 1.4 ms instead of 1.75, but of 16 bits, in the cache, 1.1 times as long.


@inline
def keep_numbers(numbers, vectors) -> None:
    """Store vectors with a number for each row where `of_row` reads them."""
    w = v.lanes(numbers)
    for which, value in enumerate(vectors):
        v.store(numbers, which * w, value)


@inline
def of_row(x, numbers, which: int, row: int) -> Vector:
    return v.full(x, v.load_one(numbers, which * v.lanes(x) + row))


@inline
def scale_of_row(x, numbers, row: int):
    return of_row(x, numbers, 0, row), of_row(x, numbers, 1, row), of_row(x, numbers, 2, row)


@inline
def group_maxima(x, x_row: int, n: int, filled: int, tile, transposed) -> Vector:
    w = v.lanes(x)
    for r in range(filled):
        v.store(tile, r * w, row_top(x + r * x_row, 0, n))
    transpose_in(transposed, tile, w, w, filled)
    return column_max(in_buffer(transposed), w)


@inline
def sums_across(x, tile, transposed, filled: int):
    """The sum over the lanes of each row, added pairwise, and what these additions round off."""
    w, sums = v.lanes(x), lse.no_sums(x)
    transpose_in(transposed, tile, w, w, filled)
    for i in range(0, w, 2):
        two = v.load(transposed, i * w) + v.load(transposed, (i + 1) * w)
        sums = lse.join_plain(x, (two, sums[1], sums[2], sums[3]))
    return sums[2], sums[3]


@inline
def counts_across(x, counts, transposed, filled: int) -> Vector:
    """The sum over the lanes of whole numbers, for each row."""
    w, total = v.lanes(x), v.full(x, 0.0)
    transpose_in(transposed, counts, w, w, filled)
    for i in range(w):
        total = total + v.load(transposed, i * w)
    return total


@inline
def exponentials_of_group(x, x_row: int, n: int, filled: int, tile, e, e_row: int, m: Vector):
    """The sums of the rows' exponentials, which are stored in `e`."""
    w = v.lanes(x)
    transposed, numbers = tile + 2 * w * w, tile + TILES * w * w
    keep_numbers(numbers, lse.scale_for(m))
    for r in range(filled):
        row = x + r * x_row
        scale = scale_of_row(x, numbers, r)
        found = _add_exponentials(lse.start(x), 0, n, (row, e + r * e_row, row + w * x_row), scale)
        v.store(tile, r * w, lse.rounded(x, found))
    return sums_across(x, tile, transposed, filled)


@inline
def rests_of_group(x, x_row: int, n: int, filled: int, tile, e, e_row: int, m: Vector):
    """The sums of the rows' exponentials without those of elements equal to m, and the counts of the latter.

    It stores nothing in `e`, but prefetches it.
    """
    w = v.lanes(x)
    counts, transposed, numbers = tile + w * w, tile + 2 * w * w, tile + TILES * w * w
    scale = lse.scale_for(m)
    keep_numbers(numbers, (scale[0], scale[1], scale[2], m))
    for r in range(filled):
        row, none = x + r * x_row, (lse.no_sums(x), v.full(x, 0.0))
        given = of_row(x, numbers, 3, r), scale_of_row(x, numbers, r)
        found, equal = _add_rest(none, 0, n, (row, e + r * e_row, row + w * x_row), given)
        v.store(tile, r * w, found[0])
        v.store(counts, r * w, equal)
    rests = sums_across(x, tile, transposed, filled)
    return rests[0] + rests[1], counts_across(x, counts, transposed, filled)


def forward_groups(operator: str) -> Kernel:
    """The kernel over groups of rows; `e` is where softmax's exponentials go.

    Results are written through the cache: the rows are too short for non-temporal stores, and writing a whole group at
    once would leave the core idle.
    """
    reduction, is_softmax = of_columns(operator), operator == "softmax"
    add_up = exponentials_of_group if is_softmax else rests_of_group
    source_of = inline((lambda x, e: e) if is_softmax else (lambda x, e: x))
    place_of = inline((lambda e, y: e) if is_softmax else (lambda e, y: y))
    subtracted, numbers_of, write = reduction.subtracted, reduction.numbers, mapped(reduction.result)

    @kernel
    def by_groups(units: Units, count, n, x: Rows, y: Rows, tile: Private, e: Private):
        w, kept = v.lanes(tile), tile + TILES * v.lanes(tile) * v.lanes(tile)
        e_row = (n + w - 1) // w * w
        for row in range(units.start * w, min(units.stop * w, count), w):
            xs, ys, filled = x.data + row * x.step, y.data + row * y.step, min(w, count - row)
            largest = group_maxima(xs, x.step, n, filled, tile, tile + 2 * w * w)
            m = subtracted(xs, largest)
            sums = add_up(xs, x.step, n, filled, tile, place_of(e, ys), place_of(e_row, y.step), m)
            keep_numbers(kept, numbers_of(xs, sums, largest, m, 0))
            for r in range(filled):
                numbers = of_row(xs, kept, 0, r), of_row(xs, kept, 1, r)
                values = source_of(xs + r * x.step, e + r * e_row)
                write(ys + r * y.step, 0, n, 0, (values,), (numbers, v.is_fine(xs)))

    by_groups.__name__ = f"{operator}_groups"
    return by_groups


sum_exponentials = folded(lambda total, x, m: total + exp_up_to_zero(x - m))
write_shares = mapped(lambda x, m, share: exp_up_to_zero(x - m) * share)
write_gradient = mapped(lambda dy, y, total: y * (dy - total))


@inline
def _exponential(p, x):
    return v.first_lane(exp_up_to_zero(v.full(p, x)))


@kernel
def soften(units: Units, heads, length, n, x: Pointer, sink: Pointer, y: Pointer, lse: Pointer):
    """A unit is a row."""
    for row in units:
        source, beside = x + row * n, v.load_one(sink, row // length % heads)
        m = max(row_max(source, 0, n), beside)
        base = 0.0 if m == MINUS_INFINITY else m
        total = v.reduce_add(sum_exponentials(0, n, (source,), (base,)))
        total += _exponential(lse, beside - base)
        write_shares(y + row * n, 0, n, 0, (source,), (base, 0.0 if total == 0.0 else 1.0 / total))
        v.store_one(lse, row, MINUS_INFINITY if total == 0.0 else v.first_lane(log(v.full(lse, total))) + base)


@kernel
def soften_back(
    units: Units, heads, length, n, dy: Pointer, y: Pointer, lse: Pointer, sink: Pointer, dx: Pointer, parts: Pointer
):
    """A unit is a row, whose part of the sink's gradient is written to `parts`."""
    for row in units:
        both = dy + row * n, y + row * n
        total = v.reduce_add(sum_products(0, n, both, ()))
        write_gradient(dx + row * n, 0, n, 0, both, (total,))
        power = v.load_one(lse, row)
        base = 0.0 if power == MINUS_INFINITY else power
        v.store_one(parts, row, -total * _exponential(parts, min(v.load_one(sink, row // length % heads) - base, 0.0)))


@kernel
def sum_parts(units: Units, batches, heads, length, parts: Pointer, dsink: Pointer):
    """A unit is a head."""
    for head in units:
        total = 0.0
        for batch in range(batches):
            for row in range(length):
                total += v.load_one(parts, (batch * heads + head) * length + row)
        v.store_one(dsink, head, total)
