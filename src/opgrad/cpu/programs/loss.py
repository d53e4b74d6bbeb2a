"""Losses over the last axis: sparse labels by the programs of cross_entropy, dense ones by kernels of their own."""

import math
from dataclasses import replace

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.cross_entropy.dense import dense_gradient, dense_loss
from opgrad.cpu.kernels.cross_entropy.labels import LossReduction, Samples, add_losses
from opgrad.cpu.kernels.loops.elements import BLOCK
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.cross_entropy import LOSS, gradient, loss_program
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Scratch, Workspace


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
    return loss_program(work, "sparse_softmax_cross_entropy", LOSS, by_sample=True)


def sparse_softmax_cross_entropy_grad(problem: Problem) -> Program:
    work = _by_samples(problem, "log_prob")
    return gradient(work, "sparse_softmax_cross_entropy_grad", by_sample=True)


# --- dense labels --------------------------------------------------------------------------------------------------


def softmax_cross_entropy(problem: Problem) -> Program:
    samples, n = _samples(problem, "logits")
    reduction, workspace = problem.attributes["reduction"], Workspace(precision(problem))
    unit_bytes = 3 * n * DTYPES[problem["logits"].dtype].itemsize
    parts = partition.count(samples, partition.per_part(max(samples, 1), unit_bytes))
    divisor, sums = samples if reduction == "mean" else 1.0, workspace.shared(parts, "float64")
    arguments = {"n": n, "logits": Rows(problem["logits"], n), "y": Rows(problem["log_prob"], n), "parts": parts}
    arguments |= {"samples": Samples(None, None, problem["loss"]), "options": problem["labels"]}
    arguments["reduction"] = LossReduction(reduction == "none", False, divisor, Scratch(), sums)
    arguments["loss"] = problem["loss"]
    arguments["stream"] = partition.streams(problem.bytes)
    steps = [shared_out(dense_loss, samples, unit_bytes, arguments)] if samples else []
    return Program([*steps, Step(add_losses, 1, arguments)], workspace)


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
