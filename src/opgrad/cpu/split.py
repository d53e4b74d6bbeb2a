"""Few long rows: blocks of a row are reduced apart, combined, and written apart."""

from collections.abc import Callable
from typing import Final

from opgrad.cpu.loops import BLOCK
from opgrad.cpu.math import exp_up_to_zero, log_one
from opgrad.cpu.native import Kernel, kernel
from opgrad.cpu.rows import MINUS_INFINITY, behind_two, map_two, row_max, row_sum, sum_exp_scaling
from opgrad.cpu.simd import Pointer, Vector, full, load_one, number, reduce_max, store_one

LOWEST: Final = -3.4e38


@kernel
def split_maxima(part, per_part, units, blocks, n, x: Pointer, x_row, stats: Pointer):
    """For each block its maximum, and the sum of exp(x - maximum)."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        xs, begin = x + unit // blocks * x_row, unit % blocks * BLOCK
        end = min(begin + BLOCK, n)
        m = row_max(xs, begin, end)
        # A block of -inf adds 0, not NaN: only the row as a whole decides.
        reference = max(m, number(x, LOWEST))
        s, _ = sum_exp_scaling(xs, begin, end, reference, xs, 0, xs, xs, end, end, xs, reference, 0.0)
        store_one(stats, 2 * unit, m)
        store_one(stats, 2 * unit + 1, s)


@kernel
def split_combine(part, blocks, stats: Pointer, total: Pointer, logarithm):
    """For row `part` its maximum, and 1 / sum (or log sum) of exp(x - maximum)."""
    block = stats + 2 * blocks * part
    m = number(stats, MINUS_INFINITY)
    for b in range(blocks):
        m = max(m, load_one(block, 2 * b))
    s = number(stats, 0.0)
    for b in range(blocks):
        s += load_one(block, 2 * b + 1) * reduce_max(exp_up_to_zero(full(stats, load_one(block, 2 * b) - m)))
    store_one(total, 2 * part, m)
    store_one(total, 2 * part + 1, log_one(stats, s) if logarithm else number(stats, 1.0) / s)


def split_write(write: Callable[..., None]) -> Kernel:
    """The last step: each block of y from x and the row's two numbers."""

    @kernel
    def by_blocks(part, per_part, units, blocks, n, x: Pointer, x_row, y: Pointer, y_row, total: Pointer, stream):
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            m, t = load_one(total, 2 * row), load_one(total, 2 * row + 1)
            write(y + row * y_row, begin, end, stream, x + row * x_row, m, t)

    return by_blocks


def gradient_split(term: Callable[..., Vector], formula: Callable[..., Vector]) -> tuple[Kernel, Kernel]:
    """The two steps of a split gradient: the blocks' sums, and the blocks of dx."""
    add_up, write = row_sum(term, behind_two(formula)), map_two(formula)

    @kernel
    def sums(part, per_part, units, blocks, n, dy: Pointer, dy_row, y: Pointer, y_row, stats: Pointer):
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            end = min(begin + BLOCK, n)
            dys, ys = dy + row * dy_row, y + row * y_row
            s, _ = add_up(dys, ys, begin, end, dys, end, end, dys, ys, number(dy, 0.0))
            store_one(stats, unit, s)

    @kernel
    def by_blocks(
        part, per_part, units, blocks, n,
        dy: Pointer, dy_row, y: Pointer, y_row, dx: Pointer, dx_row, stats: Pointer, stream,
    ):  # fmt: skip
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            s = number(stats, 0.0)
            for block in range(blocks):
                s += load_one(stats, row * blocks + block)
            end = min(begin + BLOCK, n)
            write(dx + row * dx_row, begin, end, stream, dy + row * dy_row, y + row * y_row, s, 0.0)

    return sums, by_blocks
