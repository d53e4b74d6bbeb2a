"""Losses whose labels are a probability for each class, and their gradient from log_prob."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.cross_entropy.rows import losses_by_rows
from opgrad.cpu.kernels.loops.fold import folded
from opgrad.cpu.kernels.loops.map import BLOCK, mapped
from opgrad.cpu.kernels.loops.rows import row_log_sum, write_log
from opgrad.cpu.kernels.numerics.elementary import exp


@inline
def _add_term(total: Vector, x: Vector, label: Vector, m, log_s) -> Vector:
    """Add what a class adds to the loss: 0 where its label is 0, even if its probability is 0 too."""
    return total + v.select(label == 0.0, 0.0, label * (log_s - (x - m)))


_add_terms = folded(_add_term)


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
