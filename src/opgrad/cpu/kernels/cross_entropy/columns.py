"""Losses where each lane of a vector holds another sample: along axes behind the classes, and short rows transposed.

`losses_by_columns` and `losses_transposed` make the kernels. What they do with a strip, which is as many samples as a
vector has lanes, is a function, of which there is one for each loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Part, Private, Rows, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import store_f64
from opgrad.cpu.kernels.cross_entropy.labels import (
    LossReduction,
    Samples,
    divisor_of,
    inverse_of,
    least_counting,
    shares,
)
from opgrad.cpu.kernels.loops import columns as loops
from opgrad.cpu.kernels.loops.columns import Line, Strip, vector_of
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, transpose_in, transpose_out
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp, exp_up_to_zero, log

# --- the kernels ----------------------------------------------------------------------------------------------------


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


# --- the plain losses of a strip ------------------------------------------------------------------------------------

sum_exp_columns = loops.column_sum_exp(loops.nothing, lse.ROUNDED)
add_rest_columns = loops.column_rest(loops.nothing, lse.PLAIN_BELOW)


@inline
def next_strip(strip):
    return Line(strip.data + v.lanes(strip.data), strip.step)


@inline
def loss_column(strip, n: int, place, label: Vector, w: Vector, divisor: float, e, y, y_n: int, caching) -> Vector:
    """Write log_prob to y."""
    x, _, whole, mask = strip
    past = loops.streams_columns(y, y_n, caching[1])
    m = loops.column_max(strip, n)
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
    past = loops.streams_columns(y, y_n, stream)
    m = loops.column_max(strip, n)
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


# --- the gradient from log_prob --------------------------------------------------------------------------------------


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
        whole, mask, past = left >= w, v.first(xs, left), loops.streams_columns(ys, dlogits.step, stream)
        label, weight = get(samples.classes, sample, whole, mask), get(samples.weights, sample, whole, mask)
        f = shares(weight, inverse)
        f = f * get(samples.loss, sample, whole, mask) if reduction.each else f * v.load_one(samples.loss, 0)
        counts = label >= least
        for i in range(n):
            value = v.select(counts, gradient_from_log_prob(i, get(xs, i * log_prob.step, whole, mask), label, f), 0.0)
            if biased:
                value = value + get(bs, i * bias.step, whole, mask)
            put(ys, i * dlogits.step, value, whole, mask, past)
