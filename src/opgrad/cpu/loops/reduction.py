"""Sums over any axes: a step for each group of adjacent axes, the last group first.

A step sums an array of shape before x n x after over n. The result of a step is kept in the precision of the
computation until the next step. Long sums are formed in blocks of a fixed size, so that the order of additions depends
on the shape alone and not on the number of threads.
"""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

from opgrad.contract.problem import Operand
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import inline, kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Pointer, Strips, Units
from opgrad.cpu.loops.fold import add_value, fold_down, fold_in_chunks
from opgrad.cpu.loops.layout import BLOCK
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.program import Step, shared_out
from opgrad.cpu.runtime.workspace import Workspace

DEEP: Final = 1 << 10  # terms of a column that one part sums
WIDE: Final = 4  # vectors of columns that are summed at once
AHEAD: Final = 8  # rows between a prefetch and its use


class Blocks(NamedTuple):
    """The blocks in which n terms are summed: their number, and the terms of each; the last block may have fewer."""

    count: int
    size: int


_sum_row = fold_in_chunks(add_value)


@kernel
def sum_rows(units: Units, n, blocks: Blocks, x: Pointer, y: Pointer):
    """y[row, block] = the sum of that block of x[row]."""
    for unit in units:
        row, begin = unit // blocks.count, unit % blocks.count * blocks.size
        end = min(begin + blocks.size, n)
        total = _sum_row((v.full(x, 0.0),), begin, end, (x + row * n,), ())
        v.store_one(y, unit, v.reduce_add(total[0]))


@inline
def _add_wide(total, arrays, k: int, step: int):
    source = arrays[0] + k * step
    w = v.lanes(source)
    for i in range(0, WIDE * w, w):
        v.prefetch(source, AHEAD * step + i)
    a, b, c, d = total
    return a + v.load(source, 0), b + v.load(source, w), c + v.load(source, 2 * w), d + v.load(source, 3 * w)


@inline
def _add_narrow(total, arrays, k: int, numbers):
    step, mask = numbers
    return (total[0] + v.load_masked(arrays[0], k * step, mask, 0.0),)


_sum_wide, _sum_narrow = fold_down(_add_wide), fold_down(_add_narrow)


@inline
def sum_strip(x, step: int, begin: int, end: int, width: int, y) -> None:
    """y[0:width] = the sums of x[begin:end, 0:width]."""
    w, zero = v.lanes(x), v.full(x, 0.0)
    if width == WIDE * w:
        every = v.first(x, w)
        a, b, c, d = _sum_wide((zero, zero, zero, zero), begin, end, (x,), step)
        v.store_masked(y, 0, a, every)
        v.store_masked(y, w, b, every)
        v.store_masked(y, 2 * w, c, every)
        v.store_masked(y, 3 * w, d, every)
    else:
        for i in range(0, width, w):
            mask = v.first(x, width - i)
            total = _sum_narrow((zero,), begin, end, (x + i,), (step, mask))
            v.store_masked(y, i, total[0], mask)


@kernel
def sum_columns(units: Units, n, blocks: Blocks, strips: Strips, x: Pointer, y: Pointer):
    """y[before, block, column] = the sum of that block of x[before, :, column]; a unit is a strip of columns."""
    after, widest = strips.inner, WIDE * v.lanes(x)
    for unit in units:
        outer, column = unit // strips.count, unit % strips.count * widest
        before, begin = outer // blocks.count, outer % blocks.count * blocks.size
        source, result = x + (before * n * after + column), y + (outer * after + column)
        sum_strip(source, after, begin, min(begin + blocks.size, n), min(widest, after - column), result)


@kernel
def sum_integers(units: Units, n, after, x: Pointer, y: Pointer):
    for unit in units:
        source = x + (unit // after * n * after + unit % after)
        total = 0
        for k in range(n):
            total += v.load_one(source, k * after)
        v.store_one(y, unit, total)


def grouped(shape: Iterable[int], summed: frozenset[int]) -> list[tuple[int, bool]]:
    """Groups of adjacent axes that are all summed over or all kept, as size and whether summed.

    Axes of size 1 drop out.
    """
    axes = [(size, axis in summed) for axis, size in enumerate(shape) if size != 1]
    return [(math.prod(size for size, _ in group), over) for over, group in groupby(axes, key=lambda each: each[1])]


def sum_steps(groups: list[tuple[int, bool]], x: Any, y: Operand, workspace: Workspace) -> list[Step]:
    """The steps that sum x, an operand or working memory, over the groups that are summed, into y."""
    if not any(over for _, over in groups):
        groups = [*groups, (1, True)]
    steps: list[Step] = []
    sizes = [size for size, _ in groups]
    summed = [axis for axis in reversed(range(len(groups))) if groups[axis][1]]
    for axis in summed:
        before, n, after = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
        sizes[axis] = 1
        is_last = axis == summed[-1]
        result = y if is_last else workspace.shared(before * after, x.dtype if _is_integer(y) else None)
        steps += _sum(before, n, after, x, result, workspace)
        x = result
    return steps


def _is_integer(operand: Operand) -> bool:
    return operand.dtype in ("int32", "int64")


def _sum(before: int, n: int, after: int, x: Any, y: Any, workspace: Workspace) -> list[Step]:
    if not before * after:
        return []
    if _is_integer(x):
        return [shared_out(sum_integers, before * after, n * 8, {"n": n, "after": after, "x": x, "y": y})]
    size = BLOCK if after == 1 else DEEP
    blocks = partition.count(n, size)
    if blocks > 1:
        partial = workspace.shared(before * blocks * after)
        first_sums = _blocks(before, n, after, Blocks(blocks, size), x, partial)
        return [first_sums, *_sum(before, blocks, after, partial, y, workspace)]
    return [_blocks(before, n, after, Blocks(1, max(n, 1)), x, y)]


def _blocks(before: int, n: int, after: int, blocks: Blocks, x: Any, y: Any) -> Step:
    units, arguments = before * blocks.count, {"n": n, "blocks": blocks, "x": x, "y": y}
    if after == 1:
        return shared_out(sum_rows, units, 4 * blocks.size, arguments)
    precise = "float64" in (x.dtype, y.dtype)
    strips = partition.count(after, WIDE * vector_lanes("float64" if precise else "float32"))
    arguments["strips"] = Strips(strips, after)
    return shared_out(sum_columns, units * strips, 4 * blocks.size * after / strips, arguments)
