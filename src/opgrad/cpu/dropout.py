"""Dropout and its gradient."""

import math
from typing import Any, Final

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import Float, Pointer, Vector, load_one, select
from opgrad.cpu.loops import elements
from opgrad.cpu.loops.rows import map_one, map_two, write_same
from opgrad.cpu.numerics.philox import keep_run
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import Program, Step
from opgrad.problem import Problem
from opgrad.random import keep_threshold, kept_scale

BLOCK: Final = 1 << 12  # elements whose mask is still in the first-level cache when it is read again


@inline
def _kept(x: Vector, mask: Vector, scale: float, unused: float, i: Any) -> Vector:
    return select(mask != 0.0, x * scale, 0.0)


@inline
def _true(x: Vector, unused: float, also_unused: float, i: Vector) -> Vector:
    return select(i >= 0, 1.0, x)


@inline
def _gradient(dy: Vector, mask: Vector, scale: float) -> Vector:
    return select(mask != 0.0, dy * scale, 0.0)


@inline
def _whole_gradient(dy: Vector, unused: float) -> Vector:
    return dy


write_kept, write_true = map_two(_kept), map_one(_true)
GRADIENT, WHOLE_GRADIENT = elements.binary(_gradient), elements.unary(_whole_gradient)


@kernel
def drop(
    part, per_part, units, n, x: Pointer, seed: Pointer, y: Pointer, mask: Pointer, threshold, scale: Float, stream
):
    """A unit is a block of elements; the mask is written first."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        begin = unit * BLOCK
        count = min(BLOCK, n - begin)
        keep_run(mask + begin, 0, count, begin, 1, load_one(seed, 0), 0, threshold)
        write_kept(y + begin, 0, count, stream, x + begin, mask + begin, scale, 0.0)


@kernel
def keep_all(part, per_part, units, n, x: Pointer, y: Pointer, mask: Pointer, stream):
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        begin, end = unit * BLOCK, min((unit + 1) * BLOCK, n)
        write_same(y, begin, end, stream, x, 0.0, 0.0)
        write_true(mask, begin, end, stream, x, 0.0, 0.0)


def dropout(problem: Problem) -> Program:
    n = math.prod(problem.specs["x"].shape)
    if not n:
        return Program(())
    ratio, trains = problem.attributes["ratio"], problem.attributes["training_mode"]
    units = partition.count(n, BLOCK)
    per = partition.per_part(units, (2 * DTYPES[problem["x"].dtype].itemsize + 1) * BLOCK)
    arguments = {"per_part": per, "units": units, "n": n, "stream": partition.streams(problem.bytes)}
    arguments |= {name: problem[name] for name in ("x", "seed", "y", "mask")}
    if not trains or ratio == 0.0:
        return Program((Step(keep_all, partition.count(units, per), arguments),))
    arguments |= {"threshold": keep_threshold(ratio), "scale": kept_scale(ratio)}
    return Program((Step(drop, partition.count(units, per), arguments),))


def dropout_grad(problem: Problem) -> Program:
    ratio = problem.attributes["ratio"]
    if not problem.attributes["training_mode"] or ratio == 0.0:
        return elements.program(problem, WHOLE_GRADIENT, "dx", x=problem["dy"])
    return elements.program(problem, GRADIENT, "dx", kept_scale(ratio), a=problem["dy"], b=problem["mask"])
