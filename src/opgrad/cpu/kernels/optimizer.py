"""Kernels of the optimizers: each passes once over parameters p, gradients g and moments m and v.

Only the last vector of an array is loaded with a mask. With a mask at every load, AdamW on arrays that exceed the cache
reached 64 % of the speed of a copy; without, it reached 116 %. The operators on lists of arrays write their results to
other arrays; opgrad.training runs the same kernels in place, over all parameters at once.
"""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, store_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Part, Pointer, Units
from opgrad.cpu.kernels.loops.fold import fold
from opgrad.cpu.kernels.loops.map import get, put, write_times
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


@inline
def _sgd(total, arrays, i: int, whole: bool, mask, numbers):
    (p, g, new_p, new_g), (rate, clip, clips) = arrays, numbers
    gradient = get(g, i, whole, mask) * clip
    put(new_p, i, get(p, i, whole, mask) - gradient * rate, whole, mask, 0)
    if clips:
        put(new_g, i, gradient, whole, mask, 0)
    return total


@inline
def _adamw(total, arrays, i: int, whole: bool, mask, numbers):
    p, g, m, s, new_p, new_g, new_m, new_s = arrays
    rates, rate, epsilon, before, after, clip, clips = numbers
    gradient = get(g, i, whole, mask) * clip
    value, moment, square = get(p, i, whole, mask), get(m, i, whole, mask), get(s, i, whole, mask)
    moment = moment * rates.alpha + gradient * (1.0 - rates.alpha)
    square = square * rates.beta + gradient * gradient * (1.0 - rates.beta)
    value = (value * before - moment * rate / (v.sqrt(square) + epsilon)) * after
    put(new_m, i, moment, whole, mask, 0)
    put(new_s, i, square, whole, mask, 0)
    put(new_p, i, value, whole, mask, 0)
    if clips:
        put(new_g, i, gradient, whole, mask, 0)
    return total


@inline
def _add_square(total, arrays, i: int, whole: bool, mask, numbers):
    gradient = get(arrays[0], i, whole, mask)
    return (v.fma(gradient, gradient, total[0]),)


@inline
def _adagrad(total, arrays, i: int, whole: bool, mask, numbers):
    (p, g, s), (rate, epsilon) = arrays, numbers
    gradient = get(g, i, whole, mask)
    square = v.fma(gradient, gradient, get(s, i, whole, mask))
    put(s, i, square, whole, mask, 0)
    put(p, i, get(p, i, whole, mask) - gradient * rate / (v.sqrt(square) + epsilon), whole, mask, 0)
    return total


_sgd_range, _adamw_range, _squares_of_range = fold(_sgd), fold(_adamw), fold(_add_square)
_adagrad_range = fold(_adagrad)


@kernel
def sgd(elements: Units, p: Pointer, g: Pointer, new_p: Pointer, new_g: Pointer, factors):
    numbers = _factor(p, factors, RATE), _factor(p, factors, CLIP), load_f64(factors, CLIP) != 1.0
    _sgd_range((), elements.start, elements.stop, (p, g, new_p, new_g), numbers)


@kernel
def adamw(elements: Units, old: State, new: State, rates: Rates, factors):
    p = old.p
    rate, epsilon = _factor(p, factors, RATE), _factor(p, factors, EPSILON)
    before, after = _factor(p, factors, BEFORE), _factor(p, factors, AFTER)
    clip, clips = _factor(p, factors, CLIP), load_f64(factors, CLIP) != 1.0
    arrays = p, old.g, old.m, old.v, new.p, new.g, new.m, new.v
    _adamw_range((), elements.start, elements.stop, arrays, (rates, rate, epsilon, before, after, clip, clips))


@kernel
def squares(elements: Units, part: Part, g: Pointer, sums: Pointer):
    """sums[part] = the sum of g**2 over a part. It is computed in float64, since `sums` has that dtype."""
    total = _squares_of_range((v.full(g, 0.0),), elements.start, elements.stop, (g,), ())
    v.store_one(sums, part, v.reduce_add(total[0]))


# --- some rows of a table: row `unit` of g is the gradient of row rows[unit] ------------------------------------------


@kernel
def sgd_rows(units: Units, width, rows: Pointer, p: Pointer, g: Pointer, factors):
    numbers = _factor(p, factors, RATE), v.number(p, 1.0), False
    for unit in units:
        of = p + v.load_one(rows, unit) * width
        _sgd_range((), 0, width, (of, g + unit * width, of, of), numbers)


@kernel
def adagrad_rows(units: Units, width, rows: Pointer, p: Pointer, g: Pointer, s: Pointer, factors):
    numbers = _factor(p, factors, RATE), _factor(p, factors, EPSILON)
    for unit in units:
        start = v.load_one(rows, unit) * width
        _adagrad_range((), 0, width, (p + start, g + unit * width, s + start), numbers)


@kernel
def adamw_rows(units: Units, width, rows: Pointer, state: State, rates: Rates, factors):
    p = state.p
    rate, epsilon = _factor(p, factors, RATE), _factor(p, factors, EPSILON)
    before, after = _factor(p, factors, BEFORE), _factor(p, factors, AFTER)
    numbers = rates, rate, epsilon, before, after, v.number(p, 1.0), False
    for unit in units:
        start, g = v.load_one(rows, unit) * width, state.g + unit * width
        of = p + start, state.m + start, state.v + start
        _adamw_range((), 0, width, (of[0], g, of[1], of[2], of[0], g, of[1], of[2]), numbers)


# --- the operators on lists of arrays --------------------------------------------------------------------------------


@inline
def power(p, log_of_base: float, exponent: int) -> float:
    """base**exponent, by exp. With repeated squaring, the relative error would grow with the exponent."""
    return v.first_lane(exp(v.full(p, exponent * log_of_base)))


class LogRates(NamedTuple):
    """The logarithms of the moments' decay rates."""

    alpha: Float
    beta: Float


@kernel
def sgd_factors(lr: Pointer, factors: Pointer):
    v.store_one(factors, RATE, v.load_one(lr, 0))
    v.store_one(factors, CLIP, 1.0)


@kernel
def adamw_factors(
    lr: Pointer, step: Pointer, factors: Pointer, status, log_rates: LogRates, epsilon: Float, weight_decay: Float,
    mode, corrects,
):  # fmt: skip
    """Write the numbers that a step reads, computed in float64. A `step` below 1 is reported as the status."""
    rate, count = v.load_one(lr, 0), v.load_one(step, 0)
    if count < 1:
        store_word(status, 0, 1)
        store_word(status, 2, count)
        count = 1
    root, first_correction = v.number(factors, 1.0), v.number(factors, 1.0)
    if corrects:
        root = v.first_lane(v.sqrt(v.full(factors, 1.0 - power(factors, log_rates.beta, count))))
        first_correction = 1.0 - power(factors, log_rates.alpha, count)
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
