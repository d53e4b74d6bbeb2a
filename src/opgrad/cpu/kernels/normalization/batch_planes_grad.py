"""Kernels of batch normalization's gradients for planes: arrays N x C x size, contiguous.

The planes are no shorter than a vector; tiles, blocks and `table` are as in opgrad.cpu.normalization.batch_planes.
"""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import get, get_or, mapped
from opgrad.cpu.kernels.normalization.batch_planes import (
    BlockSums,
    Planes,
    block_sum,
    load_number,
    store_number,
    store_sums,
    tile_of_plane,
)

MEAN, INV_STD, FACTOR, FROM_SCALE, FROM_BIAS, DSCALE, DBIAS = range(7)  # the rows of the table
ROWS: Final = 7


@inline
def _add_gradient(total, arrays, i: int, whole: bool, mask, mean):
    dy, x = arrays
    value = get(dy, i, whole, mask)
    return total[0] + value, v.fma(value, get_or(x, i, whole, mask, mean) - mean, total[1])


_sums_of_block = block_sum(_add_gradient)


@inline
def grad_block(dy, x, sums, table, channel: int, block: int, planes) -> None:
    """The sums of dy and of dy * (x - mean) over a block of a channel."""
    zero, mean = v.full(x, 0.0), load_number(table, MEAN, channel)
    g, t = _sums_of_block((zero, zero), planes, channel, block, (dy, x), mean)
    store_sums(sums, channel, block, v.reduce_add(g), v.reduce_add(t))


@inline
def grad_channel(table, sums, channel: int, inverse: float) -> None:
    """What a channel's dx takes from dy, x and its sums."""
    g, t = 0.0, 0.0
    for block in range(sums.blocks):
        begin = block * sums.block_step + channel * sums.channel_step
        for index in range(begin, begin + sums.count):
            g += v.load_one(sums.data, index)
            t += v.load_one(sums.data, index + sums.second)
    inv_std = load_number(table, INV_STD, channel)
    store_number(table, DSCALE, channel, t * inv_std)
    store_number(table, DBIAS, channel, g)
    store_number(table, FROM_SCALE, channel, -t * inv_std * inv_std * inverse)
    store_number(table, FROM_BIAS, channel, -g * inverse)


@inline
def gradient(dy: Vector, x: Vector, mean, factor, from_scale, from_bias) -> Vector:
    return (dy + v.fma(x - mean, from_scale, from_bias)) * factor


write_gradient = mapped(gradient)


@inline
def numbers_of(table, channel: int):
    """What `gradient` takes of a channel."""
    mean, factor = load_number(table, MEAN, channel), load_number(table, FACTOR, channel)
    return mean, factor, load_number(table, FROM_SCALE, channel), load_number(table, FROM_BIAS, channel)


@kernel
def prepare_grad(channels, scale: Pointer, mean: Pointer, inv_std: Pointer, table: Rows):
    """The table's first rows, from the arguments in whatever dtypes they come."""
    for channel in range(channels):
        s = v.load_one(inv_std, channel)
        store_number(table, MEAN, channel, v.load_one(mean, channel))
        store_number(table, INV_STD, channel, s)
        store_number(table, FACTOR, channel, v.load_one(scale, channel) * s)


@kernel
def no_grads(channels, table: Rows):
    """The gradients of scale and bias from an empty array."""
    for channel in range(channels):
        store_number(table, DSCALE, channel, 0.0)
        store_number(table, DBIAS, channel, 0.0)


@kernel
def put_grads(channels, table: Rows, dscale: Pointer, dbias: Pointer):
    for channel in range(channels):
        v.store_one(dscale, channel, load_number(table, DSCALE, channel))
        v.store_one(dbias, channel, load_number(table, DBIAS, channel))


@kernel
def grad_blocks(units: Units, planes: Planes, dy: Pointer, x: Pointer, table: Rows, sums: BlockSums):
    for unit in units:
        grad_block(dy, x, sums, table, unit // sums.blocks, unit % sums.blocks, planes)


@kernel
def grad_coefficients(channels, inverse: Float, table: Rows, sums: BlockSums):
    for channel in range(channels):
        grad_channel(table, sums, channel, inverse)


@kernel
def grad_planes(tiles: Units, planes: Planes, dy: Pointer, x: Pointer, dx: Pointer, table: Rows, stream):
    """Tiles of planes in the order of memory."""
    for tile in tiles:
        plane = tile // planes.tiles
        begin, end = tile_of_plane(plane, tile % planes.tiles, planes.size)
        write_gradient(dx, begin, end, stream, (dy, x), numbers_of(table, plane % planes.channels))


@kernel
def grad_channels(
    channels: Units, planes: Planes, inverse: Float, dy: Pointer, x: Pointer, dx: Pointer,
    table: Rows, sums: BlockSums, stream,
):  # fmt: skip
    """The three steps for one channel after the other, while it is in the cache."""
    for channel in channels:
        for block in range(sums.blocks):
            grad_block(dy, x, sums, table, channel, block, planes)
        grad_channel(table, sums, channel, inverse)
        numbers = numbers_of(table, channel)
        for sample in range(planes.samples):
            begin = (sample * planes.channels + channel) * planes.size
            write_gradient(dx, begin, begin + planes.size, stream, (dy, x), numbers)
