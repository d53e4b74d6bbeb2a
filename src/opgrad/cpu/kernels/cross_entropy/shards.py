"""Rows whose classes are split over processes: the statistics of a shard's rows, and their gradient.

Statistics of logits that are capped or divided first are those of a buffer, to which z is written a row at a time.
"""

from collections.abc import Callable
from typing import Any

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import Kernel, inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Private, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.cross_entropy.options import CAPPED, DIVIDED, Scaling, Transform, gradient_of, in_precision
from opgrad.cpu.kernels.loops.fold import folded, sum_products, sum_range
from opgrad.cpu.kernels.loops.map import mapped, mapped_by_index, write_zeros
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, row_rests
from opgrad.cpu.kernels.numerics import logsumexp as lse
from opgrad.cpu.kernels.numerics.elementary import exp, exp_up_to_zero

# --- statistics ------------------------------------------------------------------------------------------------------

as_they_are = inline(lambda x, n, buffer, scaling: x)


def transformed(transform: Transform) -> Callable[..., Any]:
    """The function that writes z of a row to a buffer, and returns the buffer."""
    write = mapped(transform.z)

    @inline
    def z_of(x, n: int, buffer, scaling):
        write(buffer, 0, n, 0, (x,), (in_precision(x, scaling),))
        return buffer

    return z_of


@inline
def _add_moment(total: Vector, z: Vector, m) -> Vector:
    e = exp_up_to_zero(z - m)
    return total + v.select(e == 0.0, 0.0, e * z)


moment_of = folded(_add_moment)


def statistics(z_of: Callable[..., Any]) -> Kernel:
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


STATISTICS = {"none": statistics(as_they_are), "divided": statistics(transformed(DIVIDED))}
STATISTICS["capped"] = statistics(transformed(CAPPED))

# --- gradient --------------------------------------------------------------------------------------------------------


def gradient(transform: Transform) -> Kernel:
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


GRADIENT = {"divided": gradient(DIVIDED), "capped": gradient(CAPPED)}
