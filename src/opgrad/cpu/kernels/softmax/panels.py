"""Softmax and log-softmax of columns whose elements lie a large power of two apart: panels of neighbouring strips.

Lines at such a distance share a few sets of a cache. Those of a column of 1,000 do not stay in it, so that the kernels
in `columns` fetch each line again for every pass and every strip. Here a panel is copied into a buffer row by row, its
strips are reduced there while the next panel is prefetched, and it is written row by row. The results have the bits of
those in `columns`.
"""

from typing import Final

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Private, Strips, Units
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.columns import Line, Strip
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY
from opgrad.cpu.kernels.softmax.reductions import of_columns

WIDTH: Final = 64  # columns of a panel: rows of 128 to 512 bytes
KEPT: Final = 2  # vectors that are kept for each strip: its largest elements, and then the numbers of its results


@inline
def _lanes_in(e, inner: int, j: int):
    """Whether all columns from j on that a vector holds exist, and the mask of those that do."""
    w = v.lanes(e)
    return j >= 0 and j + w <= inner, v.first(e, inner - j) ^ v.first(e, -j)


def forward_panels(operator: str) -> Kernel:
    reduction = of_columns(operator)
    add_up, subtracted = reduction.loop(loops.nothing), reduction.subtracted
    numbers_of, result = reduction.numbers, reduction.result

    @inline
    def copy(x, x_n: int, n: int, j: int, inner: int, panel, kept) -> None:
        w = v.lanes(panel)
        for s in range(0, WIDTH, w):
            v.store(kept, KEPT * s, v.full(panel, MINUS_INFINITY))
        for i in range(n):
            for s in range(0, WIDTH, w):
                whole, mask = _lanes_in(panel, inner, j + s)
                value = get(x, i * x_n + s, whole, mask)
                v.store(panel, i * WIDTH + s, value)
                v.store(kept, KEPT * s, v.maximum(value, v.load(kept, KEPT * s)))

    @inline
    def reduce(x, x_n: int, n: int, panel, kept) -> None:
        w = v.lanes(panel)
        for s in range(0, WIDTH, w):
            strip, largest = Strip(panel + s, WIDTH, True, v.first(panel, w)), v.load(kept, KEPT * s)
            m, ahead = subtracted(x, largest), Line(x + (WIDTH + s), x_n)
            sums = add_up(x, strip, n, m, panel + s, WIDTH, ahead, 0)
            first, second = numbers_of(x, sums, largest, m, 0)
            v.store(kept, KEPT * s, first)
            v.store(kept, KEPT * s + w, second)

    @inline
    def write(y, y_n: int, n: int, j: int, inner: int, panel, kept, fine, past: int) -> None:
        w = v.lanes(panel)
        for i in range(n):
            for s in range(0, WIDTH, w):
                whole, mask = _lanes_in(panel, inner, j + s)
                numbers = v.load(kept, KEPT * s), v.load(kept, KEPT * s + w)
                put(y, i * y_n + s, result(v.load(panel, i * WIDTH + s), numbers, fine), whole, mask, past)

    @kernel
    def by_panels(units: Units, strips: Strips, n, x: Columns, y: Columns, panel: Private, kept: Private, stream):
        for unit in units:
            o, j, _, _ = loops.aligned_strip(unit, strips, y, y, WIDTH, 1)
            if j < strips.inner:
                xs, ys = x.data + (o * x.outer + j), y.data + (o * y.outer + j)
                copy(xs, x.step, n, j, strips.inner, panel, kept)
                reduce(xs, x.step, n, panel, kept)
                past = loops.streams_columns(ys, y.step, stream)
                write(ys, y.step, n, j, strips.inner, panel, kept, v.is_fine(xs), past)

    return by_panels
