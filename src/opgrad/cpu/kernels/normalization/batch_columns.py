"""Kernels of batch normalization where planes are shorter than a vector: vectors run across channels and planes.

Arrays are samples x columns, contiguous; a column is an element of a channel's plane. Sums over samples are formed
in blocks of SAMPLES samples and strips of STRIP columns: `partial` has two rows for each block. `wide` is the table of
`batch_planes` with each number once for every column of its channel.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.kernels.loops.fill import clear
from opgrad.cpu.kernels.loops.fold import column_sum_of, fold, fold_down
from opgrad.cpu.kernels.loops.map import get
from opgrad.cpu.kernels.normalization.batch_planes import BIAS, write_normalized
from opgrad.cpu.kernels.normalization.batch_planes_grad import FACTOR, FROM_BIAS, FROM_SCALE, MEAN, write_gradient

SAMPLES: Final = 64  # of a block
STRIP: Final = 1024  # columns


class ColumnStrips(NamedTuple):
    """Samples x columns, and how many strips of columns there are."""

    samples: int
    columns: int
    strips: int


@inline
def block_of(unit: int, shape):
    """A unit's block, the column that it begins with, and how many columns it has."""
    begin = unit % shape.strips * STRIP
    return unit // shape.strips, begin, min(STRIP, shape.columns - begin)


@inline
def samples_of(block: int, shape):
    return range(block * SAMPLES, min((block + 1) * SAMPLES, shape.samples))


@inline
def row_of(rows, row: int, begin: int):
    """The row from column `begin` on."""
    return rows.data + (row * rows.step + begin)


@kernel
def widen(begin, end, channels, size, table: Rows, wide: Rows):
    """Rows [begin, end) of the wide table."""
    for row in range(begin, end):
        for channel in range(channels):
            value = v.load_one(table.data, row * table.step + channel)
            for column in range(channel * size, (channel + 1) * size):
                v.store_one(wide.data, row * wide.step + column, value)


# --- backward ------------------------------------------------------------------------------------------------------


@inline
def _add_gradient(total, arrays, i: int, whole: bool, mask, numbers):
    dy, x, mean, g, t = arrays
    value = get(dy, i, whole, mask)
    v.store(g, i, v.load(g, i) + value)
    v.store(t, i, v.fma(value, get(x, i, whole, mask) - v.load(mean, i), v.load(t, i)))
    return total


_add_gradients = fold(_add_gradient)


@kernel
def grad_sums(units: Units, shape: ColumnStrips, dy: Pointer, x: Pointer, wide: Rows, partial: Rows):
    """The sums of dy and of dy * (x - mean) over a block of samples."""
    for unit in units:
        block, begin, count = block_of(unit, shape)
        g, mean = row_of(partial, 2 * block, begin), row_of(wide, MEAN, begin)
        t = g + partial.step
        clear(g, count)
        clear(t, count)
        for sample in samples_of(block, shape):
            at = sample * shape.columns + begin
            _add_gradients((), 0, count, (dy + at, x + at, mean, g, t), ())


@kernel
def join_sums(columns: Units, blocks, partial: Rows, joined: Rows):
    """The sums of all blocks added up."""
    for i in range(columns.start, columns.stop, v.lanes(partial.data)):
        first, second = partial.data + i, row_of(partial, 1, i)
        v.store(joined.data, i, column_sum_of(first, blocks, 2 * partial.step))
        v.store(joined.data, joined.step + i, column_sum_of(second, blocks, 2 * partial.step))


@kernel
def grad_columns(units: Units, shape: ColumnStrips, dy: Pointer, x: Pointer, dx: Pointer, wide: Rows, stream):
    for unit in units:
        block, begin, count = block_of(unit, shape)
        mean, factor = row_of(wide, MEAN, begin), row_of(wide, FACTOR, begin)
        from_scale, from_bias = row_of(wide, FROM_SCALE, begin), row_of(wide, FROM_BIAS, begin)
        for sample in samples_of(block, shape):
            at = sample * shape.columns + begin
            write_gradient(dx + at, 0, count, stream, (dy + at, x + at, mean, factor, from_scale, from_bias), ())


# --- forward -------------------------------------------------------------------------------------------------------


@inline
def _add_value(total, arrays, i: int, whole: bool, mask, numbers):
    x, sums = arrays
    v.store(sums, i, v.load(sums, i) + get(x, i, whole, mask))
    return total


@inline
def _add_square(total, arrays, i: int, whole: bool, mask, numbers):
    x, mean, sums = arrays
    deviation = get(x, i, whole, mask) - v.load(mean, i)
    v.store(sums, i, v.fma(deviation, deviation, v.load(sums, i)))
    return total


_add_values, _add_squares = fold(_add_value), fold(_add_square)


@kernel
def moments_of_columns(units: Units, shape: ColumnStrips, x: Pointer, partial: Rows):
    """The mean over a block of samples, and the squares around it, which are read from the cache."""
    for unit in units:
        block, begin, count = block_of(unit, shape)
        samples = samples_of(block, shape)
        mean = row_of(partial, 2 * block, begin)
        squares = mean + partial.step
        clear(mean, count)
        clear(squares, count)
        for sample in samples:
            _add_values((), 0, count, (x + (sample * shape.columns + begin), mean), ())
        inverse = v.number(x, 1.0 / len(samples))
        for i in range(0, count, v.lanes(x)):
            v.store(mean, i, v.load(mean, i) * inverse)
        for sample in samples:
            _add_squares((), 0, count, (x + (sample * shape.columns + begin), mean, squares), ())


@inline
def _add_mean(total, arrays, block: int, numbers):
    (partial,), (samples, step) = arrays, numbers
    count = v.number(partial, min(SAMPLES, samples - block * SAMPLES))
    return (v.fma(v.load(partial, 2 * block * step), count, total[0]),)


@inline
def _add_moments(total, arrays, block: int, numbers):
    (partial,), (samples, step, mean) = arrays, numbers
    count = v.number(partial, min(SAMPLES, samples - block * SAMPLES))
    deviation = v.load(partial, 2 * block * step) - mean
    return (total[0] + v.fma(deviation * count, deviation, v.load(partial, (2 * block + 1) * step)),)


_sum_means, _sum_moments = fold_down(_add_mean), fold_down(_add_moments)


@kernel
def join_moments(columns: Units, blocks, samples, partial: Rows, joined: Rows):
    """The moments of all blocks joined."""
    step, zeros = partial.step, (v.full(partial.data, 0.0),)
    for i in range(columns.start, columns.stop, v.lanes(partial.data)):
        arrays = (partial.data + i,)
        mean = _sum_means(zeros, 0, blocks, arrays, (samples, step))[0] * v.number(partial.data, 1.0 / samples)
        v.store(joined.data, i, mean)
        v.store(joined.data, joined.step + i, _sum_moments(zeros, 0, blocks, arrays, (samples, step, mean))[0])


@kernel
def normalize_columns(units: Units, shape: ColumnStrips, x: Pointer, y: Pointer, wide: Rows, stream):
    for unit in units:
        block, begin, count = block_of(unit, shape)
        mean, factor = row_of(wide, MEAN, begin), row_of(wide, FACTOR, begin)
        bias = row_of(wide, BIAS, begin)
        for sample in samples_of(block, shape):
            at = sample * shape.columns + begin
            write_normalized(y + at, 0, count, stream, (x + at, mean, factor, bias), ())
