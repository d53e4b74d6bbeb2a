"""Small operators of training graphs, element by element."""

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.loops.elements import elementwise, scaling
from opgrad.cpu.kernels.loops.map import times
from opgrad.cpu.programs.elements import program
from opgrad.cpu.programs.program import Program

SUM, VALUE = elementwise(lambda buffer, value, alpha: buffer + value), elementwise(lambda value, alpha: value)
TIMES, DIVIDED = scaling(times), scaling(lambda x, factor: x / factor)


def in_place_accumulator(problem: Problem) -> Program:
    if problem.attributes["overwrite"]:
        return program(problem, VALUE, "sum", "value")
    return program(problem, SUM, "sum", "buffer", "value")


def scale(problem: Problem) -> Program:
    kernel = DIVIDED if problem.attributes["scale_down"] else TIMES
    return program(problem, kernel, "y", "x", alpha=problem["factor"])
