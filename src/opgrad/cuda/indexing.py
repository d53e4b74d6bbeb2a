"""Rows picked by index, and the gradient that adds them up again.

An array is pre x n slices of `post` elements that lie together: x is pre x size x post, y is pre x count x post.
Regimes of gather:

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from opgrad.contract import DTYPES
from opgrad.contract.signature import Operand, Problem, wrong_index
from opgrad.cuda import ALIGNMENT
from opgrad.cuda.execute import Launch, Program, Scratch, Space, device
from opgrad.cuda.labels import STATUS, checks
from opgrad.cuda.numbers import narrow, only_if, widen
from opgrad.cuda.regimes import power_of_2

# --- how programs share slices ---------------------------------------------------------------------------------------
#
# A tile is PRES x ROWS slices of BLOCK elements each. All are powers of 2, so that a program finds its slices without
# dividing by the sizes of the problem for each of them.

SLICES = 512  # of a tile: for more, where they lie would need too many registers
LEAST = 512  # elements of a tile that is not divided further
WARPS = 4
SLICES_PER_WARP = 128


Sizes = tuple[int, int, int, int]  # pre, the size of the axis, how many slices indices name, post


def sizes_of(problem: Problem, shape: tuple[int, ...]) -> Sizes:
    """The sizes of a problem whose axis is one of an array of this shape."""
    axis = problem.attributes["axis"].start
    pre, post = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return pre, shape[axis], math.prod(problem.specs["indices"].shape), post


@dataclass(frozen=True)
class SliceTile:
    """The tiles of an array: each has pres x rows slices of `block` elements, and a program of its own.

    groups: tiles along n. blocks: tiles along a slice.
    """

    pres: int
    rows: int
    block: int
    groups: int
    blocks: int
    programs: int

    @property
    def slices(self) -> int:
        return self.pres * self.rows

    def launch(self, kernel: Any, arguments: Mapping[str, Any], item: int) -> Launch:
        """A launch with a program for each tile; `item` is the size of an element in bytes."""
        own = {
            "groups": self.groups,
            "blocks": self.blocks,
            "REPEATS": self.programs > self.groups * self.blocks,
            "PRES": self.pres,
            "ROWS": self.rows,
            "BLOCK": self.block,
        }
        threads = max(self.slices * self.block * item // ALIGNMENT, self.slices * 32 // SLICES_PER_WARP)
        warps = min(max(power_of_2(threads) // 32, 1), WARPS)
        return Launch(kernel, (self.programs,), {**arguments, **own}, warps=warps)


def tile(pre: int, n: int, post: int, elements: int) -> SliceTile:
    """Tiles of so many elements, or of fewer where there would be too few tiles for the device."""
    while True:
        block = min(power_of_2(post), elements)
        rows = min(power_of_2(n), elements // block, SLICES)
        pres = min(power_of_2(pre), elements // (block * rows), SLICES // rows)
        groups, blocks = -(-n // rows), -(-post // block)
        programs = -(-pre // pres) * groups * blocks
        if programs >= 2 * device().multiprocessors or elements <= LEAST:
            return SliceTile(pres, rows, block, groups, blocks, programs)
        elements //= 2


def vectors(post: int, dtype: str) -> dict[str, int]:
    """The length of slices in the widest vectors that they are made of: so the compiler sees what is aligned."""
    width = math.gcd(post, ALIGNMENT // DTYPES[dtype].itemsize)
    return {"vectors": post // width, "VECTOR": width}


@triton.jit
def tile_of(groups, blocks, REPEATS: tl.constexpr):
    """Which tile this program has, counted along pre, along n and along a slice; REPEATS: the first is not always 0."""
    program = tl.program_id(0)
    group = program // blocks
    before = tl.zeros_like(program)
    if REPEATS:
        before, group = group // groups, group % groups
    return before.to(tl.int64), group.to(tl.int64), (program % blocks).to(tl.int64)


@triton.jit
def slices_of(
    groups, blocks, REPEATS: tl.constexpr, PRES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """This program's slices, as their numbers along pre and along n, and the first of its elements in each."""
    before, group, block = tile_of(groups, blocks, REPEATS)
    lane = tl.arange(0, PRES * ROWS)
    return before * PRES + lane // ROWS, group * ROWS + lane % ROWS, block * BLOCK


# --- indices sorted on the device: by the slice that they name and, for one slice, as they come ----------------------
#
# A key is (index << BITS) | position, so that keys are unique and their order is the one that sums are taken in. Runs
# of keys are sorted by counting, for each key, those that are smaller. Then passes merge FAN runs at a time: a key's
# place is the number of smaller keys in all runs of its group, found by binary search. Nothing of this waits for
# another program, and every key is handled on its own, so that even 16,384 keys keep the whole device busy.
# Triton's own sort takes 2 to 5 seconds to compile for 1,024 keys and leaves most of the device idle: a run is one
# program then, of 700 shuffles for each thread in a row. The counting compiles in less than half a second.

KEY_BITS = 63  # of a signed 64-bit number
OWN = 32  # keys of a program that sorts a run
OTHERS = 64  # keys that it compares them with at a time
NARROW_BITS = 31  # of keys that are kept in 32-bit numbers
SEARCHES = 1024  # of a program that merges: FAN runs for each key
ROWS = 128  # whose starts one program looks for


# For so many indices at most: how long a run may get by counting, and how many are merged at a time. Counting costs a
# key as many comparisons as its run is long; merging a load for each of the fan * log2(run) steps of its searches. Few
# keys: each launch costs more than what it does, and one pass merges 16 runs of 1,024. Many keys: a fan of 4 needs
# twice the passes of a fan of 16, but half of its steps. Counted, not measured.
PASSES = ((1 << 16, 1024, 16), (1 << KEY_BITS, 256, 4))


@triton.jit
def slice_of(index, size):
    """The slice that an index names, counted from the front; `size` for an index outside [-size, size)."""
    index = index.to(tl.int64)
    front = tl.where(index < 0, index + size, index)
    return tl.where((index < -size) | (index >= size), size, front)


@triton.jit
def key_of(indices, position, count, size, BITS: tl.constexpr, KEY: tl.constexpr, LARGEST: tl.constexpr):
    """The keys of positions, LARGEST behind the last."""
    inside = position < count
    index = tl.load(indices + position, mask=inside, other=0)
    return tl.where(inside, (slice_of(index, size) << BITS) + position, LARGEST).to(KEY)


@triton.jit
def sort_runs(
    indices, keys, count, size,
    BITS: tl.constexpr, LARGEST: tl.constexpr, RUN: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """keys = those of the indices, every RUN of them sorted; a program finds the places of OWN."""
    KEY: tl.constexpr = keys.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * OWN
    run = first // RUN * RUN
    own = first + tl.arange(0, OWN)
    key = key_of(indices, own, count, size, BITS, KEY, LARGEST)
    before = tl.zeros([OWN, OTHERS], tl.int32)
    for start in range(0, RUN, OTHERS):
        others = key_of(indices, run + start + tl.arange(0, OTHERS), count, size, BITS, KEY, LARGEST)
        before += (others[None, :] < key[:, None]).to(tl.int32)
    tl.store(keys + run + tl.sum(before, axis=1), key, mask=own < count)


@triton.jit
def smaller(keys, length, key, found, longest):
    """How many of `length` sorted keys are smaller than `key`; `longest`, a power of 2, is not below length.

    found: zeros of the shape and dtype of the result.
    """
    stride = tl.cast(longest, found.dtype)
    while stride > 0:
        ahead = found + stride
        inside = ahead <= length
        there = tl.load(keys + ahead - 1, mask=inside, other=0)
        found = tl.where(inside & (there < key), ahead, found)
        stride //= 2
    return found


@triton.jit
def merge_runs(source, destination, count, run, FAN: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    """destination = source with every FAN runs merged into one; a program finds the places of BLOCK keys."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    span = tl.cast(run, tl.int64) * FAN
    group = first // span * span
    own = first + tl.arange(0, BLOCK)
    key = tl.load(source + own, mask=own < count, other=0)
    start = tl.arange(0, FAN).to(PLACE) * run
    length = tl.minimum(tl.maximum(count - group - start, 0), run).to(PLACE)
    found = tl.zeros([FAN, BLOCK], PLACE)
    before = smaller(source + group + start[:, None], length[:, None], key[None, :], found, run)
    tl.store(destination + group + tl.sum(before, axis=0), key, mask=own < count)


@triton.jit
def find_starts(keys, starts, count, size, longest, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """starts[v] = the place of the first key whose slice is v or behind it, for v = 0 .. size."""
    PLACE: tl.constexpr = starts.dtype.element_ty
    v = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = (v << BITS).to(keys.dtype.element_ty)
    found = smaller(keys, count, key, tl.zeros([BLOCK], PLACE), longest)
    tl.store(starts + v, found, mask=v <= size)


@dataclass(frozen=True)
class SortedKeys:
    """The launches that sort indices, and where they leave what they found.

    A key's position is its lowest `bits` bits; starts[v] is the first place of slice v, starts[size] the number of
    valid indices.
    """

    launches: Sequence[Launch]
    keys: Scratch
    starts: Scratch
    bits: int
    passes: int


def sort(operator: str, indices: Any, count: int, size: int, space: Space) -> SortedKeys:
    """Sort at least one index into an axis of `size`; scratch memory is taken from `space`.

    Raises NotImplementedError if a key needs more than 63 bits.
    """
    bits = (count - 1).bit_length()
    needed = size.bit_length() + bits
    if needed > KEY_BITS:
        raise NotImplementedError(
            f"{operator}: {count} indices into an axis of size {size} need keys of {needed} bits, on CUDA they have "
            f"{KEY_BITS}; the CPU sorts without keys"
        )
    number = "int32" if needed <= NARROW_BITS else "int64"
    place = "int32" if count < 1 << 29 else "int64"  # 4 runs of at most that length, end to end, must fit
    longest_run, fan = next((run, fan) for most, run, fan in PASSES if count <= most)
    passes = 0
    while -(-count // fan**passes) > longest_run:
        passes += 1
    run = power_of_2(-(-count // fan**passes))
    source, destination = space.take(count, number), space.take(count if passes else 0, number)
    given = {"indices": indices, "keys": source, "count": count, "size": size, "BITS": bits}
    own = min(OWN, run)
    largest = (1 << 31 if number == "int32" else 1 << 63) - 1
    arguments = given | {"LARGEST": largest, "RUN": run, "OWN": own, "OTHERS": min(OTHERS, run)}
    launches = [Launch(sort_runs, (triton.cdiv(count, own),), arguments)]
    for _ in range(passes):
        block = min(SEARCHES // fan, run)
        arguments = {"source": source, "destination": destination, "count": count, "run": run}
        constants = {"FAN": fan, "BLOCK": block, "PLACE": tl.int32 if place == "int32" else tl.int64}
        launches.append(Launch(merge_runs, (triton.cdiv(count, block),), arguments | constants))
        source, destination = destination, source
        run *= fan
    starts = space.take(size + 1, place)
    longest = 1 << count.bit_length() - 1
    arguments = given | {"keys": source, "starts": starts, "longest": longest, "BLOCK": ROWS}
    launches.append(Launch(find_starts, (triton.cdiv(size + 1, ROWS),), arguments))
    return SortedKeys(launches, source, starts, bits, passes)


# --- long sums, divided into chunks ----------------------------------------------------------------------------------
#
# If many slices of dy go to one slice of dx, separate programs sum chunks of them. A chunk is a fixed number of
# neighbours in the sorted order. A slice of dx whose range of neighbours lies in one chunk needs none of this.
# Otherwise its range is the end of one chunk, whole chunks, and the beginning of another: each of these parts becomes a
# row of sums. The rows behind the first are neighbours as well, so that where they are many, they are chunked in the
# same way, level by level. At last the parts are added up.

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


def chunked(arguments: Mapping[str, Any], sizes: Sizes, dtype: str, space: Space) -> list[Launch]:
    """The launches that write the slices of dx whose ranges lie in several chunks.

    arguments: those of the kernels that are known. There are none if there is but one chunk's worth of slices.
    """
    pre, _, count, post = sizes
    length, items = arguments["CHUNK"], [count]
    while items[-1] > (CHUNK if len(items) == 1 else PARTS):
        items.append(-(-items[-1] // length))
    levels = len(items) - 1
    if not levels:
        return []
    sums = space.take(2 * sum(items[1:]) * pre * post, "float64" if dtype == "float64" else "float32")
    block = min(power_of_2(post), VECTORS * arguments["VECTOR"])
    pres = min(power_of_2(pre), VECTORS * arguments["VECTOR"] // block)
    step = min(length, AT_ONCE * arguments["VECTOR"] // (block * pres))
    befores, blocks = -(-pre // pres), -(-post // block)
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


COPIED = 8192  # bytes of a program that copies: 64 for each thread
SINGLES = 2048  # elements of one that copies them one by one: 16 for each thread, as each needs an address
QUIET_NAN = {"float32": 0x7FC00000, "float64": 0x7FF8 << 48, "float16": 0x7E00, "bfloat16": 0x7FC0}

FEW = 64  # most indices that every program goes through by itself
FEW_PAIRS = 4096  # most pairs of a slice and an index in such a program: 32 for each thread


# The float32 sums of a program, and how many slices of dy are on their way at once. Sparse, fewer slices of dy than of
# dx: most of dx are zeros and single slices. Registers are better spent on sums, 32 for each thread, so that a
# multiprocessor has 64 KiB in the making. Dense: programs wait for slice after slice.
SPARSE, DENSE = (4096, 1), (2048, 4)


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
    pre, size, count, post = sizes_of(problem, problem.specs["x"].shape)
    x, y = problem["x"], problem["y"]
    checking = _checks(problem, count, size)
    space, launches, regime = Space(STATUS if checking else 0), [], ""
    if pre * count * post:
        item = DTYPES[x.dtype].itemsize
        words = f"int{8 * item}"
        known = vectors(post, x.dtype)
        elements = COPIED // item if known["VECTOR"] > 1 else min(COPIED // item, SINGLES)
        tiles = tile(pre, count, post, elements)
        arguments = {"x": Operand(x.number, words), "indices": problem["indices"], "y": Operand(y.number, words)}
        arguments |= {"pre": pre, "size": size, "count": count, "NAN": QUIET_NAN[x.dtype]}
        launches.append(tiles.launch(copy_slices, arguments | known, item))
        regime = "parts of slices" if tiles.blocks > 1 else "whole slices"
    return Program(launches, space.size, regime, checking, wrong_index(problem, size))


def _checks(problem: Problem, count: int, size: int) -> list[Launch]:
    """The launches that look for an index out of range, if they are asked for."""
    return checks(problem["indices"], count, -size, size) if problem.attributes["check"] else []


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
    sizes = pre, size, count, post = sizes_of(problem, problem.attributes["shape"])
    dy, dx, indices, checking = problem["dy"], problem["dx"], problem["indices"], _checks(problem, count, size)
    space, explain = Space(STATUS if checking else 0), wrong_index(problem, size)
    if not pre * size * post:
        return Program([], space.size, "", checking, explain)
    item = DTYPES[dx.dtype].itemsize
    (sums, unroll), known = DENSE if count >= size else SPARSE, vectors(post, dx.dtype)
    each = max(item // 4, 1) * (2 if known["VECTOR"] == 1 else 1)  # registers of a sum, with those of its address
    tiles = tile(pre, size, post, sums // each)
    arguments: dict[str, Any] = {"dy": dy, "dx": dx, "pre": pre, "size": size, "count": count} | known
    own = {"SUM": tl.float64 if dx.dtype == "float64" else tl.float32, "UNROLL": unroll}
    if count <= FEW and power_of_2(count) * tiles.slices <= FEW_PAIRS:
        own |= {"indices": indices, "COUNT": power_of_2(count)}
        launch = tiles.launch(sum_named, arguments | own, item)
        return Program([launch], space.size, "few indices", checking, explain)
    ordered = sort("gather_grad", indices, count, size, space)
    arguments |= {"keys": ordered.keys, "starts": ordered.starts, "BITS": ordered.bits}
    # Slices of a chunk: a compromise between long chunks and many.
    arguments["CHUNK"] = min(CHUNK, power_of_2(math.isqrt(max(count - 1, 0)) + 1))
    long = chunked(arguments, sizes, dx.dtype, space)
    short = tiles.launch(sum_slices, arguments | own | {"CHUNKED": bool(long)}, item)
    regime = "merged runs" if ordered.passes else "one run"
    return Program([*ordered.launches, *long, short], space.size, regime, checking, explain)
