"""What the kernels of normalization are given together, and the sums that they share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.kernels.loops.map import get_or


class Variant(NamedTuple):
    """Functions in which layer normalization differs from its simplified variant, which has no mean and no bias."""

    center: Callable[..., Any]  # (x, mean): x - mean
    mean_at: Callable[..., Any]  # (mean, row): the mean of the row, or 0
    or_zero: Callable[..., Any]  # (value, zero): the value, or 0
    store: Callable[..., None]  # (p, i, value): a number
    add: Callable[..., None]  # (sums, i, value): a vector
    store_masked: Callable[..., None]  # (p, i, value, mask)


FULL = Variant(
    inline(lambda x, mean: x - mean),
    inline(lambda mean, row: v.load_one(mean, row)),
    inline(lambda value, zero: value),
    inline(lambda p, i, value: v.store_one(p, i, value)),
    inline(lambda sums, i, value: v.store(sums, i, v.load(sums, i) + value)),
    inline(lambda p, i, value, mask: v.store_masked(p, i, value, mask)),
)
SIMPLIFIED = Variant(
    inline(lambda x, mean: x),
    inline(lambda mean, row: v.number(mean, 0.0)),
    inline(lambda value, zero: zero),
    inline(lambda p, i, value: None),
    inline(lambda sums, i, value: None),
    inline(lambda p, i, value, mask: None),
)


@inline
def add_square(total, arrays, i: int, whole: bool, mask, mean):
    """Adds (x - mean)²."""
    deviation = get_or(arrays[0], i, whole, mask, mean) - mean
    return (v.fma(deviation, deviation, total[0]),)
