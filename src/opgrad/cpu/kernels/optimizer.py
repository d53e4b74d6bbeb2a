"""Kernels of the optimizers: each passes once over parameters p, gradients g and moments m and v.

Only the last vector of an array is loaded with a mask. With a mask at every load, AdamW on arrays that exceed the cache
reached 64 % of the speed of a copy; without, it reached 116 %. The operators on lists of arrays write their results to
other arrays; opgrad.training runs the same kernels in place, over all parameters at once.
"""

from typing import Any, Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_f64, store_word
from opgrad.cpu.kernels.loops.map import mapped, mapped_to_each, write_times
from opgrad.cpu.kernels.numerics.elementary import exp

# The float64 numbers in memory that a step reads: the learning rate, which includes AdamW's bias correction; epsilon;
# the factors by which p is multiplied before and after the step, one of which is the weight decay; the factor by which
# gradients are clipped. The clipped gradients are written if this factor is not 1.
RATE, EPSILON, BEFORE, AFTER, CLIP = range(5)
FACTORS: Final = 5


class State(NamedTuple):
    """Parameters, gradients and moments, before a step or after it."""

    p: Pointer
    g: Pointer
    m: Pointer
    v: Pointer


class Rates(NamedTuple):
    """The decay rates of the first and the second moment."""

    alpha: Float
    beta: Float


@inline
def _factor(p, factors: int, which: int):
    return v.number(p, load_f64(factors, which))


@mapped_to_each
def write_clipping_sgd(p: Vector, g: Vector, rate, clip) -> tuple[Vector, Vector]:
    """The new parameters, and the clipped gradients."""
    g = g * clip
    return p - g * rate, g


@inline
def _adamw(
    p: Vector, g: Vector, m: Vector, s: Vector, alpha: float, beta: float, rate, epsilon, before, after, clip
) -> tuple[Vector, ...]:
    """The new parameters and moments."""
    g = g * clip
    m, s = m * alpha + g * (1.0 - alpha), s * beta + g * g * (1.0 - beta)
    return (p * before - m * rate / (v.sqrt(s) + epsilon)) * after, m, s


@mapped_to_each
def write_clipping_adamw(p: Vector, g: Vector, m: Vector, s: Vector, *numbers: Any) -> tuple[Vector, ...]:
    """The new parameters and moments, and the clipped gradients; the last number is the factor of these."""
    return (*_adamw(p, g, m, s, *numbers), g * numbers[-1])


@mapped_to_each
def write_adagrad(p: Vector, g: Vector, s: Vector, rate, epsilon) -> tuple[Vector, Vector]:
    s = v.fma(g, g, s)
    return p - g * rate / (v.sqrt(s) + epsilon), s


write_sgd = mapped(lambda p, g, rate, clip: p - g * clip * rate)
write_adamw = mapped_to_each(_adamw)


@kernel
def sgd(elements: Units, p: Pointer, g: Pointer, new_p: Pointer, new_g: Pointer, factors):
    numbers = _factor(p, factors, RATE), _factor(p, factors, CLIP)
    if load_f64(factors, CLIP) != 1.0:
        write_clipping_sgd((new_p, new_g), elements.start, elements.stop, (p, g), numbers)
    else:
        write_sgd(new_p, elements.start, elements.stop, 0, (p, g), numbers)


@inline
def _adamw_numbers(p, rates: Rates, factors: int, clip):
    rate, epsilon = _factor(p, factors, RATE), _factor(p, factors, EPSILON)
    return rates.alpha, rates.beta, rate, epsilon, _factor(p, factors, BEFORE), _factor(p, factors, AFTER), clip


@kernel
def adamw(elements: Units, old: State, new: State, rates: Rates, factors):
    numbers, arrays = _adamw_numbers(old.p, rates, factors, _factor(old.p, factors, CLIP)), (old.p, old.g, old.m, old.v)
    if load_f64(factors, CLIP) != 1.0:
        write_clipping_adamw((new.p, new.m, new.v, new.g), elements.start, elements.stop, arrays, numbers)
    else:
        write_adamw((new.p, new.m, new.v), elements.start, elements.stop, arrays, numbers)


# --- some rows of a table: row `unit` of g is the gradient of row rows[unit] ------------------------------------------


@kernel
def sgd_rows(units: Units, width, rows: Pointer, p: Pointer, g: Pointer, factors):
    numbers = _factor(p, factors, RATE), v.number(p, 1.0)
    for unit in units:
        of = p + v.load_one(rows, unit) * width
        write_sgd(of, 0, width, 0, (of, g + unit * width), numbers)


@kernel
def adagrad_rows(units: Units, width, rows: Pointer, p: Pointer, g: Pointer, s: Pointer, factors):
    numbers = _factor(p, factors, RATE), _factor(p, factors, EPSILON)
    for unit in units:
        start = v.load_one(rows, unit) * width
        write_adagrad((p + start, s + start), 0, width, (p + start, g + unit * width, s + start), numbers)


@kernel
def adamw_rows(units: Units, width, rows: Pointer, state: State, rates: Rates, factors):
    numbers = _adamw_numbers(state.p, rates, factors, v.number(state.p, 1.0))
    for unit in units:
        start = v.load_one(rows, unit) * width
        p, m, s = state.p + start, state.m + start, state.v + start
        write_adamw((p, m, s), 0, width, (p, state.g + unit * width, m, s), numbers)


# --- the operators on lists of arrays --------------------------------------------------------------------------------


@inline
def power(p, log_of_base: float, exponent: int) -> float:
    """base**exponent, by exp. With repeated squaring, the relative error would grow with the exponent."""
    return v.first_lane(exp(v.full(p, exponent * log_of_base)))


@kernel
def sgd_factors(lr: Pointer, factors: Pointer):
    v.store_one(factors, RATE, v.load_one(lr, 0))
    v.store_one(factors, CLIP, 1.0)


@kernel
def adamw_factors(
    lr: Pointer, step: Pointer, factors: Pointer, status, log_alpha: Float, log_beta: Float,
    epsilon: Float, weight_decay: Float, mode, corrects,
):  # fmt: skip
    """Write the numbers that a step reads, computed in float64. A `step` below 1 is reported as the status.

    log_alpha, log_beta: the logarithms of the moments' decay rates.
    """
    rate, count = v.load_one(lr, 0), v.load_one(step, 0)
    if count < 1:
        store_word(status, 0, 1)
        store_word(status, 2, count)
        count = 1
    root, first_correction = v.number(factors, 1.0), v.number(factors, 1.0)
    if corrects:
        root = v.first_lane(v.sqrt(v.full(factors, 1.0 - power(factors, log_beta, count))))
        first_correction = 1.0 - power(factors, log_alpha, count)
    decay = 1.0 - rate * weight_decay
    v.store_one(factors, RATE, rate * root / first_correction)
    v.store_one(factors, EPSILON, epsilon if mode else epsilon * root)
    v.store_one(factors, BEFORE, 1.0 if mode else decay)
    v.store_one(factors, AFTER, decay if mode else 1.0)
    v.store_one(factors, CLIP, 1.0)


@kernel
def clip(elements: Units, factor, g: Pointer, new_g: Pointer):
    write_times(new_g, elements.start, elements.stop, 0, (g,), (_factor(g, factor, 0),))


@kernel
def clip_factor(count, found: Pointer, factor: Pointer, max_norm: Float):
    """factor = min(1, max_norm / (norm + 1e-6)), for the norm of which `found` has the squares; NaN for a NaN."""
    total = v.number(found, 0.0)
    for i in range(count):
        total += v.load_one(found, i)
    ratio = max_norm / (v.first_lane(v.sqrt(v.full(found, total))) + 1e-6)
    v.store_one(factor, 0, 1.0 if ratio > 1.0 else ratio)
