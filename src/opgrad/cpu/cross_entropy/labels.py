"""Integer labels and indices: read and checked before anything is written."""

from typing import Any, Final

from opgrad.cpu.compiler.memory import load_f64, load_word, store_f64, store_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import Pointer, load_one, number, store_one
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import STATUS_WORDS, Scratch, Step
from opgrad.problem import Problem

TOTAL: Final = 3  # scratch word: the sum of the samples' weights, a float64
LABELS_PER_PART = 1 << 13


@kernel
def read_labels(
    part, per_part, samples, count, ignore, ignores, labels: Pointer, weight: Pointer, weighted, by_sample,
    classes: Pointer, weights: Pointer, found,
):  # fmt: skip
    """classes[i] = the label, -1 if ignored; weights[i] = its weight, 0 if ignored.

    found[2 * part] = the first sample whose label is out of range, or -1; found[2 * part + 1] = the weights' sum.
    """
    wrong = -1
    total = 0.0
    for i in range(part * per_part, min((part + 1) * per_part, samples)):
        label = load_one(labels, i)
        ignored = ignores != 0 and label == ignore
        if (label < 0 or label >= count) and not ignored:
            wrong = i
            break
        w = number(weights, 0.0)
        if not ignored:
            w = number(weights, load_one(weight, i if by_sample else label)) if weighted else number(weights, 1.0)
        store_one(classes, i, -1 if ignored else label)
        store_one(weights, i, w)
        total += w
    store_word(found, 2 * part, wrong)
    store_f64(found, 2 * part + 1, total)


@kernel
def sum_labels(part, made, found, labels: Pointer, scratch):
    """Leave the first wrong label as status, or the sum of the weights."""
    total = 0.0
    for p in range(made):
        wrong = load_word(found, 2 * p)
        if wrong >= 0:
            store_word(scratch, 0, 1)
            store_word(scratch, 1, wrong)
            store_word(scratch, 2, load_one(labels, wrong))
            break
        total += load_f64(found, 2 * p + 1)
    store_f64(scratch, TOTAL, total)


@inline
def divisor_inverse(scratch: int, mean: int) -> float:
    """1 / (sum of weights) for the mean, 0 if that sum is 0; else 1."""
    if not mean:
        return 1.0
    total = load_f64(scratch, TOTAL)
    return 0.0 if total == 0.0 else 1.0 / total


def label_steps(problem: Problem, precision: str, by_sample: bool = False) -> tuple[list[Step], dict[str, Any], int]:
    """The steps that read the labels, the arguments `classes`, `weights` they make, and the scratch they take.

    `by_sample`: there is a weight for each sample, not for each class.
    """
    samples = problem.outer * problem.inner
    made = max(partition.count(samples, LABELS_PER_PART), 1)
    found = Scratch(8 * STATUS_WORDS)
    classes = Scratch(found.offset + 16 * made, "int32" if problem.n < 2**31 else "int64")
    weights = Scratch(classes.offset + 8 * (samples + 16), precision)
    ignore = problem.attributes.get("ignore_index")
    arguments = {
        "per_part": LABELS_PER_PART,
        "samples": samples,
        "count": problem.n,
        "ignore": ignore or 0,
        "ignores": ignore is not None,
        "labels": problem["labels"],
        "weight": problem["weight"],
        "weighted": problem["weight"] is not None,
        "by_sample": by_sample,
        "classes": classes,
        "weights": weights,
        "found": found,
        "made": made,
        "scratch": Scratch(),
    }
    steps = [Step(read_labels, made, arguments), Step(sum_labels, 1, arguments)]
    end = weights.offset + 8 * (samples + 64)
    return steps, {"classes": classes, "weights": weights, "scratch": Scratch()}, (end + 63) & ~63
