"""Sums over any axes: a step for each group of adjacent axes, the last group first.

A step sums an array of shape before x n x after over n. The result of a step is kept in the precision of the
computation until the next step. Long sums are formed in blocks of a fixed size, so that the order of additions depends
on the shape alone and not on the number of threads.
"""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from opgrad.contract.signature import Operand
from opgrad.cpu.compiler.decorators import vector_lanes
from opgrad.cpu.compiler.parameters import Strips
from opgrad.cpu.kernels.loops.fold import BLOCK, DEEP, WIDE, sum_columns, sum_integers, sum_rows
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import ceil_div


def grouped(shape: Iterable[int], summed: frozenset[int]) -> list[tuple[int, bool]]:
    """Groups of adjacent axes that are all summed over or all kept, as size and whether summed.

    Axes of size 1 drop out.
    """
    axes = [(size, axis in summed) for axis, size in enumerate(shape) if size != 1]
    return [(math.prod(size for size, _ in group), over) for over, group in groupby(axes, key=lambda each: each[1])]


def add_sums(steps: ProgramSteps, groups: list[tuple[int, bool]], x: Any, y: Operand) -> None:
    """Add the steps that sum x, an operand or working memory, over the groups that are summed, into y."""
    if not any(over for _, over in groups):
        groups = [*groups, (1, True)]
    sizes = [size for size, _ in groups]
    summed = [axis for axis in reversed(range(len(groups))) if groups[axis][1]]
    for axis in summed:
        before, n, after = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
        sizes[axis] = 1
        is_last = axis == summed[-1]
        result = y if is_last else steps.workspace.shared(before * after, x.dtype if _is_integer(y) else None)
        _sum(steps, before, n, after, x, result)
        x = result


def _is_integer(operand: Operand) -> bool:
    return operand.dtype in ("int32", "int64")


def _sum(steps: ProgramSteps, before: int, n: int, after: int, x: Any, y: Any) -> None:
    if not before * after:
        return
    if _is_integer(x):
        steps.add(sum_integers, before * after, n * 8, n=n, after=after, x=x, y=y)
        return
    size = BLOCK if after == 1 else DEEP
    blocks = ceil_div(n, size)
    if blocks > 1:
        partial = steps.workspace.shared(before * blocks * after)
        _sum_blocks(steps, before, n, after, blocks, size, x, partial)
        _sum(steps, before, blocks, after, partial, y)
    else:
        _sum_blocks(steps, before, n, after, 1, max(n, 1), x, y)


def _sum_blocks(steps: ProgramSteps, before: int, n: int, after: int, blocks: int, size: int, x: Any, y: Any) -> None:
    units, arguments = before * blocks, {"n": n, "blocks": blocks, "block_size": size, "x": x, "y": y}
    if after == 1:
        steps.add(sum_rows, units, 4 * size, **arguments)
        return
    precise = "float64" in (x.dtype, y.dtype)
    strips = ceil_div(after, WIDE * vector_lanes("float64" if precise else "float32"))
    unit_bytes = 4 * size * after / strips
    steps.add(sum_columns, units * strips, unit_bytes, strips=Strips(strips, after), **arguments)
