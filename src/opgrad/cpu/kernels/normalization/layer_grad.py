"""Kernels of the gradients of layer normalization, with a mean and without.

Arrays are rows x n, contiguous. Sums over rows are formed apart for each block of rows, so that their order depends
on the shape alone; `sums` has two rows for each block: dscale and dbias.
"""

from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import BLOCK, column_sum_of, fold_in_chunks
from opgrad.cpu.kernels.loops.map import clear, get, get_or, mapped

STRIP: Final = 1024  # columns of a part where rows are split: its sums, 8 KiB, stay in the first-level cache


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


def _gradient(dy: Vector, x: Vector, scale: Vector, mean, inv_std, from_bias, from_scale) -> Vector:
    """dx = inv_std * (dy * scale + (from_bias + from_scale * normalized x)); 0 for a row of one element."""
    return (dy * scale + v.fma((x - mean) * inv_std, from_scale, from_bias)) * inv_std


write_gradient = mapped(_gradient)


def rows_kernel(centered: bool, by_strips: bool) -> Kernel:
    """dx, and dscale and dbias of each block of rows: of whole rows, or of strips of columns of rows that are split."""
    add_up = gradient_sums(centered, adds=True)

    @kernel
    def grad_rows(
        units: Units, rows, n, per_block, dy: Pointer, x: Pointer, scale: Pointer, means: Pointer, inv_stds: Pointer,
        coefficients: Pointer, dx: Pointer, sums: Rows, stream,
    ):  # fmt: skip
        width = STRIP if by_strips else n
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
                write_gradient(dx + at, 0, columns, stream, arrays, (mean, inv_std, from_bias, from_scale))

    return grad_rows


def row_sums_kernel(centered: bool) -> Kernel:
    """The two sums of each block of a split row."""
    add_up = gradient_sums(centered, adds=False)

    @kernel
    def sum_row_blocks(
        units: Units, per_row, n, dy: Pointer, x: Pointer, scale: Pointer, means: Pointer, inv_stds: Pointer,
        partial: Pointer,
    ):  # fmt: skip
        for unit in units:
            row, begin = unit // per_row, unit % per_row * BLOCK
            at = row * n + begin
            numbers = number_or_zero(means, row, centered), v.load_one(inv_stds, row), BLOCK
            g, t = add_up(min(BLOCK, n - begin), (dy + at, x + at, scale + begin, partial, partial), numbers)
            v.store_one(partial, 2 * unit, g)
            v.store_one(partial, 2 * unit + 1, t)

    return sum_row_blocks


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


def add_blocks_kernel(centered: bool) -> Kernel:
    """dscale and dbias: the sums of all blocks of rows added up."""

    @kernel
    def add_blocks(columns: Units, blocks, sums: Rows, dscale: Pointer, dbias: Pointer):
        for i in range(columns.start, columns.stop, v.lanes(sums.data)):
            mask = v.first(sums.data, columns.stop - i)
            v.store_masked(dscale, i, column_sum_of(sums.data + i, blocks, 2 * sums.step), mask)
            if centered:
                v.store_masked(dbias, i, column_sum_of(sums.data + (sums.step + i), blocks, 2 * sums.step), mask)

    return add_blocks


class GradientKernels(NamedTuple):
    """For whole rows, dx and the sums of blocks; for split rows, their sums, then dx and the sums of blocks by strips.

    add_blocks adds up the sums of all blocks.
    """

    rows: Kernel
    row_sums: Kernel
    strips: Kernel
    add_blocks: Kernel


def gradient_kernels(centered: bool) -> GradientKernels:
    by_rows, by_strips = rows_kernel(centered, by_strips=False), rows_kernel(centered, by_strips=True)
    return GradientKernels(by_rows, row_sums_kernel(centered), by_strips, add_blocks_kernel(centered))


LAYER, SIMPLIFIED = gradient_kernels(centered=True), gradient_kernels(centered=False)
