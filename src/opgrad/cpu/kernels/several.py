"""Kernels that copy, reduce and scale one of any number of arrays."""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import copy_bytes, load_word, store_u8, store_word
from opgrad.cpu.kernels.loops.fold import folded, sum_products
from opgrad.cpu.kernels.loops.map import write_same, write_times

COPY_BYTES: Final = 1 << 16  # bytes that are copied in one go
INFINITY: Final = float("inf")


class ByteRows(NamedTuple):
    """Rows of bytes inside an array: where the first one begins, and how far apart they are."""

    data: Pointer
    offset: int
    step: int


@kernel
def copy_rows(units: Units, blocks, size, x: ByteRows, y: ByteRows, stream):
    """Copy rows of `size` bytes; a unit is a block of one row. stream: past the cache, as words of four bytes."""
    for unit in units:
        row, begin = unit // blocks, unit % blocks * COPY_BYTES
        source, target = v.at_byte(x.data, x.offset + row * x.step), v.at_byte(y.data, y.offset + row * y.step)
        if stream:
            write_same(target, begin // 4, min(begin + COPY_BYTES, size) // 4, 1, (source,), ())
        else:
            count = min(COPY_BYTES, size - begin)
            copy_bytes(v.address_of(target) + begin, v.address_of(source) + begin, count)


@folded
def nonfinite_in_range(count: Vector, x: Vector, infinities: int, nans: int) -> Vector:
    """Add 1 in each lane that holds an infinity, if `infinities`, or a NaN, if `nans`."""
    found = v.like(x, 0.0)
    if infinities:
        found = v.select(v.absolute(x) == INFINITY, 1.0, found)
    if nans:
        found = v.select(x != x, 1.0, found)
    return count + found


@kernel
def find_nonfinite(elements: Units, part: Part, x: Pointer, infinities, nans, partial, first):
    """partial[first + part] = whether one of these elements is what is looked for."""
    found = nonfinite_in_range(elements.start, elements.stop, (x,), (infinities, nans))
    store_word(partial, first + part, 1 if v.reduce_add(found) > 0.0 else 0)


@kernel
def none_found(count, partial, y: Pointer):
    finite = 1
    for i in range(count):
        if load_word(partial, i):
            finite = 0
    store_u8(v.address_of(y), 0, finite)


@kernel
def sum_squares(elements: Units, part: Part, x: Pointer, partial: Pointer, first):
    """partial[first + part] = the sum of the squares of these elements, in float64 as `partial` is."""
    total = sum_products(elements.start, elements.stop, (x, x), ())
    v.store_one(partial, first + part, v.reduce_add(total))


@kernel
def root_of_sum(count, partial: Pointer, y: Pointer):
    total = v.number(partial, 0.0)
    for i in range(count):
        total += v.load_one(partial, i)
    v.store_one(y, 0, v.first_lane(v.sqrt(v.full(partial, total))))


@kernel
def scale_elements(elements: Units, x: Pointer, y: Pointer, offset, factor: Pointer, stream):
    write_times(y + offset, elements.start, elements.stop, stream, (x,), (v.load_one(factor, 0),))
