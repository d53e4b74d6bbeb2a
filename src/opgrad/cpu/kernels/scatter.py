"""Kernels of elements that are picked by index or by range, and of their gradients.

An array of tuples of indices becomes an array of numbers of slices. Elements are also picked along one axis; positions
on the other axes do not affect each other then. A line consists of the n indices, and the `size` elements of x, that
differ only in their position on the axis. Lines that are neighbours in memory form a strip, so that whole cache lines
are used. Numbers of a strip that go to the same element are added in their order on the axis; the rounding errors of
long sums are summed separately (compensation).
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_i32, load_word, store_i32, store_word
from opgrad.cpu.kernels.gather import named, sum_slice
from opgrad.cpu.kernels.loops.map import BLOCK, both_offsets, mapped, write_same, write_zeros
from opgrad.cpu.kernels.sort import counting_sort


@inline
def first_outside(begin: int, end: int, named: int, sizes: int, indices, outside: int) -> int:
    """The first of these indices that is none of its axis, if `outside` is negative; else -1."""
    if outside < 0:
        for i in range(begin, end):
            size, index = load_word(sizes, i % named), v.load_one(indices, i)
            if index < -size or index >= size:
                return i
    return -1


@kernel
def number_tuples(tuples: Units, part: Part, per_batch, named, sizes, indices: Pointer, numbers, found):
    """numbers[j] = the number of the slice that tuple j names; found[part] = the first wrong index, or -1."""
    outside, batch, left = 0, tuples.start // per_batch, per_batch - tuples.start % per_batch
    for j in tuples:
        number = batch
        for k in range(named):
            size, index = load_word(sizes, k), v.load_one(indices, j * named + k)
            place = index + (size & index >> 63)  # all bits of a negative index, shifted that far, are 1
            outside |= place | (size - 1 - place)  # negative if one of them is
            number = number * size + place
        store_word(numbers, j, number)
        left -= 1
        if not left:  # counting on: a division for each took a third of the time
            batch, left = batch + 1, per_batch
    store_word(found, part, first_outside(tuples.start * named, tuples.stop * named, named, sizes, indices, outside))


# --- elements along an axis -----------------------------------------------------------------------------------------


FEW_NAMED: Final = 4  # elements for each index from which on only the elements named are written, the others zeroed


class LineStrips(NamedTuple):
    """Lines along an axis, that lie side by side and are cut into strips of neighbours.

    strips, width: strips in a run of lines, lines in a strip. run: lines side by side. table, axes: of the axes around
    a run, as `both_offsets` reads them. n, size: the indices of a line, its elements in x. step, x_step: from one index
    to the next, from one element of x to the next.
    """

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
        if size > FEW_NAMED * n:
            zero_strip(out, size, x_step, columns)
            write_named(out, n, size, step, x_step, columns, names, total, compensation)
        else:
            write_strip(out, size, x_step, columns, total, compensation, stream)


# --- sums into few of many elements, whose numbers are sorted -------------------------------------------------------


class Sorted(NamedTuple):
    """Keys to be sorted (int64), for each key the number of its slice (int32), and the lowest bit of the digit."""

    keys: int
    order: int
    shift: int


@inline
def _digit_of(source, j: int, size: int):
    """The digit of key j, and what is sorted: the whole key."""
    key = load_word(source.keys, j)
    return key >> source.shift & (size - 1), key


@inline
def _put_key(target, place: int, key: int, source, j: int) -> None:
    """Store the key, and the number of its slice: in the first pass, slices are in the order of their numbers."""
    store_word(target.keys, place, key)
    store_i32(target.order, place, load_i32(source.order, j) if source.shift else j)


KEYS_BY_DIGIT = counting_sort(_digit_of, _put_key, Sorted, Sorted)


@kernel
def sum_sorted(positions: Units, count, post, source: Sorted, dy: Pointer, dx: Pointer):
    """dx[v] = the sum of the slices of dy whose key is v, for each v whose first key is in this part."""
    keys, j = source.keys, positions.start
    while j < positions.stop:
        key, begin = load_word(keys, j), j
        j += 1
        while j < count and load_word(keys, j) == key:
            j += 1
        if begin == 0 or load_word(keys, begin - 1) != key:
            sum_slice(dx + key * post, dy, post, 0, post, source.order, begin, j, count - 1, 0)


# --- an array in a larger array of zeros ----------------------------------------------------------------------------


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


@kernel
def scatter_rows(
    units: Units, blocks, n, columns: AxisRange, rows, picked: AxisRange, table, axes, x: Pointer, y: Pointer, stream
):
    """Rows that differ in the last of the axes alone follow each other without a division.

    rows, picked: of the last of the axes that rows are chosen by. table, axes: of the others, and their number.
    """
    unit, short = units.start, n <= SHORT
    start, step, count = columns
    while unit < units.stop:
        row, begin = unit // blocks, unit % blocks * BLOCK
        end, index = min(begin + BLOCK, n), row % rows
        following = 1 if blocks > 1 else min(units.stop - unit, rows - index, max(1, BLOCK // n))
        source = row_taken(table, axes, row // rows)
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
