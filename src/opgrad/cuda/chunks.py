"""Long sums, divided into chunks: if many slices of dy go to one slice of dx, separate programs sum chunks of them.

A chunk is a fixed number of neighbours in the sorted order. A slice of dx whose range of neighbours lies in one chunk
needs none of this. Otherwise its range is the end of one chunk, whole chunks, and the beginning of another: each of
these parts becomes a row of sums. The rows behind the first are neighbours as well, so that where they are many,
they are chunked in the same way, level by level. At last the parts are added up.
"""

import math
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from opgrad.cuda.execute import Launch, Space
from opgrad.cuda.numbers import narrow, only_if, widen
from opgrad.cuda.regimes import power_of_2
from opgrad.cuda.slices import SliceSizes, tile_of

CHUNK = 64  # slices that one program adds up one after another
PARTS = 256  # items that are not chunked any more
VECTORS = 128  # of a slice that a program takes: one for each thread
AT_ONCE = 4 * VECTORS  # of all slices that it reads at once


@triton.jit
def chunks_inside(begin, end, CHUNK: tl.constexpr):
    """The chunks that begin inside a range of items, but not with it: none if the range lies in one chunk."""
    return begin // CHUNK + 1, (end + CHUNK - 1) // CHUNK


@triton.jit
def columns_of(pre, post, before, block, PRES: tl.constexpr, BLOCK: tl.constexpr):
    """A tile's columns: their numbers along pre and in a slice, and which of them exist."""
    lane = tl.arange(0, PRES * BLOCK)
    p = before * PRES + lane // BLOCK
    i = block * BLOCK + lane % BLOCK
    return p, i, (p < pre) & (i < post)


@triton.jit
def folded(x, HALVINGS: tl.constexpr):
    """The sum of x's rows, halves added to halves: in an order that does not depend on which threads hold them."""
    for _ in tl.static_range(HALVINGS):
        halves = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]])
        upper, lower = tl.split(tl.permute(halves, (1, 2, 0)))
        x = upper + lower
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def slice_across(
    keys, starts, size, items, boundary,
    BITS: tl.constexpr, CHUNK: tl.constexpr, LEVEL: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The slice of dx that the item behind a boundary belongs to, its range of items, and if that is on both sides."""
    known = boundary < items
    v = tl.load(keys + boundary * SPAN, mask=known, other=0).to(tl.int64) >> BITS
    known = known & (v < size)
    begin = tl.load(starts + v, mask=known, other=0).to(tl.int64)
    end = tl.load(starts + v + 1, mask=known, other=0).to(tl.int64)
    for _ in tl.static_range(LEVEL):
        begin, end = chunks_inside(begin, end, CHUNK)
    return v, begin, end, known & (begin < boundary)


@triton.jit
def sum_chunks(
    dy, keys, starts, sums, pre, size, count, items, chunks, source, target, vectors, blocks,
    BITS: tl.constexpr, CHUNK: tl.constexpr, LEVEL: tl.constexpr, SPAN: tl.constexpr, HALVINGS: tl.constexpr,
    VECTOR: tl.constexpr, REPEATS: tl.constexpr, PRES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts of chunk c of a level's items.

    An item is a slice of dy at level 0, above that row source + item of sums; it stands for SPAN sorted indices.
    Row target + c becomes the part that goes on from the chunk before, row target + chunks + c the one that begins
    here and goes on in the next.
    """
    STEP: tl.constexpr = 1 << HALVINGS
    post = tl.cast(vectors, tl.int64) * VECTOR
    before, c, block = tile_of(chunks, blocks, REPEATS)
    p, i, held = columns_of(pre, post, before, block, PRES, BLOCK)
    first = c * CHUNK
    _, _, end, enters = slice_across(keys, starts, size, items, first, BITS, CHUNK, LEVEL, SPAN)
    _, begin, _, leaves = slice_across(keys, starts, size, items, first + CHUNK, BITS, CHUNK, LEVEL, SPAN)
    parts = ((first, tl.minimum(end, first + CHUNK), enters), (begin, first + CHUNK, leaves & (begin >= first)))
    for side in tl.static_range(2):
        start, stop, exists = parts[side]
        total = tl.zeros([STEP, PRES * BLOCK], sums.dtype.element_ty)
        for place in range(start, tl.where(exists, stop, start), STEP):
            item = place + tl.arange(0, STEP)
            inside = item < stop
            if LEVEL == 0:
                j = tl.load(keys + item, mask=inside, other=0).to(tl.int64) & ((1 << BITS) - 1)
                pointers = dy + (j * post)[:, None] + (p * count * post + i)[None, :]
            else:
                pointers = sums + ((source + item) * pre * post)[:, None] + (p * post + i)[None, :]
            total += widen(tl.load(pointers, mask=inside[:, None] & held[None, :], other=0.0))
        row = target + side * chunks + c
        tl.store(sums + row * pre * post + p * post + i, folded(total, HALVINGS), mask=only_if(exists, held))


@triton.jit
def sum_parts(
    dx, keys, starts, sums, pre, size, count, chunks, vectors, blocks,
    BITS: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, HALVINGS: tl.constexpr,
    VECTOR: tl.constexpr, REPEATS: tl.constexpr, PRES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx[p, v] = the sum of its parts, for the slice v that begins in chunk c and goes on in the next."""
    STEP: tl.constexpr = 1 << HALVINGS
    post = tl.cast(vectors, tl.int64) * VECTOR
    before, c, block = tile_of(chunks, blocks, REPEATS)
    p, i, held = columns_of(pre, post, before, block, PRES, BLOCK)
    v, begin, end, leaves = slice_across(keys, starts, size, count, (c + 1) * CHUNK, BITS, CHUNK, 0, 1)
    exists = leaves & (begin >= c * CHUNK)
    apart, row, rows = exists, tl.zeros_like(c), chunks
    total = tl.zeros([STEP, PRES * BLOCK], sums.dtype.element_ty)
    for level in tl.static_range(1, LEVELS + 1):
        # The part that opens the slice is in the second row of its chunk, the others are in the first rows of theirs.
        opening = row + rows + begin // CHUNK
        begin, end = chunks_inside(begin, end, CHUNK)
        inner, outer = chunks_inside(begin, end, CHUNK)
        further = apart & (inner < outer) & (level < LEVELS)
        number = tl.where(apart, tl.where(further, 1, 1 + end - begin), 0)
        for place in range(0, number, STEP):
            item = place + tl.arange(0, STEP)
            part = tl.where(item == 0, opening, row + begin + item - 1)
            pointers = sums + (part * pre * post)[:, None] + (p * post + i)[None, :]
            total += tl.load(pointers, mask=(item < number)[:, None] & held[None, :], other=0.0)
        apart, row, rows = further, row + 2 * rows, (rows + CHUNK - 1) // CHUNK
    result = narrow(folded(total, HALVINGS), dx.dtype.element_ty)
    tl.store(dx + (p * size + v) * post + i, result, mask=only_if(exists, held))


def length_of(count: int) -> int:
    """The number of slices in a chunk, for a sum over `count` slices: a compromise between long chunks and many."""
    return min(CHUNK, power_of_2(math.isqrt(max(count - 1, 0)) + 1))


def chunked(arguments: Mapping[str, Any], sizes: SliceSizes, dtype: str, space: Space) -> list[Launch]:
    """The launches that write the slices of dx whose ranges lie in several chunks.

    arguments: those of the kernels that are known. There are none if there is but one chunk's worth of slices.
    """
    length, items = arguments["CHUNK"], [sizes.count]
    while items[-1] > (CHUNK if len(items) == 1 else PARTS):
        items.append(-(-items[-1] // length))
    levels = len(items) - 1
    if not levels:
        return []
    sums = space.take(2 * sum(items[1:]) * sizes.pre * sizes.post, "float64" if dtype == "float64" else "float32")
    block = min(power_of_2(sizes.post), VECTORS * arguments["VECTOR"])
    pres = min(power_of_2(sizes.pre), VECTORS * arguments["VECTOR"] // block)
    step = min(length, AT_ONCE * arguments["VECTOR"] // (block * pres))
    befores, blocks = -(-sizes.pre // pres), -(-sizes.post // block)
    constants = {"HALVINGS": step.bit_length() - 1, "PRES": pres, "BLOCK": block, "LEVELS": levels}
    given = {**arguments, **constants, "sums": sums, "blocks": blocks, "REPEATS": befores > 1}
    launches, source, target = [], 0, 0
    for level in range(levels):
        chunks = items[level + 1]
        own = {"items": items[level], "chunks": chunks, "source": source, "target": target}
        own |= {"LEVEL": level, "SPAN": length**level}
        launches.append(Launch(sum_chunks, (befores * chunks * blocks,), given | own))
        source, target = target, target + 2 * chunks
    launches.append(Launch(sum_parts, (befores * items[1] * blocks,), given | {"chunks": items[1]}))
    return launches
