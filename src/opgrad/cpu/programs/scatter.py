"""The programs of elements and slices that are picked by index or by range, and of their gradients.

Tuples of indices are first turned into numbers of slices; then the operator is gather with axis 0. Elements of an array
with one axis are such slices, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from opgrad.contract import Shape
from opgrad.contract.arrangement import slice_ranges
from opgrad.contract.signature import Operand, Problem, wrong_index
from opgrad.cpu.compiler.words import CACHE_LINE
from opgrad.cpu.kernels.gather import AHEAD, Slices
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.kernels.scatter import (
    KEYS_BY_DIGIT,
    AxisRange,
    LineStrips,
    Sorted,
    add_apart,
    add_in_place,
    copy_elements,
    number_tuples,
    scatter_rows,
    sum_sorted,
)
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.gather import INDICES_PER_PART, check, check_count, check_indices, copy_slices, sum_slices
from opgrad.cpu.programs.sort import Sorting
from opgrad.cpu.runtime.program import MAX_PART_BYTES, Program, Tables, ceil_div, streams

CACHED = 1 << 17  # bytes of a strip of x that stay in the second-level cache with all that goes through it
NARROW = 16  # lines of a strip at least, if there are so many side by side: a cache line of float32
MOST_BITS: Final = 11  # of a digit: the counts of a part, 8 KiB, stay in the first-level cache
FEW = 4  # elements for each number from which on this is used, since visiting every element costs more than sorting


# --- tuples of indices ----------------------------------------------------------------------------------------------


class NumberedSteps(ProgramSteps):
    """The steps that turn tuples of indices into numbers of slices; for those that follow, these are the indices."""

    def __init__(self, problem: Problem, operator: str, batches: int, sizes: Shape, count: int):
        super().__init__(problem)
        self.numbers = self.workspace.shared(count, "int64")
        given = {"per_batch": count // max(batches, 1), "named": len(sizes), "sizes": self.tables.add(sizes)}
        check(self, number_tuples, count, INDICES_PER_PART, numbers=self.numbers, **given)
        self.tuples, self.operator, self.sizes = problem, operator, sizes
        self.problem = replace(problem, operands={**problem.operands, "indices": self.numbers})
        self.slices = batches * math.prod(sizes)

    def explain(self, position: int, value: int) -> Exception:
        """The error for a wrong index: a number of a tuple is one of the axis at its place."""
        size = self.sizes[position % len(self.sizes)]
        return wrong_index(self.tuples, self.operator, size)(position, value)


def _tuples(problem: Problem, operator: str, shape: Shape) -> tuple[NumberedSteps, int, int]:
    """The numbered slices, the elements of a slice, and how many tuples there are."""
    batch, indices = problem.attributes["batch_dims"], problem.specs["indices"].shape
    named_end = batch + indices[-1]
    count = math.prod(indices[:-1])
    steps = NumberedSteps(problem, operator, math.prod(shape[:batch]), shape[batch:named_end], count)
    return steps, math.prod(shape[named_end:]), count


def gather_nd(problem: Problem) -> Program:
    steps, post, count = _tuples(problem, "gather_nd", problem.specs["x"].shape)
    if post == 1:
        copy_lines(steps, AxisLines((steps.slices,), (count,), 0, steps.tables))
    else:
        copy_slices(steps, 1, Slices(count, steps.slices, post))
    return steps.program(explain=steps.explain)


def gather_nd_grad(problem: Problem) -> Program:
    return _summed(*_tuples(problem, "gather_nd_grad", problem.attributes["shape"]))


def _summed(steps: NumberedSteps, post: int, count: int) -> Program:
    """Numbers, then sums by destination: one by one if there are far more elements, else element by element.

    Single elements are added where they go: sorting them first takes five times as long.
    """
    slices = Slices(count, steps.slices, post)
    sparse = slices.size > FEW * count and count
    if slices.size * post and post == 1 and not sparse:
        sum_lines(steps, AxisLines((slices.size,), (count,), 0, steps.tables))
    elif slices.size * post:
        check_count(steps.operator, count)
        if sparse:
            sum_sorted_slices(steps, slices)
        else:
            sum_slices(steps, 1, slices)
    return steps.program(explain=steps.explain)


def sum_sorted_slices(steps: NumberedSteps, slices: Slices) -> None:
    """Add the steps that zero dx and add the slices of dy, which are sorted by the numbers of those of dx."""
    count, size, post = slices
    bits = max(1, (size - 1).bit_length())
    digit = -(-bits // -(-bits // MOST_BITS))  # as short as the number of passes allows
    sorting, shared = Sorting(steps, count, 1 << digit), steps.workspace.shared
    order, other_order = (shared(count + AHEAD, "int32") for _ in range(2))
    source, target = Sorted(steps.numbers, order, 0), Sorted(shared(count, "int64"), other_order, 0)
    steps.clear("dx")
    for shift in range(0, bits, digit):
        sorting.add(KEYS_BY_DIGIT, source._replace(shift=shift), target)
        source, target = target, source
    slice_bytes = post * steps.problem.specs["dy"].dtype.itemsize
    steps.add(sum_sorted, count, 2 * slice_bytes + 12, source=source, count=count, post=post)


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
        strips = ceil_div(self.run, width)
        bundle = LineStrips(strips, width, self.run, self.table, self.axes, self.n, self.size, *self.steps)
        return self.rows * strips, bundle


def gather_elements(problem: Problem) -> Program:
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    return _along_axis(problem, "gather_elements", shape, axis, copy_lines)


def gather_elements_grad(problem: Problem) -> Program:
    shape, axis = problem.attributes["shape"], problem.attributes["axis"].start
    count = math.prod(problem.specs["dy"].shape)
    if math.prod(shape) == shape[axis] and count == problem.specs["dy"].shape[axis]:
        return _summed(NumberedSteps(problem, "gather_elements_grad", 1, (shape[axis],), count), 1, count)
    return _along_axis(problem, "gather_elements_grad", shape, axis, sum_lines)


def _along_axis(
    problem: Problem, operator: str, shape: Shape, axis: int, work: Callable[[ProgramSteps, AxisLines], None]
) -> Program:
    steps = ProgramSteps(problem)
    check_indices(steps, shape[axis])
    work(steps, AxisLines(shape, problem.specs["indices"].shape, axis, steps.tables))
    return steps.program(explain=wrong_index(problem, operator, shape[axis]))


def copy_lines(steps: ProgramSteps, lines: AxisLines) -> None:
    """Add the step that copies elements of x to y."""
    problem, count = steps.problem, math.prod(steps.problem.specs["indices"].shape)
    if not count:
        return
    item = problem.specs["x"].dtype.itemsize
    strips, bundle = lines.strips(_width(lines, item))
    blocks = max(1, round(count * 2 * item / (strips * MAX_PART_BYTES)))
    per_block = -(-lines.n // blocks)
    blocks = ceil_div(lines.n, per_block)
    x, y = (Operand(problem[name].number, f"int{8 * item}") for name in ("x", "y"))  # what is copied is not converted
    arguments = {"lines": bundle, "per_block": per_block, "blocks": blocks, "asked": 0}
    if blocks == 1 and lines.run == 1 and lines.steps == (1, 1) and lines.size * item <= CACHED:
        each = -(-lines.size // lines.n)
        arguments["asked"] = each if each * item <= CACHE_LINE else 0
    unit_bytes = count / (strips * blocks) * (2 * item + problem.specs["indices"].dtype.itemsize)
    steps.add(copy_elements, strips * blocks, unit_bytes, x=x, y=y, **arguments)


def _width(lines: AxisLines, item: int) -> int:
    """How many lines make a strip."""
    return max(1, min(lines.run, max(NARROW, CACHED // (max(lines.size, 1) * item))))


def sum_lines(steps: ProgramSteps, lines: AxisLines) -> None:
    """Add the steps that sum dy into dx."""
    dy, dx = (steps.problem.specs[name] for name in ("dy", "dx"))
    if not math.prod(dy.shape) or not lines.covers:
        steps.clear("dx")
    if not math.prod(dy.shape) or not math.prod(dx.shape):
        return
    strips, bundle = lines.strips(_width(lines, 4))
    if lines.n == 1 or (lines.n <= CHUNK and dx.dtype.itemsize > 2):
        steps.add(add_in_place, strips, lines=bundle)
        return
    most, private = lines.size * bundle.width, steps.workspace.private
    steps.add(add_apart, strips, lines=bundle, total=private(most), compensation=private(most), most=most)


# --- ranges --------------------------------------------------------------------------------------------------------


def slice_grad(problem: Problem) -> Program:
    """dx = 0; dx[taken] = dy, `taken` with a range for each axis."""
    steps, shape, taken = ProgramSteps(problem), problem.attributes["shape"], slice_ranges(dict(problem.attributes))
    size = math.prod(shape)
    if not size:
        return steps.program()
    loops, (n, row) = _joined(shape, taken)
    rows, chosen = loops.pop() if loops else (1, range(1))
    table = steps.tables.add([(length, picked.start, picked.step, len(picked)) for length, picked in reversed(loops)])
    blocks, given = ceil_div(n, BLOCK), {"columns": _axis_range(row), "x": problem["dy"], "y": problem["dx"]}
    given |= {"rows": rows, "picked": _axis_range(chosen), "table": table, "axes": len(loops)}
    stream = streams(problem.bytes) and row.step == 1
    steps.add(scatter_rows, size // n * blocks, blocks=blocks, n=n, stream=stream, **given)
    return steps.program()


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
