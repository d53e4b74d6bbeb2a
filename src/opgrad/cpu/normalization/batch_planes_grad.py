"""Kernels of batch normalization's gradients for planes: arrays N x C x size, contiguous.

The planes are no shorter than a vector; blocks, `partial` and `table` are as in opgrad.cpu.normalization.batch_planes.
"""

from typing import Any, Final

from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import (
    Float,
    Pointer,
    Vector,
    first,
    fma,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    reduce_add,
    store_one,
)
from opgrad.cpu.loops.columns import get
from opgrad.cpu.loops.map import row_writer
from opgrad.cpu.normalization.batch_planes import CUT

MEAN, INV_STD, FACTOR, FROM_SCALE, FROM_BIAS, DSCALE, DBIAS = range(7)  # the rows of the table
ROWS: Final = 7


@inline
def grad_block(
    dy: Any, x: Any, partial: Any, table: Any, stride: int, channel: int, block: int, channels: int, samples: int,
    size: int, cuts: int, planes: int,
) -> None:  # fmt: skip
    """The sums of one block of a channel: of `planes` pieces, of which a plane has `cuts`."""
    w = lanes(x)
    mean = load_one(table, MEAN * stride + channel)
    g = t = full(x, 0.0)
    blocks = (samples * cuts + planes - 1) // planes
    for piece in range(block * planes, min((block + 1) * planes, samples * cuts)):
        at = (piece // cuts * channels + channel) * size + piece % cuts * CUT
        n = min(CUT, size - piece % cuts * CUT)
        dy_piece, x_piece = dy + at, x + at
        i = 0
        while i + w <= n:
            v = load(dy_piece, i)
            g, t = g + v, fma(v, load(x_piece, i) - mean, t)
            i += w
        if i < n:
            mask = first(x, n - i)
            v = load_masked(dy_piece, i, mask, 0.0)
            g, t = g + v, fma(v, load_masked(x_piece, i, mask, mean) - mean, t)
    place = 2 * (channel * blocks + block)
    store_one(partial, place, reduce_add(g))
    store_one(partial, place + 1, reduce_add(t))


@inline
def grad_channel(
    table: Any, stride: int, partial: Any, channel: int, blocks: int, jump: int, pitch: int, each: int, second: int,
    inverse: float,
) -> None:  # fmt: skip
    """What a channel's dx takes from dy, x and its sums, which stand at partial[block * jump + channel * pitch + k].

    k < each; the second sum is `second` numbers behind the first.
    """
    g, t = 0.0, 0.0
    for block in range(blocks):
        for place in range(block * jump + channel * pitch, block * jump + channel * pitch + each):
            g += load_one(partial, place)
            t += load_one(partial, place + second)
    inv_std = load_one(table, INV_STD * stride + channel)
    store_one(table, DSCALE * stride + channel, t * inv_std)
    store_one(table, DBIAS * stride + channel, g)
    store_one(table, FROM_SCALE * stride + channel, -t * inv_std * inv_std * inverse)
    store_one(table, FROM_BIAS * stride + channel, -g * inverse)


@inline
def gradient(dy: Vector, x: Vector, mean: Any, factor: Any, from_scale: Any, from_bias: Any) -> Vector:
    return (dy + fma(x - mean, from_scale, from_bias)) * factor


@inline
def _plane_gradient(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
    dy, x = arrays
    mean, factor, from_scale, from_bias = numbers
    return gradient(get(dy, i, whole, mask), get(x, i, whole, mask), mean, factor, from_scale, from_bias)


write_gradient = row_writer(_plane_gradient)


@inline
def write_grad_piece(
    dx: Any, dy: Any, x: Any, table: Any, stride: int, channel: int, at: int, n: int, stream: int
) -> None:
    mean, factor = load_one(table, MEAN * stride + channel), load_one(table, FACTOR * stride + channel)
    from_scale = load_one(table, FROM_SCALE * stride + channel)
    from_bias = load_one(table, FROM_BIAS * stride + channel)
    write_gradient(dx + at, 0, n, stream, (dy + at, x + at), (mean, factor, from_scale, from_bias))


@kernel
def prepare_grad(part, channels, stride, scale: Pointer, mean: Pointer, inv_std: Pointer, table: Pointer):
    """The table's first rows, from the arguments in whatever dtypes they come."""
    for c in range(channels):
        s = load_one(inv_std, c)
        store_one(table, MEAN * stride + c, load_one(mean, c))
        store_one(table, INV_STD * stride + c, s)
        store_one(table, FACTOR * stride + c, load_one(scale, c) * s)


@kernel
def no_grads(part, channels, stride, table: Pointer):
    """The gradients of scale and bias from an empty array."""
    for c in range(channels):
        store_one(table, DSCALE * stride + c, 0.0)
        store_one(table, DBIAS * stride + c, 0.0)


@kernel
def put_grads(part, channels, stride, table: Pointer, dscale: Pointer, dbias: Pointer):
    for c in range(channels):
        store_one(dscale, c, load_one(table, DSCALE * stride + c))
        store_one(dbias, c, load_one(table, DBIAS * stride + c))


@kernel
def grad_blocks(
    part, per_part, units, channels, samples, size, cuts, planes, blocks, stride,
    dy: Pointer, x: Pointer, table: Pointer, partial: Pointer,
):  # fmt: skip
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        channel, block = unit // blocks, unit % blocks
        grad_block(dy, x, partial, table, stride, channel, block, channels, samples, size, cuts, planes)


@kernel
def grad_coefficients(
    part, channels, blocks, jump, pitch, each, second, stride, inverse: Float, table: Pointer, partial: Pointer
):
    for channel in range(channels):
        grad_channel(table, stride, partial, channel, blocks, jump, pitch, each, second, inverse)


@kernel
def grad_planes(
    part, per_part, units, channels, size, cuts, stride, dy: Pointer, x: Pointer, dx: Pointer, table: Pointer, stream
):
    """A unit is a piece of a plane, in the order of memory."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        plane, begin = unit // cuts, unit % cuts * CUT
        n = min(CUT, size - begin)
        write_grad_piece(dx, dy, x, table, stride, plane % channels, plane * size + begin, n, stream)


@kernel
def grad_channels(
    part, per_part, units, channels, samples, size, cuts, planes, blocks, jump, pitch, each, second, stride,
    inverse: Float, dy: Pointer, x: Pointer, dx: Pointer, table: Pointer, partial: Pointer, stream,
):  # fmt: skip
    """The three steps for one channel after the other, while it is in the cache."""
    for channel in range(part * per_part, min((part + 1) * per_part, units)):
        for block in range(blocks):
            grad_block(dy, x, partial, table, stride, channel, block, channels, samples, size, cuts, planes)
        grad_channel(table, stride, partial, channel, blocks, jump, pitch, each, second, inverse)
        for sample in range(samples):
            at = (sample * channels + channel) * size
            write_grad_piece(dx, dy, x, table, stride, channel, at, size, stream)
