"""Blocks of a row put together: sums of exponentials, each on the scale of its own largest number."""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.numerics.logsumexp import exp_wide

LOWEST: Final = -3.4e38  # in the place of -inf, where that would make NaN


@inline
def rescale(p, m: float, new_m: float) -> float:
    """What takes sums of exponentials from the scale for m to that for a larger one."""
    top = max(m, v.number(p, LOWEST))
    return exp_wide(p, m, new_m) / exp_wide(p, top, top)


@inline
def _rest_below(p, m: float, rest: float, count: float, new_m: float) -> float:
    return rest * rescale(p, m, new_m) + count * exp_wide(p, m, new_m)


@inline
def joined_rests(p, m: float, rest: float, count: float, other_m: float, other_rest: float, other_count: float):
    """The largest number of two blocks of a row, the sum of the exponentials of what is not it, and how many are it."""
    if m == other_m:
        return m, rest + other_rest, count + other_count
    if m > other_m:
        return m, rest + _rest_below(p, other_m, other_rest, other_count, m), count
    return other_m, other_rest + _rest_below(p, m, rest, count, other_m), other_count
