"""Cross-entropy whose classes are split over processes: the statistics of a shard's rows, and their gradient.

Logits that are capped or divided first go, a row at a time, to a buffer that stays in the cache.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.fold import fold_in_chunks
from opgrad.cpu.kernels.loops.map import get, mapped, mapped_by_index
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, row_rests
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.math import exp, exp_up_to_zero, tanh
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, shared_out
from opgrad.cpu.programs.workspace import Workspace


class Scale(NamedTuple):
    """z = cap * tanh(x / cap) * factor; without a cap, which is 0 then, x * factor."""

    cap: Float
    inverse: Float
    factor: Float


class Classes(NamedTuple):
    """The classes of a shard: the number of the first, and their weights, if `is_weighted`."""

    first: int
    weight: Pointer
    is_weighted: int


# --- the logits as they are, or scaled -------------------------------------------------------------------------------


@inline
def as_they_are(x, n: int, buffer, scale):
    return x


_write_scaled = mapped(lambda x, cap, inverse, factor: (tanh(x * inverse) * cap if cap != 0.0 else x) * factor)


@inline
def _numbers(x, scale):
    return v.number(x, scale.cap), v.number(x, scale.inverse), v.number(x, scale.factor)


@inline
def scaled(x, n: int, buffer, scale):
    _write_scaled(buffer, 0, n, 0, (x,), _numbers(x, scale))
    return buffer


# --- statistics ------------------------------------------------------------------------------------------------------

_sum = fold_in_chunks(lambda total, arrays, i, whole, mask, numbers: (total[0] + get(arrays[0], i, whole, mask),))
_weighted_sum = fold_in_chunks(
    lambda total, arrays, i, whole, mask, numbers: (
        total[0] + get(arrays[0], i, whole, mask) * get(arrays[1], i, whole, mask),
    )
)


@inline
def _add_moment(total, arrays, i: int, whole: bool, mask, numbers):
    z = get(arrays[0], i, whole, mask)
    e = exp_up_to_zero(z - numbers[0])
    return (total[0] + v.select(e == 0.0, 0.0, e * z),)


_moment = fold_in_chunks(_add_moment)


def statistics(transformed: Callable[..., Any]) -> Kernel:
    """The kernel for logits that `transformed` puts into place."""

    @kernel
    def of_rows(
        rows: Units, samples, n, logits: Pointer, labels: Pointer, classes: Classes, scale: Scale,
        found: Pointer, moment, buffer: Private,
    ):  # fmt: skip
        for row in rows:
            x = logits + row * n
            z = transformed(x, n, buffer, scale)
            zero, label = (v.full(z, 0.0),), v.load_one(labels, row) - classes.first
            m, rest, count = row_rests(z, n, z + n)
            s = rest + count
            if m > MINUS_INFINITY:
                s = rest / lse.exp_wide(z, m, m) + count
            if classes.is_weighted:
                total = _weighted_sum(zero, 0, n, (z, classes.weight), ())
            else:
                total = _sum(zero, 0, n, (z,), ())
            v.store_one(found, row, m)
            v.store_one(found, samples + row, s)
            v.store_one(found, 2 * samples + row, v.load_one(z, label) if 0 <= label < n else v.number(z, 0.0))
            v.store_one(found, 3 * samples + row, v.reduce_add(total[0]))
            if moment:
                v.store_one(found, 4 * samples + row, v.reduce_add(_moment(zero, 0, n, (z,), (m,))[0]))

    return of_rows


STATISTICS = {False: statistics(as_they_are), True: statistics(scaled)}


def cross_entropy_shard(problem: Problem) -> Program:
    samples, n = problem.specs["logits"].shape
    arguments = {**_common(problem), "found": problem["statistics"], "moment": problem.attributes["moment"]}
    workspace, scales = Workspace(precision(problem)), _scales(problem)
    width = vector_lanes(workspace.precision)
    arguments["buffer"] = workspace.private(n + width if scales else width)
    unit_bytes = n * DTYPES[problem["logits"].dtype].itemsize
    return Program([shared_out(STATISTICS[scales], samples, unit_bytes, arguments)] if samples else [], workspace)


def _scales(problem: Problem) -> bool:
    return problem.attributes["softcap"] != 0 or problem.attributes["temperature"] != 1


def _common(problem: Problem) -> dict[str, Any]:
    """The arguments of both kernels."""
    samples, n = problem.specs["logits"].shape
    cap, weight = problem.attributes["softcap"], problem["weight"]
    return {
        "samples": samples,
        "n": n,
        "logits": problem["logits"],
        "labels": problem["labels"],
        "classes": Classes(problem.attributes["first"], weight, weight is not None),
        "scale": Scale(cap, 1 / cap if cap else 0.0, 1 / problem.attributes["temperature"]),
    }


# --- gradient --------------------------------------------------------------------------------------------------------


@inline
def _of_logit(i, z: Vector, w, label, row) -> Vector:
    """The gradient with respect to z, for one vector of classes; `row` are the row's factors."""
    m, log_s, a, b, c, e = row
    p = exp((z - m) - log_s)
    dz = p * a + v.select(p == 0.0, 0.0, p * z * e) + w * c
    return v.select(i == label, dz + b, dz)


@inline
def _slope(i, x: Vector, w, label, row, scale) -> Vector:
    """dlogits where logits are divided alone."""
    return _of_logit(i, x * scale[2], w, label, row) * scale[2]


@inline
def _capped_slope(i, x: Vector, w, label, row, scale) -> Vector:
    cap, inverse, factor = scale
    t = tanh(x * inverse)
    return _of_logit(i, t * cap * factor, w, label, row) * factor * (1.0 - t * t)


@inline
def _factors(x, factors, row: int, samples: int):
    return (
        v.number(x, v.load_one(factors, row)),
        v.number(x, v.load_one(factors, samples + row)),
        v.number(x, v.load_one(factors, 2 * samples + row)),
        v.number(x, v.load_one(factors, 3 * samples + row)),
        v.number(x, v.load_one(factors, 4 * samples + row)),
        v.number(x, v.load_one(factors, 5 * samples + row)),
    )


def gradient(slope: Callable[..., Vector]) -> Kernel:
    """The kernel for this formula: with a branch for the cap in one kernel, tanh took most of the time of both."""
    write = mapped_by_index(lambda i, x, label, row, scale: slope(i, x, 1.0, label, row, scale))
    write_weighted = mapped_by_index(lambda i, x, w, label, row, scale: slope(i, x, w, label, row, scale))

    @kernel
    def of_rows(
        rows: Units, samples, n, logits: Pointer, labels: Pointer, classes: Classes, scale: Scale,
        factors: Pointer, dlogits: Pointer, stream,
    ):  # fmt: skip
        numbers = _numbers(logits, scale)
        for row in rows:
            x, out, own = logits + row * n, dlogits + row * n, _factors(logits, factors, row, samples)
            label = v.load_one(labels, row) - classes.first
            if own[2] == 0.0 and own[3] == 0.0 and own[4] == 0.0 and own[5] == 0.0:
                write_zeros(out, 0, n, stream)
            elif classes.is_weighted:
                write_weighted(out, 0, n, stream, (x, classes.weight), (label, own, numbers))
            else:
                write(out, 0, n, stream, (x,), (label, own, numbers))

    return of_rows


GRADIENT = {False: gradient(_slope), True: gradient(_capped_slope)}


def cross_entropy_shard_grad(problem: Problem) -> Program:
    samples, n = problem.specs["logits"].shape
    if not samples * n:
        return Program(())
    arguments = {**_common(problem), "factors": problem["factors"], "dlogits": problem["dlogits"]}
    arguments["stream"] = partition.streams(problem.bytes)
    return Program(
        [shared_out(GRADIENT[problem.attributes["softcap"] != 0], samples, problem.bytes / samples, arguments)]
    )
