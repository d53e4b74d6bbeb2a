"""Reads and checks integer labels, before anything is written to the results."""

from typing import Final, NamedTuple

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.decorators import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Part, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.compiler.words import load_f64, load_word, store_f64, store_word

LARGEST: Final = 3e38  # about the largest float32
TOTAL: Final = 3  # status word: the sum of the samples' weights, a float64


class Samples(NamedTuple):
    """For each sample its class and weight, which are -1 and 0 if it is ignored, and its loss, or in gradients dy.

    A reduced loss, or its dy, is a single number.
    """

    classes: Pointer
    weights: Pointer
    loss: Pointer


class LossReduction(NamedTuple):
    """How losses are reduced, unless `each` is kept: their sum is divided by `divisor`, or by the sum of the weights.

    sums: the sum of each part, float64. status: the status words, in which the sum of the weights stands.
    """

    each: int
    by_weights: int
    divisor: Float
    status: int
    sums: int


@kernel
def read_labels(
    samples: Units, part: Part, count, labels: Pointer, ignores, ignored, weight: Pointer, is_weighted, by_sample,
    classes: Pointer, weights: Pointer, found,
):  # fmt: skip
    """ignored: the label whose samples are ignored, if `ignores`. weight: of classes, or of samples if `by_sample`.

    found[2 * part] = the first sample whose label is out of range, or -1; found[2 * part + 1] = the weights' sum.
    """
    wrong = -1
    total = 0.0
    for i in samples:
        label = v.load_one(labels, i)
        is_ignored = ignores != 0 and label == ignored
        if (label < 0 or label >= count) and not is_ignored:
            wrong = i
            break
        w = v.number(weights, 0.0)
        if not is_ignored:
            w = v.number(weights, 1.0)
            if is_weighted:
                w = v.number(weights, v.load_one(weight, i if by_sample else label))
        v.store_one(classes, i, -1 if is_ignored else label)
        v.store_one(weights, i, w)
        total += w
    store_word(found, 2 * part, wrong)
    store_f64(found, 2 * part + 1, total)


@kernel
def sum_labels(parts, found, labels: Pointer, status):
    """Write the first wrong label to the status words; if there is none, the sum of the weights."""
    total = 0.0
    for part in range(parts):
        wrong = load_word(found, 2 * part)
        if wrong >= 0:
            store_word(status, 0, 1)
            store_word(status, 1, wrong)
            store_word(status, 2, v.load_one(labels, wrong))
            break
        total += load_f64(found, 2 * part + 1)
    store_f64(status, TOTAL, total)


@inline
def divisor_of(reduction) -> float:
    return load_f64(reduction.status, TOTAL) if reduction.by_weights else reduction.divisor


@inline
def least_counting(divisor: float, n: int) -> int:
    """The smallest class whose samples count: ignored samples have class -1, and with a divisor of 0 none counts."""
    return n if divisor == 0.0 else 0


@inline
def inverse_of(divisor: float) -> float:
    """1 / divisor, and 0 for 0; an infinite divisor gives 0, too, with which infinite weights make NaN."""
    return 0.0 if divisor == 0.0 else 1.0 / divisor


UP: Final = 2.0**64


@inline
def shares(weights: Vector, inverse: float) -> Vector:
    """weights * inverse, where the inverse of a sum of denormal weights is more than float32 holds."""
    up = UP if inverse > LARGEST else 1.0
    return weights * up * (inverse / up)


@kernel
def write_losses(parts, reduction: LossReduction, loss: Pointer):
    """The loss of each sample, of parts that have one each."""
    for part in range(parts):
        v.store_one(loss, part, load_f64(reduction.sums, part))


@kernel
def add_losses(parts, reduction: LossReduction, loss: Pointer):
    """The reduced loss from the parts' sums."""
    if not reduction.each:
        total, divisor = 0.0, divisor_of(reduction)
        for part in range(parts):
            total += load_f64(reduction.sums, part)
        v.store_one(loss, 0, total / divisor if divisor != 0.0 else 0.0)
