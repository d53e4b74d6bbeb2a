"""Few long rows: threads reduce the blocks of a row, the results are combined, and threads write the blocks."""

from collections.abc import Callable
from typing import Any, Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, store_f64
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics import row_blocks
from opgrad.cpu.kernels.softmax import variants

STATS: Final = 3  # float64 numbers for each block: its maximum, and two from which the sum is computed
TOTAL: Final = 2  # for each row: its maximum, and the sum or its logarithm


_add_up = loops.row_sum_exp(variants.no_step, lse.PLAIN)


@inline
def _sum_exp(x, begin: int, end: int, m: float):
    # so that a block of -inf adds 0 and not NaN: other blocks may be finite
    top = max(m, v.number(x, row_blocks.LOWEST))
    s, _ = _add_up(x, begin, end, top, x, 0, x, x, end, end, (x,), (m,))
    return s, 0.0


@inline
def _rest(x, begin: int, end: int, m: float):
    return loops.rest_of_block(x, begin, end, m, x)


def split_sums(add_up: Callable[..., Any]) -> Kernel:
    """The first step: for each block its maximum, and the two numbers that `add_up` computes."""

    @kernel
    def sums(units: Units, blocks, n, x: Rows, stats):
        for unit in units:
            xs, begin = x.data + unit // blocks * x.step, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            m = loops.row_max(xs, begin, end)
            first, second = add_up(xs, begin, end, m)
            store_f64(stats, STATS * unit, m)
            store_f64(stats, STATS * unit + 1, first)
            store_f64(stats, STATS * unit + 2, second)

    return sums


@kernel
def softmax_combine(rows: Units, blocks, x: Rows, stats, total):
    """For each row its maximum, and the sum of its exponentials."""
    for row in rows:
        m, s = v.number(x.data, loops.MINUS_INFINITY), 0.0
        for b in range(blocks * row, blocks * (row + 1)):
            m = max(m, v.number(x.data, load_f64(stats, STATS * b)))
        for b in range(blocks * row, blocks * (row + 1)):
            of_block = v.number(x.data, load_f64(stats, STATS * b))
            s += load_f64(stats, STATS * b + 1) * row_blocks.rescale(x.data, of_block, m)
        store_f64(total, TOTAL * row, m)
        store_f64(total, TOTAL * row + 1, s)


@kernel
def log_softmax_combine(rows: Units, blocks, x: Rows, stats, total):
    """For each row its maximum, and the logarithm of the sum of exp(x - maximum)."""
    for row in rows:
        m, rest, count = v.number(x.data, loops.MINUS_INFINITY), 0.0, 0.0
        for b in range(blocks * row, blocks * (row + 1)):
            top, added = v.number(x.data, load_f64(stats, STATS * b)), load_f64(stats, STATS * b + 1)
            m, rest, count = row_blocks.joined_rests(x.data, m, rest, count, top, added, load_f64(stats, STATS * b + 2))
        store_f64(total, TOTAL * row, m)
        store_f64(total, TOTAL * row + 1, v.first_lane(lse.row_log_of_sum(x.data, rest, count, m)))


_write_exp_over_sum = mapped(lambda x, scale, divisor, fine: lse.quotient(lse.exp_scaled(x, scale), divisor, fine))


@inline
def _write_softmax(y, begin: int, end: int, stream: int, x, m: float, s: float) -> None:
    scale, divisor = lse.scale_for(v.full(x, m)), lse.row_reciprocal(x, s)
    _write_exp_over_sum(y, begin, end, stream, (x,), (scale, divisor, v.is_fine(x)))


@inline
def _write_log_softmax(y, begin: int, end: int, stream: int, x, m: float, log_s: float) -> None:
    loops.write_log(y, begin, end, stream, (x,), (m, v.number(x, log_s)))


def split_write(write: Callable[..., None]) -> Kernel:
    """The last step, which writes each block of y from x and the two numbers of its row."""

    @kernel
    def by_blocks(units: Units, blocks, n, x: Rows, y: Rows, total, stream):
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            m, t = v.number(x.data, load_f64(total, TOTAL * row)), load_f64(total, TOTAL * row + 1)
            write(y.data + row * y.step, begin, end, stream, x.data + row * x.step, m, t)

    return by_blocks


SOFTMAX = split_sums(_sum_exp), softmax_combine, split_write(_write_softmax)
LOG_SOFTMAX = split_sums(_rest), log_softmax_combine, split_write(_write_log_softmax)


def gradient(term: Callable[..., Vector], formula: Callable[..., Vector]) -> tuple[Kernel, Kernel]:
    """The two steps of a split gradient: the blocks' sums, and the blocks of dx."""
    add_up, write = loops.row_sum(term, variants.no_step), mapped(formula)

    @kernel
    def sums(units: Units, blocks, n, dy: Rows, y: Rows, stats: Pointer):
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            dys, ys = dy.data + row * dy.step, y.data + row * y.step
            s, _ = add_up(dys, ys, begin, end, dys, end, end, (dys, ys), (v.number(stats, 0.0),))
            v.store_one(stats, unit, s)

    @kernel
    def by_blocks(units: Units, blocks, n, dy: Rows, y: Rows, dx: Rows, stats: Pointer, stream):
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            s = v.number(stats, 0.0)
            for block in range(blocks):
                s += v.load_one(stats, row * blocks + block)
            arrays = (dy.data + row * dy.step, y.data + row * y.step)
            write(dx.data + row * dx.step, begin, min(begin + BLOCK, n), stream, arrays, (s,))

    return sums, by_blocks
