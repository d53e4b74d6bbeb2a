"""Losses with options where a row of classes is contiguous: vectors run along it.

The first pass over a row finds its largest number, and leaves the row in the cache. Later passes compute z again, which
costs less than to store it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Rows, Units
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
from opgrad.cpu.kernels.loops import rows as row_loops
from opgrad.cpu.kernels.loops.fill import write_zeros
from opgrad.cpu.kernels.loops.fold import fold_in_chunks
from opgrad.cpu.kernels.loops.map import get, mapped_by_index
from opgrad.cpu.kernels.numerics import logsumexp as lse


class RowLoops(NamedTuple):
    """The passes over a row, for one bend."""

    terms: Callable[..., Any]
    smoothed: Callable[..., Any]
    dense: Callable[..., Any]
    write: Callable[..., None]
    write_smoothed: Callable[..., None]
    write_dense: Callable[..., None]


def row_loops_of(bend: Bend) -> RowLoops:
    z, slope = bend

    @inline
    def term(total, arrays, i: int, whole: bool, mask, numbers):
        m, scale = numbers
        d = z(get(arrays[0], i, whole, mask), scale) - m
        if not whole:
            d = v.select(mask, d, row_loops.MINUS_INFINITY)
        return add_term(total, d)

    @inline
    def smoothed(total, arrays, i: int, whole: bool, mask, numbers):
        m, scale, _ = numbers
        return add_target(total, z(get(arrays[0], i, whole, mask), scale) - m, get(arrays[1], i, whole, mask))

    @inline
    def dense(total, arrays, i: int, whole: bool, mask, numbers):
        m, scale, share = numbers
        x, base, factors, q = arrays
        target = get(base, i, whole, mask) + get(factors, i, whole, mask) * get(q, i, whole, mask) * share
        return add_target(total, z(get(x, i, whole, mask), scale) - m, target)

    @inline
    def gradient(i, x: Vector, scale, coefficients, share) -> Vector:
        bent = z(x, scale)
        return gradient_of(i, bent, coefficients, 0.0) * slope(bent, scale)

    @inline
    def smoothed_gradient(i, x: Vector, base: Vector, scale, coefficients, share) -> Vector:
        bent = z(x, scale)
        return gradient_of(i, bent, coefficients, base) * slope(bent, scale)

    @inline
    def dense_gradient(
        i, x: Vector, base: Vector, factors: Vector, q: Vector, scale, coefficients, share
    ) -> Vector:  # fmt: skip
        bent = z(x, scale)
        return gradient_of(i, bent, coefficients, base + factors * q * share) * slope(bent, scale)

    return RowLoops(
        *(fold_in_chunks(each) for each in (term, smoothed, dense)),
        *(mapped_by_index(each) for each in (gradient, smoothed_gradient, dense_gradient)),
    )


@inline
def given_or(p, sample: int, is_given: int, default: float):
    return v.load_one(p, sample) if is_given else v.number(p, default)


def by_rows(bend: Bend, with_gradient: bool) -> Kernel:
    terms, smoothed, dense, write, write_smoothed, write_dense = row_loops_of(bend)
    bent = bend.z

    @inline
    def over_targets(xs, n: int, qs, target, m, scale):
        zero = v.full(xs, 0.0)
        if target.is_dense:
            return dense(
                (zero, zero), 0, n, (xs, target.base, target.factors, qs), (m, scale, v.number(xs, target.share))
            )
        if target.smooths:
            return smoothed((zero, zero), 0, n, (xs, target.base), (m, scale, v.number(xs, target.share)))
        return zero, zero

    @inline
    def statistics(xs, n: int, label: int, weight, qs, target, scale, results, row: int):
        """Write the results of a row; return m, the sum, its logarithm, the entropy, the sum of targets."""
        top, zero = row_loops.row_max(xs, 0, n), v.full(xs, 0.0)
        m = bent(v.full(xs, top), scale)
        rest, count, slack = terms((zero, zero, zero), 0, n, (xs,), (m, scale))
        others, largest = v.reduce_add_wide(rest, zero), v.reduce_add_wide(count, zero)
        s = others + largest
        log_s = v.first_lane(lse.log_of_sum(v.full(xs, largest), v.full(xs, others)))
        spread, mass = over_targets(xs, n, qs, target, m, scale)
        mass_all = v.reduce_add_wide(mass, zero)
        found = v.reduce_add_wide(spread, zero) + mass_all * log_s
        below = log_s - v.first_lane(bent(v.full(xs, v.load_one(xs, label)), scale) - m)
        if not target.is_dense:
            of_label = v.number(xs, target.share * weight)
            if of_label != 0.0:
                found += of_label * below
            mass_all += of_label
        entropy = log_s - v.reduce_add_wide(slack, zero) / s
        v.store_one(results.loss, row, found + (s - s))
        v.store_one(results.lse, row, v.first_lane(m) + log_s)
        v.store_one(results.log_prob, row, -below)
        v.store_one(results.entropy, row, entropy)
        v.store_one(results.predicted, row, row_loops.first_place(xs, n, top) if s == s else -1)
        return m, s, log_s, entropy, mass_all

    @inline
    def ignore(results, row: int):
        v.store_one(results.loss, row, 0.0)
        v.store_one(results.lse, row, 0.0)
        v.store_one(results.log_prob, row, 0.0)
        v.store_one(results.entropy, row, 0.0)
        v.store_one(results.predicted, row, -1)

    @inline
    def coefficients_of(xs, row: int, label: int, weight, found, target, upstream):
        m, s, log_s, entropy, mass = found
        dloss = given_or(upstream.dloss, row, upstream.given & 1, 1.0)
        dlse = given_or(upstream.dlse, row, upstream.given & 2, 0.0)
        square = given_or(upstream.dlse_square, row, upstream.given & 4, 0.0)
        dlog_prob = given_or(upstream.dlog_prob, row, upstream.given & 8, 0.0)
        dentropy = given_or(upstream.dentropy, row, upstream.given & 16, 0.0)
        constant = dloss * mass + dlse + 2.0 * (v.first_lane(m) + log_s) * square - dlog_prob
        constant += dentropy * (log_s - entropy)
        of_label = dlog_prob - (0.0 if target.is_dense else dloss * target.share * weight)
        numbers = v.number(xs, 1.0 / s), v.number(xs, constant), v.number(xs, -dentropy)
        return (label, m, *numbers, v.number(xs, dloss), v.full(xs, of_label))

    @kernel
    def losses(rows: Units, n, logits: Rows, samples: Samples, scale: Scale, target: Target, results: Results):
        factors = v.number(logits.data, scale.inner), v.number(logits.data, scale.outer)
        for row in rows:
            xs, label = logits.data + row * logits.step, v.load_one(samples.classes, row)
            if label < 0:
                ignore(results, row)
            else:
                qs, weight = target.probabilities + row * target.outer, v.load_one(samples.weights, row)
                statistics(xs, n, label, weight, qs, target, factors, results, row)

    @kernel
    def losses_and_gradient(
        rows: Units, n, logits: Rows, y: Rows, samples: Samples, scale: Scale, target: Target, results: Results,
        upstream: Upstream, stream,
    ):  # fmt: skip
        factors = v.number(logits.data, scale.inner), v.number(logits.data, scale.outer)
        share = v.number(logits.data, target.share)
        for row in rows:
            xs, out, label = logits.data + row * logits.step, y.data + row * y.step, v.load_one(samples.classes, row)
            if label < 0:
                ignore(results, row)
                write_zeros(out, 0, n, stream)
            else:
                qs, weight = target.probabilities + row * target.outer, v.load_one(samples.weights, row)
                found = statistics(xs, n, label, weight, qs, target, factors, results, row)
                numbers = factors, coefficients_of(xs, row, label, weight, found, target, upstream), share
                if target.is_dense:
                    write_dense(out, 0, n, stream, (xs, target.base, target.factors, qs), numbers)
                elif target.smooths:
                    write_smoothed(out, 0, n, stream, (xs, target.base), numbers)
                else:
                    write(out, 0, n, stream, (xs,), numbers)

    return losses_and_gradient if with_gradient else losses
