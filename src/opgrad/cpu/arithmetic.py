"""Sums, quotients and shapes of arrays that are broadcast against each other."""

import ctypes
import math
from collections.abc import Callable
from typing import Any, Final

from opgrad.contract import Shape
from opgrad.cpu.accumulate import SUM, VALUE
from opgrad.cpu.compiler.memory import copy_bytes, load_word
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import Pointer, Vector, address_of, full, like, load_one
from opgrad.cpu.loops.columns import get
from opgrad.cpu.loops.elements import elementwise, program
from opgrad.cpu.loops.map import row_writer
from opgrad.cpu.loops.reduction import grouped, sum_steps
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, Step
from opgrad.cpu.runtime.pieces import Pieces
from opgrad.problem import Problem
from opgrad.shapes import broadcast_axes, reduced_axes

# --- sums -----------------------------------------------------------------------------------------------------------


def reduce_sum_training(problem: Problem) -> Program:
    shape, of = problem.specs["x"].shape, problem.attributes
    gone = reduced_axes(shape, of["axes"], of["noop_with_empty_axes"])
    pieces = Pieces(problem)
    steps = sum_steps(grouped(shape, gone), problem["x"], problem["y"], pieces)
    return Program(steps, pieces.bytes)


# --- division ------------------------------------------------------------------------------------------------------

BLOCK: Final = 1 << 14  # elements of a row that a unit writes


@inline
def _each(p: Any, i: int, whole: bool, mask: Any) -> Vector:
    return get(p, i, whole, mask)


@inline
def _one(p: Any, i: int, whole: bool, mask: Any) -> Vector:
    return full(p, load_one(p, 0))


def quotient_kernel(a_of: Callable[..., Vector], b_of: Callable[..., Vector]) -> Kernel:
    """da and db before they are summed; a row takes of a and b each element, or one for all."""

    @inline
    def dividend(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, _, b = arrays
        return get(dy, i, whole, mask) / b_of(b, i, whole, mask)

    @inline
    def divisor(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, a, b = arrays
        v = b_of(b, i, whole, mask)
        return -(get(dy, i, whole, mask) / v) * (a_of(a, i, whole, mask) / v)

    write_dividend, write_divisor = row_writer(dividend), row_writer(divisor)

    @kernel
    def quotients(
        part, per_part, units, blocks, n, loops, table, dy: Pointer, a: Pointer, b: Pointer, da: Pointer, db: Pointer,
        stream,
    ):  # fmt: skip
        for unit in range(part * per_part, min((part + 1) * per_part, units)):
            row, begin = unit // blocks, unit % blocks * BLOCK
            a_at, b_at, rest = 0, 0, row
            for loop in range(loops):
                size = load_word(table, 3 * loop)
                a_at += rest % size * load_word(table, 3 * loop + 1)
                b_at += rest % size * load_word(table, 3 * loop + 2)
                rest //= size
            at, end = row * n, min(begin + BLOCK, n)
            arrays = (dy + at, a + a_at, b + b_at)
            write_dividend(da + at, begin, end, stream, arrays, 0)
            write_divisor(db + at, begin, end, stream, arrays, 0)

    return quotients


EACH, ONE_DIVIDEND, ONE_DIVISOR = (
    quotient_kernel(_each, _each),
    quotient_kernel(_one, _each),
    quotient_kernel(_each, _one),
)


def broadcast_loops(shape: Shape, a: Shape, b: Shape) -> list[tuple[int, int, int]]:
    """(size, stride of a, stride of b) of the fewest loops over a shape, the last first; at least one."""
    loops: list[tuple[int, int, int]] = []
    a_step = b_step = 1
    for i, size in enumerate(reversed(shape)):
        a_size = a[-1 - i] if i < len(a) else 1
        b_size = b[-1 - i] if i < len(b) else 1
        if size == 1:
            continue
        now = (size, a_step if a_size > 1 else 0, b_step if b_size > 1 else 0)
        a_step, b_step = a_step * a_size, b_step * b_size
        if loops and (now[1], now[2]) == (loops[-1][0] * loops[-1][1], loops[-1][0] * loops[-1][2]):
            loops[-1] = (loops[-1][0] * size, loops[-1][1], loops[-1][2])
        else:
            loops.append(now)
    return loops or [(1, 1, 1)]


def div_grad(problem: Problem) -> Program:
    a, b, shape = (problem.specs[name].shape for name in ("a", "b", "dy"))
    pieces, size = Pieces(problem), math.prod(shape)
    (n, a_each, b_each), *loops = broadcast_loops(shape, a, b)
    table = (ctypes.c_int64 * max(1, 3 * len(loops)))(*(word for loop in loops for word in loop))
    a_gone, b_gone = (frozenset(broadcast_axes(each, shape)[0]) for each in (a, b))
    made = EACH if a_each and b_each else ONE_DIVISOR if a_each else ONE_DIVIDEND
    full_a = pieces.take(size) if a_gone else problem["da"]
    full_b = pieces.take(size) if b_gone else problem["db"]
    steps = []
    if size:
        rows, blocks = size // n, partition.count(n, BLOCK)
        per = partition.per_part(rows * blocks, problem.bytes / (rows * blocks))
        given = {name: problem[name] for name in ("dy", "a", "b")} | {"da": full_a, "db": full_b}
        sizes = {"per_part": per, "units": rows * blocks, "blocks": blocks, "n": n, "loops": len(loops)}
        memory = {"table": ctypes.addressof(table), "stream": partition.streams(problem.bytes)}
        steps.append(Step(made, partition.count(rows * blocks, per), given | sizes | memory))
    for gone, summed, result in ((a_gone, full_a, "da"), (b_gone, full_b, "db")):
        if gone:
            steps += sum_steps(grouped(shape, gone), summed, problem[result], pieces)
    return Program(steps, pieces.bytes, tables=(table,))


# --- shapes and zeros ----------------------------------------------------------------------------------------------


@kernel
def copy_words(part, source, count, target: Pointer):
    copy_bytes(address_of(target), source, 8 * count)


def broadcast_gradient_args(problem: Problem) -> Program:
    found = broadcast_axes(problem.attributes["a_shape"], problem.attributes["b_shape"])
    steps, tables = [], []
    for name, axes in zip(("a_axes", "b_axes"), found, strict=True):
        if axes:
            table = (ctypes.c_int64 * len(axes))(*axes)
            tables.append(table)
            given = {"source": ctypes.addressof(table), "count": len(axes), "target": problem[name]}
            steps.append(Step(copy_words, 1, given))
    return Program(steps, tables=tables)


@inline
def _zero(x: Vector, alpha: float) -> Vector:
    return like(x, 0.0)


ZERO = elementwise(_zero)


def zero_gradient(problem: Problem) -> Program:
    return program(problem, ZERO, "y", "x")


# --- accumulation --------------------------------------------------------------------------------------------------


def accumulate(problem: Problem) -> Program:
    if problem.attributes["update"]:
        return program(problem, SUM, "sum", "buffer", "value")
    return program(problem, VALUE, "sum", "buffer")
