"""Write combining: short rows are put together in a buffer, which is written past the cache a whole line at a time.

A row that starts or ends inside a cache line would write that line in two pieces, each of which has the line fetched
first: rows of 128 that start 16 bytes behind a line took 1.3 to 1.8 times as long.
"""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.loops.map import write_same
from opgrad.cpu.runtime.partition import CACHE_LINE

LINES: Final = 256  # of the buffer: 16 KiB stay in the first-level cache beside a row
LONGEST: Final = 32  # lines: a longer row is written by itself, since two pieces of it count for little


@inline
def rows_at_once(y, n: int, group: int, stream: int) -> int:
    """How many rows go through the buffer at a time, whole groups of them; 0 if each is written where it belongs."""
    line, head = v.line(y.data), v.to_line(y.data, 0)
    own_lines = head == 0 and n % line == 0
    if not stream or y.step != n or n > LONGEST * line or head < 0 or own_lines:
        return 0
    return LINES * line // (n * group) * group


@inline
def target(y, buffer, combined: int):
    """Where rows are written that belong at y: there, or in the buffer, whose lines begin with the same elements."""
    own = v.address_of(buffer) + v.address_of(y) % CACHE_LINE
    return v.at_byte(y, own - v.address_of(y) if combined else 0)


@inline
def write_out(y, buffer, count: int, combined: int) -> None:
    """y[:count] from the buffer, if rows were put together there."""
    if combined:
        write_same(y, 0, count, 1, (target(y, buffer, combined),), ())


def size(itemsize: int) -> int:
    """The numbers of working memory, of `itemsize` bytes each, that a buffer takes."""
    return (LINES + 1) * CACHE_LINE // itemsize
