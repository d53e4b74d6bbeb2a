"""Softmax, log-softmax and their gradients along axes that are not the last in memory: each lane is a row.

A unit is a strip of columns as wide as a vector. A kernel writes each strip past the cache while it reduces the next
one (`loops.columns.write_strip_behind`).
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Private, Rows, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.columns import Line, Strip
from opgrad.cpu.kernels.loops.map import get, put, write_same
from opgrad.cpu.kernels.loops.rows import (
    MINUS_INFINITY,
    first_line,
    holds_lines,
    next_lines,
    transpose_in,
    transpose_out,
    waiting_from,
    write_waiting,
)
from opgrad.cpu.kernels.loops.rows import buffer_like as in_buffer
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


def forward_columns(operator: str, is_kept: bool) -> Kernel:
    """The kernel that writes the result of each strip while it reduces the next one.

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

    @kernel
    def by_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, e: Private, done: Private, stream):
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

    by_columns.__name__ = f"{operator}_columns"
    return by_columns


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


# --- short rows ------------------------------------------------------------------------------------------------------
#
# Where an axis with few elements lies behind the reduced one, its columns together are such a row, in which they are
# interleaved: in strips of columns most lanes of a vector would be idle. In the cache, on two threads, strips took so
# many times as long, by the length and the number of columns (Emerald Rapids; in brackets without AVX-512):
#
#                                             2               3               4               8
#     softmax       8 to 512  float32   7 to 11 (4-9)   4.4-7.6 (3.5-5)  2.9-5.9 (3-5)   1.3-2.8 (1.2-1.7)
#                             bfloat16  7 to 12 (4-7)   5.4-6.5 (4-5)    3.6-6.3 (3-3.3) 2.2-3.1 (1.9-2.3)
#     softmax_grad  8 to 64   float32   2.7-5 (2-5)     1.7-2.7 (1.4-3)  1.2-2.2 (1.3-2.4)
#                   8 to 64   bfloat16  6 to 11 (6-7)   5-5.7 (6)        3.2-4.8 (3-3.7) 1.3-2.6 (1.9-2.8)

AHEAD: Final = 2  # groups between the prefetch of rows and their use
# By layout, how many columns make up a row: a kernel for one column each has that number in its machine code.
COLUMNS_OF_ROW: Final = {"transposed": inline(lambda inner: 1), "interleaved": inline(lambda inner: inner)}


def loop_over_groups(compute: Callable[..., None]) -> Callable[..., None]:
    """The loop over groups of rows: compute(row, rows, n, waiting, arguments) leaves results in the tile; y is written.

    Past the cache, a group waits in the buffer and is written while the next one is computed, since writing it at once
    leaves the core idle. Rows of 48 took 0.17 ns an element instead of 0.28, rows of 33 took 0.19 instead of 0.38.
    Through the cache, y is prefetched: where it was not in the cache, rows of 64 took 0.3 ns instead of 0.54.
    """

    @inline
    def write(begin: int, end: int, n: int, y, tile, buffer, stream: int, arguments) -> None:
        w, held, line = v.lanes(tile), in_buffer(y.data, buffer), v.line(y.data)
        combined = holds_lines(y, end - begin, n, w, stream)
        out, filled = y.data, 0
        for row in range(begin, end, w):
            ys, rows, ready = y.data + row * y.step, min(w, end - row), filled // line * line
            if not combined:
                out = ys + AHEAD * w * y.step
            compute(row, rows, n, (out, ready, held), arguments)
            if combined and row > begin:
                next_lines(out, ready, n, held)
                out, filled = out + ready, filled - ready
                transpose_out(held + filled, n, tile, n, rows)
                filled += rows * n
            else:
                transpose_out(ys, y.step, tile, n, rows)
                if combined:
                    filled = first_line(ys + w * n, held)
                    out = ys + (w * n - filled)
        if combined:
            write_same(out, 0, filled, 1, (held,), ())

    return write


def forward_transposed(operator: str) -> dict[str, Kernel]:
    """The kernels of short rows and of interleaved columns, by the names of their layouts."""
    lines = forward_lines(of_columns(operator), write_waiting)

    @inline
    def compute(row: int, rows: int, size: int, waiting, arguments) -> None:
        x, tile, inner = arguments
        w, n, xs = v.lanes(tile), size // inner, x.data + row * x.step
        transpose_in(tile, xs, x.step, size, rows)
        step, ahead = inner * w, xs + AHEAD * w * x.step
        for j in range(inner):
            behind = waiting_from(waiting, j * n)
            lines(tile + j * w, step, n, v.is_fine(xs), 0, Line(ahead + j * w, step), behind)

    write = loop_over_groups(compute)

    def kernel_of(columns: Callable[..., int]) -> Kernel:
        @kernel
        def by_transposed_rows(units: Units, count, n, inner, x: Rows, y: Rows, tile: Private, buffer: Private, stream):
            w, own = v.lanes(tile), columns(inner)
            write(units.start * w, min(units.stop * w, count), n * own, y, tile, buffer, stream, (x, tile, own))

        return by_transposed_rows

    return {layout: kernel_of(columns) for layout, columns in COLUMNS_OF_ROW.items()}


def gradient_transposed(operator: str) -> dict[str, Kernel]:
    """The kernels of short rows and of interleaved columns, by the names of their layouts."""
    lines = gradient_lines(operator, write_waiting)

    @inline
    def compute(row: int, rows: int, size: int, waiting, arguments) -> None:
        dy, y, dy_tile, y_tile, inner = arguments
        dys, ys, w, n = dy.data + row * dy.step, y.data + row * y.step, v.lanes(dy_tile), size // inner
        transpose_in(dy_tile, dys, dy.step, size, rows)
        transpose_in(y_tile, ys, y.step, size, rows)
        far = AHEAD * w
        for j in range(inner):
            ahead = dys + (far * dy.step + j * w), ys + (far * y.step + j * w)
            lines(dy_tile + j * w, y_tile + j * w, inner * w, n, ahead, waiting_from(waiting, j * n))

    write = loop_over_groups(compute)

    def kernel_of(columns: Callable[..., int]) -> Kernel:
        @kernel
        def by_transposed_rows(
            units: Units, count, n, inner, dy: Rows, y: Rows, dx: Rows, dy_tile: Private, y_tile: Private,
            buffer: Private, stream,
        ):  # fmt: skip
            w, own = v.lanes(dy_tile), columns(inner)
            begin, end = units.start * w, min(units.stop * w, count)
            write(begin, end, n * own, dx, dy_tile, buffer, stream, (dy, y, dy_tile, y_tile, own))

        return by_transposed_rows

    return {layout: kernel_of(columns) for layout, columns in COLUMNS_OF_ROW.items()}


# --- long columns, few side by side --------------------------------------------------------------------------------
#
# Such columns without gaps are one row. Its vectors repeat the columns in their lanes after as many vectors as there
# are columns: a period, which is so many strips of whole vectors. What strips find is joined over the lanes of each
# column. In strips of columns, whose vectors have as many lanes in use as there are columns, softmax_grad of
# 3000 x 1000 x 3 bfloat16 along axis 1 took 60 ms, and softmax of 3000 x 1000 x 5 float32 37.


@inline
def _put_in_lanes(numbers, inner: int, column: int, number) -> None:
    for row in range(v.lanes(numbers)):
        v.store_one(numbers, row * inner + column, number)


@inline
def _sum_of_lanes(numbers, rows: int, inner: int, column: int):
    """The sum of a column's numbers in so many rows, and what its roundings have lost."""
    total, lost = v.load_one(numbers, column), v.number(numbers, 0.0)
    for row in range(1, rows):
        one = v.load_one(numbers, row * inner + column)
        more = total + one
        part = more - total
        total, lost = more, lost + ((total - (more - part)) + (one - part))
    return total, lost


@inline
def _rest(size: int, at: int, like):
    """Whether all lanes of a vector at this element of a row exist, and the mask of those that do."""
    return size - at >= v.lanes(like), v.first(like, size - at)


def forward_periodic(operator: str, is_kept: bool) -> Kernel:
    """is_kept: as of `forward_columns`."""
    reduction, is_softmax = of_columns(operator, recomputed=not is_kept), operator == "softmax"
    result, subtracted, numbers_of = reduction.result, reduction.subtracted, reduction.numbers
    add_up = reduction.loop(loops.nothing)
    source_of = inline((lambda x, e, i: v.load(e, i)) if is_kept else (lambda x, e, i: v.load(x, i)))

    @kernel
    def by_periods(
        units: Units, n, inner, x: Rows, y: Rows, e: Private, rest: Private, largest: Private, first: Private,
        second: Private,
    ):  # fmt: skip
        w, fine, size = v.lanes(x.data), v.is_fine(x.data), n * inner
        period, lines, every = inner * w, n // w, v.first(x.data, w)
        end, keep = lines * period, period if is_kept else 0
        for unit in units:
            xs, ys = x.data + unit * x.step, y.data + unit * y.step
            for j in range(0, period, w):
                whole, mask = _rest(size, end + j, xs)
                last = v.select(mask, get(xs, end + j, whole, mask), MINUS_INFINITY)
                v.store(rest, j, last)
                v.store(largest, j, v.maximum(last, loops.column_max(Strip(xs + j, period, True, every), lines)))
            for column in range(inner):
                top = v.load_one(largest, column)
                for row in range(1, w):
                    top = max(top, v.load_one(largest, row * inner + column))
                _put_in_lanes(largest, inner, column, top)
            for j in range(0, period, w):
                strip, ahead = Strip(xs + j, period, True, every), Line(xs + (x.step + j), period)
                m = subtracted(xs, v.load(largest, j))
                a, b = add_up(xs, strip, lines, m, e + j, keep, ahead, 0)
                c, d = add_up(xs, Strip(rest + j, 0, True, every), 1, m, e + (end + j), keep, ahead, 0)
                v.store(first, j, a)
                v.store(second, j, b)
                v.store(first, period + j, c)
                v.store(second, period + j, d)
            for column in range(inner):
                s, lost = _sum_of_lanes(first, 2 * w, inner, column)
                t, _ = _sum_of_lanes(second, 2 * w, inner, column)
                _put_in_lanes(first, inner, column, s if is_softmax else s + lost)
                _put_in_lanes(second, inner, column, t + lost if is_softmax else t)
            for j in range(0, period, w):
                top = v.load(largest, j)
                numbers = numbers_of(xs, (v.load(first, j), v.load(second, j)), top, subtracted(xs, top), 0)
                for line in range(lines):
                    i = line * period + j
                    v.store(ys, i, result(source_of(xs, e, i), numbers, fine))
                whole, mask = _rest(size, end + j, xs)
                source = v.load(e, end + j) if is_kept else v.load(rest, j)
                v.store_masked(ys, end + j, result(source, numbers, fine), mask)

    by_periods.__name__ = f"{operator}_periodic"
    return by_periods


def gradient_periodic(operator: str) -> Kernel:
    term, formula = GRADIENTS[operator]

    @inline
    def term_at(arrays, i: int, whole: bool, mask, ahead) -> Vector:
        dy, y = arrays
        for each in (dy, y):
            v.prefetch(each.data, ahead + i * each.step)
        return term(*_both(arrays, i, whole, mask))

    add_up = loops.column_sum(term_at, loops.nothing)

    @kernel
    def by_periods(units: Units, n, inner, dy: Rows, y: Rows, dx: Rows, total: Private):
        like, size = dy.data, n * inner
        w = v.lanes(like)
        period, lines, every = inner * w, n // w, v.first(like, w)
        end = lines * period
        for unit in units:
            dys, ys, out = dy.data + unit * dy.step, y.data + unit * y.step, dx.data + unit * dx.step
            for j in range(0, period, w):
                arrays, (whole, mask) = (Line(dys + j, period), Line(ys + j, period)), _rest(size, end + j, like)
                s = add_up(like, lines, arrays, True, every, size, 0)
                v.store(total, j, s + term(get(dys, end + j, whole, mask), get(ys, end + j, whole, mask)))
            for column in range(inner):
                _put_in_lanes(total, inner, column, _sum_of_lanes(total, w, inner, column)[0])
            for line in range(lines):
                for j in range(0, period, w):
                    i = line * period + j
                    v.store(out, i, formula(v.load(dys, i), v.load(ys, i), v.load(total, j)))
            for j in range(0, period, w):
                whole, mask = _rest(size, end + j, like)
                given = get(dys, end + j, whole, mask), get(ys, end + j, whole, mask)
                v.store_masked(out, end + j, formula(given[0], given[1], v.load(total, j)), mask)

    by_periods.__name__ = f"{operator}_periodic"
    return by_periods


# --- columns whose elements lie a large power of two apart: panels of neighbouring strips ----------------------------
#
# Lines at such a distance share a few sets of a cache. Those of a column of 1,000 do not stay in it, so that the
# kernels above fetch each line again for every pass and every strip. Here a panel is copied into a buffer row by row,
# its strips are reduced there while the next panel is prefetched, and it is written row by row. The results have the
# same bits.

WIDTH: Final = 64  # columns of a panel: rows of 128 to 512 bytes
KEPT: Final = 2  # vectors that are kept for each strip: its largest elements, and then the numbers of its results


@inline
def _lanes_in(e, inner: int, j: int):
    """Whether all columns from j on that a vector holds exist, and the mask of those that do."""
    w = v.lanes(e)
    return j >= 0 and j + w <= inner, v.first(e, inner - j) ^ v.first(e, -j)


def forward_panels(operator: str) -> Kernel:
    reduction = of_columns(operator)
    add_up, subtracted = reduction.loop(loops.nothing), reduction.subtracted
    numbers_of, result = reduction.numbers, reduction.result

    @inline
    def copy(x, x_n: int, n: int, j: int, inner: int, panel, kept) -> None:
        w = v.lanes(panel)
        for s in range(0, WIDTH, w):
            v.store(kept, KEPT * s, v.full(panel, MINUS_INFINITY))
        for i in range(n):
            for s in range(0, WIDTH, w):
                whole, mask = _lanes_in(panel, inner, j + s)
                value = get(x, i * x_n + s, whole, mask)
                v.store(panel, i * WIDTH + s, value)
                v.store(kept, KEPT * s, v.maximum(value, v.load(kept, KEPT * s)))

    @inline
    def reduce(x, x_n: int, n: int, panel, kept) -> None:
        w = v.lanes(panel)
        for s in range(0, WIDTH, w):
            strip, largest = Strip(panel + s, WIDTH, True, v.first(panel, w)), v.load(kept, KEPT * s)
            m, ahead = subtracted(x, largest), Line(x + (WIDTH + s), x_n)
            sums = add_up(x, strip, n, m, panel + s, WIDTH, ahead, 0)
            first, second = numbers_of(x, sums, largest, m, 0)
            v.store(kept, KEPT * s, first)
            v.store(kept, KEPT * s + w, second)

    @inline
    def write(y, y_n: int, n: int, j: int, inner: int, panel, kept, fine, past: int) -> None:
        w = v.lanes(panel)
        for i in range(n):
            for s in range(0, WIDTH, w):
                whole, mask = _lanes_in(panel, inner, j + s)
                numbers = v.load(kept, KEPT * s), v.load(kept, KEPT * s + w)
                put(y, i * y_n + s, result(v.load(panel, i * WIDTH + s), numbers, fine), whole, mask, past)

    @kernel
    def by_panels(units: Units, strips: Strips, n, x: Columns, y: Columns, panel: Private, kept: Private, stream):
        for unit in units:
            o, j, _, _ = loops.aligned_strip(unit, strips, y, y, WIDTH, 1)
            if j < strips.inner:
                xs, ys = x.data + (o * x.outer + j), y.data + (o * y.outer + j)
                copy(xs, x.step, n, j, strips.inner, panel, kept)
                reduce(xs, x.step, n, panel, kept)
                past = loops.streams_columns(ys, y.step, stream)
                write(ys, y.step, n, j, strips.inner, panel, kept, v.is_fine(xs), past)

    return by_panels
