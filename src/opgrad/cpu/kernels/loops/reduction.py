"""Kernels that sum an array of shape before x n x after over n, in `blocks` blocks of `block_size` terms or fewer."""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Strips, Units
from opgrad.cpu.kernels.loops.fold import fold_down, sum_range

DEEP: Final = 1 << 10  # terms of a column that one part sums
WIDE: Final = 4  # vectors of columns that are summed at once
AHEAD: Final = 8  # rows between a prefetch and its use


@kernel
def sum_rows(units: Units, n, blocks, block_size, x: Pointer, y: Pointer):
    """y[row, block] = the sum of that block of x[row]."""
    for unit in units:
        row, begin = unit // blocks, unit % blocks * block_size
        total = sum_range(begin, min(begin + block_size, n), (x + row * n,), ())
        v.store_one(y, unit, v.reduce_add(total))


@inline
def _add_wide(total, arrays, k: int, step: int):
    source = arrays[0] + k * step
    w = v.lanes(source)
    for i in range(0, WIDE * w, w):
        v.prefetch(source, AHEAD * step + i)
    a, b, c, d = total
    return a + v.load(source, 0), b + v.load(source, w), c + v.load(source, 2 * w), d + v.load(source, 3 * w)


@inline
def _add_narrow(total, arrays, k: int, numbers):
    step, mask = numbers
    return (total[0] + v.load_masked(arrays[0], k * step, mask, 0.0),)


_sum_wide, _sum_narrow = fold_down(_add_wide), fold_down(_add_narrow)


@inline
def sum_strip(x, step: int, begin: int, end: int, width: int, y) -> None:
    """y[0:width] = the sums of x[begin:end, 0:width]."""
    w, zero = v.lanes(x), v.full(x, 0.0)
    if width == WIDE * w:
        every = v.first(x, w)
        a, b, c, d = _sum_wide((zero, zero, zero, zero), begin, end, (x,), step)
        v.store_masked(y, 0, a, every)
        v.store_masked(y, w, b, every)
        v.store_masked(y, 2 * w, c, every)
        v.store_masked(y, 3 * w, d, every)
    else:
        for i in range(0, width, w):
            mask = v.first(x, width - i)
            total = _sum_narrow((zero,), begin, end, (x + i,), (step, mask))
            v.store_masked(y, i, total[0], mask)


@kernel
def sum_columns(units: Units, n, blocks, block_size, strips: Strips, x: Pointer, y: Pointer):
    """y[before, block, column] = the sum of that block of x[before, :, column]; a unit is a strip of columns."""
    after, widest = strips.inner, WIDE * v.lanes(x)
    for unit in units:
        outer, column = unit // strips.count, unit % strips.count * widest
        before, begin = outer // blocks, outer % blocks * block_size
        source, result = x + (before * n * after + column), y + (outer * after + column)
        sum_strip(source, after, begin, min(begin + block_size, n), min(widest, after - column), result)


@kernel
def sum_integers(units: Units, n, after, x: Pointer, y: Pointer):
    for unit in units:
        source = x + (unit // after * n * after + unit % after)
        total = 0
        for k in range(n):
            total += v.load_one(source, k * after)
        v.store_one(y, unit, total)
