"""Rows that are weighted sums of other rows. For each axis, tables hold the sources of an element and their weights."""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.words import load_f64, load_word
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import mapped, write_times, write_zeros


class Along(NamedTuple):
    """An axis: how many elements the result and the source have along it, and the addresses of its tables.

    Element i is the sum over sources[starts[i]:starts[i + 1]], with the weights at the same places.
    """

    size: int
    count: int
    starts: int
    sources: int
    weights: int


_write_sum = mapped(lambda sums, x, factor: sums + x * factor)


@inline
def add_times(sums, x, n: int, factor) -> None:
    """sums[0:n] += x * factor"""
    _write_sum(sums, 0, n, 0, (sums, x), (factor,))


@inline
def add_rows(sums, x, plane: int, d: int, h: int, depth, height, row: int, begin: int, n: int, factor, chunk) -> None:
    """sums[0:n] = the weighted sum of the rows of x that are the sources of row (d, h) of the result.

    Of each row of x, only the n elements from `begin` on are read. plane: the number of the plane, which x and the
    result share. row: how many elements a row of x has. factor: a factor of all weights. chunk: memory for n elements,
    in which CHUNK rows are summed before they are added to `sums`.
    """
    begun, end_h = 0, load_word(height.starts, h + 1)
    for a in range(load_word(depth.starts, d), load_word(depth.starts, d + 1)):
        outer = plane * depth.count + load_word(depth.sources, a)
        for b in range(load_word(height.starts, h), end_h, CHUNK):
            target = chunk if begun else sums
            for c in range(b, min(b + CHUNK, end_h)):
                weight = v.number(sums, load_f64(depth.weights, a) * load_f64(height.weights, c) * factor)
                source = x + ((outer * height.count + load_word(height.sources, c)) * row + begin)
                if c == b:
                    write_times(target, 0, n, 0, (source,), (weight,))
                else:
                    add_times(target, source, n, weight)
            if begun:
                add_times(sums, chunk, n, 1.0)
            begun = 1
    if not begun:
        write_zeros(sums, 0, n, 0)
