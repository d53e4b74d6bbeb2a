"""The vector loops that reduce a row, or columns, by total = visit(total, …), for any number of arrays.

A total is a tuple of vectors. `visit` may also write to an array; then the row is read only once for both.
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
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
