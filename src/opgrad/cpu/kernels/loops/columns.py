"""Shared parts of kernels for columns, whose vectors lie along the axes behind the reduced one.

`write_strip_behind` is the only place that knows how a strip is written while the next one is reduced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, number_equal
from opgrad.cpu.kernels.numerics import logsumexp as lse


class Line(NamedTuple):
    """An operand in a strip of columns: its first element there, and its stride down the columns in elements."""

    data: Any
    step: int


class Strip(NamedTuple):
    """An operand in a strip of columns, as `Line`; whether all lanes of a vector are columns, and the mask of those."""

    data: Any
    step: int
    whole: bool
    mask: Any


@inline
def in_buffer(buffer):
    """A strip that fills whole vectors one behind the other."""
    return Strip(buffer, v.lanes(buffer), True, v.first(buffer, v.lanes(buffer)))


@inline
def vector_of(strip, i: int) -> Vector:
    return get(strip.data, i * strip.step, strip.whole, strip.mask)


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
def column_max(x, n: int) -> Vector:
    """The largest elements of the columns of a strip."""
    m = v.full(x.data, MINUS_INFINITY)
    for i in range(n):
        m = v.maximum(vector_of(x, i), m)
    return m


# --- a strip is written while the next one is reduced -----------------------------------------------------------------


class WaitingStrip(NamedTuple):
    """A strip that waits to be written, if it is pending: its place, and what its elements are made of."""

    out: Any
    step: int
    is_pending: int
    arrays: Any
    numbers: Any


class WriteStripBehind(NamedTuple):
    """The functions that write a strip while the next one is reduced."""

    meanwhile: Callable[..., None]  # (i, waiting): write line i past the cache, if the strip is pending
    begin: Callable[..., WaitingStrip]  # (out: Strip, n, arrays, numbers, stream): the next strip that waits
    finish: Callable[..., None]  # (waiting, n): write the last strip


def write_strip_behind(value: Callable[..., Vector]) -> WriteStripBehind:
    """Strips of the elements value(arrays, i, whole, mask, numbers); one that is not written past the cache is written
    at once.
    """

    @inline
    def meanwhile(i: int, waiting) -> None:
        if waiting.is_pending:
            every = v.first(waiting.out, v.lanes(waiting.out))
            found = value(waiting.arrays, i, True, every, waiting.numbers)
            v.store_streaming(waiting.out, i * waiting.step, found)

    @inline
    def begin(out, n: int, arrays, numbers, stream: int):
        is_pending = streams_columns(out.data, out.step, stream) if out.whole else 0
        if not is_pending:
            for i in range(n):
                found = value(arrays, i, out.whole, out.mask, numbers)
                put(out.data, i * out.step, found, out.whole, out.mask, 0)
        return WaitingStrip(out.data, out.step, is_pending, arrays, numbers)

    @inline
    def finish(waiting, n: int) -> None:
        for i in range(n):
            meanwhile(i, waiting)

    return WriteStripBehind(meanwhile, begin, finish)


@inline
def no_strip(y, arrays, numbers):
    """What waits before the first strip of a result."""
    return WaitingStrip(y.data, y.step, 0, arrays, numbers)


nothing = inline(lambda i, waiting: None)  # in place of `WriteStripBehind.meanwhile`: no strip is written meanwhile


# --- sums ------------------------------------------------------------------------------------------------------------


def column_sum_exp(meanwhile: Callable[..., None], adding: lse.Adding) -> Callable[..., Any]:
    """The loop that sums the exponentials of a strip, as two vectors, the sum and what its roundings lost.

    `like` has the dtype whose digits the result shows, where x lies in a buffer of another. In the same loop it
    prefetches the line `ahead`, and calls meanwhile(i, waiting). The exponentials are stored in `e` with a stride of
    `keep` numbers, or not at all if `keep` is 0.
    """
    add, _ = adding

    @inline
    def sum_exp(like, x, n: int, m: Vector, e, keep: int, ahead, waiting):
        scale, sums = lse.scale_for(m), lse.start(like)
        for begin in range(0, n, CHUNK):
            for i in range(begin, min(begin + CHUNK, n)):
                value, sums = add(like, sums, vector_of(x, i), scale)
                v.prefetch(ahead.data, i * ahead.step)
                if keep:
                    v.store(e, i * keep, value)
                meanwhile(i, waiting)
            sums = lse.join(like, sums)
        return sums[2], sums[3]

    return sum_exp


def column_rest(meanwhile: Callable[..., None], adding: lse.AddingBelow) -> Callable[..., Any]:
    """The loop of `column_sum_exp` without the numbers equal to m, which it counts. It stores nothing in `e`."""
    terms, add, _ = adding

    @inline
    def add_rest(like, x, n: int, m: Vector, e, keep: int, ahead, waiting):
        scale, sums, count = lse.scale_for(m), lse.no_sums(x.data), v.full(x.data, 0.0)
        for begin in range(0, n, terms):
            for i in range(begin, min(begin + terms, n)):
                value = vector_of(x, i)
                v.prefetch(ahead.data, i * ahead.step)
                sums, count = add(like, sums, value, m, scale), number_equal(count, value, m)
                meanwhile(i, waiting)
            sums = lse.join_plain(x.data, sums)
        return sums[2] + sums[3], count

    return add_rest


def column_sum(value: Callable[..., Vector], meanwhile: Callable[..., None]) -> Callable[..., Vector]:
    """The loop that sums value(arrays, i, whole, mask, numbers) down a strip, and calls meanwhile(i, waiting)."""
    inline(value)

    @inline
    def add_up(like, n: int, arrays, whole: bool, mask, numbers, waiting) -> Vector:
        total = v.full(like, 0.0)
        for begin in range(0, n, CHUNK):
            chunk = v.full(like, 0.0)
            for i in range(begin, min(begin + CHUNK, n)):
                chunk = chunk + value(arrays, i, whole, mask, numbers)
                meanwhile(i, waiting)
            total = total + chunk
        return total

    return add_up
