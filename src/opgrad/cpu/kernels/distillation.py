"""Divergences of softmax distributions: a row of the student's logits and one of the teacher's, read while cached."""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, constant, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import fold_in_chunks, folded
from opgrad.cpu.kernels.loops.map import get_or, mapped, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, first_place, row_max
from opgrad.cpu.kernels.numerics.elementary import LOG2_E, exp_up_to_zero, expm1_reduced, log, remainder
from opgrad.cpu.kernels.numerics.special import between


@inline
def _log_probability(x: Vector, m, factor, log_sum) -> Vector:
    return (x - m) * factor - log_sum


_sum_of_exponentials = folded(lambda total, x, m, factor: total + exp_up_to_zero((x - m) * factor))


@inline
def _log_sum(x, n: int, factor):
    """The largest of x[0:n], and the logarithm of the sum of exp((x - largest) * factor)."""
    m = row_max(x, 0, n)
    return m, v.first_lane(log(v.full(x, v.reduce_add(_sum_of_exponentials(0, n, (x,), (m, factor))))))


@inline
def share(p: Vector, log_ratio: Vector) -> Vector:
    """p * log_ratio, and 0 where p is, whatever the ratio is there."""
    return v.select(p == 0.0, 0.0, p * log_ratio)


# Where the logarithm of a ratio is cut: beyond it, or below its opposite, the rarer class counts nothing.
FAR = constant(80.0, 700.0)


@inline
def _log1p_of_expm1(d: Vector, factor) -> Vector:
    """log(1 + factor * (e**d - 1)), as exact as d where that is small."""
    n = v.round_even(d * LOG2_E)
    power = v.scale_by_power(v.like(d, 1.0), n)
    x = v.fma(power, expm1_reduced(remainder(d, n)), power - 1.0) * factor
    total = x + 1.0
    return log(total) + (x - (total - 1.0)) / total  # what the sum's rounding took is added


@inline
def forward(d: Vector, p: Vector, q: Vector, beta):
    """The terms of KL(teacher || student), and q times the derivatives by q."""
    return share(p, d), -p


@inline
def _beside(x, y, n: int, m, teacher_m):
    """The teacher's logit of the student's most probable class, or its largest logit where that class is masked.

    Derivatives by q of the reverse divergence are log(q / p). Beside those of this class they are as small as the
    differences between probable classes: of a student that is nearly sure of a class for which the teacher gives
    e**-20, roundings of 20 would be as large as the gradient.
    """
    found = v.load_one(y, first_place(x, n, m)) if n else teacher_m
    return found if found > MINUS_INFINITY else teacher_m


@inline
def reverse(d: Vector, p: Vector, q: Vector, beta):
    """The terms of KL(student || teacher), and the derivatives by q."""
    return share(q, -d), -d


@inline
def jensen_shannon(d: Vector, p: Vector, q: Vector, beta):
    """The terms of both divergences from the mixture m, and the derivatives by q.

    log(q / m) = -log(1 + beta * (e**d - 1)): a difference of log q and log m would keep their rounding errors, which
    are large beside the logarithm of a ratio near 1.
    """
    near = between(d, -FAR(d), FAR(d))
    log_ratio = -_log1p_of_expm1(near, beta)
    slope = log_ratio * (1.0 - beta)
    return v.fma(share(p, log_ratio + near), beta, share(q, slope)), slope


# The first has q times the derivatives, the second the derivatives, of which a common part cancels before the product.
_write_products = mapped(
    lambda x, h, m, factor, log_sum, total, slope: (
        (h - exp_up_to_zero(_log_probability(x, m, factor, log_sum)) * total) * slope
    )
)


@mapped
def _write_weighted(x: Vector, h: Vector, m, factor, log_sum, mean, slope) -> Vector:
    q = exp_up_to_zero(_log_probability(x, m, factor, log_sum))
    return q * (v.select(q == 0.0, 0.0, h) - mean) * slope


@folded
def _sum_deviations(total: Vector, x: Vector, h: Vector, m, factor, log_sum, mean) -> Vector:
    q = exp_up_to_zero(_log_probability(x, m, factor, log_sum))
    return total + q * (v.select(q == 0.0, 0.0, h) - mean)


def _kernel(terms: Callable[..., Any], weighted: bool, unbounded: bool = False) -> Kernel:
    """A unit is a row. weighted: whether `terms` gives the derivatives by q, without the factor q.

    unbounded: they are written beside that of the student's most probable class. Their mean may still be large beside
    their deviations from it, and is computed again from these.
    """
    write_gradient = _write_weighted if weighted else _write_products

    @inline
    def add_terms(total, arrays, i: int, whole: bool, mask, numbers):
        x, y, h = arrays
        (m, log_sum), (teacher_m, teacher_log_sum), factor, beta, beside = numbers
        logit = get_or(x, i, whole, mask, MINUS_INFINITY) - m
        other = get_or(y, i, whole, mask, MINUS_INFINITY) - teacher_m
        q, p = exp_up_to_zero(logit * factor - log_sum), exp_up_to_zero(other * factor - teacher_log_sum)
        d = (other - logit) * factor - (teacher_log_sum - log_sum)  # log(p / q)
        loss, own = terms(d, p, q, beta)
        if unbounded:
            own = (logit - (get_or(y, i, whole, mask, MINUS_INFINITY) - beside)) * factor
        put(h, i, own, whole, mask, 0)
        return total[0] + loss, total[1] + (share(q, own) if weighted else own), total[2] + q

    sum_terms = fold_in_chunks(add_terms)

    @kernel
    def divergence(
        units: Units, n, beta: Float, factor: Float, has_dloss, logits: Pointer, teacher: Pointer, dloss: Pointer,
        loss: Pointer, dlogits: Pointer, terms: Private,
    ):  # fmt: skip
        for row in units:
            x, y, zero = logits + row * n, teacher + row * n, v.full(terms, 0.0)
            own, others = _log_sum(x, n, factor), _log_sum(y, n, factor)
            beside = _beside(x, y, n, own[0], others[0]) if unbounded else others[0]
            numbers = own, others, factor, beta, beside
            losses, total, weights = sum_terms((zero, zero, zero), 0, n, (x, y, terms), numbers, 64)
            v.store_one(loss, row, v.reduce_add(losses))
            slope = factor * (v.load_one(dloss, row) if has_dloss else 1.0)
            # The probabilities sum to 1 but for rounding, which a mean by their own sum leaves out.
            by = v.full(terms, v.reduce_add(weights) if weighted else 1.0)
            mean = v.first_lane(v.full(terms, v.reduce_add(total)) / by)
            if unbounded:
                now = own[0], factor, own[1], mean
                deviation = v.reduce_add(_sum_deviations(0, n, (x, terms), now))
                if deviation == deviation:  # not where the mean is infinite
                    mean += v.first_lane(v.full(terms, deviation) / by)
            after = own[0], factor, own[1], mean, slope
            write_gradient(dlogits + row * n, 0, n, 0, (x, terms), after)

    return divergence


FORWARD = _kernel(forward, weighted=False)
REVERSE = _kernel(reverse, weighted=True, unbounded=True)
JENSEN_SHANNON = _kernel(jensen_shannon, weighted=True)
