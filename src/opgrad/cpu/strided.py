"""An array that stands in a larger one of zeros, at places that ranges give on each axis.

Axes that are taken whole are joined, so rows are as long as possible. A unit of work is a block of one row of the
larger array: zeros before, the numbers of the row, zeros behind.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Final

from opgrad.cpu import parts
from opgrad.cpu.execute import Program, Step
from opgrad.cpu.gather import copy_words
from opgrad.cpu.memory import load_word
from opgrad.cpu.native import inline, kernel
from opgrad.cpu.simd import Pointer, load_one, store_one
from opgrad.cpu.zeros import write_zeros
from opgrad.problem import Problem

BLOCK: Final = 1 << 15  # elements of a row that one unit writes
WORDS: Final = 4  # of an axis in the table: its size, the first place, the step, how many places


@inline
def row_taken(table: int, axes: int, row: int) -> int:
    """Which row of the smaller array stands in this row of the larger one, -1 if none; the last axis comes first."""
    found, step = 0, 1
    for axis in range(axes):
        entry = table + 8 * WORDS * axis
        size, count = load_word(entry, 0), load_word(entry, 3)
        away = row % size - load_word(entry, 1)
        row //= size
        place = away // load_word(entry, 2)
        if place * load_word(entry, 2) != away or place < 0 or place >= count:
            return -1
        found += place * step
        step *= count
    return found


@inline
def within(place: int, begin: int, end: int) -> int:
    return min(max(place, begin), end)


@kernel
def place_rows(part, per_part, units, blocks, n, start, step, count, table, axes, x: Pointer, y: Pointer, stream):
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, begin = unit // blocks, unit % blocks * BLOCK
        end = min(begin + BLOCK, n)
        source = row_taken(table, axes, row)
        out = y + row * n
        joined = source >= 0 and step == 1
        first = within(start, begin, end) if joined else end
        last = within(start + count, begin, end) if joined else end
        write_zeros(out, begin, first, stream, out, 0.0, 0.0)
        copy_words(out, first, last, stream, x + (source * count - start), 0.0, 0.0)
        write_zeros(out, last, end, stream, out, 0.0, 0.0)
        if source >= 0 and step != 1:
            write_spread(out, begin, end, start, step, count, x + source * count)


@inline
def write_spread(out: Pointer, begin: int, end: int, start: int, step: int, count: int, x: Pointer) -> None:
    """out[start + i * step] = x[i] for the places in [begin, end)."""
    low = min(start, start + (count - 1) * step)
    away = abs(step)
    first = (max(begin - low, 0) + away - 1) // away
    last = min((end - low + away - 1) // away, count)
    for k in range(first, last):
        store_one(out, low + k * away, load_one(x, k if step > 0 else count - 1 - k))


def program(problem: Problem, taken: Sequence[range]) -> Program:
    """dx = 0; dx[taken] = dy, `taken` with the places of each axis."""
    shape = problem.attributes["shape"]
    size = math.prod(shape)
    if not size:
        return Program(())
    loops, (n, row) = _joined(shape, taken)
    words = [word for length, places in reversed(loops) for word in (length, places.start, places.step, len(places))]
    table = (ctypes.c_int64 * len(words))(*words)
    blocks = parts.count(n, BLOCK)
    units = size // n * blocks
    per = parts.per_part(units, problem.bytes / units)
    arguments = {
        "per_part": per,
        "units": units,
        "blocks": blocks,
        "n": n,
        "start": row.start,
        "step": row.step,
        "count": len(row),
        "table": ctypes.addressof(table),
        "axes": len(loops),
        "x": problem["dy"],
        "y": problem["dx"],
        "stream": parts.streams(problem.bytes) and row.step == 1,
    }
    return Program((Step(place_rows, parts.count(units, per), arguments),), tables=(table,))


def _joined(shape: Sequence[int], taken: Sequence[range]) -> tuple[list[tuple[int, range]], tuple[int, range]]:
    """(size, places) of the axes that rows are chosen by, and of the places within a row."""
    found: list[tuple[int, range]] = [(1, range(1))]
    for size, each in zip(shape, taken, strict=True):
        places = each if len(each) > 1 else range(each.start, each.start + len(each))
        before, chosen = found[-1]
        if places == range(size) and chosen == range(before):
            found[-1] = (before * size, range(before * size))
        else:
            found.append((size, places))
    n, row = found.pop()
    if found and row == range(n) and found[-1][1].step == 1:
        before, chosen = found.pop()
        n, row = before * n, range(chosen.start * n, chosen.stop * n)
    return [axis for axis in found if axis != (1, range(1))], (n, row)
