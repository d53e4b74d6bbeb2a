"""Softmax cross-entropy where each lane of a vector holds another sample: columns, and tiles of short rows.

`classes` and `weights` are those of opgrad.cpu.cross_entropy.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler.memory import store_f64
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.simd import (
    Pointer,
    Vector,
    first,
    full,
    lanes,
    load,
    load_one,
    maximum,
    prefetch,
    select,
    store,
)
from opgrad.cpu.cross_entropy.labels import divisor_inverse
from opgrad.cpu.loops.columns import add_rest_logging_columns, column_max, column_sum_exp, get, put, streams_columns
from opgrad.cpu.loops.rows import CHUNK, MINUS_INFINITY, minus_both
from opgrad.cpu.loops.transpose import turn_in, turn_out
from opgrad.cpu.numerics.logsumexp import add_rounded, column_log_of_sum, column_log_of_total, exp_scaled, scale_for
from opgrad.cpu.numerics.math import exp, exp_up_to_zero, log
from opgrad.cpu.runtime.workspace import release_slot, take_slot

# --- what one vector of samples contributes ------------------------------------------------------------------------


sum_exp_columns = column_sum_exp(minus_both, add_rounded)


@inline
def loss_column(
    x: Any, x_n: int, n: int, whole: bool, mask: Any, label: Vector, w: Vector, inverse: float,
    e: Any, keep: int, y: Any, y_n: int, past: int,
) -> Vector:  # fmt: skip
    """log_prob to y; the samples' losses."""
    m = column_max(x, x_n, n, whole, mask)
    rest, equal = add_rest_logging_columns(x, x_n, n, whole, mask, m, y, y_n, 0, x, x_n, (m, m))
    log_s = column_log_of_sum(rest, equal, m)
    losses = full(x, 0.0)
    for i in range(n):
        v = (get(x, i * x_n, whole, mask) - m) - log_s
        losses = select(label == i, v, losses)
        put(y, i * y_n, v, whole, mask, past)
    return select(label >= 0, -losses * w, 0.0)


@inline
def loss_only_column(
    x: Any, x_n: int, n: int, whole: bool, mask: Any, label: Vector, w: Vector, inverse: float,
    e: Any, keep: int, y: Any, y_n: int, past: int,
) -> Vector:  # fmt: skip
    """The samples' losses; y is not written.

    A few classes at a time, so that x is in the cache when it is read again, however many classes there are.
    """
    m, s, target = full(x, MINUS_INFINITY), full(x, 0.0), full(x, 0.0)
    for begin in range(0, n, CHUNK):
        end = min(begin + CHUNK, n)
        top = m
        for i in range(begin, end):
            v = get(x, i * x_n, whole, mask)
            top = maximum(v, top)
            target = select(label == i, v, target)
        shift = select(top > MINUS_INFINITY, top, 0.0)  # so far all -inf: the sum is 0, not NaN
        ahead = x + (end * x_n if end < n else lanes(x))
        chunk = full(x, 0.0)
        for i in range(begin, end):
            chunk = chunk + exp_up_to_zero(get(x, i * x_n, whole, mask) - shift)
            prefetch(ahead, (i - begin) * x_n)
        s = s * exp_up_to_zero(m - shift) + chunk
        m = top
    return select(label >= 0, (log(s) - (target - m)) * w, 0.0)


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
    s = sum_exp_columns(x, x_n, n, whole, mask, m, e, keep * lanes(e), y, y_n, 0, x, x_n, (m, m))
    total, f = s[0], w * inverse / s[0]
    live = label >= (0 if inverse != 0.0 else n)
    for i in range(n):
        v = load(e, i * lanes(e)) if keep else exp_scaled(get(x, i * x_n, whole, mask), scale_for(m))
        put(y, i * y_n, select(live, select(label == i, v - total, v) * f, 0.0), whole, mask, past)
    return select(live, (column_log_of_total(s, m, exp_scaled(m, scale_for(m)), 0.0) - (target - m)) * w, 0.0)


@inline
def gradient_from_log_prob(i: Any, log_prob: Vector, label: Any, f: Any) -> Vector:
    p = exp(log_prob)
    return select(i == label, p - 1.0, p) * f


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


# --- the kernels ---------------------------------------------------------------------------------------------------


def loss_by_columns(column: Callable[..., Vector]) -> Kernel:
    """The losses, and y as `column` writes it, along axes behind that of the classes."""

    @kernel
    def by_columns(
        part, per_part, units, strips, n, inner,
        logits: Pointer, logits_outer, logits_n, y: Pointer, y_outer, y_n,
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
            xs, ys = logits + (o * logits_outer + j), y + (o * y_outer + j)
            whole, mask, past = j + w <= inner, first(logits, inner - j), streams_columns(ys, y_n, stream)
            place = o * inner + j
            label, weight = get(classes, place, whole, mask), get(weights, place, whole, mask)
            losses = column(xs, logits_n, n, whole, mask, label, weight, inverse, buffer + w, keep, ys, y_n, past)
            total += note_losses(losses, each, loss, place, inner - j, whole, mask, buffer)
        store_f64(sums, part, total)
        release_slot(scratch, slot)

    return by_columns


@inline
def leave(y: Any, y_row: int, tile: Any, n: int, count: int) -> None:
    """In the place of turn_out: there is no y."""


def loss_by_tiles(column: Callable[..., Vector], turn_back: Callable[..., None] = turn_out) -> Kernel:
    """The losses, and y as `column` writes it, for rows too short for vectors."""

    @kernel
    def by_tiles(
        part, per_part, units, count, n, logits: Pointer, logits_row, y: Pointer, y_row,
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
            losses = column(tile, w, n, True, mask, label, weight, inverse, tile, 1, tile, w, 0)
            total += note_losses(losses, each, loss, row, left, whole, mask, buffer)
            turn_back(y + row * y_row, y_row, tile, n, min(left, w))
        store_f64(sums, part, total)
        release_slot(scratch, slot)

    return by_tiles


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
        bs = bias + (o * bias_outer + j)
        whole, mask, past = j + w <= inner, first(log_prob, inner - j), streams_columns(ys, dlogits_n, stream)
        place = o * inner + j
        label, f = get(classes, place, whole, mask), get(weights, place, whole, mask) * inverse
        f = f * get(dy, place, whole, mask) if each else f * load_one(dy, 0)
        live = label >= (0 if inverse != 0.0 else n)
        for i in range(n):
            v = select(live, gradient_from_log_prob(i, get(xs, i * log_prob_n, whole, mask), label, f), 0.0)
            if biased:
                v = v + get(bs, i * bias_n, whole, mask)
            put(ys, i * dlogits_n, v, whole, mask, past)
