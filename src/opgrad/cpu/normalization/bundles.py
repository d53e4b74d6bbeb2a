"""What the kernels of normalization are given together, and the sums that they share."""

from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.loops.columns import get, get_or


class Affine(NamedTuple):
    """What is normalized is multiplied and added to: the scale, and the bias if there is one."""

    scale: Pointer
    bias: Pointer


class Statistics(NamedTuple):
    """The mean, if there is one, and 1 / standard deviation of each row."""

    mean: Pointer
    inv_std: Pointer


@inline
def add_value(total: Any, arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Any:
    return (total[0] + get(arrays[0], i, whole, mask),)


@inline
def add_square(total: Any, arrays: Any, i: int, whole: bool, mask: Any, mean: Any) -> Any:
    """Adds (x - mean)²."""
    deviation = get_or(arrays[0], i, whole, mask, mean) - mean
    return (v.fma(deviation, deviation, total[0]),)
