"""Softmax, log-softmax and their gradients of short rows: as many as a vector has lanes are transposed into columns."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.transpose import transpose_in, transpose_out
from opgrad.cpu.softmax import forms
from opgrad.cpu.softmax.columns import (
    gradient_lines,
    log_softmax_in_place,
    log_softmax_lines,
    log_sum_exp,
    softmax_in_place,
    softmax_lines,
)

_softmax = softmax_lines(forms.largest_of_column, forms.divisor_of_column)
_log_softmax = log_softmax_lines(forms.largest_of_column, forms.count_of_column)


@kernel
def softmax_transposed(units: Units, count, n, x: Rows, y: Rows, tile: Private):
    w = v.lanes(tile)
    for row in range(units.start * w, units.stop * w, w):
        filled = min(w, count - row)
        transpose_in(tile, x.data + row * x.step, x.step, n, filled)
        _softmax(tile, w, n, v.is_fine(x.data), 0)
        transpose_out(y.data + row * y.step, y.step, tile, n, filled)


@kernel
def log_softmax_transposed(units: Units, count, n, x: Rows, y: Rows, tile: Private):
    w = v.lanes(tile)
    for row in range(units.start * w, units.stop * w, w):
        filled = min(w, count - row)
        transpose_in(tile, x.data + row * x.step, x.step, n, filled)
        _log_softmax(tile, w, n)
        transpose_out(y.data + row * y.step, y.step, tile, n, filled)


@kernel
def softmax_transposed_in_place(
    values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
):
    w = v.lanes(values)
    for row in range(0, rows, w):
        xs, filled = values + row * n, min(w, rows - row)
        transpose_in(tile, xs, n, n, filled)
        largest, m, s = softmax_in_place(tile, w, n, True, inf_as_zero)
        v.store_masked(stats, row, log_sum_exp(largest, m, s), v.first(stats, filled))
        transpose_out(xs, n, tile, n, filled)


@kernel
def log_softmax_transposed_in_place(
    values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
):
    w = v.lanes(values)
    for row in range(0, rows, w):
        xs, filled = values + row * n, min(w, rows - row)
        transpose_in(tile, xs, n, n, filled)
        v.store_masked(stats, row, log_softmax_in_place(tile, w, n), v.first(stats, filled))
        transpose_out(xs, n, tile, n, filled)


def gradient_body(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Callable[..., None]:
    """dx = formula(dy, y, sum(term(dy, y))) for as many rows as a vector has lanes, or fewer."""
    lines = gradient_lines(term, formula)

    @inline
    def body(
        dy: Any, dy_row: int, y: Any, y_row: int, dx: Any, dx_row: int, n: int, filled: int, dy_tile: Any, y_tile: Any
    ) -> None:
        transpose_in(dy_tile, dy, dy_row, n, filled)
        transpose_in(y_tile, y, y_row, n, filled)
        lines(dy_tile, y_tile, v.lanes(dy_tile), n)
        transpose_out(dx, dx_row, dy_tile, n, filled)

    return body


def gradient_transposed(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    body = gradient_body(term, formula)

    @kernel
    def transposed(units: Units, count, n, dy: Rows, y: Rows, dx: Rows, dy_tile: Private, y_tile: Private):
        w = v.lanes(dy_tile)
        for row in range(units.start * w, units.stop * w, w):
            dys, ys, dxs = dy.data + row * dy.step, y.data + row * y.step, dx.data + row * dx.step
            body(dys, dy.step, ys, y.step, dxs, dx.step, n, min(w, count - row), dy_tile, y_tile)

    return transposed


def gradient_transposed_in_place(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    body = gradient_body(term, formula)

    @kernel
    def transposed_in_place(
        values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        w = v.lanes(values)
        block = w // 2
        y_tile = tile + (n + block - 1) // block * block * w
        for row in range(0, rows, w):
            dy = values + row * n
            body(dy, n, other + row * n, n, dy, n, n, min(w, rows - row), tile, y_tile)

    return transposed_in_place
