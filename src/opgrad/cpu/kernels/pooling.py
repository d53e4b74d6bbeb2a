"""Kernels of the gradients of pooling and of resizing.

A plane of x has `depth` x `height` x `width` elements, of which the first ones may be 1. For each axis tables hold the
sources of an element and their weights: rows of a result are weighted sums of other rows.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Private, Units
from opgrad.cpu.compiler.words import load_f64, load_word, store_word
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import mapped, write_same, write_times, write_zeros


class Along(NamedTuple):
    """An axis: how many elements the result and the source have along it, and the addresses of its tables.

    Element i is the sum over sources[starts[i]:starts[i + 1]], with the weights at the same places.
    """

    size: int
    count: int
    starts: int
    sources: int
    weights: int


_write_sum = mapped(lambda sums, x, factor: sums + x * factor)


@inline
def add_times(sums, x, n: int, factor) -> None:
    """sums[0:n] += x * factor"""
    _write_sum(sums, 0, n, 0, (sums, x), (factor,))


@inline
def add_rows(sums, x, plane: int, d: int, h: int, depth, height, row: int, begin: int, n: int, factor, chunk) -> None:
    """sums[0:n] = the weighted sum of the rows of x that are the sources of row (d, h) of the result.

    Of each row of x, only the n elements from `begin` on are read. plane: the number of the plane, which x and the
    result share. row: how many elements a row of x has. factor: a factor of all weights. chunk: memory for n elements,
    in which CHUNK rows are summed before they are added to `sums`.
    """
    begun, end_h = 0, load_word(height.starts, h + 1)
    for a in range(load_word(depth.starts, d), load_word(depth.starts, d + 1)):
        outer = plane * depth.count + load_word(depth.sources, a)
        for b in range(load_word(height.starts, h), end_h, CHUNK):
            target = chunk if begun else sums
            for c in range(b, min(b + CHUNK, end_h)):
                weight = v.number(sums, load_f64(depth.weights, a) * load_f64(height.weights, c) * factor)
                source = x + ((outer * height.count + load_word(height.sources, c)) * row + begin)
                if c == b:
                    write_times(target, 0, n, 0, (source,), (weight,))
                else:
                    add_times(target, source, n, weight)
            if begun:
                add_times(sums, chunk, n, 1.0)
            begun = 1
    if not begun:
        write_zeros(sums, 0, n, 0)


# --- pooling: a plane (one image's channel) or a row of one at a time ------------------------------------------------

SIZES = (int, int, int)  # the annotation of a plane's sizes; those that an image lacks are 1


@kernel
def check_planes(planes: Units, part: Part, windows, size, indices: Pointer, found):
    """found[part] = the first index in this part that lies outside its plane, or -1."""
    wrong = -1
    for plane in planes:
        outside = 0
        for j in range(plane * windows, (plane + 1) * windows):
            element = v.load_one(indices, j) - plane * size
            outside |= element | (size - 1 - element)  # negative if one of them is
        if outside < 0:
            for j in range(plane * windows, (plane + 1) * windows):
                element = v.load_one(indices, j) - plane * size
                if element < 0 or element >= size:
                    wrong = j
                    break
            break
    store_word(found, part, wrong)


@inline
def in_rows(element: int, sizes) -> int:
    """The number in C order of an element whose number counts the first axis fastest. sizes: of a plane's axes."""
    depth, height, width = sizes
    d, h, w = element % depth, element // depth % height, element // (depth * height)
    return (d * height + h) * width + w


@inline
def _add_plane(into, begin: int, end: int, first: int, sizes, columns_first: int, dy, indices) -> None:
    """into = 0; into[indices[j] - first] += dy[j] for j in [begin, end)."""
    write_zeros(into, 0, sizes[0] * sizes[1] * sizes[2], 0)
    if columns_first:
        for j in range(begin, end):
            element = in_rows(v.load_one(indices, j) - first, sizes)
            v.store_one(into, element, v.load_one(into, element) + v.load_one(dy, j))
    else:
        for j in range(begin, end):
            element = v.load_one(indices, j) - first
            v.store_one(into, element, v.load_one(into, element) + v.load_one(dy, j))


@kernel
def add_to_maxima(
    planes: Units, windows, sizes: SIZES, columns_first, dy: Pointer, indices: Pointer, dx: Pointer
):  # fmt: skip
    """dx = 0; dx[indices[j]] += dy[j], plane by plane."""
    size = sizes[0] * sizes[1] * sizes[2]
    for plane in planes:
        begin, first = plane * windows, plane * size
        _add_plane(dx + first, begin, begin + windows, first, sizes, columns_first, dy, indices)


@kernel
def add_to_maxima_apart(
    planes: Units, windows, sizes: SIZES, columns_first, dy: Pointer, indices: Pointer, dx: Pointer, sums: Private,
    addends: Private,
):  # fmt: skip
    """`add_to_maxima` with sums in float32, since half precision would round after each addition.

    Vectors then convert the sums, which is faster than converting single numbers.
    """
    size = sizes[0] * sizes[1] * sizes[2]
    for plane in planes:
        begin, first = plane * windows, plane * size
        write_same(addends, 0, windows, 0, (dy + begin,), ())
        _add_plane(sums, 0, windows, first, sizes, columns_first, addends, indices + begin)
        write_same(dx + first, 0, size, 0, (sums,), ())


@inline
def sum_some_windows(line, row, sums, from_k: int, to_k: int) -> None:
    """line[i] = the sum of `sums` over the windows along the axis in which i is one of elements from_k to to_k - 1."""
    write_zeros(line, 0, row.size, 0)
    for k in range(from_k, to_k):
        offset = k * row.dilation - row.begin
        low, high = max(0, -offset), min(row.count, row.size - offset)
        if low < high:
            add_times(line + (low + offset), sums + low, high - low, 1.0)


@inline
def sum_windows(line, row, sums, chunk) -> None:
    """line[i] = the sum of `sums` over all windows that i is in."""
    sum_some_windows(line, row, sums, 0, min(row.kernel, CHUNK))
    for k in range(CHUNK, row.kernel, CHUNK):
        sum_some_windows(chunk, row, sums, k, min(k + CHUNK, row.kernel))
        add_times(line, chunk, row.size, 1.0)


class RowWindows(NamedTuple):
    """Windows along a row, side by side: elements, windows, their kernel and dilation, the padding before the first.

    shares: the address of 1 / elements of each window. same: whether these are all equal.
    """

    size: int
    count: int
    kernel: int
    dilation: int
    begin: int
    shares: int
    same: int


@kernel
def share_out(
    rows: Units, depth: Along, height: Along, new_rows, width: RowWindows, dy: Pointer, dx: Pointer,
    sums: Private, line: Private, chunk: Private,
):  # fmt: skip
    """Write rows of dx: first add the rows of dy whose windows contain the row, then the windows along the row.

    new_rows: the table that tells whether a row's windows differ from those of the row before.
    """
    for row in rows:
        plane, d, h = row // (depth.size * height.size), row // height.size % depth.size, row % height.size
        if row == rows.start or load_word(new_rows, h):
            share = load_f64(width.shares, 0)
            add_rows(sums, dy, plane, d, h, depth, height, width.count, 0, width.count, share, chunk)
            if not width.same:
                for o in range(width.count):
                    relative = load_f64(width.shares, o) / load_f64(width.shares, 0)
                    v.store_one(sums, o, v.load_one(sums, o) * v.number(dx, relative))
            sum_windows(line, width, sums, chunk)
        write_same(dx + row * width.size, 0, width.size, 0, (line,), ())


# --- resizing: rows of dx, each of a few rows of dy, and then of neighbours in the row -------------------------------

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
