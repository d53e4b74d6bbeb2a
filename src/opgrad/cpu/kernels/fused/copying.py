"""Copies of operands that fused kernels cannot read, or write, where they lie."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.loops.map import both_offsets, write_same


@inline
def _size(p) -> int:
    return v.address_of(p + 1) - v.address_of(p)


@kernel
def copy_runs(runs: Units, axes, table, count, x: Pointer, x_step, y: Pointer, y_step):
    """y = x, a run of `count` elements for each index of the axes in the table; all strides are in bytes."""
    for run in runs:
        x_offset, y_offset = both_offsets(table, axes, run)
        source, target = v.at_byte(x, x_offset), v.at_byte(y, y_offset)
        if x_step == _size(x) and y_step == _size(y):
            write_same(target, 0, count, 0, (source,), ())
        else:
            for i in range(count):
                v.store_one(v.at_byte(target, i * y_step), 0, v.load_one(v.at_byte(source, i * x_step), 0))
