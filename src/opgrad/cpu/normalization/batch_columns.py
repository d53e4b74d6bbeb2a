"""Kernels of batch normalization where planes are shorter than a vector: vectors run across channels and planes.

Arrays are samples x columns, contiguous; a column is an element of a channel's plane. Sums over samples are formed
in blocks of BLOCK samples and strips of STRIP columns. `wide` is the table of `batch_planes` with each number once
for every column of its channel, `pitch` from one row to the next.
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
    load_one,
    number,
    store,
    store_one,
)
from opgrad.cpu.loops.columns import get
from opgrad.cpu.loops.map import row_writer
from opgrad.cpu.normalization.batch_planes import BIAS, normalized
from opgrad.cpu.normalization.batch_planes_grad import FACTOR, FROM_BIAS, FROM_SCALE, MEAN, gradient
from opgrad.cpu.normalization.layer_grad import column_total

BLOCK: Final = 64
STRIP: Final = 1024


@kernel
def spread(part, begin, end, channels, size, stride, pitch, table: Pointer, wide: Pointer):
    """Rows [begin, end) of the wide table."""
    for row in range(begin, end):
        for channel in range(channels):
            value = load_one(table, row * stride + channel)
            for column in range(channel * size, (channel + 1) * size):
                store_one(wide, row * pitch + column, value)


@inline
def clear(sums: Any, columns: int) -> None:
    for i in range(0, columns, lanes(sums)):
        store(sums, i, full(sums, 0.0))


# --- backward ------------------------------------------------------------------------------------------------------


@inline
def add_gradient(dy: Any, x: Any, mean: Any, g: Any, t: Any, i: int, whole: bool, mask: Any) -> None:
    v = get(dy, i, whole, mask)
    store(g, i, load(g, i) + v)
    store(t, i, fma(v, get(x, i, whole, mask) - load(mean, i), load(t, i)))


@kernel
def grad_sums(
    part, per_part, units, strips, samples, columns, pitch, dy: Pointer, x: Pointer, wide: Pointer, partial: Pointer
):
    """The sums of dy and of dy * (x - mean) over a block of samples."""
    w = lanes(x)
    every = first(x, w)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        block, begin = unit // strips, unit % strips * STRIP
        count = min(STRIP, columns - begin)
        g, mean = partial + (block * 2 * pitch + begin), wide + (MEAN * pitch + begin)
        t = g + pitch
        clear(g, count)
        clear(t, count)
        for sample in range(block * BLOCK, min((block + 1) * BLOCK, samples)):
            dy_row, x_row = dy + (sample * columns + begin), x + (sample * columns + begin)
            i = 0
            while i + w <= count:
                add_gradient(dy_row, x_row, mean, g, t, i, True, every)
                i += w
            if i < count:
                add_gradient(dy_row, x_row, mean, g, t, i, False, first(x, count - i))


@kernel
def join_sums(part, blocks, columns, pitch, partial: Pointer, joined: Pointer):
    """The sums of all blocks added up, a strip of columns in each part."""
    for i in range(part * STRIP, min((part + 1) * STRIP, columns), lanes(partial)):
        store(joined, i, column_total(partial + i, blocks, 2 * pitch))
        store(joined, pitch + i, column_total(partial + (pitch + i), blocks, 2 * pitch))


@inline
def _gradient(arrays: Any, i: int, whole: bool, mask: Any, pitch: int) -> Vector:
    dy, x, wide = arrays
    mean, factor = load(wide, MEAN * pitch + i), load(wide, FACTOR * pitch + i)
    from_scale, from_bias = load(wide, FROM_SCALE * pitch + i), load(wide, FROM_BIAS * pitch + i)
    return gradient(get(dy, i, whole, mask), get(x, i, whole, mask), mean, factor, from_scale, from_bias)


write_gradient = row_writer(_gradient)


@kernel
def grad_columns(
    part, per_part, units, strips, samples, columns, pitch, dy: Pointer, x: Pointer, dx: Pointer, wide: Pointer, stream
):
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        block, begin = unit // strips, unit % strips * STRIP
        count = min(STRIP, columns - begin)
        for sample in range(block * BLOCK, min((block + 1) * BLOCK, samples)):
            at = sample * columns + begin
            write_gradient(dx + at, 0, count, stream, (dy + at, x + at, wide + begin), pitch)


# --- forward -------------------------------------------------------------------------------------------------------


@inline
def add_value(x: Any, total: Any, i: int, whole: bool, mask: Any) -> None:
    store(total, i, load(total, i) + get(x, i, whole, mask))


@inline
def add_square(x: Any, mean: Any, total: Any, i: int, whole: bool, mask: Any) -> None:
    away = get(x, i, whole, mask) - load(mean, i)
    store(total, i, fma(away, away, load(total, i)))


@kernel
def moments_of_columns(part, per_part, units, strips, samples, columns, pitch, x: Pointer, partial: Pointer):
    """The mean over a block of samples, and the squares around it, which are read from the cache."""
    w = lanes(x)
    every = first(x, w)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        block, begin = unit // strips, unit % strips * STRIP
        count = min(STRIP, columns - begin)
        last = min((block + 1) * BLOCK, samples)
        mean = partial + (block * 2 * pitch + begin)
        squares = mean + pitch
        clear(mean, count)
        clear(squares, count)
        for sample in range(block * BLOCK, last):
            row, i = x + (sample * columns + begin), 0
            while i + w <= count:
                add_value(row, mean, i, True, every)
                i += w
            if i < count:
                add_value(row, mean, i, False, first(x, count - i))
        each = number(x, 1.0 / (last - block * BLOCK))
        for i in range(0, count, w):
            store(mean, i, load(mean, i) * each)
        for sample in range(block * BLOCK, last):
            row, i = x + (sample * columns + begin), 0
            while i + w <= count:
                add_square(row, mean, squares, i, True, every)
                i += w
            if i < count:
                add_square(row, mean, squares, i, False, first(x, count - i))


@kernel
def join_moments(part, blocks, samples, columns, pitch, inverse_samples: Float, partial: Pointer, joined: Pointer):
    """The moments of all blocks joined, a strip of columns in each part."""
    for i in range(part * STRIP, min((part + 1) * STRIP, columns), lanes(partial)):
        mean = full(partial, 0.0)
        for begin in range(0, blocks, BLOCK):
            chunk = full(partial, 0.0)
            for block in range(begin, min(begin + BLOCK, blocks)):
                count = number(partial, min(BLOCK, samples - block * BLOCK))
                chunk = fma(load(partial, block * 2 * pitch + i), count, chunk)
            mean = mean + chunk
        mean = mean * number(partial, inverse_samples)
        squares = full(partial, 0.0)
        for begin in range(0, blocks, BLOCK):
            chunk = full(partial, 0.0)
            for block in range(begin, min(begin + BLOCK, blocks)):
                count = number(partial, min(BLOCK, samples - block * BLOCK))
                away = load(partial, block * 2 * pitch + i) - mean
                chunk = chunk + fma(away * count, away, load(partial, block * 2 * pitch + (pitch + i)))
            squares = squares + chunk
        store(joined, i, mean)
        store(joined, pitch + i, squares)


@inline
def _normalized(arrays: Any, i: int, whole: bool, mask: Any, pitch: int) -> Vector:
    x, wide = arrays
    mean, factor, bias = load(wide, MEAN * pitch + i), load(wide, FACTOR * pitch + i), load(wide, BIAS * pitch + i)
    return normalized(get(x, i, whole, mask), mean, factor, bias)


write_normalized = row_writer(_normalized)


@kernel
def normalize_columns(
    part, per_part, units, strips, samples, columns, pitch, x: Pointer, y: Pointer, wide: Pointer, stream
):
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        block, begin = unit // strips, unit % strips * STRIP
        count = min(STRIP, columns - begin)
        for sample in range(block * BLOCK, min((block + 1) * BLOCK, samples)):
            at = sample * columns + begin
            write_normalized(y + at, 0, count, stream, (x + at, wide + begin), pitch)
