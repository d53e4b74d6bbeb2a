"""The operands of fused kernels: where they lie, and how each layout reads them."""

from typing import NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline
from opgrad.cpu.compiler.parameters import Columns, Pointer, Private, Rows
from opgrad.cpu.compiler.words import load_word
from opgrad.cpu.kernels.dropout import keep_run
from opgrad.cpu.kernels.fused.chain import ALONG, SAME, Places
from opgrad.cpu.kernels.loops.columns import Line
from opgrad.cpu.kernels.loops.map import get, mapped, put
from opgrad.cpu.kernels.loops.rows import AHEAD

# Words of a table: an operand's stride along n, the number of its outer loops, and then two words for each loop, the
# innermost first: its size, and its stride. Strides count elements.
STEP, LOOPS, FIRST_LOOP = 0, 1, 2
ALL_ARE_KEPT = -1  # in place of dropout's threshold


class Source(NamedTuple):
    """An array of the call: its first element, and the address of the table that tells where the others lie."""

    data: Pointer
    table: int


class RowResults(NamedTuple):
    """The results besides y that a forward kernel writes as rows; each may be missing."""

    saved: Rows
    mask: Rows
    stats: Rows


class ColumnResults(NamedTuple):
    """The results besides y that a forward kernel writes as columns; stats has one number for each column."""

    saved: Columns
    mask: Columns
    stats: Rows


class Memory(NamedTuple):
    """A part's private memory: values of this row or strip and of the one before, dropout's decisions, and the buffer
    in which short rows are put together.
    """

    e: Private
    done: Private
    kept: Private
    buffer: Private


class DropoutState(NamedTuple):
    """The array with seed and offset, and the threshold: an element is dropped if its random word is not above it."""

    state: Pointer
    threshold: int


@inline
def start(source: Source, outer: int):
    """The first element of an operand at this outer index."""
    place, rest, loop = 0, outer, FIRST_LOOP
    for _ in range(load_word(source.table, LOOPS) - 1):
        size = load_word(source.table, loop)
        above = rest // size
        place += (rest - above * size) * load_word(source.table, loop + 1)
        rest, loop = above, loop + 2
    return source.data + (place + rest * load_word(source.table, loop + 1))


_write_ones = mapped(lambda kept: v.like(kept, 1.0))


@inline
def keep_elements(kept, count: int, index: int, dropout: DropoutState) -> None:
    """Write dropout's decisions for `count` elements from `index` on: 1 for an element that is kept, else 0."""
    if dropout.threshold == ALL_ARE_KEPT:
        _write_ones(kept, 0, count, 0, (kept,), ())
    else:
        seed, offset = v.load_one(dropout.state, 0), v.load_one(dropout.state, 1)
        keep_run(kept, count, index, seed, offset, dropout.threshold)


@inline
def keep_strip(kept, n: int, index: int, step: int, dropout: DropoutState) -> None:
    """Write dropout's decisions down a strip of columns, whose lines are `step` elements apart."""
    w = v.lanes(kept)
    for i in range(n):
        keep_elements(kept + i * w, w, index + i * step, dropout)


do_nothing = inline(lambda *arguments: None)  # in place of a function whose work a form has not

# --- rows, and blocks of rows: an operand is a pointer, or a vector of the row's number -------------------------------


@inline
def _in_row(row, i: int, whole: bool, mask):
    if whole:
        v.prefetch(row, i + AHEAD)
    return get(row, i, whole, mask)


ROWS = Places(  # at: a row, and an element of it
    {
        ALONG: inline(lambda source, at: start(source, at[0]) + at[1]),
        SAME: inline(lambda source, at: v.full(source.data, v.load_one(start(source, at[0]), 0))),
    },
    _in_row,
    inline(lambda number, i, whole, mask: number),
    get,
    inline(lambda row, i, value, whole, mask: put(row, i, value, whole, mask, 0)),
)

# --- columns ----------------------------------------------------------------------------------------------------------


@inline
def _in_strip(line, i: int, whole: bool, mask):
    return get(line.data, i * line.step, whole, mask)


COLUMNS = Places(  # at: an outer index, and the strip's first column
    {
        ALONG: inline(lambda source, at: Line(start(source, at[0]) + at[1], load_word(source.table, STEP))),
        SAME: inline(lambda source, at: Line(start(source, at[0]), load_word(source.table, STEP))),
    },
    _in_strip,
    inline(lambda line, i, whole, mask: v.full(line.data, v.load_one(line.data, i * line.step))),
    _in_strip,
    inline(lambda line, i, value, whole, mask: put(line.data, i * line.step, value, whole, mask, 0)),
)
