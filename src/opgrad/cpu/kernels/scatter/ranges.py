"""Kernels that write an array into a larger array of zeros, at the positions that a range gives on each axis.

A unit of work is a block of one row of the larger array: zeros before, the numbers of the row, zeros behind.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.map import write_same

SHORT: Final = 256  # elements of rows that are filled in where many rows have been zeroed at once
WORDS: Final = 4  # of an axis in the table: its size, then the first position, the step and the count of its range


@inline
def taken_by(away: int, step: int) -> int:
    """How many steps lead to the position `away` from the first one; -1 if no number of steps does."""
    index = away // step
    return index if index * step == away else -1


@inline
def row_taken(table: int, axes: int, row: int) -> int:
    """The row of the smaller array that lies in this row of the larger one, or -1.

    The table has the last axis first.
    """
    found, stride = 0, 1
    for axis in range(axes):
        entry = table + 8 * WORDS * axis
        size, count = load_word(entry, 0), load_word(entry, 3)
        index = taken_by(row % size - load_word(entry, 1), load_word(entry, 2))
        row //= size
        if index < 0 or index >= count:
            return -1
        found += index * stride
        stride *= count
    return found


@inline
def within(index: int, begin: int, end: int) -> int:
    return min(max(index, begin), end)


@inline
def write_row(out, begin: int, end: int, start: int, step: int, count: int, x, stream: int) -> None:
    """out[begin:end] of a row that has numbers of x in it; zeros elsewhere."""
    first = within(start, begin, end) if step == 1 else end
    last = within(start + count, begin, end) if step == 1 else end
    write_zeros(out, begin, first, stream)
    write_same(out, first, last, stream, (x + -start,), ())
    write_zeros(out, last, end, stream)
    if step != 1:
        write_strided(out, begin, end, start, step, count, x)


@inline
def fill_row(out, start: int, step: int, count: int, x) -> None:
    """The numbers of x in a row of zeros."""
    if step == 1:
        write_same(out + start, 0, count, 0, (x,), ())
    else:
        write_strided(out, 0, start + count * abs(step) + 1, start, step, count, x)


class AxisRange(NamedTuple):
    """Positions on an axis: the first one, the step, how many."""

    start: int
    step: int
    count: int


class Plane(NamedTuple):
    """The axes that rows are chosen by: the last one's rows and range, the table of the others, and their number."""

    rows: int
    picked: AxisRange
    table: int
    axes: int


@kernel
def scatter_rows(units: Units, blocks, n, columns: AxisRange, plane: Plane, x: Pointer, y: Pointer, stream):
    """Rows that differ in the last of the axes alone follow each other without a division."""
    unit, short, rows, picked = units.start, n <= SHORT, plane.rows, plane.picked
    start, step, count = columns
    while unit < units.stop:
        row, begin = unit // blocks, unit % blocks * BLOCK
        end, index = min(begin + BLOCK, n), row % rows
        following = 1 if blocks > 1 else min(units.stop - unit, rows - index, max(1, BLOCK // n))
        source = row_taken(plane.table, plane.axes, row // rows)
        if short or source < 0:
            write_zeros(y + row * n, begin, end + (following - 1) * n, stream and source < 0)
        if source >= 0:
            for k in range(following):
                out, away = y + (row + k) * n, index + k - picked.start
                taken = away if picked.step == 1 else taken_by(away, picked.step)
                if taken >= 0 and taken < picked.count:
                    numbers = x + (source * picked.count + taken) * count
                    if short:
                        fill_row(out, start, step, count, numbers)
                    else:
                        write_row(out, begin, end, start, step, count, numbers, stream)
                elif not short:
                    write_zeros(out, begin, end, stream)
        unit += following


@inline
def write_strided(out, begin: int, end: int, start: int, step: int, count: int, x) -> None:
    """out[start + i * step] = x[i] for the positions in [begin, end)."""
    low = min(start, start + (count - 1) * step)
    away = abs(step)
    first = (max(begin - low, 0) + away - 1) // away
    last = min((end - low + away - 1) // away, count)
    for k in range(first, last):
        v.store_one(out, low + k * away, v.load_one(x, k if step > 0 else count - 1 - k))
