"""The programs of sums and quotients of arrays that are broadcast against each other, and of their shapes."""

import math

from opgrad.contract import arrangement
from opgrad.contract.arrangement import broadcast_axes, reduced_axes, repeated_axes
from opgrad.contract.signature import Problem
from opgrad.cpu.kernels import arithmetic as kernels
from opgrad.cpu.kernels.arithmetic import EACH, ONE_DIVIDEND, ONE_DIVISOR, SUM, VALUE, copy_words
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.elements import operator, program
from opgrad.cpu.programs.reduction import add_sums, grouped
from opgrad.cpu.runtime.program import Program, ceil_div


def reduce_sum_training(problem: Problem) -> Program:
    steps, shape, of = ProgramSteps(problem), problem.specs["x"].shape, problem.attributes
    summed = reduced_axes(shape, of["axes"], of["noop_with_empty_axes"])
    add_sums(steps, grouped(shape, summed), problem["x"], problem["y"])
    return steps.program()


def div_grad(problem: Problem) -> Program:
    a, b, shape = (problem.specs[name].shape for name in ("a", "b", "dy"))
    steps, size = ProgramSteps(problem), math.prod(shape)
    strides = (arrangement.broadcast_strides(each, shape) for each in (a, b))
    (n, a_step, b_step), *loops = arrangement.steps(shape, range(len(shape)), *strides)[::-1]
    a_summed, b_summed = (frozenset(repeated_axes(each, shape)) for each in (a, b))
    kernel = EACH if a_step and b_step else ONE_DIVISOR if a_step else ONE_DIVIDEND
    full_a = steps.workspace.shared(size) if a_summed else problem["da"]
    full_b = steps.workspace.shared(size) if b_summed else problem["db"]
    if size:
        blocks, outside = ceil_div(n, BLOCK), {"loops": len(loops), "table": steps.tables.add(loops)}
        steps.add(kernel, size // n * blocks, blocks=blocks, n=n, **outside, da=full_a, db=full_b)
    for summed, terms, result in ((a_summed, full_a, "da"), (b_summed, full_b, "db")):
        if summed:
            add_sums(steps, grouped(shape, summed), terms, problem[result])
    return steps.program()


def broadcast_gradient_args(problem: Problem) -> Program:
    steps, found = ProgramSteps(problem), broadcast_axes(problem.attributes["a_shape"], problem.attributes["b_shape"])
    for name, axes in zip(("a_axes", "b_axes"), found, strict=True):
        if axes:
            steps.add_parts(copy_words, source=steps.tables.add(axes), count=len(axes), target=problem[name])
    return steps.program()


zero_gradient = operator(kernels.zero_gradient, "y", "x")


def accumulate(problem: Problem) -> Program:
    if problem.attributes["update"]:
        return program(problem, SUM, "sum", "buffer", "value")
    return program(problem, VALUE, "sum", "buffer")
