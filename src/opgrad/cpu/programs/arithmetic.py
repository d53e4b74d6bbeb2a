"""The programs of sums and quotients of arrays that are broadcast against each other, and of their shapes."""

import math

from opgrad.contract import layout
from opgrad.contract.problem import Problem
from opgrad.contract.shapes import broadcast_axes, reduced_axes, repeated_axes
from opgrad.cpu.kernels import arithmetic as kernels
from opgrad.cpu.kernels.arithmetic import EACH, ONE_DIVIDEND, ONE_DIVISOR, SUM, VALUE, Broadcast, copy_words
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import operator, program
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, Tables, shared_out
from opgrad.cpu.programs.reduction import grouped, sum_steps
from opgrad.cpu.programs.workspace import Workspace


def reduce_sum_training(problem: Problem) -> Program:
    shape, of = problem.specs["x"].shape, problem.attributes
    summed = reduced_axes(shape, of["axes"], of["noop_with_empty_axes"])
    workspace = Workspace(precision(problem))
    return Program(sum_steps(grouped(shape, summed), problem["x"], problem["y"], workspace), workspace)


def div_grad(problem: Problem) -> Program:
    a, b, shape = (problem.specs[name].shape for name in ("a", "b", "dy"))
    workspace, size = Workspace(precision(problem)), math.prod(shape)
    strides = (layout.broadcast_strides(each, shape) for each in (a, b))
    (n, a_step, b_step), *loops = layout.steps(shape, range(len(shape)), *strides)[::-1]
    tables = Tables()
    a_summed, b_summed = (frozenset(repeated_axes(each, shape)) for each in (a, b))
    kernel = EACH if a_step and b_step else ONE_DIVISOR if a_step else ONE_DIVIDEND
    full_a = workspace.shared(size) if a_summed else problem["da"]
    full_b = workspace.shared(size) if b_summed else problem["db"]
    steps = []
    if size:
        blocks = partition.count(n, BLOCK)
        units = size // n * blocks
        arguments = {name: problem[name] for name in ("dy", "a", "b")} | {"da": full_a, "db": full_b}
        arguments |= {"blocks": blocks, "n": n, "broadcast": Broadcast(len(loops), tables.add(loops))}
        arguments["stream"] = partition.streams(problem.bytes)
        steps.append(shared_out(kernel, units, problem.bytes / units, arguments))
    for summed, terms, result in ((a_summed, full_a, "da"), (b_summed, full_b, "db")):
        if summed:
            steps += sum_steps(grouped(shape, summed), terms, problem[result], workspace)
    return Program(steps, workspace, tables=tables)


def broadcast_gradient_args(problem: Problem) -> Program:
    found = broadcast_axes(problem.attributes["a_shape"], problem.attributes["b_shape"])
    steps, tables = [], Tables()
    for name, axes in zip(("a_axes", "b_axes"), found, strict=True):
        if axes:
            arguments = {"source": tables.add(axes), "count": len(axes), "target": problem[name]}
            steps.append(Step(copy_words, 1, arguments))
    return Program(steps, tables=tables)


zero_gradient = operator(kernels.zero_gradient, "y", "x")


def accumulate(problem: Problem) -> Program:
    if problem.attributes["update"]:
        return program(problem, SUM, "sum", "buffer", "value")
    return program(problem, VALUE, "sum", "buffer")
