"""Losses and their gradients by labels: the kernels that run over rows and columns, and the plain losses.

`losses_by_rows`, `losses_by_columns` and `losses_transposed` make a kernel. What it does with a row, or with a strip of
as many samples as a vector has lanes, is a function, of which there is one for each loss.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Float, Part, Pointer, Private, Rows, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_f64, load_word, store_f64, store_word
from opgrad.cpu.kernels.loops.columns import (
    Line,
    Strip,
    column_max,
    column_rest,
    column_sum_exp,
    nothing,
    streams_columns,
    vector_of,
)
from opgrad.cpu.kernels.loops.fold import CHUNK, folded
from opgrad.cpu.kernels.loops.map import (
    BLOCK,
    get,
    mapped,
    mapped_by_index,
    of_each,
    put,
    times,
    write_same,
    write_zeros,
)
from opgrad.cpu.kernels.loops.rows import (
    MINUS_INFINITY,
    minus_both,
    no_row,
    row_log_sum,
    row_max,
    row_rest,
    row_sum_exp,
    transpose_in,
    transpose_out,
    write_behind,
    write_log,
)
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp, exp_up_to_zero, log

# --- integer labels, read and checked before anything is written to the results --------------------------------------

LARGEST: Final = 3e38  # about the largest float32
TOTAL: Final = 3  # status word: the sum of the samples' weights, a float64


class Samples(NamedTuple):
    """For each sample its class and weight, which are -1 and 0 if it is ignored, and its loss, or in gradients dy.

    A reduced loss, or its dy, is a single number.
    """

    classes: Pointer
    weights: Pointer
    loss: Pointer


class LossReduction(NamedTuple):
    """How losses are reduced, unless `each` is kept: their sum is divided by `divisor`, or by the sum of the weights.

    sums: the sum of each part, float64. status: the status words, in which the sum of the weights stands.
    """

    each: int
    by_weights: int
    divisor: Float
    status: int
    sums: int


@kernel
def read_labels(
    samples: Units, part: Part, count, labels: Pointer, ignores, ignored, weight: Pointer, is_weighted, by_sample,
    classes: Pointer, weights: Pointer, found,
):  # fmt: skip
    """ignored: the label whose samples are ignored, if `ignores`. weight: of classes, or of samples if `by_sample`.

    found[2 * part] = the first sample whose label is out of range, or -1; found[2 * part + 1] = the weights' sum.
    """
    wrong = -1
    total = 0.0
    for i in samples:
        label = v.load_one(labels, i)
        is_ignored = ignores != 0 and label == ignored
        if (label < 0 or label >= count) and not is_ignored:
            wrong = i
            break
        w = v.number(weights, 0.0)
        if not is_ignored:
            w = v.number(weights, 1.0)
            if is_weighted:
                w = v.number(weights, v.load_one(weight, i if by_sample else label))
        v.store_one(classes, i, -1 if is_ignored else label)
        v.store_one(weights, i, w)
        total += w
    store_word(found, 2 * part, wrong)
    store_f64(found, 2 * part + 1, total)


@kernel
def sum_labels(parts, found, labels: Pointer, status):
    """Write the first wrong label to the status words; if there is none, the sum of the weights."""
    total = 0.0
    for part in range(parts):
        wrong = load_word(found, 2 * part)
        if wrong >= 0:
            store_word(status, 0, 1)
            store_word(status, 1, wrong)
            store_word(status, 2, v.load_one(labels, wrong))
            break
        total += load_f64(found, 2 * part + 1)
    store_f64(status, TOTAL, total)


@inline
def divisor_of(reduction) -> float:
    return load_f64(reduction.status, TOTAL) if reduction.by_weights else reduction.divisor


@inline
def least_counting(divisor: float, n: int) -> int:
    """The smallest class whose samples count: ignored samples have class -1, and with a divisor of 0 none counts."""
    return n if divisor == 0.0 else 0


@inline
def inverse_of(divisor: float) -> float:
    """1 / divisor, and 0 for 0; an infinite divisor gives 0, too, with which infinite weights make NaN."""
    return 0.0 if divisor == 0.0 else 1.0 / divisor


UP: Final = 2.0**64


@inline
def shares(weights: Vector, inverse: float) -> Vector:
    """weights * inverse, where the inverse of a sum of denormal weights is more than float32 holds."""
    up = UP if inverse > LARGEST else 1.0
    return weights * up * (inverse / up)


@kernel
def write_losses(parts, reduction: LossReduction, loss: Pointer):
    """The loss of each sample, of parts that have one each."""
    for part in range(parts):
        v.store_one(loss, part, load_f64(reduction.sums, part))


@kernel
def add_losses(parts, reduction: LossReduction, loss: Pointer):
    """The reduced loss from the parts' sums."""
    if not reduction.each:
        total, divisor = 0.0, divisor_of(reduction)
        for part in range(parts):
            total += load_f64(reduction.sums, part)
        v.store_one(loss, 0, total / divisor if divisor != 0.0 else 0.0)


# --- where each lane of a vector holds another sample: along other axes, and short rows transposed -------------------


class Caching(NamedTuple):
    """Whether a strip's exponentials are kept, and whether results are written past the cache."""

    keep: int
    stream: int


@inline
def place_of(unit: int, strips, x):
    """Where a strip is: its outer index, its first column and sample, and how many columns are left from there on."""
    o, j = unit // strips.count, unit % strips.count * v.lanes(x)
    return o, j, o * strips.inner + j, strips.inner - j


@inline
def note_losses(losses: Vector, each: int, loss, sample: int, count: int, whole: bool, mask, buffer) -> float:
    """Store one loss for each sample, or return their sum in float64."""
    total = 0.0
    if each:
        put(loss, sample, losses, whole, mask, 0)
    else:
        v.store(buffer, 0, losses)
        for lane in range(min(count, v.lanes(buffer))):
            total += v.load_one(buffer, lane)
    return total


def losses_by_columns(visit: Callable[..., Vector], options_type: Any = Caching) -> Kernel:
    """The kernel that calls visit(…) for each strip, which writes the samples' columns of y and returns their losses.

    strip: its first element, the step from class to class, whether all its samples exist, and the mask of those that
    do. The visit may use the buffer from its second vector on.
    """

    @kernel
    def by_columns(
        units: Units, part: Part, strips: Strips, n, logits: Columns, y: Columns, samples: Samples,
        reduction: LossReduction, buffer: Private, options: options_type,
    ):  # fmt: skip
        w, divisor, total = v.lanes(buffer), divisor_of(reduction), 0.0
        for unit in units:
            place = place_of(unit, strips, buffer)
            o, j, sample, left = place
            x, out = logits.data + (o * logits.outer + j), y.data + (o * y.outer + j)
            whole, mask = left >= w, v.first(x, left)
            label, weight = get(samples.classes, sample, whole, mask), get(samples.weights, sample, whole, mask)
            strip = Strip(x, logits.step, whole, mask)
            losses = visit(strip, n, place, label, weight, divisor, buffer + w, out, y.step, options)
            total += note_losses(losses, reduction.each, samples.loss, sample, left, whole, mask, buffer)
        store_f64(reduction.sums, part, total)

    by_columns.__name__ = visit.__name__
    return by_columns


no_transpose = inline(lambda y, y_row, tile, n, count: None)  # instead of transpose_out: there is no y


def losses_transposed(visit: Callable[..., Vector], transpose_back: Callable[..., None] = transpose_out) -> Kernel:
    """The kernel for rows too short for vectors. The visit works on a tile, whose elements it overwrites with y."""

    @kernel
    def transposed(
        units: Units, part: Part, count, n, logits: Rows, y: Rows, samples: Samples, reduction: LossReduction,
        buffer: Private,
    ):  # fmt: skip
        w, divisor, total = v.lanes(buffer), divisor_of(reduction), 0.0
        tile = buffer + w
        for unit in units:
            row, left = unit * w, count - unit * w
            whole, mask = left >= w, v.first(logits.data, left)
            transpose_in(tile, logits.data + row * logits.step, logits.step, n, min(left, w))
            label, weight = get(samples.classes, row, whole, mask), get(samples.weights, row, whole, mask)
            strip, place = Strip(tile, w, True, mask), (0, 0, row, left)
            losses = visit(strip, n, place, label, weight, divisor, tile, tile, w, (1, 0))
            total += note_losses(losses, reduction.each, samples.loss, row, left, whole, mask, buffer)
            transpose_back(y.data + row * y.step, y.step, tile, n, min(left, w))
        store_f64(reduction.sums, part, total)

    transposed.__name__ = visit.__name__
    return transposed


sum_exp_columns = column_sum_exp(nothing, lse.ROUNDED)
add_rest_columns = column_rest(nothing, lse.PLAIN_BELOW)


@inline
def next_strip(strip):
    return Line(strip.data + v.lanes(strip.data), strip.step)


@inline
def loss_column(strip, n: int, place, label: Vector, w: Vector, divisor: float, e, y, y_n: int, caching) -> Vector:
    """Write log_prob to y."""
    x, _, whole, mask = strip
    past = streams_columns(y, y_n, caching[1])
    m = column_max(strip, n)
    rest, equal = add_rest_columns(x, strip, n, m, x, 0, next_strip(strip), 0)
    log_s = lse.column_log_of_sum(rest, equal, m)
    losses = v.full(x, 0.0)
    for i in range(n):
        value = (vector_of(strip, i) - m) - log_s
        losses = v.select(label == i, value, losses)
        put(y, i * y_n, value, whole, mask, past)
    return v.select(label >= 0, -losses * w, 0.0)


@inline
def loss_only_column(strip, n: int, place, label: Vector, w: Vector, divisor: float, e, y, y_n: int, caching) -> Vector:
    """Leave y as it is.

    It takes a few classes at a time, so that x is still in the cache when it is read the second time.
    """
    x, x_n = strip.data, strip.step
    m, s, target = v.full(x, MINUS_INFINITY), v.full(x, 0.0), v.full(x, 0.0)
    for begin in range(0, n, CHUNK):
        end = min(begin + CHUNK, n)
        top = m
        for i in range(begin, end):
            value = vector_of(strip, i)
            top = v.maximum(value, top)
            target = v.select(label == i, value, target)
        shift = v.select(top > MINUS_INFINITY, top, 0.0)  # if all are -inf so far, the sum is 0 and not NaN
        ahead = x + (end * x_n if end < n else v.lanes(x))
        chunk = v.full(x, 0.0)
        for i in range(begin, end):
            chunk = chunk + exp_up_to_zero(vector_of(strip, i) - shift)
            v.prefetch(ahead, (i - begin) * x_n)
        s = s * exp_up_to_zero(m - shift) + chunk
        m = top
    return v.select(label >= 0, (log(s) - (target - m)) * w, 0.0)


@inline
def fused_column(strip, n: int, place, label: Vector, w: Vector, divisor: float, e, y, y_n: int, caching) -> Vector:
    """Write dlogits to y; the exponentials are kept in `e` meanwhile, or computed twice."""
    (x, _, whole, mask), (keep, stream) = strip, caching
    past = streams_columns(y, y_n, stream)
    m = column_max(strip, n)
    target = v.full(x, 0.0)
    for i in range(n):
        target = v.select(label == i, vector_of(strip, i), target)
    s = sum_exp_columns(x, strip, n, m, e, keep * v.lanes(e), next_strip(strip), 0)
    total, f = s[0], shares(w, inverse_of(divisor)) / s[0]
    counts = label >= least_counting(divisor, n)
    for i in range(n):
        value = v.load(e, i * v.lanes(e)) if keep else lse.exp_scaled(vector_of(strip, i), lse.scale_for(m))
        put(y, i * y_n, v.select(counts, v.select(label == i, value - total, value) * f, 0.0), whole, mask, past)
    log_s = lse.column_log_of_total(s, m, lse.exp_scaled(m, lse.scale_for(m)), 0.0)
    return v.select(counts, (log_s - (target - m)) * w, 0.0)


# --- samples in lanes: the gradient from log_prob --------------------------------------------------------------------


@inline
def gradient_from_log_prob(i, log_prob: Vector, label, f) -> Vector:
    p = exp(log_prob)
    return v.select(i == label, p - 1.0, p) * f


@kernel
def grad_columns(
    units: Units, strips: Strips, n, log_prob: Columns, bias: Columns, biased, dlogits: Columns,
    samples: Samples, reduction: LossReduction, stream,
):  # fmt: skip
    w, divisor = v.lanes(log_prob.data), divisor_of(reduction)
    inverse, least = inverse_of(divisor), least_counting(divisor, n)
    for unit in units:
        o, j, sample, left = place_of(unit, strips, log_prob.data)
        xs, ys = log_prob.data + (o * log_prob.outer + j), dlogits.data + (o * dlogits.outer + j)
        bs = bias.data + (o * bias.outer + j)
        whole, mask, past = left >= w, v.first(xs, left), streams_columns(ys, dlogits.step, stream)
        label, weight = get(samples.classes, sample, whole, mask), get(samples.weights, sample, whole, mask)
        f = shares(weight, inverse)
        f = f * get(samples.loss, sample, whole, mask) if reduction.each else f * v.load_one(samples.loss, 0)
        counts = label >= least
        for i in range(n):
            value = v.select(counts, gradient_from_log_prob(i, get(xs, i * log_prob.step, whole, mask), label, f), 0.0)
            if biased:
                value = value + get(bs, i * bias.step, whole, mask)
            put(ys, i * dlogits.step, value, whole, mask, past)


# --- where the classes of a sample are contiguous: vectors run along a row -------------------------------------------

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

step_log_prob, complete_log_prob, begin_log_prob, finish_log_prob = write_behind(of_each(minus_both))
add_rest = row_rest(step_log_prob, lse.PLAIN_BELOW)


@inline
def no_log_prob(x, y, n: int, options):
    return no_row(y, n, (x,), (v.full(x, 0.0), v.full(x, 0.0)))


@inline
def loss_row(x, n: int, ahead, out, row: int, samples, divisor: float, options, waiting, stream: int):
    label, largest = v.load_one(samples.classes, row), row_max(x, 0, n)
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
    m, log_s = row_log_sum(x, n, ahead)
    return (log_s - (v.load_one(x, label) - m)) * v.load_one(samples.weights, row), waiting


loss_only_rows = losses_by_rows(loss_only_row)

# --- the loss and its gradient ---------------------------------------------------------------------------------------


class Exponentials(NamedTuple):
    """Memory for the exponentials of a row, and for those of the row before."""

    first: Private
    second: Private


step_slope, complete_slope, begin_slope, finish_slopes = write_behind(of_each(times))
sum_exp = row_sum_exp(step_slope, lse.ROUNDED)


@inline
def no_slope(x, y, n: int, options):
    """The row that waits, and the memory for the exponentials of the next row."""
    return no_row(y, n, (options.second,), (v.number(x, 0.0),)), options.first


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
    m, target, w = row_max(x, 0, n), v.load_one(x, label), v.load_one(samples.weights, row)
    total, written = sum_exp(x, n, m, e, 1, ahead, waiting)
    complete_slope(waiting, written, n)
    loss = (lse.row_log_of_total(x, total, lse.rounded_top(x, m)) - (target - m)) * w
    s = v.number(x, total)
    v.store_one(e, label, v.load_one(e, label) - s)
    factor = v.number(x, inverse_of(divisor) * w) / s
    return loss, (begin_slope(out, n, (e,), (factor,), False, stream), waiting.arrays[0])


fused_rows = losses_by_rows(fused_row, Exponentials, no_slope, finish_slope)

# --- classes in rows: the gradient from log_prob ---------------------------------------------------------------------

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


# --- labels that are a probability for each class --------------------------------------------------------------------


@folded
def _add_terms(total: Vector, x: Vector, label: Vector, m, log_s) -> Vector:
    """Add what a class adds to the loss: 0 where its label is 0, even if its probability is 0 too."""
    return total + v.select(label == 0.0, 0.0, label * (log_s - (x - m)))


@inline
def dense_row(x, n: int, ahead, out, row: int, samples, divisor: float, labels, before, stream: int):
    numbers = row_log_sum(x, n, x + n)
    loss = v.reduce_add(_add_terms(0, n, (x, labels + row * n), numbers))
    write_log(out, 0, n, stream, (x,), numbers)
    return loss, before


dense_loss = losses_by_rows(dense_row, Pointer)

write_slope = mapped(lambda log_prob, label, factor: (exp(log_prob) - label) * factor)


@kernel
def dense_gradient(
    units: Units, blocks, n, dy: Pointer, log_prob: Pointer, labels: Pointer, dlogits: Pointer, inverse: Float, stream
):
    """Each row has its own dy; a unit is a block of one."""
    for unit in units:
        row, begin = unit // blocks, unit % blocks * BLOCK
        factor = v.load_one(dy, row) * v.number(dlogits, inverse)
        end, start = min(begin + BLOCK, n), row * n
        write_slope(dlogits + start, begin, end, stream, (log_prob + start, labels + start), (factor,))
