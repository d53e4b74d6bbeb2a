"""Scratch memory taken piece by piece, each of whole vectors in the precision of the problem."""

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.native import vector_lanes
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.runtime.execute import STATUS_WORDS, Scratch
from opgrad.problem import Problem


class Pieces:
    """Scratch memory, taken piece by piece; every piece holds whole vectors of the problem's precision."""

    def __init__(self, problem: Problem):
        self.dtype = precision(problem)
        self.bytes = 8 * STATUS_WORDS

    def take(self, count: int, dtype: str | None = None) -> Scratch:
        """Memory for so many numbers, of the problem's precision unless a dtype is given."""
        start = (self.bytes + 63) & ~63
        found = dtype or self.dtype
        self.bytes = start + count * DTYPES[found].itemsize + 256
        return Scratch(start, found)


def whole_vectors(count: int, problem: Problem) -> int:
    """The count rounded up to whole vectors."""
    width = vector_lanes(precision(problem))
    return -(-count // width) * width
