"""What the two forms of a softmax kernel differ in, chosen when it is compiled.

Plain     The caller's arrays: a row is written past the cache while the next one is reduced.
In place  A buffer that stages fill and empty (opgrad.cpu.fused): exponentials overwrite their arguments, a row of -inf
          may count as zeros, and the log-sum-exp of each row is kept.
"""

from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.rows import MINUS_INFINITY
from opgrad.cpu.numerics.logsumexp import column_divisor, row_divisor

NAN: Final = float("nan")


@inline
def beside(x: Any, buffer: Any) -> Any:
    """Where a plain kernel keeps exponentials: in its own memory."""
    return buffer


@inline
def over(x: Any, buffer: Any) -> Any:
    """Where they are in place: where x was."""
    return x


@inline
def no_step(out: Any, i: int, end: int, arrays: Any, numbers: Any) -> int:
    """In the place of `next_vector`: nothing is written meanwhile."""
    return i


# --- rows: numbers -------------------------------------------------------------------------------------------------


@inline
def largest_of_row(x: Any, largest: Any) -> Any:
    """What is subtracted from a row, so that its exponentials are at most 1."""
    return largest


@inline
def finite_of_row(x: Any, largest: Any) -> Any:
    """The same for a row that may be -inf everywhere: 0."""
    return largest if largest > MINUS_INFINITY else v.number(x, 0.0)


@inline
def divisor_of_row(x: Any, s: float, m: Any, inf_as_zero: int) -> Any:
    return row_divisor(x, s, m)


@inline
def divisor_of_row_or_zero(x: Any, s: float, m: Any, inf_as_zero: int) -> Any:
    divisor = row_divisor(x, s, m)
    if s < 1.0:
        divisor = _empty(v.full(x, s), divisor, inf_as_zero)
    return divisor


@inline
def count_of_row(largest: Any, count: float) -> float:
    """How many elements of a row are its largest."""
    return count


@inline
def count_of_row_or_one(largest: Any, count: float) -> float:
    """The same; 1 for a row of -inf, whose log-sum-exp is -inf."""
    return count if largest > MINUS_INFINITY else 1.0


# --- columns: a vector of rows -------------------------------------------------------------------------------------


@inline
def largest_of_column(largest: Vector) -> Vector:
    return largest


@inline
def finite_of_column(largest: Vector) -> Vector:
    return v.select(largest > MINUS_INFINITY, largest, 0.0)


@inline
def divisor_of_column(s: Any, m: Vector, inf_as_zero: int) -> Any:
    return column_divisor(s, m)


@inline
def divisor_of_column_or_zero(s: Any, m: Vector, inf_as_zero: int) -> Any:
    return _empty(s[0], column_divisor(s, m), inf_as_zero)


@inline
def count_of_column(largest: Vector, count: Vector) -> Vector:
    return count


@inline
def count_of_column_or_one(largest: Vector, count: Vector) -> Vector:
    return v.select(largest > MINUS_INFINITY, count, 1.0)


@inline
def _empty(s: Vector, divisor: Any, inf_as_zero: int) -> Any:
    """The divisor for rows of -inf, which are those whose sum is below 1: their quotients are 0, or NaN."""
    high, low, top, largest = divisor
    empty = s < 1.0
    value = 0.0 if inf_as_zero else NAN
    return v.select(empty, value, high), v.select(empty, value, low), v.select(empty, NAN, top), largest
