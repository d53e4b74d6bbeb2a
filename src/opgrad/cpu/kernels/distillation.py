"""Divergences of softmax distributions: a row of the student's logits and one of the teacher's, read while cached."""

from collections.abc import Callable
from typing import Any, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.fold import fold_in_chunks
from opgrad.cpu.kernels.loops.map import get_or, mapped, put
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, row_max
from opgrad.cpu.kernels.numerics.elementary import exp_up_to_zero, log


class Options(NamedTuple):
    """The teacher's share of the mixture, 1 / temperature, and whether dloss is given."""

    beta: Float
    factor: Float
    has_dloss: int


@inline
def _log_probability(x: Vector, m, factor, log_sum) -> Vector:
    return (x - m) * factor - log_sum


@inline
def _add_exponential(total, arrays, i: int, whole: bool, mask, numbers):
    m, factor = numbers
    return (total[0] + exp_up_to_zero((get_or(arrays[0], i, whole, mask, MINUS_INFINITY) - m) * factor),)


_sum_of_exponentials = fold_in_chunks(_add_exponential)


@inline
def _log_sum(x, n: int, factor):
    """The largest of x[0:n], and the logarithm of the sum of exp((x - largest) * factor)."""
    m = row_max(x, 0, n)
    total = _sum_of_exponentials((v.full(x, 0.0),), 0, n, (x,), (m, factor), 64)[0]
    return m, v.first_lane(log(v.full(x, v.reduce_add(total))))


@inline
def share(p: Vector, log_ratio: Vector) -> Vector:
    """p * log_ratio, and 0 where p is, whatever the ratio is there."""
    return v.select(p == 0.0, 0.0, p * log_ratio)


@inline
def forward(log_p: Vector, log_q: Vector, p: Vector, q: Vector, beta):
    """The terms of KL(teacher || student), and q times the derivatives by q."""
    return share(p, log_p - log_q), -p


@inline
def reverse(log_p: Vector, log_q: Vector, p: Vector, q: Vector, beta):
    """The terms of KL(student || teacher), and the same."""
    h = share(q, log_q - log_p)
    return h, h


@inline
def jensen_shannon(log_p: Vector, log_q: Vector, p: Vector, q: Vector, beta):
    """The terms of both divergences from the mixture, and the same."""
    m = p * beta + q * (1.0 - beta)
    log_m = log(m)
    h = share(q, log_q - log_m) * (1.0 - beta)
    return v.fma(share(p, log_p - log_m), beta, h), h


_write_gradient = mapped(
    lambda x, h, m, factor, log_sum, total, slope: (
        (h - exp_up_to_zero(_log_probability(x, m, factor, log_sum)) * total) * slope
    )
)


def _kernel(terms: Callable[..., Any]) -> Kernel:
    """A unit is a row."""

    @inline
    def add_terms(total, arrays, i: int, whole: bool, mask, numbers):
        x, y, h = arrays
        (m, log_sum), (teacher_m, teacher_log_sum), factor, beta = numbers
        log_q = _log_probability(get_or(x, i, whole, mask, MINUS_INFINITY), m, factor, log_sum)
        log_p = _log_probability(get_or(y, i, whole, mask, MINUS_INFINITY), teacher_m, factor, teacher_log_sum)
        loss, own = terms(log_p, log_q, exp_up_to_zero(log_p), exp_up_to_zero(log_q), beta)
        put(h, i, own, whole, mask, 0)
        return total[0] + loss, total[1] + own

    sum_terms = fold_in_chunks(add_terms)

    @kernel
    def divergence(
        units: Units, n, options: Options, logits: Pointer, teacher: Pointer, dloss: Pointer, loss: Pointer,
        dlogits: Pointer, terms: Private,
    ):  # fmt: skip
        for row in units:
            x, y, zero = logits + row * n, teacher + row * n, v.full(terms, 0.0)
            own, others = _log_sum(x, n, options.factor), _log_sum(y, n, options.factor)
            numbers = own, others, options.factor, options.beta
            losses, total = sum_terms((zero, zero), 0, n, (x, y, terms), numbers, 64)
            v.store_one(loss, row, v.reduce_add(losses))
            slope = options.factor * (v.load_one(dloss, row) if options.has_dloss else 1.0)
            after = own[0], options.factor, own[1], v.reduce_add(total), slope
            _write_gradient(dlogits + row * n, 0, n, 0, (x, terms), after)

    return divergence


FORWARD, REVERSE, JENSEN_SHANNON = map(_kernel, (forward, reverse, jensen_shannon))
