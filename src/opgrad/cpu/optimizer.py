"""The optimizers' passes over parameters p, gradients g and moments m and v; each touches every array once."""

from opgrad.cpu.native import kernel
from opgrad.cpu.simd import Float, Pointer, first, lanes, load_masked, sqrt, store_masked


@kernel
def sgd(part, per_part, size, p: Pointer, g: Pointer, rate: Float):
    end = min((part + 1) * per_part, size)
    for i in range(part * per_part, end, lanes(p)):
        mask = first(p, end - i)
        store_masked(p, i, load_masked(p, i, mask, 0.0) - load_masked(g, i, mask, 0.0) * rate, mask)


@kernel
def adamw(
    part, per_part, size, p: Pointer, g: Pointer, m: Pointer, v: Pointer,
    alpha: Float, beta: Float, rate: Float, epsilon: Float, before: Float, after: Float,
):  # fmt: skip
    """`before` and `after` are the factors of p around the step, in which its decay lies."""
    end = min((part + 1) * per_part, size)
    for i in range(part * per_part, end, lanes(p)):
        mask = first(p, end - i)
        gradient = load_masked(g, i, mask, 0.0)
        moment = load_masked(m, i, mask, 0.0) * alpha + gradient * (1.0 - alpha)
        square = load_masked(v, i, mask, 0.0) * beta + gradient * gradient * (1.0 - beta)
        store_masked(m, i, moment, mask)
        store_masked(v, i, square, mask)
        value = load_masked(p, i, mask, 0.0) * before - moment * rate / (sqrt(square) + epsilon)
        store_masked(p, i, value * after, mask)
