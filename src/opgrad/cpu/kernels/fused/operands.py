"""The operands of fused kernels: rows or columns of any array whose outer axes make at most two loops."""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.parameters import Columns, Pointer, Private, Rows
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.fused.chain import ALONG, SAME, Places
from opgrad.cpu.kernels.loops.map import get
from opgrad.cpu.kernels.loops.rows import AHEAD
from opgrad.cpu.kernels.numerics.philox import keep_run


class Source(NamedTuple):
    """An array in which outer index o begins o // period * far + o % period * near elements behind `data`.

    step: along n.
    """

    data: Pointer
    period: int
    far: int
    near: int
    step: int


class RowResults(NamedTuple):
    """The results besides y that a forward kernel writes as rows; each may be missing."""

    saved: Rows
    mask: Rows
    stats: Rows


class ColumnResults(NamedTuple):
    """The results besides y that a forward kernel writes as columns; stats has one number for each column."""

    saved: Columns
    mask: Columns
    stats: Pointer


class Switches(NamedTuple):
    """Whether the softmax of a row of -inf is 0, and whether results are written past the cache."""

    inf_as_zero: int
    stream: int


class RowMemory(NamedTuple):
    """A part's private memory: values of this row and the one before, dropout's decisions, write-combining buffer."""

    e: Private
    done: Private
    kept: Private
    buffer: Private


class RowCut(NamedTuple):
    """How rows are cut into blocks: the number of blocks of a row, and the length of a row."""

    blocks: int
    n: int


class DropoutState(NamedTuple):
    """The array with seed and offset, and the threshold: an element is dropped if its random word is not above it."""

    state: Pointer
    threshold: int


class Line(NamedTuple):
    """An operand in a strip of columns: its first element there, and its stride along n in elements."""

    data: Pointer
    step: int


@inline
def start(source: Source, outer: int):
    """The first element of an operand at this outer index."""
    far = outer // source.period if outer >= source.period else 0
    return source.data + (far * source.far + (outer - far * source.period) * source.near)


@inline
def keep_elements(kept, count: int, index: int, dropout: DropoutState) -> None:
    """Write dropout's decisions for `count` elements from `index` on: 1 for an element that is kept, else 0."""
    keep_run(kept, 0, count, index, 1, v.load_one(dropout.state, 0), v.load_one(dropout.state, 1), dropout.threshold)


@inline
def keep_strip(kept, n: int, index: int, step: int, dropout: DropoutState) -> None:
    """Write dropout's decisions down a strip of columns, whose lines are `step` elements apart."""
    for i in range(n):
        keep_elements(kept.data + i * kept.step, kept.step, index + i * step, dropout)


without_dropout = inline(lambda *arguments: None)  # in place of `keep_elements` or `keep_strip`

# --- rows: an operand is a pointer, or a vector of the row's number ---------------------------------------------------


@inline
def _in_row(s: Vector, row, i: int, whole: bool, mask) -> Vector:
    if whole:
        v.prefetch(row, i + AHEAD)
    return get(row, i, whole, mask)


IN_ROWS = Places(_in_row, inline(lambda s, number, i, whole, mask: number))
OF_ROW = {
    ALONG: inline(lambda like, source, row: start(source, row)),
    SAME: inline(lambda like, source, row: v.full(like, v.load_one(start(source, row), 0))),
}
OF_PLAIN_ROW = {ALONG: inline(lambda like, rows, row: rows.data + row * rows.step)}
OF_BLOCK = {  # at a row, and an element of it
    ALONG: inline(lambda like, source, at: start(source, at[0]) + at[1]),
    SAME: inline(lambda like, source, at: v.full(like, v.load_one(start(source, at[0]), 0))),
}


# --- columns ----------------------------------------------------------------------------------------------------------

IN_COLUMNS = Places(
    inline(lambda s, line, i, whole, mask: get(line.data, i * line.step, whole, mask)),
    inline(lambda s, line, i, whole, mask: v.like(s, v.load_one(line.data, i * line.step))),
)
OF_PLAIN_STRIP = {ALONG: inline(lambda like, x, strip: Line(x.data + (strip[0] * x.outer + strip[1]), x.step))}
OF_STRIP = {
    ALONG: inline(lambda like, source, strip: Line(start(source, strip[0]) + strip[1], source.step)),
    SAME: inline(lambda like, source, strip: Line(start(source, strip[0]), source.step)),
}
