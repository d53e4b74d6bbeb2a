"""Losses where the classes of a sample are contiguous: vectors run along a row.

`losses_by_rows` makes the kernel. What it does with a row is a function, of which there is one for each loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Part, Private, Rows, Units
from opgrad.cpu.compiler.words import store_f64
from opgrad.cpu.kernels.cross_entropy.columns import gradient_from_log_prob
from opgrad.cpu.kernels.cross_entropy.labels import LossReduction, Samples, divisor_of, inverse_of
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.map import mapped_by_index, of_each, times, write_same, write_zeros
from opgrad.cpu.kernels.numerics import logsumexp as lse

nothing_before = inline(lambda x, y, n, options: 0)
nothing_after = inline(lambda before, n, stream: None)


def losses_by_rows(
    visit: Callable[..., Any],
    options_type: Any = int,
    start: Callable[..., Any] = nothing_before,
    finish: Callable[..., None] = nothing_after,
) -> Kernel:
    """The kernel that calls loss, before = visit(…, before) for each row.

    A visit writes the sample's row of y, and its other results. `before` is what it leaves to be done while the next
    row is read, such as a row that waits: `start` gives it for the first row, and `finish` does it after the last.
    """

    @kernel
    def of_rows(
        rows: Units, part: Part, n, logits: Rows, y: Rows, samples: Samples, reduction: LossReduction,
        options: options_type, stream,
    ):  # fmt: skip
        divisor, total, before = divisor_of(reduction), 0.0, start(logits.data, y.data, n, options)
        for row in rows:
            x, out = logits.data + row * logits.step, y.data + row * y.step
            loss, before = visit(x, n, x + logits.step, out, row, samples, divisor, options, before, stream)
            total += loss
            if reduction.each:
                v.store_one(samples.loss, row, loss)
        finish(before, n, stream)
        store_f64(reduction.sums, part, total)

    of_rows.__name__ = visit.__name__
    return of_rows


# --- the loss and log_prob, of which a row is written while the next one is reduced ----------------------------------

step_log_prob, complete_log_prob, begin_log_prob, finish_log_prob = loops.write_behind(of_each(loops.minus_both))
add_rest = loops.row_rest(step_log_prob, lse.PLAIN_BELOW)


@inline
def no_log_prob(x, y, n: int, options):
    return loops.no_row(y, n, (x,), (v.full(x, 0.0), v.full(x, 0.0)))


@inline
def loss_row(x, n: int, ahead, out, row: int, samples, divisor: float, options, waiting, stream: int):
    label, largest = v.load_one(samples.classes, row), loops.row_max(x, 0, n)
    target = v.load_one(x, max(label, 0)) - largest
    (rest, equal), written = add_rest(x, n, largest, x, 0, ahead, waiting)
    complete_log_prob(waiting, written, n)
    log_s = lse.row_log_of_sum(x, rest, equal, largest)
    waiting = begin_log_prob(out, n, (x,), (v.full(x, largest), log_s), False, stream)
    if label < 0:
        return v.number(x, 0.0), waiting
    return (v.first_lane(log_s) - target) * v.load_one(samples.weights, row), waiting


loss_rows = losses_by_rows(loss_row, int, no_log_prob, finish_log_prob)


@inline
def loss_only_row(x, n: int, ahead, out, row: int, samples, divisor: float, options, waiting, stream: int):
    label = v.load_one(samples.classes, row)
    if label < 0:
        return v.number(x, 0.0), waiting
    m, log_s = loops.row_log_sum(x, n, ahead)
    return (log_s - (v.load_one(x, label) - m)) * v.load_one(samples.weights, row), waiting


loss_only_rows = losses_by_rows(loss_only_row)

# --- the loss and its gradient ---------------------------------------------------------------------------------------


class Exponentials(NamedTuple):
    """Memory for the exponentials of a row, and for those of the row before."""

    first: Private
    second: Private


step_slope, complete_slope, begin_slope, finish_slopes = loops.write_behind(of_each(times))
sum_exp = loops.row_sum_exp(step_slope, lse.ROUNDED)


@inline
def no_slope(x, y, n: int, options):
    """The row that waits, and the memory for the exponentials of the next row."""
    return loops.no_row(y, n, (options.second,), (v.number(x, 0.0),)), options.first


@inline
def finish_slope(before, n: int, stream: int) -> None:
    finish_slopes(before[0], n, stream)


@inline
def fused_row(x, n: int, ahead, out, row: int, samples, divisor: float, options, before, stream: int):
    """dlogits = exponential * weight / (sum * divisor), where the sum is taken from the label's exponential first."""
    label, (waiting, e) = v.load_one(samples.classes, row), before
    if label < 0 or divisor == 0.0:
        write_zeros(out, 0, n, stream)
        return v.number(x, 0.0), before
    m, target, w = loops.row_max(x, 0, n), v.load_one(x, label), v.load_one(samples.weights, row)
    total, written = sum_exp(x, n, m, e, 1, ahead, waiting)
    complete_slope(waiting, written, n)
    loss = (lse.row_log_of_total(x, total, lse.rounded_top(x, m)) - (target - m)) * w
    s = v.number(x, total)
    v.store_one(e, label, v.load_one(e, label) - s)
    factor = v.number(x, inverse_of(divisor) * w) / s
    return loss, (begin_slope(out, n, (e,), (factor,), False, stream), waiting.arrays[0])


fused_rows = losses_by_rows(fused_row, Exponentials, no_slope, finish_slope)

# --- the gradient from log_prob --------------------------------------------------------------------------------------

write_gradient = mapped_by_index(gradient_from_log_prob)
write_gradient_with_bias = mapped_by_index(
    lambda i, log_prob, bias, label, f: gradient_from_log_prob(i, log_prob, label, f) + bias
)


@kernel
def grad_rows(
    rows: Units, n, log_prob: Rows, bias: Rows, biased, dlogits: Rows, samples: Samples, reduction: LossReduction,
    stream,
):  # fmt: skip
    divisor = divisor_of(reduction)
    inverse = inverse_of(divisor)
    for row in rows:
        xs, out = log_prob.data + row * log_prob.step, dlogits.data + row * dlogits.step
        bs, label = bias.data + row * bias.step, v.load_one(samples.classes, row)
        if label < 0 or divisor == 0.0:
            if biased:
                write_same(out, 0, n, stream, (bs,), ())
            else:
                write_zeros(out, 0, n, stream)
        else:
            dy = v.load_one(samples.loss, row if reduction.each else 0)
            f = v.number(xs, v.load_one(samples.weights, row) * inverse * dy)
            if biased:
                write_gradient_with_bias(out, 0, n, stream, (xs, bs), (label, f))
            else:
                write_gradient(out, 0, n, stream, (xs,), (label, f))
