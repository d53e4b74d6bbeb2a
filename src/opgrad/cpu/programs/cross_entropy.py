"""Softmax cross-entropy from integer labels: loss, gradient, and both in one pass over the logits.

Labels are read and checked first. Short rows are transposed to columns.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from opgrad.contract.signature import Operand, Problem, wrong_label
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.kernels.cross_entropy import loss
from opgrad.cpu.kernels.cross_entropy.loss import LossReduction, Samples, add_losses, read_labels, sum_labels
from opgrad.cpu.kernels.loops.rows import tile_size
from opgrad.cpu.programs import layout as layouts
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.layout import Limits, Loops, keeps_column, layout_of, loops_of
from opgrad.cpu.runtime.program import Program, Scratch, Workspace, ceil_div

LABELS_PER_PART: Final = 1 << 13
AFTER: Final = 64  # spare numbers behind the last one, since a whole vector may read beyond it


def add_labels(steps: ProgramSteps, by_sample: bool = False) -> tuple[Scratch, Scratch]:
    """Add the steps that read the labels; returns the classes and weights that they leave.

    by_sample: whether there is a weight for each sample, and not for each class.
    """
    problem, shared = steps.problem, steps.workspace.shared
    samples = problem.outer * problem.inner
    parts = ceil_div(samples, LABELS_PER_PART)
    found = shared(2 * parts, "int64")
    classes = shared(samples + AFTER, "int32" if problem.n < 2**31 else "int64")
    weights = shared(samples + AFTER)
    ignore, weight = problem.attributes.get("ignore_index"), problem["weight"]
    given = {"ignores": ignore is not None, "ignored": ignore or 0, "classes": classes, "weights": weights}
    given |= {"weight": weight, "is_weighted": weight is not None, "by_sample": by_sample}
    steps.add_parts(read_labels, samples, LABELS_PER_PART, count=problem.n, found=found, **given)
    steps.add_parts(sum_labels, parts=parts, found=found, status=Scratch())
    return classes, weights


class Loss(NamedTuple):
    """The kernels of a loss by layout, the name of the result that has the logits' shape, and limits of the layouts.

    A loss without such a result has the name of the logits, which its kernels only read.
    """

    kernels: Mapping[str, Kernel]
    result: str
    limits: Limits = layouts.LOSS


def _by_layout(by_rows: Kernel, visit: Callable[..., Any], *transpose_back: Callable[..., None]) -> dict[str, Kernel]:
    by_columns, transposed = loss.losses_by_columns(visit), loss.losses_transposed(visit, *transpose_back)
    return {"rows": by_rows, "columns": by_columns, "transposed": transposed}


LOSS = Loss(_by_layout(loss.loss_rows, loss.loss_column), "log_prob")
FUSED = Loss(_by_layout(loss.fused_rows, loss.fused_column), "dlogits")
LOSS_ONLY = Loss(
    _by_layout(loss.loss_only_rows, loss.loss_only_column, loss.no_transpose), "logits", layouts.LOSS_ALONE
)
GRAD = {"rows": loss.grad_rows, "columns": loss.grad_columns}


def loss_program(problem: Problem, operator: str, loss: Loss, by_sample: bool = False) -> Program:
    steps = ProgramSteps(problem)
    samples = Samples(*add_labels(steps, by_sample), problem["loss"])
    layout = layout_of(problem, loss.kernels, loss.limits)
    kernel, loops = loss.kernels[layout], loops_of(problem, layout, logits=problem["logits"], y=problem[loss.result])
    parts = loops.step(kernel).parts if problem.outer * problem.inner else 0
    reduction = reduction_of(problem, steps.workspace.shared(parts, "float64"))
    if parts:
        memory = _private(steps.workspace, loops, layout, loss is FUSED)
        steps.add_loops(loops, kernel, samples=samples, reduction=reduction, **memory)
    steps.add_parts(add_losses, parts=parts, reduction=reduction)
    return steps.program(explain=wrong_label(problem, operator))


def reduction_of(problem: Problem, sums: Scratch | None = None) -> LossReduction:
    reduction = problem.attributes["reduction"]
    return LossReduction(reduction == "none", reduction == "mean", 1.0, Scratch(), sums)


def _private(workspace: Workspace, loops: Loops, layout: str, fused: bool) -> dict[str, Any]:
    """Private memory: for rows their exponentials; else a vector of losses, and a tile or a strip's exponentials."""
    n, width = loops.arguments["n"], vector_lanes(workspace.precision)
    if layout == "rows":
        return {"options": loss.Exponentials(*(workspace.private(n + width) for _ in range(2))) if fused else 0}
    keep = layout == "columns" and fused and keeps_column(n, width)
    more = tile_size(n, width) if layout == "transposed" else n * width if keep else 0
    return {"buffer": workspace.private(width + more), "options": loss.Caching(keep, loops.arguments["stream"])}


def softmax_cross_entropy_loss(problem: Problem) -> Program:
    return loss_program(problem, "softmax_cross_entropy_loss", LOSS)


def softmax_cross_entropy_loss_only(problem: Problem) -> Program:
    return loss_program(problem, "softmax_cross_entropy_loss_only", LOSS_ONLY)


def softmax_cross_entropy_loss_and_grad(problem: Problem) -> Program:
    return loss_program(problem, "softmax_cross_entropy_loss_and_grad", FUSED)


def softmax_cross_entropy_loss_grad(problem: Problem) -> Program:
    return gradient(problem, "softmax_cross_entropy_loss_grad", problem["bias"])


def gradient(problem: Problem, operator: str, bias: Operand | None = None, by_sample: bool = False) -> Program:
    """The gradient from log_prob, with `bias` added."""
    steps = ProgramSteps(problem)
    samples = Samples(*add_labels(steps, by_sample), problem["dy"])
    layout = layout_of(problem, GRAD)
    operands = {"log_prob": problem["log_prob"], "dlogits": problem["dlogits"], "bias": bias or problem["log_prob"]}
    if problem.outer * problem.n * problem.inner:
        more = {"biased": bias is not None, "samples": samples, "reduction": reduction_of(problem)}
        steps.add_loops(loops_of(problem, layout, **operands), GRAD[layout], **more)
    return steps.program(explain=wrong_label(problem, operator))
