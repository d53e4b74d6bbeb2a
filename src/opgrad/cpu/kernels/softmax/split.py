"""Few long rows: threads reduce the blocks of a row, the results are combined, and threads write the blocks.

The exponentials are computed a second time when the blocks are written.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Rows, Units
from opgrad.cpu.compiler.words import load_f64, store_f64
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.softmax.reductions import SoftmaxReduction, of_rows

STATS: Final = 3  # float64 numbers of each block, and of each row: the largest element, and two that make the sums


@inline
def block_of(unit: int, blocks: int, n: int):
    """A block's row, its first element there, and its length. blocks: of a row."""
    begin = unit % blocks * BLOCK
    return unit // blocks, begin, min(BLOCK, n - begin)


# --- the sums of blocks, and of rows -------------------------------------------------------------------------------


@inline
def _store(stats: int, index: int, largest, two) -> None:
    store_f64(stats, STATS * index, largest)
    store_f64(stats, STATS * index + 1, two[0])
    store_f64(stats, STATS * index + 2, two[1])


@inline
def _exponentials_of_blocks(x, m, stats: int, begin: int, end: int):
    s = 0.0
    for block in range(begin, end):
        of_block = v.number(x, load_f64(stats, STATS * block))
        s += load_f64(stats, STATS * block + 1) * loops.rescale(x, of_block, m)
    return s


@inline
def _rests_of_blocks(x, m, stats: int, begin: int, end: int):
    largest, rest, count = v.number(x, loops.MINUS_INFINITY), 0.0, 0.0
    for block in range(begin, end):
        top, added = v.number(x, load_f64(stats, STATS * block)), load_f64(stats, STATS * block + 1)
        equal = load_f64(stats, STATS * block + 2)
        largest, rest, count = loops.joined_rests(x, largest, rest, count, top, added, equal)
    return rest, count


class BlockReduction(NamedTuple):
    """How the sums of a row are made of those of its blocks, which are stored as numbers."""

    reduction: SoftmaxReduction
    reduce: Callable[..., None]  # (x, n, largest, stats, block): store what is found in a block of n elements
    join: Callable[..., Any]  # (x, stats, total, row, blocks): store a row's sums; its largest element, m and sums
    numbers: Callable[..., Any]  # (x, total, row, inf_as_zero): the row's numbers for `result`


def block_reduction(operator: str, exact: bool = False) -> BlockReduction:
    reduction, is_softmax = of_rows(operator, exact, recomputed=True), operator == "softmax"
    add_up, subtracted, numbers_of = reduction.loop(loops.no_step), reduction.subtracted, reduction.numbers
    two_of = inline((lambda sums: (sums, 0.0)) if is_softmax else (lambda sums: sums))
    sums_of = inline((lambda first, second: first) if is_softmax else (lambda first, second: (first, second)))
    sums_of_blocks = _exponentials_of_blocks if is_softmax else _rests_of_blocks

    @inline
    def reduce(x, n: int, largest, stats: int, block: int) -> None:
        # so that the sum of a block of -inf is 0 and not NaN: other blocks may be finite
        top = max(largest, v.number(x, loops.LOWEST))
        sums, _ = add_up(x, n, top, x, 0, x, loops.no_row(x, n, (), ()))
        _store(stats, block, largest, two_of(sums))

    @inline
    def join(x, stats: int, total: int, row: int, blocks: int):
        begin, end, largest = blocks * row, blocks * (row + 1), v.number(x, loops.MINUS_INFINITY)
        for block in range(begin, end):
            largest = max(largest, v.number(x, load_f64(stats, STATS * block)))
        m = subtracted(x, largest)
        sums = sums_of_blocks(x, m, stats, begin, end)
        _store(total, row, largest, two_of(sums))
        return largest, m, sums

    @inline
    def numbers(x, total: int, row: int, inf_as_zero: int):
        largest = v.number(x, load_f64(total, STATS * row))
        sums = sums_of(load_f64(total, STATS * row + 1), load_f64(total, STATS * row + 2))
        return numbers_of(x, sums, largest, subtracted(x, largest), inf_as_zero)

    return BlockReduction(reduction, reduce, join, numbers)


@inline
def sum_of_blocks(like, partial: int, row: int, blocks: int):
    """The sum over a row of a gradient, from those over its blocks."""
    s = 0.0
    for block in range(blocks * row, blocks * (row + 1)):
        s += load_f64(partial, block)
    return v.number(like, s)


# --- the kernels ---------------------------------------------------------------------------------------------------


def forward(operator: str) -> tuple[Kernel, Kernel, Kernel]:
    """The three steps: the sums of blocks, those of rows, and the results."""
    reduction, reduce, join, numbers_of = block_reduction(operator)
    write = mapped(reduction.result)

    @kernel
    def split_sums(units: Units, blocks, n, x: Rows, stats):
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            xs = x.data + (row * x.step + begin)
            reduce(xs, size, loops.row_max(xs, 0, size), stats, unit)

    @kernel
    def split_rows(rows: Units, blocks, x: Rows, stats, total):
        for row in rows:
            join(x.data, stats, total, row, blocks)

    @kernel
    def split_results(units: Units, blocks, n, x: Rows, y: Rows, stream, total):
        for unit in units:
            row, begin, size = block_of(unit, blocks, n)
            xs, ys = x.data + (row * x.step + begin), y.data + (row * y.step + begin)
            write(ys, 0, size, stream, (xs,), (numbers_of(xs, total, row, 0), v.is_fine(xs)))

    return split_sums, split_rows, split_results
