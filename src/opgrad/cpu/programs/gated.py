"""The programs of gated linear units and their gradients."""

import math

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.gated import BLOCK, GRADIENTS, VALUES
from opgrad.cpu.programs import elements, partition
from opgrad.cpu.programs.program import Program, shared_out


def gated_linear_unit(problem: Problem) -> Program:
    return elements.program(problem, VALUES[problem.attributes["activation"]], "y", "gate", "up")


def gated_linear_unit_grad(problem: Problem) -> Program:
    n = math.prod(problem.specs["dy"].shape)
    if not n:
        return Program(())
    units = partition.count(n, BLOCK)
    pointers = {name: problem[name] for name in ("dy", "gate", "up", "dgate", "dup")}
    kernel = GRADIENTS[problem.attributes["activation"]]
    return Program([shared_out(kernel, units, problem.bytes / units, {"n": n, **pointers})])
