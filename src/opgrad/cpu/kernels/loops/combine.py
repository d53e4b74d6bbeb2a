"""Write combining: short rows are collected in a buffer, which is written past the cache in whole cache lines.

If a row starts or ends inside a cache line, two rows write a piece of that line each, and for each piece the line is
first fetched from memory: rows of 128 that start 16 bytes behind a line took 1.3 to 1.8 times as long.

`combining` writes the whole buffer when it is full. This suits kernels that wait for memory anyway. Kernels that
compute more use the second part of this file: they write the buffer vector by vector while they compute the next group
of rows.
"""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels.loops.map import write_same

LINES: Final = 256  # of the buffer: 16 KiB stay in the first-level cache beside a row
LONGEST: Final = 32  # lines; a longer row is written by itself, since its two incomplete lines cost little


@inline
def rows_at_once(y, n: int, stream: int) -> int:
    """How many rows are collected in the buffer at a time; 0 if rows are written directly."""
    line, head = v.line(y.data), v.to_line(y.data, 0)
    own_lines = head == 0 and n % v.lanes(y.data) == 0
    if not stream or y.step != n or n > LONGEST * line or head < 0 or own_lines:
        return 0
    return LINES * line // n


@inline
def in_buffer(y, buffer):
    """The buffer as a pointer to elements of the dtype of y."""
    return v.at_byte(y, v.address_of(buffer) - v.address_of(y))


@inline
def _target(y, buffer, combined: int):
    """Where rows of y are written: at y, or in the buffer at the same distance from the start of a cache line."""
    return v.at_byte(in_buffer(y, buffer), v.address_of(y) % CACHE_LINE) if combined else y


def combining(write: Callable[..., None]) -> Callable[..., None]:
    """The loop that calls write(first, stop, n, out, past, arguments) for the rows from `begin` to `end` of y.

    `write` stores the rows from `first` to `stop` at `out`, which is their place in y or in the buffer, and uses
    non-temporal stores if `past`.
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
    """Whether groups of rows are written past the cache from a buffer: they must be contiguous and fill a line."""
    line = v.line(y.data)
    return stream and y.step == n and v.to_line(y.data, 0) >= 0 and group * n >= line and rows > group


@inline
def write_waiting(i: int, waiting) -> None:
    """Write vector i of the lines that wait in a buffer, out[:ready] = held[:ready]; behind `ready` prefetch `out`."""
    out, ready, held = waiting
    at = i * v.lanes(out)
    if at < ready:
        v.store_streaming(out, at, v.load(held, at))
    else:
        v.prefetch(out, at)


@inline
def waiting_from(waiting, i: int):
    """What waits, from vector i on."""
    out, ready, held = waiting
    at = i * v.lanes(out)
    return out + at, ready - at, held + at


@inline
def first_line(after, held) -> int:
    """How many elements before `after` lie in the same cache line. They are copied to the start of the buffer."""
    line = v.line(after)
    count = (line - v.to_line(after, 0)) % line
    write_same(held, 0, count, 0, (after + -count,), ())
    return count


@inline
def next_lines(out, ready: int, n: int, held) -> None:
    """Write those of the `ready` lines that n calls of `write_waiting` have left; move the incomplete line to the
    front.

    The lines consist of whole vectors, since a group of rows does: it adds n vectors to less than one line.
    """
    line = v.line(out)
    write_same(out, min(n * v.lanes(out), ready), ready, 1, (held,), ())
    write_same(held, 0, line, 0, (held + ready,), ())


def group_size(elements: int, itemsize: int) -> int:
    """The numbers of working memory for a buffer of groups of so many elements, with a spare line at both ends."""
    return elements + 2 * CACHE_LINE // itemsize
