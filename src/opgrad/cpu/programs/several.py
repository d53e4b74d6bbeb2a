"""The programs of operators on any number of arrays: a step for each of them, shared out to threads like any other."""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

from opgrad.contract.signature import Operand, Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.kernels import several as kernels
from opgrad.cpu.kernels.arithmetic import copy_words
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.plan import Program, ceil_div, streams

# Bytes of rows that are written past the cache: the incomplete lines at both ends of a shorter one would cost more than
# reading what is overwritten.
SHORTEST_PAST: Final = 512


def _copy(steps: ProgramSteps, rows: int, size: int, x: kernels.ByteRows, y: kernels.ByteRows) -> None:
    """Add the step that copies so many rows of so many bytes, past the cache where they are long enough."""
    blocks, unit_bytes = ceil_div(size, kernels.COPY_BYTES), 2 * min(size, kernels.COPY_BYTES)
    past = size >= SHORTEST_PAST and size % 4 == 0 and streams(steps.problem.bytes)
    steps.add(kernels.copy_rows, rows * blocks, unit_bytes, blocks=blocks, size=size, x=x, y=y, stream=past)


def _byte_rows(problem: Problem, name: str, offset: int, step: int) -> kernels.ByteRows:
    operand: Any = Operand(problem[name].number, "float32")
    return kernels.ByteRows(operand, offset, step)


def _concatenated(
    problem: Problem, whole: str, parameter: str
) -> Iterator[tuple[int, int, kernels.ByteRows, kernels.ByteRows]]:
    """For each array of the parameter: the number of its rows, their bytes, the rows, and the rows in the whole."""
    axis, spec = problem.attributes["axis"].start, problem.specs[whole]
    unit = math.prod(spec.shape[axis + 1 :]) * spec.dtype.itemsize  # bytes of a slice along the axis
    rows, row = math.prod(spec.shape[:axis]), spec.shape[axis] * unit
    names = problem.listed(parameter)
    sizes = [problem.specs[name].shape[axis] * unit for name in names]
    for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
        yield rows, size, _byte_rows(problem, name, 0, size), _byte_rows(problem, whole, end - size, row)


def concat_training(problem: Problem) -> Program:
    steps = ProgramSteps(problem)
    for rows, size, alone, inside in _concatenated(problem, "y", "arrays"):
        _copy(steps, rows, size, alone, inside)
    axis = problem.attributes["axis"].start
    lengths = [problem.specs[name].shape[axis] for name in problem.listed("arrays")]
    steps.add_parts(copy_words, source=steps.tables.add(lengths), count=len(lengths), target=problem["lengths"])
    return steps


def split_training(problem: Problem) -> Program:
    results, expected = len(problem.listed("pieces")), len(problem.attributes["split"])
    if results != expected:
        raise ValueError(f"split_training: split has {expected} entries, expected {results}, one for each result")
    steps = ProgramSteps(problem)
    for rows, size, alone, inside in _concatenated(problem, "x", "pieces"):
        _copy(steps, rows, size, inside, alone)
    return steps


def pass_through(problem: Problem) -> Program:
    steps = ProgramSteps(problem)
    for name, copy in zip(problem.listed("arrays"), problem.listed("copies"), strict=True):
        size = _elements(problem, name) * problem.specs[name].dtype.itemsize
        _copy(steps, 1, size, _byte_rows(problem, name, 0, 0), _byte_rows(problem, copy, 0, 0))
    return steps


def _elements(problem: Problem, name: str) -> int:
    return math.prod(problem.specs[name].shape)


def _reduction(problem: Problem, each: Kernel, last: Kernel, result: str, word: str, **arguments: Any) -> Program:
    """A step for each array, whose parts write partial results side by side, and a step that combines all of them."""
    steps, names = ProgramSteps(problem), problem.listed("arrays")
    sizes = [_elements(problem, name) for name in names]
    parts = [ceil_div(size, BLOCK) for size in sizes]
    partial = steps.workspace.shared(sum(parts), word)
    for name, size, count, end in zip(names, sizes, parts, accumulate(parts), strict=True):
        steps.add_parts(each, size, BLOCK, x=problem[name], partial=partial, first=end - count, **arguments)
    steps.add_parts(last, count=sum(parts), partial=partial, y=problem[result])
    return steps


def is_all_finite(problem: Problem) -> Program:
    infinities, nans = not problem.attributes["isnan_only"], not problem.attributes["isinf_only"]
    if not infinities and not nans:
        raise ValueError("is_all_finite: isinf_only and isnan_only are both set, expected at most one")
    wanted = {"infinities": infinities, "nans": nans}
    return _reduction(problem, kernels.find_nonfinite, kernels.none_found, "finite", "int64", **wanted)


def reduce_all_l2(problem: Problem) -> Program:
    return _reduction(problem, kernels.sum_squares, kernels.root_of_sum, "norm", "float64")


def mixed_precision_scale(problem: Problem) -> Program:
    steps, names, fused = ProgramSteps(problem), problem.listed("arrays"), problem.attributes["fuse_outputs"]
    sizes = [_elements(problem, name) for name in names]
    for i, (name, size, end) in enumerate(zip(names, sizes, accumulate(sizes), strict=True)):
        scaled, offset = (problem["scaled[0]"], end - size) if fused else (problem[f"scaled[{i}]"], 0)
        given = {"x": problem[name], "y": scaled, "factor": problem["scale"]}
        steps.add_parts(kernels.scale_elements, size, BLOCK, offset=offset, **given)
    return steps
