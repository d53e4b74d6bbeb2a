"""Rows of middling length, as many at a time as a vector has lanes.

The work that is done once for each row takes as long as some hundred elements. Here one vector does it for the whole
group: each row gives a vector of maxima or of sums, and these vectors are transposed, so that each lane is a row.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.columns import column_max
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get_or, mapped, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, number_equal, row_top
from opgrad.cpu.kernels.loops.transpose import TILES, transpose_in
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.softmax.reductions import SoftmaxReduction, of_columns
from opgrad.cpu.kernels.softmax.rows import Block

# --- one row, up to the reduction across lanes ----------------------------------------------------------------------


def row_exponentials(adding: lse.Adding) -> Callable[..., Any]:
    """The loop that sums a row's exponentials, stores them in `e`, and prefetches the row `ahead`."""
    add, _ = adding

    @inline
    def visit(sums, arrays, i: int, whole: bool, mask, scale):
        x, e, ahead = arrays
        value, sums = add(x, sums, get_or(x, i, whole, mask, MINUS_INFINITY), scale)
        v.prefetch(ahead, i)
        put(e, i, value, whole, mask, 0)
        return sums

    along = fold(visit)
    return inline(lambda x, n, scale, e, ahead: along(lse.start(x), 0, n, (x, e, ahead), scale))


def row_rest(adding: lse.AddingBelow) -> Callable[..., Any]:
    """The loop that sums the exponentials of elements other than m, counts those equal to m, and prefetches `ahead`."""
    _, add, _ = adding

    @inline
    def visit(total, arrays, i: int, whole: bool, mask, numbers):
        (sums, count), (x, ahead), (m, scale) = total, arrays, numbers
        value = get_or(x, i, whole, mask, MINUS_INFINITY)
        v.prefetch(ahead, i)
        return add(x, sums, value, m, scale), number_equal(count, value, m)

    along = fold(visit)
    return inline(lambda x, n, m, scale, ahead: along((lse.no_sums(x), v.full(x, 0.0)), 0, n, (x, ahead), (m, scale)))


# --- a group -------------------------------------------------------------------------------------------------------


@inline
def keep_numbers(numbers, vectors) -> None:
    """Store vectors with a number for each row where `of_row` reads them."""
    w = v.lanes(numbers)
    for which, value in enumerate(vectors):
        v.store(numbers, which * w, value)


@inline
def of_row(x, numbers, which: int, row: int) -> Vector:
    return v.full(x, v.load_one(numbers, which * v.lanes(x) + row))


@inline
def three_of_row(x, numbers, row: int):
    return of_row(x, numbers, 0, row), of_row(x, numbers, 1, row), of_row(x, numbers, 2, row)


@inline
def two_of_row(x, numbers, row: int):
    return of_row(x, numbers, 0, row), of_row(x, numbers, 1, row)


@inline
def four_of_row(x, numbers, row: int):
    high, low, top = three_of_row(x, numbers, row)
    return high, low, top, of_row(x, numbers, 3, row)


@inline
def group_maxima(x, x_row: int, n: int, filled: int, tile, transposed) -> Vector:
    w = v.lanes(x)
    for r in range(filled):
        v.store(tile, r * w, row_top(x + r * x_row, 0, n))
    transpose_in(transposed, tile, w, w, filled)
    return column_max(transposed, w, w, True, v.first(x, w))


@inline
def _keep_plain(x, sums, tile, low, row: int) -> None:
    v.store(tile, row * v.lanes(x), lse.rounded(x, sums))


@inline
def _keep_plain_below(x, sums, tile, low, row: int) -> None:
    v.store(tile, row * v.lanes(x), sums[0])


@inline
def _across_plain(x, tile, low, transposed, filled: int):
    """Add the lanes of each row pairwise, and keep what these additions round off."""
    w, sums = v.lanes(x), lse.no_sums(x)
    transpose_in(transposed, tile, w, w, filled)
    for i in range(0, w, 2):
        two = v.load(transposed, i * w) + v.load(transposed, (i + 1) * w)
        sums = lse.join_plain(x, (two, sums[1], sums[2], sums[3]))
    return sums[2], sums[3]


def _keep_exact(join: Callable[..., Any]) -> Callable[..., None]:
    @inline
    def keep(x, sums, tile, low, row: int) -> None:
        _, _, high, rest = join(x, sums)
        v.store(tile, row * v.lanes(x), high)
        v.store(low, row * v.lanes(x), rest)

    return keep


@inline
def _across_exact(x, tile, low, transposed, filled: int):
    w, zero = v.lanes(x), v.full(x, 0.0)
    sums = zero, zero
    transpose_in(transposed, tile, w, w, filled)
    transpose_in(tile, low, w, w, filled)
    for i in range(w):
        sums = lse.add_pairs(sums, (v.load(transposed, i * w), v.load(tile, i * w)))
    return sums


# For plain and exact sums: the function that stores a row's sums in the tiles, and the one that adds up their lanes.
ACROSS: Final[Mapping[Any, tuple[Callable[..., None], Callable[..., Any]]]] = {
    lse.PLAIN: (_keep_plain, _across_plain),
    lse.EXACT: (_keep_exact(lse.join), _across_exact),
    lse.PLAIN_BELOW: (_keep_plain_below, _across_plain),
    lse.EXACT_BELOW: (_keep_exact(lse.join_plain), _across_exact),
}


@inline
def counts_across(x, counts, transposed, filled: int) -> Vector:
    """The sum over the lanes of whole numbers, for each row."""
    w, total = v.lanes(x), v.full(x, 0.0)
    transpose_in(transposed, counts, w, w, filled)
    for i in range(w):
        total = total + v.load(transposed, i * w)
    return total


# --- the kernels ---------------------------------------------------------------------------------------------------


class Passes(NamedTuple):
    """The two passes over the rows of a group in which softmax and log-softmax differ.

    add_up: (x, x_row, n, filled, tile, e, e_row, m): the sums of exponentials, as a reduction of columns has them.
    row: (x, e): where the values lie from which a row's results are written.
    """

    add_up: Callable[..., Any]
    row: Callable[..., Any]


def _exponentials(reduction: SoftmaxReduction, in_place: bool) -> Passes:
    add_up, (keep_sums, across) = row_exponentials(reduction.adding), ACROSS[reduction.adding]
    place = inline(lambda x, e: x) if in_place else inline(lambda x, e: e)

    @inline
    def sums(x, x_row: int, n: int, filled: int, tile, e, e_row: int, m: Vector):
        w = v.lanes(x)
        low, transposed, numbers = tile + w * w, tile + 2 * w * w, tile + TILES * w * w
        keep_numbers(numbers, lse.scale_for(m))
        for r in range(filled):
            row = x + r * x_row
            found = add_up(row, n, three_of_row(x, numbers, r), place(row, e + r * e_row), row + w * x_row)
            keep_sums(x, found, tile, low, r)
        return across(x, tile, low, transposed, filled)

    return Passes(sums, place)


def _rests(reduction: SoftmaxReduction) -> Passes:
    add_rest, (keep_sums, across) = row_rest(reduction.adding), ACROSS[reduction.adding]

    @inline
    def sums(x, x_row: int, n: int, filled: int, tile, e, e_row: int, m: Vector):
        w = v.lanes(x)
        low, counts, transposed, numbers = tile + w * w, tile + 2 * w * w, tile + 3 * w * w, tile + TILES * w * w
        scale = lse.scale_for(m)
        keep_numbers(numbers, (scale[0], scale[1], scale[2], m))
        for r in range(filled):
            row = x + r * x_row
            m_of_row, ahead = of_row(x, numbers, 3, r), row + w * x_row
            found, equal = add_rest(row, n, m_of_row, three_of_row(x, numbers, r), ahead)
            keep_sums(x, found, tile, low, r)
            v.store(counts, r * w, equal)
        rests = across(x, tile, low, transposed, filled)
        return rests[0] + rests[1], counts_across(x, counts, transposed, filled)

    return Passes(sums, inline(lambda x, e: x))


def forward_group(operator: str, exact: bool = False, in_place: bool = False) -> Callable[..., Vector]:
    """y = softmax(x) for as many rows as a vector has lanes, or fewer; returns their log-sum-exp if sums are exact.

    `e` has room for the exponentials, `e_row` from one row to the next.
    """
    reduction = of_columns(operator, exact)
    is_softmax = operator == "softmax"
    add_up, place = _exponentials(reduction, in_place) if is_softmax else _rests(reduction)
    subtracted, numbers_of = reduction.subtracted, reduction.numbers
    log_sum_exp = reduction.log_sum_exp if exact else inline(lambda x, sums, largest, m, numbers: largest)
    write, numbers_of_row = mapped(reduction.result), four_of_row if is_softmax and exact else two_of_row

    @inline
    def group(x, x_row: int, y, y_row: int, n: int, filled: int, tile, e, e_row: int, fine, inf_as_zero: int) -> Vector:
        w = v.lanes(x)
        transposed, kept = tile + 2 * w * w, tile + TILES * w * w
        largest = group_maxima(x, x_row, n, filled, tile, transposed)
        m = subtracted(x, largest)
        sums = add_up(x, x_row, n, filled, tile, e, e_row, m)
        numbers = numbers_of(x, sums, largest, m, inf_as_zero)
        keep_numbers(kept, numbers)
        for r in range(filled):
            values = place(x + r * x_row, e + r * e_row)
            write(y + r * y_row, 0, n, 0, (values,), (numbers_of_row(x, kept, r), fine))
        return log_sum_exp(x, sums, largest, m, numbers)

    return group


def forward_in_place(operator: str, exact: bool) -> Kernel:
    group = forward_group(operator, exact, in_place=True)

    @kernel
    def forward_groups_in_place(block: Block):
        w, n = v.lanes(block.values), block.n
        for row in range(0, block.rows, w):
            xs, filled = block.values + row * n, min(w, block.rows - row)
            found = group(xs, n, xs, n, n, filled, block.tile, xs, n, True, block.inf_as_zero)
            v.store_masked(block.stats, row, found, v.first(block.stats, filled))

    return forward_groups_in_place


def _by_groups(group: Callable[..., Vector]) -> Callable[..., None]:
    """The writer of softmax, or log-softmax, of groups of rows; `e` is where their exponentials go.

    Results are written through the cache: the rows are too short for non-temporal stores, and writing a whole group at
    once would leave the core idle.
    """

    @inline
    def write(units, count, n: int, x, y, tile, e, e_row: int) -> None:
        w = v.lanes(tile)
        for row in range(units.start * w, min(units.stop * w, count), w):
            xs, ys = x.data + row * x.step, y.data + row * y.step
            group(xs, x.step, ys, y.step, n, min(w, count - row), tile, e, e_row, v.is_fine(xs), 0)

    return write


_write_softmax, _write_log_softmax = _by_groups(forward_group("softmax")), _by_groups(forward_group("log_softmax"))


@kernel
def softmax_groups(units: Units, count, n, x: Rows, y: Rows, tile: Private, e: Private):
    w = v.lanes(tile)
    _write_softmax(units, count, n, x, y, tile, e, (n + w - 1) // w * w)


@kernel
def log_softmax_groups(units: Units, count, n, x: Rows, y: Rows, tile: Private):
    _write_log_softmax(units, count, n, x, y, tile, x.data, 0)
