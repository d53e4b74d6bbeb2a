"""Softmax cross-entropy: the plain losses, those with all options, and those whose classes are split over processes.

The kernels go over rows by the skeleton of opgrad.cuda.rows. A sample whose label is out of range has results and a
gradient of NaN; its label is never followed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import triton
import triton.language as tl

from opgrad.contract.signature import Problem, wrong_label
from opgrad.cuda import regimes
from opgrad.cuda.execute import Launch, Program, Scratch, Space
from opgrad.cuda.labels import (
    STATUS,
    add_up,
    checks,
    is_label,
    read_labels,
    sum_blocks,
    sum_sums,
    sum_weights,
    weights_of,
)
from opgrad.cuda.numbers import MINUS_INFINITY, exp, hyperbolic_tangent, narrow, only_if, scalar
from opgrad.cuda.regimes import choose, pointwise
from opgrad.cuda.rows import (
    FINISH,
    LOOP,
    SHARE,
    array_of,
    dtype_of,
    exponential,
    fold_rows,
    frame,
    point_launch,
    row_launches,
    rows_of,
    shift_for,
    statistics,
    strides,
    tiles,
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


def options(problem: Problem) -> dict[str, Any]:
    """The arguments that say which samples count, and how."""
    ignore = problem.attributes["ignore_index"]
    given = {"labels": problem["labels"], "weight": problem["weight"], "ignore": ignore or 0}
    given |= {"IGNORES": ignore is not None}
    reduction = problem.attributes.get("reduction")
    return given if reduction is None else {**given, "REDUCTION": reduction}


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


def checked(problem: Problem, launches: Sequence[Launch], space: Space, regime: str) -> Program:
    """The program of launches, with the checks of the labels."""
    ignore, samples = problem.attributes["ignore_index"], problem.outer * problem.inner
    checking = checks(problem["labels"], samples, 0, problem.n, ignore)
    return Program(launches, space.size, regime, checking, wrong_label(problem))


def with_loss(problem: Problem, result: Any, second: str = "") -> Program:
    """The program of the operators that read logits; `second` is the result beside the loss, of elements `result`."""
    other = problem[second] if second else None
    operands = [problem["logits"]] + ([other] if other else [])
    samples, space = problem.outer * problem.inner, Space(STATUS)
    given = options(problem)
    weighing, total = weigh(problem, given, space)
    losses = problem["loss"] if given["REDUCTION"] == "none" else space.take(samples, "float64")
    launches, name = list(weighing), ""
    if samples:
        regime = choose(problem, operands, streams=1, labelled=True)
        name = regime.name
        given |= {"total": total, "losses": losses, "RESULT": result, "picks": None}
        given["EXP"] = exponential(other or problem["logits"])
        given |= frame(problem, regime, operands) | strides(x=problem["logits"], y=other)
        if regime.parts > 1:
            given["picks"] = space.take(samples, dtype_of(given))
        launches += row_launches(loss_rows, problem, regime, given, ("maxima", "sums"), space)
    if given["REDUCTION"] != "none":
        launches += reducing(problem, given, losses, total, space)
    return checked(problem, launches, space, name)


softmax_cross_entropy_loss = partial(with_loss, result=log_prob, second="log_prob")
softmax_cross_entropy_loss_only = partial(with_loss, result=log_prob)
softmax_cross_entropy_loss_and_grad = partial(with_loss, result=loss_gradient, second="dlogits")

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
    samples, space = problem.outer * problem.inner, Space(STATUS)
    given = options(problem)
    launches, total = weigh(problem, given, space)
    regime = pointwise(problem, operands)
    if samples * problem.n:
        given |= frame(problem, regime, operands) | {"total": total, "dy": problem["dy"]}
        given |= strides(x=problem["log_prob"], bias=problem["bias"], dx=problem["dlogits"])
        launches.append(point_launch(loss_grad, problem, regime, given))
    return checked(problem, launches, space, regime.name)


# --- all options -----------------------------------------------------------------------------------------------------
#
# One kernel goes over tiles of rows in steps, once for all sums, and once more from the end for the gradient, where the
# steps are still in the L2 cache.

LEAST: tl.constexpr = tl.constexpr(-800.0)  # z - m of which exp is 0, in the place of -inf, where that would make NaN


@triton.jit
def z_of(x, before, after):
    """z of the logits; after is None where they have no cap."""
    return x * before if after is None else hyperbolic_tangent(x * before) * after


@triton.jit
def targets_of(q, column, inside, given):
    """weight * q without what labels add; 0 outside. q: probabilities, if there are any."""
    weight, base, share, _, _, probabilities = given
    if weight is None:
        factor = tl.where(inside, 1.0, 0.0).to(q.dtype)
    else:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(q.dtype)
    if probabilities is None:
        target = factor * base
    else:
        target = factor * base + factor * q * share
    return target


@triton.jit
def take(found, x, q, column, inside, given):
    """Take a tile into the running sums of its rows.

    They are the largest z, the sum of exp(z - m), that of exp(z - m) * (z - m), the largest logit, its place, the sums
    of target * z and of targets. A NaN is larger than any number.
    """
    m, d, slack, best, place, spread, mass = found
    _, _, _, before, after, _ = given
    target = targets_of(q, column, inside, given)
    z = tl.where(inside, z_of(x, before, after), MINUS_INFINITY)
    larger = tl.maximum(m, tl.max(z, 1))
    shift = shift_for(larger)
    down = tl.where(d == 0, 0.0, m - shift)
    below = z - shift[:, None]
    e = exp(below)
    scale = exp(down)
    slack = (slack + d * down) * scale + tl.sum(e * tl.where(below < LEAST, LEAST, below), 1)
    d = d * scale + tl.sum(e, 1)
    top = tl.max(tl.where(inside, x, MINUS_INFINITY), 1)
    top = tl.where(tl.max((inside & (x != x)).to(tl.int32), 1) > 0, float("nan"), top)
    same = (x == top[:, None]) | ((x != x) & (top != top)[:, None])
    first = tl.min(tl.where(inside & same, column, 2147483647).to(tl.int64), 1)
    is_larger = (top > best) | (top != top) | (place < 0)
    place = tl.where(is_larger & (best == best) & (first < 2147483647), first, place)
    spread += tl.sum(tl.where(target == 0, 0.0, target * z), 1)
    best = tl.where(is_larger & (best == best), top, best)
    return larger, d, slack, best, place, spread, mass + tl.sum(target, 1)


@triton.jit
def no_sums(T: tl.constexpr):
    """The sums of `take` for no element."""
    zero = tl.zeros([T.rows], T.number)
    lowest = tl.full([T.rows], MINUS_INFINITY, T.number)
    return lowest, zero, zero, lowest, tl.full([T.rows], -1, tl.int64), zero, zero


@triton.jit
def gradient_at(
    upstream, PRESENT: tl.constexpr, PLACE: tl.constexpr, sample, exists, DEFAULT: tl.constexpr, T: tl.constexpr
):
    """The gradients of a result of the samples, or the default if there are none."""
    if PRESENT[PLACE]:
        value = tl.load(upstream[PLACE] + sample, mask=exists, other=0.0).to(T.number)
    else:
        value = tl.full([T.rows], DEFAULT, T.number)
    return value


@triton.jit
def store_results(pointers, sample, exists, counts, values):
    """Four results of samples: 0 for those that are ignored."""
    for i in tl.static_range(4):
        value = tl.where(counts, values[i], 0.0)
        tl.store(pointers[i] + sample, narrow(value, pointers[i].dtype.element_ty), mask=exists)


@triton.jit
def gradient_of(x, q, numbers, column, inside, given):
    m, inverse, constant, curved, of_target, of_label, counts, label = numbers
    _, _, _, before, after, _ = given
    z = z_of(x, before, after)
    below = z - m[:, None]
    p = exp(below) * inverse[:, None]
    dz = p * (constant[:, None] + curved[:, None] * tl.where(below < LEAST, LEAST, below))
    of_column = tl.where(is_label(column, label), of_label[:, None], 0.0)
    dz += of_column - of_target[:, None] * targets_of(q, column, inside, given)
    if after is None:
        dx = dz * before
    else:
        t = z * (1.0 / after)
        dx = dz * (1.0 - t * t) * (before * after)
    return tl.where(counts[:, None], dx, 0.0)


@triton.jit
def coefficients(
    found, log_d, spare, of_label, sample, exists, valid, counts, label, upstream, PRESENT: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """The numbers of rows that `gradient_of` takes: made of the gradients of their results."""
    m, d, _, _, _, _, mass = found
    by_loss = gradient_at(upstream, PRESENT, 0, sample, exists, 1.0, T)
    by_log_prob = gradient_at(upstream, PRESENT, 3, sample, exists, 0.0, T)
    by_entropy = gradient_at(upstream, PRESENT, 4, sample, exists, 0.0, T)
    constant = by_loss * (mass + of_label) + gradient_at(upstream, PRESENT, 1, sample, exists, 0.0, T) - by_log_prob
    constant += 2.0 * (m + log_d) * gradient_at(upstream, PRESENT, 2, sample, exists, 0.0, T)
    constant += by_entropy * (log_d - spare) + tl.where(valid, 0.0, float("nan"))
    return m, 1.0 / d, constant, -by_entropy, by_loss, by_log_prob - by_loss * of_label, counts, label


@triton.jit
def losses(
    x, x_outer, x_n, x_inner, y, y_outer, y_n, y_inner, q, q_outer, q_n, q_inner, labels, weight, upstream, results,
    samples, n, inner, ignore, before: tl.float64, after: tl.float64, base: tl.float64, share: tl.float64,
    PRESENT: tl.constexpr, IGNORES: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    before, cap = scalar(before, T.number), scalar(after, T.number) if CAPPED else None
    base, share = scalar(base, T.number), scalar(share, T.number)
    given = (weight, base, share, before, cap, q)
    rows = rows_of(samples, n, inner, x_outer, x_inner, 1, LOOP, T)
    sample, exists, _, _, _ = rows
    label, counts, valid = read_labels(labels, sample, exists, n, ignore, IGNORES)
    label = tl.where(valid, label, -1)
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    b = array_of(q, rows, inner, q_outer, q_n, q_inner) if q is not None else None
    found = fold_rows(no_sums(T), a, b, rows, n, 0, given, take, 0.0, LOOP, T)
    m, d, slack, _, place, spread, mass = found
    picked = tl.load(x + a[1] + label * x_n, mask=label >= 0, other=float("nan")).to(T.number)
    log_d = tl.log(d)
    below = log_d + (m - z_of(picked, before, cap))
    total = mass * (m + log_d) - spread + tl.where(valid, d - d, float("nan"))
    of_label = tl.zeros([T.rows], T.number)
    if q is None:
        of_label = weights_of(weight, label, counts, valid).to(T.number) * share
        total += tl.where(of_label == 0, 0.0, of_label * below)
    spare = log_d - slack / d
    store_results(results, sample, exists, counts, (total, m + log_d, -below, spare))
    tl.store(results[4] + sample, tl.where(counts, place, -1), mask=exists)
    if y is not None:
        numbers = coefficients(
            found, log_d, spare, of_label, sample, exists, valid, counts, label, upstream, PRESENT, T
        )  # fmt: skip
        y_rows = array_of(y, rows, inner, y_outer, y_n, y_inner)
        write_rows(y_rows, a, b, a, rows, n, 0, numbers, given, gradient_of, 0.0, LOOP, T)


UPSTREAM = ("dloss", "dlse", "dlse_square", "dlog_prob", "dentropy")
RESULTS = ("loss", "lse", "log_prob", "entropy", "predicted")
STEP = 4096  # elements of a step in a loop: sums and targets need registers beside the logits


def sample_options(problem: Problem) -> dict[str, Any]:
    """The arguments that say how z and the targets are made, in the precision of the sums."""
    given = problem.attributes
    softcap, temperature, smoothing = given["softcap"], given["temperature"], given["label_smoothing"]
    return options(problem) | {
        "CAPPED": softcap > 0,
        "before": 1 / softcap if softcap else 1 / temperature,
        "after": softcap / temperature if softcap else 1.0,
        "base": smoothing / max(problem.n, 1),
        "share": 1.0 - smoothing,
    }


def sample_losses(problem: Problem, with_gradient: bool = False) -> Program:
    gradient = problem["dlogits"] if with_gradient else None
    q, samples, space = problem["probabilities"], problem.outer * problem.inner, Space(STATUS)
    operands = [each for each in (problem["logits"], gradient, q) if each is not None]
    given, launches, name = sample_options(problem), [], ""
    if samples:
        regime = regimes.choose(problem, operands, streams=2, labelled=True, alone=True, functions=True)
        regime = replace(regime, block=min(regime.block, max(STEP // regime.rows, 1)))
        name = regime.name
        present = [gradient is not None and problem[each] is not None for each in UPSTREAM]
        given["results"] = tuple(problem[each] for each in RESULTS)
        given["PRESENT"] = tuple(present)
        given["upstream"] = tuple(
            problem[each] if there else problem["loss"] for each, there in zip(UPSTREAM, present, strict=True)
        )
        given |= frame(problem, regime, operands) | strides(x=problem["logits"], y=gradient, q=q)
        launches.append(Launch(losses, (tiles(problem, regime),), given, regime.warps))
    return checked(problem, launches, space, name)


sample_losses_and_grad = partial(sample_losses, with_gradient=True)

# --- a shard of the classes: the statistics in one loop whatever the length of rows ----------------------------------

FACTORS: tl.constexpr = tl.constexpr(6)  # of a row's gradient


@triton.jit
def capped_logits(x, cap, inverse):
    """tanh(x / cap), or x without a cap."""
    return x if cap is None else hyperbolic_tangent(x * inverse)


@triton.jit
def scaled(x, cap, inverse, factor):
    """The logits that the softmax is taken of."""
    return (x if cap is None else capped_logits(x, cap, inverse) * cap) * factor


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
    t = capped_logits(x, cap, inverse)
    z = (x if cap is None else t * cap) * factor
    p = exp(z - m[:, None] - log_s[:, None])
    dz = p * a[:, None] + tl.where(p == 0, 0.0, p * z * e[:, None]) + weights_at(weight, column, inside) * c[:, None]
    dz = (dz + tl.where(is_label(column, label), b[:, None], 0.0)) * factor
    if cap is not None:
        dz = dz * (1.0 - t * t)
    silent = (a == 0) & (b == 0) & (c == 0) & (e == 0)
    return tl.where(silent[:, None], 0.0, dz)


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
    numbers = (own_label(labels, sample, exists, first_class, n),)
    for i in tl.static_range(FACTORS):
        number = tl.load(factors + i * samples + sample, mask=exists, other=0.0).to(T.number)
        numbers = numbers + (number,)  # noqa: RUF005
    a = array_of(x, rows, inner, x_outer, x_n, x_inner)
    y_rows, given = array_of(y, rows, inner, y_outer, y_n, y_inner), (weight, softcap, inverse, factor)
    write_rows(y_rows, a, None, a, rows, n, 0, numbers, given, slope, 0.0, MODE, T)


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
