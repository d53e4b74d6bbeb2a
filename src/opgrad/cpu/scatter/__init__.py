"""Elements and slices picked by index or by range, and their gradients: what is laid out how.

Tuples of indices become numbers of slices, and then it is gather with axis 0. Elements along an axis of a one-axis
array are such slices, too; all others go to `opgrad.cpu.scatter.along_axis`, ranges to `opgrad.cpu.scatter.ranges`.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from opgrad.contract import Shape
from opgrad.cpu.compiler.memory import load_word, store_word
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.simd import Pointer, load_one
from opgrad.cpu.gather import INDICES_PER_PART, copy_steps, index_steps, report_indices, sum_steps
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.cpu.scatter import along_axis
from opgrad.cpu.scatter import ranges as strided
from opgrad.cpu.scatter.radix_sort import FEW, sorted_sum_steps
from opgrad.problem import Problem
from opgrad.ranges import Explain, wrong_index
from opgrad.shapes import slice_ranges

# --- tuples of indices ----------------------------------------------------------------------------------------------


@kernel
def number_tuples(part, per_part, count, per_batch, named, sizes, indices: Pointer, numbers, found):
    """numbers[j] = the number of the slice that tuple j names; found[part] = the first wrong index's place, or -1."""
    wrong = -1
    for j in range(part * per_part, min((part + 1) * per_part, count)):
        place = j // per_batch
        for k in range(named):
            size, index = load_word(sizes, k), load_one(indices, j * named + k)
            if wrong < 0 and (index < -size or index >= size):
                wrong = j * named + k
            place = place * size + (index + size if index < 0 else index)
        store_word(numbers, j, place)
    store_word(found, part, wrong)


class Numbered:
    """The steps that turn tuples of indices into numbers of slices, and the problem with these as its indices."""

    def __init__(self, problem: Problem, operator: str, batches: int, sizes: Shape, count: int):
        made = max(1, partition.count(count, INDICES_PER_PART))
        table = (ctypes.c_int64 * len(sizes))(*sizes)
        numbers = (8 * (STATUS_WORDS + made) + 63) & ~63
        arguments = {
            "per_part": INDICES_PER_PART,
            "count": count,
            "per_batch": count // max(batches, 1),
            "named": len(sizes),
            "sizes": ctypes.addressof(table),
            "indices": problem["indices"],
            "numbers": Scratch(numbers),
            "found": Scratch(8 * STATUS_WORDS),
            "made": made,
            "scratch": Scratch(),
        }
        self.steps = [Step(number_tuples, made, arguments), Step(report_indices, 1, arguments)]
        self.problem = replace(problem, operands={**problem.operands, "indices": Scratch(numbers, "int64")})
        self.numbers, self.end = numbers, numbers + 8 * count
        self.size = batches * math.prod(sizes)
        self.tables = (table,)
        self.explain = _wrong_in_tuple(problem, operator, sizes)


def _wrong_in_tuple(problem: Problem, operator: str, sizes: Sequence[int]) -> Explain:
    return lambda position, value: wrong_index(problem, operator, sizes[position % len(sizes)])(position, value)


def _tuples(problem: Problem, operator: str, shape: Shape) -> tuple[Numbered, int, int]:
    """The numbered slices, the elements of a slice, and how many slices are named."""
    batch, indices = problem.attributes["batch_dims"], problem.specs["indices"].shape
    behind = batch + indices[-1]
    count = math.prod(indices[:-1])
    numbered = Numbered(problem, operator, math.prod(shape[:batch]), shape[batch:behind], count)
    return numbered, math.prod(shape[behind:]), count


def gather_nd(problem: Problem) -> Program:
    numbered, post, count = _tuples(problem, "gather_nd", problem.specs["x"].shape)
    if post == 1:
        more, _ = along_axis.copy_steps(numbered.problem, along_axis.Lines((numbered.size,), (count,), 0), numbered.end)
    else:
        more = copy_steps(numbered.problem, 1, numbered.size, post, count)
    return Program(numbered.steps + more, numbered.end, numbered.explain, tables=numbered.tables)


def gather_nd_grad(problem: Problem) -> Program:
    return _summed(*_tuples(problem, "gather_nd_grad", problem.attributes["shape"]))


def _summed(numbered: Numbered, post: int, count: int) -> Program:
    """Numbers, then sums by destination: one by one if there are far more places, else place by place.

    Single elements are added where they go: sorting them first takes five times as long.
    """
    problem, size = numbered.problem, numbered.size
    more: list[Step] = []
    scratch = numbered.end
    if size * post:
        if size > FEW * count and count:
            more, scratch = sorted_sum_steps(problem, numbered.numbers, size, post, count)
        elif post == 1:
            more, scratch = along_axis.sum_steps(problem, along_axis.Lines((size,), (count,), 0), scratch)
        else:
            more, scratch = sum_steps(problem, 1, size, post, count, scratch)
    return Program(numbered.steps + more, scratch, numbered.explain, tables=numbered.tables)


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
    work: Callable[[Problem, along_axis.Lines, int], tuple[list[Step], int]],
) -> Program:
    steps, scratch = index_steps(problem, shape[axis])
    lines = along_axis.Lines(shape, problem.specs["indices"].shape, axis)
    more, scratch = work(problem, lines, scratch)
    return Program(steps + more, scratch, wrong_index(problem, operator, shape[axis]), tables=(lines.table,))


# --- ranges --------------------------------------------------------------------------------------------------------


def slice_grad(problem: Problem) -> Program:
    return strided.program(problem, slice_ranges(dict(problem.attributes)))
