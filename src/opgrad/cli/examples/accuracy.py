"""The error of a result against the float64 reference, in ulp (units in the last place), and its tolerance."""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from opgrad.contract import DTYPES, Array, Operator

finfo: Any = ml_dtypes.finfo  # knows bfloat16

COMPUTED = 16.0  # ulp of the arithmetic: two functions of 2 ulp each, and a handful of operations
ROUNDED_ONCE = 0.5  # ulp: what is computed in float32 and stored in half precision


def last_place(dtype: np.dtype[Any], magnitude: Array) -> Array:
    """The distance of neighbouring numbers of this dtype at this magnitude."""
    info = finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(magnitude), float(info.smallest_normal)))
    return np.asarray(np.ldexp(1.0, exponent - 1 - info.nmant))


def error_in_ulp(got: Array, expected: Array) -> float:
    """The largest error of `got` in ulp of its dtype; infinite if NaN or infinity stand elsewhere.

    An ulp is that of the expected value, but never less than that of the root mean square of all of them:
    where a gradient nearly cancels, no absolute accuracy is lost.
    """
    if not got.size:
        return 0.0
    got64, expected64 = got.astype(np.float64), expected.astype(got.dtype).astype(np.float64)
    finite = np.isfinite(expected64)
    same = (got64 == expected64) | (np.isnan(got64) & np.isnan(expected64))
    if not (finite | same).all() or not np.isfinite(got64[finite]).all():
        return math.inf
    exact = expected.astype(np.float64)[finite]
    if not exact.size:
        return 0.0
    typical = math.sqrt(np.mean(np.square(exact)))
    unit = last_place(got.dtype, np.maximum(np.abs(exact), typical))
    return float(np.max(np.abs(got64[finite] - exact) / unit))


def roundings(terms: int) -> float:
    """The error of arithmetic in ulp of its own precision; of a sum in many lanes, the square root of its length."""
    return COMPUTED + math.sqrt(terms) / 2


def tolerance(dtype: str, terms: int) -> float:
    """The tolerance of a result in ulp: the error of arithmetic, or one rounding to a coarser dtype and a bit."""
    arithmetic = roundings(terms)
    if DTYPES[dtype].itemsize > 2:
        return arithmetic
    coarser = finfo(DTYPES[dtype]).nmant - finfo(np.float32).nmant
    return ROUNDED_ONCE + float(arithmetic * 2.0**coarser)


def reference(op: Operator, values: Mapping[str, Any]) -> dict[str, Array]:
    """The results of an operator's reference in float64, by name."""
    exact = {name: widened(value) for name, value in values.items()}
    with np.errstate(all="ignore"):
        results = op.reference(**exact)
    several = results if isinstance(results, tuple) else (results,)
    return {name: np.asarray(value) for name, value in zip(op.results, several, strict=True)}


def widened(value: Any) -> Any:
    """A floating-point array in float64, also each in a list; anything else as it is."""
    if isinstance(value, list):
        return [widened(each) for each in value]
    whole = not isinstance(value, np.ndarray) or value.dtype.kind in "iub"
    return value if whole else value.astype(np.float64)
