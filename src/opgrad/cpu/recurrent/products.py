"""Products of matrices: tiles of sums in registers, some rows by one vector of columns.

The matrix on the right is packed into panels: for each vector of its columns, that vector of row after row, so that a
tile reads it without a gap. The one on the left is read where it lies, or is packed, too, where its columns are its
rows in memory.
"""

import platform
from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel, vector_bytes
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.loops.transpose import transpose_in
from opgrad.cpu.recurrent.layer import States

MANY_REGISTERS: Final = vector_bytes() == 64 or platform.machine().lower() in ("aarch64", "arm64")  # 32, not 16
ROWS: Final = 8 if MANY_REGISTERS else 4  # of a tile: sums of two registers each, and room for what is multiplied
CHUNK: Final = 128  # products that are added to each other before they join the total


class Blocks(NamedTuple):
    """The blocks of a direction: how many, the rows of a block, those of a unit, the units of a block."""

    count: int
    rows: int
    per_unit: int
    units: int


class Grid(NamedTuple):
    """Rows in blocks in directions: the elements before the first row, and from one of each to the next."""

    data: Pointer
    first: int
    direction: int
    block: int
    row: int


class Panels(NamedTuple):
    """A packed matrix for each direction: the elements from one direction, and from one panel, to the next."""

    data: Pointer
    direction: int
    panel: int


# --- tiles ----------------------------------------------------------------------------------------------------------


@inline
def eight(p, step: int, row: int, last: int):
    """Where eight rows begin; the last row stands for those behind it, which then give and get the same."""
    return (
        p + row * step,
        p + min(row + 1, last) * step,
        p + min(row + 2, last) * step,
        p + min(row + 3, last) * step,
        p + min(row + 4, last) * step,
        p + min(row + 5, last) * step,
        p + min(row + 6, last) * step,
        p + min(row + 7, last) * step,
    )


@inline
def four(p, step: int, row: int, last: int):
    """The same for four rows."""
    one, two, three = min(row + 1, last), min(row + 2, last), min(row + 3, last)
    return p + row * step, p + one * step, p + two * step, p + three * step


@inline
def zeros_eight(p):
    zero = v.full(p, 0.0)
    return zero, zero, zero, zero, zero, zero, zero, zero


@inline
def zeros_four(p):
    zero = v.full(p, 0.0)
    return zero, zero, zero, zero


tile_rows, tile_zeros = (eight, zeros_eight) if MANY_REGISTERS else (four, zeros_four)


@inline
def sum_products(rows, step: int, panel, begin: int, end: int):
    """The sums over k in [begin, end) of row r's element k * step times vector k of the panel, for each row."""
    sums, w = tile_zeros(panel), v.lanes(panel)
    for k in range(begin, end):
        sums = v.add_products(sums, v.load_one_each(rows, k * step), v.load(panel, k * w))
    return sums


@inline
def put_tile(rows, column: int, columns: int, sums, add: int) -> None:
    """Store a tile's sums, or add them to what stands there, in the first `columns` columns."""
    if columns >= v.lanes(rows[0]):
        if add:
            sums = v.add_each(v.load_each(rows, column), sums)
        v.store_each(rows, column, sums)
    else:
        mask = v.first(rows[0], columns)
        if add:
            sums = v.add_each(v.load_each_masked(rows, column, mask, 0.0), sums)
        v.store_each_masked(rows, column, sums, mask)


@inline
def multiply(c, c_row: int, a, a_row: int, b, b_panel: int, depth: int, columns: int, begin: int, end: int, add: int):
    """Rows [begin, end) of c (+)= a @ b, for packed b of `depth` rows; a chunk of a panel stays in the cache."""
    for first in range(0, max(depth, 1), CHUNK):
        stop = min(first + CHUNK, depth)
        for column in range(0, columns, v.lanes(b)):
            panel = b + column // v.lanes(b) * b_panel
            for row in range(begin, end, ROWS):
                sums = sum_products(tile_rows(a, a_row, row, end - 1), 1, panel, first, stop)
                put_tile(tile_rows(c, c_row, row, end - 1), column, columns - column, sums, add + first)


# --- kernels --------------------------------------------------------------------------------------------------------


@kernel
def multiply_rows(units: Units, blocks: Blocks, first, depth, columns, add, a: Grid, b: Panels, c: Grid):
    """c (+)= a @ b; a unit is some rows of a block, the directions are those from `first` on."""
    for unit in units:
        block, begin = unit // blocks.units, unit % blocks.units * blocks.per_unit
        direction, block = first + block // blocks.count, block % blocks.count
        source = a.data + (a.first + direction * a.direction + block * a.block)
        target = c.data + (c.first + direction * c.direction + block * c.block)
        end, panels = min(begin + blocks.per_unit, blocks.rows), b.data + direction * b.direction
        multiply(target, c.row, source, a.row, panels, b.panel, depth, columns, begin, end, add)


@kernel
def multiply_panels(units: Units, panels, depth, rows, columns, a: Panels, b: Panels, c: Grid):
    """c = the transpose of a, times b, both packed; a unit is a panel of a, whose columns are rows of c."""
    w = v.lanes(c.data)
    for unit in units:
        direction, begin = unit // panels, unit % panels * w
        own = a.data + (direction * a.direction + unit % panels * a.panel)
        other, target = b.data + direction * b.direction, c.data + (c.first + direction * c.direction)
        end = min(begin + w, rows)
        for first in range(0, max(depth, 1), CHUNK):
            stop = min(first + CHUNK, depth)
            for column in range(0, columns, w):
                panel = other + column // w * b.panel
                for row in range(begin, end, ROWS):
                    sums = sum_products(tile_rows(own, 1, row - begin, end - begin - 1), w, panel, first, stop)
                    put_tile(tile_rows(target, c.row, row, end - 1), column, columns - column, sums, first)


@kernel
def pack_transposed(units: Units, panels, rows, depth, x: Grid, packed: Panels):
    """Packs the transpose of x, whose rows are the columns of the packed matrix; a unit is a panel."""
    w = v.lanes(packed.data)
    for unit in units:
        direction, panel = unit // panels, unit % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel)
        source = x.data + (x.first + direction * x.direction + panel * w * x.row)
        transpose_in(target, source, x.row, depth, rows - panel * w)


@inline
def pack_block(packed, x, x_row: int, rows: int, columns: int) -> None:
    """Writes the first columns, a vector at most, of row after row."""
    w = v.lanes(packed)
    mask = v.first(packed, columns)
    for row in range(rows):
        if columns >= w:
            v.store(packed, row * w, v.load(x, row * x_row))
        else:
            v.store(packed, row * w, v.load_masked(x, row * x_row, mask, 0.0))


@kernel
def pack_rows(units: Units, panels, blocks, rows, columns, x: Grid, packed: Panels):
    """Packs x; a unit is a block of a panel."""
    w = v.lanes(packed.data)
    for unit in units:
        block, panel = unit % blocks, unit // blocks
        direction, panel = panel // panels, panel % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel + block * rows * w)
        source = x.data + (x.first + direction * x.direction + block * x.block + panel * w)
        pack_block(target, source, x.row, rows, columns - panel * w)


@kernel
def pack_before(units: Units, panels, steps, rows, columns, reverse, x: Grid, first: States, packed: Panels):
    """The same for the states before each step: those of the step before it in the direction's time, or the first."""
    w = v.lanes(packed.data)
    for unit in units:
        step, panel = unit % steps, unit // steps
        direction, panel = panel // panels, panel % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel + step * rows * w)
        before = step + 1 if reverse or direction else step - 1
        if 0 <= before < steps:
            source = x.data + (x.first + direction * x.direction + before * x.block + panel * w)
            pack_block(target, source, x.row, rows, columns - panel * w)
        else:
            start = first.data + (direction * first.direction + panel * w)
            pack_block(target, start, first.row, rows, columns - panel * w)
