"""The order of a recurrent layer's steps in memory and in time, and products of its matrices over all steps.

The matrix on the right of a product is packed for `gemm`. The one on the left is read where it lies, or is packed, too,
if its columns are rows in memory.
"""

from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.kernels.gemm import VECTORS, multiply, pack_panel, pack_panel_transposed
from opgrad.cpu.kernels.loops.fold import column_sum_of
from opgrad.cpu.kernels.loops.map import write_same, write_sum


class States(NamedTuple):
    """A state for each sequence of each direction, and the distances between directions and between sequences."""

    data: Pointer
    direction: int
    row: int


class Layer(NamedTuple):
    """The number of steps, directions, sequences, and of a state's numbers; whether the first direction is reversed."""

    steps: int
    directions: int
    batch: int
    hidden: int
    reverse: int


@inline
def time_of(layer: Layer, direction: int, step: int) -> int:
    """The step of x that is a direction's step number `step`."""
    return layer.steps - 1 - step if layer.reverse or direction else step


@inline
def place_of(layer: Layer, direction: int, t: int) -> int:
    """The first of a direction's rows for a step of x, in an array [steps, directions, sequences]."""
    return (t * layer.directions + direction) * layer.batch


@inline
def sequences_of(layer: Layer, units: Any, direction: int) -> tuple[int, int]:
    """The sequences of a direction among these units. A unit is a sequence; one direction follows the other."""
    first = direction * layer.batch
    return max(units.start - first, 0), min(units.stop - first, layer.batch)


@inline
def states_before(layer: Layer, first: States, states: Any, direction: int, step: int) -> tuple[Any, int]:
    """Where the states before a direction's step begin, and the elements from one sequence's to the next."""
    if step:
        return states + place_of(layer, direction, time_of(layer, direction, step - 1)) * layer.hidden, layer.hidden
    return first.data + direction * first.direction, first.row


@inline
def copy_states(target: Any, source: Any, row_step: int, begin: int, end: int, n: int) -> None:
    """Copy the states of sequences [begin, end) into rows behind each other."""
    for row in range(begin, end):
        write_same(target + row * n, 0, n, 0, (source + row * row_step,), ())


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
    units: Units, blocks, block_rows, per_unit, per_block, first, depth, columns, add, a: LayerMatrix, b: Panels,
    c: LayerMatrix,
):  # fmt: skip
    """c (+)= a @ b for the directions from `first` on; a unit is some rows of a block, which has so many units."""
    for unit in units:
        block, begin = unit // per_block, unit % per_block * per_unit
        direction, block = first + block // blocks, block % blocks
        source = a.data + (a.first + direction * a.direction + block * a.block)
        target = c.data + (c.first + direction * c.direction + block * c.block)
        rows, panels = range(begin, min(begin + per_unit, block_rows)), b.data + direction * b.direction
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
        source, row = first.data + direction * first.direction, first.row
        if 0 <= before < steps:
            source, row = x.data + (x.first + direction * x.direction + before * x.block), x.row
        pack_panel(target, source + panel * w, row, rows, columns - panel * w)


@kernel
def add_biases(directions: Units, rows, joined, single, bias: Rows, sums: Rows):
    """The sums of the first `joined` biases of x and of h, then the next `single` of x, then those of h."""
    for direction in directions:
        b, out = bias.data + direction * bias.step, sums.data + direction * sums.step
        write_sum(out, 0, joined, 0, (b, b + rows), ())
        write_same(out + joined, 0, single, 0, (b + joined,), ())
        write_same(out + (joined + single), 0, single, 0, (b + (rows + joined),), ())


@kernel
def sum_columns(units: Units, strips, rows, columns, first, again, x: Rows, y: Rows):
    """Write the sums of a matrix's columns from y[first] on, and once more `again` elements behind, if that is not 0.

    A unit is a vector of columns. Behind the last row there is memory for a vector.
    """
    w = v.lanes(x.data)
    for unit in units:
        direction, j = unit // strips, unit % strips * w
        mask, out = v.first(y.data, columns - j), y.data + (direction * y.step + first + j)
        total = column_sum_of(x.data + (direction * x.step + j), rows, columns)
        v.store_masked(out, 0, total, mask)
        if again:
            v.store_masked(out, again, total, mask)
