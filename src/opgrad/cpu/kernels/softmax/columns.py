"""Softmax, log-softmax and their gradients along axes that are not the last in memory: each lane is a row.

A unit is a strip of columns as wide as a vector. A plain kernel writes a whole strip past the cache while it reduces
the next one.
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Private, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.softmax import variants
from opgrad.cpu.kernels.softmax.rows import Block

# --- a strip in place: a buffer, or a tile of transposed rows -------------------------------------------------------


@inline
def log_sum_exp(largest: Vector, m: Vector, s) -> Vector:
    """The log-sum-exp of each column.

    m: the numbers that were subtracted, which are the largest if these are finite.
    """
    top, compensation = lse.exp_pair(m, lse.scale_for(m))
    return largest + v.select(s[0] < 1.0, 0.0, lse.column_log_of_total(s, m, top, compensation))


def softmax_lines(variant: variants.Variant, meanwhile: Callable[..., None]) -> Callable[..., Vector]:
    """x = softmax(x) down as many columns as a vector has lanes; returns the log-sum-exp of each.

    `fine`: whether the result shows the sums' last digits. `ahead`, `before`: as for column_sum_exp.
    """
    subtracted, divide, quotient = variant.subtracted, variant.divide, variant.quotient
    add_up = loops.column_sum_exp(meanwhile, variant.sums)

    @inline
    def lines(x, x_n: int, n: int, fine, inf_as_zero: int, ahead, before) -> Vector:
        mask = v.first(x, v.lanes(x))
        largest = loops.column_max(x, x_n, n, True, mask)
        m = subtracted(x, largest)
        s = add_up(x, x_n, n, True, mask, m, x, x_n, ahead, before)
        divisor = divide(x, s, m, inf_as_zero)
        for i in range(n):
            v.store(x, i * x_n, quotient(v.load(x, i * x_n), divisor, fine))
        return log_sum_exp(largest, m, s)

    return lines


def log_softmax_lines(variant: variants.Variant, meanwhile: Callable[..., None]) -> Callable[..., Vector]:
    """x = log_softmax(x) down as many columns as a vector has lanes; returns the log-sum-exp of each."""
    subtracted, count_of = variant.subtracted, variant.count_of
    add_rest = loops.column_rest(meanwhile, variant.rests)

    @inline
    def lines(x, x_n: int, n: int, fine, inf_as_zero: int, ahead, before) -> Vector:
        mask = v.first(x, v.lanes(x))
        largest = loops.column_max(x, x_n, n, True, mask)
        m = subtracted(x, largest)
        rest, count = add_rest(x, x_n, n, True, mask, m, ahead, before)
        log_s = lse.column_log_of_sum(rest, count_of(largest, count), m)
        for i in range(n):
            v.store(x, i * x_n, (v.load(x, i * x_n) - largest) - log_s)
        return largest + log_s

    return lines


def gradient_lines(
    term: Callable[..., Vector], formula: Callable[..., Vector], meanwhile: Callable[..., None]
) -> Callable[..., None]:
    """dy = formula(dy, y, sum(term(dy, y))) down as many columns as a vector has lanes."""
    add_up = loops.column_sum(term, meanwhile)

    @inline
    def lines(dy, y, step: int, n: int, ahead, before) -> None:
        s = add_up(dy, step, y, step, n, True, v.first(dy, v.lanes(dy)), ahead, before)
        for i in range(n):
            v.store(dy, i * step, formula(v.load(dy, i * step), v.load(y, i * step), s))

    return lines


def columns_in_place(lines: Callable[..., Vector]) -> Kernel:
    @kernel
    def by_columns_in_place(block: Block):
        for j in range(0, block.width, v.lanes(block.values)):
            x = block.values + j
            v.store(block.stats, j, lines(x, block.width, block.n, True, block.inf_as_zero, x, 0))

    return by_columns_in_place


def gradient_columns_in_place(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    lines = gradient_lines(term, formula, loops.nothing)

    @kernel
    def by_columns_in_place(block: Block):
        for j in range(0, block.width, v.lanes(block.values)):
            dy, y = block.values + j, block.other + j
            lines(dy, y, block.width, block.n, (dy, y), 0)

    return by_columns_in_place


# --- the caller's arrays -------------------------------------------------------------------------------------------


@kernel
def softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, e: Private, done: Private, keep, stream):
    w, zero = v.lanes(x.data), v.full(x.data, 0.0)
    out, pending, divisor = y.data, 0, (zero, zero)
    for unit in units:
        o, j, whole, mask = loops.strip_of(unit, strips, y, y, w, stream)
        if j >= strips.inner:
            continue
        xs, ys = x.data + (o * x.outer + j), y.data + (o * y.outer + j)
        m = loops.column_max(xs, x.step, n, whole, mask)
        before = out, y.step, pending, done, w, (divisor, v.is_fine(xs))
        s = loops.sum_exp_dividing_columns(xs, x.step, n, whole, mask, m, e, keep * w, xs + w, before)
        out, divisor = ys, lse.column_reciprocal(s)
        e, done = done, e
        past = loops.streams_columns(ys, y.step, stream)
        pending = past if whole and keep else 0
        if not pending:
            for i in range(n):
                at = i * x.step
                value = v.load(done, i * w) if keep else lse.exp_scaled(get(xs, at, whole, mask), lse.scale_for(m))
                put(ys, i * y.step, lse.quotient(value, divisor, v.is_fine(xs)), whole, mask, past)
    if pending:
        loops.write_quotient_column(out, y.step, n, done, w, (divisor, v.is_fine(out)))


@kernel
def log_softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, stream):
    w, zero = v.lanes(x.data), v.full(x.data, 0.0)
    out, pending, before, m_before, log_before = y.data, 0, x.data, zero, zero
    for unit in units:
        o, j, whole, mask = loops.strip_of(unit, strips, y, y, w, stream)
        if j >= strips.inner:
            continue
        xs, ys = x.data + (o * x.outer + j), y.data + (o * y.outer + j)
        m = loops.column_max(xs, x.step, n, whole, mask)
        rest, count = loops.add_rest_logging_columns(
            xs, x.step, n, whole, mask, m, xs + w, (out, y.step, pending, before, x.step, (m_before, log_before))
        )
        out, before, m_before, log_before = ys, xs, m, lse.column_log_of_sum(rest, count, m)
        pending = loops.streams_columns(ys, y.step, stream) if whole else 0
        if not pending:
            for i in range(n):
                put(ys, i * y.step, (get(xs, i * x.step, whole, mask) - m) - log_before, whole, mask, 0)
    if pending:
        loops.write_log_column(out, y.step, n, before, x.step, (m_before, log_before))


def gradient_columns(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y)))."""
    value = loops.of_two_strips(formula)
    add_up = loops.column_sum(term, loops.writing(value))

    @kernel
    def by_columns(units: Units, strips: Strips, n, dy: Columns, y: Columns, dx: Columns, stream):
        w, steps = v.lanes(dy.data), (dy.step, y.step)
        out, pending, arrays, s_before = dx.data, 0, (dy.data, y.data), v.full(dy.data, 0.0)
        for unit in units:
            o, j, whole, mask = loops.strip_of(unit, strips, dy, dx, w, stream)
            if j >= strips.inner:
                continue
            dys, ys, dxs = dy.data + (o * dy.outer + j), y.data + (o * y.outer + j), dx.data + (o * dx.outer + j)
            before = out, dx.step, pending, arrays, steps, (s_before,)
            s = add_up(dys, dy.step, ys, y.step, n, whole, mask, (dys + w, ys + w), before)
            out, arrays, s_before = dxs, (dys, ys), s
            pending = loops.streams_columns(dxs, dx.step, stream) if whole else 0
            if not pending:
                for i in range(n):
                    found = formula(get(dys, i * dy.step, whole, mask), get(ys, i * y.step, whole, mask), s)
                    put(dxs, i * dx.step, found, whole, mask, 0)
        if pending:
            for i in range(n):
                v.store_streaming(out, i * dx.step, value(arrays, steps, i, (s_before,)))

    return by_columns
