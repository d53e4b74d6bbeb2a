"""Losses over the last axis: sparse labels by the programs of cross_entropy, dense ones by kernels of their own."""

import math
from dataclasses import replace
from typing import NamedTuple

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64, store_f64
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.parameters import Float, Part, Pointer, Units
from opgrad.cpu.compiler.simd import Vector
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.kernels.loops.fold import fold_in_chunks
from opgrad.cpu.kernels.loops.map import get, mapped
from opgrad.cpu.kernels.loops.rows import row_log_sum, write_log
from opgrad.cpu.kernels.numerics.math import exp
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.cross_entropy import LOSS, gradient, loss_and_result
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Workspace


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
def _term(x: Vector, label: Vector, m, log_s) -> Vector:
    """The contribution of a class to the loss: 0 where its label is 0, even if its probability is 0 too."""
    return v.select(label == 0.0, 0.0, label * (log_s - (x - m)))


@inline
def _add_term(total, arrays, i: int, whole: bool, mask, numbers):
    x, labels = arrays
    m, log_s = numbers
    return (total[0] + _term(get(x, i, whole, mask), get(labels, i, whole, mask), m, log_s),)


_add_terms = fold_in_chunks(_add_term)


class Losses(NamedTuple):
    """The losses, one for each sample if `each`, otherwise one; and the address of the parts' sums, float64."""

    loss: Pointer
    each: int
    sums: int


@kernel
def dense_loss(rows: Units, part: Part, n, logits: Pointer, labels: Pointer, log_prob: Pointer, losses: Losses, stream):
    total = 0.0
    for row in rows:
        xs = logits + row * n
        m, log_s = row_log_sum(xs, n, xs + n)
        found = v.reduce_add(_add_terms((v.full(xs, 0.0),), 0, n, (xs, labels + row * n), (m, log_s))[0])
        write_log(log_prob + row * n, 0, n, stream, (xs,), (m, log_s))
        total += found
        if losses.each:
            v.store_one(losses.loss, row, found)
    store_f64(losses.sums, part, total)


@kernel
def add_losses(parts, divisor: Float, losses: Losses):
    """The reduced loss from the parts' sums."""
    total = 0.0
    for part in range(parts):
        total += load_f64(losses.sums, part)
    v.store_one(losses.loss, 0, total / divisor)


def softmax_cross_entropy(problem: Problem) -> Program:
    samples, n = _samples(problem, "logits")
    reduction, workspace = problem.attributes["reduction"], Workspace(precision(problem))
    per_part = partition.per_part(max(samples, 1), 3 * n * DTYPES[problem["logits"].dtype].itemsize)
    parts = partition.count(samples, per_part)
    arguments = {name: problem[name] for name in ("logits", "labels", "log_prob")}
    arguments |= {"n": n, "parts": parts, "divisor": max(samples, 1) if reduction == "mean" else 1.0}
    arguments["losses"] = Losses(problem["loss"], reduction == "none", workspace.shared(parts, "float64"))
    arguments["stream"] = partition.streams(problem.bytes)
    steps = [Step(dense_loss, samples, arguments, per_part)] if samples else []
    if reduction != "none":
        steps.append(Step(add_losses, 1, arguments))
    return Program(steps, workspace)


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


def softmax_cross_entropy_grad(problem: Problem) -> Program:
    samples, n = _samples(problem, "log_prob")
    if not samples * n:
        return Program(())
    reduction = problem.attributes["reduction"]
    # If there is one dy for all samples, all of them are treated as one long row.
    rows, length = (samples, n) if reduction == "none" else (1, samples * n)
    blocks = partition.count(length, BLOCK)
    unit_bytes = 3 * min(length, BLOCK) * DTYPES[problem["log_prob"].dtype].itemsize
    arguments = {name: problem[name] for name in ("dy", "log_prob", "labels", "dlogits")}
    arguments |= {"blocks": blocks, "n": length, "inverse": 1.0 / samples if reduction == "mean" else 1.0}
    arguments["stream"] = partition.streams(problem.bytes)
    return Program([shared_out(dense_gradient, rows * blocks, unit_bytes, arguments)])
