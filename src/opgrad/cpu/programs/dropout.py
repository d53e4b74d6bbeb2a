"""The programs of dropout and its gradient."""

import math

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.dropout import BLOCK, GRADIENT, WHOLE_GRADIENT, drop, keep_all
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import program
from opgrad.cpu.programs.program import Program, shared_out
from opgrad.random import keep_threshold, kept_scale


def dropout(problem: Problem) -> Program:
    n = math.prod(problem.specs["x"].shape)
    if not n:
        return Program(())
    ratio, trains = problem.attributes["ratio"], problem.attributes["training_mode"]
    unit_bytes = (2 * DTYPES[problem["x"].dtype].itemsize + 1) * BLOCK
    arguments = {name: problem[name] for name in ("x", "seed", "y", "mask")}
    arguments |= {"n": n, "stream": partition.streams(problem.bytes)}
    keeps_all = not trains or ratio == 0.0
    if not keeps_all:
        arguments |= {"threshold": keep_threshold(ratio), "scale": kept_scale(ratio)}
    return Program([shared_out(keep_all if keeps_all else drop, partition.count(n, BLOCK), unit_bytes, arguments)])


def dropout_grad(problem: Problem) -> Program:
    ratio = problem.attributes["ratio"]
    if not problem.attributes["training_mode"] or ratio == 0.0:
        return program(problem, WHOLE_GRADIENT, "dx", "dy")
    return program(problem, GRADIENT, "dx", "dy", "mask", alpha=kept_scale(ratio))
