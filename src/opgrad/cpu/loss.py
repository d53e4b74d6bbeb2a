"""Losses over the last axis: with sparse labels by the kernels of opgrad.cpu.cross_entropy, with dense ones here."""

import math
from dataclasses import replace
from typing import Any

from opgrad.contract import DTYPES
from opgrad.cpu.compiler.memory import load_f64, store_f64
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import (
    Float,
    Pointer,
    Vector,
    first,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    number,
    reduce_add,
    select,
    store_one,
)
from opgrad.cpu.cross_entropy import LOSS, gradient, loss_and_result
from opgrad.cpu.loops.elements import BLOCK
from opgrad.cpu.loops.map import mapped
from opgrad.cpu.loops.rows import CHUNK, row_log_sum, write_log
from opgrad.cpu.numerics.math import exp
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.execute import STATUS_WORDS, Program, Scratch, Step
from opgrad.problem import Problem


def _samples(problem: Problem, name: str) -> tuple[int, int]:
    """How many samples there are, and how many classes."""
    shape = problem.specs[name].shape
    return math.prod(shape[:-1]), shape[-1]


# --- sparse labels -------------------------------------------------------------------------------------------------


def _by_samples(problem: Problem, like: str) -> Problem:
    """The problem as one row of classes for each sample."""
    samples, n = _samples(problem, like)
    operands = {name: operand and replace(operand, outer=n) for name, operand in problem.operands.items()}
    return replace(problem, outer=samples, n=n, inner=1, operands=operands)


def sparse_softmax_cross_entropy(problem: Problem) -> Program:
    work = _by_samples(problem, "logits")
    return loss_and_result(work, "sparse_softmax_cross_entropy", LOSS, "log_prob", by_sample=True)


def sparse_softmax_cross_entropy_grad(problem: Problem) -> Program:
    work = _by_samples(problem, "log_prob")
    return gradient(work, "sparse_softmax_cross_entropy_grad", by_sample=True)


# --- dense labels --------------------------------------------------------------------------------------------------


@inline
def _term(x: Vector, label: Vector, m: Any, log_s: Any) -> Vector:
    """What a class adds to the loss: nothing where its label is 0, even if its probability is."""
    return select(label == 0.0, 0.0, label * (log_s - (x - m)))


@inline
def _loss_of_row(x: Any, labels: Any, n: int, m: Any, log_s: Any) -> Any:
    w, total, i = lanes(x), full(x, 0.0), 0
    while i + w <= n:
        chunk, chunk_end = full(x, 0.0), min(i + CHUNK * w, n)
        while i + w <= chunk_end:
            chunk = chunk + _term(load(x, i), load(labels, i), m, log_s)
            i += w
        total = total + chunk
    if i < n:
        mask = first(x, n - i)
        total = total + _term(load_masked(x, i, mask, 0.0), load_masked(labels, i, mask, 0.0), m, log_s)
    return reduce_add(total)


@kernel
def dense_loss(
    part, per_part, samples, n, logits: Pointer, labels: Pointer, log_prob: Pointer, loss: Pointer, each, sums, stream
):
    total = 0.0
    for row in range(part * per_part, min((part + 1) * per_part, samples)):
        xs = logits + row * n
        m, log_s = row_log_sum(xs, n, xs + n)
        found = _loss_of_row(xs, labels + row * n, n, m, log_s)
        write_log(log_prob + row * n, 0, n, stream, (xs,), (m, log_s))
        total += found
        if each:
            store_one(loss, row, found)
    store_f64(sums, part, total)


@kernel
def add_up(part, made, sums, divisor: Float, loss: Pointer):
    """The reduced loss from the parts' sums."""
    total = 0.0
    for p in range(made):
        total += load_f64(sums, p)
    store_one(loss, 0, total / divisor)


def softmax_cross_entropy(problem: Problem) -> Program:
    samples, n = _samples(problem, "logits")
    reduction = problem.attributes["reduction"]
    per = partition.per_part(max(samples, 1), 3 * n * DTYPES[problem["logits"].dtype].itemsize)
    made, sums = partition.count(samples, per), Scratch(8 * STATUS_WORDS)
    arguments = {name: problem[name] for name in ("logits", "labels", "log_prob", "loss")}
    arguments |= {"per_part": per, "samples": samples, "n": n, "each": reduction == "none", "sums": sums}
    arguments |= {"made": made, "divisor": max(samples, 1) if reduction == "mean" else 1.0}
    steps = [Step(dense_loss, made, arguments | {"stream": partition.streams(problem.bytes)})] if samples else []
    if reduction != "none":
        steps.append(Step(add_up, 1, arguments))
    return Program(steps, sums.offset + 8 * made)


@inline
def _slope(log_prob: Vector, label: Vector, factor: Any) -> Vector:
    return (exp(log_prob) - label) * factor


write_slope = mapped(_slope)


@kernel
def dense_gradient(
    part, per_part, units, blocks, n, dy: Pointer, log_prob: Pointer, labels: Pointer, dlogits: Pointer,
    inverse: Float, stream,
):  # fmt: skip
    """Each row has its own dy; a unit is a block of one."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        row, begin = unit // blocks, unit % blocks * BLOCK
        factor = load_one(dy, row) * number(dlogits, inverse)
        end, start = min(begin + BLOCK, n), row * n
        write_slope(dlogits + start, begin, end, stream, (log_prob + start, labels + start), (factor,))


def softmax_cross_entropy_grad(problem: Problem) -> Program:
    samples, n = _samples(problem, "log_prob")
    if not samples * n:
        return Program(())
    reduction = problem.attributes["reduction"]
    # With one dy for all samples they are one long row.
    rows, length = (samples, n) if reduction == "none" else (1, samples * n)
    blocks = partition.count(length, BLOCK)
    units = rows * blocks
    per = partition.per_part(units, 3 * min(length, BLOCK) * DTYPES[problem["log_prob"].dtype].itemsize)
    arguments = {name: problem[name] for name in ("dy", "log_prob", "labels", "dlogits")}
    arguments |= {"per_part": per, "units": units, "blocks": blocks, "n": length}
    arguments |= {"inverse": 1.0 / samples if reduction == "mean" else 1.0, "stream": partition.streams(problem.bytes)}
    return Program((Step(dense_gradient, partition.count(units, per), arguments),))
