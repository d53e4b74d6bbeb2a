"""Filling with zeros."""

from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import Pointer, Vector, like
from opgrad.cpu.loops.rows import map_one
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Step
from opgrad.problem import Operand


@inline
def _zero(x: Vector, s: float, t: float, i: Vector) -> Vector:
    return like(x, 0.0)


write_zeros = map_one(_zero)


@kernel
def fill_zeros(part, per_part, n, y: Pointer, stream):
    """y[0:n] = 0"""
    begin, end = part * per_part, min((part + 1) * per_part, n)
    write_zeros(y, begin, end, stream, y, 0.0, 0.0)


def zero_step(y: Operand, n: int, size: int) -> Step:
    """The step that writes n zeros, `size` bytes in all."""
    per = partition.per_part(n, size / n)
    return Step(
        fill_zeros, partition.count(n, per), {"per_part": per, "n": n, "y": y, "stream": partition.streams(size)}
    )
