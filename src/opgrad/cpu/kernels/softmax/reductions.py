"""What softmax and log-softmax compute for a row, between the loops that a layout makes.

In rows, largest elements and sums are numbers; in columns, they are vectors with a lane for each column. A row may be
-inf everywhere. Then 0 is subtracted in place of its largest element, so that its exponentials and their sum are 0, and
their quotients NaN. The sum, which is at least 1 otherwise, tells that the row is empty.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import columns, rows
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, minus_both
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp

INFINITY: Final = float("inf")


class Reduction(NamedTuple):
    """The functions in which softmax and log-softmax differ.

    An exact reduction keeps what is rounded off the exponentials, and the digits of the divisor that float32 lacks.
    """

    adding: lse.Adding | lse.AddingBelow  # how exponentials are added up
    loop: Callable[..., Any]  # (meanwhile): the loop that sums exponentials and calls `meanwhile`, which writes
    subtracted: Callable[..., Any]  # (x, largest): what is subtracted, so that exponentials are at most 1
    numbers: Callable[..., Any]  # (x, sums, largest, subtracted, inf_as_zero): a tuple of vectors for `result`
    no_numbers: Callable[..., Any]  # (x): such a tuple for no row
    result: Callable[..., Vector]  # (value, numbers, fine): an element of the result; fine: whether it shows all digits
    log_sum_exp: Callable[..., Any]  # (x, sums, largest, subtracted, numbers)


# Values of a row or strip wait in a buffer until they are written, while the next row goes to another buffer; or they
# are read again where they lie, and no buffer is used.
swapped: Final = {True: inline(lambda e, done: (done, e)), False: inline(lambda e, done: (e, done))}

# The term of a gradient's sum over a row, from dy and y; and dx from dy, y and the sum.
GRADIENTS: Final = {
    "softmax_grad": (inline(lambda dy, y: dy * y), inline(lambda dy, y, s: y * (dy - s))),
    "log_softmax_grad": (inline(lambda dy, y: dy), inline(lambda dy, y, s: dy - exp(y) * s)),
}

# --- rows of -inf --------------------------------------------------------------------------------------------------


@inline
def _subtracted_from_row(x, largest):
    return largest if largest > MINUS_INFINITY else v.number(x, 0.0)


@inline
def _subtracted_from_columns(x, largest: Vector) -> Vector:
    return v.select(largest > MINUS_INFINITY, largest, 0.0)


@inline
def _sum_of_row(s: float, inf_as_zero: int) -> float:
    """The sum of a row, by which all is 0 if the row is empty and inf_as_zero; its quotients are NaN otherwise."""
    return INFINITY if inf_as_zero and s < 1.0 else s


@inline
def _zero_if_empty(s: Vector, reciprocal, inf_as_zero: int):
    """The reciprocals of sums, in two parts, by which all is 0 in empty columns if inf_as_zero."""
    if inf_as_zero:
        high, low = reciprocal
        reciprocal = v.select(s < 1.0, 0.0, high), v.select(s < 1.0, 0.0, low)
    return reciprocal


@inline
def _exact_zero_if_empty(s: Vector, divisor, inf_as_zero: int):
    if inf_as_zero:
        high, low, top, largest = divisor
        divisor = v.select(s < 1.0, 0.0, high), v.select(s < 1.0, 0.0, low), top, largest
    return divisor


# --- softmax -------------------------------------------------------------------------------------------------------


@inline
def _reciprocal_of_row(x, s: float, largest, m, inf_as_zero: int):
    return lse.row_reciprocal(x, _sum_of_row(s, inf_as_zero))


@inline
def _exact_divisor_of_row(x, s: float, largest, m, inf_as_zero: int):
    return lse.row_divisor(x, _sum_of_row(s, inf_as_zero), m)


@inline
def _reciprocal_of_columns(x, s, largest: Vector, m: Vector, inf_as_zero: int):
    return _zero_if_empty(s[0], lse.column_reciprocal(s), inf_as_zero)


@inline
def _exact_divisor_of_columns(x, s, largest: Vector, m: Vector, inf_as_zero: int):
    return _exact_zero_if_empty(s[0], lse.column_divisor(s, m), inf_as_zero)


@inline
def _log_sum_exp_of_row(x, s: float, largest, m, numbers):
    return largest + (lse.row_log_of_total(x, s, m, lse.exp_added(x, m, m)) if s >= 1.0 else v.number(x, s))


@inline
def _log_sum_exp_of_columns(x, s, largest: Vector, m: Vector, numbers) -> Vector:
    top, compensation = lse.exp_pair(m, lse.scale_for(m))
    return largest + v.select(s[0] < 1.0, 0.0, lse.column_log_of_total(s, m, top, compensation))


_no_reciprocal = inline(lambda x: (v.full(x, 0.0), v.full(x, 0.0)))


def _recomputed(softmax: Reduction, kept: Callable[..., Any], full: Callable[..., Vector]) -> Reduction:
    """Softmax from x itself: its exponentials are not kept in memory but computed a second time."""
    numbers, no_numbers, result = softmax.numbers, softmax.no_numbers, softmax.result

    @inline
    def with_scale(x, s, largest, m, inf_as_zero: int):
        return lse.scale_for(full(x, m)), numbers(x, s, largest, m, inf_as_zero)

    return softmax._replace(
        loop=partial(kept, adding=softmax.adding, keep=0),
        numbers=with_scale,
        no_numbers=inline(lambda x: (lse.scale_for(v.full(x, 0.0)), no_numbers(x))),
        result=inline(lambda x, numbers, fine: result(lse.exp_scaled(x, numbers[0]), numbers[1], fine)),
    )


# --- log-softmax ---------------------------------------------------------------------------------------------------


@inline
def _log_numbers_of_row(x, sums, largest, m, inf_as_zero: int):
    rest, count = sums
    return v.full(x, largest), lse.row_log_of_sum(x, rest, count if largest > MINUS_INFINITY else 1.0, m)


@inline
def _log_numbers_of_columns(x, sums, largest: Vector, m: Vector, inf_as_zero: int):
    """An empty column is one in which no element equals m; so the largest need not stay in registers during the sum."""
    (rest, count), minus_infinity = sums, v.full(x, MINUS_INFINITY)
    log_s = lse.column_log_of_sum(rest, v.select(count > 0.0, count, 1.0), m)
    return v.select(count > 0.0, m, minus_infinity), log_s


_log_result = inline(lambda x, numbers, fine: minus_both(x, numbers[0], numbers[1]))

# --- the loops of a row, and of a strip of columns -----------------------------------------------------------------


def _row_exponentials(step: Callable[..., int], adding: lse.Adding, keep: int = 1) -> Callable[..., Any]:
    sum_exp = rows.row_sum_exp(step, adding)
    return inline(
        lambda x, begin, end, m, e, ahead, out, j, stop, arrays, numbers: sum_exp(
            x, begin, end, m, e, keep, ahead, out, j, stop, arrays, numbers
        )
    )


def _row_rests(step: Callable[..., int], adding: lse.AddingBelow) -> Callable[..., Any]:
    add_rest = rows.row_rest(step, adding)

    @inline
    def loop(x, begin: int, end: int, m, e, ahead, out, j: int, stop: int, arrays, numbers):
        rest, count, j = add_rest(x, begin, end, m, ahead, out, j, stop, arrays, numbers)
        return (rest, count), j

    return loop


def _column_exponentials(meanwhile: Callable[..., None], adding: lse.Adding, keep: int = 1) -> Callable[..., Any]:
    sum_exp = columns.column_sum_exp(meanwhile, adding)
    return inline(
        lambda x, x_n, n, whole, mask, m, e, e_n, ahead, before: sum_exp(
            x, x_n, n, whole, mask, m, e, keep * e_n, ahead, before
        )
    )


def _column_rests(meanwhile: Callable[..., None], adding: lse.AddingBelow) -> Callable[..., Any]:
    add_rest = columns.column_rest(meanwhile, adding)
    return inline(
        lambda x, x_n, n, whole, mask, m, e, e_n, ahead, before: add_rest(x, x_n, n, whole, mask, m, ahead, before)
    )


@cache
def of_rows(operator: str, exact: bool = False, recomputed: bool = False) -> Reduction:
    """The reduction of rows. recomputed: whether softmax takes its exponentials twice and stores none."""
    if operator == "log_softmax":
        adding: Any = lse.EXACT_BELOW if exact else lse.PLAIN_BELOW
        return Reduction(
            adding,
            partial(_row_rests, adding=adding),
            _subtracted_from_row,
            _log_numbers_of_row,
            _no_reciprocal,
            _log_result,
            inline(lambda x, sums, largest, m, numbers: largest + v.first_lane(numbers[1])),
        )
    adding = lse.EXACT if exact else lse.PLAIN
    softmax = Reduction(
        adding,
        partial(_row_exponentials, adding=adding),
        _subtracted_from_row,
        _exact_divisor_of_row if exact else _reciprocal_of_row,
        lse.no_sums if exact else _no_reciprocal,
        inline(lse.scaled if exact else lse.quotient),
        _log_sum_exp_of_row,
    )
    return _recomputed(softmax, _row_exponentials, v.full) if recomputed else softmax


@cache
def of_columns(operator: str, exact: bool = False, recomputed: bool = False) -> Reduction:
    """The reduction of columns, or of rows that are transposed."""
    if operator == "log_softmax":
        adding: Any = lse.EXACT_BELOW if exact else lse.PLAIN_BELOW
        return Reduction(
            adding,
            partial(_column_rests, adding=adding),
            _subtracted_from_columns,
            _log_numbers_of_columns,
            _no_reciprocal,
            _log_result,
            inline(lambda x, sums, largest, m, numbers: numbers[0] + numbers[1]),
        )
    adding = lse.EXACT if exact else lse.PLAIN
    softmax = Reduction(
        adding,
        partial(_column_exponentials, adding=adding),
        _subtracted_from_columns,
        _exact_divisor_of_columns if exact else _reciprocal_of_columns,
        lse.no_sums if exact else _no_reciprocal,
        inline(lse.scaled if exact else lse.quotient),
        _log_sum_exp_of_columns,
    )
    return _recomputed(softmax, _column_exponentials, inline(lambda x, m: m)) if recomputed else softmax
