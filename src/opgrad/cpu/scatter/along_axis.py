"""Elements picked along one axis, and their sums: the work is apart for all other axes.

A line is the n indices, and the `size` elements of x, that differ in nothing but the place on the axis. Lines that lie
side by side in memory are a strip, so that whole cache lines are used. The numbers of a strip that go to one element
are added as they come along the axis; the rounding errors of long sums are added apart.
"""

import ctypes
import math
from typing import Any, Final

from opgrad.contract import Shape
from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import Pointer, Vector, load_one, number, select, store_one
from opgrad.cpu.gather import CHUNK
from opgrad.cpu.loops.fill import write_zeros, zero_step
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.loops.map import mapped
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Step
from opgrad.cpu.runtime.workspace import release_slot, take_slot, working_space
from opgrad.problem import Problem

WORDS: Final = 3  # of an axis in the table: its size, and its strides in the indices and in x
CACHED = 1 << 17  # bytes of a strip of x that stay in the second-level cache with all that goes through it
NARROW = 16  # lines of a strip at least, if there are so many side by side: a cache line of float32
FEW: Final = 4  # elements for each index from which on only the elements named are written, the others zeroed


class Lines:
    """Where the lines lie: `table` has the axes that choose a strip's first line, the last axis first.

    `run` lines lie side by side, in the indices' array (n of them on the axis) as in x (size of them). `steps` are the
    strides of the axis in both. `covers`: whether all lines of x have indices.
    """

    def __init__(self, x: Shape, indices: Shape, axis: int):
        self.n, self.size = indices[axis], x[axis]
        strides = [(math.prod(indices[place + 1 :]), math.prod(x[place + 1 :])) for place in range(len(x))]
        self.steps = strides[axis]
        self.run, first = 1, len(x)
        while first > axis + 1 and strides[first - 1] == (self.run, self.run):
            first -= 1
            self.run *= indices[first]
        others = [place for place in reversed(range(first)) if place != axis and indices[place] != 1]
        self.rows = math.prod(indices[place] for place in others)
        words = [word for place in others for word in (indices[place], *strides[place])]
        self.axes, self.table = len(others), (ctypes.c_int64 * len(words))(*words)
        self.covers = all(indices[place] == x[place] for place in range(len(x)) if place != axis)

    def strips(self, width: int) -> dict[str, Any]:
        """What kernels are told of the lines, so many of them in a strip."""
        strips = partition.count(self.run, width)
        return {
            "units": self.rows * strips,
            "strips": strips,
            "width": width,
            "run": self.run,
            "table": ctypes.addressof(self.table),
            "axes": self.axes,
            "n": self.n,
            "size": self.size,
            "step": self.steps[0],
            "x_step": self.steps[1],
        }


@inline
def place_of(table: int, axes: int, row: int, which: int) -> int:
    """Where a row of strips starts: 1 in the indices, 2 in x."""
    place = 0
    for axis in range(axes):
        entry = table + 8 * WORDS * axis
        size = load_word(entry, 0)
        place += row % size * load_word(entry, which)
        row //= size
    return place


@inline
def element(indices: Any, i: int, size: int) -> int:
    """The element that index i names."""
    index = load_one(indices, i)
    return index + size if index < 0 else index


# --- forward -------------------------------------------------------------------------------------------------------


@kernel
def copy_elements(
    part, per_part, units, strips, width, run, table, axes, n, size, step, x_step, per_block, blocks,
    indices: Pointer, x: Pointer, y: Pointer,
):  # fmt: skip
    """A unit is a block of indices along the axis, for a strip of lines."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        block, strip = unit % blocks * per_block, unit // blocks
        row, column = strip // strips, strip % strips * width
        place = place_of(table, axes, row, 1) + column
        source = x + (place_of(table, axes, row, 2) + column)
        out, names = y + place, indices + place
        columns, end = min(width, run - column), min(block + per_block, n)
        if columns == 1:
            for j in range(block, end):
                store_one(out, j * step, load_one(source, element(names, j * step, size) * x_step))
        else:
            for j in range(block, end):
                for q in range(columns):
                    i = j * step + q
                    store_one(out, i, load_one(source, element(names, i, size) * x_step + q))


def copy_steps(problem: Problem, lines: Lines, scratch: int) -> tuple[list[Step], int]:
    count = math.prod(problem.specs["indices"].shape)
    if not count:
        return [], scratch
    item = problem.specs["x"].dtype.itemsize
    given = lines.strips(_width(lines, item))
    blocks = max(1, round(count * 2 * item / (given["units"] * partition.MAX_PART_BYTES)))
    per_block = -(-lines.n // blocks)
    blocks = partition.count(lines.n, per_block)
    units = given["units"] * blocks
    per = partition.per_part(units, count / units * (2 * item + problem.specs["indices"].dtype.itemsize))
    operands = {name: problem[name] for name in ("indices", "x", "y")}
    arguments = given | operands | {"per_block": per_block, "blocks": blocks, "units": units, "per_part": per}
    return [Step(copy_elements, partition.count(units, per), arguments)], scratch


def _width(lines: Lines, item: int) -> int:
    """How many lines make a strip."""
    return max(1, min(lines.run, max(NARROW, CACHED // (max(lines.size, 1) * item))))


# --- backward ------------------------------------------------------------------------------------------------------


@inline
def pieces(size: int, x_step: int, columns: int) -> tuple[int, int]:
    """How many pieces a strip of x has in memory, and their length: one if nothing lies between its rows."""
    return (1, size * columns) if columns == x_step else (size, columns)


@inline
def zero_strip(dx: Any, size: int, x_step: int, columns: int) -> None:
    """dx = 0 in the strip."""
    count, length = pieces(size, x_step, columns)
    for k in range(count):
        write_zeros(dx + k * x_step, 0, length, 0)


@inline
def add_one(total: Any, i: int, value: float) -> None:
    """total[i] += value"""
    store_one(total, i, load_one(total, i) + value)


@kernel
def add_in_place(
    part, per_part, units, strips, width, run, table, axes, n, size, step, x_step,
    indices: Pointer, dy: Pointer, dx: Pointer,
):  # fmt: skip
    """For few numbers along the axis, where dx has the precision of the sums."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, column = unit // strips, unit % strips * width
        place = place_of(table, axes, row, 1) + column
        total = dx + (place_of(table, axes, row, 2) + column)
        given, names = dy + place, indices + place
        columns = min(width, run - column)
        zero_strip(total, size, x_step, columns)
        if columns == 1:
            for j in range(n):
                add_one(total, element(names, j * step, size) * x_step, load_one(given, j * step))
        else:
            for j in range(n):
                for q in range(columns):
                    i = j * step + q
                    add_one(total, element(names, i, size) * x_step + q, load_one(given, i))


@inline
def add_exactly(total: Any, lost: Any, i: int, value: float) -> None:
    """total[i] += value; lost[i] += what the rounding took."""
    before = load_one(total, i)
    after = before + value
    added = after - before
    store_one(total, i, after)
    store_one(lost, i, load_one(lost, i) + ((before - (after - added)) + (value - added)))


@inline
def _with_lost(total: Vector, lost: Vector) -> Vector:
    # What infinity took is NaN.
    return select(lost == lost, total + lost, total)


write_sums = mapped(_with_lost)


@inline
def write_strip(dx: Any, size: int, x_step: int, columns: int, total: Any, lost: Any, stream: int) -> None:
    """dx = total + lost in the strip, and both are 0 again."""
    count, length = pieces(size, x_step, columns)
    for k in range(count):
        write_sums(dx + k * x_step, 0, length, stream, (total + k * columns, lost + k * columns), ())
    write_zeros(total, 0, size * columns, 0)
    write_zeros(lost, 0, size * columns, 0)


@inline
def write_named(
    dx: Any, n: int, size: int, step: int, x_step: int, columns: int, names: Any, total: Any, lost: Any
) -> None:
    """The same, but only for the elements that indices name; all others of dx are zeros already."""
    for j in range(n):
        for q in range(columns):
            v = element(names, j * step + q, size)
            t, r = load_one(total, v * columns + q), load_one(lost, v * columns + q)
            store_one(dx, v * x_step + q, t + r if r == r else t)
    for j in range(n):
        for q in range(columns):
            i = element(names, j * step + q, size) * columns + q
            store_one(total, i, number(total, 0.0))
            store_one(lost, i, number(total, 0.0))


@kernel
def add_apart(
    part, per_part, units, strips, width, run, table, axes, n, size, step, x_step,
    indices: Pointer, dy: Pointer, dx: Pointer, scratch, slots, space: Pointer, space_size, stream,
):  # fmt: skip
    """For many numbers along the axis, or where dx is in half precision: sums and what they lost in working space."""
    slot = take_slot(scratch, slots)
    total = space + slot * space_size
    lost = total + space_size // 2
    write_zeros(total, 0, space_size, 0)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, column = unit // strips, unit % strips * width
        place = place_of(table, axes, row, 1) + column
        out = dx + (place_of(table, axes, row, 2) + column)
        given, names = dy + place, indices + place
        columns = min(width, run - column)
        for j in range(n):
            for q in range(columns):
                i = j * step + q
                add_exactly(total, lost, element(names, i, size) * columns + q, load_one(given, i))
        if size > FEW * n:
            zero_strip(out, size, x_step, columns)
            write_named(out, n, size, step, x_step, columns, names, total, lost)
        else:
            write_strip(out, size, x_step, columns, total, lost, stream)
    release_slot(scratch, slot)


def sum_steps(problem: Problem, lines: Lines, scratch: int) -> tuple[list[Step], int]:
    """The steps that add dy up in dx, and where their scratch ends."""
    spec, count = problem.specs["dx"], math.prod(problem.specs["dy"].shape)
    elements = math.prod(spec.shape)
    if not elements:
        return [], scratch
    zeros = [zero_step(problem["dx"], elements, elements * spec.dtype.itemsize)]
    if not count:
        return zeros, scratch
    given = lines.strips(_width(lines, 4))
    per = partition.per_part(given["units"], problem.bytes / given["units"])
    made = partition.count(given["units"], per)
    operands = {name: problem[name] for name in ("indices", "dy", "dx")}
    arguments = given | operands | {"per_part": per, "stream": partition.streams(problem.bytes)}
    first = [] if lines.covers else zeros
    if lines.n == 1 or (lines.n <= CHUNK and spec.dtype.itemsize > 2):
        return [*first, Step(add_in_place, made, arguments)], scratch
    space, end = working_space(2 * lines.size * given["width"], precision(problem), made, scratch)
    return [*first, Step(add_apart, made, arguments | space)], end
