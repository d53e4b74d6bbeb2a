"""Softmax with a sink, and its gradient: a row of scores of a head, beside the head's own logit."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Pointer, Units
from opgrad.cpu.kernels.loops.fold import folded, sum_products
from opgrad.cpu.kernels.loops.map import mapped
from opgrad.cpu.kernels.loops.rows import MINUS_INFINITY, row_max
from opgrad.cpu.kernels.numerics.elementary import exp_up_to_zero, log

sum_exponentials = folded(lambda total, x, m: total + exp_up_to_zero(x - m))
write_shares = mapped(lambda x, m, share: exp_up_to_zero(x - m) * share)
write_gradient = mapped(lambda dy, y, total: y * (dy - total))


@inline
def _exponential(p, x):
    return v.first_lane(exp_up_to_zero(v.full(p, x)))


@kernel
def soften(units: Units, heads, length, n, x: Pointer, sink: Pointer, y: Pointer, lse: Pointer):
    """A unit is a row."""
    for row in units:
        source, beside = x + row * n, v.load_one(sink, row // length % heads)
        m = max(row_max(source, 0, n), beside)
        base = 0.0 if m == MINUS_INFINITY else m
        total = v.reduce_add(sum_exponentials(0, n, (source,), (base,)))
        total += _exponential(lse, beside - base)
        write_shares(y + row * n, 0, n, 0, (source,), (base, 0.0 if total == 0.0 else 1.0 / total))
        v.store_one(lse, row, MINUS_INFINITY if total == 0.0 else v.first_lane(log(v.full(lse, total))) + base)


@kernel
def soften_back(
    units: Units, heads, length, n, dy: Pointer, y: Pointer, lse: Pointer, sink: Pointer, dx: Pointer, parts: Pointer
):
    """A unit is a row, whose part of the sink's gradient is written to `parts`."""
    for row in units:
        both = dy + row * n, y + row * n
        total = v.reduce_add(sum_products(0, n, both, ()))
        write_gradient(dx + row * n, 0, n, 0, both, (total,))
        power = v.load_one(lse, row)
        base = 0.0 if power == MINUS_INFINITY else power
        v.store_one(parts, row, -total * _exponential(parts, min(v.load_one(sink, row // length % heads) - base, 0.0)))


@kernel
def sum_parts(units: Units, batches, heads, length, parts: Pointer, dsink: Pointer):
    """A unit is a head."""
    for head in units:
        total = 0.0
        for batch in range(batches):
            for row in range(length):
                total += v.load_one(parts, (batch * heads + head) * length + row)
        v.store_one(dsink, head, total)
