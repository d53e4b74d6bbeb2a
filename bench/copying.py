"""How fast memory is: a copy with opgrad's own vectors and threads, of as many bytes as a cell moves."""

from functools import lru_cache

import numpy as np

from opgrad.cli.examples.arguments import aligned
from opgrad.contract import DTYPES
from opgrad.contract.signature import Operand, Problem
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.map import elementwise
from opgrad.cpu.programs.elements import program
from opgrad.cpu.runtime.plan import run_on, words
from opgrad.cpu.runtime.threads import threads_for

MOST_COPIED = 1 << 28  # bytes moved: beyond the cache, more of them are not slower


@inline
def _same(x: Vector, alpha: float) -> Vector:
    return x


COPY = elementwise(_same)


class Copy:
    """A call that copies: half of `traffic` bytes are read, half written; `bytes` is what that comes to.

    Like every kernel, it writes past the cache when the data exceed it.
    """

    def __init__(self, traffic: int):
        n = max(1, traffic // 8)
        self.source, self.target = (aligned((n,), DTYPES["float32"]) for _ in range(2))
        self.source.fill(1.0)
        self.bytes = self.source.nbytes + self.target.nbytes
        x, y = Operand(0, "float32"), Operand(1, "float32")
        operands = {"x": x, "y": y}
        problem = Problem(1, n, 1, operands, attributes={}, specs={}, orders={}, bytes=self.bytes)
        copying = program(problem, COPY, "y", "x")
        self._parts = max(step.parts for step in copying.steps)
        self._plan = np.array(words(copying), np.int64)
        self._operands = np.array([self.source.ctypes.data, self.target.ctypes.data])
        self._addresses = self._plan.ctypes.data, self._operands.ctypes.data

    def __call__(self) -> None:
        run_on(*self._addresses, threads_for())


@lru_cache(maxsize=8)
def copier(traffic: int) -> Copy:
    """The copy for a cell that moves so many bytes; the cells with the largest arrays share one."""
    return Copy(traffic)
