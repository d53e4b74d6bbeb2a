"""Kernels of layer normalization, with a mean and without, of batch normalization, and of their gradients.

A mean is subtracted before squares are summed, so that no digits cancel. Sums over rows or samples are formed apart for
each block of them, so that their order depends on the shape alone.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import BLOCK, add_value, column_sum_of, fold, fold_down, fold_in_chunks, sum_range
from opgrad.cpu.kernels.loops.map import clear, get, get_or, mapped, mapped_to_each, write_sum

# --- layer normalization: arrays are rows x n, contiguous ------------------------------------------------------------


def _with_bias(x: Vector, scale: Vector, bias: Vector, mean, inv_std) -> Vector:
    return v.fma((x - mean) * inv_std, scale, bias)


def _without_bias(x: Vector, scale: Vector, bias: Vector, mean, inv_std) -> Vector:
    return (x - mean) * inv_std * scale


@inline
def add_square(total, arrays, i: int, whole: bool, mask, mean):
    """Adds (x - mean)²."""
    deviation = get_or(arrays[0], i, whole, mask, mean) - mean
    return (v.fma(deviation, deviation, total[0]),)


_squares = fold_in_chunks(add_square)


def forward_kernel(formula: Callable[..., Vector], centered: bool) -> Kernel:
    """y and the statistics of rows; centered: whether they have a mean."""
    write = mapped(formula)

    @kernel
    def normalize_rows(
        rows: Units, n, epsilon: Float, x: Pointer, scale: Pointer, bias: Pointer, y: Pointer, means: Pointer,
        inv_stds: Pointer, stream,
    ):  # fmt: skip
        inverse, zeros = v.number(x, 1.0 / max(n, 1)), (v.full(x, 0.0),)
        for row in rows:
            source = x + row * n
            mean = v.reduce_add(sum_range(0, n, (source,), ())) * inverse if centered else v.number(x, 0.0)
            squares = v.reduce_add(_squares(zeros, 0, n, (source,), mean)[0])
            inv_std = v.first_lane(1.0 / v.sqrt(v.full(x, squares * inverse + v.number(x, epsilon))))
            if centered:
                v.store_one(means, row, mean)
            v.store_one(inv_stds, row, inv_std)
            write(y + row * n, 0, n, stream, (source, scale, bias), (mean, inv_std))

    return normalize_rows


LAYER = forward_kernel(_with_bias, centered=True)
LAYER_NO_BIAS = forward_kernel(_without_bias, centered=True)
SIMPLIFIED = forward_kernel(_without_bias, centered=False)


# --- gradients of layer normalization; `sums` has two rows for each block of rows, dscale and dbias ------------------

ROW_STRIP: Final = 1024  # columns of a part where rows are split: its sums, 8 KiB, stay in the first-level cache


@inline
def number_or_zero(p, i: int, is_there: bool):
    return v.load_one(p, i) if is_there else v.number(p, 0.0)


def gradient_sums(centered: bool, adds: bool) -> Any:
    """The sums of g = dy * scale and of g * normalized x over a row; adds: to dscale and dbias meanwhile.

    It asks for what lies `ahead` elements ahead.
    """

    @inline
    def visit(total, arrays, i: int, whole: bool, mask, numbers):
        dy, x, scale, dscale, dbias = arrays
        mean, inv_std, ahead = numbers
        value, deviation = get(dy, i, whole, mask), get_or(x, i, whole, mask, mean)
        if centered:
            deviation = deviation - mean
        t = value * (deviation * inv_std)
        if adds:
            v.store(dscale, i, v.load(dscale, i) + t)
            if centered:
                v.store(dbias, i, v.load(dbias, i) + value)
        factor = get(scale, i, whole, mask)
        if whole:
            v.prefetch(dy, i + ahead)
            v.prefetch(x, i + ahead)
        return v.fma(value, factor, total[0]), v.fma(t, factor, total[1])

    sums = fold_in_chunks(visit)

    @inline
    def add_up(n: int, arrays, numbers):
        zero = v.full(arrays[0], 0.0)
        g, t = sums((zero, zero), 0, n, arrays, numbers)
        return v.reduce_add(g), v.reduce_add(t)

    return add_up


@mapped
def write_layer_gradient(dy: Vector, x: Vector, scale: Vector, mean, inv_std, from_bias, from_scale) -> Vector:
    """dx = inv_std * (dy * scale + (from_bias + from_scale * normalized x)); 0 for a row of one element."""
    return (dy * scale + v.fma((x - mean) * inv_std, from_scale, from_bias)) * inv_std


def rows_kernel(centered: bool, by_strips: bool) -> Kernel:
    """dx, and dscale and dbias of each block of rows: of whole rows, or of strips of columns of rows that are split."""
    add_up = gradient_sums(centered, adds=True)

    @kernel
    def grad_rows(
        units: Units, rows, n, per_block, dy: Pointer, x: Pointer, scale: Pointer, means: Pointer, inv_stds: Pointer,
        coefficients: Pointer, dx: Pointer, sums: Rows, stream,
    ):  # fmt: skip
        width = ROW_STRIP if by_strips else n
        strips = (n + width - 1) // width
        inverse = v.number(x, 1.0 / n)
        for unit in units:
            block, begin = unit // strips, unit % strips * width
            columns = min(width, n - begin)
            dscale = sums.data + (2 * block * sums.step + begin)
            dbias = dscale + sums.step
            clear(dscale, columns)
            clear(dbias, columns)
            for row in range(block * per_block, min((block + 1) * per_block, rows)):
                at = row * n + begin
                arrays = dy + at, x + at, scale + begin
                mean, inv_std = number_or_zero(means, row, centered), v.load_one(inv_stds, row)
                g, t = add_up(columns, (*arrays, dscale, dbias), (mean, inv_std, n))
                if by_strips:
                    from_bias = number_or_zero(coefficients, 2 * row, centered)
                    from_scale = v.load_one(coefficients, 2 * row + 1)
                else:
                    from_bias, from_scale = -inverse * g if centered else v.number(x, 0.0), -inverse * t
                write_layer_gradient(dx + at, 0, columns, stream, arrays, (mean, inv_std, from_bias, from_scale))

    return grad_rows


@kernel
def row_coefficients(rows, n, per_row, partial: Pointer, coefficients: Pointer):
    """The two numbers by which dx of a split row depends on sums over the whole row."""
    inverse = 1.0 / n
    for row in range(rows):
        g, t = 0.0, 0.0
        for block in range(row * per_row, (row + 1) * per_row):
            g += v.load_one(partial, 2 * block)
            t += v.load_one(partial, 2 * block + 1)
        v.store_one(coefficients, 2 * row, -g * inverse)
        v.store_one(coefficients, 2 * row + 1, -t * inverse)


@kernel
def join_sums(columns: Units, blocks, partial: Rows, first: Pointer, second: Pointer, has_second):
    """The sums of all blocks added up. partial: two rows for each block, of which the second need not count."""
    for i in range(columns.start, columns.stop, v.lanes(partial.data)):
        mask = v.first(partial.data, columns.stop - i)
        v.store_masked(first, i, column_sum_of(partial.data + i, blocks, 2 * partial.step), mask)
        if has_second:
            v.store_masked(second, i, column_sum_of(partial.data + (partial.step + i), blocks, 2 * partial.step), mask)


class GradientKernels(NamedTuple):
    """For whole rows, dx and sums of blocks; for split rows, their sums, then dx and sums of blocks by strips."""

    rows: Kernel
    row_sums: Kernel
    strips: Kernel


def gradient_kernels(centered: bool) -> GradientKernels:
    add_up = gradient_sums(centered, adds=False)

    @kernel
    def sum_row_blocks(
        units: Units, per_row, n, dy: Pointer, x: Pointer, scale: Pointer, means: Pointer, inv_stds: Pointer,
        partial: Pointer,
    ):  # fmt: skip
        """The two sums of each block of a split row."""
        for unit in units:
            row, begin = unit // per_row, unit % per_row * BLOCK
            at = row * n + begin
            numbers = number_or_zero(means, row, centered), v.load_one(inv_stds, row), BLOCK
            g, t = add_up(min(BLOCK, n - begin), (dy + at, x + at, scale + begin, partial, partial), numbers)
            v.store_one(partial, 2 * unit, g)
            v.store_one(partial, 2 * unit + 1, t)

    by_rows, by_strips = rows_kernel(centered, by_strips=False), rows_kernel(centered, by_strips=True)
    return GradientKernels(by_rows, sum_row_blocks, by_strips)


LAYER_GRADIENT, SIMPLIFIED_GRADIENT = gradient_kernels(centered=True), gradient_kernels(centered=False)


# --- batch normalization where planes are at least as long as a vector -----------------------------------------------
#
# Arrays are N x C x size, contiguous; a plane is the `size` elements of one channel of one sample. Planes are cut into
# tiles of at most TILE elements. The elements of a channel are summed in blocks: some whole planes, or one tile where
# planes are longer. `table` has a row for each kind of number that an element is computed with, and in it a number for
# each channel.

TILE: Final = 1 << 13  # elements; a block is read twice, and stays in the first-level cache
MEAN, FACTOR, BIAS = range(3)  # the rows of the table for y
FROM_SCALE, FROM_BIAS = 2, 3  # the rows of the table for dx, behind those of the mean and the factor


class Planes(NamedTuple):
    """Samples, channels, the elements of a plane, the tiles of a plane, and the tiles of a channel's block."""

    samples: int
    channels: int
    size: int
    tiles: int
    per_block: int


class BlockSums(NamedTuple):
    """Two sums for each block of a channel, at data[block * block_step + channel * channel_step + k], k < count.

    The second sum stands `second` numbers behind the first.
    """

    data: Pointer
    blocks: int
    block_step: int
    channel_step: int
    count: int
    second: int


class PlaneKernels(NamedTuple):
    """The sums of blocks; what follows from them for each channel; the elements; all three, channel by channel.

    numbers: how many rows the table has.
    """

    sum_blocks: Kernel
    join_blocks: Kernel
    write: Kernel
    whole_channels: Kernel
    numbers: int


def plane_kernels(
    inputs: int, channels: Any, sums_of_block: Callable[..., Any], finish: Callable[..., None],
    numbers: int, numbers_of: Callable[..., Any], formula: Callable[..., Vector],
) -> PlaneKernels:  # fmt: skip
    """The kernels that compute out = formula(*arrays, *numbers) with numbers that depend on sums over each channel.

    inputs: how many arrays the formula takes. channels: the annotation of what has a number for each channel.
    sums_of_block(arrays, given, channel, block, planes) gives the two sums of a block, finish(table, sums, given,
    channel, planes) writes a channel's results and its numbers in the table, numbers_of(table, channel) loads these.
    """
    write, kinds = mapped(formula), (Pointer,) * inputs
    for each in (sums_of_block, finish, numbers_of):
        inline(each)

    @kernel
    def sum_blocks(units: Units, planes: Planes, arrays: kinds, given: channels, sums: BlockSums):
        for unit in units:
            channel, block = unit // sums.blocks, unit % sums.blocks
            store_sums(sums, channel, block, sums_of_block(arrays, given, channel, block, planes))

    @kernel
    def join_blocks(planes: Planes, given: channels, sums: BlockSums, table: Rows):
        for channel in range(planes.channels):
            finish(table, sums, given, channel, planes)

    @kernel
    def write_tiles(tiles: Units, planes: Planes, arrays: kinds, out: Pointer, table: Rows, stream):
        for unit in tiles:
            plane, begin = unit // planes.tiles, unit % planes.tiles * TILE
            start, end = plane * planes.size, min(begin + TILE, planes.size)
            write(out, start + begin, start + end, stream, arrays, numbers_of(table, plane % planes.channels))

    @kernel
    def whole_channels(
        channels_: Units, planes: Planes, arrays: kinds, given: channels, out: Pointer, table: Rows, sums: BlockSums,
        stream,
    ):  # fmt: skip
        """One channel after the other, while its elements are in the cache."""
        for channel in channels_:
            for block in range(sums.blocks):
                store_sums(sums, channel, block, sums_of_block(arrays, given, channel, block, planes))
            finish(table, sums, given, channel, planes)
            for sample in range(planes.samples):
                begin = (sample * planes.channels + channel) * planes.size
                write(out, begin, begin + planes.size, stream, arrays, numbers_of(table, channel))

    return PlaneKernels(sum_blocks, join_blocks, write_tiles, whole_channels, numbers)


@inline
def store_sums(sums, channel: int, block: int, both) -> None:
    index = block * sums.block_step + channel * sums.channel_step
    v.store_one(sums.data, index, both[0])
    v.store_one(sums.data, index + sums.second, both[1])


@inline
def load_number(table, row: int, channel: int):
    return v.load_one(table.data, row * table.step + channel)


@inline
def store_number(table, row: int, channel: int, value) -> None:
    v.store_one(table.data, row * table.step + channel, value)


@inline
def put_result(result, channel: int, table, value) -> None:
    """Store a result of the channel, rounded to the precision of the table first."""
    v.store_one(result, channel, v.number(table.data, value))


def block_sum(visit: Callable[..., Any]) -> Callable[..., Any]:
    """total = visit(total, arrays, …) for a channel's block, as in opgrad.cpu.kernels.loops.fold."""
    over_tile = fold(visit)

    @inline
    def over_block(total, planes, channel: int, block: int, arrays, numbers):
        begin, end = block * planes.per_block, min((block + 1) * planes.per_block, planes.samples * planes.tiles)
        for tile in range(begin, end):
            start = (tile // planes.tiles * planes.channels + channel) * planes.size
            first = tile % planes.tiles * TILE
            total = over_tile(total, start + first, start + min(first + TILE, planes.size), arrays, numbers)
        return total

    return over_block


@inline
def elements_of(block: int, planes) -> int:
    """How many elements of its channel a block has."""
    if planes.tiles > 1:
        return min(TILE, planes.size - block % planes.tiles * TILE)
    return min(planes.per_block, planes.samples - block * planes.per_block) * planes.size


# --- long planes: forward --------------------------------------------------------------------------------------------


class Normalized(NamedTuple):
    """What normalization reads and writes for each channel, and numbers for all of them.

    inverse: 1 / elements of a channel. epsilon: what is added to a variance. momentum: the weight of the running
    statistics so far.
    """

    scale: Pointer
    bias: Pointer
    running_mean: Pointer
    running_var: Pointer
    new_mean: Pointer
    new_var: Pointer
    saved_mean: Pointer
    saved_inv_std: Pointer
    inverse: Float
    epsilon: Float
    momentum: Float


_sum_of_block, _squares_of_block = block_sum(add_value), block_sum(add_square)


def _moments_of_block(arrays, given, channel: int, block: int, planes):
    """The mean of a block, and the sum of the squares of what its elements differ from it by."""
    x = arrays[0]
    zeros, inverse = (v.full(x, 0.0),), v.number(x, 1.0 / elements_of(block, planes))
    mean = v.reduce_add(_sum_of_block(zeros, planes, channel, block, arrays, ())[0]) * inverse
    return mean, v.reduce_add(_squares_of_block(zeros, planes, channel, block, arrays, mean)[0])


def _moments_of_channel(table, sums, given, channel: int, planes) -> None:
    """Join the moments of a channel's blocks, and mix them with the running statistics."""
    total, squares = 0.0, 0.0
    for block in range(sums.blocks):
        elements, begin = elements_of(block, planes), block * sums.block_step + channel * sums.channel_step
        for index in range(begin, begin + sums.count):
            total += v.load_one(sums.data, index) * elements
    mean = total * given.inverse
    for block in range(sums.blocks):
        elements, begin = elements_of(block, planes), block * sums.block_step + channel * sums.channel_step
        for index in range(begin, begin + sums.count):
            deviation = v.load_one(sums.data, index) - mean
            squares += v.load_one(sums.data, index + sums.second) + elements * deviation * deviation
    var = squares * given.inverse
    put_statistics(table, given, channel, mean, var)
    put_result(given.new_mean, channel, table, _mixed(given.running_mean, channel, mean, given.momentum))
    put_result(given.new_var, channel, table, _mixed(given.running_var, channel, var, given.momentum))


@inline
def _mixed(running, channel: int, value: float, momentum: float) -> float:
    return momentum * v.load_one(running, channel) + (1.0 - momentum) * value


@inline
def put_statistics(table, given, channel: int, mean, var) -> None:
    """Keep a channel's mean and 1 / standard deviation, and what elements are normalized with."""
    inv_std = v.first_lane(1.0 / v.sqrt(v.full(table.data, var + given.epsilon)))
    store_number(table, MEAN, channel, mean)
    store_number(table, FACTOR, channel, v.load_one(given.scale, channel) * inv_std)
    store_number(table, BIAS, channel, v.load_one(given.bias, channel))
    put_result(given.saved_mean, channel, table, mean)
    v.store_one(given.saved_inv_std, channel, inv_std)


@kernel
def take_statistics(channels, empty, given: Normalized, table: Rows):
    """Normalize with the running statistics, which stay; those of an empty batch are 0."""
    for channel in range(channels):
        mean, var = v.load_one(given.running_mean, channel), v.load_one(given.running_var, channel)
        v.store_one(given.new_mean, channel, mean)
        v.store_one(given.new_var, channel, var)
        if empty:
            mean, var = v.number(table.data, 0.0), v.number(table.data, 0.0)
        put_statistics(table, given, channel, mean, var)


def batch_normalized(x: Vector, mean, factor, bias) -> Vector:
    return v.fma(x - mean, factor, bias)


def _normalizing_numbers(table, channel: int):
    mean, factor = load_number(table, MEAN, channel), load_number(table, FACTOR, channel)
    return mean, factor, load_number(table, BIAS, channel)


BY_PLANES = plane_kernels(
    1, Normalized, _moments_of_block, _moments_of_channel, 3, _normalizing_numbers, batch_normalized
)


# --- long planes: backward -------------------------------------------------------------------------------------------


class Differentiated(NamedTuple):
    """What the gradients read and write for each channel, and 1 / elements of a channel."""

    scale: Pointer
    mean: Pointer
    inv_std: Pointer
    dscale: Pointer
    dbias: Pointer
    inverse: Float


@block_sum
def _gradients_of_block(total, arrays, i: int, whole: bool, mask, mean):
    dy, x = arrays
    value = get(dy, i, whole, mask)
    return total[0] + value, v.fma(value, get_or(x, i, whole, mask, mean) - mean, total[1])


def _gradient_sums(arrays, given, channel: int, block: int, planes):
    """The sums of dy and of dy * (x - mean) over a block of a channel."""
    zero, mean = v.full(arrays[1], 0.0), v.load_one(given.mean, channel)
    g, t = _gradients_of_block((zero, zero), planes, channel, block, arrays, mean)
    return v.reduce_add(g), v.reduce_add(t)


def _gradients_of_channel(table, sums, given, channel: int, planes) -> None:
    """The gradients of the channel's scale and bias, and what its dx is computed with."""
    g, t = 0.0, 0.0
    for block in range(sums.blocks):
        begin = block * sums.block_step + channel * sums.channel_step
        for index in range(begin, begin + sums.count):
            g += v.load_one(sums.data, index)
            t += v.load_one(sums.data, index + sums.second)
    inv_std = v.load_one(given.inv_std, channel)
    put_result(given.dscale, channel, table, t * inv_std)
    put_result(given.dbias, channel, table, g)
    store_number(table, MEAN, channel, v.load_one(given.mean, channel))
    store_number(table, FACTOR, channel, v.load_one(given.scale, channel) * inv_std)
    store_number(table, FROM_SCALE, channel, -t * inv_std * inv_std * given.inverse)
    store_number(table, FROM_BIAS, channel, -g * given.inverse)


def batch_gradient(dy: Vector, x: Vector, mean, factor, from_scale, from_bias) -> Vector:
    return (dy + v.fma(x - mean, from_scale, from_bias)) * factor


def _gradient_numbers(table, channel: int):
    mean, factor = load_number(table, MEAN, channel), load_number(table, FACTOR, channel)
    return mean, factor, load_number(table, FROM_SCALE, channel), load_number(table, FROM_BIAS, channel)


BY_PLANES_BACKWARD = plane_kernels(
    2, Differentiated, _gradient_sums, _gradients_of_channel, 4, _gradient_numbers, batch_gradient
)


# --- batch normalization where planes are shorter: vectors run across channels and planes ----------------------------
#
# Arrays are samples x columns, contiguous; a column is an element of a channel's plane. Sums over samples are formed in
# blocks of SAMPLES samples and strips of STRIP columns: `partial` has two rows for each block. `wide` has the numbers
# of the table once for every column of their channel.

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


# --- short planes: backward ------------------------------------------------------------------------------------------


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


BY_COLUMNS_BACKWARD = ColumnKernels(grad_sums, join_sums, column_writer(6, batch_gradient))


# --- short planes: forward -------------------------------------------------------------------------------------------


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


@fold_down
def _sum_means(total, arrays, block: int, numbers):
    (partial,), (samples, step) = arrays, numbers
    count = v.number(partial, min(SAMPLES, samples - block * SAMPLES))
    return (v.fma(v.load(partial, 2 * block * step), count, total[0]),)


@fold_down
def _sum_moments(total, arrays, block: int, numbers):
    (partial,), (samples, step, mean) = arrays, numbers
    count = v.number(partial, min(SAMPLES, samples - block * SAMPLES))
    deviation = v.load(partial, 2 * block * step) - mean
    return (total[0] + v.fma(deviation * count, deviation, v.load(partial, (2 * block + 1) * step)),)


@kernel
def join_moments(columns: Units, blocks, samples, partial: Rows, first: Pointer, second: Pointer):
    """The moments of all blocks joined."""
    step, zeros = partial.step, (v.full(partial.data, 0.0),)
    for i in range(columns.start, columns.stop, v.lanes(partial.data)):
        arrays = (partial.data + i,)
        mean = _sum_means(zeros, 0, blocks, arrays, (samples, step))[0] * v.number(partial.data, 1.0 / samples)
        v.store(first, i, mean)
        v.store(second, i, _sum_moments(zeros, 0, blocks, arrays, (samples, step, mean))[0])


BY_COLUMNS = ColumnKernels(moments_of_columns, join_moments, column_writer(4, batch_normalized))
