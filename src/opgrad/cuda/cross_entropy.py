"""Softmax cross-entropy from integer labels: the loss, its gradient, and both in one pass over the logits.

The kernels go over rows as those of opgrad.cuda.softmax do. A sample whose label is out of range has a loss and a
gradient of NaN; its label is never followed.
"""

from typing import Any

import triton
import triton.language as tl

from opgrad.contract.problem import Operand, Problem
from opgrad.contract.ranges import wrong_label
from opgrad.cuda.execute import Launch, Program, Scratch, Space
from opgrad.cuda.labels import add_up, checks, read_labels, sum_blocks, sum_sums, sum_weights, weights_of
from opgrad.cuda.numbers import MINUS_INFINITY, exp, narrow, only_if
from opgrad.cuda.regimes import Regime, choose, pointwise
from opgrad.cuda.rows import (
    aligned,
    body_of,
    columns_from,
    ends,
    fold,
    frame,
    joined,
    no_rows,
    read,
    row_of,
    samples_of,
    shared,
    store_share,
    strides,
    tiles,
    write,
)

SUMMED = 4096  # losses or weights that one program adds up
WARPS = 8  # of such a program


@triton.jit
def divisor(total, samples, REDUCTION: tl.constexpr, ROWS: tl.constexpr):
    """The divisor of each sample's loss: for "mean" the sum of the weights (without weights their count), else 1."""
    if REDUCTION == "mean":
        if total is None:
            return tl.full([ROWS], samples, tl.float64)
        else:
            return tl.load(total) + tl.zeros([ROWS], tl.float64)
    else:
        return tl.full([ROWS], 1.0, tl.float64)


@triton.jit
def targets(
    labels, weight, total, sample, exists, samples, n, ignore,
    IGNORES: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each sample: its class (-1: none), its weight, its factor in the gradient, whether that is silent.

    The factor is the weight over the divisor. A wrong label makes weight and factor NaN; ignored samples are silent.
    """
    label, counts, valid = read_labels(labels, sample, exists, n, ignore, IGNORES)
    weights = tl.where(counts & ~valid, float("nan"), weights_of(weight, label, counts, valid))
    by = divisor(total, samples, REDUCTION, ROWS)
    silent = ~counts | (valid & (by == 0))
    return tl.where(valid, label, -1), weights, tl.where(silent, 0.0, weights / by), silent


@triton.jit
def losses_of(picked, m, d, weights):
    """-weight * log_prob[label], which is 0 where the weight is 0 because the sample is ignored."""
    return weights * (tl.log(d) + (m - picked)).to(tl.float64)


@triton.jit
def outcome(x, m, d, column, target, factor, silent, GRADIENT: tl.constexpr):
    """The second result: the gradient factor * (p - onehot), or log_prob."""
    if GRADIENT:
        p = exp(x - m[:, None]) * (1.0 / d)[:, None]
        onehot = tl.where(column == target[:, None], 1.0, 0.0)
        return tl.where(silent[:, None], 0.0, factor[:, None] * (p - onehot))
    else:
        return x - m[:, None] - tl.log(d)[:, None]


@triton.jit
def pick(x, row, target, stride, NUMBER: tl.constexpr):
    """The logits of the samples' classes; 0 where there is none."""
    return tl.load(x + row + target * stride, mask=target >= 0, other=0.0).to(NUMBER)


@triton.jit
def store_losses(losses, sample, exists, picked, m, d, weights, target, silent):
    value = tl.where(silent & (target < 0), 0.0, losses_of(picked, m, d, weights))
    tl.store(losses + sample, narrow(value, losses.dtype.element_ty), mask=exists)


@triton.jit
def loss_tile(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, labels, weight, total, losses, samples, n, inner, ignore,
    GRADIENT: tl.constexpr, IGNORES: tl.constexpr, REDUCTION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr, INDEX: tl.constexpr,
    NUMBER: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    target, weights, factor, silent = targets(
        labels, weight, total, sample, exists, samples, n, ignore, IGNORES, REDUCTION, ROWS
    )
    x_row = row_of(sample, inner, x_outer, x_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body = body_of(x_row, head, VECTOR)
    k = columns_from(0, BLOCK, INDEX)
    inside = exists[:, None] & (k < body[:, None])

    picked = pick(x, x_row, target, x_n, NUMBER)
    value = read(x, x_body, k, x_n, inside, MINUS_INFINITY).to(NUMBER)
    m = tl.max(value, 1)
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        end = read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY).to(NUMBER)
        m = tl.maximum(m, tl.max(end, 1))
    d = tl.sum(exp(value - m[:, None]), 1)
    if PEEL:
        d += tl.sum(exp(end - m[:, None]), 1)
    store_losses(losses, sample, exists, picked, m, d, weights, target, silent)
    if y is not None:
        y_row, f = row_of(sample, inner, y_outer, y_inner), factor.to(NUMBER)
        if PEEL:
            write(y, y_row, k_end, y_n, inside_end, outcome(end, m, d, k_end, target, f, silent, GRADIENT))
        column = k + head[:, None]
        y_body = body_of(y_row, head, VECTOR)
        write(y, y_body, k, y_n, inside, outcome(value, m, d, column, target, f, silent, GRADIENT))


@triton.jit
def loss_loop(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, labels, weight, total, losses, samples, n, inner, ignore,
    GRADIENT: tl.constexpr, IGNORES: tl.constexpr, REDUCTION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr, INDEX: tl.constexpr,
    NUMBER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    target, weights, factor, silent = targets(
        labels, weight, total, sample, exists, samples, n, ignore, IGNORES, REDUCTION, ROWS
    )
    x_row = row_of(sample, inner, x_outer, x_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    x_body = body_of(x_row, head, VECTOR)

    picked = pick(x, x_row, target, x_n, NUMBER)
    m, d = no_rows(ROWS, NUMBER)
    if PEEL:
        k_end, inside_end = ends(head, body, n, exists, VECTOR)
        end = read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY).to(NUMBER)
        m, d = fold(m, d, end)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        k = columns_from(start, BLOCK, INDEX)
        inside = exists[:, None] & (k < body[:, None])
        m, d = fold(m, d, read(x, x_body, k, x_n, inside, MINUS_INFINITY).to(NUMBER))
    store_losses(losses, sample, exists, picked, m, d, weights, target, silent)
    if y is not None:
        y_row, f = row_of(sample, inner, y_outer, y_inner), factor.to(NUMBER)
        if PEEL:
            write(y, y_row, k_end, y_n, inside_end, outcome(end, m, d, k_end, target, f, silent, GRADIENT))
        y_body = body_of(y_row, head, VECTOR)
        last = (n - 1) // BLOCK * BLOCK
        for done in tl.range(0, n, BLOCK, num_stages=STAGES):
            k = columns_from(last - done, BLOCK, INDEX)
            inside = exists[:, None] & (k < body[:, None])
            value = read(x, x_body, k, x_n, inside, MINUS_INFINITY).to(NUMBER)
            column = k + head[:, None]
            write(y, y_body, k, y_n, inside, outcome(value, m, d, column, target, f, silent, GRADIENT))


@triton.jit
def loss_share(
    x, x_outer, x_n, x_inner, labels, maxima, sums, picks, samples, n, inner, ignore, parts, per_part,
    IGNORES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr,
    INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Leave the statistics of a part, and the logits of the labels' classes, before a result can overwrite these."""
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    part = tl.program_id(1).to(INDEX)
    label, _, valid = read_labels(labels, sample, exists, n, ignore, IGNORES)
    x_row = row_of(sample, inner, x_outer, x_inner)
    store_share(
        x, x_row, x_n, maxima, sums, sample, exists, part, n, parts, per_part,
        ROWS, BLOCK, VECTOR, PEEL, INDEX, NUMBER,
    )  # fmt: skip
    picked = pick(x, x_row, tl.where(valid, label, -1), x_n, NUMBER)
    tl.store(picks + sample, picked, mask=only_if(part == 0, exists))


@triton.jit
def loss_finish(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, labels, weight, total, losses, maxima, sums, picks,
    samples, n, inner, ignore, parts, per_part,
    GRADIENT: tl.constexpr, IGNORES: tl.constexpr, REDUCTION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PEEL: tl.constexpr, INDEX: tl.constexpr,
    NUMBER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0), samples, ROWS)
    part = tl.program_id(1).to(INDEX)
    target, weights, factor, silent = targets(
        labels, weight, total, sample, exists, samples, n, ignore, IGNORES, REDUCTION, ROWS
    )
    m, d = joined(maxima, sums, sample, exists, parts, PARTS)
    picked = tl.load(picks + sample, mask=exists, other=0.0)
    store_losses(losses, sample, only_if(part == 0, exists), picked, m, d, weights, target, silent)
    if y is not None:
        x_row, y_row = row_of(sample, inner, x_outer, x_inner), row_of(sample, inner, y_outer, y_inner)
        head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
        x_body, y_body, f = body_of(x_row, head, VECTOR), body_of(y_row, head, VECTOR), factor.to(NUMBER)
        if PEEL:
            k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
            end = read(x, x_row, k_end, x_n, inside_end, MINUS_INFINITY).to(NUMBER)
            write(y, y_row, k_end, y_n, inside_end, outcome(end, m, d, k_end, target, f, silent, GRADIENT))
        for step in range(0, per_part, BLOCK):
            k = columns_from(part * per_part + step, BLOCK, INDEX)
            inside = exists[:, None] & (k < body[:, None])
            value = read(x, x_body, k, x_n, inside, MINUS_INFINITY).to(NUMBER)
            column = k + head[:, None]
            write(y, y_body, k, y_n, inside, outcome(value, m, d, column, target, f, silent, GRADIENT))


@triton.jit
def reduce_losses(losses, total, loss, count, samples, REDUCTION: tl.constexpr, BLOCK: tl.constexpr):
    """loss = the sum of the losses over the divisor; 0 if that is 0."""
    by = tl.sum(divisor(total, samples, REDUCTION, 1), 0)
    value = add_up(losses, count, BLOCK)
    silent = (by == 0) & (value == value)
    tl.store(loss, narrow(tl.where(silent, 0.0, value / tl.where(silent, 1.0, by)), loss.dtype.element_ty))


# --- programs ------------------------------------------------------------------------------------------------------


def options(problem: Problem) -> dict[str, Any]:
    """The arguments that say which samples count, and how."""
    ignore = problem.attributes["ignore_index"]
    return {
        "labels": problem["labels"],
        "weight": problem["weight"],
        "ignore": ignore or 0,
        "IGNORES": ignore is not None,
        "REDUCTION": problem.attributes["reduction"],
    }


def weigh(problem: Problem, given: dict[str, Any], space: Space) -> tuple[list[Launch], Scratch | None]:
    """The launches that sum the samples' weights, and where the sum will be; None: it is the number of samples."""
    samples = problem.outer * problem.inner
    if given["REDUCTION"] != "mean" or (given["weight"] is None and not given["IGNORES"]):
        return [], None
    blocks = max(-(-samples // SUMMED), 1)
    sums = space.take(blocks, "float64")
    arguments = {**given, "sums": sums, "samples": samples, "n": problem.n, "BLOCK": SUMMED}
    launches = [Launch(sum_weights, (blocks,), arguments, WARPS)]
    if blocks == 1:
        return launches, sums
    total = space.take(1, "float64")
    arguments = {"numbers": sums, "total": total, "count": blocks, "BLOCK": SUMMED}
    return [*launches, Launch(sum_sums, (1,), arguments, WARPS)], total


def reducing(
    problem: Problem, given: dict[str, Any], losses: Scratch, total: Scratch | None, space: Space
) -> list[Launch]:
    """The launches that make one loss of the samples' losses."""
    samples = problem.outer * problem.inner
    launches, count = [], samples
    if samples > SUMMED:
        count = -(-samples // SUMMED)
        sums = space.take(count, "float64")
        arguments = {"numbers": losses, "sums": sums, "count": samples, "BLOCK": SUMMED}
        launches, losses = [Launch(sum_blocks, (count,), arguments, WARPS)], sums
    arguments = {"losses": losses, "total": total, "loss": problem["loss"], "count": count, "samples": samples}
    arguments |= {"REDUCTION": given["REDUCTION"], "BLOCK": SUMMED}
    return [*launches, Launch(reduce_losses, (1,), arguments, WARPS)]


def with_loss(problem: Problem, operator: str, second: Operand | None, gradient: bool) -> Program:
    """The program of the operators that read logits; `second` is the result beside the loss."""
    operands = [problem["logits"]] + ([second] if second else [])
    samples, space = problem.outer * problem.inner, Space()
    space.take(2, "int64")  # the status of the checks
    given = options(problem)
    weighing, total = weigh(problem, given, space)
    losses = problem["loss"] if given["REDUCTION"] == "none" else space.take(samples, "float64")
    launches, name = list(weighing), ""
    if samples:
        regime = choose(problem, operands, streams=1, labelled=True)
        name = regime.name
        given |= {"total": total, "losses": losses, "GRADIENT": gradient}
        given |= frame(problem, regime, operands) | strides(x=problem["logits"], y=second)
        launches += over_rows(problem, regime, given, space)
    if given["REDUCTION"] != "none":
        launches += reducing(problem, given, losses, total, space)
    ignore = problem.attributes["ignore_index"]
    checking = checks(problem["labels"], samples, 0, problem.n, ignore)
    return Program(launches, space.size, name, checking, wrong_label(problem, operator))


def over_rows(problem: Problem, regime: Regime, given: dict[str, Any], space: Space) -> list[Launch]:
    if regime.parts > 1:
        given["picks"] = space.take(given["samples"], "float64" if given["NUMBER"] == tl.float64 else "float32")
        return shared(loss_share, loss_finish, problem, regime, given, ("maxima", "sums"), space)
    kernel = loss_loop if regime.name.startswith("long") else loss_tile
    return [Launch(kernel, (tiles(problem, regime),), given, regime.warps, regime.ctas)]


def softmax_cross_entropy_loss(problem: Problem) -> Program:
    return with_loss(problem, "softmax_cross_entropy_loss", problem["log_prob"], gradient=False)


def softmax_cross_entropy_loss_only(problem: Problem) -> Program:
    return with_loss(problem, "softmax_cross_entropy_loss_only", None, gradient=False)


def softmax_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return with_loss(problem, "softmax_cross_entropy_loss_and_grad", problem["dlogits"], gradient=True)


# --- the gradient from log_prob ------------------------------------------------------------------------------------


@triton.jit
def log_prob_grad(x, column, target, factor, silent):
    onehot = tl.where(column == target[:, None], 1.0, 0.0)
    return tl.where(silent[:, None], 0.0, factor[:, None] * (exp(x) - onehot))


@triton.jit
def loss_grad(
    x, x_outer, x_n, x_inner, bias, bias_outer, bias_n, bias_inner, dx, dx_outer, dx_n, dx_inner,
    dy, labels, weight, total, samples, n, inner, ignore, parts,
    IGNORES: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PEEL: tl.constexpr, INDEX: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    sample, exists = samples_of(tl.program_id(0) // parts, samples, ROWS)
    part = (tl.program_id(0) % parts).to(INDEX)
    target, _, factor, silent = targets(
        labels, weight, total, sample, exists, samples, n, ignore, IGNORES, REDUCTION, ROWS
    )
    if REDUCTION == "none":
        upstream = tl.load(dy + sample, mask=exists, other=0.0).to(tl.float64)
    else:
        upstream = tl.load(dy).to(tl.float64)
    f = (factor * upstream).to(NUMBER)
    x_row, dx_row = row_of(sample, inner, x_outer, x_inner), row_of(sample, inner, dx_outer, dx_inner)
    head, body = aligned(x_row, n, VECTOR, PEEL, INDEX)
    bias_row = row_of(sample, inner, bias_outer, bias_inner)

    k = columns_from(part * BLOCK, BLOCK, INDEX)
    inside = exists[:, None] & (k < body[:, None])
    x_value = read(x, body_of(x_row, head, VECTOR), k, x_n, inside, 0.0).to(NUMBER)
    value = log_prob_grad(x_value, k + head[:, None], target, f, silent)
    if bias is not None:
        value += read(bias, body_of(bias_row, head, VECTOR), k, bias_n, inside, 0.0)
    if PEEL:
        k_end, inside_end = ends(head, body, n, only_if(part == 0, exists), VECTOR)
        x_end = read(x, x_row, k_end, x_n, inside_end, 0.0).to(NUMBER)
        end = log_prob_grad(x_end, k_end, target, f, silent)
        if bias is not None:
            end += read(bias, bias_row, k_end, bias_n, inside_end, 0.0)
        write(dx, dx_row, k_end, dx_n, inside_end, end)
    write(dx, body_of(dx_row, head, VECTOR), k, dx_n, inside, value)


def softmax_cross_entropy_loss_grad(problem: Problem) -> Program:
    operands = [operand for name in ("log_prob", "bias", "dlogits") if (operand := problem[name]) is not None]
    samples, space = problem.outer * problem.inner, Space()
    space.take(2, "int64")  # the status of the checks
    given = options(problem)
    launches, total = weigh(problem, given, space)
    regime = pointwise(problem, operands)
    if samples * problem.n:
        given |= frame(problem, regime, operands) | {"total": total, "dy": problem["dy"]}
        given |= strides(x=problem["log_prob"], bias=problem["bias"], dx=problem["dlogits"])
        given["parts"] = -(-problem.n // regime.block)
        launches.append(Launch(loss_grad, (tiles(problem, regime) * given["parts"],), given, regime.warps))
    checking = checks(problem["labels"], samples, 0, problem.n, problem.attributes["ignore_index"])
    explain = wrong_label(problem, "softmax_cross_entropy_loss_grad")
    return Program(launches, space.size, regime.name, checking, explain)
