"""The programs of dropout and of gradients that pass through a mask."""

import math

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.dropout import BLOCK, GRADIENT, WHOLE_GRADIENT, drop, keep_all
from opgrad.cpu.programs.building import ProgramSteps, elementwise_program
from opgrad.cpu.runtime.plan import Program, ceil_div
from opgrad.ops.reference.dropout import keep_threshold, kept_scale


def dropout(problem: Problem) -> Program:
    steps, spec, ratio = ProgramSteps(problem), problem.specs["x"], problem.attributes["ratio"]
    n, unit_bytes = math.prod(spec.shape), (2 * spec.dtype.itemsize + 1) * BLOCK
    units = ceil_div(n, BLOCK)
    if problem.attributes["training_mode"] and ratio != 0.0:
        steps.add(drop, units, unit_bytes, n=n, threshold=keep_threshold(ratio), scale=kept_scale(ratio))
    else:
        steps.add(keep_all, units, unit_bytes, n=n)
    return steps


def dropout_grad(problem: Problem) -> Program:
    ratio = problem.attributes["ratio"]
    if not problem.attributes["training_mode"] or ratio == 0.0:
        return elementwise_program(problem, WHOLE_GRADIENT, "dx", "dy")
    return elementwise_program(problem, GRADIENT, "dx", "dy", "mask", alpha=kept_scale(ratio))


def fake_quant_grad(problem: Problem) -> Program:
    return elementwise_program(problem, GRADIENT, "dx", "dy", "mask", alpha=1.0)
