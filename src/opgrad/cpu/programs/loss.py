"""The programs of losses over the last axis: sparse labels by those of cross_entropy, others by their own kernels."""

import math
from dataclasses import replace
from typing import Any, Final

from opgrad.contract.signature import Problem, wrong_label
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import quantized as kernels
from opgrad.cpu.kernels.cross_entropy import loss as loss_kernels
from opgrad.cpu.kernels.cross_entropy.loss import (
    LossReduction,
    Samples,
    add_losses,
    dense_gradient,
    dense_loss,
    write_losses,
)
from opgrad.cpu.kernels.distillation import FORWARD, JENSEN_SHANNON, REVERSE
from opgrad.cpu.kernels.gemm import BLOCK_ROWS, Matrix, ProductSizes
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProductSteps, ProgramSteps
from opgrad.cpu.programs.cross_entropy import LOSS, add_labels, gradient, loss_program, reduction_of
from opgrad.cpu.programs.quantized import add_product, kernel_of, weights_of
from opgrad.cpu.runtime.program import Program, Scratch, ceil_div, round_up, units_per_part


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
    return steps.program()


# --- a linear layer's results: chunks of tokens, whose logits are never all in memory --------------------------------

CHUNK_BYTES: Final = 64 << 20  # of logits
FEWEST_TOKENS: Final = 24  # of a chunk: the weights are read anew for each


def linear_cross_entropy_loss(problem: Problem) -> Program:
    return _Chunks(problem, "linear_cross_entropy_loss").of_all_tokens()


def linear_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return _Chunks(problem, "linear_cross_entropy_loss_and_grad").of_all_tokens()


class _Chunks(ProductSteps):
    """Puts the steps together."""

    def __init__(self, problem: Problem, operator: str):
        self.classes, self.size = (problem.attributes[name] for name in ("N", "K"))
        self.tokens = math.prod(problem.specs["x"].shape[:-1])
        super().__init__(replace(problem, outer=self.tokens, n=self.classes))
        self.operator = operator
        self.with_gradient = self.given("dx")
        self._check()

    def _check(self) -> None:
        """Raise unless the weights are floats, or bytes with scales."""
        bits, dtype = self.problem.attributes["bits"], self.problem["b"].dtype
        if (dtype == "uint8") != bool(bits):
            expected = "uint8, as bits is not 0" if bits else "floats, as bits is 0"
            raise TypeError(f"{self.operator}: b has dtype {dtype}, expected {expected}")
        if bits and self.problem["scales"] is None:
            raise TypeError(f"{self.operator}: scales is None, expected an array, as bits is not 0")

    def of_all_tokens(self) -> Program:
        """The steps of all chunks; each has memory of its own for the sums of its parts."""
        problem = self.problem
        classes, weights = add_labels(self, by_sample=True)
        rows = self.chunk_rows() if self.tokens and self.classes else 0
        self.sums = self.workspace.shared(self.tokens, "float64")
        reduction = reduction_of(problem, self.sums)
        self.reduction = reduction._replace(each=False)  # a part is a token, whose loss is its sum
        parts = 0
        if rows:
            pitch = round_up(self.classes, self.lanes) + self.lanes
            logits: Any = Rows(self.workspace.shared(rows * pitch), pitch)
            self.multiply = self._products(logits)
            for first in range(0, self.tokens, rows):
                count = min(rows, self.tokens - first)
                samples = Samples(*(each.moved(first) for each in (classes, weights)), problem["loss"])
                parts += self.chunk(logits, first, count, samples, parts)
        elif self.with_gradient:
            self.clear("dx")
        if not rows and reduction.each:
            self.clear("loss")
        self.add_parts(write_losses if reduction.each else add_losses, parts=parts, reduction=self.reduction)
        return self.program(explain=wrong_label(problem, self.operator))

    def chunk_rows(self) -> int:
        """The tokens of a chunk, whole blocks of the product's rows where there are so many."""
        most = CHUNK_BYTES // (self.classes * self.item)
        rows = max(most // BLOCK_ROWS * BLOCK_ROWS or most // FEWEST_TOKENS * FEWEST_TOKENS, FEWEST_TOKENS)
        return min(rows, self.tokens)

    def chunk(self, logits: Rows, first: int, count: int, samples: Samples, before: int) -> int:
        """The steps for some tokens; returns the number of parts that leave a sum, which follow those before."""
        into, back = self.multiply
        into(count, (first, 0))
        kernel, options = loss_kernels.loss_only_rows, 0
        if self.with_gradient:
            kernel, options = loss_kernels.fused_rows, self.exponentials
        given = {"logits": logits, "y": logits, "samples": samples, "options": options, "stream": 0}
        reduction = self.reduction._replace(sums=self.sums.moved(before))
        self.add_parts(kernel, count, n=self.classes, reduction=reduction, **given)
        if self.with_gradient:
            back(count, (0, first))
        return count

    def _products(self, logits: Rows) -> tuple[Any, Any]:
        """The functions that add the step which computes logits of tokens, and the one for the gradient of tokens."""
        problem, size, classes = self.problem, self.size, self.classes
        if self.with_gradient:
            memory = (self.workspace.private(classes + self.lanes) for _ in range(2))
            self.exponentials: Any = loss_kernels.Exponentials(*memory)
        if problem.attributes["bits"]:
            weights = weights_of(self, self.operator)
            sides: Any = [(kernel_of(problem, transposed), weights) for transposed in (True, False)]
        else:
            row, column = (size, 1) if problem.attributes["transB"] else (1, classes)
            matrices = Matrix(problem["b"], column, row), Matrix(problem["b"], row, column)
            sides = [(kernels.multiply_floats, each) for each in matrices]
        (into, w), (back, w_back) = sides
        x, dx = Matrix(problem["x"], size, 1), Rows(problem.operands.get("dx"), size)  # type: ignore[arg-type]

        def add_logits(count: int, first: tuple[int, int]) -> None:
            add_product(self, into, ProductSizes(count, classes, size), x, w, logits, first)

        def add_gradient(count: int, first: tuple[int, int]) -> None:
            slope = Matrix(logits.data, logits.step, 1)
            add_product(self, back, ProductSizes(count, size, classes), slope, w_back, dx, first)

        return add_logits, add_gradient
