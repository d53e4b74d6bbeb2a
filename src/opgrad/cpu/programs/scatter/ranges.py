"""The program that writes an array into a larger array of zeros, at the positions that a range gives on each axis.

Axes that are taken whole are joined, so rows are as long as possible.
"""

import ctypes
import math
from collections.abc import Sequence

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.scatter.ranges import AxisRange, Plane, scatter_rows
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.program import Program, shared_out


def program(problem: Problem, taken: Sequence[range]) -> Program:
    """dx = 0; dx[taken] = dy, `taken` with a range for each axis."""
    shape = problem.attributes["shape"]
    size = math.prod(shape)
    if not size:
        return Program(())
    loops, (n, row) = _joined(shape, taken)
    rows, chosen = loops.pop() if loops else (1, range(1))
    words = [word for length, picked in reversed(loops) for word in (length, picked.start, picked.step, len(picked))]
    table = (ctypes.c_int64 * len(words))(*words)
    blocks = partition.count(n, BLOCK)
    units = size // n * blocks
    arguments = {"blocks": blocks, "n": n, "columns": _axis_range(row)}
    arguments |= {"plane": Plane(rows, _axis_range(chosen), ctypes.addressof(table), len(loops)), "x": problem["dy"]}
    arguments |= {"y": problem["dx"], "stream": partition.streams(problem.bytes) and row.step == 1}
    return Program([shared_out(scatter_rows, units, problem.bytes / units, arguments)], tables=(table,))


def _axis_range(taken: range) -> AxisRange:
    return AxisRange(taken.start, taken.step, len(taken))


def _joined(shape: Sequence[int], taken: Sequence[range]) -> tuple[list[tuple[int, range]], tuple[int, range]]:
    """(size, range) of the axes that rows are chosen by, and of a row."""
    found: list[tuple[int, range]] = [(1, range(1))]
    for size, each in zip(shape, taken, strict=True):
        picked = each if len(each) > 1 else range(each.start, each.start + len(each))
        before, chosen = found[-1]
        if picked == range(size) and chosen == range(before):
            found[-1] = (before * size, range(before * size))
        else:
            found.append((size, picked))
    n, row = found.pop()
    if found and row == range(n) and found[-1][1].step == 1:
        before, chosen = found.pop()
        n, row = before * n, range(chosen.start * n, chosen.stop * n)
    return [axis for axis in found if axis != (1, range(1))], (n, row)
