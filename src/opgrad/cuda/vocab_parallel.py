"""Cross-entropy whose classes are split over processes: the statistics of a shard's rows, and their gradient.

The kernels go over rows by the skeleton of opgrad.cuda.rows, the statistics in one loop whatever the rows' length.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.signature import Problem
from opgrad.cuda.execute import Launch, Program
from opgrad.cuda.functions import hyperbolic_tangent
from opgrad.cuda.labels import is_label
from opgrad.cuda.numbers import MINUS_INFINITY, exp, scalar
from opgrad.cuda.regimes import choose, pointwise
from opgrad.cuda.rows import (
    LOOP,
    array_of,
    fold_rows,
    frame,
    point_launch,
    rows_of,
    shift_for,
    strides,
    tiles,
    write_rows,
)


@triton.jit
def capped(x, cap, inverse):
    """tanh(x / cap), or x without a cap."""
    return x if cap is None else hyperbolic_tangent(x * inverse)


@triton.jit
def scaled(x, cap, inverse, factor):
    """The logits that the softmax is taken of."""
    return (x if cap is None else capped(x, cap, inverse) * cap) * factor


@triton.jit
def weights_at(weight, k, inside):
    """The classes' weights, 1 without any; 0 where nothing is inside."""
    if weight is None:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def taken(found, x, other, column, inside, given):
    """Take a tile into the rows' maximum, sum of exponentials, weighted sum, and first moment if that is asked for."""
    m, d, total, moment = found
    weight, cap, inverse, factor, moments = given
    z = tl.where(inside, scaled(x, cap, inverse, factor), MINUS_INFINITY)
    larger = tl.maximum(m, tl.max(z, 1))
    shift = shift_for(larger)
    again, e = exp(m - shift), exp(z - shift[:, None])
    total += tl.sum(tl.where(inside, z * weights_at(weight, column, inside), 0.0), 1)
    if moments is not None:
        moment = moment * again + tl.sum(tl.where(e == 0, 0.0, e * z), 1)
    return larger, d * again + tl.sum(e, 1), total, moment


@triton.jit
def own_label(labels, sample, exists, first_class, n):
    """The samples' labels, counted from the shard's first class; -1 for those of other shards."""
    label = tl.load(labels + sample, mask=exists, other=0).to(tl.int64) - first_class
    return tl.where(exists & (label >= 0) & (label < n), label, -1)


@triton.jit
def shard_statistics(
    x, x_outer, x_n, x_inner, labels, weight, statistics, samples, n, inner, first_class,
    cap: tl.float64, inverse: tl.float64, factor: tl.float64,
    CAPPED: tl.constexpr, MOMENT: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    softcap, inverse = scalar(cap, T.number) if CAPPED else None, scalar(inverse, T.number)
    factor = scalar(factor, T.number)
    rows = rows_of(samples, n, inner, x_outer, x_inner, 1, LOOP, T)
    sample, exists, _, _, _ = rows
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    zero = tl.zeros([T.rows], T.number)
    given = (weight, softcap, inverse, factor, zero if MOMENT else None)
    nothing = (tl.full([T.rows], MINUS_INFINITY, T.number), zero, zero, zero)
    m, d, total, moment = fold_rows(nothing, a, None, rows, n, 0, given, taken, 0.0, LOOP, T)
    label = own_label(labels, sample, exists, first_class, n)
    own = label >= 0
    picked = tl.load(x + a[1] + label * x_n, mask=own, other=0.0).to(T.number)
    tl.store(statistics + sample, m, mask=exists)
    tl.store(statistics + samples + sample, d, mask=exists)
    target = tl.where(own, scaled(picked, softcap, inverse, factor), 0.0)
    tl.store(statistics + 2 * samples + sample, target, mask=exists)
    tl.store(statistics + 3 * samples + sample, total, mask=exists)
    if MOMENT:
        tl.store(statistics + 4 * samples + sample, moment, mask=exists)


@triton.jit
def slope(x, other, numbers, column, inside, given):
    """dlogits of a tile; 0 in rows that have no gradient."""
    label, m, log_s, a, b, c, e = numbers
    weight, cap, inverse, factor = given
    t = capped(x, cap, inverse)
    z = (x if cap is None else t * cap) * factor
    p = exp(z - m[:, None] - log_s[:, None])
    dz = p * a[:, None] + tl.where(p == 0, 0.0, p * z * e[:, None]) + weights_at(weight, column, inside) * c[:, None]
    dz = (dz + tl.where(is_label(column, label), b[:, None], 0.0)) * factor
    if cap is not None:
        dz = dz * (1.0 - t * t)
    silent = (a == 0) & (b == 0) & (c == 0) & (e == 0)
    return tl.where(silent[:, None], 0.0, dz)


@triton.jit
def factor_of(factors, place, sample, samples, exists, NUMBER: tl.constexpr):
    """One of the rows' factors."""
    return tl.load(factors + place * samples + sample, mask=exists, other=0.0).to(NUMBER)


@triton.jit
def shard_gradient(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, labels, weight, factors, samples, n, inner, parts,
    first_class, cap: tl.float64, inverse: tl.float64, factor: tl.float64,
    CAPPED: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    softcap, inverse = scalar(cap, T.number) if CAPPED else None, scalar(inverse, T.number)
    factor = scalar(factor, T.number)
    rows = rows_of(samples, n, inner, x_outer, x_inner, parts, MODE, T)
    sample, exists, _, _, _ = rows
    numbers = (
        own_label(labels, sample, exists, first_class, n),
        factor_of(factors, 0, sample, samples, exists, T.number),
        factor_of(factors, 1, sample, samples, exists, T.number),
        factor_of(factors, 2, sample, samples, exists, T.number),
        factor_of(factors, 3, sample, samples, exists, T.number),
        factor_of(factors, 4, sample, samples, exists, T.number),
        factor_of(factors, 5, sample, samples, exists, T.number),
    )
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    y_rows, given = array_of(y, rows, inner, y_outer, y_n, y_inner), (weight, softcap, inverse, factor)
    write_rows(y_rows, a, None, a, rows, n, 0, numbers, given, slope, 0.0, MODE, T)


# --- programs ------------------------------------------------------------------------------------------------------


def _by_rows(problem: Problem) -> Problem:
    """The problem as rows of classes."""
    samples, n = problem.specs["logits"].shape
    operands = {name: operand and replace(operand, outer=n) for name, operand in problem.operands.items()}
    return replace(problem, outer=samples, n=n, inner=1, operands=operands)


def _common(problem: Problem) -> dict[str, Any]:
    """The arguments of both kernels."""
    cap = problem.attributes["softcap"]
    return {
        "labels": problem["labels"],
        "weight": problem["weight"],
        "first_class": problem.attributes["first"],
        "cap": float(cap),
        "inverse": 1 / cap if cap else 0.0,
        "factor": 1 / problem.attributes["temperature"],
        "CAPPED": cap != 0,
    }


def cross_entropy_shard(problem: Problem) -> Program:
    work = _by_rows(problem)
    if not work.outer:
        return Program([])
    operands = [work["logits"]]
    regime = choose(work, operands, streams=1, labelled=True, alone=True, functions=True)
    given = _common(work) | frame(work, regime, operands) | strides(x=work["logits"])
    given |= {"statistics": work["statistics"], "MOMENT": work.attributes["moment"]}
    return Program([Launch(shard_statistics, (tiles(work, regime),), given, regime.warps)], regime=regime.name)


def cross_entropy_shard_grad(problem: Problem) -> Program:
    work = _by_rows(problem)
    if not work.outer * work.n:
        return Program([])
    operands = [work["logits"], work["dlogits"]]
    regime = pointwise(work, operands)
    given = _common(work) | frame(work, regime, operands) | strides(x=work["logits"], y=work["dlogits"])
    given |= {"factors": work["factors"]}
    return Program([point_launch(shard_gradient, work, regime, given)], regime=regime.name)
