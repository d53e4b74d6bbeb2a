"""Softmax cross-entropy of contiguous rows of classes: vectors run along a row."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import store_f64
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.parameters import Part, Private, Rows, Units
from opgrad.cpu.kernels.cross_entropy.columns import gradient_from_log_prob
from opgrad.cpu.kernels.cross_entropy.labels import Reduction, Samples, inverse_of, mean_divisor
from opgrad.cpu.kernels.loops import rows as loops
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.map import mapped_by_index, next_vector, times, write_same, write_times
from opgrad.cpu.kernels.numerics import logsumexp as lse

sum_exp_times = loops.row_sum_exp(next_vector(times), lse.ROUNDED)
write_gradient = mapped_by_index(gradient_from_log_prob)
write_gradient_with_bias = mapped_by_index(
    lambda i, log_prob, bias, label, f: gradient_from_log_prob(i, log_prob, label, f) + bias
)


@kernel
def loss_rows(rows: Units, part: Part, n, logits: Rows, y: Rows, samples: Samples, reduction: Reduction, stream):
    """The losses, and log_prob to y; a row is written while the next one is reduced."""
    total, zero = 0.0, v.full(logits.data, 0.0)
    out, head, before, m_before, log_before = y.data, n, logits.data, zero, zero
    for row in rows:
        xs, label = logits.data + row * logits.step, v.load_one(samples.classes, row)
        largest = loops.row_max(xs, 0, n)
        m, target = v.full(xs, largest), v.load_one(xs, max(label, 0)) - largest
        rest, equal, j = loops.add_rest_logging(
            xs, 0, n, largest, xs + logits.step, out, head, n, (before,), (m_before, log_before)
        )
        loops.write_log(out, j, n, 0, (before,), (m_before, log_before))
        out, before, m_before, log_before = y.data + row * y.step, xs, m, lse.row_log_of_sum(xs, rest, equal, largest)
        head = loops.line_head(out, n, stream)
        loops.write_log(out, 0, head, 0, (before,), (m_before, log_before))
        found = (
            (v.first_lane(log_before) - target) * v.load_one(samples.weights, row) if label >= 0 else v.number(xs, 0.0)
        )
        total += found
        if reduction.each:
            v.store_one(samples.loss, row, found)
    loops.write_log(out, head, n, stream, (before,), (m_before, log_before))
    store_f64(reduction.sums, part, total)


@kernel
def loss_only_rows(rows: Units, part: Part, n, logits: Rows, samples: Samples, reduction: Reduction):
    total = 0.0
    for row in rows:
        xs, label = logits.data + row * logits.step, v.load_one(samples.classes, row)
        found = v.number(xs, 0.0)
        if label >= 0:
            m, log_s = loops.row_log_sum(xs, n, xs + logits.step)
            found = (log_s - (v.load_one(xs, label) - m)) * v.load_one(samples.weights, row)
        total += found
        if reduction.each:
            v.store_one(samples.loss, row, found)
    store_f64(reduction.sums, part, total)


@kernel
def fused_rows(
    rows: Units, part: Part, n, logits: Rows, y: Rows, samples: Samples, reduction: Reduction,
    e: Private, done: Private, stream,
):  # fmt: skip
    """The losses, and the gradient to y; a row is written while the next one is reduced."""
    divisor = mean_divisor(reduction)
    inverse = inverse_of(divisor)
    total = 0.0
    out, head, r = y.data, n, v.number(logits.data, 0.0)
    for row in rows:
        xs, label = logits.data + row * logits.step, v.load_one(samples.classes, row)
        found = v.number(xs, 0.0)
        if label < 0 or divisor == 0.0:
            write_zeros(y.data + row * y.step, 0, n, stream)
        else:
            m, target, w = loops.row_max(xs, 0, n), v.load_one(xs, label), v.load_one(samples.weights, row)
            sum_exp, j = sum_exp_times(xs, 0, n, m, e, 1, xs + logits.step, out, head, n, (done,), (r,))
            write_times(out, j, n, 0, (done,), (r,))
            found = (lse.row_log_of_total(xs, sum_exp, m, lse.rounded_top(xs, m)) - (target - m)) * w
            s = v.number(xs, sum_exp)
            v.store_one(e, label, v.load_one(e, label) - s)
            out, r = y.data + row * y.step, v.number(xs, inverse * w) / s
            e, done = done, e
            head = loops.line_head(out, n, stream)
            write_times(out, 0, head, 0, (done,), (r,))
        total += found
        if reduction.each:
            v.store_one(samples.loss, row, found)
    write_times(out, head, n, stream, (done,), (r,))
    store_f64(reduction.sums, part, total)


@kernel
def grad_rows(
    rows: Units, n, log_prob: Rows, bias: Rows, biased, dlogits: Rows, samples: Samples, reduction: Reduction, stream
):
    divisor = mean_divisor(reduction)
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
