"""Softmax cross-entropy from integer labels: loss, gradient, and both in one pass over the logits.

Labels are read first: `classes` and `weights` then hold a class (-1: ignored) and a weight for each sample.
Layouts are those of opgrad.cpu.loops: rows, columns, tiles.
"""

from collections.abc import Mapping
from typing import Any

from opgrad.cpu.columns import column_max, get, put, streams_columns, sum_exp_logging_columns, sum_exp_scaling_columns
from opgrad.cpu.execute import Program, Scratch, Step
from opgrad.cpu.labels import TOTAL, label_steps, wrong_label
from opgrad.cpu.loops import cut, kept_numbers, layout_of, precision
from opgrad.cpu.math import exp, exp_up_to_zero, log, log_one
from opgrad.cpu.memory import load_f64, store_f64
from opgrad.cpu.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.rows import (
    line_head,
    map_one,
    map_two,
    row_max,
    sum_exp_logging,
    sum_exp_scaling,
    write_log,
    write_scaled,
)
from opgrad.cpu.simd import (
    Pointer,
    Vector,
    first,
    full,
    lanes,
    load,
    load_one,
    number,
    select,
    store,
    store_one,
)
from opgrad.cpu.space import release_slot, take_slot, working_space
from opgrad.cpu.tiles import turn_in, turn_out
from opgrad.problem import Problem

# --- what one row or one vector of samples contributes -------------------------------------------------------------


@inline
def divisor_inverse(scratch: int, mean: int) -> float:
    """1 / (sum of weights) for the mean, 0 if that sum is 0; else 1."""
    if not mean:
        return 1.0
    total = load_f64(scratch, TOTAL)
    return 0.0 if total == 0.0 else 1.0 / total


@inline
def _from_log_prob(log_prob: Vector, label: Any, f: Any, i: Any) -> Vector:
    p = exp(log_prob)
    return select(i == label, p - 1.0, p) * f


@inline
def _from_log_prob_with_bias(log_prob: Vector, bias: Vector, label: Any, f: Any, i: Any) -> Vector:
    return _from_log_prob(log_prob, label, f, i) + bias


@inline
def _nothing(x: Vector, s: Any, t: Any, i: Vector) -> Vector:
    return select(i < 0, x, 0.0)


@inline
def _same(x: Vector, s: Any, t: Any, i: Vector) -> Vector:
    return x


write_gradient, write_gradient_with_bias = map_one(_from_log_prob), map_two(_from_log_prob_with_bias)
write_zero, write_same = map_one(_nothing), map_one(_same)


@inline
def note_losses(
    losses: Vector, each: int, loss: Any, place: int, count: int, whole: bool, mask: Any, buffer: Any
) -> float:
    """Store one loss for each sample, or return their sum in float64."""
    total = 0.0
    if each:
        put(loss, place, losses, whole, mask, 0)
    else:
        store(buffer, 0, losses)
        for lane in range(min(count, lanes(buffer))):
            total += load_one(buffer, lane)
    return total


# --- rows ----------------------------------------------------------------------------------------------------------


@kernel
def loss_rows(
    part, per_part, count, n, logits: Pointer, logits_row, log_prob: Pointer, log_prob_row,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, stream,
):  # fmt: skip
    total = 0.0
    out, head, before, m_before, log_before = log_prob, n, logits, number(logits, 0.0), number(logits, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs, label = logits + row * logits_row, load_one(classes, row)
        m = row_max(xs, 0, n)
        target = load_one(xs, max(label, 0)) - m
        s, j = sum_exp_logging(xs, 0, n, m, xs, 0, xs + logits_row, out, head, n, before, m_before, log_before)
        write_log(out, j, n, 0, before, m_before, log_before)
        out, before, m_before, log_before = log_prob + row * log_prob_row, xs, m, log_one(xs, s)
        head = line_head(out, n, stream)
        write_log(out, 0, head, 0, before, m_before, log_before)
        found = (log_before - target) * load_one(weights, row) if label >= 0 else number(xs, 0.0)
        total += found
        if each:
            store_one(loss, row, found)
    write_log(out, head, n, stream, before, m_before, log_before)
    store_f64(sums, part, total)


@kernel
def fused_rows(
    part, per_part, count, n, logits: Pointer, logits_row, dlogits: Pointer, dlogits_row,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, mean,
    scratch, slots, space: Pointer, space_size, stream,
):  # fmt: skip
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    done = e + space_size // 2
    inverse = divisor_inverse(scratch, mean)
    total = 0.0
    out, head, r = dlogits, n, number(logits, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs, label = logits + row * logits_row, load_one(classes, row)
        found = number(xs, 0.0)
        if label < 0 or inverse == 0.0:
            write_zero(dlogits + row * dlogits_row, 0, n, stream, xs, 0.0, 0.0)
        else:
            m, target, w = row_max(xs, 0, n), load_one(xs, label), load_one(weights, row)
            s, j = sum_exp_scaling(xs, 0, n, m, e, 1, xs + logits_row, out, head, n, done, r, 0.0)
            write_scaled(out, j, n, 0, done, r, 0.0)
            found = (log_one(xs, s) - (target - m)) * w
            store_one(e, label, load_one(e, label) - s)
            out, r = dlogits + row * dlogits_row, number(xs, inverse) * w / s
            e, done = done, e
            head = line_head(out, n, stream)
            write_scaled(out, 0, head, 0, done, r, 0.0)
        total += found
        if each:
            store_one(loss, row, found)
    write_scaled(out, head, n, stream, done, r, 0.0)
    store_f64(sums, part, total)
    release_slot(scratch, slot)


@kernel
def grad_rows(
    part, per_part, count, n, log_prob: Pointer, log_prob_row, bias: Pointer, bias_row, biased,
    dlogits: Pointer, dlogits_row, classes: Pointer, weights: Pointer, dy: Pointer, each, mean, scratch, stream,
):  # fmt: skip
    inverse = divisor_inverse(scratch, mean)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs, bs, out = log_prob + row * log_prob_row, bias + row * bias_row, dlogits + row * dlogits_row
        label = load_one(classes, row)
        if label < 0 or inverse == 0.0:
            if biased:
                write_same(out, 0, n, stream, bs, 0.0, 0.0)
            else:
                write_zero(out, 0, n, stream, xs, 0.0, 0.0)
        else:
            f = load_one(weights, row) * load_one(dy, row if each else 0) * number(xs, inverse)
            if biased:
                write_gradient_with_bias(out, 0, n, stream, xs, bs, label, f)
            else:
                write_gradient(out, 0, n, stream, xs, label, f)


# --- columns, and tiles of short rows turned into columns ----------------------------------------------------------


@inline
def loss_column(
    x: Any, x_n: int, n: int, whole: bool, mask: Any, label: Vector, w: Vector, y: Any, y_n: int, past: int
) -> Vector:
    """log_prob to y; the samples' losses."""
    m = column_max(x, x_n, n, whole, mask)
    log_s = log(sum_exp_logging_columns(x, x_n, n, whole, mask, m, x, 0, y, y_n, 0, x, x_n, m, m))
    losses = full(x, 0.0)
    for i in range(n):
        v = (get(x, i * x_n, whole, mask) - m) - log_s
        losses = select(label == i, v, losses)
        put(y, i * y_n, v, whole, mask, past)
    return select(label >= 0, -losses * w, 0.0)


@inline
def fused_column(
    x: Any, x_n: int, n: int, whole: bool, mask: Any, label: Vector, w: Vector, inverse: float,
    e: Any, keep: int, y: Any, y_n: int, past: int,
) -> Vector:  # fmt: skip
    """dlogits to y, by way of `e` if `keep`; the samples' losses."""
    m = column_max(x, x_n, n, whole, mask)
    target = full(x, 0.0)
    for i in range(n):
        target = select(label == i, get(x, i * x_n, whole, mask), target)
    s = sum_exp_scaling_columns(x, x_n, n, whole, mask, m, e, keep, y, y_n, 0, x, x_n, m, m)
    r, f = 1.0 / s, w * inverse
    live = label >= (0 if inverse != 0.0 else n)
    for i in range(n):
        p = (load(e, i * lanes(e)) if keep else exp_up_to_zero(get(x, i * x_n, whole, mask) - m)) * r
        put(y, i * y_n, select(live, select(label == i, p - 1.0, p) * f, 0.0), whole, mask, past)
    return select(live, (log(s) - (target - m)) * w, 0.0)


@inline
def grad_column(
    x: Any, x_n: int, b: Any, b_n: int, biased: int, n: int, whole: bool, mask: Any, label: Vector, f: Vector,
    inverse: float, y: Any, y_n: int, past: int,
) -> None:  # fmt: skip
    """dlogits to y from log_prob and bias."""
    live = label >= (0 if inverse != 0.0 else n)
    for i in range(n):
        v = select(live, _from_log_prob(get(x, i * x_n, whole, mask), label, f, i), 0.0)
        if biased:
            v = v + get(b, i * b_n, whole, mask)
        put(y, i * y_n, v, whole, mask, past)


@kernel
def loss_columns(
    part, per_part, units, strips, n, inner,
    logits: Pointer, logits_outer, logits_n, log_prob: Pointer, log_prob_outer, log_prob_n,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, scratch, slots, space: Pointer, space_size, stream,
):  # fmt: skip
    w = lanes(logits)
    slot = take_slot(scratch, slots)
    buffer = space + slot * space_size
    total = 0.0
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        o, j = unit // strips, unit % strips * w
        xs, ys = logits + (o * logits_outer + j), log_prob + (o * log_prob_outer + j)
        whole, mask, past = j + w <= inner, first(logits, inner - j), streams_columns(ys, log_prob_n, stream)
        place = o * inner + j
        label, weight = get(classes, place, whole, mask), get(weights, place, whole, mask)
        losses = loss_column(xs, logits_n, n, whole, mask, label, weight, ys, log_prob_n, past)
        total += note_losses(losses, each, loss, place, inner - j, whole, mask, buffer)
    store_f64(sums, part, total)
    release_slot(scratch, slot)


@kernel
def fused_columns(
    part, per_part, units, strips, n, inner,
    logits: Pointer, logits_outer, logits_n, dlogits: Pointer, dlogits_outer, dlogits_n,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, mean,
    scratch, slots, space: Pointer, space_size, keep, stream,
):  # fmt: skip
    w = lanes(logits)
    slot = take_slot(scratch, slots)
    buffer = space + slot * space_size
    inverse = divisor_inverse(scratch, mean)
    total = 0.0
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        o, j = unit // strips, unit % strips * w
        xs, ys = logits + (o * logits_outer + j), dlogits + (o * dlogits_outer + j)
        whole, mask, past = j + w <= inner, first(logits, inner - j), streams_columns(ys, dlogits_n, stream)
        place = o * inner + j
        label, weight = get(classes, place, whole, mask), get(weights, place, whole, mask)
        losses = fused_column(
            xs, logits_n, n, whole, mask, label, weight, inverse, buffer + w, keep, ys, dlogits_n, past
        )
        total += note_losses(losses, each, loss, place, inner - j, whole, mask, buffer)
    store_f64(sums, part, total)
    release_slot(scratch, slot)


@kernel
def grad_columns(
    part, per_part, units, strips, n, inner,
    log_prob: Pointer, log_prob_outer, log_prob_n, bias: Pointer, bias_outer, bias_n, biased,
    dlogits: Pointer, dlogits_outer, dlogits_n, classes: Pointer, weights: Pointer, dy: Pointer, each, mean,
    scratch, stream,
):  # fmt: skip
    w = lanes(log_prob)
    inverse = divisor_inverse(scratch, mean)
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        o, j = unit // strips, unit % strips * w
        xs, ys = log_prob + (o * log_prob_outer + j), dlogits + (o * dlogits_outer + j)
        whole, mask, past = j + w <= inner, first(log_prob, inner - j), streams_columns(ys, dlogits_n, stream)
        place = o * inner + j
        label, f = get(classes, place, whole, mask), get(weights, place, whole, mask) * inverse
        f = f * get(dy, place, whole, mask) if each else f * load_one(dy, 0)
        bs = bias + (o * bias_outer + j)
        grad_column(xs, log_prob_n, bs, bias_n, biased, n, whole, mask, label, f, inverse, ys, dlogits_n, past)


@kernel
def loss_tiles(
    part, per_part, units, count, n, logits: Pointer, logits_row, log_prob: Pointer, log_prob_row,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, scratch, slots, space: Pointer, space_size,
):  # fmt: skip
    w = lanes(logits)
    slot = take_slot(scratch, slots)
    buffer = space + slot * space_size
    tile = buffer + w
    total = 0.0
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, left = unit * w, count - unit * w
        whole, mask = left >= w, first(logits, left)
        turn_in(tile, logits + row * logits_row, logits_row, n, min(left, w))
        label, weight = get(classes, row, whole, mask), get(weights, row, whole, mask)
        losses = loss_column(tile, w, n, True, mask, label, weight, tile, w, 0)
        total += note_losses(losses, each, loss, row, left, whole, mask, buffer)
        turn_out(log_prob + row * log_prob_row, log_prob_row, tile, n, min(left, w))
    store_f64(sums, part, total)
    release_slot(scratch, slot)


@kernel
def fused_tiles(
    part, per_part, units, count, n, logits: Pointer, logits_row, dlogits: Pointer, dlogits_row,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, mean,
    scratch, slots, space: Pointer, space_size,
):  # fmt: skip
    w = lanes(logits)
    slot = take_slot(scratch, slots)
    buffer = space + slot * space_size
    tile = buffer + w
    inverse = divisor_inverse(scratch, mean)
    total = 0.0
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, left = unit * w, count - unit * w
        whole, mask = left >= w, first(logits, left)
        turn_in(tile, logits + row * logits_row, logits_row, n, min(left, w))
        label, weight = get(classes, row, whole, mask), get(weights, row, whole, mask)
        losses = fused_column(tile, w, n, True, mask, label, weight, inverse, tile, 1, tile, w, 0)
        total += note_losses(losses, each, loss, row, left, whole, mask, buffer)
        turn_out(dlogits + row * dlogits_row, dlogits_row, tile, n, min(left, w))
    store_f64(sums, part, total)
    release_slot(scratch, slot)


@kernel
def add_losses(part, made, sums, scratch, mean, each, loss: Pointer):
    """The reduced loss from the parts' sums."""
    if not each:
        total = 0.0
        for p in range(made):
            total += load_f64(sums, p)
        inverse = divisor_inverse(scratch, mean)
        store_one(loss, 0, total * inverse if inverse != 0.0 else 0.0)


# --- which kernels run ---------------------------------------------------------------------------------------------

SHORT = 64  # classes up to which tiles beat rows

LOSS = {"rows": loss_rows, "columns": loss_columns, "tiles": loss_tiles}
FUSED = {"rows": fused_rows, "columns": fused_columns, "tiles": fused_tiles}
GRAD = {"rows": grad_rows, "columns": grad_columns}


def _loss(problem: Problem, operator: str, kernels: Mapping[str, Kernel], result: str) -> Program:
    dtype = precision(problem)
    steps, given, start = label_steps(problem, dtype)
    layout = layout_of(problem, kernels, SHORT)
    arguments, made = cut(problem, layout, logits=problem["logits"], **{result: problem[result]})
    sums = Scratch(start)
    kept, keep = kept_numbers(problem.n, layout, vector_lanes(dtype))
    space, size = working_space(kept + vector_lanes(dtype), dtype, made, start + 8 * made)
    reduction = problem.attributes["reduction"]
    options = {
        "sums": sums,
        "made": made,
        "mean": reduction == "mean",
        "each": reduction == "none",
        "keep": keep,
    }
    arguments |= given | options | space | {"loss": problem["loss"]}
    if problem.outer * problem.inner:
        steps.append(Step(kernels[layout], made, arguments))
    else:
        arguments["made"] = 0
    steps.append(Step(add_losses, 1, arguments))
    return Program(steps, size, wrong_label(problem, operator))


def softmax_cross_entropy_loss(problem: Problem) -> Program:
    return _loss(problem, "softmax_cross_entropy_loss", LOSS, "log_prob")


def softmax_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return _loss(problem, "softmax_cross_entropy_loss_and_grad", FUSED, "dlogits")


def softmax_cross_entropy_loss_grad(problem: Problem) -> Program:
    steps, given, size = label_steps(problem, precision(problem))
    layout, bias = layout_of(problem, GRAD), problem["bias"]
    operands = {"log_prob": problem["log_prob"], "dlogits": problem["dlogits"]}
    arguments, made = cut(problem, layout, **operands, bias=bias or problem["log_prob"])
    reduction = problem.attributes["reduction"]
    options = {"mean": reduction == "mean", "each": reduction == "none", "biased": bias is not None}
    arguments |= given | options | {"dy": problem["dy"]}
    if problem.outer * problem.n * problem.inner:
        steps.append(Step(GRAD[layout], made, arguments))
    return Program(steps, size, wrong_label(problem, "softmax_cross_entropy_loss_grad"))
