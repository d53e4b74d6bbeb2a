"""Write combining: short rows are put together in a buffer, which is written past the cache a whole line at a time.

A row that starts or ends inside a cache line would write that line in two pieces, each of which has the line fetched
first: rows of 128 that start 16 bytes behind a line took 1.3 to 1.8 times as long.

`combining` writes the buffer in one go when it is full, which suits kernels that wait for memory anyway. Those that
compute more write it while they compute the next group of rows, a vector at a time: the second part of this file.
"""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.loops.map import write_same
from opgrad.cpu.runtime.partition import CACHE_LINE

LINES: Final = 256  # of the buffer: 16 KiB stay in the first-level cache beside a row
LONGEST: Final = 32  # lines: a longer row is written by itself, since two pieces of it count for little


@inline
def rows_at_once(y, n: int, stream: int) -> int:
    """How many rows go through the buffer at a time; 0 if each is written where it belongs."""
    line, head = v.line(y.data), v.to_line(y.data, 0)
    own_lines = head == 0 and n % v.lanes(y.data) == 0
    if not stream or y.step != n or n > LONGEST * line or head < 0 or own_lines:
        return 0
    return LINES * line // n


@inline
def in_buffer(y, buffer):
    """The buffer, its elements those of y."""
    return v.at_byte(y, v.address_of(buffer) - v.address_of(y))


@inline
def _target(y, buffer, combined: int):
    """Where rows are written that belong at y: there, or in the buffer, whose lines begin with the same elements."""
    return v.at_byte(in_buffer(y, buffer), v.address_of(y) % CACHE_LINE) if combined else y


def combining(write: Callable[..., None]) -> Callable[..., None]:
    """write(first, stop, n, out, past, arguments) for the rows from `begin` to `end` of y, some at a time.

    It writes them at `out`, past the cache if `past`: where they belong, or in the buffer.
    """
    inline(write)

    @inline
    def by_rows(begin: int, end: int, n: int, y, buffer, stream: int, arguments) -> None:
        combined = rows_at_once(y, n, stream)
        for first in range(begin, end, combined or max(end - begin, 1)):
            stop, ys = min(first + combined, end) if combined else end, y.data + first * y.step
            out = _target(ys, buffer, combined)
            write(first, stop, n, out, stream and not combined, arguments)
            if combined:
                write_same(ys, 0, (stop - first) * n, 1, (out,), ())

    return by_rows


def size(itemsize: int) -> int:
    """The numbers of working memory, of `itemsize` bytes each, that a buffer takes."""
    return (LINES + 1) * CACHE_LINE // itemsize


# --- groups of rows, each written while the next is computed ---------------------------------------------------------


@inline
def holds_lines(y, rows: int, n: int, group: int, stream: int) -> int:
    """Whether groups of rows are written past the cache from a buffer: if they follow one another, a line or more."""
    line = v.line(y.data)
    return stream and y.step == n and v.to_line(y.data, 0) >= 0 and group * n >= line and rows > group


@inline
def write_waiting(i: int, waiting) -> None:
    """Vector i of the lines that wait in a buffer: out[:ready] = held[:ready]. Beyond them `out` is asked for."""
    out, ready, held = waiting
    at = i * v.lanes(out)
    if at < ready:
        v.store_streaming(out, at, v.load(held, at))
    else:
        v.prefetch(out, at)


@inline
def first_line(after, held) -> int:
    """How many elements before `after` lie in its cache line; they go to the buffer, of which they are the first."""
    line = v.line(after)
    count = (line - v.to_line(after, 0)) % line
    write_same(held, 0, count, 0, (after + -count,), ())
    return count


@inline
def next_lines(out, ready: int, n: int, held) -> None:
    """Write what is left of the lines that are `ready` after n vectors; the rest of the buffer becomes its first.

    Lines are whole vectors, since a group of rows is: it adds n vectors, to less than a line.
    """
    line = v.line(out)
    write_same(out, min(n * v.lanes(out), ready), ready, 1, (held,), ())
    write_same(held, 0, line, 0, (held + ready,), ())


def group_size(elements: int, itemsize: int) -> int:
    """The numbers of working memory that the buffer of groups of so many elements takes: a line before, one behind."""
    return elements + 2 * CACHE_LINE // itemsize
