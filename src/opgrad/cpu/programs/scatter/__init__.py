"""Elements and slices that are picked by index or by range, and their gradients: chooses the kernels for a shape.

Tuples of indices are first turned into numbers of slices; then the operator is gather with axis 0. Elements of an array
with one axis are such slices, too. Elements along an axis of other arrays are in `along_axis`, ranges in `ranges`.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from opgrad.contract import Shape
from opgrad.contract.problem import Problem
from opgrad.contract.ranges import Explain, wrong_index
from opgrad.contract.shapes import slice_ranges
from opgrad.cpu.kernels.gather import Slices
from opgrad.cpu.kernels.scatter.tuples import number_tuples
from opgrad.cpu.programs.gather import INDICES_PER_PART, check_count, checking, copy_steps, index_steps, sum_steps
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step
from opgrad.cpu.programs.scatter import along_axis, ranges
from opgrad.cpu.programs.scatter.radix_sort import FEW, sorted_sum_steps
from opgrad.cpu.programs.workspace import Workspace

# --- tuples of indices ----------------------------------------------------------------------------------------------


class Numbered:
    """The steps that turn tuples of indices into numbers of slices, and the problem with these as its indices."""

    def __init__(self, problem: Problem, operator: str, batches: int, sizes: Shape, count: int):
        table = (ctypes.c_int64 * len(sizes))(*sizes)
        self.workspace = Workspace(precision(problem))
        self.numbers = self.workspace.shared(count, "int64")
        arguments = {"per_batch": count // max(batches, 1), "named": len(sizes), "sizes": ctypes.addressof(table)}
        arguments |= {"indices": problem["indices"], "numbers": self.numbers}
        self.steps = checking(number_tuples, self.workspace, count, INDICES_PER_PART, arguments)
        self.problem = replace(problem, operands={**problem.operands, "indices": self.numbers})
        self.size = batches * math.prod(sizes)
        self.tables = (table,)
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
        lines = along_axis.Lines((numbered.size,), (count,), 0)
        return numbered.program(along_axis.copy_steps(numbered.problem, numbered.workspace, lines))
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
        lines = along_axis.Lines((slices.size,), (count,), 0)
        return numbered.program(along_axis.sum_steps(problem, workspace, lines))
    check_count(numbered.operator, count)
    if sparse:
        return numbered.program(sorted_sum_steps(problem, workspace, numbered.numbers, slices))
    return numbered.program(sum_steps(problem, workspace, 1, slices))


# --- elements along an axis ----------------------------------------------------------------------------------------


def gather_elements(problem: Problem) -> Program:
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    return _along_axis(problem, "gather_elements", shape, axis, along_axis.copy_steps)


def gather_elements_grad(problem: Problem) -> Program:
    shape, axis = problem.attributes["shape"], problem.attributes["axis"].start
    count = math.prod(problem.specs["dy"].shape)
    if math.prod(shape) == shape[axis] and count == problem.specs["dy"].shape[axis]:
        return _summed(Numbered(problem, "gather_elements_grad", 1, (shape[axis],), count), 1, count)
    return _along_axis(problem, "gather_elements_grad", shape, axis, along_axis.sum_steps)


def _along_axis(
    problem: Problem,
    operator: str,
    shape: Shape,
    axis: int,
    work: Callable[[Problem, Workspace, along_axis.Lines], list[Step]],
) -> Program:
    workspace = Workspace(precision(problem))
    lines = along_axis.Lines(shape, problem.specs["indices"].shape, axis)
    steps = index_steps(problem, workspace, shape[axis]) + work(problem, workspace, lines)
    return Program(steps, workspace, wrong_index(problem, operator, shape[axis]), tables=(lines.table,))


# --- ranges --------------------------------------------------------------------------------------------------------


def slice_grad(problem: Problem) -> Program:
    return ranges.program(problem, slice_ranges(dict(problem.attributes)))
