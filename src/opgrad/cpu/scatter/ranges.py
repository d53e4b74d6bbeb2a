"""Writes an array into a larger array of zeros, at the positions that a range gives on each axis.

Axes that are taken whole are joined, so rows are as long as possible. A unit of work is a block of one row of the
larger array: zeros before, the numbers of the row, zeros behind.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from opgrad.contract.problem import Problem
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.map import write_same
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.program import Program, shared_out

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


def program(problem: Problem, taken: Sequence[range]) -> Program:
    """dx = 0; dx[taken] = dy, `taken` with a range for each axis."""
    shape = problem.attributes["shape"]
    size = math.prod(shape)
    if not size:
        return Program(())
    loops, (n, row) = _joined(shape, taken)
    rows, chosen = loops.pop() if loops else (1, range(1))
    words = [word for length, picked in reversed(loops) for word in (length, picked.start, picked.step, len(picked))]
    table = (ctypes.c_int64 * len(words))(*words)
    blocks = partition.count(n, BLOCK)
    units = size // n * blocks
    arguments = {"blocks": blocks, "n": n, "columns": _axis_range(row)}
    arguments |= {"plane": Plane(rows, _axis_range(chosen), ctypes.addressof(table), len(loops)), "x": problem["dy"]}
    arguments |= {"y": problem["dx"], "stream": partition.streams(problem.bytes) and row.step == 1}
    return Program([shared_out(scatter_rows, units, problem.bytes / units, arguments)], tables=(table,))


def _axis_range(taken: range) -> AxisRange:
    return AxisRange(taken.start, taken.step, len(taken))


def _joined(shape: Sequence[int], taken: Sequence[range]) -> tuple[list[tuple[int, range]], tuple[int, range]]:
    """(size, range) of the axes that rows are chosen by, and of a row."""
    found: list[tuple[int, range]] = [(1, range(1))]
    for size, each in zip(shape, taken, strict=True):
        picked = each if len(each) > 1 else range(each.start, each.start + len(each))
        before, chosen = found[-1]
        if picked == range(size) and chosen == range(before):
            found[-1] = (before * size, range(before * size))
        else:
            found.append((size, picked))
    n, row = found.pop()
    if found and row == range(n) and found[-1][1].step == 1:
        before, chosen = found.pop()
        n, row = before * n, range(chosen.start * n, chosen.stop * n)
    return [axis for axis in found if axis != (1, range(1))], (n, row)
