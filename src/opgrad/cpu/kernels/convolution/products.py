"""Products of long signals: tiles of sums in registers, four or two rows by three vectors of them.

Rows of a tile are placed and stored as in `gemm`, but signals are read where they lie: a packed copy of all shifts of a
signal would be as many times as long as a window has elements. With AVX-512 a tile of six rows by two vectors, as in
`gemm`, took 1.06 times as long.
`correlate` adds shifted signals times weights; `dot_products` takes the dot products of signals with shifted signals.
Both are what convolution's gradients come to (opgrad.cpu.programs.convolution).
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.words import load_word
from opgrad.cpu.kernels.convolution.signals import Images, Signals
from opgrad.cpu.kernels.gemm import MANY_REGISTERS, four, put_vectors, two
from opgrad.cpu.kernels.loops.fold import sum_range
from opgrad.cpu.kernels.loops.map import write_same

ROWS: Final = 4  # of a tile: 12 sums of two registers each leave eight of 32 for what is multiplied
COLUMNS: Final = 3
CHUNK: Final = 128  # products of a chunk, whose sum is then added to the total
# Vectors of a signal that are multiplied at a time: seven signals of them, 28 KiB, stay in the first-level cache. With
# 64, windows of one element took 1.4 times as long.
BLOCK_VECTORS: Final = 32


one = inline(lambda p, step, row, last: (p + row * step,))

# With 16 registers the sums of four rows would spill: 50 billion operations a second instead of 95.
AT_ONCE: Final = ROWS if MANY_REGISTERS else 2
rows_at_once = four if MANY_REGISTERS else two


def correlating(rows_of: Callable[..., Any]) -> Callable[..., None]:
    """out[r, 0:3 vectors] (+)= the sum over j of weights[pitch j + r] * signals[shifts[j]:], for a tile's rows."""

    @inline
    def tile(out, out_row: int, row: int, last: int, signals, shifts: int, weights, pitch: int, j: int, end, add: int):
        w, factors, rows = v.lanes(out), rows_of(weights, 1, row, last), rows_of(out, out_row, row, last)
        left = middle = right = v.full_each(rows, 0.0)
        while j < end:
            numbers, source = v.load_one_each(factors, pitch * j), signals + load_word(shifts, j)
            left = v.add_products(left, numbers, v.load(source, 0))
            middle = v.add_products(middle, numbers, v.load(source, w))
            right = v.add_products(right, numbers, v.load(source, 2 * w))
            j += 1
        put_vectors(rows, 0, w, left, add)
        put_vectors(rows, w, w, middle, add)
        put_vectors(rows, 2 * w, w, right, add)

    return tile


correlate_rows, correlate_one = correlating(rows_at_once), correlating(one)

# Words of a tile of `correlate`: where its weights and its shifts begin, how many shifts there are, where its first row
# is written, which channel that is, and how many rows there are.
WEIGHTS, SHIFTS, TERMS, OUT, CHANNEL, TILE_ROWS = range(6)
TILE: Final = 6


@kernel
def correlate(units: Units, blocks, tiles, table, shifts, single, dy: Signals, weights: Rows, dx: Signals):
    """A unit is a block of positions in one group: all tiles of rows, so that its signals are read from the cache.

    tiles, table: how many a group has, and the words of each.
    """
    width = COLUMNS * v.lanes(dx.data)
    for unit in units:
        group, begin = unit // blocks, unit % blocks * width
        signals = dy.data + (group * dy.group + begin)
        for t in range(tiles):
            tile = table + 8 * TILE * t
            factors = weights.data + (group * weights.step + load_word(tile, WEIGHTS))
            offsets, terms = shifts + 8 * load_word(tile, SHIFTS), load_word(tile, TERMS)
            out, rows = dx.data + (group * dx.group + load_word(tile, OUT) + begin), load_word(tile, TILE_ROWS)
            for j in range(0, terms, CHUNK):
                end = min(j + CHUNK, terms)
                if single:
                    correlate_one(out, 0, 0, 0, signals, offsets, factors, 1, j, end, j > 0)
                else:
                    for row in range(0, rows, AT_ONCE):
                        correlate_rows(out, dx.channel, row, rows - 1, signals, offsets, factors, ROWS, j, end, j > 0)


@kernel
def pack_weights(units: Units, tiles, table, sources, rows, w: Pointer, w_group, step, weights: Rows):
    """weights[rows j + r] = w[sources[j] + (channel + r) * step] for each tile.

    w_group, step: from a group of the filters to the next, from one channel of a filter to the next. The last row of a
    tile that has fewer rows is repeated.
    """
    for unit in units:
        group, tile = unit // tiles, table + 8 * TILE * (unit % tiles)
        packed = weights.data + (group * weights.step + load_word(tile, WEIGHTS))
        filters = w + (group * w_group + load_word(tile, CHANNEL) * step)
        offsets, tile_rows = sources + 8 * load_word(tile, SHIFTS), load_word(tile, TILE_ROWS)
        for j in range(load_word(tile, TERMS)):
            source, to = filters + load_word(offsets, j), packed + rows * j
            if rows == 1:
                v.store_one(to, 0, v.load_one(source, 0))
            else:
                numbers = v.load_one_each(four(source, step, 0, tile_rows - 1), 0)
                v.store_one_each(four(to, 1, 0, rows - 1), 0, numbers)


@inline
def put_sums(rows, column: int, vectors, add: int) -> None:
    """Store the sum of the lanes of a vector for each row, or add it to what stands there."""
    sums = v.reduce_add_each(vectors)
    if add:
        sums = v.add_each(v.load_one_each(rows, column), sums)
    v.store_one_each(rows, column, sums)


def multiplying(rows_of: Callable[..., Any]) -> Callable[..., None]:
    """sums[r, c] (+)= the dot product of row r of a and signal c of three, over n numbers, whole vectors."""

    @inline
    def tile(sums, pitch: int, row: int, last: int, columns: int, a, a_row: int, signals, n: int, add: int) -> None:
        (x, y, z), factors, rows = signals, rows_of(a, a_row, row, last), rows_of(sums, pitch, row, last)
        left = middle = right = v.full_each(factors, 0.0)
        i = 0
        while i < n:
            vectors = v.load_each(factors, i)
            left = v.add_products(left, vectors, v.load(x, i))
            middle = v.add_products(middle, vectors, v.load(y, i))
            right = v.add_products(right, vectors, v.load(z, i))
            i += v.lanes(a)
        put_sums(rows, 0, left, add)
        if columns > 1:
            put_sums(rows, 1, middle, add)
        if columns > 2:
            put_sums(rows, 2, right, add)

    return tile


dots_of_rows, dots_of_one = multiplying(rows_at_once), multiplying(one)


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
        signals, last, out = x.data + group * x.group, rows.size - 1, sums + group * rows.size * columns.size
        for start in range(0, length, block):
            n, adds = min(block, length - start), add or start > 0
            a = dy.data + (group * dy.group + dy.pad + start)
            for row in range(first_row, min(first_row + rows.per_range, rows.size), ROWS):
                for column in range(first_column, min(first_column + columns.per_range, columns.size), COLUMNS):
                    tile_columns = min(COLUMNS, columns.size - column)
                    shifted = (
                        signals + (load_word(shifts, column) + start),
                        signals + (load_word(shifts, column + min(1, tile_columns - 1)) + start),
                        signals + (load_word(shifts, column + tile_columns - 1) + start),
                    )
                    if single:
                        dots_of_one(out + column, 0, 0, 0, tile_columns, a, 0, shifted, n, adds)
                    else:
                        for i in range(row, min(row + ROWS, rows.size), AT_ONCE):
                            dots_of_rows(
                                out + column, columns.size, i, last, tile_columns, a, dy.pitch, shifted, n, adds
                            )


@kernel
def sum_signals(rows: Units, length, add, signals: Signals, sums: Pointer):
    """sums[r] (+)= the sum of row r of the signals, over whole vectors."""
    for row in rows:
        signal = signals.data + (row * signals.pitch + signals.pad)
        put_sums((sums,), row, (sum_range(0, length, (signal,), (), BLOCK_VECTORS),), add)


@kernel
def sum_planes(channels_: Units, images: Images, channels, size, x: Pointer, sums: Pointer):
    """sums[c] (+)= the sum of channel c of some images."""
    for channel in channels_:
        for image in range(images.first, images.first + images.count):
            plane = x + (image * channels + channel) * size
            put_sums((sums,), channel, (sum_range(0, size, (plane,), (), BLOCK_VECTORS),), image > 0)


@kernel
def copy_sums(elements: Units, sums: Pointer, y: Pointer):
    write_same(y, elements.start, elements.stop, 0, (sums,), ())
