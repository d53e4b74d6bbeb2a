"""Slices and elements picked by index or by range, and the gradients that put them back where they came from.

Positions are sorted by their keys, from 0 to size - 1, by a stable counting sort whose work threads share. Each part
counts its positions by key. A scan turns the counts into the places where each part's positions of each key begin, and
each part then moves its positions there. Counts and places are stored in 32 bits.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import copy_bytes, load_i32, load_word, store_i32, store_word
from opgrad.cpu.kernels.loops.fold import column_sum_of, fold_down
from opgrad.cpu.kernels.loops.map import BLOCK, both_offsets, mapped, put, write_same, write_zeros
from opgrad.cpu.kernels.loops.rows import combining

MOST_SORTED: Final = 2**31 - 1  # positions that can be sorted
HOT: Final = 8  # a key is hot if more than 1/8 of all positions have it


def counting_sort(
    key_of: Callable[..., Any], put: Callable[..., None], source: Any, target: Any
) -> tuple[Kernel, Kernel]:
    """The first and the last of the three kernels of a sort; `scan_counts` runs between them.

    key_of(source, j, size) gives the key of position j and the item that is moved. put(target, place, item, source, j)
    stores the item. source, target: the annotations of these parameters.
    """
    inline(key_of)
    inline(put)
    source_kind, target_kind = source, target

    @kernel
    def count_keys(positions: Units, part: Part, size, source: source_kind, counts):
        """counts[part, key] = how many of this part's positions have that key."""
        own = counts + 4 * part * size
        for key in range(size):
            store_i32(own, key, 0)
        for j in positions:
            _count_up(own, key_of(source, j, size)[0])

    @kernel
    def move_positions(positions: Units, part: Part, size, source: source_kind, counts, target: target_kind):
        own = counts + 4 * part * size
        for j in positions:
            key, item = key_of(source, j, size)
            put(target, _count_up(own, key), item, source, j)

    return count_keys, move_positions


@inline
def _count_up(counts: int, key: int) -> int:
    """Add one to the count of a key, and return the count before."""
    count = load_i32(counts, key)
    store_i32(counts, key, count + 1)
    return count


@kernel
def scan_counts(parts, count, size, counts, starts, hot):
    """Each part's count of a key becomes the place where its positions of the key begin; starts: where all of them do.

    hot[0] is the number of hot keys, which follow it.
    """
    place, found_hot = 0, 0
    for key in range(size):
        store_word(starts, key, place)
        for part in range(parts):
            own = counts + 4 * part * size
            found = load_i32(own, key)
            store_i32(own, key, place)
            place += found
        if place - load_word(starts, key) > count // HOT:
            found_hot += 1
            store_word(hot, found_hot, key)
    store_word(hot, 0, found_hot)
    store_word(starts, size, place)


# --- slices ----------------------------------------------------------------------------------------------------------
#
# x is pre x size x post and y is pre x count x post, all contiguous. The gradient first sorts the slices of dy by the
# slice of dx that they go to (a counting sort, which keeps their order), so every slice of dx is summed in registers
# and written once, in an order that depends on the arguments alone.

AHEAD: Final = 16  # addends between a prefetch and its use
WIDE: Final = 4  # vectors of a slice that are summed at once: eight registers
SINGLE: Final = 5  # slices shorter than this are summed element by element
LONGEST_AHEAD: Final = 1024  # the most elements of a slice that are prefetched at once


# --- indices -------------------------------------------------------------------------------------------------------


@kernel
def check_indices(positions: Units, part: Part, size, indices: Pointer, found):
    """found[part] = the first position in this part whose index is outside [-size, size), or -1."""
    wrong = -1
    for j in positions:
        index = v.load_one(indices, j)
        if index < -size or index >= size:
            wrong = j
            break
    store_word(found, part, wrong)


@kernel
def report_indices(parts, found, indices: Pointer, status):
    """Write the first wrong index to the status words."""
    for part in range(parts):
        wrong = load_word(found, part)
        if wrong >= 0:
            store_word(status, 0, 1)
            store_word(status, 1, wrong)
            store_word(status, 2, v.load_one(indices, wrong))
            break


# --- slices by index: forward ----------------------------------------------------------------------------------------


@inline
def named(indices, i: int, size: int) -> int:
    """The position that index i stands for on an axis of this size; negative indices count from the end."""
    index = v.load_one(indices, i)
    return index + size if index < 0 else index


@inline
def source_of(unit: int, count: int, size: int, indices) -> int:
    """Which slice of x, as pre * size + index, slice `unit` of y comes from."""
    return unit // count * size + named(indices, unit % count, size)


class Slices(NamedTuple):
    """Slices of dy: how many there are for an index before the axis, of x, and the elements of each."""

    count: int
    size: int
    post: int


@inline
def ask_for(slice, n: int) -> None:
    """Have the cache lines of a slice fetched, of its first elements if it is long; none if n is not above 0."""
    if n > 0:
        asked = min(n, LONGEST_AHEAD)
        for i in range(0, asked, v.line(slice)):
            v.prefetch_line(slice, i)
        v.prefetch_line(slice, asked - 1)


@combining
def _copy_rows(first, stop, n, out, past, arguments):
    x, indices, count, size, soon = arguments
    whole = size * n  # the numbers of x for an index before the axis
    table, j = x + first // count * whole, first % count
    coming, k = x + (first + soon) // count * whole, (first + soon) % count
    for unit in range(first, stop):
        source, y = table + named(indices, j, size) * n, out + (unit - first) * n
        ask_for(coming + named(indices, k, size) * n, n if soon else 0)
        if past:
            write_same(y, 0, n, past, (source,), ())
        else:
            copy_bytes(v.address_of(y), v.address_of(source), 4 * n)
        # Counted on: a division for every slice would take as long as copying a short one.
        j, k = j + 1, k + 1
        if j == count:
            table, j = table + whole, 0
        if k == count:
            coming, k = coming + whole, 0


@kernel
def copy_slices(
    units: Units, slices: Slices, item, words, x: Pointer, y: Rows, indices: Pointer, soon, buffer: Private, stream
):
    """A unit is one slice of y. Those of whole 4-byte words are copied as vectors of them, asked for `soon` before."""
    count, size, post = slices
    if words:
        _copy_rows(units.start, units.stop, words, y, buffer, stream, (x, indices, count, size, soon))
    else:
        for unit in units:
            source = v.address_of(x) + source_of(unit, count, size, indices) * post * item
            copy_bytes(v.address_of(y.data) + unit * post * item, source, post * item)


# --- slices by index: backward, sort them by where they go -----------------------------------------------------------


@inline
def _target_of(indices, j: int, size: int):
    """The slice of dx that slice j of dy goes to, and what is sorted: j itself."""
    return named(indices, j, size), j


@inline
def _put_slice(order: int, place: int, slice: int, indices, j: int) -> None:
    store_i32(order, place, slice)


SLICES_BY_TARGET = counting_sort(_target_of, _put_slice, Pointer, int)


# --- slices by index: backward, sum ----------------------------------------------------------------------------------


@fold_down
def _sum_wide(total, arrays, k: int, numbers):
    (dy,), (post, order, last, ahead), (s, t, u, z) = arrays, numbers, total
    w, source = v.lanes(dy), dy + load_i32(order, k) * post
    ask_for(dy + load_i32(order, min(k + AHEAD, last)) * post, ahead)
    return s + v.load(source, 0), t + v.load(source, w), u + v.load(source, 2 * w), z + v.load(source, 3 * w)


@fold_down
def _sum_narrow(total, arrays, k: int, numbers):
    (dy,), (post, order, last, ahead, mask) = arrays, numbers
    ask_for(dy + load_i32(order, min(k + AHEAD, last)) * post, ahead)
    return (total[0] + v.load_masked(dy, load_i32(order, k) * post, mask, 0.0),)


@fold_down
def _sum_elements(total, arrays, k: int, numbers):
    post, order, i = numbers
    return (total[0] + v.load_one(arrays[0], load_i32(order, k) * post + i),)


@inline
def sum_slice(
    dx, dy, post: int, column: int, columns: int, order: int, begin: int, end: int, last: int, stream: int
) -> None:
    """dx[column:columns] = the sum of those columns of the slices order[begin:end] of dy."""
    w, zero = v.lanes(dy), v.full(dy, 0.0)
    if post < SINGLE:
        for i in range(post):
            total = _sum_elements((v.number(dy, 0.0),), begin, end, (dy,), (post, order, i))
            v.store_one(dx, i, total[0])
    else:
        # The first columns ask for whole slices, so that memory is read in long runs. Slices of a single vector are
        # not asked for: the core has several of them under way by itself.
        ahead, every = columns if columns > w else 0, v.first(dy, w)
        i = column
        while i + WIDE * w <= columns:
            past = stream and v.to_line(dx, i) == 0
            zeros, numbers = (zero, zero, zero, zero), (post, order, last, ahead - i)
            sums = _sum_wide(zeros, begin, end, (dy + i,), numbers)
            put(dx, i, sums[0], True, every, past)
            put(dx, i + w, sums[1], True, every, past)
            put(dx, i + 2 * w, sums[2], True, every, past)
            put(dx, i + 3 * w, sums[3], True, every, past)
            ahead = 0
            i += WIDE * w
        while i < columns:
            mask = v.first(dy, columns - i)
            numbers = (post, order, last, ahead - i, mask)
            v.store_masked(dx, i, _sum_narrow((zero,), begin, end, (dy + i,), numbers)[0], mask)
            ahead = 0
            i += w


@kernel
def sum_slices(units: Units, ranges, per_range, slices: Slices, dy: Pointer, dx: Pointer, starts, order, stream):
    """A unit is a range of slices of dx, for one index before the axis; those that many slices go to are left out."""
    count, size, post = slices
    for unit in units:
        p, block = unit // ranges, unit % ranges
        for target in range(block * per_range, min((block + 1) * per_range, size)):
            begin, end = load_word(starts, target), load_word(starts, target + 1)
            if end - begin <= count // HOT:
                out = dx + (p * size + target) * post
                sum_slice(out, dy + p * count * post, post, 0, post, order, begin, end, count - 1, stream)


@kernel
def sum_hot_slices(units: Units, strips, width, pieces, slices: Slices, dy: Pointer, sums: Pointer, starts, order, hot):
    """The slices left out. A unit is a strip of columns of a piece of the addends: threads share even a single slice.

    sums is dx where the addends are one piece; else it has, for each index before the axis, a slice for every piece
    of every hot slice.
    """
    count, size, post = slices
    for unit in units:
        column, piece, p = unit % strips * width, unit // strips % pieces, unit // (strips * pieces)
        for number in range(load_word(hot, 0)):
            target = load_word(hot, number + 1)
            first, addends = load_word(starts, target), load_word(starts, target + 1) - load_word(starts, target)
            begin, end = first + addends * piece // pieces, first + addends * (piece + 1) // pieces
            out = sums + (p * size + target if pieces == 1 else (p * HOT + number) * pieces + piece) * post
            columns = min(column + width, post)
            sum_slice(out, dy + p * count * post, post, column, columns, order, begin, end, count - 1, 0)


@kernel
def add_pieces(units: Units, pieces, slices: Slices, sums: Pointer, dx: Pointer, hot):
    """A hot slice of dx = the sum of its pieces; a unit is an index before the axis."""
    _, size, post = slices
    for p in units:
        for number in range(load_word(hot, 0)):
            out, first = dx + (p * size + load_word(hot, number + 1)) * post, sums + (p * HOT + number) * pieces * post
            for i in range(0, post, v.lanes(sums)):
                v.store_masked(out, i, column_sum_of(first + i, pieces, post), v.first(sums, post - i))


# --- tuples of indices, which become numbers of slices ---------------------------------------------------------------


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
#
# Positions on the other axes do not affect each other. A line consists of the n indices, and the `size` elements of x,
# that differ only in their position on the axis. Lines that are neighbours in memory form a strip, so that whole cache
# lines are used. Numbers of a strip that go to the same element are added in their order on the axis; the rounding
# errors of long sums are summed separately (compensation).


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


# --- elements along an axis: forward ---------------------------------------------------------------------------------


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


# --- elements along an axis: backward --------------------------------------------------------------------------------


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


@mapped
def write_sums(total: Vector, compensation: Vector) -> Vector:
    # The compensation of an infinite sum is NaN.
    return v.select(compensation == compensation, total + compensation, total)


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
