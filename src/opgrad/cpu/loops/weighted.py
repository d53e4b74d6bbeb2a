"""Rows as weighted sums of others: tables tell for each axis which elements one is made of, and with which weights."""

from typing import NamedTuple

from opgrad.contract import Array
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, load_word
from opgrad.cpu.compiler.native import inline
from opgrad.cpu.loops.fill import write_zeros
from opgrad.cpu.loops.fold import CHUNK
from opgrad.cpu.loops.map import mapped


class Along(NamedTuple):
    """An axis: elements of the result, and of what it is made of; the tables, as addresses.

    Element i is made of sources[starts[i]:starts[i + 1]] with the weights at the same places.
    """

    size: int
    count: int
    starts: int
    sources: int
    weights: int


def along(size: int, count: int, pairs: tuple[Array, Array, Array], tables: list[Array]) -> Along:
    """What kernels are told of an axis; its tables are added to the others.

    pairs: elements of the result, the sources that they are made of, and the weights; each element's sources in order.
    """
    elements, sources, weights = pairs
    order = elements.argsort(kind="stable")
    starts = elements[order].searchsorted(range(size + 1))
    found = [starts.astype("int64"), sources[order].astype("int64"), weights[order].astype("float64")]
    tables += found
    return Along(size, count, *(each.ctypes.data for each in found))


_write_sum = mapped(lambda sums, x, factor: sums + x * factor)


@inline
def add_times(sums, x, n: int, factor) -> None:
    """sums[0:n] += x * factor"""
    _write_sum(sums, 0, n, 0, (sums, x), (factor,))


@inline
def add_rows(sums, x, plane: int, d: int, h: int, depth, height, row: int, begin: int, n: int, factor, chunk) -> None:
    """sums = n elements, from `begin` on, of the rows of x that (d, h) of a plane is made of, times their weights.

    row: the elements of a row of x. factor: of all weights.
    """
    end_h = load_word(height.starts, h + 1)
    write_zeros(sums, 0, n, 0)
    for a in range(load_word(depth.starts, d), load_word(depth.starts, d + 1)):
        outer = plane * depth.count + load_word(depth.sources, a)
        for b in range(load_word(height.starts, h), end_h, CHUNK):
            write_zeros(chunk, 0, n, 0)
            for c in range(b, min(b + CHUNK, end_h)):
                weight = load_f64(depth.weights, a) * load_f64(height.weights, c) * factor
                source = x + ((outer * height.count + load_word(height.sources, c)) * row + begin)
                add_times(chunk, source, n, v.number(sums, weight))
            add_times(sums, chunk, n, 1.0)
