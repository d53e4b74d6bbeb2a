"""Softmax, log-softmax and their gradients along axes that are not the last in memory: each lane is a row.

A unit is a strip of columns as wide as a vector. A plain kernel writes a whole strip past the cache while it reduces
the next one.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Pointer, Private, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.columns import (
    add_rest_logging_columns,
    column_max,
    column_sum,
    get,
    put,
    streams_columns,
    sum_exp_scaling_columns,
    write_log_column,
    write_scaled_column,
)
from opgrad.cpu.numerics.logsumexp import (
    column_divisor,
    column_log_of_sum,
    column_log_of_total,
    exp_pair,
    exp_scaled,
    scale_for,
    scaled,
)
from opgrad.cpu.softmax import forms

# --- a strip in place: a buffer, or a tile of transposed rows -------------------------------------------------------


def softmax_lines(subtracted: Callable[..., Vector], divide: Callable[..., Any]) -> Callable[..., Any]:
    """x = softmax(x) down as many columns as a vector has lanes; the largest of each, what was subtracted, the sums.

    `fine`: whether the result shows the sums' last digits.
    """

    @inline
    def lines(x: Any, x_n: int, n: int, fine: Any, inf_as_zero: int) -> Any:
        mask, zero = v.first(x, v.lanes(x)), v.full(x, 0.0)
        largest = column_max(x, x_n, n, True, mask)
        m = subtracted(largest)
        s = sum_exp_scaling_columns(x, x_n, n, True, mask, m, x, x_n, x, x_n, 0, x, x_n, ((zero, zero, zero, zero), 0))
        divisor = divide(s, m, inf_as_zero)
        for i in range(n):
            v.store(x, i * x_n, scaled(v.load(x, i * x_n), divisor, fine))
        return largest, m, s

    return lines


def log_softmax_lines(subtracted: Callable[..., Vector], count_of: Callable[..., Vector]) -> Callable[..., Vector]:
    """x = log_softmax(x) down as many columns as a vector has lanes; the log-sum-exp of each."""

    @inline
    def lines(x: Any, x_n: int, n: int) -> Vector:
        mask = v.first(x, v.lanes(x))
        largest = column_max(x, x_n, n, True, mask)
        m = subtracted(largest)
        rest, count = add_rest_logging_columns(x, x_n, n, True, mask, m, x, x_n, 0, x, x_n, (m, m))
        log_s = column_log_of_sum(rest, count_of(largest, count), m)
        for i in range(n):
            v.store(x, i * x_n, (v.load(x, i * x_n) - largest) - log_s)
        return largest + log_s

    return lines


def gradient_lines(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Callable[..., None]:
    """dy = formula(dy, y, sum(term(dy, y))) down as many columns as a vector has lanes."""
    add_up = column_sum(term, formula)

    @inline
    def lines(dy: Any, y: Any, step: int, n: int) -> None:
        mask = v.first(dy, v.lanes(dy))
        s = add_up(dy, step, y, step, n, True, mask, dy, step, 0, dy, y, v.full(dy, 0.0))
        for i in range(n):
            v.store(dy, i * step, formula(v.load(dy, i * step), v.load(y, i * step), s))

    return lines


softmax_in_place = softmax_lines(forms.finite_of_column, forms.divisor_of_column_or_zero)
log_softmax_in_place = log_softmax_lines(forms.finite_of_column, forms.count_of_column_or_one)


@inline
def log_sum_exp(largest: Vector, m: Vector, s: Any) -> Vector:
    """The log-sum-exp by what `softmax_lines` returns."""
    top, compensation = exp_pair(m, scale_for(m))
    return largest + v.select(s[0] < 1.0, 0.0, column_log_of_total(s, m, top, compensation))


@kernel
def softmax_columns_in_place(
    values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
):
    for j in range(0, width, v.lanes(values)):
        largest, m, s = softmax_in_place(values + j, width, n, True, inf_as_zero)
        v.store(stats, j, log_sum_exp(largest, m, s))


@kernel
def log_softmax_columns_in_place(
    values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
):
    for j in range(0, width, v.lanes(values)):
        v.store(stats, j, log_softmax_in_place(values + j, width, n))


def gradient_columns_in_place(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    lines = gradient_lines(term, formula)

    @kernel
    def by_columns_in_place(
        values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        for j in range(0, width, v.lanes(values)):
            lines(values + j, other + j, width, n)

    return by_columns_in_place


# --- the caller's arrays -------------------------------------------------------------------------------------------


@kernel
def softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, e: Private, done: Private, keep, stream):
    w, zero = v.lanes(x.data), v.full(x.data, 0.0)
    out, pending, divisor = y.data, 0, (zero, zero, zero, zero)
    for unit in units:
        j = unit % strips.count * w
        xs, ys = x.data + (unit // strips.count * x.outer + j), y.data + (unit // strips.count * y.outer + j)
        whole, mask = j + w <= strips.inner, v.first(xs, strips.inner - j)
        m = column_max(xs, x.step, n, whole, mask)
        s = sum_exp_scaling_columns(
            xs, x.step, n, whole, mask, m, e, keep * w, out, y.step, pending, done, w, (divisor, v.is_fine(xs))
        )
        out, divisor = ys, column_divisor(s, m)
        e, done = done, e
        past = streams_columns(ys, y.step, stream)
        pending = past if whole and keep else 0
        if not pending:
            for i in range(n):
                value = v.load(done, i * w) if keep else exp_scaled(get(xs, i * x.step, whole, mask), scale_for(m))
                put(ys, i * y.step, scaled(value, divisor, v.is_fine(xs)), whole, mask, past)
    if pending:
        write_scaled_column(out, y.step, n, done, w, (divisor, v.is_fine(out)))


@kernel
def log_softmax_columns(units: Units, strips: Strips, n, x: Columns, y: Columns, stream):
    w, zero = v.lanes(x.data), v.full(x.data, 0.0)
    out, pending, before, m_before, log_before = y.data, 0, x.data, zero, zero
    for unit in units:
        j = unit % strips.count * w
        xs, ys = x.data + (unit // strips.count * x.outer + j), y.data + (unit // strips.count * y.outer + j)
        whole, mask = j + w <= strips.inner, v.first(xs, strips.inner - j)
        m = column_max(xs, x.step, n, whole, mask)
        rest, count = add_rest_logging_columns(
            xs, x.step, n, whole, mask, m, out, y.step, pending, before, x.step, (m_before, log_before)
        )
        out, before, m_before, log_before = ys, xs, m, column_log_of_sum(rest, count, m)
        pending = streams_columns(ys, y.step, stream) if whole else 0
        if not pending:
            for i in range(n):
                put(ys, i * y.step, (get(xs, i * x.step, whole, mask) - m) - log_before, whole, mask, 0)
    if pending:
        write_log_column(out, y.step, n, before, x.step, (m_before, log_before))


def gradient_columns(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    """dx = formula(dy, y, sum(term(dy, y)))."""
    add_up = column_sum(term, formula)

    @kernel
    def by_columns(units: Units, strips: Strips, n, dy: Columns, y: Columns, dx: Columns, stream):
        w = v.lanes(dy.data)
        out, pending, dy_before, y_before, s_before = dx.data, 0, dy.data, y.data, v.full(dy.data, 0.0)
        for unit in units:
            o, j = unit // strips.count, unit % strips.count * w
            dys, ys, dxs = dy.data + (o * dy.outer + j), y.data + (o * y.outer + j), dx.data + (o * dx.outer + j)
            whole, mask = j + w <= strips.inner, v.first(dys, strips.inner - j)
            s = add_up(dys, dy.step, ys, y.step, n, whole, mask, out, dx.step, pending, dy_before, y_before, s_before)
            out, dy_before, y_before, s_before = dxs, dys, ys, s
            pending = streams_columns(dxs, dx.step, stream) if whole else 0
            if not pending:
                for i in range(n):
                    value = formula(get(dys, i * dy.step, whole, mask), get(ys, i * y.step, whole, mask), s)
                    put(dxs, i * dx.step, value, whole, mask, 0)
        if pending:
            for i in range(n):
                value = formula(v.load(dy_before, i * dy.step), v.load(y_before, i * y.step), s_before)
                v.store_streaming(out, i * dx.step, value)

    return by_columns
