"""Sums of a layer's biases, and of columns."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.parameters import Rows, Units
from opgrad.cpu.kernels.loops.fold import column_sum_of
from opgrad.cpu.kernels.loops.map import mapped, write_same

write_sum = mapped(lambda a, b: a + b)


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
