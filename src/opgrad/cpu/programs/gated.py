"""The programs of gated linear units and their gradients."""

import math

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.gated import BLOCK, GRADIENTS, VALUES
from opgrad.cpu.programs import elements
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import Program, ceil_div


def gated_linear_unit(problem: Problem) -> Program:
    return elements.program(problem, VALUES[problem.attributes["activation"]], "y", "gate", "up")


def gated_linear_unit_grad(problem: Problem) -> Program:
    steps, n = ProgramSteps(problem), math.prod(problem.specs["dy"].shape)
    steps.add(GRADIENTS[problem.attributes["activation"]], ceil_div(n, BLOCK), n=n)
    return steps.program()
