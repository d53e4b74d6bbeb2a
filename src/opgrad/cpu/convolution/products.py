"""Products of long signals: tiles of sums in registers, four rows by three vectors of them.

`correlate` adds shifted signals times weights; `dot_products` takes the dot products of signals with shifted signals.
Both are what convolution's gradients come to (opgrad.cpu.convolution).
"""

import platform
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel, vector_bytes
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.convolution.signals import Signals
from opgrad.cpu.loops.fold import sum_range

MANY_REGISTERS: Final = vector_bytes() == 64 or platform.machine().lower() in ("aarch64", "arm64")  # 32, not 16
ROWS: Final = 4  # of a tile: 12 sums of two registers each leave eight of 32 for what is multiplied
COLUMNS: Final = 3
CHUNK: Final = 128  # products that are added to each other before they join the total
# Vectors of a signal that are multiplied at a time: seven signals of them, 28 KiB, stay in the first-level cache. With
# 64, windows of one element took 1.4 times as long.
BLOCK_VECTORS: Final = 32


@inline
def store_or_add(out: Any, i: int, value: Any, add: int) -> None:
    if add:
        v.store(out, i, v.load(out, i) + value)
    else:
        v.store(out, i, value)


@inline
def store_three(out: Any, u: Any, value: Any, t: Any, add: int) -> None:
    """Store three vectors side by side, or add them to what stands there."""
    w = v.lanes(out)
    store_or_add(out, 0, u, add)
    store_or_add(out, w, value, add)
    store_or_add(out, 2 * w, t, add)


@inline
def correlate_four(
    out: Any, pitch: int, rows: int, signals: Any, shifts: int, weights: Any, j: int, end: int, add: int
) -> None:
    """out[r, 0:3 vectors] (+)= the sum over j of weights[4 j + r] * signals[shifts[j]:]."""
    w = v.lanes(out)
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = v.full(out, 0.0)
    while j < end:
        source = signals + load_word(shifts, j)
        x, y, z = v.load(source, 0), v.load(source, w), v.load(source, 2 * w)
        a, b = v.load_one(weights, 4 * j), v.load_one(weights, 4 * j + 1)
        c, d = v.load_one(weights, 4 * j + 2), v.load_one(weights, 4 * j + 3)
        a0, a1, a2 = v.fma(x, a, a0), v.fma(y, a, a1), v.fma(z, a, a2)
        b0, b1, b2 = v.fma(x, b, b0), v.fma(y, b, b1), v.fma(z, b, b2)
        c0, c1, c2 = v.fma(x, c, c0), v.fma(y, c, c1), v.fma(z, c, c2)
        d0, d1, d2 = v.fma(x, d, d0), v.fma(y, d, d1), v.fma(z, d, d2)
        j += 1
    store_three(out, a0, a1, a2, add)
    if rows > 1:
        store_three(out + pitch, b0, b1, b2, add)
    if rows > 2:
        store_three(out + 2 * pitch, c0, c1, c2, add)
    if rows > 3:
        store_three(out + 3 * pitch, d0, d1, d2, add)


@inline
def correlate_two(
    out: Any, pitch: int, rows: int, signals: Any, shifts: int, weights: Any, j: int, end: int, add: int
) -> None:
    """The same for two rows of four."""
    w = v.lanes(out)
    a0 = a1 = a2 = b0 = b1 = b2 = v.full(out, 0.0)
    while j < end:
        source = signals + load_word(shifts, j)
        a, b = v.load_one(weights, 4 * j), v.load_one(weights, 4 * j + 1)
        x = v.load(source, 0)
        a0, b0 = v.fma(x, a, a0), v.fma(x, b, b0)
        x = v.load(source, w)
        a1, b1 = v.fma(x, a, a1), v.fma(x, b, b1)
        x = v.load(source, 2 * w)
        a2, b2 = v.fma(x, a, a2), v.fma(x, b, b2)
        j += 1
    store_three(out, a0, a1, a2, add)
    if rows > 1:
        store_three(out + pitch, b0, b1, b2, add)


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
    w = v.lanes(out)
    a0 = a1 = a2 = v.full(out, 0.0)
    while j < end:
        source = signals + load_word(shifts, j)
        a = v.load_one(weights, j)
        a0, a1, a2 = (
            v.fma(v.load(source, 0), a, a0),
            v.fma(v.load(source, w), a, a1),
            v.fma(v.load(source, 2 * w), a, a2),
        )
        j += 1
    store_three(out, a0, a1, a2, add)


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


class Tiles(NamedTuple):
    """The tiles of a group: how many, and the table of their words."""

    count: int
    table: int


@kernel
def correlate(units: Units, blocks, tiles: Tiles, shifts, single, dy: Signals, weights: Rows, dx: Signals):
    """A unit is a block of positions in one group: all tiles of rows, so that its signals are read from the cache."""
    width = COLUMNS * v.lanes(dx.data)
    for unit in units:
        group, begin = unit // blocks, unit % blocks * width
        signals = dy.data + (group * dy.group + begin)
        for t in range(tiles.count):
            tile = tiles.table + 8 * TILE * t
            factors = weights.data + (group * weights.step + load_word(tile, WEIGHTS))
            offsets, terms = shifts + 8 * load_word(tile, SHIFTS), load_word(tile, TERMS)
            out = dx.data + (group * dx.group + load_word(tile, OUT) + begin)
            for j in range(0, terms, CHUNK):
                end = min(j + CHUNK, terms)
                if single:
                    correlate_one(out, signals, offsets, factors, j, end, j)
                else:
                    correlate_rows(out, dx.channel, load_word(tile, TILE_ROWS), signals, offsets, factors, j, end, j)


class Filters(NamedTuple):
    """Filters of all groups: the elements from one group to the next, and from one channel of a filter to the next."""

    data: Pointer
    group: int
    channel: int


@kernel
def pack_weights(units: Units, tiles: Tiles, sources, rows, w: Filters, weights: Rows):
    """weights[rows j + r] = w[sources[j] + (channel + r) * w.channel] for each tile, 0 for rows that lack."""
    step = w.channel
    for unit in units:
        group, tile = unit // tiles.count, tiles.table + 8 * TILE * (unit % tiles.count)
        packed = weights.data + (group * weights.step + load_word(tile, WEIGHTS))
        filters = w.data + (group * w.group + load_word(tile, CHANNEL) * step)
        offsets, tile_rows = sources + 8 * load_word(tile, SHIFTS), load_word(tile, TILE_ROWS)
        for j in range(load_word(tile, TERMS)):
            source, to = filters + load_word(offsets, j), packed + rows * j
            if tile_rows == ROWS:
                a, b = v.load_one(source, 0), v.load_one(source, step)
                c, d = v.load_one(source, 2 * step), v.load_one(source, 3 * step)
                v.store_one(to, 0, a)
                v.store_one(to, 1, b)
                v.store_one(to, 2, c)
                v.store_one(to, 3, d)
            else:
                for r in range(rows):
                    v.store_one(to, r, v.load_one(source, r * step) if r < tile_rows else v.number(to, 0.0))


@inline
def store_or_add_sum(sums: Any, i: int, value: Any, add: int) -> None:
    x = v.reduce_add(value)
    if add:
        x += v.load_one(sums, i)
    v.store_one(sums, i, x)


@inline
def dots_four(sums: Any, pitch: int, rows: int, columns: int, a: Any, a_row: int, x: Any, n: int, add: int) -> None:
    """sums[r, c] (+)= the dot product of row r of a and signal c of three, over n numbers, whole vectors."""
    w, i, (x0, x1, x2) = v.lanes(a), 0, x
    b, c, d = a + min(1, rows - 1) * a_row, a + min(2, rows - 1) * a_row, a + min(3, rows - 1) * a_row
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = v.full(a, 0.0)
    while i < n:
        u, value, t = v.load(x0, i), v.load(x1, i), v.load(x2, i)
        f = v.load(a, i)
        a0, a1, a2 = v.fma(f, u, a0), v.fma(f, value, a1), v.fma(f, t, a2)
        f = v.load(b, i)
        b0, b1, b2 = v.fma(f, u, b0), v.fma(f, value, b1), v.fma(f, t, b2)
        f = v.load(c, i)
        c0, c1, c2 = v.fma(f, u, c0), v.fma(f, value, c1), v.fma(f, t, c2)
        f = v.load(d, i)
        d0, d1, d2 = v.fma(f, u, d0), v.fma(f, value, d1), v.fma(f, t, d2)
        i += w
    store_dots(sums, columns, a0, a1, a2, add)
    if rows > 1:
        store_dots(sums + pitch, columns, b0, b1, b2, add)
    if rows > 2:
        store_dots(sums + 2 * pitch, columns, c0, c1, c2, add)
    if rows > 3:
        store_dots(sums + 3 * pitch, columns, d0, d1, d2, add)


@inline
def store_dots(sums: Any, columns: int, u: Any, value: Any, t: Any, add: int) -> None:
    store_or_add_sum(sums, 0, u, add)
    if columns > 1:
        store_or_add_sum(sums, 1, value, add)
    if columns > 2:
        store_or_add_sum(sums, 2, t, add)


@inline
def dots_two(sums: Any, pitch: int, rows: int, columns: int, a: Any, a_row: int, x: Any, n: int, add: int) -> None:
    """The same for two rows."""
    w, i, (x0, x1, x2) = v.lanes(a), 0, x
    b = a + min(1, rows - 1) * a_row
    a0 = a1 = a2 = b0 = b1 = b2 = v.full(a, 0.0)
    while i < n:
        f, g = v.load(a, i), v.load(b, i)
        u = v.load(x0, i)
        a0, b0 = v.fma(f, u, a0), v.fma(g, u, b0)
        u = v.load(x1, i)
        a1, b1 = v.fma(f, u, a1), v.fma(g, u, b1)
        u = v.load(x2, i)
        a2, b2 = v.fma(f, u, a2), v.fma(g, u, b2)
        i += w
    store_dots(sums, columns, a0, a1, a2, add)
    if rows > 1:
        store_dots(sums + pitch, columns, b0, b1, b2, add)


@inline
def dots_two_twice(
    sums: Any, pitch: int, rows: int, columns: int, a: Any, a_row: int, x: Any, n: int, add: int
) -> None:
    """As dots_four."""
    dots_two(sums, pitch, rows, columns, a, a_row, x, n, add)
    if rows > 2:
        dots_two(sums + 2 * pitch, pitch, rows - 2, columns, a + 2 * a_row, a_row, x, n, add)


@inline
def dots_one(sums: Any, columns: int, a: Any, x: Any, n: int, add: int) -> None:
    """The same for a single row."""
    w, i, (x0, x1, x2) = v.lanes(a), 0, x
    a0 = a1 = a2 = v.full(a, 0.0)
    while i < n:
        f = v.load(a, i)
        a0, a1, a2 = v.fma(f, v.load(x0, i), a0), v.fma(f, v.load(x1, i), a1), v.fma(f, v.load(x2, i), a2)
        i += w
    store_dots(sums, columns, a0, a1, a2, add)


dots_rows = dots_four if MANY_REGISTERS else dots_two_twice


class Ranges(NamedTuple):
    """An axis of a matrix cut into ranges: its size, how many ranges, the size of each."""

    size: int
    count: int
    per_range: int


@kernel
def dot_products(
    units: Units, rows: Ranges, columns: Ranges, length, shifts, single, add, dy: Signals, x: Signals, sums: Pointer
):
    """sums[r, c] (+)= the dot product of row r of dy and of x from shifts[c] on.

    A unit is a range of rows and a range of columns in one group. A block of each of its columns stays in the
    second-level cache while all its rows pass by.
    """
    block = BLOCK_VECTORS * v.lanes(dy.data)
    for unit in units:
        group = unit // (rows.count * columns.count)
        first_row = unit // columns.count % rows.count * rows.per_range
        first_column = unit % columns.count * columns.per_range
        signals = x.data + group * x.group
        for start in range(0, length, block):
            n = min(block, length - start)
            for row in range(first_row, min(first_row + rows.per_range, rows.size), ROWS):
                a = dy.data + (group * dy.group + row * dy.pitch + dy.pad + start)
                out, tile_rows = sums + (group * rows.size + row) * columns.size, min(ROWS, rows.size - row)
                for column in range(first_column, min(first_column + columns.per_range, columns.size), COLUMNS):
                    tile_columns = min(COLUMNS, columns.size - column)
                    shifted = (
                        signals + (load_word(shifts, column) + start),
                        signals + (load_word(shifts, column + min(1, tile_columns - 1)) + start),
                        signals + (load_word(shifts, column + tile_columns - 1) + start),
                    )
                    if single:
                        dots_one(out + column, tile_columns, a, shifted, n, add + start)
                    else:
                        dots_rows(
                            out + column, columns.size, tile_rows, tile_columns, a, dy.pitch, shifted, n, add + start
                        )


@kernel
def sum_signals(rows: Units, length, add, signals: Signals, sums: Pointer):
    """sums[r] (+)= the sum of row r of the signals, over whole vectors."""
    for row in rows:
        signal = signals.data + (row * signals.pitch + signals.pad)
        store_or_add_sum(sums, row, sum_range(signal, 0, length, BLOCK_VECTORS, ()), add)
