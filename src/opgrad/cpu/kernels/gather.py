"""Slices picked by index, and the gradient that adds them up again.

x is pre x size x post and y is pre x count x post, all contiguous. The gradient first sorts the slices of dy by
the slice of dx that they go to (a counting sort, which keeps their order), so every slice of dx is summed in
registers and written once, in an order that depends on the arguments alone.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Private, Rows, Units
from opgrad.cpu.compiler.words import copy_bytes, load_i32, load_word, store_i32, store_word
from opgrad.cpu.kernels.loops.fold import column_sum_of, fold_down
from opgrad.cpu.kernels.loops.map import put, write_same
from opgrad.cpu.kernels.loops.rows import combining
from opgrad.cpu.kernels.sort import HOT, counting_sort

AHEAD: Final = 16  # addends between a prefetch and its use
WIDE: Final = 4  # vectors of a slice that are summed at once: eight registers
SINGLE: Final = 8  # slices shorter than this are summed element by element
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


# --- forward -------------------------------------------------------------------------------------------------------


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


# --- backward: sort the slices by where they go --------------------------------------------------------------------


@inline
def _target_of(indices, j: int, size: int):
    """The slice of dx that slice j of dy goes to, and what is sorted: j itself."""
    return named(indices, j, size), j


@inline
def _put_slice(order: int, place: int, slice: int, indices, j: int) -> None:
    store_i32(order, place, slice)


SLICES_BY_TARGET = counting_sort(_target_of, _put_slice, Pointer, int)


# --- backward: sum -------------------------------------------------------------------------------------------------


@inline
def _add_wide(total, arrays, k: int, numbers):
    (dy,), (post, order, last, ahead), (s, t, u, z) = arrays, numbers, total
    w, source = v.lanes(dy), dy + load_i32(order, k) * post
    ask_for(dy + load_i32(order, min(k + AHEAD, last)) * post, ahead)
    return s + v.load(source, 0), t + v.load(source, w), u + v.load(source, 2 * w), z + v.load(source, 3 * w)


@inline
def _add_narrow(total, arrays, k: int, numbers):
    (dy,), (post, order, last, ahead, mask) = arrays, numbers
    ask_for(dy + load_i32(order, min(k + AHEAD, last)) * post, ahead)
    return (total[0] + v.load_masked(dy, load_i32(order, k) * post, mask, 0.0),)


@inline
def _add_element(total, arrays, k: int, numbers):
    post, order, i = numbers
    return (total[0] + v.load_one(arrays[0], load_i32(order, k) * post + i),)


_sum_wide, _sum_narrow, _sum_elements = fold_down(_add_wide), fold_down(_add_narrow), fold_down(_add_element)


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
