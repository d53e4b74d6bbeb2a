"""Products of long signals: tiles of sums in registers, four rows by three vectors of them.

A signal is a row of numbers. `correlate` adds shifted signals times weights; `dots` takes the dot products of signals
with shifted signals. Both are what convolution's gradients come to (opgrad.cpu.convolution).
"""

import platform
from typing import Any, Final

from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel, vector_bytes
from opgrad.cpu.compiler.simd import Pointer, fma, full, lanes, load, load_one, number, reduce_add, store, store_one

MANY_REGISTERS: Final = vector_bytes() == 64 or platform.machine().lower() in ("aarch64", "arm64")  # 32, not 16
ROWS: Final = 4  # of a tile: 12 sums of two registers each leave eight of 32 for what is multiplied
COLUMNS: Final = 3
CHUNK: Final = 128  # products that are added to each other before they join the total
# Vectors of a signal that are multiplied at a time: seven signals of them, 28 KiB, stay in the first-level cache. With
# 64, windows of one element took 1.4 times as long.
BLOCK: Final = 32


@inline
def put(out: Any, i: int, v: Any, add: int) -> None:
    if add:
        store(out, i, load(out, i) + v)
    else:
        store(out, i, v)


@inline
def correlate_four(
    out: Any, pitch: int, rows: int, signals: Any, shifts: int, weights: Any, j: int, end: int, add: int
) -> None:
    """out[r, 0:3 vectors] (+)= the sum over j of weights[4 j + r] * signals[shifts[j]:]."""
    w = lanes(out)
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = full(out, 0.0)
    while j < end:
        source = signals + load_word(shifts, j)
        x, y, z = load(source, 0), load(source, w), load(source, 2 * w)
        a, b = load_one(weights, 4 * j), load_one(weights, 4 * j + 1)
        c, d = load_one(weights, 4 * j + 2), load_one(weights, 4 * j + 3)
        a0, a1, a2 = fma(x, a, a0), fma(y, a, a1), fma(z, a, a2)
        b0, b1, b2 = fma(x, b, b0), fma(y, b, b1), fma(z, b, b2)
        c0, c1, c2 = fma(x, c, c0), fma(y, c, c1), fma(z, c, c2)
        d0, d1, d2 = fma(x, d, d0), fma(y, d, d1), fma(z, d, d2)
        j += 1
    put(out, 0, a0, add)
    put(out, w, a1, add)
    put(out, 2 * w, a2, add)
    if rows > 1:
        second = out + pitch
        put(second, 0, b0, add)
        put(second, w, b1, add)
        put(second, 2 * w, b2, add)
    if rows > 2:
        third = out + 2 * pitch
        put(third, 0, c0, add)
        put(third, w, c1, add)
        put(third, 2 * w, c2, add)
    if rows > 3:
        fourth = out + 3 * pitch
        put(fourth, 0, d0, add)
        put(fourth, w, d1, add)
        put(fourth, 2 * w, d2, add)


@inline
def correlate_two(
    out: Any, pitch: int, rows: int, signals: Any, shifts: int, weights: Any, j: int, end: int, add: int
) -> None:
    """The same for two rows of four."""
    w = lanes(out)
    a0 = a1 = a2 = b0 = b1 = b2 = full(out, 0.0)
    while j < end:
        source = signals + load_word(shifts, j)
        a, b = load_one(weights, 4 * j), load_one(weights, 4 * j + 1)
        x = load(source, 0)
        a0, b0 = fma(x, a, a0), fma(x, b, b0)
        x = load(source, w)
        a1, b1 = fma(x, a, a1), fma(x, b, b1)
        x = load(source, 2 * w)
        a2, b2 = fma(x, a, a2), fma(x, b, b2)
        j += 1
    put(out, 0, a0, add)
    put(out, w, a1, add)
    put(out, 2 * w, a2, add)
    if rows > 1:
        second = out + pitch
        put(second, 0, b0, add)
        put(second, w, b1, add)
        put(second, 2 * w, b2, add)


@inline
def correlate_two_twice(
    out: Any, pitch: int, rows: int, signals: Any, shifts: int, weights: Any, j: int, end: int, add: int
) -> None:
    """As correlate_four."""
    correlate_two(out, pitch, rows, signals, shifts, weights, j, end, add)
    if rows > 2:
        correlate_two(out + 2 * pitch, pitch, rows - 2, signals, shifts, weights + 2, j, end, add)


@inline
def correlate_one(out: Any, signals: Any, shifts: int, weights: Any, j: int, end: int, add: int) -> None:
    """The same for a single row, whose weights stand side by side."""
    w = lanes(out)
    a0 = a1 = a2 = full(out, 0.0)
    while j < end:
        source = signals + load_word(shifts, j)
        a = load_one(weights, j)
        a0, a1, a2 = fma(load(source, 0), a, a0), fma(load(source, w), a, a1), fma(load(source, 2 * w), a, a2)
        j += 1
    put(out, 0, a0, add)
    put(out, w, a1, add)
    put(out, 2 * w, a2, add)


# With 16 registers the sums of four rows would spill: 50 billion operations a second instead of 95.
correlate_rows = correlate_four if MANY_REGISTERS else correlate_two_twice

# Words of a tile of `correlate`: where its weights and its shifts begin, how many shifts there are, where its first row
# is written, which channel that is, and how many rows there are.
WEIGHTS: Final = 0
SHIFTS: Final = 1
TERMS: Final = 2
OUT: Final = 3
CHANNEL: Final = 4
TILE_ROWS: Final = 5
TILE: Final = 6


@kernel
def correlate(
    part, per_part, units, blocks, tiles, tile_count, shifts, row_step, one,
    signals: Pointer, signal_group, front, weights: Pointer, weight_group, out: Pointer, out_group,
):  # fmt: skip
    """A unit is a block of positions in one group: all tiles of rows, so that its signals are read from the cache."""
    width = COLUMNS * lanes(out)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        group, begin = unit // blocks, unit % blocks * width
        here = signals + (group * signal_group + front + begin)
        for t in range(tile_count):
            tile = tiles + 8 * TILE * t
            factors = weights + (group * weight_group + load_word(tile, WEIGHTS))
            places, terms = shifts + 8 * load_word(tile, SHIFTS), load_word(tile, TERMS)
            to = out + (group * out_group + load_word(tile, OUT) + begin)
            for j in range(0, terms, CHUNK):
                end = min(j + CHUNK, terms)
                if one:
                    correlate_one(to, here, places, factors, j, end, j)
                else:
                    correlate_rows(to, row_step, load_word(tile, TILE_ROWS), here, places, factors, j, end, j)


@kernel
def pack_weights(
    part, per_part, units, tile_count, tiles, sources, rows, channel_step, source_group,
    w: Pointer, weights: Pointer, weight_group,
):  # fmt: skip
    """weights[rows j + r] = w[sources[j] + (channel + r) * channel_step] for each tile, 0 for rows that lack."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        group, tile = unit // tile_count, tiles + 8 * TILE * (unit % tile_count)
        to = weights + (group * weight_group + load_word(tile, WEIGHTS))
        source = w + (group * source_group + load_word(tile, CHANNEL) * channel_step)
        places, has = sources + 8 * load_word(tile, SHIFTS), load_word(tile, TILE_ROWS)
        for j in range(load_word(tile, TERMS)):
            of, at = source + load_word(places, j), rows * j
            if has == ROWS:
                a, b = load_one(of, 0), load_one(of, channel_step)
                c, d = load_one(of, 2 * channel_step), load_one(of, 3 * channel_step)
                store_one(to, at, a)
                store_one(to, at + 1, b)
                store_one(to, at + 2, c)
                store_one(to, at + 3, d)
            else:
                for r in range(rows):
                    store_one(to, at + r, load_one(of, r * channel_step) if r < has else number(weights, 0.0))


@inline
def put_dot(sums: Any, i: int, v: Any, add: int) -> None:
    x = reduce_add(v)
    if add:
        x += load_one(sums, i)
    store_one(sums, i, x)


@inline
def dots_four(
    sums: Any, pitch: int, rows: int, columns: int, a: Any, a_row: int, x: Any, y: Any, z: Any, n: int, add: int
) -> None:
    """sums[r, c] (+)= the dot product of row r of a, and x, y or z, over n numbers, whole vectors."""
    w, i = lanes(a), 0
    b, c, d = a + min(1, rows - 1) * a_row, a + min(2, rows - 1) * a_row, a + min(3, rows - 1) * a_row
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = full(a, 0.0)
    while i < n:
        u, v, t = load(x, i), load(y, i), load(z, i)
        f = load(a, i)
        a0, a1, a2 = fma(f, u, a0), fma(f, v, a1), fma(f, t, a2)
        f = load(b, i)
        b0, b1, b2 = fma(f, u, b0), fma(f, v, b1), fma(f, t, b2)
        f = load(c, i)
        c0, c1, c2 = fma(f, u, c0), fma(f, v, c1), fma(f, t, c2)
        f = load(d, i)
        d0, d1, d2 = fma(f, u, d0), fma(f, v, d1), fma(f, t, d2)
        i += w
    put_dots(sums, columns, a0, a1, a2, add)
    if rows > 1:
        put_dots(sums + pitch, columns, b0, b1, b2, add)
    if rows > 2:
        put_dots(sums + 2 * pitch, columns, c0, c1, c2, add)
    if rows > 3:
        put_dots(sums + 3 * pitch, columns, d0, d1, d2, add)


@inline
def put_dots(sums: Any, columns: int, u: Any, v: Any, t: Any, add: int) -> None:
    put_dot(sums, 0, u, add)
    if columns > 1:
        put_dot(sums, 1, v, add)
    if columns > 2:
        put_dot(sums, 2, t, add)


@inline
def dots_two(
    sums: Any, pitch: int, rows: int, columns: int, a: Any, a_row: int, x: Any, y: Any, z: Any, n: int, add: int
) -> None:
    """The same for two rows."""
    w, i = lanes(a), 0
    b = a + min(1, rows - 1) * a_row
    a0 = a1 = a2 = b0 = b1 = b2 = full(a, 0.0)
    while i < n:
        f, g = load(a, i), load(b, i)
        u = load(x, i)
        a0, b0 = fma(f, u, a0), fma(g, u, b0)
        u = load(y, i)
        a1, b1 = fma(f, u, a1), fma(g, u, b1)
        u = load(z, i)
        a2, b2 = fma(f, u, a2), fma(g, u, b2)
        i += w
    put_dots(sums, columns, a0, a1, a2, add)
    if rows > 1:
        put_dots(sums + pitch, columns, b0, b1, b2, add)


@inline
def dots_two_twice(
    sums: Any, pitch: int, rows: int, columns: int, a: Any, a_row: int, x: Any, y: Any, z: Any, n: int, add: int
) -> None:
    """As dots_four."""
    dots_two(sums, pitch, rows, columns, a, a_row, x, y, z, n, add)
    if rows > 2:
        dots_two(sums + 2 * pitch, pitch, rows - 2, columns, a + 2 * a_row, a_row, x, y, z, n, add)


@inline
def dots_one(sums: Any, columns: int, a: Any, x: Any, y: Any, z: Any, n: int, add: int) -> None:
    """The same for a single row."""
    w, i = lanes(a), 0
    a0 = a1 = a2 = full(a, 0.0)
    while i < n:
        f = load(a, i)
        a0, a1, a2 = fma(f, load(x, i), a0), fma(f, load(y, i), a1), fma(f, load(z, i), a2)
        i += w
    put_dots(sums, columns, a0, a1, a2, add)


dots_rows = dots_four if MANY_REGISTERS else dots_two_twice


@kernel
def dots(
    part, per_part, units, row_ranges, rows_per_range, ranges, per_range, rows, columns, length, shifts, add, one,
    a: Pointer, a_group, a_row, front, x: Pointer, x_group, sums: Pointer,
):  # fmt: skip
    """sums[r, c] (+)= the dot product of row r of a and of x from shifts[c] on.

    A unit is a range of rows and a range of columns in one group. A block of each of its columns stays in the
    second-level cache while all its rows pass by.
    """
    block = BLOCK * lanes(a)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        group = unit // (row_ranges * ranges)
        first_row, begin = unit // ranges % row_ranges * rows_per_range, unit % ranges * per_range
        signals = x + group * x_group
        for start in range(0, length, block):
            n = min(block, length - start)
            for row in range(first_row, min(first_row + rows_per_range, rows), ROWS):
                has = min(ROWS, rows - row)
                of = a + (group * a_group + row * a_row + front + start)
                to = sums + (group * rows + row) * columns
                for column in range(begin, min(begin + per_range, columns), COLUMNS):
                    given = min(COLUMNS, columns - column)
                    u = signals + (load_word(shifts, column) + start)
                    v = signals + (load_word(shifts, column + min(1, given - 1)) + start)
                    t = signals + (load_word(shifts, column + given - 1) + start)
                    if one:
                        dots_one(to + column, given, of, u, v, t, n, add + start)
                    else:
                        dots_rows(to + column, columns, has, given, of, a_row, u, v, t, n, add + start)


@kernel
def totals(part, per_part, rows, length, pitch, front, add, signals: Pointer, sums: Pointer):
    """sums[r] (+)= the sum of row r of the signals, over whole vectors."""
    w = lanes(signals)
    for row in range(part * per_part, min((part + 1) * per_part, rows)):
        signal = signals + (row * pitch + front)
        total = full(signals, 0.0)
        for start in range(0, length, BLOCK * w):
            some = full(signals, 0.0)
            for i in range(start, min(start + BLOCK * w, length), w):
                some = some + load(signal, i)
            total = total + some
        put_dot(sums, row, total, add)
