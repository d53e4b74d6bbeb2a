"""Softmax cross-entropy from integer labels: the loss, its gradient, and both in one pass over the logits.

The kernels go over rows by the skeleton of opgrad.cuda.rows. A sample whose label is out of range has a loss and a
gradient of NaN; its label is never followed.
"""

from typing import Any

import triton
import triton.language as tl

from opgrad.contract.signature import Operand, Problem, wrong_label
from opgrad.cuda.execute import Launch, Program, Scratch, Space
from opgrad.cuda.labels import add_up, checks, is_label, read_labels, sum_blocks, sum_sums, sum_weights, weights_of
from opgrad.cuda.numbers import MINUS_INFINITY, exp, narrow, only_if
from opgrad.cuda.regimes import choose, pointwise
from opgrad.cuda.rows import (
    FINISH,
    LOOP,
    SHARE,
    array_of,
    dtype_of,
    exponential,
    frame,
    point_launch,
    row_launches,
    rows_of,
    statistics,
    strides,
    write_rows,
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
    silent = ~counts
    if weight is not None:
        silent = silent | (valid & (by == 0))
    return tl.where(valid, label, -1), weights, tl.where(silent, 0.0, weights / by), silent


@triton.jit
def losses_of(picked, m, d, weights):
    """-weight * log_prob[label], which is 0 where the weight is 0 because the sample is ignored."""
    return weights * (tl.log(d) + (m - picked)).to(tl.float64)


@triton.jit
def less_onehot(e, scale, factor, target, silent, column):
    """e * scale - factor * onehot; 0 in rows that are silent, whatever the numbers."""
    e = tl.where(silent[:, None], 0.0, e)
    scale, factor = tl.where(silent, 0.0, scale), tl.where(silent, 0.0, factor)
    return tl.fma(e, scale[:, None], tl.where(is_label(column, target), -factor[:, None], 0.0))


@triton.jit
def loss_gradient(x, other, numbers, column, inside, EXP: tl.constexpr):
    """factor * (p - onehot)."""
    m, d, target, factor, silent = numbers
    return less_onehot(EXP(x - m[:, None]), factor * (1.0 / d), factor, target, silent, column)


@triton.jit
def zero(x, other, numbers, column, inside, given):
    return tl.zeros_like(x)


@triton.jit
def leave_out(losses, y, x, rows, n, T: tl.constexpr):
    """Loss and gradient of a sample that is ignored, of which nothing is read."""
    tl.store(losses + rows[0], tl.zeros([1], losses.dtype.element_ty), mask=rows[1])
    if y is not None:
        write_rows(y, x, None, x, rows, n, 0, None, None, zero, 0.0, LOOP, T)


@triton.jit
def log_prob(x, other, numbers, column, inside, given):
    m, d, _, _, _ = numbers
    return x - m[:, None] - tl.log(d)[:, None]


@triton.jit
def loss_rows(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, labels, weight, total, losses, maxima, sums, picks,
    samples, n, inner, ignore, parts, per_part,
    RESULT: tl.constexpr, EXP: tl.constexpr, IGNORES: tl.constexpr, REDUCTION: tl.constexpr, MODE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    rows = rows_of(samples, n, inner, x_outer, x_inner, parts, MODE, T)
    sample, exists, _, _, part = rows
    target, weights, factor, silent = targets(
        labels, weight, total, sample, exists, samples, n, ignore, IGNORES, REDUCTION, T.rows
    )
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    if T.rows == 1 and MODE <= LOOP and RESULT is not log_prob:
        if tl.max((silent & (target < 0)).to(tl.int32), 0) > 0:
            b = array_of(y, rows, inner, y_outer, y_n, y_inner) if y is not None else None
            leave_out(losses, b, a, rows, n, T)
            return
        silent = silent & (target >= 0)
    if MODE == FINISH:
        picked = tl.load(picks + sample, mask=exists, other=0.0)
    else:
        picked = tl.load(x + a[1] + target * x_n, mask=target >= 0, other=0.0).to(T.number)
    found, kept = statistics(a, maxima, sums, rows, n, parts, per_part, EXP, MODE, T)
    m, d = found
    first = only_if(part == 0, exists) if MODE >= SHARE else exists  # of the programs that share rows
    if MODE == SHARE:  # before a result can overwrite them
        tl.store(picks + sample, picked, mask=first)
    else:
        value = tl.where(silent & (target < 0), 0.0, losses_of(picked, m, d, weights))
        tl.store(losses + sample, narrow(value, losses.dtype.element_ty), mask=first)
        if y is not None:
            numbers = (m, d, target, factor.to(T.number), silent)
            y_rows = array_of(y, rows, inner, y_outer, y_n, y_inner)
            write_rows(y_rows, a, None, kept, rows, n, per_part, numbers, EXP, RESULT, MINUS_INFINITY, MODE, T)


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


def with_loss(problem: Problem, operator: str, second: Operand | None, result: Any) -> Program:
    """The program of the operators that read logits; `second` is the result beside the loss, of elements `result`."""
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
        given |= {"total": total, "losses": losses, "RESULT": result, "picks": None}
        given["EXP"] = exponential(second or problem["logits"])
        given |= frame(problem, regime, operands) | strides(x=problem["logits"], y=second)
        if regime.parts > 1:
            given["picks"] = space.take(samples, dtype_of(given))
        launches += row_launches(loss_rows, problem, regime, given, ("maxima", "sums"), space)
    if given["REDUCTION"] != "none":
        launches += reducing(problem, given, losses, total, space)
    ignore = problem.attributes["ignore_index"]
    checking = checks(problem["labels"], samples, 0, problem.n, ignore)
    return Program(launches, space.size, name, checking, wrong_label(problem, operator))


def softmax_cross_entropy_loss(problem: Problem) -> Program:
    return with_loss(problem, "softmax_cross_entropy_loss", problem["log_prob"], log_prob)


def softmax_cross_entropy_loss_only(problem: Problem) -> Program:
    return with_loss(problem, "softmax_cross_entropy_loss_only", None, log_prob)


def softmax_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return with_loss(problem, "softmax_cross_entropy_loss_and_grad", problem["dlogits"], loss_gradient)


# --- the gradient from log_prob ------------------------------------------------------------------------------------


@triton.jit
def log_prob_grad(x, bias, numbers, column, inside, has_bias):
    target, factor, silent = numbers
    value = less_onehot(exp(x), factor, factor, target, silent, column)
    return value + bias if has_bias else value


@triton.jit
def loss_grad(
    x, x_outer, x_n, x_inner, bias, bias_outer, bias_n, bias_inner, dx, dx_outer, dx_n, dx_inner,
    dy, labels, weight, total, samples, n, inner, ignore, parts,
    IGNORES: tl.constexpr, REDUCTION: tl.constexpr, MODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    rows = rows_of(samples, n, inner, x_outer, x_inner, parts, MODE, T)
    sample, exists, _, _, _ = rows
    target, _, factor, silent = targets(
        labels, weight, total, sample, exists, samples, n, ignore, IGNORES, REDUCTION, T.rows
    )
    if REDUCTION == "none":
        upstream = tl.load(dy + sample, mask=exists, other=0.0).to(tl.float64)
    else:
        upstream = tl.load(dy).to(tl.float64)
    numbers = (target, (factor * upstream).to(T.number), silent)
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    b = array_of(bias, rows, inner, bias_outer, bias_n, bias_inner) if bias is not None else None
    dx_rows = array_of(dx, rows, inner, dx_outer, dx_n, dx_inner)
    write_rows(dx_rows, a, b, a, rows, n, 0, numbers, bias is not None, log_prob_grad, 0.0, MODE, T)


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
        launches.append(point_launch(loss_grad, problem, regime, given))
    checking = checks(problem["labels"], samples, 0, problem.n, problem.attributes["ignore_index"])
    explain = wrong_label(problem, "softmax_cross_entropy_loss_grad")
    return Program(launches, space.size, regime.name, checking, explain)
