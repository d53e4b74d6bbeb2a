"""Kernels of layer normalization, with a mean and without.

Arrays are rows x n, contiguous. The mean is subtracted before squares are summed, so that no digits cancel.
"""

from collections.abc import Callable

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import fold_in_chunks, sum_range
from opgrad.cpu.kernels.loops.map import get_or, mapped


def _with_bias(x: Vector, scale: Vector, bias: Vector, mean, inv_std) -> Vector:
    return v.fma((x - mean) * inv_std, scale, bias)


def _without_bias(x: Vector, scale: Vector, bias: Vector, mean, inv_std) -> Vector:
    return (x - mean) * inv_std * scale


@inline
def add_square(total, arrays, i: int, whole: bool, mask, mean):
    """Adds (x - mean)²."""
    deviation = get_or(arrays[0], i, whole, mask, mean) - mean
    return (v.fma(deviation, deviation, total[0]),)


_squares = fold_in_chunks(add_square)


def forward_kernel(formula: Callable[..., Vector], centered: bool) -> Kernel:
    """y and the statistics of rows; centered: whether they have a mean."""
    write = mapped(formula)

    @kernel
    def normalize_rows(
        rows: Units, n, epsilon: Float, x: Pointer, scale: Pointer, bias: Pointer, y: Pointer, means: Pointer,
        inv_stds: Pointer, stream,
    ):  # fmt: skip
        inverse, zeros = v.number(x, 1.0 / max(n, 1)), (v.full(x, 0.0),)
        for row in rows:
            source = x + row * n
            mean = v.reduce_add(sum_range(0, n, (source,), ())) * inverse if centered else v.number(x, 0.0)
            squares = v.reduce_add(_squares(zeros, 0, n, (source,), mean)[0])
            inv_std = v.first_lane(1.0 / v.sqrt(v.full(x, squares * inverse + v.number(x, epsilon))))
            if centered:
                v.store_one(means, row, mean)
            v.store_one(inv_stds, row, inv_std)
            write(y + row * n, 0, n, stream, (source, scale, bias), (mean, inv_std))

    return normalize_rows


LAYER = forward_kernel(_with_bias, centered=True)
LAYER_NO_BIAS = forward_kernel(_without_bias, centered=True)
SIMPLIFIED = forward_kernel(_without_bias, centered=False)
