"""The programs of sums and scaled copies of arrays, element by element."""

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.arithmetic import DIVIDED, SUM, TIMES, VALUE
from opgrad.cpu.programs.elements import program
from opgrad.cpu.runtime.program import Program


def in_place_accumulator(problem: Problem) -> Program:
    if problem.attributes["overwrite"]:
        return program(problem, VALUE, "sum", "value")
    return program(problem, SUM, "sum", "buffer", "value")


def scale(problem: Problem) -> Program:
    kernel = DIVIDED if problem.attributes["scale_down"] else TIMES
    return program(problem, kernel, "y", "x", alpha=problem["factor"])
