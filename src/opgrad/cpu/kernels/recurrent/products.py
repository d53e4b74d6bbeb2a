"""Products of a layer's matrices over all steps, and their packing for `opgrad.cpu.kernels.gemm`.

The matrix on the right is packed. The one on the left is read where it lies, or is packed, too, where its columns are
its rows in memory.
"""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.gemm import VECTORS, multiply, pack_panel, pack_panel_transposed
from opgrad.cpu.kernels.recurrent.layer import States


class BlockUnits(NamedTuple):
    """How a direction's rows are cut: the number of blocks, the rows of a block and of a unit, a block's units."""

    count: int
    rows: int
    per_unit: int
    units: int


class LayerMatrix(NamedTuple):
    """A matrix for each direction, with a block of rows for each step.

    first: the elements before the first row. direction, block, row: the distances between them.
    """

    data: Pointer
    first: int
    direction: int
    block: int
    row: int


class Panels(NamedTuple):
    """A packed matrix for each direction, and the distances between directions and between panels."""

    data: Pointer
    direction: int
    panel: int


# --- kernels --------------------------------------------------------------------------------------------------------


@kernel
def multiply_rows(
    units: Units, blocks: BlockUnits, first, depth, columns, add, a: LayerMatrix, b: Panels, c: LayerMatrix
):
    """c (+)= a @ b for the directions from `first` on; a unit is some rows of a block."""
    for unit in units:
        block, begin = unit // blocks.units, unit % blocks.units * blocks.per_unit
        direction, block = first + block // blocks.count, block % blocks.count
        source = a.data + (a.first + direction * a.direction + block * a.block)
        target = c.data + (c.first + direction * c.direction + block * c.block)
        rows, panels = range(begin, min(begin + blocks.per_unit, blocks.rows)), b.data + direction * b.direction
        multiply(target, c.row, source, a.row, 1, panels, b.panel, depth, columns, rows, add)


@kernel
def multiply_panels(units: Units, panels, depth, rows, columns, a: Panels, b: Panels, c: LayerMatrix):
    """c = the transpose of a, times b, both packed; a unit is a panel of a, whose columns are rows of c."""
    width = VECTORS * v.lanes(c.data)
    for unit in units:
        direction, begin = unit // panels, unit % panels * width
        own = a.data + (direction * a.direction + unit % panels * a.panel)
        other, target = b.data + direction * b.direction, c.data + (c.first + direction * c.direction + begin * c.row)
        multiply(target, c.row, own, 1, width, other, b.panel, depth, columns, range(min(width, rows - begin)), 0)


@kernel
def pack_transposed(units: Units, panels, rows, depth, x: LayerMatrix, packed: Panels):
    """Packs the transpose of x, whose rows are the columns of the packed matrix; a unit is a panel."""
    w = VECTORS * v.lanes(packed.data)
    for unit in units:
        direction, panel = unit // panels, unit % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel)
        source = x.data + (x.first + direction * x.direction + panel * w * x.row)
        pack_panel_transposed(target, source, x.row, depth, rows - panel * w)


@kernel
def pack_rows(units: Units, panels, blocks, rows, columns, x: LayerMatrix, packed: Panels):
    """Packs x; a unit is a block of a panel."""
    w = VECTORS * v.lanes(packed.data)
    for unit in units:
        block, panel = unit % blocks, unit // blocks
        direction, panel = panel // panels, panel % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel + block * rows * w)
        source = x.data + (x.first + direction * x.direction + block * x.block + panel * w)
        pack_panel(target, source, x.row, rows, columns - panel * w)


@kernel
def pack_before(units: Units, panels, steps, rows, columns, reverse, x: LayerMatrix, first: States, packed: Panels):
    """Pack the states before each step: those of the step before in the direction's time, or the first states."""
    w = VECTORS * v.lanes(packed.data)
    for unit in units:
        step, panel = unit % steps, unit // steps
        direction, panel = panel // panels, panel % panels
        target = packed.data + (direction * packed.direction + panel * packed.panel + step * rows * w)
        before = step + 1 if reverse or direction else step - 1
        if 0 <= before < steps:
            source = x.data + (x.first + direction * x.direction + before * x.block + panel * w)
            pack_panel(target, source, x.row, rows, columns - panel * w)
        else:
            start = first.data + (direction * first.direction + panel * w)
            pack_panel(target, start, first.row, rows, columns - panel * w)
