"""Operators on any number of arrays: a step for each of them, shared out to threads like any other."""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

import numpy as np

from opgrad.cpu.compiler.memory import copy_bytes, load_word, store_u8, store_word
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import (
    Pointer,
    Vector,
    absolute,
    address_of,
    first,
    first_lane,
    fma,
    full,
    lanes,
    like,
    load,
    load_masked,
    load_one,
    number,
    reduce_add,
    select,
    sqrt,
    store_one,
)
from opgrad.cpu.loops.map import write_times
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.problem import Operand, Problem

BLOCK: Final = 1 << 16  # bytes that are copied in one go
PIECE: Final = 1 << 15  # elements that one part works on
CHUNK: Final = 64  # squares that are added to each other before they join the total
INFINITY: Final = float("inf")
FOUND = 8 * STATUS_WORDS  # where in scratch memory the words of the parts begin


# --- moving --------------------------------------------------------------------------------------------------------


@kernel
def copy_rows(part, per_part, units, blocks, size, x: Pointer, x_offset, x_row, y: Pointer, y_offset, y_row):
    """Copy rows of `size` bytes between places `x_row` and `y_row` bytes apart; a unit is a block of one row."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, begin = unit // blocks, unit % blocks * BLOCK
        source = address_of(x) + x_offset + row * x_row + begin
        copy_bytes(address_of(y) + y_offset + row * y_row + begin, source, min(BLOCK, size - begin))


def copying(rows: int, size: int, x: Operand, x_place: tuple[int, int], y: Operand, y_place: tuple[int, int]) -> Step:
    """The step that copies so many rows of so many bytes; a place is an offset and the bytes between rows."""
    blocks = max(1, partition.count(size, BLOCK))
    units = rows * blocks if size else 0
    per = partition.per_part(units, 2 * min(size, BLOCK)) if units else 1
    sizes = {"per_part": per, "units": units, "blocks": blocks, "size": size}
    rest = {"x_offset": x_place[0], "x_row": x_place[1], "y_offset": y_place[0], "y_row": y_place[1]}
    return Step(copy_rows, partition.count(units, per), {**sizes, "x": x, "y": y, **rest})


def _names(problem: Problem, parameter: str) -> list[str]:
    return [name for name in problem.operands if name.startswith(f"{parameter}[")]


def _bytes_behind(problem: Problem, name: str) -> int:
    """The bytes of a slice of an array along the axis."""
    spec = problem.specs[name]
    return math.prod(spec.shape[problem.attributes["axis"].stop :]) * spec.dtype.itemsize


def _joining(problem: Problem, whole: str, pieces: str) -> Iterator[tuple[str, int, int, int, int]]:
    """For each piece: its name, how many rows it has, their bytes, where they begin in the whole, its row's bytes."""
    axis = problem.attributes["axis"].start
    unit = _bytes_behind(problem, whole)
    rows, row = math.prod(problem.specs[whole].shape[:axis]), problem.specs[whole].shape[axis] * unit
    names = _names(problem, pieces)
    sizes = [problem.specs[name].shape[axis] * unit for name in names]
    for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
        yield name, rows, size, end - size, row


@kernel
def write_words(part, count, table, lengths: Pointer):
    copy_bytes(address_of(lengths), table, 8 * count)


def concat_training(problem: Problem) -> Program:
    steps = [
        copying(rows, size, problem[name], (0, size), problem["y"], (begin, row))
        for name, rows, size, begin, row in _joining(problem, "y", "arrays")
    ]
    axis = problem.attributes["axis"].start
    table = np.array([problem.specs[name].shape[axis] for name in _names(problem, "arrays")], np.int64)
    arguments = {"count": table.size, "table": table.ctypes.data, "lengths": problem["lengths"]}
    return Program([*steps, Step(write_words, 1, arguments)], tables=(table,))


def split_training(problem: Problem) -> Program:
    made, wanted = len(_names(problem, "pieces")), len(problem.attributes["split"])
    if made != wanted:
        raise ValueError(f"split_training: split has {wanted} entries, expected {made}, one for each result")
    return Program(
        [
            copying(rows, size, problem["x"], (begin, row), problem[name], (0, size))
            for name, rows, size, begin, row in _joining(problem, "x", "pieces")
        ]
    )


def pass_through(problem: Problem) -> Program:
    steps = []
    for name, copy in zip(_names(problem, "arrays"), _names(problem, "copies"), strict=True):
        size = _elements(problem, name) * problem.specs[name].dtype.itemsize
        steps.append(copying(1, size, problem[name], (0, 0), problem[copy], (0, 0)))
    return Program(steps)


# --- one number for all of them ------------------------------------------------------------------------------------


def _elements(problem: Problem, name: str) -> int:
    return math.prod(problem.specs[name].shape)


def _over_parts(
    problem: Problem, each: Kernel, last: Kernel, arguments: dict[str, Any], result: str, word: str
) -> Program:
    """A step for each array, whose parts leave a word each, and one that makes the result of all the words."""
    steps, words = [], 0
    for name in _names(problem, "arrays"):
        size = _elements(problem, name)
        found = Scratch(FOUND + 8 * words, word)
        count = partition.count(size, PIECE)
        steps.append(Step(each, count, {**arguments, "size": size, "x": problem[name], "found": found}))
        words += count
    steps.append(Step(last, 1, {"count": words, "found": Scratch(FOUND, word), "y": problem[result]}))
    return Program(steps, FOUND + 8 * words)


@inline
def wrong_lanes(v: Vector, infinities: int, nans: int) -> Vector:
    """1 in each lane that holds what is looked for, else 0."""
    wrong = like(v, 0.0)
    if infinities:
        wrong = select(absolute(v) == INFINITY, 1.0, wrong)
    if nans:
        wrong = select(v != v, 1.0, wrong)
    return wrong


@kernel
def find_wrong(part, size, x: Pointer, infinities, nans, found):
    """found[part] = how many elements of this piece are what is looked for."""
    i, end = part * PIECE, min((part + 1) * PIECE, size)
    w, wrong = lanes(x), full(x, 0.0)
    while i + w <= end:
        wrong = wrong + wrong_lanes(load(x, i), infinities, nans)
        i += w
    if i < end:
        wrong = wrong + wrong_lanes(load_masked(x, i, first(x, end - i), 0.0), infinities, nans)
    store_word(found, part, 1 if reduce_add(wrong) > 0.0 else 0)


@kernel
def none_found(part, count, found, y: Pointer):
    finite = 1
    for i in range(count):
        if load_word(found, i):
            finite = 0
    store_u8(address_of(y), 0, finite)


@kernel
def sum_squares(part, size, x: Pointer, found: Pointer):
    """found[part] = the sum of the squares of this piece, in float64 as `found` is."""
    i, end = part * PIECE, min((part + 1) * PIECE, size)
    w, total = lanes(x), full(x, 0.0)
    while i + w <= end:
        chunk, chunk_end = full(x, 0.0), min(i + CHUNK * w, end)
        while i + w <= chunk_end:
            v = load(x, i)
            chunk = fma(v, v, chunk)
            i += w
        total = total + chunk
    if i < end:
        v = load_masked(x, i, first(x, end - i), 0.0)
        total = fma(v, v, total)
    store_one(found, part, reduce_add(total))


@kernel
def root_of_sum(part, count, found: Pointer, y: Pointer):
    total = number(found, 0.0)
    for i in range(count):
        total += load_one(found, i)
    store_one(y, 0, first_lane(sqrt(full(found, total))))


def is_all_finite(problem: Problem) -> Program:
    infinities, nans = not problem.attributes["isnan_only"], not problem.attributes["isinf_only"]
    if not infinities and not nans:
        raise ValueError("is_all_finite: isinf_only and isnan_only are both set, expected at most one")
    arguments = {"infinities": infinities, "nans": nans}
    return _over_parts(problem, find_wrong, none_found, arguments, "finite", "int64")


def reduce_all_l2(problem: Problem) -> Program:
    return _over_parts(problem, sum_squares, root_of_sum, {}, "norm", "float64")


# --- scaling -------------------------------------------------------------------------------------------------------


@kernel
def scale_piece(part, size, x: Pointer, y: Pointer, offset, factor: Pointer, stream):
    begin, end = part * PIECE, min((part + 1) * PIECE, size)
    write_times(y + offset, begin, end, stream, (x,), (load_one(factor, 0),))


def mixed_precision_scale(problem: Problem) -> Program:
    names, fused = _names(problem, "arrays"), problem.attributes["fuse_outputs"]
    sizes = [_elements(problem, name) for name in names]
    stream = partition.streams(problem.bytes)
    steps = []
    for i, (name, size, end) in enumerate(zip(names, sizes, accumulate(sizes), strict=True)):
        scaled, offset = (problem["scaled[0]"], end - size) if fused else (problem[f"scaled[{i}]"], 0)
        arguments = {"size": size, "x": problem[name], "y": scaled, "offset": offset, "stream": stream}
        steps.append(Step(scale_piece, partition.count(size, PIECE), {**arguments, "factor": problem["scale"]}))
    return Program(steps)
