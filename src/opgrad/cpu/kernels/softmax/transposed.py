"""Softmax, log-softmax and their gradients of short rows: as many as a vector has lanes are transposed into columns.

Where an axis with few elements lies behind the reduced one, its columns together are such a row, in which they are
interleaved: in strips of columns most lanes of a vector would be idle. In the cache, on two threads, strips took so
many times as long, by the length and the number of columns (Emerald Rapids; in brackets without AVX-512):

                                            2               3               4               8
    softmax       8 to 512  float32   7 to 11 (4-9)   4.4-7.6 (3.5-5)  2.9-5.9 (3-5)   1.3-2.8 (1.2-1.7)
                            bfloat16  7 to 12 (4-7)   5.4-6.5 (4-5)    3.6-6.3 (3-3.3) 2.2-3.1 (1.9-2.3)
    softmax_grad  8 to 64   float32   2.7-5 (2-5)     1.7-2.7 (1.4-3)  1.2-2.2 (1.3-2.4)
                  8 to 64   bfloat16  6 to 11 (6-7)   5-5.7 (6)        3.2-4.8 (3-3.7) 1.3-2.6 (1.9-2.8)
"""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Private, Rows, Units
from opgrad.cpu.kernels.loops.columns import Line
from opgrad.cpu.kernels.loops.map import write_same
from opgrad.cpu.kernels.loops.rows import buffer_like as in_buffer
from opgrad.cpu.kernels.loops.rows import (
    first_line,
    holds_lines,
    next_lines,
    transpose_in,
    transpose_out,
    waiting_from,
    write_waiting,
)
from opgrad.cpu.kernels.softmax.columns import forward_lines, gradient_lines
from opgrad.cpu.kernels.softmax.reductions import of_columns

AHEAD: Final = 2  # groups between the prefetch of rows and their use


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

    @kernel
    def by_transposed_rows(units: Units, count, n, x: Rows, y: Rows, tile: Private, buffer: Private, stream):
        w = v.lanes(tile)
        write(units.start * w, min(units.stop * w, count), n, y, tile, buffer, stream, (x, tile, 1))

    @kernel
    def by_interleaved_columns(
        units: Units, count, n, inner, x: Rows, y: Rows, tile: Private, buffer: Private, stream
    ):  # fmt: skip
        w = v.lanes(tile)
        write(units.start * w, min(units.stop * w, count), n * inner, y, tile, buffer, stream, (x, tile, inner))

    return {"transposed": by_transposed_rows, "interleaved": by_interleaved_columns}


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

    @kernel
    def by_transposed_rows(
        units: Units, count, n, dy: Rows, y: Rows, dx: Rows, dy_tile: Private, y_tile: Private, buffer: Private, stream
    ):
        w = v.lanes(dy_tile)
        begin, end = units.start * w, min(units.stop * w, count)
        write(begin, end, n, dx, dy_tile, buffer, stream, (dy, y, dy_tile, y_tile, 1))

    @kernel
    def by_interleaved_columns(
        units: Units, count, n, inner, dy: Rows, y: Rows, dx: Rows, dy_tile: Private, y_tile: Private, buffer: Private,
        stream,
    ):  # fmt: skip
        w = v.lanes(dy_tile)
        begin, end = units.start * w, min(units.stop * w, count)
        write(begin, end, n * inner, dx, dy_tile, buffer, stream, (dy, y, dy_tile, y_tile, inner))

    return {"transposed": by_transposed_rows, "interleaved": by_interleaved_columns}
