"""The gradient of resizing: rows of dx, each of a few rows of dy, and then of neighbours in the row.

Axes that stay are merged, so that a plane has at most three that do not: depth, height and the row, any of which may
be one that stays. More than three of them are taken in several passes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from opgrad.contract import DTYPES, Array
from opgrad.contract.problem import Problem
from opgrad.contract.resizing import Resized, resized_axes
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Units
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import write_same
from opgrad.cpu.kernels.loops.weighted import Along, add_rows
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.weighted import along
from opgrad.cpu.programs.workspace import Workspace

AXES: Final = 3  # of a plane
PIECE: Final = 2048  # elements of a row that stays: its sums remain in the first-level cache
ROWS: Final = 4  # that read a table together


class Row(NamedTuple):
    """Whether the row stays, and in how many pieces of how many elements it is taken."""

    same: int
    pieces: int
    piece: int


@inline
def combine_rows(dx, pitch: int, rows: int, sums, length: int, row) -> None:
    """dx[r, i] = the sum of the elements of sums[r] that i is made of, times their weights, for up to four rows."""
    s, t, u = sums + min(1, rows - 1) * length, sums + min(2, rows - 1) * length, sums + (rows - 1) * length
    zero, at = v.number(sums, 0.0), load_word(row.starts, 0)
    for i in range(row.size):
        end = load_word(row.starts, i + 1)
        a, b, c, d = zero, zero, zero, zero
        while at < end:
            stop = min(at + CHUNK, end)
            e, f, g, h = zero, zero, zero, zero
            while at < stop:
                o, weight = load_word(row.sources, at), v.number(sums, load_f64(row.weights, at))
                e += v.load_one(sums, o) * weight
                f += v.load_one(s, o) * weight
                g += v.load_one(t, o) * weight
                h += v.load_one(u, o) * weight
                at += 1
            a, b, c, d = a + e, b + f, c + g, d + h
        v.store_one(dx, i, a)
        if rows > 1:
            v.store_one(dx, pitch + i, b)
        if rows > 2:
            v.store_one(dx, 2 * pitch + i, c)
        if rows > 3:
            v.store_one(dx, 3 * pitch + i, d)


@kernel
def gather_rows(
    units: Units, depth: Along, height: Along, width: Along, row: Row, dy: Pointer, dx: Pointer,
    sums: Private, chunk: Private,
):  # fmt: skip
    """A unit is up to four rows of dx that follow each other in a plane, or a piece of them."""
    groups = (height.size + ROWS - 1) // ROWS
    for unit in units:
        begin = unit % row.pieces * row.piece
        group = unit // row.pieces
        h, outer = group % groups * ROWS, group // groups
        plane, d = outer // depth.size, outer % depth.size
        n, rows = min(row.piece, width.count - begin), min(ROWS, height.size - h)
        out = dx + ((outer * height.size + h) * width.size + begin)
        for r in range(rows):
            line = sums + r * row.piece
            add_rows(line, dy, plane, d, h + r, depth, height, width.count, begin, n, 1.0, chunk)
            if row.same:
                write_same(out + r * width.size, 0, n, 0, (line,), ())
        if not row.same:
            combine_rows(out, width.size, rows, sums, row.piece, width)


def resize_grad(problem: Problem) -> Program:
    """Passes over dy, each of which takes the last three axes that are left; all but the last fill the workspace."""
    x, y = problem.specs["x"].shape, problem.specs["dy"].shape
    n = math.prod(x)
    if not n or not math.prod(y):
        return Program([zero_step(problem["dx"], n, n * DTYPES[problem["dx"].dtype].itemsize)] if n else [])
    resized = resized_axes("resize_grad", x, y, problem.attributes)
    workspace, tables, steps = Workspace(precision(problem)), list[Array](), list[Step]()
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
    tables: list[Array],
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
    arguments = {"depth": depth, "height": height, "width": width, "row": Row(same, pieces, piece), "dy": dy, "dx": dx}
    arguments |= {"sums": workspace.private(ROWS * piece), "chunk": workspace.private(piece)}
    elements = planes * (depth.count * height.count * width.count + depth.size * height.size * width.size)
    return shared_out(gather_rows, units, elements * DTYPES[workspace.precision].itemsize / units, arguments)


def _slots_of(sizes: Sequence[int], first: int, resized: Mapping[int, Resized], tables: list[Array]) -> list[Along]:
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


def _gathered(axis: Resized, tables: list[Array]) -> Along:
    """What each element of dx takes of dy: beyond the ends several places are one element, whose weights add up."""
    pairs = axis.places * axis.count + np.arange(axis.count)[:, None]
    every, of = np.unique(pairs, return_inverse=True)
    weights = np.bincount(of.ravel(), axis.weights.ravel())
    places, o = np.divmod(every, axis.count)
    counts = weights != 0
    return along(axis.size, axis.count, (places[counts], o[counts], weights[counts]), tables)


def _stays(size: int, tables: list[Array]) -> Along:
    """An axis of which each element takes itself."""
    every = np.arange(size)
    return along(size, size, (every, every, np.ones(size)), tables)
