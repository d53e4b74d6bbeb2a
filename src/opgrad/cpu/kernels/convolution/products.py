"""Products of long signals: tiles of sums in registers, four rows by three vectors of them.

Nothing is packed, unlike in `gemm`. A tile of six rows by two vectors, as there, took 1.06 times as long.
`correlate` adds shifted signals times weights; `dot_products` takes the dot products of signals with shifted signals.
Both are what convolution's gradients come to (opgrad.cpu.convolution).
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.kernels.convolution.signals import Images, Signals
from opgrad.cpu.kernels.gemm import MANY_REGISTERS
from opgrad.cpu.kernels.loops.fold import sum_range
from opgrad.cpu.kernels.loops.map import write_same

ROWS: Final = 4  # of a tile: 12 sums of two registers each leave eight of 32 for what is multiplied
COLUMNS: Final = 3
CHUNK: Final = 128  # products of a chunk, whose sum is then added to the total
# Vectors of a signal that are multiplied at a time: seven signals of them, 28 KiB, stay in the first-level cache. With
# 64, windows of one element took 1.4 times as long.
BLOCK_VECTORS: Final = 32


@inline
def three_from(p, offset: int):
    """Three vectors side by side."""
    w = v.lanes(p)
    return v.load(p, offset), v.load(p, offset + w), v.load(p, offset + 2 * w)


@inline
def add_products(sums, factor, factors):
    """Three sums of products with one more each."""
    (s, t, u), (x, y, z) = sums, factors
    return v.fma(x, factor, s), v.fma(y, factor, t), v.fma(z, factor, u)


@inline
def store_three(out, sums, add: int) -> None:
    """Store three adjacent vectors; if `add`, add them to the numbers in memory."""
    w, (s, t, u) = v.lanes(out), sums
    if add:
        x, y, z = three_from(out, 0)
        s, t, u = x + s, y + t, z + u
    v.store(out, 0, s)
    v.store(out, w, t)
    v.store(out, 2 * w, u)


@inline
def correlate_four(out, pitch: int, rows: int, signals, shifts: int, weights, j: int, end: int, add: int) -> None:
    """out[r, 0:3 vectors] (+)= the sum over j of weights[4 j + r] * signals[shifts[j]:]."""
    zero = v.full(out, 0.0)
    a = b = c = d = zero, zero, zero
    while j < end:
        vectors, factors = three_from(signals, load_word(shifts, j)), weights + 4 * j
        a, b = add_products(a, v.load_one(factors, 0), vectors), add_products(b, v.load_one(factors, 1), vectors)
        c, d = add_products(c, v.load_one(factors, 2), vectors), add_products(d, v.load_one(factors, 3), vectors)
        j += 1
    store_three(out, a, add)
    if rows > 1:
        store_three(out + pitch, b, add)
    if rows > 2:
        store_three(out + 2 * pitch, c, add)
    if rows > 3:
        store_three(out + 3 * pitch, d, add)


@inline
def correlate_two(out, pitch: int, rows: int, signals, shifts: int, weights, j: int, end: int, add: int) -> None:
    """`correlate_four` for two rows of a tile whose weights are packed for four."""
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
    store_three(out, (a0, a1, a2), add)
    if rows > 1:
        store_three(out + pitch, (b0, b1, b2), add)


@inline
def correlate_two_twice(out, pitch: int, rows: int, signals, shifts: int, weights, j: int, end: int, add: int) -> None:
    """`correlate_four` by two calls of `correlate_two`."""
    correlate_two(out, pitch, rows, signals, shifts, weights, j, end, add)
    if rows > 2:
        correlate_two(out + 2 * pitch, pitch, rows - 2, signals, shifts, weights + 2, j, end, add)


@inline
def correlate_one(out, signals, shifts: int, weights, j: int, end: int, add: int) -> None:
    """`correlate_four` for a single row, whose weights are contiguous."""
    zero = v.full(out, 0.0)
    a = zero, zero, zero
    while j < end:
        a = add_products(a, v.load_one(weights, j), three_from(signals, load_word(shifts, j)))
        j += 1
    store_three(out, a, add)


# With 16 registers the sums of four rows would spill: 50 billion operations a second instead of 95.
correlate_rows = correlate_four if MANY_REGISTERS else correlate_two_twice

# Words of a tile of `correlate`: where its weights and its shifts begin, how many shifts there are, where its first row
# is written, which channel that is, and how many rows there are.
WEIGHTS, SHIFTS, TERMS, OUT, CHANNEL, TILE_ROWS = range(6)
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
            offsets, terms, rows = (
                shifts + 8 * load_word(tile, SHIFTS),
                load_word(tile, TERMS),
                load_word(tile, TILE_ROWS),
            )
            out = dx.data + (group * dx.group + load_word(tile, OUT) + begin)
            for j in range(0, terms, CHUNK):
                end = min(j + CHUNK, terms)
                if single:
                    correlate_one(out, signals, offsets, factors, j, end, j > 0)
                else:
                    correlate_rows(out, dx.channel, rows, signals, offsets, factors, j, end, j > 0)


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
def store_or_add_sum(sums, i: int, value, add: int) -> None:
    x = v.reduce_add(value)
    if add:
        x += v.load_one(sums, i)
    v.store_one(sums, i, x)


@inline
def dots_four(sums, pitch: int, rows: int, columns: int, a, a_row: int, x, n: int, add: int) -> None:
    """sums[r, c] (+)= the dot product of row r of a and signal c of three, over n numbers, whole vectors."""
    zero = v.full(a, 0.0)
    b, c, d = a + min(1, rows - 1) * a_row, a + min(2, rows - 1) * a_row, a + min(3, rows - 1) * a_row
    s = t = u = z = zero, zero, zero
    for i in range(0, n, v.lanes(a)):
        vectors = v.load_each(x, i)
        s, t = add_products(s, v.load(a, i), vectors), add_products(t, v.load(b, i), vectors)
        u, z = add_products(u, v.load(c, i), vectors), add_products(z, v.load(d, i), vectors)
    store_dots(sums, columns, s, add)
    if rows > 1:
        store_dots(sums + pitch, columns, t, add)
    if rows > 2:
        store_dots(sums + 2 * pitch, columns, u, add)
    if rows > 3:
        store_dots(sums + 3 * pitch, columns, z, add)


@inline
def store_dots(sums, columns: int, vectors, add: int) -> None:
    s, t, u = vectors
    store_or_add_sum(sums, 0, s, add)
    if columns > 1:
        store_or_add_sum(sums, 1, t, add)
    if columns > 2:
        store_or_add_sum(sums, 2, u, add)


@inline
def dots_two(sums, pitch: int, rows: int, columns: int, a, a_row: int, x, n: int, add: int) -> None:
    """`dots_four` for two rows."""
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
    store_dots(sums, columns, (a0, a1, a2), add)
    if rows > 1:
        store_dots(sums + pitch, columns, (b0, b1, b2), add)


@inline
def dots_two_twice(sums, pitch: int, rows: int, columns: int, a, a_row: int, x, n: int, add: int) -> None:
    """`dots_four` by two calls of `dots_two`."""
    dots_two(sums, pitch, rows, columns, a, a_row, x, n, add)
    if rows > 2:
        dots_two(sums + 2 * pitch, pitch, rows - 2, columns, a + 2 * a_row, a_row, x, n, add)


@inline
def dots_one(sums, columns: int, a, x, n: int, add: int) -> None:
    """`dots_four` for a single row."""
    zero = v.full(a, 0.0)
    s = zero, zero, zero
    for i in range(0, n, v.lanes(a)):
        s = add_products(s, v.load(a, i), v.load_each(x, i))
    store_dots(sums, columns, s, add)


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
            n, adds = min(block, length - start), add or start > 0
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
                        dots_one(out + column, tile_columns, a, shifted, n, adds)
                    else:
                        dots_rows(out + column, columns.size, tile_rows, tile_columns, a, dy.pitch, shifted, n, adds)


@kernel
def sum_signals(rows: Units, length, add, signals: Signals, sums: Pointer):
    """sums[r] (+)= the sum of row r of the signals, over whole vectors."""
    for row in rows:
        signal = signals.data + (row * signals.pitch + signals.pad)
        store_or_add_sum(sums, row, sum_range(signal, 0, length, BLOCK_VECTORS, ()), add)


@kernel
def sum_planes(channels_: Units, images: Images, channels, size, x: Pointer, sums: Pointer):
    """sums[c] (+)= the sum of channel c of some images."""
    for channel in channels_:
        for image in range(images.first, images.first + images.count):
            plane = x + (image * channels + channel) * size
            store_or_add_sum(sums, channel, sum_range(plane, 0, size, BLOCK_VECTORS, ()), image > 0)


@kernel
def copy_sums(elements: Units, sums: Pointer, y: Pointer):
    write_same(y, elements.start, elements.stop, 0, (sums,), ())
