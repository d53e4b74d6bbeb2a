"""Kernels of batch normalization for planes: arrays N x C x size, contiguous, the planes no shorter than a vector.

Planes are cut into tiles of at most TILE elements. The elements of a channel are summed in blocks: whole planes of it,
or a tile where planes are longer. `table` holds some numbers for each channel, a row for each kind.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import add_value, fold
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.normalization.bundles import add_square

TILE: Final = 1 << 13  # elements of a block, which are read twice: they stay in the first-level cache
MEAN, INV_STD, FACTOR, BIAS, NEW_MEAN, NEW_VAR = range(6)  # the rows of the table
ROWS: Final = 6


class Planes(NamedTuple):
    """Channels of `samples` planes of `size` elements, the tiles of a plane, and those of a block of a channel."""

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


class Running(NamedTuple):
    """1 / elements of a channel, what is added to its variance, and the weight of the statistics so far."""

    inverse: Float
    epsilon: Float
    momentum: Float


# --- the table, the planes, and sums of blocks -----------------------------------------------------------------------


@inline
def load_number(table, row: int, channel: int):
    return v.load_one(table.data, row * table.step + channel)


@inline
def store_number(table, row: int, channel: int, value) -> None:
    v.store_one(table.data, row * table.step + channel, value)


@inline
def tile_of_plane(plane: int, tile: int, size: int):
    """Where a tile of a plane begins and ends."""
    begin = tile * TILE
    return plane * size + begin, plane * size + min(begin + TILE, size)


def block_sum(visit: Callable[..., Any]) -> Callable[..., Any]:
    """total = visit(total, arrays, …) for a channel's block, as in opgrad.cpu.kernels.loops.fold."""
    over_tile = fold(visit)

    @inline
    def over_block(total, planes, channel: int, block: int, arrays, numbers):
        begin, end = block * planes.per_block, min((block + 1) * planes.per_block, planes.samples * planes.tiles)
        for tile in range(begin, end):
            plane = tile // planes.tiles * planes.channels + channel
            first, last = tile_of_plane(plane, tile % planes.tiles, planes.size)
            total = over_tile(total, first, last, arrays, numbers)
        return total

    return over_block


@inline
def elements_of(block: int, planes) -> int:
    """How many elements of its channel a block has."""
    if planes.tiles > 1:
        return min(TILE, planes.size - block % planes.tiles * TILE)
    return min(planes.per_block, planes.samples - block * planes.per_block) * planes.size


@inline
def store_sums(sums, channel: int, block: int, first, second) -> None:
    index = block * sums.block_step + channel * sums.channel_step
    v.store_one(sums.data, index, first)
    v.store_one(sums.data, index + sums.second, second)


# --- statistics ----------------------------------------------------------------------------------------------------


_sum_of_block, _squares_of_block = block_sum(add_value), block_sum(add_square)


@inline
def moments_of_block(x, sums, channel: int, block: int, planes) -> None:
    zeros, inverse = (v.full(x, 0.0),), v.number(x, 1.0 / elements_of(block, planes))
    mean = v.reduce_add(_sum_of_block(zeros, planes, channel, block, (x,), ())[0]) * inverse
    store_sums(
        sums, channel, block, mean, v.reduce_add(_squares_of_block(zeros, planes, channel, block, (x,), mean)[0])
    )


@inline
def moments_of_channel(table, sums, channel: int, planes, running) -> None:
    """Join the moments of a channel's blocks; mix the mean and the variance with those so far."""
    total, squares = 0.0, 0.0
    for block in range(sums.blocks):
        elements, begin = elements_of(block, planes), block * sums.block_step + channel * sums.channel_step
        for index in range(begin, begin + sums.count):
            total += v.load_one(sums.data, index) * elements
    mean = total * running.inverse
    for block in range(sums.blocks):
        elements, begin = elements_of(block, planes), block * sums.block_step + channel * sums.channel_step
        for index in range(begin, begin + sums.count):
            deviation = v.load_one(sums.data, index) - mean
            squares += v.load_one(sums.data, index + sums.second) + elements * deviation * deviation
    var = squares * running.inverse
    put_statistics(table, channel, mean, var, running.epsilon)
    mix(table, NEW_MEAN, channel, mean, running.momentum)
    mix(table, NEW_VAR, channel, var, running.momentum)


@inline
def mix(table, row: int, channel: int, value: float, momentum: float) -> None:
    store_number(table, row, channel, momentum * load_number(table, row, channel) + (1.0 - momentum) * value)


@inline
def put_statistics(table, channel: int, mean, var, epsilon: float) -> None:
    """The rows MEAN, INV_STD and FACTOR, which holds the scale before."""
    inv_std = v.first_lane(1.0 / v.sqrt(v.full(table.data, var + epsilon)))
    store_number(table, MEAN, channel, mean)
    store_number(table, INV_STD, channel, inv_std)
    store_number(table, FACTOR, channel, load_number(table, FACTOR, channel) * inv_std)


@kernel
def prepare_forward(channels, scale: Pointer, bias: Pointer, running_mean: Pointer, running_var: Pointer, table: Rows):
    for channel in range(channels):
        store_number(table, FACTOR, channel, v.load_one(scale, channel))
        store_number(table, BIAS, channel, v.load_one(bias, channel))
        store_number(table, NEW_MEAN, channel, v.load_one(running_mean, channel))
        store_number(table, NEW_VAR, channel, v.load_one(running_var, channel))


@kernel
def take_running(channels, running: Running, table: Rows):
    """Normalize with the statistics so far."""
    for channel in range(channels):
        mean, var = load_number(table, NEW_MEAN, channel), load_number(table, NEW_VAR, channel)
        put_statistics(table, channel, mean, var, running.epsilon)


@kernel
def take_none(channels, running: Running, table: Rows):
    """The statistics of an empty batch: mean and variance are 0."""
    for channel in range(channels):
        put_statistics(table, channel, 0.0, 0.0, running.epsilon)


@kernel
def put_statistics_of_all(
    channels, table: Rows, new_mean: Pointer, new_var: Pointer, saved_mean: Pointer, saved_inv_std: Pointer
):
    for channel in range(channels):
        v.store_one(new_mean, channel, load_number(table, NEW_MEAN, channel))
        v.store_one(new_var, channel, load_number(table, NEW_VAR, channel))
        v.store_one(saved_mean, channel, load_number(table, MEAN, channel))
        v.store_one(saved_inv_std, channel, load_number(table, INV_STD, channel))


@kernel
def moments_of_blocks(units: Units, planes: Planes, x: Pointer, sums: BlockSums):
    for unit in units:
        moments_of_block(x, sums, unit // sums.blocks, unit % sums.blocks, planes)


@kernel
def moments_of_channels(planes: Planes, running: Running, table: Rows, sums: BlockSums):
    for channel in range(planes.channels):
        moments_of_channel(table, sums, channel, planes, running)


# --- writing -------------------------------------------------------------------------------------------------------


@inline
def normalized(x: Vector, mean, factor, bias) -> Vector:
    return v.fma(x - mean, factor, bias)


write_normalized = mapped(normalized)


@inline
def numbers_of(table, channel: int):
    """What `normalized` takes of a channel."""
    mean, factor = load_number(table, MEAN, channel), load_number(table, FACTOR, channel)
    return mean, factor, load_number(table, BIAS, channel)


@kernel
def normalize_planes(tiles: Units, planes: Planes, x: Pointer, y: Pointer, table: Rows, stream):
    """Tiles of planes in the order of memory."""
    for tile in tiles:
        plane = tile // planes.tiles
        begin, end = tile_of_plane(plane, tile % planes.tiles, planes.size)
        write_normalized(y, begin, end, stream, (x,), numbers_of(table, plane % planes.channels))


@kernel
def normalize_channels(
    channels: Units, planes: Planes, running: Running, x: Pointer, y: Pointer, table: Rows, sums: BlockSums, stream
):
    """The three steps for one channel after the other, while it is in the cache."""
    for channel in channels:
        for block in range(sums.blocks):
            moments_of_block(x, sums, channel, block, planes)
        moments_of_channel(table, sums, channel, planes, running)
        numbers = numbers_of(table, channel)
        for sample in range(planes.samples):
            begin = (sample * planes.channels + channel) * planes.size
            write_normalized(y, begin, begin + planes.size, stream, (x,), numbers)
