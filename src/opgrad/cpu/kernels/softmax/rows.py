"""Softmax, log-softmax and their gradients of contiguous rows: vectors run along a row.

A plain kernel writes each row past the cache while it reduces the next one. Writing a row by itself leaves the memory
idle while the next one is read and computed: 2048 x 32000 took 18 ms that way, and takes 16 ms.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import mapped, next_vector
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.softmax import variants

# Rows up to this length that are not written past the cache are written after the exponentials of the next row. A row's
# divisor is the result of a long chain of dependent operations; rows of 1,000 would otherwise wait for it.
LATE: Final = 2048


# --- softmax -------------------------------------------------------------------------------------------------------


_late = inline(lambda n, stream: n <= LATE and not stream)
_at_once = inline(lambda n, stream: False)
_nothing_noted = inline(lambda stats, row, x, s, largest, m, keeps: None)


@inline
def _log_sum_exp(stats, row: int, x, s: float, largest, m, keeps: int) -> None:
    if keeps:
        log_s = lse.row_log_of_total(x, s, m, lse.exp_added(x, m, m)) if s >= 1.0 else v.number(x, s)
        v.store_one(stats, row, largest + log_s)
    else:
        v.store_one(stats, row, largest)


def in_blocks(add_up: Callable[..., Any]) -> Callable[..., Any]:
    """`row_sum_exp` for rows of any length: it sums each block by itself and adds the sums in float64."""

    @inline
    def sum_exp(x, begin: int, n: int, m: float, e, keep: int, ahead, out, j: int, stop: int, arrays, numbers):
        s = 0.0
        for block in range(begin, n, BLOCK):
            end = min(block + BLOCK, n)
            added, j = add_up(x, block, end, m, e, keep, ahead, out, j, stop, arrays, numbers)
            s += added
        return s, j

    return sum_exp


def softmax_body(
    sum_exp: Callable[..., Any], late: Callable[..., bool], variant: variants.Variant, note: Callable[..., None]
) -> Callable[..., None]:
    """y = softmax(x) for a range of rows, in one of the variants.

    `e` has this row's exponentials, `done` the last one's.
    """
    buffer, subtracted, divide, no_divisor = variant.buffer, variant.subtracted, variant.divide, variant.no_divisor
    write = mapped(variant.quotient)

    @inline
    def body(
        rows, n: int, x, x_row: int, y, y_row: int, e, done, stream: int,
        stats, inf_as_zero: int, keeps_stats: int,
    ) -> None:  # fmt: skip
        is_late = late(n, stream)
        stop = 0 if is_late else n
        out, head, divisor = y, n, no_divisor(x)
        for row in rows:
            xs = x + row * x_row
            largest, exps = loops.row_max(xs, 0, n), buffer(xs, e)
            m = subtracted(xs, largest)
            # The row before is written while this one is computed. There is none before the first, so head is n at
            # first.
            s, j = sum_exp(xs, 0, n, m, exps, 1, xs + x_row, out, head, stop, (done,), (divisor, v.is_fine(x)))
            write(out, j, n, 0, (done,), (divisor, v.is_fine(x)))
            out, divisor = y + row * y_row, divide(x, s, m, inf_as_zero)
            e, done = done, exps
            head = 0 if is_late else loops.line_head(out, n, stream)
            write(out, 0, head, 0, (done,), (divisor, v.is_fine(x)))
            note(stats, row, x, s, largest, m, keeps_stats)
        write(out, head, n, stream, (done,), (divisor, v.is_fine(x)))

    return body


_add_writing = loops.row_sum_exp(next_vector(lse.quotient), lse.PLAIN)
_softmax = softmax_body(_add_writing, _late, variants.PLAIN_ROWS, _nothing_noted)


@kernel
def softmax_rows(rows: Units, n, x: Rows, y: Rows, e: Private, done: Private, stream):
    _softmax(rows, n, x.data, x.step, y.data, y.step, e, done, stream, y.data, 0, 0)


def softmax_in_place(variant: variants.Variant) -> Kernel:
    add_up = in_blocks(loops.row_sum_exp(variants.no_step, variant.sums))
    softmax = softmax_body(add_up, _at_once, variant, _log_sum_exp)

    @kernel
    def softmax_rows_in_place(block: variants.Block):
        x, n, inf_as_zero, keeps = block.values, block.n, block.inf_as_zero, block.keeps_stats
        softmax(range(block.rows), n, x, n, x, n, x, x, 0, block.stats, inf_as_zero, keeps)

    return softmax_rows_in_place


# --- log-softmax ---------------------------------------------------------------------------------------------------


def rest_in_blocks(add_rest: Callable[..., Any]) -> Callable[..., Any]:
    """`row_rest` for rows of any length, block by block."""

    @inline
    def rest_of(x, begin: int, n: int, m: float, ahead, out, j: int, stop: int, arrays, numbers):
        rest, count = 0.0, 0.0
        for block in range(begin, n, BLOCK):
            end = min(block + BLOCK, n)
            added, equal, j = add_rest(x, block, end, m, ahead, out, j, stop, arrays, numbers)
            rest, count = rest + added, count + equal
        return rest, count, j

    return rest_of


_no_sum = inline(lambda stats, row, log_sum_exp: None)
_store_sum = inline(lambda stats, row, log_sum_exp: v.store_one(stats, row, log_sum_exp))


def log_softmax_body(
    add_rest: Callable[..., Any], late: Callable[..., bool], variant: variants.Variant, note: Callable[..., None]
) -> Callable[..., None]:
    """y = log_softmax(x) for a range of rows, in one of the variants."""
    subtracted, count_of = variant.subtracted, variant.count_of

    @inline
    def body(rows, n: int, x, x_row: int, y, y_row: int, stream: int, stats) -> None:
        is_late = late(n, stream)
        stop = 0 if is_late else n
        out, head, before, largest_before, log_before = y, n, x, v.full(x, 0.0), v.full(x, 0.0)
        for row in rows:
            xs = x + row * x_row
            largest = loops.row_max(xs, 0, n)
            m = subtracted(xs, largest)
            rest, equal, j = add_rest(xs, 0, n, m, xs + x_row, out, head, stop, (before,), (largest_before, log_before))
            loops.write_log(out, j, n, 0, (before,), (largest_before, log_before))
            out, before = y + row * y_row, xs
            largest_before, log_before = v.full(x, largest), lse.row_log_of_sum(x, rest, count_of(largest, equal), m)
            head = 0 if is_late else loops.line_head(out, n, stream)
            loops.write_log(out, 0, head, 0, (before,), (largest_before, log_before))
            note(stats, row, largest + v.first_lane(log_before))
        loops.write_log(out, head, n, stream, (before,), (largest_before, log_before))

    return body


_log_softmax = log_softmax_body(loops.add_rest_logging, _late, variants.PLAIN_ROWS, _no_sum)


@kernel
def log_softmax_rows(rows: Units, n, x: Rows, y: Rows, stream):
    _log_softmax(rows, n, x.data, x.step, y.data, y.step, stream, y.data)


def log_softmax_in_place(variant: variants.Variant) -> Kernel:
    add_rest = rest_in_blocks(loops.row_rest(variants.no_step, variant.rests))
    log_softmax = log_softmax_body(add_rest, _at_once, variant, _store_sum)

    @kernel
    def log_softmax_rows_in_place(block: variants.Block):
        x, n = block.values, block.n
        log_softmax(range(block.rows), n, x, n, x, n, 0, block.stats)

    return log_softmax_rows_in_place


# --- gradients -----------------------------------------------------------------------------------------------------


def gradient_body(add_up: Callable[..., Any], formula: Callable[..., Vector]) -> Callable[..., None]:
    """dx = formula(dy, y, sum(term(dy, y))) for a range of rows; `add_up` forms the sum."""
    write = mapped(formula)

    @inline
    def body(rows, n: int, dy, dy_row: int, y, y_row: int, dx, dx_row: int, stream: int) -> None:
        out, head, before, s_before = dx, n, (dy, y), v.number(dy, 0.0)
        for row in rows:
            dys, ys = dy + row * dy_row, y + row * y_row
            s, j = add_up(dys, ys, 0, n, out, head, n, before, (s_before,))
            write(out, j, n, 0, before, (s_before,))
            out, before, s_before = dx + row * dx_row, (dys, ys), s
            head = loops.line_head(out, n, stream)
            write(out, 0, head, 0, before, (s_before,))
        write(out, head, n, stream, before, (s_before,))

    return body


def gradient_rows(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    body = gradient_body(loops.row_sum(term, next_vector(formula)), formula)

    @combine.combining
    def write(first, stop, n, out, past, arguments):
        dy, y, dx = arguments
        dys, ys = dy.data + first * dy.step, y.data + first * y.step
        body(range(stop - first), n, dys, dy.step, ys, y.step, out, dx.step, past)

    @kernel
    def by_rows(rows: Units, n, dy: Rows, y: Rows, dx: Rows, buffer: Private, stream):
        write(rows.start, rows.stop, n, dx, buffer, stream, (dy, y, dx))

    return by_rows


def gradient_rows_in_place(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    body = gradient_body(loops.row_sum(term, variants.no_step), formula)

    @kernel
    def by_rows_in_place(block: variants.Block):
        dy, n = block.values, block.n
        body(range(block.rows), n, dy, n, block.other, n, dy, n, 0)

    return by_rows_in_place
