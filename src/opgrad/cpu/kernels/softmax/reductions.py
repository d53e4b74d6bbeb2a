"""What softmax and log-softmax compute for a row, between the loops that a layout makes.

In rows, largest elements and sums are numbers; in columns, they are vectors with a lane for each column. A row may be
-inf everywhere. Then 0 is subtracted in place of its largest element, so that its exponentials and their sum are 0, and
their quotients NaN. The sum, which is at least 1 otherwise, tells that the row is empty.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import columns, rows
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, minus_both
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp

INFINITY: Final = float("inf")


class SoftmaxReduction(NamedTuple):
    """The functions in which softmax and log-softmax differ.

    An exact reduction keeps what is rounded off the exponentials, and the digits of the divisor that float32 lacks.
    """

    loop: Callable[..., Any]  # (meanwhile): the loop that sums exponentials and calls `meanwhile`, which writes
    subtracted: Callable[..., Any]  # (x, largest): what is subtracted, so that exponentials are at most 1
    numbers: Callable[..., Any]  # (x, sums, largest, subtracted, inf_as_zero): a tuple of vectors for `result`
    no_numbers: Callable[..., Any]  # (x): such a tuple for no row
    result: Callable[..., Vector]  # (value, numbers, fine): an element of the result; fine: whether it shows all digits
    log_sum_exp: Callable[..., Any]  # (x, sums, largest, subtracted, numbers)


# The term of a gradient's sum over a row, from dy and y; and dx from dy, y and the sum.
GRADIENTS: Final = {
    "softmax_grad": (inline(lambda dy, y: dy * y), inline(lambda dy, y, s: y * (dy - s))),
    "log_softmax_grad": (inline(lambda dy, y: dy), inline(lambda dy, y, s: dy - exp(y) * s)),
}

# --- the functions in which rows and columns differ ------------------------------------------------------------------


@inline
def _zero_if_empty(s: Vector, reciprocal, inf_as_zero: int):
    """The reciprocals of sums, in two parts, by which all is 0 in empty columns if inf_as_zero."""
    if inf_as_zero:
        high, low = reciprocal
        reciprocal = v.select(s < 1.0, 0.0, high), v.select(s < 1.0, 0.0, low)
    return reciprocal


@inline
def _exact_divisor_of_columns(x, s, largest: Vector, m: Vector, inf_as_zero: int):
    high, low, top, quotient = lse.column_divisor(s, m)
    high, low = _zero_if_empty(s[0], (high, low), inf_as_zero)
    return high, low, top, quotient


@inline
def _sum_of_row(s: float, inf_as_zero: int) -> float:
    """The sum of a row, by which all is 0 if the row is empty and inf_as_zero; its quotients are NaN otherwise."""
    return INFINITY if inf_as_zero and s < 1.0 else s


@inline
def _log_sum_exp_of_row(x, s: float, largest, m, numbers):
    return largest + (lse.row_log_of_total(x, s, lse.exp_added(x, m, m)) if s >= 1.0 else v.number(x, s))


@inline
def _log_sum_exp_of_columns(x, s, largest: Vector, m: Vector, numbers) -> Vector:
    top, compensation = lse.exp_pair(m, lse.scale_for(m))
    return largest + v.select(s[0] < 1.0, 0.0, lse.column_log_of_total(s, m, top, compensation))


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


class _Layout(NamedTuple):
    subtracted: Callable[..., Any]
    sum_exp: Callable[..., Any]  # (meanwhile, adding): softmax's loop
    reciprocal: Callable[..., Any]  # softmax's numbers
    exact_divisor: Callable[..., Any]  # the same for exact sums
    log_sum_exp: Callable[..., Any]  # from softmax's sums
    full: Callable[..., Vector]  # (x, m): m as a vector
    rest: Callable[..., Any]  # (meanwhile, adding): log-softmax's loop
    log_numbers: Callable[..., Any]  # log-softmax's numbers
    log_sum_exp_of_numbers: Callable[..., Any]  # from log-softmax's numbers


_ROWS: Final = _Layout(
    inline(lambda x, largest: largest if largest > MINUS_INFINITY else v.number(x, 0.0)),
    rows.row_sum_exp,
    inline(lambda x, s, largest, m, inf_as_zero: lse.row_reciprocal(x, _sum_of_row(s, inf_as_zero))),
    inline(lambda x, s, largest, m, inf_as_zero: lse.row_divisor(x, _sum_of_row(s, inf_as_zero), m)),
    _log_sum_exp_of_row,
    v.full,
    rows.row_rest,
    _log_numbers_of_row,
    inline(lambda x, sums, largest, m, numbers: largest + v.first_lane(numbers[1])),
)
_COLUMNS: Final = _Layout(
    inline(lambda x, largest: v.select(largest > MINUS_INFINITY, largest, 0.0)),
    columns.column_sum_exp,
    inline(lambda x, s, largest, m, inf_as_zero: _zero_if_empty(s[0], lse.column_reciprocal(s), inf_as_zero)),
    _exact_divisor_of_columns,
    _log_sum_exp_of_columns,
    inline(lambda x, m: m),
    columns.column_rest,
    _log_numbers_of_columns,
    inline(lambda x, sums, largest, m, numbers: numbers[0] + numbers[1]),
)

# --- reductions ----------------------------------------------------------------------------------------------------

_no_reciprocal = inline(lambda x: (v.full(x, 0.0), v.full(x, 0.0)))


def of_rows(operator: str, exact: bool = False, recomputed: bool = False) -> SoftmaxReduction:
    """The reduction of rows. recomputed: whether softmax takes its exponentials twice and stores none."""
    return _reduction(_ROWS, operator, exact, recomputed)


def of_columns(operator: str, exact: bool = False, recomputed: bool = False) -> SoftmaxReduction:
    """The reduction of columns, or of rows that are transposed."""
    return _reduction(_COLUMNS, operator, exact, recomputed)


@cache
def _reduction(layout: _Layout, operator: str, exact: bool, recomputed: bool) -> SoftmaxReduction:
    if operator == "log_softmax":
        return SoftmaxReduction(
            partial(layout.rest, adding=lse.EXACT_BELOW if exact else lse.PLAIN_BELOW),
            layout.subtracted,
            layout.log_numbers,
            _no_reciprocal,
            inline(lambda x, numbers, fine: minus_both(x, numbers[0], numbers[1])),
            layout.log_sum_exp_of_numbers,
        )
    softmax = SoftmaxReduction(
        partial(layout.sum_exp, adding=lse.EXACT if exact else lse.PLAIN),
        layout.subtracted,
        layout.exact_divisor if exact else layout.reciprocal,
        lse.no_sums if exact else _no_reciprocal,
        inline(lse.scaled if exact else lse.quotient),
        layout.log_sum_exp,
    )
    return _recomputed(softmax, layout) if recomputed else softmax


def _recomputed(softmax: SoftmaxReduction, layout: _Layout) -> SoftmaxReduction:
    """Softmax from x itself: its exponentials are not kept in memory but computed a second time."""
    numbers, no_numbers, result, full = softmax.numbers, softmax.no_numbers, softmax.result, layout.full

    @inline
    def with_scale(x, s, largest, m, inf_as_zero: int):
        return lse.scale_for(full(x, m)), numbers(x, s, largest, m, inf_as_zero)

    return softmax._replace(
        numbers=with_scale,
        no_numbers=inline(lambda x: (lse.scale_for(v.full(x, 0.0)), no_numbers(x))),
        result=inline(lambda x, numbers, fine: result(lse.exp_scaled(x, numbers[0]), numbers[1], fine)),
    )
