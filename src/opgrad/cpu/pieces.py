"""Scratch memory taken piece by piece, each of whole vectors in the precision of the problem."""

from opgrad.cpu.execute import STATUS_WORDS, Scratch
from opgrad.cpu.loops import precision
from opgrad.cpu.native import vector_lanes
from opgrad.problem import Problem


class Pieces:
    """Scratch memory, taken piece by piece; every piece holds whole vectors of the problem's precision."""

    def __init__(self, problem: Problem):
        self.dtype = precision(problem)
        self.bytes = 8 * STATUS_WORDS

    def take(self, count: int) -> Scratch:
        start = (self.bytes + 63) & ~63
        self.bytes = start + count * (8 if self.dtype == "float64" else 4) + 256
        return Scratch(start, self.dtype)


def whole_vectors(count: int, problem: Problem) -> int:
    """The count rounded up to whole vectors."""
    width = vector_lanes(precision(problem))
    return -(-count // width) * width
