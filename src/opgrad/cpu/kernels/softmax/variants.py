"""The two variants of a softmax kernel: the functions in which they differ, chosen when a kernel is compiled.

Plain     works on the caller's arrays: a row is written past the cache while the next one is reduced. Sums are plain.
In place  works on a buffer that stages fill and empty (opgrad.cpu.kernels.fused). Exponentials overwrite their
          arguments, the softmax of a row of -inf may be 0, and the log-sum-exp of each row may be kept. Sums are
          plain or exact.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY
from opgrad.cpu.kernels.numerics import logsumexp as lse

NAN: Final = float("nan")


class Variant(NamedTuple):
    """The functions of a variant.

    In rows, sums and maxima are numbers; in columns, vectors with a lane for each column.
    """

    sums: lse.Adding  # how exponentials are summed
    rests: lse.AddingBelow  # how the exponentials of all but the largest elements are summed
    buffer: Callable[..., Any]  # (x, memory): the pointer at which the exponentials of x are stored
    subtracted: Callable[..., Any]  # (x, largest): what is subtracted, so that exponentials are at most 1
    divide: Callable[..., Any]  # (x, s, m, inf_as_zero): the divisor
    no_divisor: Callable[..., Any]  # (x): zeros in the form of a divisor
    quotient: Callable[..., Any]  # (e, divisor, fine): the exponential e / divisor
    count_of: Callable[..., Any]  # (largest, count): how many elements of a row are its largest


def _variant(sums: lse.Adding, rests: lse.AddingBelow, *choices: Callable[..., Any]) -> Variant:
    return Variant(sums, rests, *map(inline, choices))


@inline
def _empty(s: Vector, divisor, inf_as_zero: int):
    """Change the divisor of rows of -inf, whose sums are below 1, so that their quotients are 0 or NaN."""
    high, low, top, largest = divisor
    empty = s < 1.0
    value = 0.0 if inf_as_zero else NAN
    return v.select(empty, value, high), v.select(empty, value, low), v.select(empty, NAN, top), largest


@inline
def _divisor_of_row(x, s: float, m, inf_as_zero: int):
    divisor = lse.row_divisor(x, s, m)
    if s < 1.0:
        divisor = _empty(v.full(x, s), divisor, inf_as_zero)
    return divisor


@inline
def _no_reciprocal(s: Vector, reciprocal, inf_as_zero: int):
    """Change the reciprocals, in two parts, of rows of -inf, so that their quotients are 0 or NaN."""
    high, low = reciprocal
    empty = s < 1.0
    return v.select(empty, 0.0 if inf_as_zero else NAN, high), v.select(empty, 0.0, low)


@inline
def _reciprocal_of_row(x, s: float, m, inf_as_zero: int):
    reciprocal = lse.row_reciprocal(x, s)
    if s < 1.0:
        reciprocal = _no_reciprocal(v.full(x, s), reciprocal, inf_as_zero)
    return reciprocal


@inline
def _reciprocal_of_columns(x, s, m: Vector, inf_as_zero: int):
    return _no_reciprocal(s[0], lse.column_reciprocal(s), inf_as_zero)


PLAIN_ROWS = _variant(
    lse.PLAIN,
    lse.PLAIN_BELOW,
    lambda x, memory: memory,
    lambda x, largest: largest,
    lambda x, s, m, inf_as_zero: lse.row_reciprocal(x, s),
    lambda x: (v.full(x, 0.0), v.full(x, 0.0)),
    lse.quotient,
    lambda largest, count: count,
)
PLAIN_COLUMNS = PLAIN_ROWS._replace(divide=inline(lambda x, s, m, inf_as_zero: lse.column_reciprocal(s)))
# The variants in place, with exact sums and with plain ones. A row may be -inf everywhere. Then 0 is subtracted in
# place of the largest element, and the count of largest elements is set to 1, so that the log-sum-exp is -inf and not
# NaN.
_EXACT_ROWS = _variant(
    lse.EXACT,
    lse.EXACT_BELOW,
    lambda x, memory: x,
    lambda x, largest: largest if largest > MINUS_INFINITY else v.number(x, 0.0),
    _divisor_of_row,
    lse.no_sums,
    lse.scaled,
    lambda largest, count: count if largest > MINUS_INFINITY else 1.0,
)
_EXACT_COLUMNS = _variant(
    lse.EXACT,
    lse.EXACT_BELOW,
    lambda x, memory: x,
    lambda x, largest: v.select(largest > MINUS_INFINITY, largest, 0.0),
    lambda x, s, m, inf_as_zero: _empty(s[0], lse.column_divisor(s, m), inf_as_zero),
    lse.no_sums,
    lse.scaled,
    lambda largest, count: v.select(largest > MINUS_INFINITY, count, 1.0),
)
_PLAIN_SUMS: Final = {
    "sums": lse.PLAIN,
    "rests": lse.PLAIN_BELOW,
    "no_divisor": PLAIN_ROWS.no_divisor,
    "quotient": lse.quotient,
}
ROWS_IN_PLACE: Final[Mapping[bool, Variant]] = {
    True: _EXACT_ROWS,
    False: _EXACT_ROWS._replace(**_PLAIN_SUMS, divide=_reciprocal_of_row),
}
COLUMNS_IN_PLACE: Final[Mapping[bool, Variant]] = {
    True: _EXACT_COLUMNS,
    False: _EXACT_COLUMNS._replace(**_PLAIN_SUMS, divide=_reciprocal_of_columns),
}
