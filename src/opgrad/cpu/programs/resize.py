"""The program of the gradient of resizing: passes over dy, and the tables of what each element of dx takes of dy.

Axes that stay are merged, so that a plane has at most three that do not: depth, height and the row, any of which may
be one that stays. More than three of them are taken in several passes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.contract.resizing import Resized, resized_axes
from opgrad.cpu.kernels.loops.weighted import Along
from opgrad.cpu.kernels.resize import PIECE, ROWS, RowPieces, gather_rows
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, Tables, shared_out
from opgrad.cpu.programs.weighted import along
from opgrad.cpu.programs.workspace import Workspace

AXES: Final = 3  # of a plane


def resize_grad(problem: Problem) -> Program:
    """Passes over dy, each of which takes the last three axes that are left; all but the last fill the workspace."""
    x, y = problem.specs["x"].shape, problem.specs["dy"].shape
    n = math.prod(x)
    if not n or not math.prod(y):
        return Program([zero_step(problem["dx"], n, n * DTYPES[problem["dx"].dtype].itemsize)] if n else [])
    resized = resized_axes("resize_grad", x, y, problem.attributes)
    workspace, tables, steps = Workspace(precision(problem)), Tables(), list[Step]()
    source, sizes = problem["dy"], list(y)
    passes = _passes(len(x), sorted(resized))
    for axes in passes:
        for axis in axes:
            sizes[axis] = x[axis]
        last = axes is passes[-1]
        target = problem["dx"] if last else workspace.shared(math.prod(sizes))
        before = [y[axis] if axis in axes else size for axis, size in enumerate(sizes)]
        steps.append(_pass(before, {axis: resized[axis] for axis in axes}, (source, target), workspace, tables))
        source = target
    return Program(steps, workspace, tables=tables)


def _passes(rank: int, axes: Sequence[int]) -> list[list[int]]:
    """Axes that are taken together, the last ones first: as many as a plane has, with those that stay between them."""
    left, found = list(axes), list[list[int]]()
    while left:
        taken = [left.pop()]
        while left and _slots(rank, [left[-1], *taken]) <= AXES:
            taken.insert(0, left.pop())
        found.append(taken)
    return found or [[]]


def _slots(rank: int, axes: Sequence[int]) -> int:
    """The axes of a plane, with those that stay merged, from the first that does not."""
    gaps = sum(after - axis > 1 for axis, after in zip(axes, [*axes[1:], rank], strict=True))
    return len(axes) + gaps


def _pass(
    sizes: Sequence[int],
    resized: Mapping[int, Resized],
    ends: tuple[Any, Any],
    workspace: Workspace,
    tables: Tables,
) -> Step:
    """The step from an array of these sizes to one where some axes have those of x."""
    first = min(resized, default=0)
    slots, planes = _slots_of(sizes, first, resized, tables), math.prod(sizes[:first])
    row = _stays(math.prod(sizes[max(resized, default=-1) + 1 :]), tables) if len(sizes) - 1 not in resized else None
    width, same = (row, True) if row else (slots.pop(), False)
    if not slots and not same:
        together = math.gcd(planes, ROWS)  # rows of several planes read a table together
        slots, planes = [_stays(together, tables)], planes // together
    depth, height = [*(_stays(1, tables) for _ in range(AXES - 1 - len(slots))), *slots]
    piece = min(PIECE, width.count) if same else width.count
    pieces = -(-width.count // piece)
    units = planes * depth.size * -(-height.size // ROWS) * pieces
    dy, dx = ends
    arguments = {
        "depth": depth,
        "height": height,
        "width": width,
        "row": RowPieces(same, pieces, piece),
        "dy": dy,
        "dx": dx,
    }
    arguments |= {"sums": workspace.private(ROWS * piece), "chunk": workspace.private(piece)}
    elements = planes * (depth.count * height.count * width.count + depth.size * height.size * width.size)
    return shared_out(gather_rows, units, elements * DTYPES[workspace.precision].itemsize / units, arguments)


def _slots_of(sizes: Sequence[int], first: int, resized: Mapping[int, Resized], tables: Tables) -> list[Along]:
    """The axes of a plane from the first that is resized to the last, what stays between two of them merged."""
    slots, between = list[Along](), 1
    for axis in range(first, max(resized, default=-1) + 1):
        if axis not in resized:
            between *= sizes[axis]
            continue
        slots += [_stays(between, tables)] if between > 1 else []
        slots.append(_gathered(resized[axis], tables))
        between = 1
    return slots


def _gathered(axis: Resized, tables: Tables) -> Along:
    """What each element of dx takes of dy: beyond the ends several places are one element, whose weights add up."""
    pairs = axis.places * axis.count + np.arange(axis.count)[:, None]
    every, of = np.unique(pairs, return_inverse=True)
    weights = np.bincount(of.ravel(), axis.weights.ravel())
    places, o = np.divmod(every, axis.count)
    counts = weights != 0
    return along(axis.size, axis.count, (places[counts], o[counts], weights[counts]), tables)


def _stays(size: int, tables: Tables) -> Along:
    """An axis of which each element takes itself."""
    every = np.arange(size)
    return along(size, size, (every, every, np.ones(size)), tables)
