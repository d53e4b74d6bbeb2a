"""Elements picked along one axis, and their sums. Positions on the other axes do not affect each other.

A line consists of the n indices, and the `size` elements of x, that differ only in their position on the axis. Lines
that are neighbours in memory form a strip, so that whole cache lines are used. Numbers of a strip that go to the same
element are added in their order on the axis; the rounding errors of long sums are summed separately (compensation).
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.gather import named
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.strided import both_offsets

FEW: Final = 4  # elements for each index from which on only the elements named are written, the others zeroed


class LineStrips(NamedTuple):
    """Strips of lines: how many there are in a row of them, how many lines a strip and a row have, the axes' table;
    the indices and the elements of x of a line, and the steps from one to the next of both."""

    strips: int
    width: int
    run: int
    table: int
    axes: int
    n: int
    size: int
    step: int
    x_step: int


@inline
def strip_at(lines, strip: int) -> tuple[int, int, int]:
    """Where a strip starts in the indices and in x, and how many lines it has."""
    row, column = strip // lines.strips, strip % lines.strips * lines.width
    offset, x_offset = both_offsets(lines.table, lines.axes, row)
    return offset + column, x_offset + column, min(lines.width, lines.run - column)


# --- forward -------------------------------------------------------------------------------------------------------


@kernel
def copy_elements(units: Units, lines: LineStrips, per_block, blocks, asked, indices: Pointer, x: Pointer, y: Pointer):
    """A unit is a block of indices along the axis, for a strip of lines.

    asked: how many elements of the next line are prefetched for each index; 0 if there is none, or few of it are read.
    """
    n, size, step, x_step = lines.n, lines.size, lines.step, lines.x_step
    for unit in units:
        begin = unit % blocks * per_block
        offset, x_offset, columns = strip_at(lines, unit // blocks)
        source, out, names, end = x + x_offset, y + offset, indices + offset, min(begin + per_block, n)
        if columns == 1:
            coming = x + strip_at(lines, unit + 1)[1] if asked else source
            for j in range(begin, end):
                v.store_one(out, j * step, v.load_one(source, named(names, j * step, size) * x_step))
                if asked:
                    v.prefetch_line(coming, j * asked)
        else:
            for j in range(begin, end):
                for q in range(columns):
                    i = j * step + q
                    v.store_one(out, i, v.load_one(source, named(names, i, size) * x_step + q))


# --- backward ------------------------------------------------------------------------------------------------------


@inline
def runs_of_strip(size: int, x_step: int, columns: int) -> tuple[int, int]:
    """The number of contiguous runs of a strip of x in memory, and their length.

    One if no gap lies between its rows.
    """
    return (1, size * columns) if columns == x_step else (size, columns)


@inline
def zero_strip(dx, size: int, x_step: int, columns: int) -> None:
    """dx = 0 in the strip."""
    count, length = runs_of_strip(size, x_step, columns)
    for k in range(count):
        write_zeros(dx + k * x_step, 0, length, 0)


@inline
def add_one(total, i: int, value: float) -> None:
    """total[i] += value"""
    v.store_one(total, i, v.load_one(total, i) + value)


@kernel
def add_in_place(units: Units, lines: LineStrips, indices: Pointer, dy: Pointer, dx: Pointer):
    """For few numbers along the axis, where dx has the precision of the sums."""
    n, size, step, x_step = lines.n, lines.size, lines.step, lines.x_step
    for unit in units:
        offset, x_offset, columns = strip_at(lines, unit)
        total, addends, names = dx + x_offset, dy + offset, indices + offset
        zero_strip(total, size, x_step, columns)
        if columns == 1:
            for j in range(n):
                add_one(total, named(names, j * step, size) * x_step, v.load_one(addends, j * step))
        else:
            for j in range(n):
                for q in range(columns):
                    i = j * step + q
                    add_one(total, named(names, i, size) * x_step + q, v.load_one(addends, i))


@inline
def add_exactly(total, compensation, i: int, value: float) -> None:
    """total[i] += value; compensation[i] += what the rounding took (TwoSum, Knuth 1969)."""
    before = v.load_one(total, i)
    after = before + value
    added = after - before
    v.store_one(total, i, after)
    v.store_one(compensation, i, v.load_one(compensation, i) + ((before - (after - added)) + (value - added)))


@inline
def _compensated(total: Vector, compensation: Vector) -> Vector:
    # The compensation of an infinite sum is NaN.
    return v.select(compensation == compensation, total + compensation, total)


write_sums = mapped(_compensated)


@inline
def write_strip(dx, size: int, x_step: int, columns: int, total, compensation, stream: int) -> None:
    """dx = total + compensation in the strip, and both are 0 again."""
    count, length = runs_of_strip(size, x_step, columns)
    for k in range(count):
        write_sums(dx + k * x_step, 0, length, stream, (total + k * columns, compensation + k * columns), ())
    write_zeros(total, 0, size * columns, 0)
    write_zeros(compensation, 0, size * columns, 0)


@inline
def write_named(dx, n: int, size: int, step: int, x_step: int, columns: int, names, total, compensation) -> None:
    """`write_strip` for those elements alone that indices name; all other elements of dx are 0 already."""
    for j in range(n):
        for q in range(columns):
            value = named(names, j * step + q, size)
            t, r = v.load_one(total, value * columns + q), v.load_one(compensation, value * columns + q)
            v.store_one(dx, value * x_step + q, t + r if r == r else t)
    for j in range(n):
        for q in range(columns):
            i = named(names, j * step + q, size) * columns + q
            v.store_one(total, i, v.number(total, 0.0))
            v.store_one(compensation, i, v.number(total, 0.0))


@kernel
def add_apart(
    units: Units, lines: LineStrips, indices: Pointer, dy: Pointer, dx: Pointer,
    total: Private, compensation: Private, most, stream,
):  # fmt: skip
    """For many numbers along the axis, or where dx is in half precision: sums in memory of the part's own."""
    n, size, step, x_step = lines.n, lines.size, lines.step, lines.x_step
    write_zeros(total, 0, most, 0)
    write_zeros(compensation, 0, most, 0)
    for unit in units:
        offset, x_offset, columns = strip_at(lines, unit)
        out, addends, names = dx + x_offset, dy + offset, indices + offset
        for j in range(n):
            for q in range(columns):
                i = j * step + q
                add_exactly(total, compensation, named(names, i, size) * columns + q, v.load_one(addends, i))
        if size > FEW * n:
            zero_strip(out, size, x_step, columns)
            write_named(out, n, size, step, x_step, columns, names, total, compensation)
        else:
            write_strip(out, size, x_step, columns, total, compensation, stream)
