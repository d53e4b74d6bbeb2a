"""Cross-entropy whose classes are split over processes: the statistics of a shard's rows, and their gradient.

The kernels go over rows as those of opgrad.cuda.softmax do, the statistics in one loop whatever the rows' length.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.problem import Problem
from opgrad.cuda.execute import Launch, Program
from opgrad.cuda.functions import hyperbolic_tangent
from opgrad.cuda.numbers import MINUS_INFINITY, exp, only_if, scalar
from opgrad.cuda.regimes import choose, pointwise
from opgrad.cuda.rows import (
    aligned,
    body_of,
    columns_from,
    ends,
    frame,
    no_rows,
    read,
    row_of,
    samples_of,
    shift_for,
    strides,
    tiles,
    write,
)


@triton.jit
def bent(x, inverse, CAPPED: tl.constexpr):
    """tanh(x / softcap), or x."""
    return hyperbolic_tangent(x * inverse) if CAPPED else x


@triton.jit
def scaled(x, cap, inverse, factor, CAPPED: tl.constexpr):
    """The logits that the softmax is taken of."""
    return (bent(x, inverse, CAPPED) * cap if CAPPED else x) * factor


@triton.jit
def weights_at(weight, k, inside):
    """The classes' weights, 1 without any; 0 where nothing is inside."""
    if weight is None:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def taken(found, x, x_row, x_n, first, k, inside, weight, cap, inverse, factor,
          CAPPED: tl.constexpr, MOMENT: tl.constexpr, NUMBER: tl.constexpr):  # fmt: skip
    """Take a tile into the rows' maximum, sum of exponentials, weighted sum and first moment."""
    m, d, total, moment = found
    x_value = read(x, x_row, k, x_n, inside, 0.0).to(NUMBER)
    z = tl.where(inside, scaled(x_value, cap, inverse, factor, CAPPED), MINUS_INFINITY)
    larger = tl.maximum(m, tl.max(z, 1))
    shift = shift_for(larger)
    again, e = exp(m - shift), exp(z - shift[:, None])
    total += tl.sum(tl.where(inside, z * weights_at(weight, k + first, inside), 0.0), 1)
    if MOMENT:
        moment = moment * again + tl.sum(tl.where(e == 0, 0.0, e * z), 1)
    return larger, d * again + tl.sum(e, 1), total, moment


@triton.jit
def shard_statistics(
    x, x_outer, x_n, x_inner, labels, weight, statistics, samples, n, inner, first_class,
    cap: tl.float64, inverse: tl.float64, factor: tl.float64,
    CAPPED: tl.constexpr, MOMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, INDEX: tl.constexpr, NUMBER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cap, inverse, factor = scalar(cap, NUMBER), scalar(inverse, NUMBER), scalar(factor, NUMBER)
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    x_row = row_of(sample, inner, x_outer, x_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body = body_of(x_row, head, VECTOR)
    m, d = no_rows(ROWS, NUMBER)
    found = (m, d, tl.zeros([ROWS], NUMBER), tl.zeros([ROWS], NUMBER))
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        found = taken(found, x, x_row, x_n, 0, k_end, inside_end, weight, cap, inverse, factor, CAPPED, MOMENT, NUMBER)
    m, d, total, moment = found
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        k = columns_from(start, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        m, d, total, moment = taken(
            (m, d, total, moment), x, x_body, x_n, head[:, None], k, inside, weight, cap, inverse, factor,
            CAPPED, MOMENT, NUMBER,
        )  # fmt: skip
    label = tl.load(labels + sample, mask=exists, other=0).to(tl.int64) - first_class
    own = exists & (label >= 0) & (label < n)
    picked = tl.load(x + x_row + tl.where(own, label, 0) * x_n, mask=own, other=0.0).to(NUMBER)
    tl.store(statistics + sample, m, mask=exists)
    tl.store(statistics + samples + sample, d, mask=exists)
    target = tl.where(own, scaled(picked, cap, inverse, factor, CAPPED), 0.0)
    tl.store(statistics + 2 * samples + sample, target, mask=exists)
    tl.store(statistics + 3 * samples + sample, total, mask=exists)
    if MOMENT:
        tl.store(statistics + 4 * samples + sample, moment, mask=exists)


@triton.jit
def slope(x, k, label, weight, inside, m, log_s, a, b, c, e, cap, inverse, factor, CAPPED: tl.constexpr):
    """dlogits of a tile; 0 in rows that have no gradient."""
    t = bent(x, inverse, CAPPED)
    z = (t * cap if CAPPED else x) * factor
    p = exp(z - m[:, None] - log_s[:, None])
    dz = p * a[:, None] + tl.where(p == 0, 0.0, p * z * e[:, None]) + weights_at(weight, k, inside) * c[:, None]
    dz = (dz + tl.where(k == label[:, None], b[:, None], 0.0)) * factor
    if CAPPED:
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
    CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    cap, inverse, factor = scalar(cap, NUMBER), scalar(inverse, NUMBER), scalar(factor, NUMBER)
    sample, exists = samples_of(tl.program_id(0) // parts, samples, ROWS)
    part = (tl.program_id(0) % parts).to(INDEX)
    x_row, y_row = row_of(sample, inner, x_outer, x_inner), row_of(sample, inner, y_outer, y_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    label = tl.load(labels + sample, mask=exists, other=0).to(tl.int64) - first_class
    m = factor_of(factors, 0, sample, samples, exists, NUMBER)
    log_s = factor_of(factors, 1, sample, samples, exists, NUMBER)
    a = factor_of(factors, 2, sample, samples, exists, NUMBER)
    b = factor_of(factors, 3, sample, samples, exists, NUMBER)
    c = factor_of(factors, 4, sample, samples, exists, NUMBER)
    e = factor_of(factors, 5, sample, samples, exists, NUMBER)
    k = columns_from(part * BLOCK, BLOCK, INDEX)
    inside = exists[:, None] & (k < body[:, None])
    x_value = read(x, body_of(x_row, head, VECTOR), k, x_n, inside, 0.0).to(NUMBER)
    column = k + head[:, None]
    value = slope(x_value, column, label, weight, inside, m, log_s, a, b, c, e, cap, inverse, factor, CAPPED)
    if PEEL:
        k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
        x_end = read(x, x_row, k_end, x_n, inside_end, 0.0).to(NUMBER)
        end = slope(x_end, k_end, label, weight, inside_end, m, log_s, a, b, c, e, cap, inverse, factor, CAPPED)
        write(y, y_row, k_end, y_n, inside_end, end)
    write(y, body_of(y_row, head, VECTOR), k, y_n, inside, value)


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
    given |= {"factors": work["factors"], "parts": -(-work.n // regime.block)}
    launch = Launch(shard_gradient, (tiles(work, regime) * given["parts"],), given, regime.warps)
    return Program([launch], regime=regime.name)
