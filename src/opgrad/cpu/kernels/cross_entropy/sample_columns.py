"""Losses with options where each lane of a vector holds another sample: along the axes behind that of the classes."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Strips, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.cross_entropy.labels import Samples
from opgrad.cpu.kernels.cross_entropy.sample_formulas import (
    Bend,
    Results,
    Scale,
    Target,
    Upstream,
    add_target,
    add_term,
    gradient_of,
)
from opgrad.cpu.kernels.loops.columns import column_max
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.loops.map import get, put
from opgrad.cpu.kernels.numerics import logsumexp as lse


@inline
def target_of(x, i: int, qs, target, whole: bool, mask) -> Vector:
    """The targets of class i, without the share of the labels."""
    if target.is_dense:
        q = get(qs, i * target.step, whole, mask) * (v.load_one(target.factors, i) * v.number(x, target.share))
        return q + v.load_one(target.base, i)
    return v.full(x, v.load_one(target.base, i) if target.smooths else v.number(x, 0.0))


@inline
def store_places(places: Vector, results, sample: int, count: int, whole: bool, mask) -> None:
    """Lanes as whole numbers, by way of where the losses will stand."""
    put(results.loss, sample, places, whole, mask, 0)
    for lane in range(count):
        v.store_one(results.predicted, sample + lane, int(v.load_one(results.loss, sample + lane)))


@inline
def given_or(x, p, sample: int, is_given: int, default: float, whole: bool, mask) -> Vector:
    return get(p, sample, whole, mask) if is_given else v.full(x, default)


def by_columns(bend: Bend, with_gradient: bool) -> Kernel:
    z, slope = bend

    @inline
    def sums(x, x_n: int, n: int, m: Vector, scale, whole: bool, mask):
        zero = v.full(x, 0.0)
        total = zero, zero, zero
        for begin in range(0, n, CHUNK):
            chunk = zero, zero, zero
            for i in range(begin, min(begin + CHUNK, n)):
                chunk = add_term(chunk, z(get(x, i * x_n, whole, mask), scale) - m)
            total = v.add_each(total, chunk)
        return total

    @inline
    def target_sums(x, x_n: int, n: int, m: Vector, qs, target, scale, whole: bool, mask):
        zero = v.full(x, 0.0)
        total = zero, zero
        for begin in range(0, n if target.is_dense or target.smooths else 0, CHUNK):
            chunk = zero, zero
            for i in range(begin, min(begin + CHUNK, n)):
                d = z(get(x, i * x_n, whole, mask), scale) - m
                chunk = add_target(chunk, d, target_of(x, i, qs, target, whole, mask))
            total = v.add_each(total, chunk)
        return total

    @inline
    def of_labels(x, x_n: int, n: int, top: Vector, m: Vector, label: Vector, scale, whole: bool, mask):
        """The labels' z - m, and the first largest class: from the last one on."""
        of_label, place = v.full(x, 0.0), v.full(x, 0.0)
        for k in range(n):
            i = n - 1 - k
            value = get(x, i * x_n, whole, mask)
            of_label = v.select(label == i, z(value, scale) - m, of_label)
            place = v.select(value == top, v.like(place, i * 1.0), place)
        return of_label, place

    @inline
    def statistics(
        x, x_n: int, n: int, label: Vector, weight: Vector, qs, target, scale, results, sample: int, count: int,
        whole: bool, mask,
    ):  # fmt: skip
        """Write the results of a strip; return m, the sum, its logarithm, the entropy, the sum of targets."""
        top = column_max(x, x_n, n, whole, mask)
        m = z(top, scale)
        rest, equal, slack = sums(x, x_n, n, m, scale, whole, mask)
        s, log_s = rest + equal, lse.log_of_sum(equal, rest)
        d, place = of_labels(x, x_n, n, top, m, label, scale, whole, mask)
        spread, mass = target_sums(x, x_n, n, m, qs, target, scale, whole, mask)
        loss, below = spread + mass * log_s, log_s - d
        if not target.is_dense:
            of_label = weight * v.number(x, target.share)
            loss = loss + v.select(of_label == 0.0, 0.0, of_label * below)
            mass = mass + of_label
        live, entropy = label >= 0, log_s - slack / s
        store_places(v.select(live & (s == s), place, -1.0), results, sample, count, whole, mask)
        put(results.loss, sample, v.select(live, loss + (s - s), 0.0), whole, mask, 0)
        put(results.lse, sample, v.select(live, m + log_s, 0.0), whole, mask, 0)
        put(results.log_prob, sample, v.select(live, -below, 0.0), whole, mask, 0)
        put(results.entropy, sample, v.select(live, entropy, 0.0), whole, mask, 0)
        return m, s, log_s, entropy, mass

    @inline
    def coefficients_of(x, sample: int, label: Vector, weight: Vector, found, target, upstream, whole: bool, mask):
        m, s, log_s, entropy, mass = found
        dloss = given_or(x, upstream.dloss, sample, upstream.given & 1, 1.0, whole, mask)
        dlse = given_or(x, upstream.dlse, sample, upstream.given & 2, 0.0, whole, mask)
        square = given_or(x, upstream.dlse_square, sample, upstream.given & 4, 0.0, whole, mask)
        dlog_prob = given_or(x, upstream.dlog_prob, sample, upstream.given & 8, 0.0, whole, mask)
        dentropy = given_or(x, upstream.dentropy, sample, upstream.given & 16, 0.0, whole, mask)
        constant = dloss * mass + dlse + (m + log_s) * square * 2.0 - dlog_prob + dentropy * (log_s - entropy)
        of_label = dlog_prob
        if not target.is_dense:
            of_label = of_label - dloss * weight * v.number(x, target.share)
        return label, m, 1.0 / s, constant, -dentropy, dloss, of_label

    @kernel
    def losses(
        units: Units, strips: Strips, n, logits: Columns, samples: Samples, scale: Scale, target: Target,
        results: Results,
    ):  # fmt: skip
        w, factors = v.lanes(logits.data), (v.number(logits.data, scale.inner), v.number(logits.data, scale.outer))
        for unit in units:
            o, j = unit // strips.count, unit % strips.count * w
            xs, left, sample = logits.data + (o * logits.outer + j), strips.inner - j, o * strips.inner + j
            whole, mask, qs = left >= w, v.first(xs, left), target.probabilities + (o * target.outer + j)
            label, weight = get(samples.classes, sample, whole, mask), get(samples.weights, sample, whole, mask)
            statistics(
                xs, logits.step, n, label, weight, qs, target, factors, results, sample, min(left, w), whole, mask
            )

    @kernel
    def losses_and_gradient(
        units: Units, strips: Strips, n, logits: Columns, y: Columns, samples: Samples, scale: Scale, target: Target,
        results: Results, upstream: Upstream,
    ):  # fmt: skip
        w, factors = v.lanes(logits.data), (v.number(logits.data, scale.inner), v.number(logits.data, scale.outer))
        for unit in units:
            o, j = unit // strips.count, unit % strips.count * w
            xs, ys = logits.data + (o * logits.outer + j), y.data + (o * y.outer + j)
            left, sample = strips.inner - j, o * strips.inner + j
            whole, mask, qs = left >= w, v.first(xs, left), target.probabilities + (o * target.outer + j)
            label, weight = get(samples.classes, sample, whole, mask), get(samples.weights, sample, whole, mask)
            found = statistics(
                xs, logits.step, n, label, weight, qs, target, factors, results, sample, min(left, w), whole, mask
            )
            numbers = coefficients_of(xs, sample, label, weight, found, target, upstream, whole, mask)
            for i in range(n):
                bent = z(get(xs, i * logits.step, whole, mask), factors)
                dz = gradient_of(i, bent, numbers, target_of(xs, i, qs, target, whole, mask))
                put(ys, i * y.step, v.select(label >= 0, dz * slope(bent, factors), 0.0), whole, mask, 0)

    return losses_and_gradient if with_gradient else losses
