"""The programs of elements and slices that are picked by index or by range, and of their gradients.

Tuples of indices are first turned into numbers of slices; then the operator is gather with axis 0. Elements of an array
with one axis are such slices, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from opgrad.contract import Shape
from opgrad.contract.problem import Operand, Problem
from opgrad.contract.ranges import Explain, wrong_index
from opgrad.contract.shapes import slice_ranges
from opgrad.cpu.compiler.memory import CACHE_LINE
from opgrad.cpu.kernels.gather import AHEAD, Slices
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.scatter import (
    KEYS_BY_DIGIT,
    AxisRange,
    LineStrips,
    Plane,
    Sorted,
    add_apart,
    add_in_place,
    copy_elements,
    number_tuples,
    scatter_rows,
    sum_sorted,
)
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.gather import INDICES_PER_PART, check_count, checking, copy_steps, index_steps, sum_steps
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, Tables, shared_out
from opgrad.cpu.programs.sort import Sorting
from opgrad.cpu.programs.workspace import Scratch, Workspace

CACHED = 1 << 17  # bytes of a strip of x that stay in the second-level cache with all that goes through it
NARROW = 16  # lines of a strip at least, if there are so many side by side: a cache line of float32
MOST_BITS: Final = 11  # of a digit: the counts of a part, 8 KiB, stay in the first-level cache
FEW = 4  # elements for each number from which on this is used, since visiting every element costs more than sorting


# --- tuples of indices ----------------------------------------------------------------------------------------------


class Numbered:
    """The steps that turn tuples of indices into numbers of slices, and the problem with these as its indices."""

    def __init__(self, problem: Problem, operator: str, batches: int, sizes: Shape, count: int):
        self.workspace, self.tables = Workspace(precision(problem)), Tables()
        self.numbers = self.workspace.shared(count, "int64")
        arguments = {"per_batch": count // max(batches, 1), "named": len(sizes), "sizes": self.tables.add(sizes)}
        arguments |= {"indices": problem["indices"], "numbers": self.numbers}
        self.steps = checking(number_tuples, self.workspace, count, INDICES_PER_PART, arguments)
        self.problem = replace(problem, operands={**problem.operands, "indices": self.numbers})
        self.size = batches * math.prod(sizes)
        self.operator, self.explain = operator, _wrong_in_tuple(problem, operator, sizes)

    def program(self, more: Sequence[Step]) -> Program:
        """The program of these steps and the given ones after them."""
        return Program([*self.steps, *more], self.workspace, self.explain, tables=self.tables)


def _wrong_in_tuple(problem: Problem, operator: str, sizes: Sequence[int]) -> Explain:
    return lambda position, value: wrong_index(problem, operator, sizes[position % len(sizes)])(position, value)


def _tuples(problem: Problem, operator: str, shape: Shape) -> tuple[Numbered, int, int]:
    """The numbered slices, the elements of a slice, and how many tuples there are."""
    batch, indices = problem.attributes["batch_dims"], problem.specs["indices"].shape
    named_end = batch + indices[-1]
    count = math.prod(indices[:-1])
    numbered = Numbered(problem, operator, math.prod(shape[:batch]), shape[batch:named_end], count)
    return numbered, math.prod(shape[named_end:]), count


def gather_nd(problem: Problem) -> Program:
    numbered, post, count = _tuples(problem, "gather_nd", problem.specs["x"].shape)
    if post == 1:
        lines = AxisLines((numbered.size,), (count,), 0, numbered.tables)
        return numbered.program(copy_lines(numbered.problem, numbered.workspace, lines))
    return numbered.program(copy_steps(numbered.problem, numbered.workspace, 1, Slices(count, numbered.size, post)))


def gather_nd_grad(problem: Problem) -> Program:
    return _summed(*_tuples(problem, "gather_nd_grad", problem.attributes["shape"]))


def _summed(numbered: Numbered, post: int, count: int) -> Program:
    """Numbers, then sums by destination: one by one if there are far more elements, else element by element.

    Single elements are added where they go: sorting them first takes five times as long.
    """
    problem, workspace, slices = numbered.problem, numbered.workspace, Slices(count, numbered.size, post)
    if not slices.size * post:
        return numbered.program([])
    sparse = slices.size > FEW * count and count
    if post == 1 and not sparse:
        lines = AxisLines((slices.size,), (count,), 0, numbered.tables)
        return numbered.program(sum_lines(problem, workspace, lines))
    check_count(numbered.operator, count)
    if sparse:
        return numbered.program(sorted_sum_steps(problem, workspace, numbered.numbers, slices))
    return numbered.program(sum_steps(problem, workspace, 1, slices))


def sorted_sum_steps(problem: Problem, workspace: Workspace, keys: Scratch, slices: Slices) -> list[Step]:
    """The steps that zero dx and add the slices of dy, whose destinations are the keys."""
    count, size, post = slices
    bits = max(1, (size - 1).bit_length())
    digit = -(-bits // -(-bits // MOST_BITS))  # as short as the number of passes allows
    sorting = Sorting(workspace, count, 1 << digit)
    order, other_order = (workspace.shared(count + AHEAD, "int32") for _ in range(2))
    source, target = Sorted(keys, order, 0), Sorted(workspace.shared(count, "int64"), other_order, 0)
    dx, dy = problem["dx"], problem["dy"]
    steps = [zero_step(dx, size * post, size * post * problem.specs["dx"].dtype.itemsize)]
    for shift in range(0, bits, digit):
        steps += sorting.steps(KEYS_BY_DIGIT, source._replace(shift=shift), target)
        source, target = target, source
    summing = {"source": source, "count": count, "post": post, "dy": dy, "dx": dx}
    steps.append(shared_out(sum_sorted, count, 2 * post * problem.specs["dy"].dtype.itemsize + 12, summing))
    return steps


# --- elements along an axis ----------------------------------------------------------------------------------------


class AxisLines:
    """Where the lines lie: `table` is the address of the axes that choose a strip's first line, the last axis first.

    `run` lines lie side by side, in the indices' array (n of them on the axis) as in x (size of them). `steps` are the
    strides of the axis in both. `covers`: whether all lines of x have indices.
    """

    def __init__(self, x: Shape, indices: Shape, axis: int, tables: Tables):
        self.n, self.size = indices[axis], x[axis]
        strides = [(math.prod(indices[each + 1 :]), math.prod(x[each + 1 :])) for each in range(len(x))]
        self.steps = strides[axis]
        self.run, first = 1, len(x)
        while first > axis + 1 and strides[first - 1] == (self.run, self.run):
            first -= 1
            self.run *= indices[first]
        others = [each for each in reversed(range(first)) if each != axis and indices[each] != 1]
        self.rows = math.prod(indices[each] for each in others)
        words = [(indices[each], *strides[each]) for each in others]
        self.axes, self.table = len(others), tables.add(words)
        self.covers = all(indices[each] == x[each] for each in range(len(x)) if each != axis)

    def strips(self, width: int) -> tuple[int, "LineStrips"]:
        """How many strips of `width` lines there are, and the kernels' argument about them."""
        strips = partition.count(self.run, width)
        bundle = LineStrips(strips, width, self.run, self.table, self.axes, self.n, self.size, *self.steps)
        return self.rows * strips, bundle


def gather_elements(problem: Problem) -> Program:
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    return _along_axis(problem, "gather_elements", shape, axis, copy_lines)


def gather_elements_grad(problem: Problem) -> Program:
    shape, axis = problem.attributes["shape"], problem.attributes["axis"].start
    count = math.prod(problem.specs["dy"].shape)
    if math.prod(shape) == shape[axis] and count == problem.specs["dy"].shape[axis]:
        return _summed(Numbered(problem, "gather_elements_grad", 1, (shape[axis],), count), 1, count)
    return _along_axis(problem, "gather_elements_grad", shape, axis, sum_lines)


def _along_axis(
    problem: Problem,
    operator: str,
    shape: Shape,
    axis: int,
    work: Callable[[Problem, Workspace, AxisLines], list[Step]],
) -> Program:
    workspace, tables = Workspace(precision(problem)), Tables()
    lines = AxisLines(shape, problem.specs["indices"].shape, axis, tables)
    steps = index_steps(problem, workspace, shape[axis]) + work(problem, workspace, lines)
    return Program(steps, workspace, wrong_index(problem, operator, shape[axis]), tables=tables)


def copy_lines(problem: Problem, workspace: Workspace, lines: AxisLines) -> list[Step]:
    count = math.prod(problem.specs["indices"].shape)
    if not count:
        return []
    item = problem.specs["x"].dtype.itemsize
    strips, bundle = lines.strips(_width(lines, item))
    blocks = max(1, round(count * 2 * item / (strips * partition.MAX_PART_BYTES)))
    per_block = -(-lines.n // blocks)
    blocks = partition.count(lines.n, per_block)
    word = f"int{8 * item}"  # what is only copied is not converted
    arguments = {"indices": problem["indices"]} | {name: Operand(problem[name].number, word) for name in ("x", "y")}
    arguments |= {"lines": bundle, "per_block": per_block, "blocks": blocks, "asked": 0}
    if blocks == 1 and lines.run == 1 and lines.steps == (1, 1) and lines.size * item <= CACHED:
        each = -(-lines.size // lines.n)
        arguments["asked"] = each if each * item <= CACHE_LINE else 0
    unit_bytes = count / (strips * blocks) * (2 * item + problem.specs["indices"].dtype.itemsize)
    return [shared_out(copy_elements, strips * blocks, unit_bytes, arguments)]


def _width(lines: AxisLines, item: int) -> int:
    """How many lines make a strip."""
    return max(1, min(lines.run, max(NARROW, CACHED // (max(lines.size, 1) * item))))


def sum_lines(problem: Problem, workspace: Workspace, lines: AxisLines) -> list[Step]:
    """The steps that sum dy into dx."""
    spec, count = problem.specs["dx"], math.prod(problem.specs["dy"].shape)
    elements = math.prod(spec.shape)
    if not elements:
        return []
    zeros = [zero_step(problem["dx"], elements, elements * spec.dtype.itemsize)]
    if not count:
        return zeros
    strips, bundle = lines.strips(_width(lines, 4))
    arguments = {name: problem[name] for name in ("indices", "dy", "dx")} | {"lines": bundle}
    first = [] if lines.covers else zeros
    if lines.n == 1 or (lines.n <= CHUNK and spec.dtype.itemsize > 2):
        return [*first, shared_out(add_in_place, strips, problem.bytes / strips, arguments)]
    most = lines.size * bundle.width
    arguments |= {"total": workspace.private(most), "compensation": workspace.private(most), "most": most}
    arguments["stream"] = partition.streams(problem.bytes)
    return [*first, shared_out(add_apart, strips, problem.bytes / strips, arguments)]


# --- ranges --------------------------------------------------------------------------------------------------------


def slice_grad(problem: Problem) -> Program:
    """dx = 0; dx[taken] = dy, `taken` with a range for each axis."""
    shape, taken, tables = problem.attributes["shape"], slice_ranges(dict(problem.attributes)), Tables()
    size = math.prod(shape)
    if not size:
        return Program(())
    loops, (n, row) = _joined(shape, taken)
    rows, chosen = loops.pop() if loops else (1, range(1))
    table = tables.add([(length, picked.start, picked.step, len(picked)) for length, picked in reversed(loops)])
    blocks = partition.count(n, BLOCK)
    units = size // n * blocks
    arguments = {"blocks": blocks, "n": n, "columns": _axis_range(row)}
    arguments |= {"plane": Plane(rows, _axis_range(chosen), table, len(loops)), "x": problem["dy"]}
    arguments |= {"y": problem["dx"], "stream": partition.streams(problem.bytes) and row.step == 1}
    return Program([shared_out(scatter_rows, units, problem.bytes / units, arguments)], tables=tables)


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
