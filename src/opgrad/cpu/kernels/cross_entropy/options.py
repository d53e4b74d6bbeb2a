"""The losses with all options: z of the logits, targets that are spread over classes, several results of each sample.

What rows and columns share stands first: the arguments, the formulas of a vector, and those of a sample, whose values
are numbers by rows and vectors by columns. How z and a target are computed is chosen when a kernel is compiled. A pass
over the classes computes z again, which costs less than to store it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Columns, Float, Pointer, Private, Rows, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.cross_entropy.loss import losses_by_columns, losses_by_rows
from opgrad.cpu.kernels.loops.columns import column_max, vector_of
from opgrad.cpu.kernels.loops.fold import fold_down, fold_in_chunks, folded, sum_products, sum_range
from opgrad.cpu.kernels.loops.map import get, mapped, mapped_by_index, put, row_writer, write_zeros
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, first_largest, row_max, row_rests
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp, exp_up_to_zero, tanh


class Scaling(NamedTuple):
    """z = x * inner, or tanh(x * inner) * outer."""

    inner: Float
    outer: Float


class Target(NamedTuple):
    """The weighted targets: `base`, plus `factors` * probabilities or, at the label, `of_label` * weight."""

    base: Pointer
    factors: Pointer
    probabilities: Columns
    of_label: Float


class SampleResults(NamedTuple):
    """The results of each sample besides its loss."""

    lse: Pointer
    log_prob: Pointer
    entropy: Pointer
    predicted: Pointer


class Upstream(NamedTuple):
    """The gradients with respect to the results, by samples; a vector that all samples have has a step of 0."""

    dloss: Rows
    dlse: Rows
    dlse_square: Rows
    dlog_prob: Rows
    dentropy: Rows


class SampleOptions(NamedTuple):
    scaling: Scaling
    target: Target
    results: SampleResults
    upstream: Upstream


@kernel
def write_targets(n, weight: Pointer, is_given, constant: Float, share: Float, base: Pointer, factors: Pointer):
    """For each class the constant and the share, times its weight."""
    for i in range(n):
        factor = v.load_one(weight, i) if is_given else v.number(weight, 1.0)
        v.store_one(base, i, factor * constant)
        v.store_one(factors, i, factor * v.number(factors, share))


# --- z, and its slope dz/dx -----------------------------------------------------------------------------------------


class Transform(NamedTuple):
    z: Callable[..., Vector]
    slope: Callable[..., Any]


@inline
def _capped_slope(x: Vector, scaling) -> Vector:
    t = tanh(x * scaling[0])
    return (1.0 - t * t) * (scaling[0] * scaling[1])


DIVIDED = Transform(inline(lambda x, scaling: x * scaling[0]), inline(lambda x, scaling: scaling[0]))
CAPPED = Transform(inline(lambda x, scaling: tanh(x * scaling[0]) * scaling[1]), _capped_slope)


@inline
def in_precision(p, scaling):
    return v.number(p, scaling.inner), v.number(p, scaling.outer)


# --- formulas of a vector: of classes of a row, or of samples of a strip ---------------------------------------------


class VectorLayout(NamedTuple):
    """The functions in which rows and columns differ.

    A vector holds neighbouring classes by rows, and neighbouring samples by columns. What is known of a sample is a
    number by rows, and a lane of a vector by columns.
    """

    classes: Callable[..., Any]  # (x, i): the numbers of the lanes' classes at place i
    of_classes: Callable[..., Vector]  # (p, i, whole, mask): what p has for these classes
    fold: Callable[..., Any]  # (visit): the function (zeros, n, arrays, whole, mask, numbers) that sums over classes
    total: Callable[..., Any]  # (x, sums): the sums of samples, from those of lanes
    log_of_sum: Callable[..., Any]  # (x, count, rest)
    choose: Callable[..., Any]  # (condition, a, b)


def _fold_row(visit: Callable[..., Any]) -> Callable[..., Any]:
    along = fold_in_chunks(visit)
    return inline(lambda zeros, n, arrays, whole, mask, numbers: along(zeros, 0, n, arrays, numbers))


def _fold_strip(visit: Callable[..., Any]) -> Callable[..., Any]:
    inline(visit)
    down = fold_down(lambda total, arrays, i, numbers: visit(total, arrays, i, *numbers))
    return inline(lambda zeros, n, arrays, whole, mask, numbers: down(zeros, 0, n, arrays, (whole, mask, numbers)))


ROWS = VectorLayout(
    inline(lambda x, i: v.index(x, i)),
    get,
    _fold_row,
    inline(lambda x, sums: v.reduce_add_wide(sums, v.full(x, 0.0))),
    inline(lambda x, count, rest: v.first_lane(lse.log_of_sum(v.full(x, count), v.full(x, rest)))),
    inline(lambda condition, a, b: a if condition else b),
)
COLUMNS = VectorLayout(
    inline(lambda x, i: i),
    inline(lambda p, i, whole, mask: v.full(p, v.load_one(p, i))),
    _fold_strip,
    inline(lambda x, sums: sums),
    inline(lambda x, count, rest: lse.log_of_sum(count, rest)),
    inline(lambda condition, a, b: v.select(condition, a, b)),
)


def target_of(kind: str, of_classes: Callable[..., Vector]) -> Callable[..., Vector]:
    """The function (arrays, i, whole, mask) of the targets of classes, without what the label adds."""

    @inline
    def dense(arrays, i: int, whole: bool, mask) -> Vector:
        _, _, base, factors, q, step = arrays
        return of_classes(base, i, whole, mask) + of_classes(factors, i, whole, mask) * get(q, i * step, whole, mask)

    smoothed = inline(lambda arrays, i, whole, mask: of_classes(arrays[2], i, whole, mask))
    of_label_alone = inline(lambda arrays, i, whole, mask: v.full(arrays[0], 0.0))
    return {"labels": of_label_alone, "smoothed": smoothed, "dense": dense}[kind]


@inline
def gradient_of(p: Vector, level: Vector, target, at_label, factors) -> Vector:
    """dz from the factors of p, of p * level, of the target and of the label; level is z, or z less a constant."""
    of_p, of_level, of_target, of_label = factors
    dz = p * (of_p + of_level * level) - of_target * target
    return v.select(at_label, dz + of_label, dz)


def formulas(layout: VectorLayout, transform: Transform, kind: str) -> tuple[Callable[..., Any], Callable[..., Vector]]:
    """The sums over the classes of a sample, and the gradient.

    Both take arrays: x, its step from class to class, the targets' base and factors, probabilities, and their step.
    """
    (z, slope), target = transform, target_of(kind, layout.of_classes)
    classes, total, log_of_sum, choose = layout.classes, layout.total, layout.log_of_sum, layout.choose

    @inline
    def add_term(sums, arrays, i: int, whole: bool, mask, numbers):
        """Add the exponential of d = z - m, or 1 to the count where z is m; and add the exponential times d."""
        rest, count, slack = sums
        m, scaling = numbers
        d = z(get(arrays[0], i * arrays[1], whole, mask), scaling) - m
        if not whole:
            d = v.select(mask, d, MINUS_INFINITY)
        e = exp_up_to_zero(d)
        return (
            rest + v.select(d == 0.0, 0.0, e),
            count + v.select(d == 0.0, v.like(d, 1.0), 0.0),
            slack + e * v.maximum(d, lse.LOWEST_DIFFERENCE(d)),
        )

    @inline
    def add_target(sums, arrays, i: int, whole: bool, mask, numbers):
        """Add target * (m - z), or 0 where the target is 0, and the target."""
        m, scaling = numbers
        d, q = z(get(arrays[0], i * arrays[1], whole, mask), scaling) - m, target(arrays, i, whole, mask)
        return sums[0] - v.select(q == 0.0, 0.0, q * d), sums[1] + q

    add_terms, add_targets = layout.fold(add_term), layout.fold(add_target)

    @inline
    def sums_of(arrays, n: int, whole: bool, mask, numbers, d, of_label):
        """The sum, its logarithm, the entropy, log_prob, the loss, and the sum of the targets.

        d: z - m of the label. of_label: the label's target beside what the formula of targets gives.
        """
        x = arrays[0]
        zero = v.full(x, 0.0)
        rests, counts, slacks = add_terms((zero, zero, zero), n, arrays, whole, mask, numbers)
        rest, count = total(x, rests), total(x, counts)
        s, log_s = rest + count, log_of_sum(x, count, rest)
        loss = choose(of_label == 0.0, 0.0, of_label * (log_s - d))
        if kind != "labels":
            spread, mass = add_targets((zero, zero), n, arrays, whole, mask, numbers)
            loss, of_label = total(x, spread) + total(x, mass) * log_s + loss, total(x, mass) + of_label
        return s, log_s, log_s - total(x, slacks) / s, d - log_s, loss + (s - s), of_label

    @inline
    def gradient(arrays, i: int, whole: bool, mask, numbers) -> Vector:
        (label, m, inverse, of_p, of_d, of_target, of_label), scaling = numbers
        x = get(arrays[0], i * arrays[1], whole, mask)
        d = z(x, scaling) - m
        p, level = exp_up_to_zero(d) * inverse, v.maximum(d, lse.LOWEST_DIFFERENCE(d))
        factors = of_p, of_d, of_target, of_label
        at_label = classes(arrays[0], i) == label
        return gradient_of(p, level, target(arrays, i, whole, mask), at_label, factors) * slope(x, scaling)

    return sums_of, gradient


@inline
def coefficients_of(upstream, m, found, of_label):
    """What the gradient takes: 1 / sum, and the factors of p, of p * (z - m), of the targets and of the label."""
    dloss, dlse, dlse_square, dlog_prob, dentropy = upstream
    s, log_s, entropy, _, _, mass = found
    of_p = dloss * mass + dlse + 2.0 * (m + log_s) * dlse_square - dlog_prob + dentropy * (log_s - entropy)
    return 1.0 / s, of_p, -dentropy, dloss, dlog_prob - dloss * of_label


# --- the kernels ----------------------------------------------------------------------------------------------------


@inline
def store_results(results, row: int, of_lse, log_prob, entropy, predicted: int) -> None:
    v.store_one(results.lse, row, of_lse)
    v.store_one(results.log_prob, row, log_prob)
    v.store_one(results.entropy, row, entropy)
    v.store_one(results.predicted, row, predicted)


def by_rows(transform: Transform, kind: str, with_gradient: bool) -> Kernel:
    z, (sums_of, gradient) = transform.z, formulas(ROWS, transform, kind)
    write = row_writer(gradient)

    @inline
    def losses_of_row(x, n: int, ahead, out, row: int, samples, divisor: float, options, before, stream: int):
        label, target, scaling = v.load_one(samples.classes, row), options.target, in_precision(x, options.scaling)
        if label < 0:
            store_results(options.results, row, 0.0, 0.0, 0.0, -1)
            if with_gradient:
                write_zeros(out, 0, n, stream)
            return 0.0, before
        top = row_max(x, 0, n)
        m = z(v.full(x, top), scaling)
        of_label = v.number(x, target.of_label * v.load_one(samples.weights, row))
        d = v.first_lane(z(v.full(x, v.load_one(x, label)), scaling) - m)
        arrays = x, 1, target.base, target.factors, target.probabilities.data + row * target.probabilities.outer, 1
        found = sums_of(arrays, n, True, v.first(x, n), (m, scaling), d, of_label)
        s, log_s, entropy, log_prob, loss, _ = found
        predicted = first_largest(x, n, top, s != s)
        store_results(options.results, row, v.first_lane(m) + log_s, log_prob, entropy, predicted)
        if with_gradient:
            upstream = v.load_one_each(v.each_row(options.upstream, row), 0)
            inverse, of_p, of_d, of_target, added = coefficients_of(upstream, v.first_lane(m), found, of_label)
            numbers = v.number(x, inverse), v.number(x, of_p), v.number(x, of_d), v.number(x, of_target)
            write(out, 0, n, stream, arrays, ((label, m, *numbers, v.full(x, added)), scaling))
        return loss, before

    return losses_by_rows(losses_of_row, SampleOptions)


@inline
def label_and_largest(strip, n: int, label: Vector, top: Vector):
    """Each sample's logit of the label, and the first class with the largest logit: from the last class on."""
    of_label, place = v.full(strip.data, 0.0), v.full(strip.data, 0.0)
    for k in range(n):
        i = n - 1 - k
        value = vector_of(strip, i)
        of_label = v.select(label == i, value, of_label)
        place = v.select(value == top, v.like(place, i * 1.0), place)
    return of_label, place


@inline
def first_nan(strip, n: int, s: Vector, largest: Vector):
    """The first class with a NaN of each sample whose sum is NaN, and `largest` where no class has one."""
    if v.reduce_max(v.select(s == s, v.full(strip.data, 0.0), 1.0)) == 0.0:
        return largest
    for k in range(n):
        i = n - 1 - k
        value = vector_of(strip, i)
        largest = v.select(value == value, largest, v.like(largest, i * 1.0))
    return largest


def by_columns(transform: Transform, kind: str, with_gradient: bool) -> Kernel:
    z, (sums_of, gradient) = transform.z, formulas(COLUMNS, transform, kind)

    @inline
    def losses_of_strip(
        strip, n: int, place, label: Vector, weight: Vector, divisor: float, buffer, y, y_n: int, options
    ) -> Vector:
        (x, x_n, whole, mask), (o, j, sample, left), results = strip, place, options.results
        scaling, target, top = in_precision(x, options.scaling), options.target, column_max(strip, n)
        m, of_label, counts = z(top, scaling), weight * v.number(x, target.of_label), label >= 0
        logit, largest = label_and_largest(strip, n, label, top)
        q = target.probabilities
        arrays = x, x_n, target.base, target.factors, q.data + (o * q.outer + j), q.step
        found = sums_of(arrays, n, whole, mask, (m, scaling), z(logit, scaling) - m, of_label)
        s, log_s, entropy, log_prob, loss, _ = found
        put(results.lse, sample, v.select(counts, m + log_s, 0.0), whole, mask, 0)
        put(results.log_prob, sample, v.select(counts, log_prob, 0.0), whole, mask, 0)
        put(results.entropy, sample, v.select(counts, entropy, 0.0), whole, mask, 0)
        largest = first_nan(strip, n, s, largest)
        v.store(buffer, 0, v.select(counts, largest, -1.0))
        for lane in range(min(left, v.lanes(x))):
            v.store_one(results.predicted, sample + lane, int(v.load_one(buffer, lane)))
        if with_gradient:
            given = v.each_row(options.upstream, sample)
            upstream = v.load_each(given, 0) if whole else v.load_each_masked(given, 0, mask, 0.0)
            numbers = (label, m, *coefficients_of(upstream, m, found, of_label)), scaling
            for i in range(n):
                slope = gradient(arrays, i, whole, mask, numbers)
                put(y, i * y_n, v.select(counts, slope, 0.0), whole, mask, 0)
        return v.select(counts, loss, 0.0)

    return losses_by_columns(losses_of_strip, SampleOptions)


@functools.cache
def kernels(is_capped: bool, kind: str, with_gradient: bool) -> dict[str, Kernel]:
    """The kernels by layout. kind: of the targets, as for `target_of`."""
    given = CAPPED if is_capped else DIVIDED, kind, with_gradient
    return {"rows": by_rows(*given), "columns": by_columns(*given)}


# --- rows whose classes are split over processes: the statistics of a shard, and their gradient ----------------------
#
# Statistics of logits that are capped or divided first are those of a buffer, to which z is written a row at a time.

as_they_are = inline(lambda x, n, buffer, scaling: x)


def transformed(transform: Transform) -> Callable[..., Any]:
    """The function that writes z of a row to a buffer, and returns the buffer."""
    write = mapped(transform.z)

    @inline
    def z_of(x, n: int, buffer, scaling):
        write(buffer, 0, n, 0, (x,), (in_precision(x, scaling),))
        return buffer

    return z_of


@folded
def moment_of(total: Vector, z: Vector, m) -> Vector:
    e = exp_up_to_zero(z - m)
    return total + v.select(e == 0.0, 0.0, e * z)


def shard_statistics(z_of: Callable[..., Any]) -> Kernel:
    """The kernel for logits of which `z_of` gives z."""

    @kernel
    def of_rows(
        rows: Units, samples, n, logits: Pointer, labels: Pointer, first, weight: Pointer, is_weighted,
        scaling: Scaling, found: Pointer, moment, buffer: Private,
    ):  # fmt: skip
        for row in rows:
            x = logits + row * n
            z = z_of(x, n, buffer, scaling)
            label = v.load_one(labels, row) - first
            m, rest, count = row_rests(z, n, z + n)
            s = rest + count
            if m > MINUS_INFINITY:
                s = rest / lse.exp_wide(z, m, m) + count
            total = sum_products(0, n, (z, weight), ()) if is_weighted else sum_range(0, n, (z,), ())
            v.store_one(found, row, m)
            v.store_one(found, samples + row, s)
            v.store_one(found, 2 * samples + row, v.load_one(z, label) if 0 <= label < n else v.number(z, 0.0))
            v.store_one(found, 3 * samples + row, v.reduce_add(total))
            if moment:
                v.store_one(found, 4 * samples + row, v.reduce_add(moment_of(0, n, (z,), (m,))))

    return of_rows


STATISTICS = {"none": shard_statistics(as_they_are), "divided": shard_statistics(transformed(DIVIDED))}
STATISTICS["capped"] = shard_statistics(transformed(CAPPED))


def shard_gradient(transform: Transform) -> Kernel:
    """The kernel for this transform: with a branch for the cap in one kernel, tanh took most of the time of both."""
    z_of, slope = transform

    @inline
    def weighted(i, x: Vector, weight, label, factors, scaling) -> Vector:
        m, log_s, of_lse, of_label, of_sum, of_mean = factors
        z = z_of(x, scaling)
        p = exp((z - m) - log_s)
        level, others = v.select(p == 0.0, 0.0, z), (of_lse, of_mean, -of_sum, of_label)
        return gradient_of(p, level, weight, i == label, others) * slope(x, scaling)

    write_weighted = mapped_by_index(weighted)
    write = mapped_by_index(lambda i, x, label, factors, scaling: weighted(i, x, 1.0, label, factors, scaling))

    @kernel
    def of_rows(
        rows: Units, samples, n, logits: Pointer, labels: Pointer, first, weight: Pointer, is_weighted,
        scaling: Scaling, factors: Pointer, dlogits: Pointer, stream,
    ):  # fmt: skip
        numbers, second = in_precision(logits, scaling), factors + 2 * samples
        of_sample = factors, factors + samples, second, second + samples, second + 2 * samples, second + 3 * samples
        for row in rows:
            x, out, label = logits + row * n, dlogits + row * n, v.load_one(labels, row) - first
            given = v.load_one_each(of_sample, row)
            if given[2] == 0.0 and given[3] == 0.0 and given[4] == 0.0 and given[5] == 0.0:
                write_zeros(out, 0, n, stream)
            elif is_weighted:
                write_weighted(out, 0, n, stream, (x, weight), (label, given, numbers))
            else:
                write(out, 0, n, stream, (x,), (label, given, numbers))

    return of_rows


GRADIENT = {"divided": shard_gradient(DIVIDED), "capped": shard_gradient(CAPPED)}
