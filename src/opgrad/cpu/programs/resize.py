"""The program of the gradient of resizing: passes over dy, and the tables of what each element of dx takes of dy.

The kernel takes planes of three axes: depth, height and width. An axis is either resized, or its size stays.
Neighbouring axes whose sizes stay are merged into one, which may be one of the three. If a plane cannot hold all
resized axes, they are taken in several passes, the last axes first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from opgrad.contract import Array
from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.loops.weighted import Along
from opgrad.cpu.kernels.resize import PIECE, ROWS, gather_rows
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import Program, Tables
from opgrad.ops.reference.resizing import Resized, resized_axes

AXES: Final = 3  # of a plane


def resize_grad(problem: Problem) -> Program:
    """Each pass takes the last resized axes that are left. All passes but the last one write to working memory."""
    x, y = problem.specs["x"].shape, problem.specs["dy"].shape
    steps = ProgramSteps(problem)
    if not math.prod(x) or not math.prod(y):
        steps.clear("dx")
        return steps.program()
    resized = resized_axes("resize_grad", x, y, problem.attributes)
    source, sizes = problem["dy"], list(y)
    passes = _passes(len(x), sorted(resized))
    for axes in passes:
        for axis in axes:
            sizes[axis] = x[axis]
        last = axes is passes[-1]
        target = problem["dx"] if last else steps.workspace.shared(math.prod(sizes))
        before = [y[axis] if axis in axes else size for axis, size in enumerate(sizes)]
        _add_pass(steps, before, {axis: resized[axis] for axis in axes}, source, target)
        source = target
    return steps.program()


def _passes(rank: int, axes: Sequence[int]) -> list[list[int]]:
    """The resized axes of each pass, the last axes first: as many as fit a plane with merged axes between them."""
    left, found = list(axes), list[list[int]]()
    while left:
        taken = [left.pop()]
        while left and _slots(rank, [left[-1], *taken]) <= AXES:
            taken.insert(0, left.pop())
        found.append(taken)
    return found or [[]]


def _slots(rank: int, axes: Sequence[int]) -> int:
    """How many axes a plane has if these are resized: they themselves, and the merged axes between and behind them."""
    gaps = sum(after - axis > 1 for axis, after in zip(axes, [*axes[1:], rank], strict=True))
    return len(axes) + gaps


def _add_pass(steps: ProgramSteps, sizes: Sequence[int], resized: Mapping[int, Resized], dy: Any, dx: Any) -> None:
    """Add the step from an array of these sizes to one where some axes have those of x."""
    first, tables = min(resized, default=0), steps.tables
    slots, planes = _slots_of(sizes, first, resized, tables), math.prod(sizes[:first])
    row = _stays(math.prod(sizes[max(resized, default=-1) + 1 :]), tables) if len(sizes) - 1 not in resized else None
    width, same = (row, True) if row else (slots.pop(), False)
    if not slots and not same:
        together = math.gcd(planes, ROWS)  # rows of several planes read a table together
        slots, planes = [_stays(together, tables)], planes // together
    depth, height = [*(_stays(1, tables) for _ in range(AXES - 1 - len(slots))), *slots]
    add_rows(steps, planes, (depth, height, width), same, dy, dx)


def add_rows(steps: ProgramSteps, planes: int, axes: tuple[Along, Along, Along], same: bool, dy: Any, dx: Any) -> None:
    """Add the step that sums the elements of planes along these axes. same: whether the last of them stays as it is."""
    (depth, height, width), private = axes, steps.workspace.private
    piece = min(PIECE, width.count) if same else width.count
    pieces = -(-width.count // piece)
    units = planes * depth.size * -(-height.size // ROWS) * pieces
    elements = planes * (depth.count * height.count * width.count + depth.size * height.size * width.size)
    arguments = {"depth": depth, "height": height, "width": width, "same": same, "pieces": pieces, "piece": piece}
    arguments |= {"dy": dy, "dx": dx, "sums": private(ROWS * piece), "chunk": private(piece)}
    arguments["lines"] = private(ROWS * (1 if same else width.size))
    steps.add(gather_rows, units, elements * steps.item / units, **arguments)


def _slots_of(sizes: Sequence[int], first: int, resized: Mapping[int, Resized], tables: Tables) -> list[Along]:
    """The axes of a plane from the first resized one to the last one; the axes between two of them are merged."""
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
    """Which elements of dy an element of dx takes, and with which weights.

    Places beyond an end of the axis all mean its last element there, so their weights are added up.
    """
    pairs = axis.places * axis.count + np.arange(axis.count)[:, None]
    every, of = np.unique(pairs, return_inverse=True)
    weights = np.bincount(of.ravel(), axis.weights.ravel())
    places, o = np.divmod(every, axis.count)
    counts = weights != 0
    return along(axis.size, axis.count, (places[counts], o[counts], weights[counts]), tables)


def _stays(size: int, tables: Tables) -> Along:
    """An axis whose size stays: each element takes itself."""
    every = np.arange(size)
    return along(size, size, (every, every, np.ones(size)), tables)


def along(size: int, count: int, pairs: tuple[Array, Array, Array], tables: Tables) -> Along:
    """The kernels' description of an axis, whose tables are added to `tables`.

    pairs: three arrays of the same length: an element of the result, one of its sources, and that source's weight.
    """
    elements, sources, weights = pairs
    order = elements.argsort(kind="stable")
    starts = elements[order].searchsorted(range(size + 1))
    addresses = tables.add(starts), tables.add(sources[order]), tables.add(weights[order], "float64")
    return Along(size, count, *addresses)
