"""Shared parts of kernels for columns, whose vectors lie along the axes behind the reduced one."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import get
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, number_equal
from opgrad.cpu.kernels.numerics import logsumexp as lse


@inline
def streams_columns(p, p_n: int, stream: int) -> int:
    """Whether to use non-temporal stores: if `stream`, and if every vector of the strip starts a cache line."""
    return stream and v.to_line(p, 0) == 0 and v.to_line(p, p_n) == 0


@inline
def aligned_strip(unit: int, strips, x, y, w: int, stream: int):
    """The outer index of a strip, its first column, whether all its columns exist, and the mask of those that do.

    If y is written past the cache, strips begin up to a line before the first column, so that each strip of y starts a
    cache line. NumPy's own arrays start 16 bytes behind a line; without the shift they took 2.3 times as long. The last
    strip may therefore be empty. A strip of two lines of y may touch three lines of x. Gradients, which read two arrays
    twice, took half the time if such a strip begins in the second line of an aligned pair of lines of x, so a strip
    that would begin inside the first line is moved back by a line. A caller that needs no such shift passes y for x.
    """
    o, j = unit // strips.count, unit % strips.count * w
    ys, line = y.data + o * y.outer, v.line(y.data)
    head = v.to_line(ys, 0)
    if stream and head >= 0 and v.to_line(ys, head + y.step) == 0:
        j -= (line - head) % line
        if w == 2 * line and 0 < v.address_of(x.data + (o * x.outer + j)) % (2 * CACHE_LINE) < CACHE_LINE:
            j -= line
    return o, j, j >= 0 and j + w <= strips.inner, v.first(ys, strips.inner - j) ^ v.first(ys, -j)


@inline
def column_max(x, x_n: int, n: int, whole: bool, mask) -> Vector:
    m = v.full(x, MINUS_INFINITY)
    for i in range(n):
        m = v.maximum(get(x, i * x_n, whole, mask), m)
    return m


def writing(value: Callable[..., Vector]) -> Callable[..., None]:
    """The function write(i, before), which writes row i of the previous strip, if that is still to be written.

    It stores value(arrays, i, whole, mask, numbers) past the cache. A kernel calls it while it reads the next strip,
    because writing a strip by itself leaves the memory idle while the next one is read and computed.
    """

    @inline
    def write(i: int, before) -> None:
        out, out_n, pending, arrays, numbers = before
        if pending:
            v.store_streaming(out, i * out_n, value(arrays, i, True, v.first(out, v.lanes(out)), numbers))

    return write


nothing = inline(lambda i, before: None)  # in place of `writing`: no strip is written during the loop


def column_sum_exp(meanwhile: Callable[..., None], adding: lse.Adding) -> Callable[..., Any]:
    """The loop that sums the exponentials of a strip, as two vectors, the sum and what its roundings lost.

    `like` has the dtype whose digits the result shows, where x lies in a buffer of another. In the same loop it
    prefetches the strip `ahead`, whose stride is `ahead_n`, and calls meanwhile(i, before). The exponentials are stored
    in `e` with a stride of `keep` numbers, or not at all if `keep` is 0.
    """
    add, _ = adding

    @inline
    def sum_exp(like, x, x_n: int, n: int, whole: bool, mask, m: Vector, e, keep: int, ahead, ahead_n: int, before):
        scale, sums = lse.scale_for(m), lse.start(like)
        for begin in range(0, n, CHUNK):
            for i in range(begin, min(begin + CHUNK, n)):
                value, sums = add(like, sums, get(x, i * x_n, whole, mask), scale)
                v.prefetch(ahead, i * ahead_n)
                if keep:
                    v.store(e, i * keep, value)
                meanwhile(i, before)
            sums = lse.join(like, sums)
        return sums[2], sums[3]

    return sum_exp


def column_rest(meanwhile: Callable[..., None], adding: lse.AddingBelow) -> Callable[..., Any]:
    """The loop of `column_sum_exp` without the numbers equal to m, which it counts. It stores nothing in `e`."""
    terms, add, _ = adding

    @inline
    def add_rest(like, x, x_n: int, n: int, whole: bool, mask, m: Vector, e, keep: int, ahead, ahead_n: int, before):
        scale, sums, count = lse.scale_for(m), lse.no_sums(x), v.full(x, 0.0)
        for begin in range(0, n, terms):
            for i in range(begin, min(begin + terms, n)):
                value = get(x, i * x_n, whole, mask)
                v.prefetch(ahead, i * ahead_n)
                sums, count = add(like, sums, value, m, scale), number_equal(count, value, m)
                meanwhile(i, before)
            sums = lse.join_plain(x, sums)
        return sums[2] + sums[3], count

    return add_rest


def column_sum(value: Callable[..., Vector], meanwhile: Callable[..., None]) -> Callable[..., Vector]:
    """The loop that sums value(arrays, i, whole, mask, numbers) down a strip, and calls meanwhile(i, before)."""
    inline(value)

    @inline
    def add_up(like, n: int, arrays, whole: bool, mask, numbers, before) -> Vector:
        total = v.full(like, 0.0)
        for begin in range(0, n, CHUNK):
            chunk = v.full(like, 0.0)
            for i in range(begin, min(begin + CHUNK, n)):
                chunk = chunk + value(arrays, i, whole, mask, numbers)
                meanwhile(i, before)
            total = total + chunk
        return total

    return add_up
