"""What kernels over contiguous rows share: reducing a row, and writing one."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.fold import CHUNK, fold
from opgrad.cpu.loops.map import get_or, mapped, next_vector
from opgrad.cpu.numerics import logsumexp as lse

AHEAD: Final = 2048  # elements between a prefetch and its use: the hardware's own stop at every page of 4 KiB
# Elements of a row that are read twice: 128 KiB of float32 stay in the second-level cache. Rows of 262,144 took
# 1.29 times as long in one go; blocks for the first-level cache 1.18 times as long at 32,000.
READ_TWICE: Final = 1 << 15


MINUS_INFINITY: Final = float("-inf")


@inline
def _larger(total, arrays, i: int, whole: bool, mask, numbers):
    return (v.maximum(get_or(arrays[0], i, whole, mask, MINUS_INFINITY), total[0]),)


_largest = fold(_larger)


@inline
def row_top(x, begin: int, end: int) -> Vector:
    """The largest of x[begin:end] lane by lane; NaN may be passed over."""
    return _largest((v.full(x, MINUS_INFINITY),), begin, end, (x,), ())[0]


@inline
def row_max(x, begin: int, end: int):
    """The largest of x[begin:end]; NaN may be passed over."""
    return v.reduce_max(row_top(x, begin, end))


def row_sum_exp(step: Callable[..., int], add: Callable[..., Any] = lse.add_exact) -> Callable[..., Any]:
    """The sum of the exponentials of x[begin:end], which go to `e` if `keep`.

    Meanwhile it asks for the row `ahead` and writes out[j:stop] with `step`; it returns how far that came, too.
    """

    @inline
    def sum_exp(x, begin: int, end: int, m: float, e, keep: int, ahead, out, j: int, stop: int, arrays, numbers):
        w, scale = v.lanes(x), lse.scale_for(v.full(x, m))
        total, compensation = lse.sum_start(x)
        i = begin
        while i + w <= end:
            chunk_end = min(i + CHUNK * w, end)
            while i + w <= chunk_end:
                value, total, compensation = add(x, total, compensation, v.load(x, i), scale)
                v.prefetch(ahead, i)
                if keep:
                    v.store(e, i, value)
                j = step(out, j, stop, arrays, numbers)
                i += w
            total, compensation = lse.next_chunk(x, total, compensation)
        if i < end:
            mask = v.first(x, end - i)
            value = v.load_masked(x, i, mask, MINUS_INFINITY)
            value, total, compensation = add(x, total, compensation, value, scale)
            if keep:
                v.store_masked(e, i, value, mask)
        return lse.sum_lanes(x, total, compensation), j

    return sum_exp


@inline
def add_to_rest(x, total, value: Vector, m: Vector, scale):
    """The sum of the exponentials of what is not m, its compensation, and how many are m: one vector more."""
    rest, compensation, count = total
    rest, compensation = lse.add_below(x, rest, compensation, value, m, scale)
    return rest, compensation, count + v.select(value == m, v.like(m, 1.0), 0.0)


def row_rest(step: Callable[..., int]) -> Callable[..., Any]:
    """The sum of the exponentials of the numbers in x[begin:end] that are not m, and how many are m.

    Meanwhile it asks for the row `ahead` and writes out[j:stop] with `step`, as row_sum_exp.
    """

    @inline
    def add_rest(x, begin: int, end: int, m: float, ahead, out, j: int, stop: int, arrays, numbers):
        w, largest, zero = v.lanes(x), v.full(x, m), v.full(x, 0.0)
        scale = lse.scale_for(largest)
        rest, compensation, count = zero, zero, zero
        i = begin
        while i + w <= end:
            chunk_end = min(i + CHUNK * w, end)
            while i + w <= chunk_end:
                value = v.load(x, i)
                v.prefetch(ahead, i)
                rest, compensation, count = add_to_rest(x, (rest, compensation, count), value, largest, scale)
                j = step(out, j, stop, arrays, numbers)
                i += w
            rest, compensation = lse.next_chunk(x, rest, compensation)
        if i < end:
            value = v.load_masked(x, i, v.first(x, end - i), MINUS_INFINITY)
            rest, compensation, count = add_to_rest(x, (rest, compensation, count), value, largest, scale)
        return v.reduce_add_wide(rest, compensation), v.reduce_add_wide(count, zero), j

    return add_rest


@inline
def line_head(out, n: int, stream: int) -> int:
    """How many elements of a row stand before its first cache line; n if it is not to be written past the cache."""
    head = v.to_line(out, 0)
    return min(head, n) if stream and head >= 0 else n


@inline
def minus_both(x: Vector, m, log_s) -> Vector:
    return (x - m) - log_s


write_scaled, write_log = mapped(lse.scaled), mapped(minus_both)
step_scaled, step_log = next_vector(lse.scaled), next_vector(minus_both)
sum_exp_scaling, add_rest_logging = row_sum_exp(step_scaled), row_rest(step_log)


@inline
def rest_of_block(x, begin: int, end: int, m: float, ahead):
    """`row_rest` for a block of a row; of -inf alone it is 0, not NaN: only the whole row decides."""
    top = max(m, v.number(x, lse.LOWEST))
    rest, count, _ = add_rest_logging(x, begin, end, top, ahead, x, end, end, (x,), (v.full(x, top), v.full(x, top)))
    return rest, count


@inline
def row_rests(x, n: int, ahead):
    """The largest of x[0:n], the scaled sum of the exponentials of what is not it, and how many are it.

    Nothing is written; it asks for the row `ahead`. A block at a time, so that x is in the cache when it is read again.
    """
    m, rest, count = v.number(x, MINUS_INFINITY), 0.0, 0.0
    for begin in range(0, n, READ_TWICE):
        block, size = x + begin, min(READ_TWICE, n - begin)
        coming = block + READ_TWICE if begin + READ_TWICE < n else ahead
        top = row_max(block, 0, size)
        added, equal = rest_of_block(block, 0, size, top, coming)
        if begin:
            m, rest, count = lse.joined_rests(x, m, rest, count, top, added, equal)
        else:
            m, rest, count = top, added, equal
    return m, rest, count


@inline
def row_log_sum(x, n: int, ahead):
    """The largest of x[0:n] and log(sum of exp(x - largest)); asks for the row `ahead`."""
    m, rest, count = row_rests(x, n, ahead)
    return m, v.first_lane(lse.row_log_of_sum(x, rest, count, m))


def row_sum(term: Callable[..., Vector], step: Callable[..., int]) -> Callable[..., Any]:
    """The sum of term(dy[i], y[i]) over [begin, end); meanwhile it writes out[j:stop] with `step`, as row_sum_exp."""
    inline(term)

    @inline
    def add_up(dy, y, begin: int, end: int, out, j: int, stop: int, arrays, numbers):
        w = v.lanes(dy)
        total = v.full(dy, 0.0)
        i = begin
        while i + w <= end:
            chunk = v.full(dy, 0.0)
            chunk_end = min(i + CHUNK * w, end)
            while i + w <= chunk_end:
                v.prefetch(dy, i + AHEAD)
                v.prefetch(y, i + AHEAD)
                chunk = chunk + term(v.load(dy, i), v.load(y, i))
                j = step(out, j, stop, arrays, numbers)
                i += w
            total = total + chunk
        if i < end:
            mask = v.first(dy, end - i)
            total = total + term(v.load_masked(dy, i, mask, 0.0), v.load_masked(y, i, mask, 0.0))
        return v.reduce_add(total), j

    return add_up
