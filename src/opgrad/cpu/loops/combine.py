"""Write combining: short rows are put together in a buffer, which is written past the cache a whole line at a time.

A row that starts or ends inside a cache line would write that line in two pieces, each of which has the line fetched
first: rows of 128 that start 16 bytes behind a line took 1.3 to 1.8 times as long.
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
def rows_at_once(y, n: int, group: int, stream: int, streams: bool) -> int:
    """How many rows go through the buffer at a time, whole groups of them; 0 if each is written where it belongs."""
    line, head = v.line(y.data), v.to_line(y.data, 0)
    own_lines = streams and head == 0 and n % v.lanes(y.data) == 0
    if not stream or y.step != n or n > LONGEST * line or head < 0 or own_lines:
        return 0
    return LINES * line // (n * group) * group


@inline
def _target(y, buffer, combined: int):
    """Where rows are written that belong at y: there, or in the buffer, whose lines begin with the same elements."""
    own = v.address_of(buffer) + v.address_of(y) % CACHE_LINE
    return v.at_byte(y, own - v.address_of(y) if combined else 0)


def combining(write: Callable[..., None], streams: bool = True) -> Callable[..., None]:
    """write(first, stop, n, out, past, arguments) for the rows from `begin` to `end` of y, some at a time.

    It writes them at `out`, past the cache if `past`: where they belong, or in the buffer, `group` rows together.
    If it `streams` at all: otherwise rows go through the buffer also where each has cache lines of its own.
    """
    inline(write)

    @inline
    def by_rows(begin: int, end: int, n: int, y, buffer, group: int, stream: int, arguments) -> None:
        combined = rows_at_once(y, n, group, stream, streams)
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
