"""Losses over the last axis: sparse labels by the programs of cross_entropy, dense ones by kernels of their own."""

import math
from dataclasses import replace

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels.cross_entropy.loss import LossReduction, Samples, add_losses, dense_gradient, dense_loss
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.cross_entropy import LOSS, gradient, loss_program
from opgrad.cpu.runtime.program import Program, Scratch, ceil_div, units_per_part


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
    steps, (samples, n), reduction = ProgramSteps(problem), _samples(problem, "logits"), problem.attributes["reduction"]
    unit_bytes = 3 * n * problem.specs["logits"].dtype.itemsize
    parts = ceil_div(samples, units_per_part(max(samples, 1), unit_bytes))
    divisor, sums = samples if reduction == "mean" else 1.0, steps.workspace.shared(parts, "float64")
    into = LossReduction(reduction == "none", False, divisor, Scratch(), sums)
    given = {"logits": Rows(problem["logits"], n), "y": Rows(problem["log_prob"], n), "options": problem["labels"]}
    given["samples"] = Samples(None, None, problem["loss"])
    steps.add(dense_loss, samples, unit_bytes, n=n, reduction=into, **given)
    steps.add_parts(add_losses, parts=parts, reduction=into)
    return steps.program()


def softmax_cross_entropy_grad(problem: Problem) -> Program:
    steps, reduction = ProgramSteps(problem), problem.attributes["reduction"]
    samples, n = _samples(problem, "log_prob")
    # If there is one dy for all samples, all of them are treated as one long row.
    rows, length = (samples, n) if reduction == "none" else (1, samples * n)
    blocks = ceil_div(length, BLOCK)
    unit_bytes = 3 * min(length, BLOCK) * problem.specs["log_prob"].dtype.itemsize
    inverse = 1.0 / samples if reduction == "mean" and samples else 1.0
    steps.add(dense_gradient, rows * blocks, unit_bytes, blocks=blocks, n=length, inverse=inverse)
    return steps.program()
