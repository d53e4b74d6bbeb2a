"""Kernels of batch normalization and its gradients where planes are at least as long as a vector.

Arrays are N x C x size, contiguous; a plane is the `size` elements of one channel of one sample. Planes are cut into
tiles of at most TILE elements. The elements of a channel are summed in blocks: some whole planes, or one tile where
planes are longer. `table` has a row for each kind of number that an element is computed with, and in it a number for
each channel.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import add_value, fold
from opgrad.cpu.kernels.loops.map import get, get_or, mapped
from opgrad.cpu.kernels.normalization.layer import add_square

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


# --- forward -------------------------------------------------------------------------------------------------------


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


def normalized(x: Vector, mean, factor, bias) -> Vector:
    return v.fma(x - mean, factor, bias)


def _normalizing_numbers(table, channel: int):
    mean, factor = load_number(table, MEAN, channel), load_number(table, FACTOR, channel)
    return mean, factor, load_number(table, BIAS, channel)


FORWARD = plane_kernels(1, Normalized, _moments_of_block, _moments_of_channel, 3, _normalizing_numbers, normalized)


# --- backward ------------------------------------------------------------------------------------------------------


class Differentiated(NamedTuple):
    """What the gradients read and write for each channel, and 1 / elements of a channel."""

    scale: Pointer
    mean: Pointer
    inv_std: Pointer
    dscale: Pointer
    dbias: Pointer
    inverse: Float


@inline
def _add_gradient(total, arrays, i: int, whole: bool, mask, mean):
    dy, x = arrays
    value = get(dy, i, whole, mask)
    return total[0] + value, v.fma(value, get_or(x, i, whole, mask, mean) - mean, total[1])


_gradients_of_block = block_sum(_add_gradient)


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


def gradient(dy: Vector, x: Vector, mean, factor, from_scale, from_bias) -> Vector:
    return (dy + v.fma(x - mean, from_scale, from_bias)) * factor


def _gradient_numbers(table, channel: int):
    mean, factor = load_number(table, MEAN, channel), load_number(table, FACTOR, channel)
    return mean, factor, load_number(table, FROM_SCALE, channel), load_number(table, FROM_BIAS, channel)


BACKWARD = plane_kernels(2, Differentiated, _gradient_sums, _gradients_of_channel, 4, _gradient_numbers, gradient)
