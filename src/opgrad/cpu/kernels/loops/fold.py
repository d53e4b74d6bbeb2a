"""The vector loops that reduce a row, or columns, by total = visit(total, …), for any number of arrays; sums of arrays.

A total is a tuple of vectors. `visit` may also write to an array; then the row is read only once for both.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import get

CHUNK: Final = 64  # terms of a chunk, whose sum is then added to the total: the error grows with n/64 + 64
# Elements of a block of a long row. They are summed in vectors, and blocks in float64; a split row is cut into blocks.
BLOCK: Final = 1 << 14


def fold(visit: Callable[..., Any]) -> Callable[..., Any]:
    """total = visit(total, arrays, i, whole, mask, numbers) for each vector of [begin, end).

    `visit` reads its arrays itself: a whole vector, or the lanes of the mask. The total is an empty tuple if `visit`
    only writes.
    """
    inline(visit)

    @inline
    def along(total, begin: int, end: int, arrays, numbers):
        p = arrays[0]
        w, i = v.lanes(p), begin
        every = v.first(p, w)
        while i + w <= end:
            total = visit(total, arrays, i, True, every, numbers)
            i += w
        if i < end:
            total = visit(total, arrays, i, False, v.first(p, end - i), numbers)
        return total

    return along


def fold_in_chunks(visit: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of `fold` for sums, which start at `zeros`: the vectors of a chunk are summed before they join the
    total.

    Pairwise summation in two levels: the error grows with a chunk's length and the number of chunks, not their product.
    """
    inline(visit)

    @inline
    def along(zeros, begin: int, end: int, arrays, numbers, vectors: int = CHUNK):
        p = arrays[0]
        w, i, total = v.lanes(p), begin, zeros
        every = v.first(p, w)
        while i + w <= end:
            chunk_end, chunk = min(i + vectors * w, end), zeros
            while i + w <= chunk_end:
                chunk = visit(chunk, arrays, i, True, every, numbers)
                i += w
            total = v.add_each(total, chunk)
        if i < end:
            total = visit(total, arrays, i, False, v.first(p, end - i), numbers)
        return total

    return along


def folded(term: Callable[..., Vector]) -> Callable[..., Vector]:
    """The sum over [begin, end) in chunks, lane by lane: term(total, a[i], b[i], …, *numbers) is the new total."""
    inline(term)

    @inline
    def visit(total, arrays, i: int, whole: bool, mask, numbers):
        if whole:
            return (term(total[0], *(v.load_each(arrays, i) + numbers)),)
        return (v.select(mask, term(total[0], *(v.load_each_masked(arrays, i, mask, 0.0) + numbers)), total[0]),)

    along = fold_in_chunks(visit)

    @inline
    def sum_up(begin: int, end: int, arrays, numbers, vectors: int = CHUNK) -> Vector:
        return along((v.full(arrays[0], 0.0),), begin, end, arrays, numbers, vectors)[0]

    return sum_up


sum_range, sum_products = folded(lambda total, x: total + x), folded(lambda total, x, y: v.fma(x, y, total))


@inline
def add_value(total, arrays, i: int, whole: bool, mask, numbers):
    """The `visit` of a plain sum."""
    return (total[0] + get(arrays[0], i, whole, mask),)


def fold_down(visit: Callable[..., Any]) -> Callable[..., Any]:
    """The chunked sum down a vector of columns: total = visit(total, arrays, k, numbers) for each row k."""
    inline(visit)

    @inline
    def down(zeros, begin: int, end: int, arrays, numbers):
        total, first_row = zeros, begin
        while first_row < end:
            chunk = zeros
            for k in range(first_row, min(first_row + CHUNK, end)):
                chunk = visit(chunk, arrays, k, numbers)
            total = v.add_each(total, chunk)
            first_row += CHUNK
        return total

    return down


_add_rows = fold_down(lambda total, arrays, k, step: (total[0] + v.load(arrays[0], k * step),))


@inline
def column_sum_of(x, count: int, step: int) -> Vector:
    """The sum of `count` vectors, `step` elements from one to the next."""
    return _add_rows((v.full(x, 0.0),), 0, count, (x,), step)[0]


# --- an array of shape before x n x after, summed over n in `blocks` blocks of `block_size` terms or fewer -----------

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


@fold_down
def _sum_wide(total, arrays, k: int, step: int):
    source = arrays[0] + k * step
    w = v.lanes(source)
    for i in range(0, WIDE * w, w):
        v.prefetch(source, AHEAD * step + i)
    a, b, c, d = total
    return a + v.load(source, 0), b + v.load(source, w), c + v.load(source, 2 * w), d + v.load(source, 3 * w)


@fold_down
def _sum_narrow(total, arrays, k: int, numbers):
    step, mask = numbers
    return (total[0] + v.load_masked(arrays[0], k * step, mask, 0.0),)


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
