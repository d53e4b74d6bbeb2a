"""Kernels of the gradients of layer normalization, with a mean and without.

Arrays are rows x n, contiguous. Sums over rows are formed apart for each block of rows, so that their order depends
on the shape alone; `sums` holds two for each block and column, `stride` numbers from one to the next.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.native import Kernel, inline, kernel
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
    number,
    prefetch,
    reduce_add,
    store,
    store_masked,
    store_one,
)
from opgrad.cpu.loops.columns import get
from opgrad.cpu.loops.map import row_writer
from opgrad.cpu.normalization.layer import CHUNK, dropped, kept

STRIP: Final = 1024  # columns of a part where rows are split: its sums, 8 KiB, stay in the first-level cache
BLOCK: Final = 1 << 14  # elements of a split row that one part sums


# --- what layer normalization has and its simplified form lacks ----------------------------------------------------


@inline
def less_mean(x: Vector, mean: Any) -> Vector:
    return x - mean


@inline
def as_it_is(x: Vector, mean: Any) -> Vector:
    return x


@inline
def number_at(p: Any, row: int) -> Any:
    return load_one(p, row)


@inline
def zero_at(p: Any, row: int) -> Any:
    return number(p, 0.0)


@inline
def add_to(sums: Any, i: int, v: Vector) -> None:
    store(sums, i, load(sums, i) + v)


@inline
def add_nowhere(sums: Any, i: int, v: Vector) -> None:
    pass


# --- whole rows ----------------------------------------------------------------------------------------------------


def gradient_sums(centre: Callable[..., Vector], add: Callable[..., None], add_bias: Callable[..., None]) -> Any:
    """The sums of g = dy * scale and of g * normalized x over a row; adds up dscale and dbias meanwhile."""

    @inline
    def add_up(
        dy: Any, x: Any, scale: Any, n: int, mean: Any, inv_std: Any, dscale: Any, dbias: Any, ahead: int
    ) -> Any:
        w, i = lanes(x), 0
        zero = full(x, 0.0)
        g_total = t_total = zero
        while i + w <= n:
            end = min(i + CHUNK * w, n)
            g_chunk = t_chunk = zero
            while i + w <= end:
                v = load(dy, i)
                t = v * (centre(load(x, i), mean) * inv_std)
                add(dscale, i, t)
                add_bias(dbias, i, v)
                factor = load(scale, i)
                g_chunk = fma(v, factor, g_chunk)
                t_chunk = fma(t, factor, t_chunk)
                prefetch(dy, i + ahead)
                prefetch(x, i + ahead)
                i += w
            g_total, t_total = g_total + g_chunk, t_total + t_chunk
        if i < n:
            mask = first(x, n - i)
            v = load_masked(dy, i, mask, 0.0)
            t = v * (centre(load_masked(x, i, mask, mean), mean) * inv_std)
            add(dscale, i, t)
            add_bias(dbias, i, v)
            factor = load_masked(scale, i, mask, 0.0)
            g_total, t_total = fma(v, factor, g_total), fma(t, factor, t_total)
        return reduce_add(g_total), reduce_add(t_total)

    return add_up


def gradient_value(centre: Callable[..., Vector]) -> Callable[..., Vector]:
    """dx = inv_std * (dy * scale + (from_bias + from_scale * normalized x)); 0 for a row of one element."""

    @inline
    def value(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, x, scale = arrays
        mean, inv_std, from_bias, from_scale = numbers
        n = centre(get(x, i, whole, mask), mean) * inv_std
        return (get(dy, i, whole, mask) * get(scale, i, whole, mask) + fma(n, from_scale, from_bias)) * inv_std

    return value


def rows_kernel(
    centre: Callable[..., Vector],
    mean_of: Callable[..., Any],
    keep: Callable[..., Any],
    add_bias: Callable[..., None],
) -> Kernel:
    """dx of whole rows, and dscale and dbias of each block of rows."""
    add_up, write = gradient_sums(centre, add_to, add_bias), row_writer(gradient_value(centre))

    @kernel
    def grad_rows(
        part, per_part, units, rows, per_unit, n, stride, inverse: Float, dy: Pointer, x: Pointer, scale: Pointer,
        mean: Pointer, inv_std: Pointer, dx: Pointer, sums: Pointer, stream,
    ):  # fmt: skip
        each, zero = number(x, inverse), number(x, 0.0)
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            dscale = sums + unit * 2 * stride
            dbias = dscale + stride
            for i in range(0, 2 * stride, lanes(x)):
                store(dscale, i, full(x, 0.0))
            for row in range(unit * per_unit, min((unit + 1) * per_unit, rows)):
                dy_row, x_row = dy + row * n, x + row * n
                m, s = mean_of(mean, row), load_one(inv_std, row)
                g, t = add_up(dy_row, x_row, scale, n, m, s, dscale, dbias, n)
                numbers = (m, s, keep(-each * g, zero), -each * t)
                write(dx + row * n, 0, n, stream, (dy_row, x_row, scale), numbers)

    return grad_rows


def row_sums_kernel(centre: Callable[..., Vector], mean_of: Callable[..., Any]) -> Kernel:
    """The two sums of each block of a split row."""
    add_up = gradient_sums(centre, add_nowhere, add_nowhere)

    @kernel
    def sum_row_blocks(
        part, per_part, units, blocks, n, dy: Pointer, x: Pointer, scale: Pointer, mean: Pointer, inv_std: Pointer,
        partial: Pointer,
    ):  # fmt: skip
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            at = row * n + begin
            m, s = mean_of(mean, row), load_one(inv_std, row)
            g, t = add_up(dy + at, x + at, scale + begin, min(BLOCK, n - begin), m, s, partial, partial, BLOCK)
            store_one(partial, 2 * unit, g)
            store_one(partial, 2 * unit + 1, t)

    return sum_row_blocks


@kernel
def row_coefficients(part, rows, blocks, inverse: Float, partial: Pointer, coefficients: Pointer):
    """What dx of each split row takes from the gradients of bias and scale."""
    for row in range(rows):
        g, t = 0.0, 0.0
        for block in range(row * blocks, (row + 1) * blocks):
            g += load_one(partial, 2 * block)
            t += load_one(partial, 2 * block + 1)
        store_one(coefficients, 2 * row, -g * inverse)
        store_one(coefficients, 2 * row + 1, -t * inverse)


def strips_kernel(
    centre: Callable[..., Vector],
    mean_of: Callable[..., Any],
    from_bias_of: Callable[..., Any],
    add_bias: Callable[..., None],
) -> Kernel:
    """dx of a strip of columns, and dscale and dbias of each block of its rows."""
    add_up, write = gradient_sums(centre, add_to, add_bias), row_writer(gradient_value(centre))

    @kernel
    def grad_strips(
        part, per_part, units, strips, rows, per_unit, n, stride, dy: Pointer, x: Pointer, scale: Pointer,
        mean: Pointer, inv_std: Pointer, coefficients: Pointer, dx: Pointer, sums: Pointer, stream,
    ):  # fmt: skip
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            block, begin = unit // strips, unit % strips * STRIP
            columns = min(STRIP, n - begin)
            dscale = sums + (block * 2 * stride + begin)
            dbias = dscale + stride
            for i in range(0, columns, lanes(x)):
                store(dscale, i, full(x, 0.0))
                store(dbias, i, full(x, 0.0))
            for row in range(block * per_unit, min((block + 1) * per_unit, rows)):
                at = row * n + begin
                m, s = mean_of(mean, row), load_one(inv_std, row)
                add_up(dy + at, x + at, scale + begin, columns, m, s, dscale, dbias, n)
                numbers = (m, s, from_bias_of(coefficients, 2 * row), load_one(coefficients, 2 * row + 1))
                write(dx + at, 0, columns, stream, (dy + at, x + at, scale + begin), numbers)

    return grad_strips


def add_blocks_kernel(put_bias: Callable[..., None]) -> Kernel:
    """dscale and dbias: the sums of all blocks of rows added up, a strip of columns in each part."""

    @kernel
    def add_blocks(part, blocks, n, stride, sums: Pointer, dscale: Pointer, dbias: Pointer):
        begin, end = part * STRIP, min((part + 1) * STRIP, n)
        for i in range(begin, end, lanes(sums)):
            mask = first(sums, end - i)
            store_masked(dscale, i, column_total(sums + i, blocks, 2 * stride), mask)
            put_bias(dbias, i, column_total(sums + (stride + i), blocks, 2 * stride), mask)

    return add_blocks


@inline
def column_total(sums: Any, count: int, stride: int) -> Vector:
    """The sum of `count` vectors, `stride` numbers from one to the next."""
    total = full(sums, 0.0)
    for begin in range(0, count, CHUNK):
        chunk = full(sums, 0.0)
        for j in range(begin, min(begin + CHUNK, count)):
            chunk = chunk + load(sums, j * stride)
        total = total + chunk
    return total


@inline
def put_vector(p: Any, i: int, v: Vector, mask: Any) -> None:
    store_masked(p, i, v, mask)


@inline
def put_no_vector(p: Any, i: int, v: Vector, mask: Any) -> None:
    pass


LAYER_ROWS = rows_kernel(less_mean, number_at, kept, add_to)
LAYER_ROW_SUMS = row_sums_kernel(less_mean, number_at)
LAYER_STRIPS = strips_kernel(less_mean, number_at, number_at, add_to)
LAYER_BLOCKS = add_blocks_kernel(put_vector)
SIMPLIFIED_ROWS = rows_kernel(as_it_is, zero_at, dropped, add_nowhere)
SIMPLIFIED_ROW_SUMS = row_sums_kernel(as_it_is, zero_at)
SIMPLIFIED_STRIPS = strips_kernel(as_it_is, zero_at, zero_at, add_nowhere)
SIMPLIFIED_BLOCKS = add_blocks_kernel(put_no_vector)
