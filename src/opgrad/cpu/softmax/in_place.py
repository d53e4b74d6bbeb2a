"""Softmax, log-softmax and their gradients in place, on a buffer that other kernels fill and empty.

Each core takes the same parameters: the numbers `values`, for gradients y as `other`, the place `stats` for each row's
log-sum-exp, if that is wanted, a `tile` to turn short rows in, and the sizes.

rows     `rows` rows of n neighbouring numbers, vectors along them
tiles    the same for short rows, turned into columns as many at a time as a vector has lanes
groups   the same for rows that are longer, as in opgrad.cpu.softmax.groups
columns  n lines of `width` numbers, a multiple of a vector's lanes; reduced over the lines
"""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import (
    Pointer,
    Vector,
    first,
    first_lane,
    full,
    lanes,
    load,
    number,
    select,
    store,
    store_masked,
    store_one,
)
from opgrad.cpu.loops.columns import add_rest_logging_columns, column_max, column_sum, sum_exp_scaling_columns
from opgrad.cpu.loops.map import mapped, next_vector
from opgrad.cpu.loops.rows import (
    MINUS_INFINITY,
    add_rest_logging,
    row_max,
    row_sum,
    sum_exp_scaling,
    write_log,
    write_scaled,
)
from opgrad.cpu.loops.transpose import TILES, turn_in, turn_out
from opgrad.cpu.numerics.logsumexp import (
    column_divisor,
    column_log_of_sum,
    column_log_of_total,
    exp_added,
    exp_pair,
    row_divisor,
    row_log_of_sum,
    row_log_of_total,
    scale_for,
    scaled,
)
from opgrad.cpu.numerics.math import exp
from opgrad.cpu.softmax.groups import (
    counts_across,
    divisor_of_row,
    group_maxima,
    keep_numbers,
    of_row,
    row_exponentials,
    row_rest,
    scale_of_row,
    sums_across,
)

PIECE: Final = 1 << 16  # elements of a row that are added up in vectors, before their sums are added in float64
NAN: Final = float("nan")

# --- one row; where all of it is -inf, its exponentials are taken on the scale for 0 -------------------------------


@inline
def _scale_of(m: Any, x: Any) -> Any:
    return m if m > MINUS_INFINITY else number(x, 0.0)


@inline
def _softmax_row(x: Any, n: int, inf_as_zero: int, keeps_stats: int) -> Any:
    largest, zero = row_max(x, 0, n), full(x, 0.0)
    m, s = _scale_of(largest, x), 0.0
    for begin in range(0, n, PIECE):
        end = min(begin + PIECE, n)
        added, _ = sum_exp_scaling(x, begin, end, m, x, 1, x, x, 0, 0, (x,), ((zero, zero, zero, zero), 0))
        s += added
    divisor = row_divisor(x, s, m)
    if s < 1.0:
        divisor = _empty(full(x, s), divisor, inf_as_zero)
    write_scaled(x, 0, n, 0, (x,), (divisor, True))
    if not keeps_stats:
        return largest
    return largest + (row_log_of_total(x, s, m, exp_added(x, m, m)) if s >= 1.0 else number(x, s))


@inline
def _log_softmax_row(x: Any, n: int, inf_as_zero: int, keeps_stats: int) -> Any:
    largest = row_max(x, 0, n)
    m, rest, count, zero = _scale_of(largest, x), 0.0, 0.0, full(x, 0.0)
    for begin in range(0, n, PIECE):
        end = min(begin + PIECE, n)
        added, equal, _ = add_rest_logging(x, begin, end, m, x, x, 0, 0, (x,), (zero, zero))
        rest, count = rest + added, count + equal
    log_s = first_lane(row_log_of_sum(x, rest, count if largest > MINUS_INFINITY else 1.0, m))
    write_log(x, 0, n, 0, (x,), (largest, log_s))
    return largest + log_s


# --- as many columns as a vector has lanes -------------------------------------------------------------------------


@inline
def _empty(s: Vector, divisor: Any, inf_as_zero: int) -> Any:
    """The divisor for rows of -inf, which are those whose sum is below 1: their quotients are 0, or NaN."""
    high, low, top, largest = divisor
    empty = s < 1.0
    value = 0.0 if inf_as_zero else NAN
    return select(empty, value, high), select(empty, value, low), select(empty, NAN, top), largest


@inline
def _softmax_lines(x: Any, x_n: int, n: int, inf_as_zero: int) -> Vector:
    mask, zero = first(x, lanes(x)), full(x, 0.0)
    largest = column_max(x, x_n, n, True, mask)
    m = select(largest > MINUS_INFINITY, largest, 0.0)
    s = sum_exp_scaling_columns(x, x_n, n, True, mask, m, x, x_n, x, x_n, 0, x, x_n, ((zero, zero, zero, zero), 0))
    divisor = _empty(s[0], column_divisor(s, m), inf_as_zero)
    for i in range(n):
        store(x, i * x_n, scaled(load(x, i * x_n), divisor, True))
    return largest + _log_of_total(s, m)


@inline
def _log_of_total(s: Any, m: Vector) -> Vector:
    top, lost = exp_pair(m, scale_for(m))
    return select(s[0] < 1.0, 0.0, column_log_of_total(s, m, top, lost))


@inline
def _log_softmax_lines(x: Any, x_n: int, n: int, inf_as_zero: int) -> Vector:
    mask = first(x, lanes(x))
    largest = column_max(x, x_n, n, True, mask)
    m = select(largest > MINUS_INFINITY, largest, 0.0)
    rest, count = add_rest_logging_columns(x, x_n, n, True, mask, m, x, x_n, 0, x, x_n, (m, m))
    log_s = column_log_of_sum(rest, select(largest > MINUS_INFINITY, count, 1.0), m)
    for i in range(n):
        store(x, i * x_n, (load(x, i * x_n) - largest) - log_s)
    return largest + log_s


# --- as many rows as a vector has lanes ----------------------------------------------------------------------------


@inline
def _softmax_group(x: Any, n: int, filled: int, tile: Any, inf_as_zero: int, keeps_stats: int) -> Vector:
    w = lanes(x)
    low, turned, numbers = tile + w * w, tile + 2 * w * w, tile + TILES * w * w
    largest = group_maxima(x, n, n, filled, tile, turned)
    m = select(largest > MINUS_INFINITY, largest, 0.0)
    keep_numbers(numbers, scale_for(m))
    for r in range(filled):
        row = x + r * n
        sums = row_exponentials(row, n, scale_of_row(x, numbers, r), row, row)
        store(tile, r * w, sums[0])
        store(low, r * w, sums[1])
    s = sums_across(x, tile, low, turned, filled)
    keep_numbers(numbers, _empty(s[0], column_divisor(s, m), inf_as_zero))
    for r in range(filled):
        write_scaled(x + r * n, 0, n, 0, (x + r * n,), (divisor_of_row(x, numbers, r), True))
    return largest + _log_of_total(s, m) if keeps_stats else largest


@inline
def _log_softmax_group(x: Any, n: int, filled: int, tile: Any, inf_as_zero: int, keeps_stats: int) -> Vector:
    w = lanes(x)
    low, counts, turned, numbers = tile + w * w, tile + 2 * w * w, tile + 3 * w * w, tile + TILES * w * w
    largest = group_maxima(x, n, n, filled, tile, turned)
    m = select(largest > MINUS_INFINITY, largest, 0.0)
    scale = scale_for(m)
    keep_numbers(numbers, (scale[0], scale[1], scale[2], m))
    for r in range(filled):
        row = x + r * n
        rest, lost, equal = row_rest(row, n, of_row(x, numbers, 3, r), scale_of_row(x, numbers, r), row)
        store(tile, r * w, rest)
        store(low, r * w, lost)
        store(counts, r * w, equal)
    rest, lost = sums_across(x, tile, low, turned, filled)
    count = select(largest > MINUS_INFINITY, counts_across(x, counts, turned, filled), 1.0)
    log_s = column_log_of_sum(rest + lost, count, m)
    keep_numbers(numbers, (largest, log_s))
    for r in range(filled):
        write_log(x + r * n, 0, n, 0, (x + r * n,), (of_row(x, numbers, 0, r), of_row(x, numbers, 1, r)))
    return largest + log_s


# --- the kernels ---------------------------------------------------------------------------------------------------


def forward_rows(row: Callable[..., Any]) -> Kernel:
    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        for r in range(rows):
            store_one(stats, r, row(values + r * n, n, inf_as_zero, keeps_stats))

    return core


def forward_tiles(lines: Callable[..., Vector]) -> Kernel:
    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        w = lanes(values)
        for r in range(0, rows, w):
            xs, filled = values + r * n, min(w, rows - r)
            turn_in(tile, xs, n, n, filled)
            store_masked(stats, r, lines(tile, w, n, inf_as_zero), first(stats, filled))
            turn_out(xs, n, tile, n, filled)

    return core


def forward_groups(group: Callable[..., Vector]) -> Kernel:
    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        w = lanes(values)
        for r in range(0, rows, w):
            filled = min(w, rows - r)
            sums = group(values + r * n, n, filled, tile, inf_as_zero, keeps_stats)
            store_masked(stats, r, sums, first(stats, filled))

    return core


def forward_columns(lines: Callable[..., Vector]) -> Kernel:
    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        for j in range(0, width, lanes(values)):
            store(stats, j, lines(values + j, width, n, inf_as_zero))

    return core


@inline
def softmax_term(dy: Vector, y: Vector) -> Vector:
    return dy * y


@inline
def softmax_slope(dy: Vector, y: Vector, s: Any) -> Vector:
    return y * (dy - s)


@inline
def log_softmax_term(dy: Vector, y: Vector) -> Vector:
    return dy


@inline
def log_softmax_slope(dy: Vector, y: Vector, s: Any) -> Vector:
    return dy - exp(y) * s


def gradient_lines(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Callable[..., None]:
    """dy = formula(dy, y, sum(term(dy, y))) down as many columns as a vector has lanes."""
    add_up = column_sum(term, formula)

    @inline
    def lines(dy: Any, y: Any, step: int, n: int) -> None:
        mask = first(dy, lanes(dy))
        s = add_up(dy, step, y, step, n, True, mask, dy, step, 0, dy, y, full(dy, 0.0))
        for i in range(n):
            store(dy, i * step, formula(load(dy, i * step), load(y, i * step), s))

    return lines


def gradient_rows(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    add_up, write = row_sum(term, next_vector(formula)), mapped(formula)

    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        for r in range(rows):
            dy, y = values + r * n, other + r * n
            s, _ = add_up(dy, y, 0, n, dy, 0, 0, (dy, y), (number(dy, 0.0),))
            write(dy, 0, n, 0, (dy, y), (s,))

    return core


def gradient_tiles(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    lines = gradient_lines(term, formula)

    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        w = lanes(values)
        half = w // 2
        y_tile = tile + (n + half - 1) // half * half * w
        for r in range(0, rows, w):
            dy, filled = values + r * n, min(w, rows - r)
            turn_in(tile, dy, n, n, filled)
            turn_in(y_tile, other + r * n, n, n, filled)
            lines(tile, y_tile, w, n)
            turn_out(dy, n, tile, n, filled)

    return core


def gradient_columns(term: Callable[..., Vector], formula: Callable[..., Vector]) -> Kernel:
    lines = gradient_lines(term, formula)

    @kernel
    def core(
        part, values: Pointer, other: Pointer, stats: Pointer, tile: Pointer, rows, n, width, inf_as_zero, keeps_stats
    ):
        for j in range(0, width, lanes(values)):
            lines(values + j, other + j, width, n)

    return core


def _forward(row: Callable[..., Any], lines: Callable[..., Vector], group: Callable[..., Vector]) -> dict[str, Kernel]:
    return {
        "rows": forward_rows(row),
        "tiles": forward_tiles(lines),
        "groups": forward_groups(group),
        "columns": forward_columns(lines),
    }


def _gradient(term: Callable[..., Vector], formula: Callable[..., Vector]) -> dict[str, Kernel]:
    made = {"rows": gradient_rows, "tiles": gradient_tiles, "columns": gradient_columns}
    return {layout: make(term, formula) for layout, make in made.items()}


SOFTMAX = _forward(_softmax_row, _softmax_lines, _softmax_group)
LOG_SOFTMAX = _forward(_log_softmax_row, _log_softmax_lines, _log_softmax_group)
SOFTMAX_GRAD = _gradient(softmax_term, softmax_slope)
LOG_SOFTMAX_GRAD = _gradient(log_softmax_term, log_softmax_slope)
