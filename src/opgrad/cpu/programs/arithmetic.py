"""The programs of sums and quotients of arrays that are broadcast against each other, and of their shapes."""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from opgrad.contract import arrangement
from opgrad.contract.arrangement import broadcast_axes, reduced_axes, repeated_axes
from opgrad.contract.signature import Operand, Problem
from opgrad.cpu.compiler.decorators import vector_lanes
from opgrad.cpu.compiler.parameters import Strips
from opgrad.cpu.kernels import arithmetic as kernels
from opgrad.cpu.kernels.loops.fold import BLOCK, DEEP, WIDE, sum_columns, sum_integers, sum_rows
from opgrad.cpu.programs.building import ProgramSteps, elementwise_operator, elementwise_program
from opgrad.cpu.runtime.plan import Program, ceil_div


def reduce_sum_training(problem: Problem) -> Program:
    steps, shape, of = ProgramSteps(problem), problem.specs["x"].shape, problem.attributes
    summed = reduced_axes(shape, of["axes"], of["noop_with_empty_axes"])
    add_sums(steps, grouped(shape, summed), problem["x"], problem["y"])
    return steps


def div_grad(problem: Problem) -> Program:
    a, b, shape = (problem.specs[name].shape for name in ("a", "b", "dy"))
    steps, size = ProgramSteps(problem), math.prod(shape)
    strides = (arrangement.broadcast_strides(each, shape) for each in (a, b))
    (n, a_step, b_step), *loops = arrangement.steps(shape, range(len(shape)), *strides)[::-1]
    a_summed, b_summed = (frozenset(repeated_axes(each, shape)) for each in (a, b))
    kernel = kernels.EACH if a_step and b_step else kernels.ONE_DIVISOR if a_step else kernels.ONE_DIVIDEND
    full_a = steps.workspace.shared(size) if a_summed else problem["da"]
    full_b = steps.workspace.shared(size) if b_summed else problem["db"]
    if size:
        blocks, outside = ceil_div(n, BLOCK), {"loops": len(loops), "table": steps.tables.add(loops)}
        steps.add(kernel, size // n * blocks, blocks=blocks, n=n, **outside, da=full_a, db=full_b)
    for summed, terms, result in ((a_summed, full_a, "da"), (b_summed, full_b, "db")):
        if summed:
            add_sums(steps, grouped(shape, summed), terms, problem[result])
    return steps


def broadcast_gradient_args(problem: Problem) -> Program:
    steps, found = ProgramSteps(problem), broadcast_axes(problem.attributes["a_shape"], problem.attributes["b_shape"])
    for name, axes in zip(("a_axes", "b_axes"), found, strict=True):
        if axes:
            steps.add_parts(kernels.copy_words, source=steps.tables.add(axes), count=len(axes), target=problem[name])
    return steps


zero_gradient = elementwise_operator(kernels.zero_gradient, "y", "x")


def accumulate(problem: Problem) -> Program:
    if problem.attributes["update"]:
        return elementwise_program(problem, kernels.SUM, "sum", "buffer", "value")
    return elementwise_program(problem, kernels.VALUE, "sum", "buffer")


def in_place_accumulator(problem: Problem) -> Program:
    if problem.attributes["overwrite"]:
        return elementwise_program(problem, kernels.VALUE, "sum", "value")
    return elementwise_program(problem, kernels.SUM, "sum", "buffer", "value")


def scale(problem: Problem) -> Program:
    kernel = kernels.DIVIDED if problem.attributes["scale_down"] else kernels.TIMES
    return elementwise_program(problem, kernel, "y", "x", alpha=problem["factor"])


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
