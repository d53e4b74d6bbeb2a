"""Integer labels and indices: checked on request, and never followed where they are out of range."""

from typing import Any

import triton
import triton.language as tl

from opgrad.cuda.execute import Launch, Scratch

CHECKED = 1024  # numbers that the check looks at in a step
STATUS = 16  # bytes at the beginning of scratch memory, for what the check leaves


@triton.jit
def first_wrong(
    numbers, status, count, low, high, ignore, IGNORES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """status = the first place whose number is outside [low, high) and not ignored, or -1; and the number there."""
    first = tl.full([], 9223372036854775807, tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        number = tl.load(numbers + place, mask=place < count, other=0).to(tl.int64)
        wrong = (place < count) & ((number < low) | (number >= high))
        if IGNORES:
            wrong = wrong & (number != ignore)
        first = tl.minimum(first, tl.min(tl.where(wrong, place, 9223372036854775807), 0))
    found = first < count
    tl.store(status, tl.where(found, first, -1))
    tl.store(status + 1, tl.load(numbers + first, mask=found, other=0).to(tl.int64))


def checks(numbers: Any, count: int, low: int, high: int, ignore: int | None = None) -> list[Launch]:
    """The launches that leave the first wrong number as status at the beginning of scratch memory."""
    arguments = {
        "numbers": numbers,
        "status": Scratch(0, "int64"),
        "count": count,
        "low": low,
        "high": high,
        "ignore": ignore or 0,
        "IGNORES": ignore is not None,
        "BLOCK": CHECKED,
    }
    return [Launch(first_wrong, (1,), arguments)]


@triton.jit
def read_labels(labels, sample, exists, n, ignore, IGNORES: tl.constexpr):
    """The samples' labels, which of them count, and which of those are labels of a class."""
    label = tl.load(labels + sample, mask=exists, other=0).to(tl.int64)
    counts = exists
    if IGNORES:
        counts = exists & (label != ignore)
    return label, counts, counts & (label >= 0) & (label < n)


@triton.jit
def is_label(column, label):
    """Which columns are the labels of their rows: -1 is none."""
    return column == label.to(column.dtype)[:, None]


@triton.jit
def weights_of(weight, label, counts, valid):
    """The samples' weights in float64, 0 for those that do not count."""
    if weight is None:
        return tl.where(counts, 1.0, 0.0).to(tl.float64)
    else:
        return tl.load(weight + label, mask=valid, other=0.0).to(tl.float64)


@triton.jit
def sum_weights(
    labels, weight, sums, samples, n, ignore, IGNORES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sums[i] = the sum of the weights of the samples in block i."""
    sample = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label, counts, valid = read_labels(labels, sample, sample < samples, n, ignore, IGNORES)
    tl.store(sums + tl.program_id(0), tl.sum(weights_of(weight, label, counts, valid), 0))


@triton.jit
def sum_blocks(numbers, sums, count, BLOCK: tl.constexpr):
    """sums[i] = the sum of block i of the numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(numbers + place, mask=place < count, other=0.0), 0))


@triton.jit
def add_up(numbers, count, BLOCK: tl.constexpr):
    """The sum of float64 numbers, in an order that depends on their count alone."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(numbers + place, mask=place < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def sum_sums(numbers, total, count, BLOCK: tl.constexpr):
    """total = the sum of the numbers."""
    tl.store(total, add_up(numbers, count, BLOCK))
