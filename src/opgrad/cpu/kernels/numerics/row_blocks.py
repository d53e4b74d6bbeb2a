"""Joins the sums of exponentials of two blocks of a row, each of which is scaled by its block's largest number."""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.kernels.numerics.logsumexp import exp_wide

LOWEST: Final = -3.4e38  # used in place of -inf where -inf would give NaN


@inline
def rescale(p, m: float, new_m: float) -> float:
    """The factor that takes a sum of exponentials from the scale for m to the scale for new_m, which is larger."""
    top = max(m, v.number(p, LOWEST))
    return exp_wide(p, m, new_m) / exp_wide(p, top, top)


@inline
def _rest_below(p, m: float, rest: float, count: float, new_m: float) -> float:
    return rest * rescale(p, m, new_m) + count * exp_wide(p, m, new_m)


@inline
def joined_rests(p, m: float, rest: float, count: float, other_m: float, other_rest: float, other_count: float):
    """For two blocks together: the largest number, the sum of the other exponentials, the count of the largest."""
    if m == other_m:
        return m, rest + other_rest, count + other_count
    if m > other_m:
        return m, rest + _rest_below(p, other_m, other_rest, other_count, m), count
    return other_m, other_rest + _rest_below(p, m, rest, count, other_m), other_count
