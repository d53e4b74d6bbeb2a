"""Sums, quotients and shapes of arrays that are broadcast against each other."""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.contract import Shape
from opgrad.contract.problem import Problem
from opgrad.contract.shapes import broadcast_axes, reduced_axes
from opgrad.cpu.accumulate import SUM, VALUE
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import copy_bytes, load_word
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.map import get, row_writer
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import operator, program
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.reduction import grouped, sum_steps
from opgrad.cpu.programs.workspace import Workspace


def reduce_sum_training(problem: Problem) -> Program:
    shape, of = problem.specs["x"].shape, problem.attributes
    summed = reduced_axes(shape, of["axes"], of["noop_with_empty_axes"])
    workspace = Workspace(precision(problem))
    return Program(sum_steps(grouped(shape, summed), problem["x"], problem["y"], workspace), workspace)


# --- division ------------------------------------------------------------------------------------------------------


class Broadcast(NamedTuple):
    """The loops around rows: how many, and the address of their sizes and strides of a and b, the last loop first."""

    loops: int
    table: int


@inline
def offsets_of(row: int, broadcast):
    """Where the elements of a and b begin that a row takes."""
    a, b, rest = 0, 0, row
    for loop in range(broadcast.loops):
        size = load_word(broadcast.table, 3 * loop)
        a += rest % size * load_word(broadcast.table, 3 * loop + 1)
        b += rest % size * load_word(broadcast.table, 3 * loop + 2)
        rest //= size
    return a, b


@inline
def _one(p, i: int, whole: bool, mask) -> Vector:
    return v.full(p, v.load_one(p, 0))


def quotient_kernel(a_of: Callable[..., Vector], b_of: Callable[..., Vector]) -> Kernel:
    """da and db before they are summed; a row takes of a and b each element, or one for all."""

    def dividend(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, _, b = arrays
        return get(dy, i, whole, mask) / b_of(b, i, whole, mask)

    def divisor(arrays: Any, i: int, whole: bool, mask: Any, numbers: Any) -> Vector:
        dy, a, b = arrays
        by = b_of(b, i, whole, mask)
        return -(get(dy, i, whole, mask) / by) * (a_of(a, i, whole, mask) / by)

    write_dividend, write_divisor = row_writer(dividend), row_writer(divisor)

    @kernel
    def quotients(
        units: Units, blocks, n, broadcast: Broadcast,
        dy: Pointer, a: Pointer, b: Pointer, da: Pointer, db: Pointer, stream,
    ):  # fmt: skip
        for unit in units:
            row, begin = unit // blocks, unit % blocks * BLOCK
            a_at, b_at = offsets_of(row, broadcast)
            at, end = row * n, min(begin + BLOCK, n)
            arrays = (dy + at, a + a_at, b + b_at)
            write_dividend(da + at, begin, end, stream, arrays, ())
            write_divisor(db + at, begin, end, stream, arrays, ())

    return quotients


EACH, ONE_DIVIDEND, ONE_DIVISOR = quotient_kernel(get, get), quotient_kernel(_one, get), quotient_kernel(get, _one)


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
    workspace, size = Workspace(precision(problem)), math.prod(shape)
    (n, a_step, b_step), *loops = broadcast_loops(shape, a, b)
    table = (ctypes.c_int64 * max(1, 3 * len(loops)))(*(word for loop in loops for word in loop))
    a_summed, b_summed = (frozenset(broadcast_axes(each, shape)[0]) for each in (a, b))
    kernel = EACH if a_step and b_step else ONE_DIVISOR if a_step else ONE_DIVIDEND
    full_a = workspace.shared(size) if a_summed else problem["da"]
    full_b = workspace.shared(size) if b_summed else problem["db"]
    steps = []
    if size:
        blocks = partition.count(n, BLOCK)
        units = size // n * blocks
        arguments = {name: problem[name] for name in ("dy", "a", "b")} | {"da": full_a, "db": full_b}
        arguments |= {"blocks": blocks, "n": n, "broadcast": Broadcast(len(loops), ctypes.addressof(table))}
        arguments["stream"] = partition.streams(problem.bytes)
        steps.append(shared_out(kernel, units, problem.bytes / units, arguments))
    for summed, terms, result in ((a_summed, full_a, "da"), (b_summed, full_b, "db")):
        if summed:
            steps += sum_steps(grouped(shape, summed), terms, problem[result], workspace)
    return Program(steps, workspace, tables=(table,))


# --- shapes and zeros ----------------------------------------------------------------------------------------------


@kernel
def copy_words(source, count, target: Pointer):
    copy_bytes(v.address_of(target), source, 8 * count)


def broadcast_gradient_args(problem: Problem) -> Program:
    found = broadcast_axes(problem.attributes["a_shape"], problem.attributes["b_shape"])
    steps, tables = [], []
    for name, axes in zip(("a_axes", "b_axes"), found, strict=True):
        if axes:
            table = (ctypes.c_int64 * len(axes))(*axes)
            tables.append(table)
            arguments = {"source": ctypes.addressof(table), "count": len(axes), "target": problem[name]}
            steps.append(Step(copy_words, 1, arguments))
    return Program(steps, tables=tables)


@operator("y", "x")
def zero_gradient(x: Vector, alpha: float) -> Vector:
    return v.like(x, 0.0)


# --- accumulation --------------------------------------------------------------------------------------------------


def accumulate(problem: Problem) -> Program:
    if problem.attributes["update"]:
        return program(problem, SUM, "sum", "buffer", "value")
    return program(problem, VALUE, "sum", "buffer")
