"""Softmax cross-entropy from integer labels: loss, gradient, and both in one pass over the logits.

Labels are read and checked first (`labels`). `rows` and `columns` have the kernels; short rows are transposed to
columns.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from opgrad.contract.problem import Operand, Problem
from opgrad.contract.ranges import wrong_label
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_f64
from opgrad.cpu.compiler.native import Kernel, kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Pointer
from opgrad.cpu.kernels.cross_entropy import columns, rows
from opgrad.cpu.kernels.cross_entropy.labels import (
    Ignored,
    Reduction,
    Samples,
    Weighting,
    mean_divisor,
    read_labels,
    sum_labels,
)
from opgrad.cpu.kernels.loops.transpose import tile_size
from opgrad.cpu.programs import layout as layouts
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.layout import Limits, Loops, keeps_column, layout_of, loops_of, precision
from opgrad.cpu.programs.program import Program, Step
from opgrad.cpu.programs.workspace import Scratch, Workspace

LABELS_PER_PART: Final = 1 << 13
AFTER: Final = 64  # spare numbers behind the last one, since a whole vector may read beyond it


def label_steps(problem: Problem, workspace: Workspace, by_sample: bool = False) -> tuple[list[Step], Any, Any]:
    """The steps that read the labels, and the classes and weights that they leave.

    `by_sample`: there is a weight for each sample, not for each class.
    """
    samples = problem.outer * problem.inner
    parts = partition.count(samples, LABELS_PER_PART)
    found = workspace.shared(2 * parts, "int64")
    classes = workspace.shared(samples + AFTER, "int32" if problem.n < 2**31 else "int64")
    weights = workspace.shared(samples + AFTER)
    ignore, weight = problem.attributes.get("ignore_index"), problem["weight"]
    arguments = {"parts": parts, "count": problem.n, "ignored": Ignored(ignore or 0, ignore is not None)}
    arguments |= {"labels": problem["labels"], "weighting": Weighting(weight, weight is not None, by_sample)}
    arguments |= {"classes": classes, "weights": weights, "found": found, "status": Scratch()}
    reading = Step(read_labels, samples, arguments, LABELS_PER_PART)
    return [reading, Step(sum_labels, 1, arguments)], classes, weights


@kernel
def add_losses(parts, reduction: Reduction, loss: Pointer):
    """The reduced loss from the parts' sums."""
    if not reduction.each:
        total = 0.0
        for part in range(parts):
            total += load_f64(reduction.sums, part)
        divisor = mean_divisor(reduction)
        v.store_one(loss, 0, total / divisor if divisor != 0.0 else 0.0)


def _by_layout(by_rows: Kernel, column: Callable[..., Any], *transpose_back: Callable[..., None]) -> dict[str, Kernel]:
    by_columns, transposed = columns.loss_by_columns(column), columns.loss_transposed(column, *transpose_back)
    return {"rows": by_rows, "columns": by_columns, "transposed": transposed}


LOSS = _by_layout(rows.loss_rows, columns.loss_column)
LOSS_ONLY = _by_layout(rows.loss_only_rows, columns.loss_only_column, columns.no_transpose)
FUSED = _by_layout(rows.fused_rows, columns.fused_column)
GRAD = {"rows": rows.grad_rows, "columns": columns.grad_columns}


def loss_and_result(
    problem: Problem,
    operator: str,
    kernels: Mapping[str, Kernel],
    result: str,
    limits: Limits = layouts.LOSS,
    by_sample: bool = False,
) -> Program:
    """The program of the loss and of `result`, an array of the logits' shape.

    If it is the logits, it is not written.
    """
    workspace = Workspace(precision(problem))
    steps, classes, weights = label_steps(problem, workspace, by_sample)
    layout = layout_of(problem, kernels, limits)
    loops = loops_of(problem, layout, logits=problem["logits"], y=problem[result])
    parts = loops.step(kernels[layout]).parts if problem.outer * problem.inner else 0
    reduction = _reduction(problem, workspace.shared(parts, "float64"))
    if parts:
        samples = Samples(classes, weights, problem["loss"])
        memory = _private(workspace, loops, layout, kernels)
        steps.append(loops.step(kernels[layout], samples=samples, reduction=reduction, **memory))
    steps.append(Step(add_losses, 1, {"parts": parts, "reduction": reduction, "loss": problem["loss"]}))
    return Program(steps, workspace, wrong_label(problem, operator))


def _reduction(problem: Problem, sums: Scratch | None = None) -> Reduction:
    reduction = problem.attributes["reduction"]
    return Reduction(reduction == "none", reduction == "mean", Scratch(), sums)


def _private(workspace: Workspace, loops: Loops, layout: str, kernels: Mapping[str, Kernel]) -> dict[str, Any]:
    """Private memory: for rows their exponentials; else a vector of losses, and a tile or a strip's exponentials."""
    n, width = loops.arguments["n"], vector_lanes(workspace.precision)
    if layout == "rows":
        return {name: workspace.private(n + width) for name in ("e", "done") if name in kernels[layout].parameters}
    keep = layout == "columns" and kernels is FUSED and keeps_column(n, width)
    more = tile_size(n, width) if layout == "transposed" else n * width if keep else 0
    return {"buffer": workspace.private(width + more), "caching": columns.Caching(keep, loops.arguments["stream"])}


def softmax_cross_entropy_loss(problem: Problem) -> Program:
    return loss_and_result(problem, "softmax_cross_entropy_loss", LOSS, "log_prob")


def softmax_cross_entropy_loss_only(problem: Problem) -> Program:
    return loss_and_result(problem, "softmax_cross_entropy_loss_only", LOSS_ONLY, "logits", layouts.LOSS_ALONE)


def softmax_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return loss_and_result(problem, "softmax_cross_entropy_loss_and_grad", FUSED, "dlogits")


def softmax_cross_entropy_loss_grad(problem: Problem) -> Program:
    return gradient(problem, "softmax_cross_entropy_loss_grad", problem["bias"])


def gradient(problem: Problem, operator: str, bias: Operand | None = None, by_sample: bool = False) -> Program:
    """The gradient from log_prob, with `bias` added."""
    workspace = Workspace(precision(problem))
    steps, classes, weights = label_steps(problem, workspace, by_sample)
    layout = layout_of(problem, GRAD)
    operands = {"log_prob": problem["log_prob"], "dlogits": problem["dlogits"], "bias": bias or problem["log_prob"]}
    if problem.outer * problem.n * problem.inner:
        samples = Samples(classes, weights, problem["dy"])
        more = {"biased": bias is not None, "samples": samples, "reduction": _reduction(problem)}
        steps.append(loops_of(problem, layout, **operands).step(GRAD[layout], **more))
    return Program(steps, workspace, wrong_label(problem, operator))
