"""Softmax, log-softmax and their gradients of short rows: as many as a vector has lanes are transposed into columns."""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops import combine
from opgrad.cpu.loops.transpose import transpose_in, transpose_out
from opgrad.cpu.softmax import variants
from opgrad.cpu.softmax.columns import (
    gradient_lines,
    log_softmax_lines,
    softmax_lines,
)


@inline
def ask_for_rows(x, count: int) -> None:
    """Bring the next rows' elements to the cache while these are computed."""
    for i in range(0, count, v.lanes(x)):
        v.prefetch(x, i)


def transposed(lines: Callable[..., Vector]) -> Kernel:
    def write(first, stop, n, out, past, arguments):
        x, y, tile = arguments
        w = v.lanes(tile)
        for row in range(first, stop, w):
            filled = min(w, stop - row)
            transpose_in(tile, x.data + row * x.step, x.step, n, filled)
            ask_for_rows(x.data + (row + w) * x.step, w * n)
            lines(tile, w, n, v.is_fine(x.data), 0)
            transpose_out(out + (row - first) * y.step, y.step, tile, n, filled)

    write_rows = combine.combining(write, streams=False)

    @kernel
    def by_transposed_rows(units: Units, count, n, x: Rows, y: Rows, tile: Private, buffer: Private, stream):
        w = v.lanes(tile)
        write_rows(units.start * w, min(units.stop * w, count), n, y, buffer, w, stream, (x, y, tile))

    return by_transposed_rows


def transposed_in_place(lines: Callable[..., Vector]) -> Kernel:
    @kernel
    def by_transposed_rows_in_place(block: variants.Block):
        w, n, tile = v.lanes(block.values), block.n, block.tile
        for row in range(0, block.rows, w):
            xs, filled = block.values + row * n, min(w, block.rows - row)
            transpose_in(tile, xs, n, n, filled)
            found = lines(tile, w, n, True, block.inf_as_zero)
            v.store_masked(block.stats, row, found, v.first(block.stats, filled))
            transpose_out(xs, n, tile, n, filled)

    return by_transposed_rows_in_place


softmax_transposed = transposed(softmax_lines(variants.PLAIN_COLUMNS))
log_softmax_transposed = transposed(log_softmax_lines(variants.PLAIN_COLUMNS))


def gradient_body(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Callable[..., None]:
    """dx = formula(dy, y, sum(term(dy, y))) for as many rows as a vector has lanes, or fewer."""
    lines = gradient_lines(term, formula)

    @inline
    def body(dy, dy_row: int, y, y_row: int, dx, dx_row: int, n: int, filled: int, dy_tile, y_tile) -> None:
        transpose_in(dy_tile, dy, dy_row, n, filled)
        transpose_in(y_tile, y, y_row, n, filled)
        lines(dy_tile, y_tile, v.lanes(dy_tile), n)
        transpose_out(dx, dx_row, dy_tile, n, filled)

    return body


def gradient_transposed(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    body = gradient_body(term, formula)

    def write(first, stop, n, out, past, arguments):
        dy, y, dx, dy_tile, y_tile = arguments
        w = v.lanes(dy_tile)
        for row in range(first, stop, w):
            dys, ys, dxs = dy.data + row * dy.step, y.data + row * y.step, out + (row - first) * dx.step
            ask_for_rows(dys + w * dy.step, w * n)
            ask_for_rows(ys + w * y.step, w * n)
            body(dys, dy.step, ys, y.step, dxs, dx.step, n, min(w, stop - row), dy_tile, y_tile)

    write_rows = combine.combining(write, streams=False)

    @kernel
    def by_transposed_rows(
        units: Units, count, n, dy: Rows, y: Rows, dx: Rows, dy_tile: Private, y_tile: Private, buffer: Private, stream
    ):
        w, arguments = v.lanes(dy_tile), (dy, y, dx, dy_tile, y_tile)
        write_rows(units.start * w, min(units.stop * w, count), n, dx, buffer, w, stream, arguments)

    return by_transposed_rows


def gradient_transposed_in_place(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    body = gradient_body(term, formula)

    @kernel
    def by_transposed_rows_in_place(block: variants.Block):
        w, n, tile = v.lanes(block.values), block.n, block.tile
        half = w // 2
        y_tile = tile + (n + half - 1) // half * half * w
        for row in range(0, block.rows, w):
            dy = block.values + row * n
            body(dy, n, block.other + row * n, n, dy, n, n, min(w, block.rows - row), tile, y_tile)

    return by_transposed_rows_in_place
