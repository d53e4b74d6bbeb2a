"""Sums over any axes: one group of adjacent axes after the other, the last ones first.

A step sums an array of before x n x after over n. What lies between two steps is kept in the precision of the
computation. Long sums are formed in blocks, so that their order depends on the shape alone.
"""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from opgrad.cpu.compiler.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.compiler.simd import (
    Pointer,
    first,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    prefetch,
    reduce_add,
    store_masked,
    store_one,
)
from opgrad.cpu.loops.columns import get
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Step
from opgrad.cpu.runtime.pieces import Pieces
from opgrad.problem import Operand

CHUNK: Final = 64  # terms that are added to each other before they join the total
BLOCK: Final = 1 << 14  # elements of a row that one part sums
DEEP: Final = 1 << 10  # terms of a column that one part sums
WIDE: Final = 4  # vectors of columns that are summed at once
AHEAD: Final = 8  # rows between a prefetch and its use


@kernel
def sum_rows(part, per_part, units, blocks, n, per_block, x: Pointer, y: Pointer):
    """y[row, block] = the sum of that block of x[row]."""
    w = lanes(x)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, begin = unit // blocks, unit % blocks * per_block
        source, count = x + (row * n + begin), min(per_block, n - begin)
        total, i = full(x, 0.0), 0
        while i + w <= count:
            end, chunk = min(i + CHUNK * w, count), full(x, 0.0)
            while i + w <= end:
                chunk = chunk + load(source, i)
                i += w
            total = total + chunk
        if i < count:
            total = total + load_masked(source, i, first(x, count - i), 0.0)
        store_one(y, unit, reduce_add(total))


@inline
def sum_wide(x: Any, row: int, begin: int, end: int, y: Any) -> None:
    """y[0 : 4 w] = the sums of x[begin:end, 0 : 4 w]."""
    w = lanes(x)
    every, zero = first(x, w), full(x, 0.0)
    a = b = c = d = zero
    for chunk in range(begin, end, CHUNK):
        s = t = u = v = zero
        for k in range(chunk, min(chunk + CHUNK, end)):
            source = x + k * row
            for i in range(0, WIDE * w, w):
                prefetch(source, AHEAD * row + i)
            s, t = s + load(source, 0), t + load(source, w)
            u, v = u + load(source, 2 * w), v + load(source, 3 * w)
        a, b, c, d = a + s, b + t, c + u, d + v
    store_masked(y, 0, a, every)
    store_masked(y, w, b, every)
    store_masked(y, 2 * w, c, every)
    store_masked(y, 3 * w, d, every)


@kernel
def sum_columns(part, per_part, units, blocks, strips, n, per_block, after, x: Pointer, y: Pointer):
    """y[before, block, column] = the sum of that block of x[before, :, column]; a unit is a strip of columns."""
    w = lanes(x)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        outer, column = unit // strips, unit % strips * WIDE * w
        before, block = outer // blocks, outer % blocks
        source, result = x + (before * n * after + column), y + (outer * after + column)
        begin, end, width = block * per_block, min((block + 1) * per_block, n), min(WIDE * w, after - column)
        if width == WIDE * w:
            sum_wide(source, after, begin, end, result)
        else:
            for i in range(0, width, w):
                mask = first(x, width - i)
                total = full(x, 0.0)
                for chunk in range(begin, end, CHUNK):
                    s = full(x, 0.0)
                    for k in range(chunk, min(chunk + CHUNK, end)):
                        s = s + get(source, k * after + i, False, mask)
                    total = total + s
                store_masked(result, i, total, mask)


@kernel
def sum_integers(part, per_part, units, n, after, x: Pointer, y: Pointer):
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        source = x + (unit // after * n * after + unit % after)
        total = 0
        for k in range(n):
            total += load_one(source, k * after)
        store_one(y, unit, total)


def grouped(shape: Iterable[int], gone: frozenset[int]) -> list[tuple[int, bool]]:
    """The sizes of groups of adjacent axes that are all summed over, or all kept; axes of size 1 belong to any."""
    axes = [(size, axis in gone) for axis, size in enumerate(shape) if size != 1]
    return [(math.prod(size for size, _ in group), over) for over, group in groupby(axes, key=lambda each: each[1])]


def sum_steps(groups: list[tuple[int, bool]], x: Any, y: Operand, pieces: Pieces) -> list[Step]:
    """The steps that sum x, an operand or scratch memory, over the groups that are to go, into y."""
    if not any(over for _, over in groups):
        groups = [*groups, (1, True)]
    steps: list[Step] = []
    sizes = [size for size, _ in groups]
    places = [place for place in reversed(range(len(groups))) if groups[place][1]]
    for place in places:
        before, n, after = math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 :])
        sizes[place] = 1
        is_last = place == places[-1]
        result = y if is_last else pieces.take(before * after, x.dtype if _is_integer(y) else None)
        steps += _sum(before, n, after, x, result, pieces)
        x = result
    return steps


def _is_integer(operand: Operand) -> bool:
    return operand.dtype in ("int32", "int64")


def _sum(before: int, n: int, after: int, x: Any, y: Any, pieces: Pieces) -> list[Step]:
    if not before * after:
        return []
    if x.dtype in ("int32", "int64"):
        return [_step(sum_integers, before * after, n * 8, x=x, y=y, n=n, after=after)]
    per_block = BLOCK if after == 1 else DEEP
    blocks = partition.count(n, per_block)
    if blocks > 1:
        partial = pieces.take(before * blocks * after)
        first_sums = _blocks(before, n, after, per_block, x, partial)
        return [first_sums, *_sum(before, blocks, after, partial, y, pieces)]
    return [_blocks(before, n, after, max(n, 1), x, y)]


def _blocks(before: int, n: int, after: int, per_block: int, x: Any, y: Any) -> Step:
    blocks = partition.count(max(n, 1), per_block)
    if after == 1:
        return _step(sum_rows, before * blocks, 4 * per_block, x=x, y=y, blocks=blocks, n=n, per_block=per_block)
    precise = "float64" in (x.dtype, y.dtype)
    strips = partition.count(after, WIDE * vector_lanes("float64" if precise else "float32"))
    sizes = {"blocks": blocks, "strips": strips, "n": n, "per_block": per_block, "after": after}
    return _step(sum_columns, before * blocks * strips, 4 * per_block * after / strips, x=x, y=y, **sizes)


def _step(made: Kernel, units: int, unit_bytes: float, **arguments: Any) -> Step:
    per = partition.per_part(units, unit_bytes)
    return Step(made, partition.count(units, per), {"per_part": per, "units": units, **arguments})
