"""Shared parts of kernels over contiguous rows: the loops that reduce a row while another one is written."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, many_registers
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import BLOCK, CHUNK, fold
from opgrad.cpu.kernels.loops.map import get_or, mapped, next_vector
from opgrad.cpu.kernels.numerics import logsumexp as lse

AHEAD: Final = 2048  # elements between a prefetch and its use; the hardware's own prefetches stop at each 4 KiB page
# Elements of a block of a row that is read twice: its 128 KiB of float32 stay in the second-level cache. Without
# blocks, rows of 262,144 took 1.29 times as long; blocks that fit the first-level cache took 1.18 times as long for
# 32,000.
READ_TWICE: Final = 1 << 15
# Whether two vectors of exponentials below the largest are computed at once. With 16 registers, ten constants and what
# is written meanwhile leave no room for a second: 19 values of two vectors were loaded from the stack, 8 of one.
TWO_AT_ONCE: Final = many_registers()

MINUS_INFINITY: Final = float("-inf")
LOWEST: Final = -3.4e38  # used in place of -inf where -inf would give NaN


@inline
def _larger(total, arrays, i: int, whole: bool, mask, numbers):
    return (v.maximum(get_or(arrays[0], i, whole, mask, MINUS_INFINITY), total[0]),)


_largest = fold(_larger)


@inline
def row_top(x, begin: int, end: int) -> Vector:
    """The largest of x[begin:end], lane by lane; a NaN may be ignored.

    Every other vector has a maximum of its own, since each waits for the one before: log-softmax of rows of 1,000 took
    1.07 times as long with a single one.
    """
    w, i, even, odd = v.lanes(x), begin, v.full(x, MINUS_INFINITY), v.full(x, MINUS_INFINITY)
    while i + 2 * w <= end:
        even, odd = v.maximum(v.load(x, i), even), v.maximum(v.load(x, i + w), odd)
        i += 2 * w
    return v.maximum(_largest((even,), i, end, (x,), ())[0], odd)


@inline
def row_max(x, begin: int, end: int):
    """The largest of x[begin:end]; a NaN may be ignored."""
    return v.reduce_max(row_top(x, begin, end))


@inline
def first_place(x, n: int, value) -> int:
    """The first index at which x equals `value`, which must occur in x; whole vectors are compared until one has it."""
    w, i = v.lanes(x), 0
    while i + w <= n and v.reduce_max(v.select(v.load(x, i) == value, v.full(x, 1.0), 0.0)) == 0.0:
        i += w
    while i < n - 1 and v.load_one(x, i) != value:
        i += 1
    return i


@inline
def first_largest(x, n: int, largest, has_nan: bool) -> int:
    """The first index of a NaN in x, or of its largest value. has_nan: whether there may be one."""
    i = 0
    while has_nan and i < n and v.load_one(x, i) == v.load_one(x, i):
        i += 1
    return i if has_nan and i < n else first_place(x, n, largest)


def row_sum_exp(step: Callable[..., int], adding: lse.Adding) -> Callable[..., Any]:
    """The loop that sums the exponentials of x[begin:end], and stores them in `e` if `keep`.

    In the same loop it prefetches the row `ahead` and writes a part of out[j:stop] with `step`. It returns the sum and
    the index behind the last element written.
    """
    add, add_two = adding

    @inline
    def sum_exp(x, begin: int, end: int, m: float, e, keep: int, ahead, out, j: int, stop: int, arrays, numbers):
        w, scale, sums = v.lanes(x), lse.scale_for(v.full(x, m)), lse.start(x)
        i = begin
        while i + 2 * w <= end:
            chunk_end = min(i + CHUNK * w, end)
            while i + 2 * w <= chunk_end:
                first, second, sums = add_two(x, sums, v.load(x, i), v.load(x, i + w), scale)
                v.prefetch(ahead, i)
                v.prefetch(ahead, i + w)
                if keep:
                    v.store(e, i, first)
                    v.store(e, i + w, second)
                j = step(out, step(out, j, stop, arrays, numbers), stop, arrays, numbers)
                i += 2 * w
            sums = lse.next_chunk(x, sums)
        while i < end:
            mask = v.first(x, end - i)
            value, sums = add(x, sums, v.load_masked(x, i, mask, MINUS_INFINITY), scale)
            if keep:
                v.store_masked(e, i, value, mask)
            i += w
        return lse.sum_lanes(x, sums[0], sums), j

    return sum_exp


@inline
def number_equal(count: Vector, value: Vector, m: Vector) -> Vector:
    """The count in each lane of values equal to m, with one vector more."""
    return count + v.select(value == m, v.like(m, 1.0), 0.0)


def row_rest(step: Callable[..., int], adding: lse.AddingBelow) -> Callable[..., Any]:
    """The loop that sums the exponentials of the numbers in x[begin:end] that differ from m, and counts those equal to
    m.

    In the same loop it prefetches the row `ahead` and writes a part of out[j:stop] with `step`, as `row_sum_exp` does,
    whose parameters it has; it stores nothing in `e`, but prefetches it if `keep`, since what is computed here hides
    the time that a result's lines take. It returns the sum with the count, and the index.
    """
    chunk, add, add_two = adding

    @inline
    def add_rest(x, begin: int, end: int, m: float, e, keep: int, ahead, out, j: int, stop: int, arrays, numbers):
        w, largest, zero = v.lanes(x), v.full(x, m), v.full(x, 0.0)
        scale, sums, count = lse.scale_for(largest), lse.no_sums(x), zero
        i, turn = begin, 2 * w if TWO_AT_ONCE else w
        while i + turn <= end:
            chunk_end = min(i + 2 * chunk * w, end)
            while i + turn <= chunk_end:
                first = v.load(x, i)
                v.prefetch(ahead, i)
                if keep:
                    v.prefetch(e, i)
                if TWO_AT_ONCE:
                    second = v.load(x, i + w)
                    v.prefetch(ahead, i + w)
                    if keep:
                        v.prefetch(e, i + w)
                    sums = add_two(x, sums, first, second, largest, scale)
                    count = number_equal(number_equal(count, first, largest), second, largest)
                    j = step(out, j, stop, arrays, numbers)
                else:
                    sums, count = add(x, sums, first, largest, scale), number_equal(count, first, largest)
                j = step(out, j, stop, arrays, numbers)
                i += turn
            sums = lse.join_plain(x, sums)
        while i < end:
            mask = v.first(x, end - i)
            value = v.load_masked(x, i, mask, MINUS_INFINITY)
            sums, count = add(x, sums, value, largest, scale), number_equal(count, value, largest)
            i += w
        sums = lse.join_plain(x, sums)
        return (v.reduce_add_wide(sums[2], sums[3]), v.reduce_add_wide(count, zero)), j

    return add_rest


@inline
def line_head(out, n: int, stream: int) -> int:
    """How many elements of a row lie before its first whole cache line; n if no non-temporal stores shall be used."""
    head = v.to_line(out, 0)
    return min(head, n) if stream and head >= 0 else n


@inline
def minus_both(x: Vector, m, log_s) -> Vector:
    return (x - m) - log_s


write_log, step_log = mapped(minus_both), next_vector(minus_both)
add_rest_logging = row_rest(step_log, lse.PLAIN_BELOW)


# --- the sums of blocks of a row, each of which is scaled by its block's largest number


@inline
def rescale(p, m: float, new_m: float) -> float:
    """The factor that takes a sum of exponentials from the scale for m to the scale for new_m, which is larger."""
    top = max(m, v.number(p, LOWEST))
    return lse.exp_wide(p, m, new_m) / lse.exp_wide(p, top, top)


@inline
def _rest_below(p, m: float, rest: float, count: float, new_m: float) -> float:
    return rest * rescale(p, m, new_m) + count * lse.exp_wide(p, m, new_m)


@inline
def joined_rests(p, m: float, rest: float, count: float, other_m: float, other_rest: float, other_count: float):
    """For two blocks together: the largest number, the sum of the other exponentials, the count of the largest."""
    if m == other_m:
        return m, rest + other_rest, count + other_count
    if m > other_m:
        return m, rest + _rest_below(p, other_m, other_rest, other_count, m), count
    return other_m, other_rest + _rest_below(p, m, rest, count, other_m), other_count


@inline
def rest_of_block(x, begin: int, end: int, m: float, ahead):
    """`row_rest` for a block of a row.

    For a block of -inf alone the sum is 0, not NaN, since other blocks may be finite.
    """
    top = max(m, v.number(x, LOWEST))
    numbers = v.full(x, top), v.full(x, top)
    return add_rest_logging(x, begin, end, top, x, 0, ahead, x, end, end, (x,), numbers)[0]


@inline
def row_rests(x, n: int, ahead):
    """The largest of x[0:n], the scaled sum of the exponentials of all smaller numbers, and the count of the largest.

    Nothing is written; the row `ahead` is prefetched. It works block by block, so that a block is still in the cache
    when it is read the second time.
    """
    m, rest, count = v.number(x, MINUS_INFINITY), 0.0, 0.0
    for begin in range(0, n, READ_TWICE):
        block, size = x + begin, min(READ_TWICE, n - begin)
        coming = block + READ_TWICE if begin + READ_TWICE < n else ahead
        top = row_max(block, 0, size)
        added, equal = rest_of_block(block, 0, size, top, coming)
        is_first = begin == 0
        if is_first:
            m, rest, count = top, added, equal
        else:
            m, rest, count = joined_rests(x, m, rest, count, top, added, equal)
    return m, rest, count


@inline
def row_log_sum(x, n: int, ahead):
    """The largest of x[0:n], and log(sum of exp(x - largest)). The row `ahead` is prefetched."""
    m, rest, count = row_rests(x, n, ahead)
    return m, v.first_lane(lse.row_log_of_sum(x, rest, count, m))


def row_sum_of(value: Callable[..., Vector], step: Callable[..., int]) -> Callable[..., Any]:
    """The loop that sums value(terms, i, whole, mask, factors) over [begin, end), in vectors like those of `like`.

    A row is summed in blocks, whose sums are added in float64. So a row whose blocks are shared among threads (the
    layout "split") has the same sum.
    """

    @inline
    def add_up(like, begin: int, end: int, terms, factors, out, j: int, stop: int, arrays, numbers):
        w, every, s = v.lanes(like), v.first(like, v.lanes(like)), 0.0
        for block in range(begin, end, BLOCK):
            block_end, total, i = min(block + BLOCK, end), v.full(like, 0.0), block
            while i + w <= block_end:
                even, odd = v.full(like, 0.0), v.full(like, 0.0)
                chunk_end = min(i + CHUNK * w, block_end)
                while i + 2 * w <= chunk_end:
                    even = even + value(terms, i, True, every, factors)
                    odd = odd + value(terms, i + w, True, every, factors)
                    j = step(out, step(out, j, stop, arrays, numbers), stop, arrays, numbers)
                    i += 2 * w
                if i + w <= chunk_end:
                    even = even + value(terms, i, True, every, factors)
                    j = step(out, j, stop, arrays, numbers)
                    i += w
                total = total + (even + odd)
            if i < block_end:
                total = total + value(terms, i, False, v.first(like, block_end - i), factors)
            if begin + BLOCK >= end:
                return v.reduce_add(total), j
            s += v.reduce_add(total)
        return v.number(like, s), j

    return add_up
