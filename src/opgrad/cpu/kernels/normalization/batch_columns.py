"""Kernels of batch normalization where planes are shorter than a vector: vectors run across channels and planes.

Arrays are samples x columns, contiguous; a column is an element of a channel's plane. Sums over samples are formed
in blocks of SAMPLES samples and strips of STRIP columns: `partial` has two rows for each block. `wide` has the numbers
of the table in `batch` once for every column of their channel.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import column_sum_of, fold_down
from opgrad.cpu.kernels.loops.map import clear, mapped, mapped_to_each, write_sum
from opgrad.cpu.kernels.normalization.batch import MEAN, gradient, normalized

SAMPLES: Final = 64  # of a block
STRIP: Final = 1024  # columns


class ColumnStrips(NamedTuple):
    """Samples x columns, and how many strips of columns there are."""

    samples: int
    columns: int
    strips: int


class ColumnKernels(NamedTuple):
    """The sums of blocks of samples; the same joined for each column; the elements."""

    sum_blocks: Kernel
    join_blocks: Kernel
    write: Kernel


@inline
def block_of(unit: int, shape):
    """A unit's block, the column that it begins with, and the one behind its last."""
    begin = unit % shape.strips * STRIP
    return unit // shape.strips, begin, min(begin + STRIP, shape.columns)


@inline
def samples_of(block: int, shape):
    return range(block * SAMPLES, min((block + 1) * SAMPLES, shape.samples))


@inline
def cleared_sums(partial, block: int, begin: int, end: int):
    """A block's two rows of sums, with zeros in these columns."""
    first = partial.data + 2 * block * partial.step
    second = first + partial.step
    clear(first + begin, end - begin)
    clear(second + begin, end - begin)
    return first, second


@kernel
def widen(rows, channels, size, table: Rows, wide: Rows):
    """The first rows of the wide table."""
    for row in range(rows):
        for channel in range(channels):
            value = v.load_one(table.data, row * table.step + channel)
            for column in range(channel * size, (channel + 1) * size):
                v.store_one(wide.data, row * wide.step + column, value)


def column_writer(inputs: int, formula: Callable[..., Vector]) -> Kernel:
    """The kernel out = formula(*operands): the arrays, and rows of the wide table, which are the same for each sample.

    inputs: how many operands there are.
    """
    write = mapped(formula)

    @kernel
    def write_columns(units: Units, shape: ColumnStrips, operands: (Rows,) * inputs, out: Pointer, stream):
        for unit in units:
            block, begin, end = block_of(unit, shape)
            for sample in samples_of(block, shape):
                write(out + sample * shape.columns, begin, end, stream, v.each_row(operands, sample), ())

    return write_columns


# --- backward ------------------------------------------------------------------------------------------------------


add_gradients = mapped_to_each(lambda dy, x, mean, g, t: (g + dy, v.fma(dy, x - mean, t)))


@kernel
def grad_sums(units: Units, shape: ColumnStrips, arrays: (Pointer, Pointer), wide: Rows, partial: Rows):
    """The sums of dy and of dy * (x - mean) over a block of samples."""
    (dy, x), mean = arrays, wide.data + MEAN * wide.step
    for unit in units:
        block, begin, end = block_of(unit, shape)
        g, t = cleared_sums(partial, block, begin, end)
        for sample in samples_of(block, shape):
            row = sample * shape.columns
            add_gradients((g, t), begin, end, (dy + row, x + row, mean, g, t), ())


@kernel
def join_sums(columns: Units, blocks, partial: Rows, joined: Rows):
    """The sums of all blocks added up."""
    for i in range(columns.start, columns.stop, v.lanes(partial.data)):
        first = partial.data + i
        second = first + partial.step
        v.store(joined.data, i, column_sum_of(first, blocks, 2 * partial.step))
        v.store(joined.data, joined.step + i, column_sum_of(second, blocks, 2 * partial.step))


BACKWARD = ColumnKernels(grad_sums, join_sums, column_writer(6, gradient))


# --- forward -------------------------------------------------------------------------------------------------------


add_squares = mapped(lambda sums, x, mean: v.fma(x - mean, x - mean, sums))


@kernel
def moments_of_columns(units: Units, shape: ColumnStrips, arrays: (Pointer,), partial: Rows):
    """The mean of each column over a block of samples, and the sum of the squares around it."""
    x = arrays[0]
    for unit in units:
        block, begin, end = block_of(unit, shape)
        samples = samples_of(block, shape)
        mean, squares = cleared_sums(partial, block, begin, end)
        for sample in samples:
            write_sum(mean, begin, end, 0, (mean, x + sample * shape.columns), ())
        inverse = v.number(x, 1.0 / len(samples))
        for i in range(begin, end, v.lanes(x)):
            v.store(mean, i, v.load(mean, i) * inverse)
        for sample in samples:
            add_squares(squares, begin, end, 0, (squares, x + sample * shape.columns, mean), ())


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


FORWARD = ColumnKernels(moments_of_columns, join_moments, column_writer(4, normalized))
