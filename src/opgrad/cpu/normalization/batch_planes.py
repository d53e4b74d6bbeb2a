"""Kernels of batch normalization for planes: arrays N x C x size, contiguous, the planes no shorter than a vector.

The elements of a channel are summed in blocks: whole planes of it, or a piece of CUT elements where planes are longer.
`partial` holds two numbers for each block. `table` holds some numbers for each channel, `stride` from one kind to
the next.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import (
    Float,
    Pointer,
    Vector,
    first,
    first_lane,
    fma,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    number,
    reduce_add,
    sqrt,
    store_one,
)
from opgrad.cpu.loops.columns import get
from opgrad.cpu.loops.map import row_writer

CUT: Final = 1 << 13  # elements of a block, which are read twice: they stay in the first-level cache
MEAN, INV_STD, FACTOR, BIAS, NEW_MEAN, NEW_VAR = range(6)  # the rows of the table
ROWS: Final = 6


@inline
def _plus(x: Vector, mean: Any, total: Vector) -> Vector:
    return total + x


@inline
def _plus_square(x: Vector, mean: Any, total: Vector) -> Vector:
    return fma(x - mean, x - mean, total)


def block_total(term: Callable[..., Vector]) -> Callable[..., Any]:
    """The sum of term(x, mean, total) over a block of a channel, whose terms for x = mean are 0."""

    @inline
    def add_up(
        x: Any, mean: Any, channel: int, block: int, channels: int, samples: int, size: int, cuts: int, planes: int
    ) -> Any:
        w = lanes(x)
        total = full(x, 0.0)
        for piece in range(block * planes, min((block + 1) * planes, samples * cuts)):
            at = (piece // cuts * channels + channel) * size + piece % cuts * CUT
            n = min(CUT, size - piece % cuts * CUT)
            source = x + at
            i = 0
            while i + w <= n:
                total = term(load(source, i), mean, total)
                i += w
            if i < n:
                total = term(load_masked(source, i, first(x, n - i), mean), mean, total)
        return reduce_add(total)

    return add_up


block_sum, block_squares = block_total(_plus), block_total(_plus_square)


@inline
def elements_of(block: int, planes: int, samples: int, size: int, cuts: int) -> int:
    """How many elements of its channel a block has."""
    if cuts > 1:
        return min(CUT, size - block % cuts * CUT)
    return min(planes, samples - block * planes) * size


@inline
def moments_of_block(
    x: Any, partial: Any, channel: int, block: int, channels: int, samples: int, size: int, cuts: int, planes: int
) -> None:
    blocks = (samples * cuts + planes - 1) // planes
    count = elements_of(block, planes, samples, size, cuts)
    zero = number(x, 0.0)
    mean = block_sum(x, zero, channel, block, channels, samples, size, cuts, planes) * number(x, 1.0 / count)
    place = 2 * (channel * blocks + block)
    store_one(partial, place, mean)
    store_one(partial, place + 1, block_squares(x, mean, channel, block, channels, samples, size, cuts, planes))


@inline
def moments_of_channel(
    table: Any, stride: int, partial: Any, channel: int, blocks: int, jump: int, pitch: int, each: int, second: int,
    planes: int, samples: int, size: int, cuts: int, inverse: float, epsilon: float, momentum: float,
) -> None:  # fmt: skip
    """Join the moments of a channel's blocks; mix the mean and the variance with those so far."""
    total, squares = 0.0, 0.0
    for block in range(blocks):
        count = elements_of(block, planes, samples, size, cuts)
        for place in range(block * jump + channel * pitch, block * jump + channel * pitch + each):
            total += load_one(partial, place) * count
    mean = total * inverse
    for block in range(blocks):
        count = elements_of(block, planes, samples, size, cuts)
        for place in range(block * jump + channel * pitch, block * jump + channel * pitch + each):
            away = load_one(partial, place) - mean
            squares += load_one(partial, place + second) + count * away * away
    var = squares * inverse
    put_statistics(table, stride, channel, mean, var, epsilon)
    old_mean, old_var = load_one(table, NEW_MEAN * stride + channel), load_one(table, NEW_VAR * stride + channel)
    store_one(table, NEW_MEAN * stride + channel, momentum * old_mean + (1.0 - momentum) * mean)
    store_one(table, NEW_VAR * stride + channel, momentum * old_var + (1.0 - momentum) * var)


@inline
def put_statistics(table: Any, stride: int, channel: int, mean: float, var: float, epsilon: float) -> None:
    """The rows MEAN, INV_STD and FACTOR, which holds the scale before."""
    s = first_lane(1.0 / sqrt(full(table, var + epsilon)))
    store_one(table, MEAN * stride + channel, mean)
    store_one(table, INV_STD * stride + channel, s)
    store_one(table, FACTOR * stride + channel, load_one(table, FACTOR * stride + channel) * s)


@inline
def normalized(x: Vector, mean: Any, factor: Any, bias: Any) -> Vector:
    return fma(x - mean, factor, bias)


@inline
def _plane_normalized(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
    (x,) = arrays
    mean, factor, bias = numbers
    return normalized(get(x, i, whole, mask), mean, factor, bias)


write_normalized = row_writer(_plane_normalized)


@inline
def write_piece(y: Any, x: Any, table: Any, stride: int, channel: int, at: int, n: int, stream: int) -> None:
    mean, factor = load_one(table, MEAN * stride + channel), load_one(table, FACTOR * stride + channel)
    bias = load_one(table, BIAS * stride + channel)
    write_normalized(y + at, 0, n, stream, (x + at,), (mean, factor, bias))


@kernel
def prepare_forward(
    part, channels, stride, scale: Pointer, bias: Pointer, running_mean: Pointer, running_var: Pointer, table: Pointer
):
    for c in range(channels):
        store_one(table, FACTOR * stride + c, load_one(scale, c))
        store_one(table, BIAS * stride + c, load_one(bias, c))
        store_one(table, NEW_MEAN * stride + c, load_one(running_mean, c))
        store_one(table, NEW_VAR * stride + c, load_one(running_var, c))


@kernel
def take_running(part, channels, stride, epsilon: Float, table: Pointer):
    """Normalize with the statistics so far."""
    for c in range(channels):
        put_statistics(
            table, stride, c, load_one(table, NEW_MEAN * stride + c), load_one(table, NEW_VAR * stride + c), epsilon
        )


@kernel
def take_none(part, channels, stride, epsilon: Float, table: Pointer):
    """The statistics of an empty batch: mean and variance are 0."""
    for c in range(channels):
        put_statistics(table, stride, c, 0.0, 0.0, epsilon)


@kernel
def put_statistics_of_all(
    part, channels, stride, table: Pointer,
    new_mean: Pointer, new_var: Pointer, saved_mean: Pointer, saved_inv_std: Pointer,
):  # fmt: skip
    for c in range(channels):
        store_one(new_mean, c, load_one(table, NEW_MEAN * stride + c))
        store_one(new_var, c, load_one(table, NEW_VAR * stride + c))
        store_one(saved_mean, c, load_one(table, MEAN * stride + c))
        store_one(saved_inv_std, c, load_one(table, INV_STD * stride + c))


@kernel
def moments_of_blocks(
    part, per_part, units, channels, samples, size, cuts, planes, blocks, x: Pointer, partial: Pointer
):
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        moments_of_block(x, partial, unit // blocks, unit % blocks, channels, samples, size, cuts, planes)


@kernel
def moments_of_channels(
    part, channels, blocks, jump, pitch, each, second, stride, planes, samples, size, cuts,
    inverse: Float, epsilon: Float, momentum: Float, table: Pointer, partial: Pointer,
):  # fmt: skip
    for channel in range(channels):
        moments_of_channel(
            table, stride, partial, channel, blocks, jump, pitch, each, second,
            planes, samples, size, cuts, inverse, epsilon, momentum,
        )  # fmt: skip


@kernel
def normalize_planes(
    part, per_part, units, channels, size, cuts, stride, x: Pointer, y: Pointer, table: Pointer, stream
):
    """A unit is a piece of a plane, in the order of memory."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        plane, begin = unit // cuts, unit % cuts * CUT
        n = min(CUT, size - begin)
        write_piece(y, x, table, stride, plane % channels, plane * size + begin, n, stream)


@kernel
def normalize_channels(
    part, per_part, units, channels, samples, size, cuts, planes, blocks, jump, pitch, each, second, stride,
    inverse: Float, epsilon: Float, momentum: Float, x: Pointer, y: Pointer, table: Pointer, partial: Pointer, stream,
):  # fmt: skip
    """The three steps for one channel after the other, while it is in the cache."""
    for channel in range(part * per_part, min((part + 1) * per_part, units)):
        for block in range(blocks):
            moments_of_block(x, partial, channel, block, channels, samples, size, cuts, planes)
        moments_of_channel(
            table, stride, partial, channel, blocks, jump, pitch, each, second,
            planes, samples, size, cuts, inverse, epsilon, momentum,
        )  # fmt: skip
        for sample in range(samples):
            at = (sample * channels + channel) * size
            write_piece(y, x, table, stride, channel, at, size, stream)
