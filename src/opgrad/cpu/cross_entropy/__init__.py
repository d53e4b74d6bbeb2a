"""Softmax cross-entropy from integer labels: loss, gradient, and both in one pass over the logits.

Labels are read first: `classes` and `weights` then hold a class (-1: ignored) and a weight for each sample.
Layouts are those of opgrad.cpu.loops.layout: rows, here; columns and tiles, in opgrad.cpu.cross_entropy.columns.
"""

from collections.abc import Mapping
from typing import Any

from opgrad.cpu.compiler.memory import load_f64, store_f64
from opgrad.cpu.compiler.native import Kernel, inline, kernel, vector_lanes
from opgrad.cpu.compiler.simd import Pointer, Vector, first_lane, full, load_one, number, store_one
from opgrad.cpu.cross_entropy.columns import (
    fused_column,
    grad_columns,
    gradient_from_log_prob,
    leave,
    loss_by_columns,
    loss_by_tiles,
    loss_column,
    loss_only_column,
)
from opgrad.cpu.cross_entropy.labels import divisor_inverse, label_steps
from opgrad.cpu.loops.fill import write_zeros
from opgrad.cpu.loops.layout import cut, kept_numbers, layout_of, precision
from opgrad.cpu.loops.map import mapped_by_index, next_vector, times, write_same, write_times
from opgrad.cpu.loops.rows import (
    add_rest_logging,
    line_head,
    row_log_sum,
    row_max,
    row_sum_exp,
    write_log,
)
from opgrad.cpu.numerics.logsumexp import add_rounded, rounded_top, row_log_of_sum, row_log_of_total
from opgrad.cpu.runtime.execute import Program, Scratch, Step
from opgrad.cpu.runtime.workspace import release_slot, take_slot, working_space
from opgrad.problem import Operand, Problem
from opgrad.ranges import wrong_label

# --- what a vector along a row contributes -------------------------------------------------------------------------


@inline
def _from_log_prob_with_bias(i: Any, log_prob: Vector, bias: Vector, label: Any, f: Any) -> Vector:
    return gradient_from_log_prob(i, log_prob, label, f) + bias


sum_exp_times = row_sum_exp(next_vector(times), add_rounded)
write_gradient = mapped_by_index(gradient_from_log_prob)
write_gradient_with_bias = mapped_by_index(_from_log_prob_with_bias)


# --- rows ----------------------------------------------------------------------------------------------------------


@kernel
def loss_rows(
    part, per_part, count, n, logits: Pointer, logits_row, y: Pointer, y_row,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, stream,
):  # fmt: skip
    total = 0.0
    out, head, before, m_before, log_before = y, n, logits, full(logits, 0.0), full(logits, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs, label = logits + row * logits_row, load_one(classes, row)
        largest = row_max(xs, 0, n)
        m, target = full(xs, largest), load_one(xs, max(label, 0)) - largest
        rest, equal, j = add_rest_logging(
            xs, 0, n, largest, xs + logits_row, out, head, n, (before,), (m_before, log_before)
        )
        write_log(out, j, n, 0, (before,), (m_before, log_before))
        out, before, m_before, log_before = y + row * y_row, xs, m, row_log_of_sum(xs, rest, equal, largest)
        head = line_head(out, n, stream)
        write_log(out, 0, head, 0, (before,), (m_before, log_before))
        found = (first_lane(log_before) - target) * load_one(weights, row) if label >= 0 else number(xs, 0.0)
        total += found
        if each:
            store_one(loss, row, found)
    write_log(out, head, n, stream, (before,), (m_before, log_before))
    store_f64(sums, part, total)


@kernel
def loss_only_rows(
    part, per_part, count, n, logits: Pointer, logits_row, classes: Pointer, weights: Pointer, loss: Pointer, each, sums
):
    total = 0.0
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs, label = logits + row * logits_row, load_one(classes, row)
        found = number(xs, 0.0)
        if label >= 0:
            m, log_s = row_log_sum(xs, n, xs + logits_row)
            found = (log_s - (load_one(xs, label) - m)) * load_one(weights, row)
        total += found
        if each:
            store_one(loss, row, found)
    store_f64(sums, part, total)


@kernel
def fused_rows(
    part, per_part, count, n, logits: Pointer, logits_row, y: Pointer, y_row,
    classes: Pointer, weights: Pointer, loss: Pointer, each, sums, mean,
    scratch, slots, space: Pointer, space_size, stream,
):  # fmt: skip
    slot = take_slot(scratch, slots)
    e = space + slot * space_size
    done = e + space_size // 2
    inverse = divisor_inverse(scratch, mean)
    total = 0.0
    out, head, r = y, n, number(logits, 0.0)
    for row in range(part * per_part, min((part + 1) * per_part, count)):
        xs, label = logits + row * logits_row, load_one(classes, row)
        found = number(xs, 0.0)
        if label < 0 or inverse == 0.0:
            write_zeros(y + row * y_row, 0, n, stream)
        else:
            m, target, w = row_max(xs, 0, n), load_one(xs, label), load_one(weights, row)
            sum_exp, j = sum_exp_times(xs, 0, n, m, e, 1, xs + logits_row, out, head, n, (done,), (r,))
            write_times(out, j, n, 0, (done,), (r,))
            found = (row_log_of_total(xs, sum_exp, m, rounded_top(xs, m)) - (target - m)) * w
            s = number(xs, sum_exp)
            store_one(e, label, load_one(e, label) - s)
            out, r = y + row * y_row, number(xs, inverse) * w / s
            e, done = done, e
            head = line_head(out, n, stream)
            write_times(out, 0, head, 0, (done,), (r,))
        total += found
        if each:
            store_one(loss, row, found)
    write_times(out, head, n, stream, (done,), (r,))
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
                write_same(out, 0, n, stream, (bs,), ())
            else:
                write_zeros(out, 0, n, stream)
        else:
            f = load_one(weights, row) * load_one(dy, row if each else 0) * number(xs, inverse)
            if biased:
                write_gradient_with_bias(out, 0, n, stream, (xs, bs), (label, f))
            else:
                write_gradient(out, 0, n, stream, (xs,), (label, f))


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

SHORT, SHORT_ONLY = 64, 96  # classes up to which tiles beat rows; those of the loss alone are not turned back

LOSS = {"rows": loss_rows, "columns": loss_by_columns(loss_column), "tiles": loss_by_tiles(loss_column)}
LOSS_ONLY = {
    "rows": loss_only_rows,
    "columns": loss_by_columns(loss_only_column),
    "tiles": loss_by_tiles(loss_only_column, leave),
}
FUSED = {"rows": fused_rows, "columns": loss_by_columns(fused_column), "tiles": loss_by_tiles(fused_column)}
GRAD = {"rows": grad_rows, "columns": grad_columns}


def loss_and_result(
    problem: Problem,
    operator: str,
    kernels: Mapping[str, Kernel],
    result: str,
    short: int = SHORT,
    by_sample: bool = False,
) -> Program:
    """The loss and `result`, which is of the logits' shape; where it is the logits, no kernel writes it."""
    dtype = precision(problem)
    steps, given, start = label_steps(problem, dtype, by_sample)
    layout = layout_of(problem, kernels, short)
    arguments, made = cut(problem, layout, logits=problem["logits"], y=problem[result])
    sums, end = Scratch(start), start + 8 * made
    space, keep = {}, False
    if "space" in kernels[layout].parameters:
        kept = 0
        if layout == "tiles" or kernels is FUSED:
            kept, keep = kept_numbers(problem.n, layout, vector_lanes(dtype))
        space, end = working_space(kept + vector_lanes(dtype), dtype, made, end)
    reduction = problem.attributes["reduction"]
    options = {"sums": sums, "made": made, "mean": reduction == "mean", "each": reduction == "none", "keep": keep}
    arguments |= given | options | space | {"loss": problem["loss"]}
    if problem.outer * problem.inner:
        steps.append(Step(kernels[layout], made, arguments))
    else:
        arguments["made"] = 0
    steps.append(Step(add_losses, 1, arguments))
    return Program(steps, end, wrong_label(problem, operator))


def softmax_cross_entropy_loss(problem: Problem) -> Program:
    return loss_and_result(problem, "softmax_cross_entropy_loss", LOSS, "log_prob")


def softmax_cross_entropy_loss_only(problem: Problem) -> Program:
    return loss_and_result(problem, "softmax_cross_entropy_loss_only", LOSS_ONLY, "logits", SHORT_ONLY)


def softmax_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return loss_and_result(problem, "softmax_cross_entropy_loss_and_grad", FUSED, "dlogits")


def softmax_cross_entropy_loss_grad(problem: Problem) -> Program:
    return gradient(problem, "softmax_cross_entropy_loss_grad", problem["bias"])


def gradient(problem: Problem, operator: str, bias: Operand | None = None, by_sample: bool = False) -> Program:
    """The gradient from log_prob, with `bias` added."""
    steps, given, size = label_steps(problem, precision(problem), by_sample)
    layout = layout_of(problem, GRAD)
    operands = {"log_prob": problem["log_prob"], "dlogits": problem["dlogits"]}
    arguments, made = cut(problem, layout, **operands, bias=bias or problem["log_prob"])
    reduction = problem.attributes["reduction"]
    options = {"mean": reduction == "mean", "each": reduction == "none", "biased": bias is not None}
    arguments |= given | options | {"dy": problem["dy"]}
    if problem.outer * problem.n * problem.inner:
        steps.append(Step(GRAD[layout], made, arguments))
    return Program(steps, size, wrong_label(problem, operator))
