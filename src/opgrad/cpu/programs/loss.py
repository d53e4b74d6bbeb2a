"""The programs of losses over the last axis: sparse labels by those of cross_entropy, others by their own kernels."""

import math
from dataclasses import replace
from typing import Any, Final

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import quantized as kernels
from opgrad.cpu.kernels.cross_entropy import loss as loss_kernels
from opgrad.cpu.kernels.distillation import FORWARD, JENSEN_SHANNON, REVERSE
from opgrad.cpu.kernels.gemm import BLOCK_ROWS, Matrix, ProductSizes
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProductSteps, ProgramSteps
from opgrad.cpu.programs.cross_entropy import LOSS, add_labels, gradient, loss_program, reduction_of
from opgrad.cpu.programs.quantized import add_product, kernel_of, weights_of
from opgrad.cpu.runtime.plan import Program, Scratch, ceil_div, round_up, units_per_part


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
    return loss_program(work, LOSS, by_sample=True)


def sparse_softmax_cross_entropy_grad(problem: Problem) -> Program:
    work = _by_samples(problem, "log_prob")
    return gradient(work, by_sample=True)


# --- dense labels --------------------------------------------------------------------------------------------------


def softmax_cross_entropy(problem: Problem) -> Program:
    steps, (samples, n), reduction = ProgramSteps(problem), _samples(problem, "logits"), problem.attributes["reduction"]
    unit_bytes = 3 * n * problem.specs["logits"].dtype.itemsize
    parts = ceil_div(samples, units_per_part(max(samples, 1), unit_bytes))
    divisor, sums = samples if reduction == "mean" else 1.0, steps.workspace.shared(parts, "float64")
    into = loss_kernels.LossReduction(reduction == "none", False, divisor, Scratch(), sums)
    given = {"logits": Rows(problem["logits"], n), "y": Rows(problem["log_prob"], n), "options": problem["labels"]}
    given["samples"] = loss_kernels.Samples(None, None, problem["loss"])
    steps.add(loss_kernels.dense_loss, samples, unit_bytes, n=n, reduction=into, **given)
    steps.add_parts(loss_kernels.add_losses, parts=parts, reduction=into)
    return steps


def softmax_cross_entropy_grad(problem: Problem) -> Program:
    steps, reduction = ProgramSteps(problem), problem.attributes["reduction"]
    samples, n = _samples(problem, "log_prob")
    # If there is one dy for all samples, all of them are treated as one long row.
    rows, length = (samples, n) if reduction == "none" else (1, samples * n)
    blocks = ceil_div(length, BLOCK)
    unit_bytes = 3 * min(length, BLOCK) * problem.specs["log_prob"].dtype.itemsize
    inverse = 1.0 / samples if reduction == "mean" and samples else 1.0
    steps.add(loss_kernels.dense_gradient, rows * blocks, unit_bytes, blocks=blocks, n=length, inverse=inverse)
    return steps


# --- a divergence from a teacher -------------------------------------------------------------------------------------


def softmax_divergence_and_grad(problem: Problem) -> Program:
    steps, (rows, n) = ProgramSteps(problem), problem.specs["logits"].shape
    beta, dloss = problem.attributes["beta"], problem["dloss"]
    steps.add(
        {0: FORWARD, 1: REVERSE}.get(beta, JENSEN_SHANNON),
        rows,
        n=n,
        beta=beta,
        factor=1 / problem.attributes["temperature"],
        has_dloss=dloss is not None,
        teacher=problem["teacher_logits"],
        dloss=problem["loss"] if dloss is None else dloss,
        terms=steps.workspace.private(n),
    )
    return steps


# --- a linear layer's results: chunks of tokens, whose logits are never all in memory --------------------------------

CHUNK_BYTES: Final = 64 << 20  # of logits
FEWEST_TOKENS: Final = 24  # of a chunk: the weights are read anew for each


def _by_chunks(problem: Problem) -> Program:
    """The steps of all chunks; a part is a token, whose loss is its sum."""
    operator, bits, dtype = problem.operator.name, problem.attributes["bits"], problem["b"].dtype
    if (dtype == "uint8") != bool(bits):
        expected = "uint8, as bits is not 0" if bits else "floats, as bits is 0"
        raise TypeError(f"{operator}: b has dtype {dtype}, expected {expected}")
    if bits and problem["scales"] is None:
        raise TypeError(f"{operator}: scales is None, expected an array, as bits is not 0")
    classes, size = (problem.attributes[name] for name in ("N", "K"))
    tokens, rows = math.prod(problem.specs["x"].shape[:-1]), 0
    problem = replace(problem, outer=tokens, n=classes)
    steps = ProductSteps(problem)
    labels, with_gradient, private = add_labels(steps, by_sample=True), steps.given("dx"), steps.workspace.private
    sums = steps.workspace.shared(tokens, "float64")
    reduction = reduction_of(problem, sums)
    if tokens and classes:
        most = CHUNK_BYTES // (classes * steps.item)  # whole blocks of the product's rows where there are so many
        rows = max(most // BLOCK_ROWS * BLOCK_ROWS or most // FEWEST_TOKENS * FEWEST_TOKENS, FEWEST_TOKENS)
        rows, pitch = min(rows, tokens), round_up(classes, steps.lanes) + steps.lanes
        logits: Any = Rows(steps.workspace.shared(rows * pitch), pitch)
        kernel, options = loss_kernels.loss_only_rows, 0
        if with_gradient:
            memory = (private(classes + steps.lanes) for _ in range(2))
            kernel, options = loss_kernels.fused_rows, loss_kernels.Exponentials(*memory)
        if bits:
            weights = weights_of(steps)
            sides: Any = [(kernel_of(problem, transposed), weights) for transposed in (True, False)]
        else:
            row, column = (size, 1) if problem.attributes["transB"] else (1, classes)
            matrices = Matrix(problem["b"], column, row), Matrix(problem["b"], row, column)
            sides = [(kernels.multiply_floats, each) for each in matrices]
        (to_logits, w), (back, w_back) = sides
        x, dx = Matrix(problem["x"], size, 1), Rows(problem.operands.get("dx"), size)  # type: ignore[arg-type]
        for first in range(0, tokens, rows):
            count = min(rows, tokens - first)
            add_product(steps, to_logits, ProductSizes(count, classes, size), x, w, logits, (first, 0))
            samples = loss_kernels.Samples(*(each.moved(first) for each in labels), problem["loss"])
            given = {"logits": logits, "y": logits, "samples": samples, "options": options, "stream": 0}
            into = reduction._replace(each=False, sums=sums.moved(first))
            steps.add_parts(kernel, count, n=classes, reduction=into, **given)
            if with_gradient:
                slope = Matrix(logits.data, logits.step, 1)
                add_product(steps, back, ProductSizes(count, size, classes), slope, w_back, dx, (0, first))
    else:
        for name, wanted in (("dx", with_gradient), ("loss", reduction.each)):
            if wanted:
                steps.clear(name)
    last = loss_kernels.write_losses if reduction.each else loss_kernels.add_losses
    steps.add_parts(last, parts=tokens if rows else 0, reduction=reduction._replace(each=False))
    return steps


linear_cross_entropy_loss = linear_cross_entropy_loss_and_grad = _by_chunks
