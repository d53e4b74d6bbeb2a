"""Filling with zeros."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.loops.map import mapped

_write = mapped(lambda x: v.like(x, 0.0))


@inline
def write_zeros(out, begin: int, end: int, stream: int) -> None:
    """out[begin:end] = 0"""
    _write(out, begin, end, stream, (out,), ())


@inline
def clear(out, n: int) -> None:
    """out[0:n] = 0, in whole vectors: up to a vector more may be written."""
    for i in range(0, n, v.lanes(out)):
        v.store(out, i, v.full(out, 0.0))


@kernel
def fill_zeros(elements: Units, y: Pointer, stream):
    write_zeros(y, elements.start, elements.stop, stream)
