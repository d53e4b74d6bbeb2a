"""Slices picked by index, and the gradient that adds them up again.

x is pre x size x post and y is pre x count x post, all contiguous. The gradient first sorts the slices of dy by
the slice of dx that they go to (a counting sort, which keeps their order), so every slice of dx is summed in
registers and written once, in an order that depends on the arguments alone.
"""

import math
from typing import Any, Final, NamedTuple

from opgrad.contract import DTYPES
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import copy_bytes, load_i32, load_word, store_i32, store_word
from opgrad.cpu.compiler.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Part, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.loops.fill import zero_step
from opgrad.cpu.loops.layout import precision
from opgrad.cpu.loops.map import write_same
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, Step, shared_out
from opgrad.cpu.runtime.workspace import Scratch, Workspace
from opgrad.problem import Operand, Problem
from opgrad.ranges import wrong_index

INDICES_PER_PART = 1 << 13
SORTING_PARTS: Final = 8  # at most, since each needs a count for every slice of dx
CHUNK: Final = 64  # addends that are added to each other before they join the total
AHEAD: Final = 16  # addends between a prefetch and its use
SOON: Final = 3  # the same for slices that are copied
WIDE: Final = 4  # vectors of a slice that are summed at once: eight registers
HOT: Final = 8  # a slice of dx is hot if more than 1/8 of all slices of dy go to it
SINGLE: Final = 8  # slices shorter than this are summed element by element
LONGEST_AHEAD: Final = 1024  # elements of a slice that are asked for at once


# --- indices -------------------------------------------------------------------------------------------------------


@kernel
def check_indices(places: Units, part: Part, size, indices: Pointer, found):
    """found[part] = the first place in this part whose index is outside [-size, size), or -1."""
    wrong = -1
    for j in places:
        index = v.load_one(indices, j)
        if index < -size or index >= size:
            wrong = j
            break
    store_word(found, part, wrong)


@kernel
def report_indices(parts, found, indices: Pointer, status):
    """Leave the first wrong index as status."""
    for part in range(parts):
        wrong = load_word(found, part)
        if wrong >= 0:
            store_word(status, 0, 1)
            store_word(status, 1, wrong)
            store_word(status, 2, v.load_one(indices, wrong))
            break


def checking(kernel: Kernel, workspace: Workspace, units: int, per_part: int, arguments: dict[str, Any]) -> list[Step]:
    """The steps in which every part looks for a wrong index, and the first one is reported."""
    parts = partition.count(units, per_part)
    given = {**arguments, "parts": parts, "found": workspace.shared(parts, "int64"), "status": Scratch()}
    return [Step(kernel, units, given, per_part), Step(report_indices, 1, given)]


def index_steps(problem: Problem, workspace: Workspace, size: int) -> list[Step]:
    """The steps that check the indices."""
    count = math.prod(problem.specs["indices"].shape)
    return checking(check_indices, workspace, count, INDICES_PER_PART, {"size": size, "indices": problem["indices"]})


# --- forward -------------------------------------------------------------------------------------------------------


@inline
def source_of(unit: int, count: int, size: int, indices: Any) -> int:
    """Which slice of x, as pre * size + index, slice `unit` of y comes from."""
    index = v.load_one(indices, unit % count)
    return unit // count * size + (index + size if index < 0 else index)


class Slices(NamedTuple):
    """Slices of dy: how many there are for an index before the axis, of x, and the elements of each."""

    count: int
    size: int
    post: int


@kernel
def copy_slices(units: Units, slices: Slices, item, words, x: Pointer, y: Pointer, indices: Pointer, last, stream):
    """A unit is one slice of y, `last` the last of them; slices of whole 4-byte words are copied as vectors of them."""
    count, size, post = slices
    for unit in units:
        source = source_of(unit, count, size, indices)
        if words:
            coming = x + source_of(min(unit + SOON, last), count, size, indices) * words
            for i in range(0, min(words, LONGEST_AHEAD), v.lanes(x)):
                v.prefetch(coming, i)
            write_same(y + unit * words, 0, words, stream, (x + source * words,), ())
        else:
            copy_bytes(v.address_of(y) + unit * post * item, v.address_of(x) + source * post * item, post * item)


def gather(problem: Problem) -> Program:
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count, workspace = math.prod(problem.specs["indices"].shape), Workspace()
    steps = index_steps(problem, workspace, size) + copy_steps(problem, pre, Slices(count, size, post))
    return Program(steps, workspace, wrong_index(problem, "gather", size))


def copy_steps(problem: Problem, pre: int, slices: Slices) -> list[Step]:
    """The step that copies slices of x to y, none if there is nothing to copy."""
    x, y = problem["x"], problem["y"]
    item = DTYPES[x.dtype].itemsize
    slice_bytes, units = slices.post * item, pre * slices.count
    traffic = 2 * units * slice_bytes
    if not traffic:
        return []
    arguments = {
        "slices": slices,
        "item": item,
        "words": 0 if slice_bytes % 4 else slice_bytes // 4,
        "x": Operand(x.number, "float32"),
        "y": Operand(y.number, "float32"),
        "indices": problem["indices"],
        "last": units - 1,
        "stream": partition.streams(traffic),
    }
    return [shared_out(copy_slices, units, 2 * slice_bytes, arguments)]


# --- backward: sort the slices by where they go --------------------------------------------------------------------


@kernel
def count_indices(places: Units, part: Part, size, indices: Pointer, counts):
    """counts[part, value] = how many of this part's indices name slice v."""
    mine = counts + 4 * part * size
    for value in range(size):
        store_i32(mine, value, 0)
    for j in places:
        value = v.load_one(indices, j)
        value += size if value < 0 else 0
        store_i32(mine, value, load_i32(mine, value) + 1)


@kernel
def place_indices(parts, count, size, counts, starts, hot):
    """Turn counts into the place where each part's slices for value begin; starts[value] is where value's begin.

    hot[0] counts the slices of dx that more than an eighth of all slices of dy go to; their numbers follow.
    """
    place, found_hot = 0, 0
    for value in range(size):
        store_word(starts, value, place)
        for part in range(parts):
            mine = counts + 4 * part * size
            found = load_i32(mine, value)
            store_i32(mine, value, place)
            place += found
        if place - load_word(starts, value) > count // HOT:
            found_hot += 1
            store_word(hot, found_hot, value)
    store_word(hot, 0, found_hot)
    store_word(starts, size, place)


@kernel
def sort_indices(places: Units, part: Part, size, indices: Pointer, counts, order):
    """order = the numbers of dy's slices, sorted by value and, for one value, as they come."""
    mine = counts + 4 * part * size
    for j in places:
        value = v.load_one(indices, j)
        value += size if value < 0 else 0
        place = load_i32(mine, value)
        store_i32(mine, value, place + 1)
        store_i32(order, place, j)


# --- backward: sum -------------------------------------------------------------------------------------------------


@inline
def put_sum(dx: Any, i: int, value: Vector, past: int) -> None:
    if past:
        v.store_streaming(dx, i, value)
    else:
        v.store(dx, i, value)


@inline
def sum_wide(dx: Any, dy: Any, post: int, order: int, begin: int, end: int, last: int, ahead: int, past: int) -> None:
    """dx[0:4 w] = the sum of the slices order[begin:end] of dy; asks for `ahead` elements of the slices to come."""
    w = v.lanes(dy)
    a = b = c = d = v.full(dy, 0.0)
    k = begin
    while k < end:
        s = t = u = value = v.full(dy, 0.0)
        for place in range(k, min(k + CHUNK, end)):
            source = dy + load_i32(order, place) * post
            coming = dy + load_i32(order, min(place + AHEAD, last)) * post
            for i in range(0, ahead, w):
                v.prefetch(coming, i)
            s, t = s + v.load(source, 0), t + v.load(source, w)
            u, value = u + v.load(source, 2 * w), value + v.load(source, 3 * w)
        a, b, c, d = a + s, b + t, c + u, d + value
        k += CHUNK
    put_sum(dx, 0, a, past)
    put_sum(dx, w, b, past)
    put_sum(dx, 2 * w, c, past)
    put_sum(dx, 3 * w, d, past)


@inline
def sum_narrow(dx: Any, dy: Any, post: int, order: int, begin: int, end: int, width: int) -> None:
    """dx[0:width] = the sum of the slices order[begin:end] of dy; width is at most one vector."""
    mask = v.first(dy, width)
    total = v.full(dy, 0.0)
    k = begin
    while k < end:
        s = v.full(dy, 0.0)
        for place in range(k, min(k + CHUNK, end)):
            s = s + v.load_masked(dy, load_i32(order, place) * post, mask, 0.0)
        total = total + s
        k += CHUNK
    v.store_masked(dx, 0, total, mask)


@inline
def sum_single(dx: Any, dy: Any, post: int, order: int, begin: int, end: int, width: int) -> None:
    """The same for slices of a few elements, one by one."""
    for i in range(width):
        total = v.number(dy, 0.0)
        k = begin
        while k < end:
            s = v.number(dy, 0.0)
            for place in range(k, min(k + CHUNK, end)):
                s += v.load_one(dy, load_i32(order, place) * post + i)
            total += s
            k += CHUNK
        v.store_one(dx, i, total)


@inline
def sum_slice(
    dx: Any, dy: Any, post: int, column: int, columns: int, order: int, begin: int, end: int, last: int, stream: int
) -> None:
    """dx[column:columns] = the sum of those columns of the slices order[begin:end] of dy."""
    w = v.lanes(dy)
    if post < SINGLE:
        sum_single(dx, dy, post, order, begin, end, post)
    else:
        # The first columns ask for whole slices, so that memory is read in long pieces.
        ahead = min(columns, LONGEST_AHEAD)
        i = column
        while i + WIDE * w <= columns:
            past = stream and v.to_line(dx, i) == 0
            sum_wide(dx + i, dy + i, post, order, begin, end, last, ahead - i, past)
            ahead = 0
            i += WIDE * w
        while i < columns:
            sum_narrow(dx + i, dy + i, post, order, begin, end, min(w, columns - i))
            i += w


@kernel
def sum_slices(units: Units, ranges, per_range, slices: Slices, dy: Pointer, dx: Pointer, starts, order, stream):
    """A unit is a range of slices of dx, for one index before the axis; those that many slices go to are left out."""
    count, size, post = slices
    for unit in units:
        p, block = unit // ranges, unit % ranges
        for value in range(block * per_range, min((block + 1) * per_range, size)):
            begin, end = load_word(starts, value), load_word(starts, value + 1)
            if end - begin <= count // HOT:
                out = dx + (p * size + value) * post
                sum_slice(out, dy + p * count * post, post, 0, post, order, begin, end, count - 1, stream)


@kernel
def sum_hot_slices(units: Units, strips, slices: Slices, dy: Pointer, dx: Pointer, starts, order, hot):
    """The slices left out; a unit is a strip of columns, so that threads share even a single one."""
    count, size, post = slices
    width = WIDE * v.lanes(dy)
    for unit in units:
        p, column = unit // strips, unit % strips * width
        for place in range(1, load_word(hot, 0) + 1):
            value = load_word(hot, place)
            out, last = dx + (p * size + value) * post, count - 1
            begin, end = load_word(starts, value), load_word(starts, value + 1)
            columns = min(column + width, post)
            sum_slice(out, dy + p * count * post, post, column, columns, order, begin, end, last, 0)


def gather_grad(problem: Problem) -> Program:
    shape, axis = problem.attributes["shape"], problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count, workspace = math.prod(problem.specs["indices"].shape), Workspace(precision(problem))
    steps = index_steps(problem, workspace, size)
    if pre * size * post:
        steps += sum_steps(problem, workspace, pre, Slices(count, size, post))
    return Program(steps, workspace, wrong_index(problem, "gather_grad", size))


def sum_steps(problem: Problem, workspace: Workspace, pre: int, slices: Slices) -> list[Step]:
    """The steps that sort and sum."""
    count, size, post = slices
    if not count:
        elements = pre * size * post
        return [zero_step(problem["dx"], elements, elements * DTYPES[problem["dx"].dtype].itemsize)]
    per_part = -(-count // max(1, min(SORTING_PARTS, count // max(size, 1 << 14))))
    parts = partition.count(count, per_part)
    ranges = max(1, min(size, round(problem.bytes / (pre * partition.MAX_PART_BYTES))))
    units = pre * ranges
    strips = partition.count(post, WIDE * vector_lanes(precision(problem)))
    given = {
        "parts": parts,
        "count": count,
        "size": size,
        "slices": slices,
        "indices": problem["indices"],
        "dy": problem["dy"],
        "dx": problem["dx"],
        "counts": workspace.shared(parts * size, "int32"),
        "starts": workspace.shared(size + 1, "int64"),
        "hot": workspace.shared(HOT + 2, "int64"),
        "order": workspace.shared(count + AHEAD, "int32"),
        "ranges": ranges,
        "per_range": -(-size // ranges),
        "strips": strips,
        "stream": partition.streams(problem.bytes),
    }
    return [
        Step(count_indices, count, given, per_part),
        Step(place_indices, 1, given),
        Step(sort_indices, count, given, per_part),
        shared_out(sum_slices, units, problem.bytes / units, given),
        Step(sum_hot_slices, pre * strips, given),
    ]
