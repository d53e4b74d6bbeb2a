"""Rows picked by index, and the gradient that adds them up again.

x is pre x size x post, y is pre x count x post; a slice is `post` elements that lie together. Regimes of gather:

    whole slices     a program takes one slice or several, so that it has enough bytes in flight
    parts of slices  a slice is long enough for several programs

The gradient writes every slice of dx exactly once, zeros included, from the slices of dy that name it: no atomics,
no memory set to 0 before, and the same sum from run to run. Its regimes:

    few indices      every program looks for its slices in the indices themselves: one launch
    one run          the indices are sorted by one pass
    merged runs      they are sorted by several

Of sorted indices, those of one slice are neighbours. Where they are many, chunks of them are summed beforehand, so
that no program adds up more than a few hundred slices one after another, wherever the indices point.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from opgrad.contract import DTYPES
from opgrad.contract.signature import Operand, Problem, wrong_index
from opgrad.cuda.chunks import chunked, chunks_inside, length_of
from opgrad.cuda.execute import Launch, Program, Space
from opgrad.cuda.labels import checks
from opgrad.cuda.numbers import narrow, widen
from opgrad.cuda.regimes import power_of_2
from opgrad.cuda.slices import SliceSizes, sizes_of, slices_of, tile, vectors
from opgrad.cuda.sort import slice_of, sort

COPIED = 8192  # bytes of a program that copies: 64 for each thread
SINGLES = 2048  # elements of one that copies them one by one: 16 for each thread, as each needs an address
QUIET_NAN = {"float32": 0x7FC00000, "float64": 0x7FF8 << 48, "float16": 0x7E00, "bfloat16": 0x7FC0}

FEW = 64  # most indices that every program goes through by itself
FEW_PAIRS = 4096  # most pairs of a slice and an index in such a program: 32 for each thread


@dataclass(frozen=True)
class Density:
    """How sums are made. sums: float32 ones of a program. unroll: slices of dy that are on their way at once."""

    sums: int
    unroll: int


# Sparse, fewer slices of dy than of dx: most of dx are zeros and single slices. Registers are better spent on sums,
# 32 for each thread, so that a multiprocessor has 64 KiB in the making. Dense: programs wait for slice after slice.
SPARSE, DENSE = Density(4096, 1), Density(2048, 4)


# --- forward -------------------------------------------------------------------------------------------------------


@triton.jit
def copy_slices(
    x, indices, y, pre, size, count, vectors, groups, blocks, NAN: tl.constexpr,
    VECTOR: tl.constexpr, REPEATS: tl.constexpr, PRES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[p, j] = x[p, indices[j]], as bits; NaN where the index is out of range."""
    post = tl.cast(vectors, tl.int64) * VECTOR
    p, j, first = slices_of(groups, blocks, REPEATS, PRES, ROWS, BLOCK)
    inside = (p < pre) & (j < count)
    v = slice_of(tl.load(indices + j, mask=inside, other=0), size)
    column = tl.arange(0, BLOCK)[None, :]
    held = column < post - first
    found = inside & (v < size)
    bits = tl.load(x + ((p * size + v) * post + first)[:, None] + column, mask=found[:, None] & held, other=NAN)
    tl.store(y + ((p * count + j) * post + first)[:, None] + column, bits, mask=inside[:, None] & held)


def gather(problem: Problem) -> Program:
    sizes = sizes_of(problem, problem.specs["x"].shape)
    x, y = problem["x"], problem["y"]
    space, launches, regime = Space(), [], ""
    checking = _checks(problem, sizes, space)
    if sizes.pre * sizes.count * sizes.post:
        item = DTYPES[x.dtype].itemsize
        words = f"int{8 * item}"
        known = vectors(sizes.post, x.dtype)
        elements = COPIED // item if known["VECTOR"] > 1 else min(COPIED // item, SINGLES)
        tiles = tile(sizes.pre, sizes.count, sizes.post, elements)
        arguments = {"x": Operand(x.number, words), "indices": problem["indices"], "y": Operand(y.number, words)}
        arguments |= {"pre": sizes.pre, "size": sizes.size, "count": sizes.count, "NAN": QUIET_NAN[x.dtype]}
        launches.append(tiles.launch(copy_slices, arguments | known, item))
        regime = "parts of slices" if tiles.blocks > 1 else "whole slices"
    return Program(launches, space.size, regime, checking, wrong_index(problem, "gather", sizes.size))


def _checks(problem: Problem, sizes: SliceSizes, space: Space) -> list[Launch]:
    """The launches that look for an index out of range, and their memory, which comes first."""
    if not problem.attributes["check"]:
        return []
    space.take(2, "int64")
    return checks(problem["indices"], sizes.count, -sizes.size, sizes.size)


# --- backward ------------------------------------------------------------------------------------------------------


@triton.jit
def sum_named(
    dy, indices, dx, pre, size, count, vectors, groups, blocks,
    SUM: tl.constexpr, UNROLL: tl.constexpr, COUNT: tl.constexpr,
    VECTOR: tl.constexpr, REPEATS: tl.constexpr, PRES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx[p, v] = the sum of dy[p, j] over all j with indices[j] = v, for so few that a program sees all of them."""
    post = tl.cast(vectors, tl.int64) * VECTOR
    p, v, first = slices_of(groups, blocks, REPEATS, PRES, ROWS, BLOCK)
    inside = (p < pre) & (v < size)
    column = tl.arange(0, BLOCK)[None, :]
    held = column < post - first

    place = tl.arange(0, COUNT)
    index = slice_of(tl.load(indices + place, mask=place < count, other=0), size)
    named = (index[None, :] == v[:, None]) & (place < count)[None, :] & inside[:, None]
    most = tl.max(tl.sum(named.to(tl.int32), axis=1), axis=0)
    j = tl.full([PRES * ROWS], -1, tl.int32)
    total = tl.zeros([PRES * ROWS, BLOCK], SUM)
    for _ in range(0, most, UNROLL):
        for _ in tl.static_range(UNROLL):
            j = tl.min(tl.where(named & (place[None, :] > j[:, None]), place[None, :], COUNT), axis=1)
            pointers = dy + ((p * count + j) * post + first)[:, None] + column
            total += widen(tl.load(pointers, mask=(j < COUNT)[:, None] & held, other=0.0))
    pointers = dx + ((p * size + v) * post + first)[:, None] + column
    tl.store(pointers, narrow(total, dx.dtype.element_ty), mask=inside[:, None] & held)


@triton.jit
def sum_slices(
    dy, keys, starts, dx, pre, size, count, vectors, groups, blocks,
    SUM: tl.constexpr, UNROLL: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr,
    VECTOR: tl.constexpr, REPEATS: tl.constexpr, PRES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx[p, v] = the sum of dy[p, j] over the sorted indices from starts[v] to starts[v + 1].

    CHUNKED: slices whose ranges lie in several chunks are written elsewhere.
    """
    post = tl.cast(vectors, tl.int64) * VECTOR
    p, v, first = slices_of(groups, blocks, REPEATS, PRES, ROWS, BLOCK)
    inside = (p < pre) & (v < size)
    column = tl.arange(0, BLOCK)[None, :]
    held = column < post - first
    begin = tl.load(starts + v, mask=inside, other=0)
    end = tl.load(starts + v + 1, mask=inside, other=0)
    if CHUNKED:
        inner, outer = chunks_inside(begin, end, CHUNK)
        inside = inside & (inner >= outer)
    number = tl.where(inside, end - begin, 0)
    total = tl.zeros([PRES * ROWS, BLOCK], SUM)
    for done in range(0, tl.max(number, axis=0), UNROLL):
        for k in tl.static_range(UNROLL):
            exists = done + k < number
            j = tl.load(keys + begin + done + k, mask=exists, other=0).to(tl.int64) & ((1 << BITS) - 1)
            pointers = dy + ((p * count + j) * post + first)[:, None] + column
            total += widen(tl.load(pointers, mask=exists[:, None] & held, other=0.0))
    pointers = dx + ((p * size + v) * post + first)[:, None] + column
    tl.store(pointers, narrow(total, dx.dtype.element_ty), mask=inside[:, None] & held)


def gather_grad(problem: Problem) -> Program:
    sizes = sizes_of(problem, problem.attributes["shape"])
    space, launches, regime = Space(), [], ""
    checking = _checks(problem, sizes, space)
    if sizes.pre * sizes.size * sizes.post:
        launches, regime = _summing(problem, sizes, space)
    return Program(launches, space.size, regime, checking, wrong_index(problem, "gather_grad", sizes.size))


def _summing(problem: Problem, sizes: SliceSizes, space: Space) -> tuple[list[Launch], str]:
    """The launches that write a dx of some size, and the name of their regime."""
    pre, size, count, post = sizes.pre, sizes.size, sizes.count, sizes.post
    dy, dx, indices = problem["dy"], problem["dx"], problem["indices"]
    item = DTYPES[dx.dtype].itemsize
    density, known = DENSE if count >= size else SPARSE, vectors(post, dx.dtype)
    each = max(item // 4, 1) * (2 if known["VECTOR"] == 1 else 1)  # registers of a sum, with those of its address
    tiles = tile(pre, size, post, density.sums // each)
    arguments: dict[str, Any] = {"dy": dy, "dx": dx, "pre": pre, "size": size, "count": count} | known
    own = {"SUM": tl.float64 if dx.dtype == "float64" else tl.float32, "UNROLL": density.unroll}
    if count <= FEW and power_of_2(count) * tiles.slices <= FEW_PAIRS:
        own |= {"indices": indices, "COUNT": power_of_2(count)}
        return [tiles.launch(sum_named, arguments | own, item)], "few indices"
    ordered = sort("gather_grad", indices, count, size, space)
    arguments |= {"keys": ordered.keys, "starts": ordered.starts, "BITS": ordered.bits, "CHUNK": length_of(count)}
    long = chunked(arguments, sizes, dx.dtype, space)
    short = tiles.launch(sum_slices, arguments | own | {"CHUNKED": bool(long)}, item)
    return [*ordered.launches, *long, short], "merged runs" if ordered.passes else "one run"
