"""The kernel of the gradient of resizing: rows of dx, each of a few rows of dy, and then of neighbours in the row."""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Units
from opgrad.cpu.compiler.words import load_f64, load_word
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import write_same
from opgrad.cpu.kernels.loops.weighted import Along, add_rows

PIECE: Final = 2048  # elements of a row whose size stays: their sums remain in the first-level cache
ROWS: Final = 4  # rows for which a table is read once


@inline
def combine_rows(lines, rows: int, sums, length: int, row) -> None:
    """lines[r, i] = the weighted sum of the elements of sums[r] that are the sources of i, for up to four rows r.

    Lines behind the last row get what it gets.
    """
    s, t, u = sums + min(1, rows - 1) * length, sums + min(2, rows - 1) * length, sums + (rows - 1) * length
    zero, at = v.number(sums, 0.0), load_word(row.starts, 0)
    for i in range(row.size):
        end = load_word(row.starts, i + 1)
        a, b, c, d = zero, zero, zero, zero
        while at < end:
            stop = min(at + CHUNK, end)
            e, f, g, h = zero, zero, zero, zero
            while at < stop:
                o, weight = load_word(row.sources, at), v.number(sums, load_f64(row.weights, at))
                e += v.load_one(sums, o) * weight
                f += v.load_one(s, o) * weight
                g += v.load_one(t, o) * weight
                h += v.load_one(u, o) * weight
                at += 1
            a, b, c, d = a + e, b + f, c + g, d + h
        v.store_one(lines, i, a)
        v.store_one(lines, row.size + i, b)
        v.store_one(lines, 2 * row.size + i, c)
        v.store_one(lines, 3 * row.size + i, d)


@kernel
def gather_rows(
    units: Units, depth: Along, height: Along, width: Along, same, pieces, piece, dy: Pointer, dx: Pointer,
    sums: Private, chunk: Private, lines: Private,
):  # fmt: skip
    """A unit is up to four rows of dx that follow each other in a plane, or one of so many pieces of them.

    same: whether the size of rows stays. Rows whose elements are combined stand in `lines` first, as vectors convert
    them faster than single numbers.
    """
    groups = (height.size + ROWS - 1) // ROWS
    for unit in units:
        begin = unit % pieces * piece
        group = unit // pieces
        h, outer = group % groups * ROWS, group // groups
        plane, d = outer // depth.size, outer % depth.size
        n, rows = min(piece, width.count - begin), min(ROWS, height.size - h)
        out = dx + ((outer * height.size + h) * width.size + begin)
        for r in range(rows):
            line = sums + r * piece
            add_rows(line, dy, plane, d, h + r, depth, height, width.count, begin, n, 1.0, chunk)
            if same:
                write_same(out + r * width.size, 0, n, 0, (line,), ())
        if not same:
            combine_rows(lines, rows, sums, piece, width)
            write_same(out, 0, rows * width.size, 0, (lines,), ())
