"""Dropout and its gradient."""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import elementwise, mapped, write_same
from opgrad.cpu.kernels.numerics.philox import keep_run

BLOCK: Final = 1 << 12  # elements whose mask is still in the first-level cache when it is read again


@inline
def _kept(x: Vector, mask: Vector, scale: float) -> Vector:
    return v.select(mask != 0.0, x * scale, 0.0)


write_kept, write_true = mapped(_kept), mapped(lambda x: v.like(x, 1.0))
GRADIENT, WHOLE_GRADIENT = elementwise(_kept), elementwise(lambda dy, unused: dy)


@kernel
def drop(units: Units, n, x: Pointer, seed: Pointer, y: Pointer, mask: Pointer, threshold, scale: Float, stream):
    """A unit is a block of elements; the mask is written first."""
    for unit in units:
        begin = unit * BLOCK
        count = min(BLOCK, n - begin)
        keep_run(mask + begin, count, begin, v.load_one(seed, 0), 0, threshold)
        write_kept(y + begin, 0, count, stream, (x + begin, mask + begin), (scale,))


@kernel
def keep_all(units: Units, n, x: Pointer, y: Pointer, mask: Pointer, stream):
    for unit in units:
        begin, end = unit * BLOCK, min((unit + 1) * BLOCK, n)
        write_same(y, begin, end, stream, (x,), ())
        write_true(mask, begin, end, stream, (x,), ())
