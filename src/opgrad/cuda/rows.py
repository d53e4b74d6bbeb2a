"""The skeleton of kernels over rows: where rows lie, and how they are read, reduced and written.

A row is the n elements that are reduced together; samples are the outer * inner rows, numbered in memory order.
A tile is some rows of `block` elements. Where rows do not begin at aligned addresses (peel), the tile covers the
aligned body of each row, and a small second tile, its ends, the up to vector - 1 elements before and behind it.

A kernel is compiled for a `Tiling` and for one of five modes of going over its rows (MODE); opgrad.cuda.regimes says
which when.

    TILE     a program holds its rows in registers, and reduces and writes what it has
    LOOP     a program goes over its rows twice: it reduces, then reads again, from the end, and writes
    SHARE    several programs share rows, and each leaves what it finds in its part
    FINISH   the launch behind it puts together what was found, and writes
    POINT    nothing is reduced, and each program writes a tile

A family of kernels gives the skeleton functions. They see the elements of one array or of two, `x` and `other`, and
`given`, what the family passes on.

    whole(x, other, ends, given, PEEL)                what a tile of whole rows and its ends come to
    take(found, x, other, column, inside, given)      what was found in rows before and in this tile
    result(x, other, numbers, column, inside, given)  the elements that are written, given the rows' numbers
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from opgrad.contract import DTYPES
from opgrad.contract.signature import Operand, Problem
from opgrad.cuda.execute import Launch, Space
from opgrad.cuda.numbers import MINUS_INFINITY, exp, narrow, only_if, short_exp, widen
from opgrad.cuda.regimes import Regime, power_of_2, vectors, wide


@triton.jit
def samples_of(tile, samples, ROWS: tl.constexpr):
    """The numbers of a tile's samples, and which of them exist."""
    sample = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return sample, sample < samples


@triton.jit
def row_of(sample, inner, outer_stride, inner_stride):
    """Where the samples' rows begin, in elements."""
    return sample // inner * outer_stride + sample % inner * inner_stride


@triton.jit
def aligned(row, n, T: tl.constexpr):
    """For each row, the number of elements before its aligned body, and the length of the body."""
    head = tl.zeros_like(row)
    if T.peel:
        head = tl.minimum((T.vector - row % T.vector) % T.vector, n)
    body = (n - head) // T.vector * T.vector
    return head.to(T.index), body.to(T.index)


@triton.jit
def body_of(row, head, VECTOR: tl.constexpr):
    """Where the rows' bodies begin: at a multiple of VECTOR, which the compiler sees by this division."""
    return (row + head) // VECTOR * VECTOR


@triton.jit
def ends(head, body, n, exists, VECTOR: tl.constexpr):
    """The columns before and behind the body, in one tile of 2 * VECTOR columns, and which of them exist."""
    i = tl.arange(0, 2 * VECTOR)[None, :]
    column = tl.where(i < VECTOR, i, (head + body)[:, None] + i - VECTOR)
    inside = tl.where(i < VECTOR, i < head[:, None], column < n)
    return column, inside & exists[:, None]


@triton.jit
def columns_from(start, BLOCK: tl.constexpr, INDEX: tl.constexpr):
    """The columns of a tile, counted from the body's beginning."""
    return (start + tl.arange(0, BLOCK).to(INDEX))[None, :]


@triton.jit
def read(x, row, column, stride, inside, OTHER: tl.constexpr):
    """A tile of x, widened; OTHER where nothing is inside."""
    return widen(tl.load(x + row[:, None] + column * stride, mask=inside, other=OTHER))


@triton.jit
def write(y, row, column, stride, inside, value):
    """Store a tile, rounded to y's dtype."""
    tl.store(y + row[:, None] + column * stride, narrow(value, y.dtype.element_ty), mask=inside)


# --- the skeleton ----------------------------------------------------------------------------------------------------

TILE, LOOP, SHARE, FINISH, POINT = map(tl.constexpr, range(5))


class Tiling(NamedTuple):
    """What a kernel over rows is compiled for, as `tl.constexpr`: Triton 3.6 takes nothing else out of a tuple.

    rows, block: of a tile. vector, peel: see `Vectors`. stages: steps under way in a loop. index: the dtype of columns.
    number: that of the computation. parts: the programs that share a row, rounded up to a power of 2.
    """

    rows: Any
    block: Any
    vector: Any
    peel: Any
    stages: Any
    index: Any
    number: Any
    parts: Any = tl.constexpr(1)


@triton.jit
def rows_of(samples, n, inner, outer_stride, inner_stride, parts, MODE: tl.constexpr, T: tl.constexpr):
    """This program's rows: their numbers, which exist, where their bodies begin, how long these are; and its part.

    The strides are those of the array that decides where bodies begin.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    if MODE == POINT:
        tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    sample, exists = samples_of(tile, samples, T.rows)
    head, body = aligned(row_of(sample, inner, outer_stride, inner_stride), n, T)
    return sample, exists, head, body, part.to(T.index)


@triton.jit
def array_of(x, rows, inner, outer_stride, stride, inner_stride):
    """An array with the offsets of rows in it and the stride along them."""
    return x, row_of(rows[0], inner, outer_stride, inner_stride), stride


@triton.jit
def tiles_of(a, b, rows, column, inside, BODY: tl.constexpr, OTHER: tl.constexpr, T: tl.constexpr):
    """A tile of each of two arrays, that of the first again if there is no second, b being None.

    BODY: columns are counted from where bodies begin.
    """
    x = read(a[0], begin_of(a, rows, BODY, T), column, a[2], inside, OTHER).to(T.number)
    if b is None:
        other = x
    else:
        other = read(b[0], begin_of(b, rows, BODY, T), column, b[2], inside, OTHER).to(T.number)
    return x, other


@triton.jit
def begin_of(array, rows, BODY: tl.constexpr, T: tl.constexpr):
    """Where the rows of an array begin, or their bodies."""
    return body_of(array[1], rows[2], T.vector) if BODY else array[1]


@triton.jit
def ends_of(a, b, rows, n, OTHER: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr):
    """The rows' ends: two tiles, their columns, and which exist; of shared rows the first program has the ends."""
    exists = rows[1]
    if MODE >= SHARE:
        exists = only_if(rows[4] == 0, exists)
    k, inside = ends(rows[2], rows[3], n, exists, T.vector)
    x, other = tiles_of(a, b, rows, k, inside, False, OTHER, T)
    return x, other, k, inside


@triton.jit
def body_columns(rows, start, T: tl.constexpr):
    """A tile's columns, counted from the bodies' beginning, and which exist."""
    k = columns_from(start, T.block, T.index)
    return k, rows[1][:, None] & (k < rows[3][:, None])


@triton.jit
def take_step(found, a, b, rows, start, given, TAKE: tl.constexpr, OTHER: tl.constexpr, T: tl.constexpr):
    k, inside = body_columns(rows, start, T)
    x, other = tiles_of(a, b, rows, k, inside, True, OTHER, T)
    return TAKE(found, x, other, k + rows[2][:, None], inside, given)


@triton.jit
def fold_rows(
    found, a, b, rows, n, per_part, given, TAKE: tl.constexpr, OTHER: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr
):
    """What is found in whole rows (LOOP), or in this program's part of them (SHARE), beginning with `found`."""
    if T.peel:
        end, other_end, k, inside = ends_of(a, b, rows, n, OTHER, MODE, T)
        found = TAKE(found, end, other_end, k, inside, given)
    if MODE == SHARE:
        for step in range(0, per_part, T.block):
            found = take_step(found, a, b, rows, rows[4] * per_part + step, given, TAKE, OTHER, T)
    else:
        for start in tl.range(0, n, T.block, num_stages=T.stages):
            found = take_step(found, a, b, rows, start, given, TAKE, OTHER, T)
    return found


@triton.jit
def reduce_rows(
    nothing, a, b, rows, n, per_part, given, WHOLE: tl.constexpr, TAKE: tl.constexpr, OTHER: tl.constexpr,
    MODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What is found in rows, and the tiles that a program keeps of them (TILE). nothing: what no element comes to."""
    if MODE == TILE:
        k, inside = body_columns(rows, 0, T)
        x, other = tiles_of(a, b, rows, k, inside, True, OTHER, T)
        end, other_end = x, other
        if T.peel:
            end, other_end, _, _ = ends_of(a, b, rows, n, OTHER, MODE, T)
        found = WHOLE(x, other, (end, other_end), given, T.peel)
        kept = (x, other, end, other_end)
    else:
        found = fold_rows(nothing, a, b, rows, n, per_part, given, TAKE, OTHER, MODE, T)
        kept = found  # there are no tiles, and a function in a kernel has to return something
    return found, kept


@triton.jit
def write_step(y, a, b, rows, start, numbers, given, RESULT: tl.constexpr, OTHER: tl.constexpr, T: tl.constexpr):
    k, inside = body_columns(rows, start, T)
    x, other = tiles_of(a, b, rows, k, inside, True, OTHER, T)
    value = RESULT(x, other, numbers, k + rows[2][:, None], inside, given)
    write(y[0], begin_of(y, rows, True, T), k, y[2], inside, value)


@triton.jit
def write_rows(
    y, a, b, kept, rows, n, per_part, numbers, given, RESULT: tl.constexpr, OTHER: tl.constexpr, MODE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Write the results of rows, given their numbers; kept: what `reduce_rows` has read of them."""
    if T.peel:
        end, other_end, k_end, inside_end = ends_of(a, b, rows, n, OTHER, MODE, T)
        if MODE == TILE:
            end, other_end = kept[2], kept[3]
        write(y[0], y[1], k_end, y[2], inside_end, RESULT(end, other_end, numbers, k_end, inside_end, given))
    if MODE == TILE:
        k, inside = body_columns(rows, 0, T)
        value = RESULT(kept[0], kept[1], numbers, k + rows[2][:, None], inside, given)
        write(y[0], begin_of(y, rows, True, T), k, y[2], inside, value)
    elif MODE == POINT:
        write_step(y, a, b, rows, rows[4] * T.block, numbers, given, RESULT, OTHER, T)
    elif MODE == FINISH:
        for step in range(0, per_part, T.block):
            write_step(y, a, b, rows, rows[4] * per_part + step, numbers, given, RESULT, OTHER, T)
    else:
        last = (n - 1) // T.block * T.block
        for done in tl.range(0, n, T.block, num_stages=T.stages):
            write_step(y, a, b, rows, last - done, numbers, given, RESULT, OTHER, T)


@triton.jit
def store_part(found, rows, parts, value):
    """Leave what a program has found in its part of rows."""
    tl.store(found + rows[0] * parts + rows[4], value, mask=rows[1])


# --- running statistics --------------------------------------------------------------------------------------------


@triton.jit
def no_rows(ROWS: tl.constexpr, NUMBER: tl.constexpr):
    """The maximum and the sum of exponentials of rows of which nothing has been read."""
    return tl.full([ROWS], MINUS_INFINITY, NUMBER), tl.zeros([ROWS], NUMBER)


@triton.jit
def shift_for(m):
    """What to subtract before exp: the maximum, or 0 while there is nothing but -inf."""
    return tl.where(m == MINUS_INFINITY, 0.0, m)


@triton.jit
def fold(m, d, x, EXP: tl.constexpr):
    """Take a tile into the rows' maximum m and sum d of exp(x - m).

    The tile is reduced before its exponentials are taken: one exp for each element and one for each row, where
    rescaling element by element would take two each and be bound by arithmetic instead of memory.
    """
    larger = tl.maximum(m, tl.max(x, 1))
    shift = shift_for(larger)
    return larger, d * EXP(m - shift) + tl.sum(EXP(x - shift[:, None]), 1)


@triton.jit
def of_parts(found, rows, parts, other, PARTS: tl.constexpr):
    """What the programs that share rows have found, as [ROWS, PARTS]."""
    part = tl.arange(0, PARTS)[None, :]
    return tl.load(found + rows[0][:, None] * parts + part, mask=rows[1][:, None] & (part < parts), other=other)


@triton.jit
def fold_tile(found, x, other, column, inside, EXP: tl.constexpr):
    """`fold` for the skeleton."""
    return fold(found[0], found[1], x, EXP)


@triton.jit
def whole_tile(x, other, end, EXP: tl.constexpr, PEEL: tl.constexpr):
    """The maximum and the sum of exponentials of whole rows: all of them are there, so that nothing is rescaled."""
    m = tl.max(x, 1)
    if PEEL:
        m = tl.maximum(m, tl.max(end[0], 1))
    d = tl.sum(EXP(x - m[:, None]), 1)
    if PEEL:
        d += tl.sum(EXP(end[0] - m[:, None]), 1)
    return m, d


@triton.jit
def statistics(
    x, maxima, sums, rows, n, parts, per_part, EXP: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The maximum of rows, the sum of exponentials by EXP, and the tiles that a program keeps of them.

    maxima, sums: where those of parts are, or are left.
    """
    if MODE == FINISH:
        m, d = of_parts(maxima, rows, parts, MINUS_INFINITY, T.parts), of_parts(sums, rows, parts, 0.0, T.parts)
        largest = tl.max(m, 1)
        found = largest, tl.sum(d * EXP(m - shift_for(largest)[:, None]), 1)
        kept = found
    else:
        found, kept = reduce_rows(
            no_rows(T.rows, T.number), x, None, rows, n, per_part, EXP, whole_tile, fold_tile, MINUS_INFINITY, MODE, T
        )
    if MODE == SHARE:
        store_part(maxima, rows, parts, found[0])
        store_part(sums, rows, parts, found[1])
    return found, kept


# --- for kernel functions ------------------------------------------------------------------------------------------


def frame(problem: Problem, regime: Regime, operands: Sequence[Operand | None]) -> dict[str, Any]:
    """The arguments that all kernels over rows take; `operands` have an entry for each element."""
    present = [operand for operand in operands if operand is not None]
    found = vectors(problem, present)
    index = tl.int64 if wide(problem, present) else tl.int32
    number = tl.float64 if any(operand.dtype == "float64" for operand in present) else tl.float32
    tiling = regime.rows, regime.block, found.width, found.peel, regime.stages, index, number
    return {
        "samples": problem.outer * problem.inner,
        "n": problem.n,
        "inner": problem.inner,
        "T": Tiling(*map(tl.constexpr, tiling)),
    }


def exponential(result: Operand) -> Any:
    return short_exp if DTYPES[result.dtype].itemsize == 2 else exp


def strides(**operands: Operand | None) -> dict[str, Any]:
    """Each operand under its name, with its strides under name_outer, name_n and name_inner."""
    given: dict[str, Any] = {}
    for name, operand in operands.items():
        given[name] = operand
        given |= {f"{name}_{axis}": getattr(operand, axis) if operand else 0 for axis in ("outer", "n", "inner")}
    return given


def row_launches(
    kernel: Any, problem: Problem, regime: Regime, given: Mapping[str, Any], found: Sequence[str], space: Space
) -> list[Launch]:
    """The launch of a kernel over rows, or the two of rows that several programs share.

    found: the arguments by which the first of these hands to the second what it has found.
    """
    grid: tuple[int, ...] = (tiles(problem, regime),)
    modes = [LOOP if regime.name.startswith("long") else TILE]
    parts = {"parts": 1, "per_part": 0, **dict.fromkeys(found)}
    if regime.parts > 1:
        grid, modes = (*grid, regime.parts), [SHARE, FINISH]
        tiling = given["T"]._replace(parts=tl.constexpr(power_of_2(regime.parts)))
        parts = {"parts": regime.parts, "per_part": regime.per_part, "T": tiling}
        parts |= {name: space.take(given["samples"] * regime.parts, dtype_of(given)) for name in found}
    more = regime.warps, regime.ctas, given.get("EXP") is short_exp  # whose denormal results are 0
    return [Launch(kernel, grid, {**given, **parts, "MODE": mode.value}, *more) for mode in modes]


def dtype_of(given: Mapping[str, Any]) -> str:
    """The dtype in which a kernel with these arguments computes."""
    return "float64" if given["T"].number.value == tl.float64 else "float32"


def point_launch(kernel: Any, problem: Problem, regime: Regime, given: Mapping[str, Any]) -> Launch:
    """The launch of a kernel that reduces nothing."""
    parts = -(-problem.n // regime.block)
    arguments = {**given, "parts": parts, "MODE": POINT.value}
    return Launch(kernel, (tiles(problem, regime) * parts,), arguments, regime.warps)


def tiles(problem: Problem, regime: Regime) -> int:
    """How many tiles cover the samples."""
    return -(-problem.outer * problem.inner // regime.rows)
