"""What kernels over rows share: where rows lie, how they are read and written, and their running statistics.

A row is the n elements that are reduced together; samples are the outer * inner rows, numbered in memory order.
A tile is ROWS rows of BLOCK elements. Where rows do not begin at aligned addresses (PEEL), the tile covers the
aligned body of each row, and a small second tile the up to VECTOR - 1 elements before and behind it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.problem import Operand, Problem
from opgrad.cuda.execute import Launch, Space
from opgrad.cuda.numbers import MINUS_INFINITY, exp, narrow, only_if, widen
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
def aligned(row, n, VECTOR: tl.constexpr, PEEL: tl.constexpr, INDEX: tl.constexpr):
    """For each row, the number of elements before its aligned body, and the length of the body."""
    head = tl.zeros_like(row)
    if PEEL:
        head = tl.minimum((VECTOR - row % VECTOR) % VECTOR, n)
    body = (n - head) // VECTOR * VECTOR
    return head.to(INDEX), body.to(INDEX)


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
def fold(m, d, x):
    """Take a tile into the rows' maximum m and sum d of exp(x - m).

    The tile is reduced before its exponentials are taken: one exp for each element and one for each row, where
    rescaling element by element would take two each and be bound by arithmetic instead of memory.
    """
    larger = tl.maximum(m, tl.max(x, 1))
    shift = shift_for(larger)
    return larger, d * exp(m - shift) + tl.sum(exp(x - shift[:, None]), 1)


@triton.jit
def store_share(
    x, x_row, x_n, maxima, sums, sample, exists, part, n, parts, per_part,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """The maximum and the sum of exponentials of this program's part of its rows; the first one has the ends."""
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body = body_of(x_row, head, VECTOR)
    m, d = no_rows(ROWS, NUMBER)
    if PEEL:
        k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
        m, d = fold(m, d, read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY).to(NUMBER))
    for step in range(0, per_part, BLOCK):
        k = columns_from(part * per_part + step, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        m, d = fold(m, d, read(x, x_body, k, x_n, inside, MINUS_INFINITY).to(NUMBER))
    tl.store(maxima + sample * parts + part, m, mask=exists)
    tl.store(sums + sample * parts + part, d, mask=exists)


@triton.jit
def of_parts(found, sample, exists, parts, other, PARTS: tl.constexpr):
    """What the programs that share rows have found, as [ROWS, PARTS]."""
    part = tl.arange(0, PARTS)[None, :]
    return tl.load(found + sample[:, None] * parts + part, mask=exists[:, None] & (part < parts), other=other)


@triton.jit
def joined(maxima, sums, sample, exists, parts, PARTS: tl.constexpr):
    """The maximum and the sum of exponentials of rows, from those of their parts."""
    m = of_parts(maxima, sample, exists, parts, MINUS_INFINITY, PARTS)
    d = of_parts(sums, sample, exists, parts, 0.0, PARTS)
    largest = tl.max(m, 1)
    return largest, tl.sum(d * exp(m - shift_for(largest)[:, None]), 1)


# --- for kernel functions ------------------------------------------------------------------------------------------


def frame(problem: Problem, regime: Regime, operands: Sequence[Operand | None]) -> dict[str, Any]:
    """The arguments that all kernels over rows take; `operands` have an entry for each element."""
    present = [operand for operand in operands if operand is not None]
    found = vectors(problem, present)
    return {
        "samples": problem.outer * problem.inner,
        "n": problem.n,
        "inner": problem.inner,
        "ROWS": regime.rows,
        "BLOCK": regime.block,
        "VECTOR": found.width,
        "PEEL": found.peel,
        "STAGES": regime.stages,
        "INDEX": tl.int64 if wide(problem, present) else tl.int32,
        "NUMBER": tl.float64 if any(operand.dtype == "float64" for operand in present) else tl.float32,
    }


def strides(**operands: Operand | None) -> dict[str, Any]:
    """Each operand under its name, with its strides under name_outer, name_n and name_inner."""
    given: dict[str, Any] = {}
    for name, operand in operands.items():
        given[name] = operand
        given[f"{name}_outer"] = operand.outer if operand else 0
        given[f"{name}_n"] = operand.n if operand else 0
        given[f"{name}_inner"] = operand.inner if operand else 0
    return given


def shared(
    share: Any,
    finish: Any,
    problem: Problem,
    regime: Regime,
    given: Mapping[str, Any],
    found: Sequence[str],
    space: Space,
) -> list[Launch]:
    """The two launches for rows that several programs share; `found` names what the first hands to the second."""
    dtype = "float64" if given["NUMBER"] == tl.float64 else "float32"
    given = {**given, "parts": regime.parts, "per_part": regime.per_part, "PARTS": power_of_2(regime.parts)}
    given |= {name: space.take(given["samples"] * regime.parts, dtype) for name in found}
    grid = (tiles(problem, regime), regime.parts)
    return [Launch(kernel, grid, given, regime.warps) for kernel in (share, finish)]


def tiles(problem: Problem, regime: Regime) -> int:
    """How many tiles cover the samples."""
    return -(-problem.outer * problem.inner // regime.rows)
