"""Cross-entropy: the plain losses, those with all options, and those of a shard of the classes.

Labels are read and checked first; with options a step then writes the targets that do not depend on labels.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from opgrad.contract.signature import Operand, Problem, wrong_label
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Columns, Rows
from opgrad.cpu.kernels.cross_entropy import loss, options
from opgrad.cpu.kernels.loops.rows import tile_size
from opgrad.cpu.programs import layout as layouts
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.layout import Limits, Loops, keeps_column, layout_of, loops_of
from opgrad.cpu.runtime.plan import Program, Scratch, Workspace, ceil_div

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
    steps.add_parts(loss.read_labels, samples, LABELS_PER_PART, count=problem.n, found=found, **given)
    steps.add_parts(loss.sum_labels, parts=parts, found=found, status=Scratch())
    steps.explain = wrong_label(problem)
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


def loss_program(problem: Problem, kind: Loss, by_sample: bool = False) -> Program:
    steps = ProgramSteps(problem)
    samples = loss.Samples(*add_labels(steps, by_sample), problem["loss"])
    layout = layout_of(problem, kind.kernels, kind.limits)
    kernel, loops = kind.kernels[layout], loops_of(problem, layout, logits=problem["logits"], y=problem[kind.result])
    parts = loops.step(kernel).parts if problem.outer * problem.inner else 0
    reduction = reduction_of(problem, steps.workspace.shared(parts, "float64"))
    if parts:
        memory = _private(steps.workspace, loops, layout, kind is FUSED)
        steps.add_loops(loops, kernel, samples=samples, reduction=reduction, **memory)
    steps.add_parts(loss.add_losses, parts=parts, reduction=reduction)
    return steps


def reduction_of(problem: Problem, sums: Scratch | None = None) -> loss.LossReduction:
    reduction = problem.attributes["reduction"]
    return loss.LossReduction(reduction == "none", reduction == "mean", 1.0, Scratch(), sums)


def _private(workspace: Workspace, loops: Loops, layout: str, fused: bool) -> dict[str, Any]:
    """Private memory: for rows their exponentials; else a vector of losses, and a tile or a strip's exponentials."""
    n, width = loops.arguments["n"], vector_lanes(workspace.precision)
    if layout == "rows":
        return {"options": loss.Exponentials(*(workspace.private(n + width) for _ in range(2))) if fused else 0}
    keep = layout == "columns" and fused and keeps_column(n, width)
    more = tile_size(n, width) if layout == "transposed" else n * width if keep else 0
    return {"buffer": workspace.private(width + more), "options": loss.Caching(keep, loops.arguments["stream"])}


softmax_cross_entropy_loss = partial(loss_program, kind=LOSS)
softmax_cross_entropy_loss_only = partial(loss_program, kind=LOSS_ONLY)
softmax_cross_entropy_loss_and_grad = partial(loss_program, kind=FUSED)


def softmax_cross_entropy_loss_grad(problem: Problem) -> Program:
    return gradient(problem, problem["bias"])


def gradient(problem: Problem, bias: Operand | None = None, by_sample: bool = False) -> Program:
    """The gradient from log_prob, with `bias` added."""
    steps = ProgramSteps(problem)
    samples = loss.Samples(*add_labels(steps, by_sample), problem["dy"])
    layout = layout_of(problem, GRAD)
    operands = {"log_prob": problem["log_prob"], "dlogits": problem["dlogits"], "bias": bias or problem["log_prob"]}
    if problem.outer * problem.n * problem.inner:
        more = {"biased": bias is not None, "samples": samples, "reduction": reduction_of(problem)}
        steps.add_loops(loops_of(problem, layout, **operands), GRAD[layout], **more)
    return steps


# --- all options: what each row gives, and the gradient of that, in one pass over the logits -------------------------


def scaling_of(problem: Problem) -> options.Scaling:
    """The numbers by which logits become z."""
    softcap, temperature = problem.attributes["softcap"], problem.attributes["temperature"]
    return options.Scaling(1 / softcap, softcap / temperature) if softcap else options.Scaling(1 / temperature, 0.0)


def _add_targets(steps: ProgramSteps) -> tuple[str, options.Target]:
    """Add the step that writes the targets which do not depend on labels; returns their kind, and where they are."""
    problem, shared = steps.problem, steps.workspace.shared
    smoothing, q, weight = problem.attributes["label_smoothing"], problem["probabilities"], problem["weight"]
    if not smoothing and q is None:
        return "labels", options.Target(None, None, None, 1.0)
    base, factors, share = shared(problem.n), shared(problem.n), 1 - smoothing
    written = {"weight": weight or factors, "is_given": weight is not None, "base": base, "factors": factors}
    steps.add_parts(options.write_targets, n=problem.n, constant=smoothing / max(problem.n, 1), share=share, **written)
    if q is None:
        return "smoothed", options.Target(base, factors, None, share)
    return "dense", options.Target(base, factors, Columns(q, q.outer, q.n), 0.0)


def _add_upstream(steps: ProgramSteps) -> options.Upstream:
    """The gradients of the results; for those that are not given, a step writes their default: 1 for the loss, else 0.

    A default is written once, for a vector of samples, and has a step of 0.
    """
    problem, width = steps.problem, steps.lanes
    zeros, ones = steps.workspace.shared(width), steps.workspace.shared(width)
    written = {"weight": ones, "is_given": 0, "base": zeros, "factors": ones}
    steps.add_parts(options.write_targets, n=width, constant=0.0, share=1.0, **written)
    defaults = {name: Rows(ones if name == "dloss" else zeros, 0) for name in options.Upstream._fields}
    given = {name: Rows(problem[name], 1) for name in options.Upstream._fields if problem[name] is not None}
    return options.Upstream(**{**defaults, **given})


def sample_losses(problem: Problem, with_gradient: bool = False) -> Program:
    steps = ProgramSteps(problem)
    samples = loss.Samples(*add_labels(steps), problem["loss"])
    kind, target = _add_targets(steps)
    upstream = _add_upstream(steps) if with_gradient else None
    if problem.outer * problem.inner:
        by_layout = options.kernels(problem.attributes["softcap"] != 0, kind, with_gradient)
        layout = layout_of(problem, by_layout)
        y = problem["dlogits" if with_gradient else "logits"]
        loops = loops_of(problem, layout, logits=problem["logits"], y=y)
        # The sums of losses are not asked for.
        sums = steps.workspace.shared(loops.step(by_layout[layout]).parts, "float64")
        results = options.SampleResults(*(problem[name] for name in options.SampleResults._fields))
        arguments: dict[str, Any] = {"samples": samples, "buffer": steps.workspace.private(2 * steps.lanes)}
        arguments["reduction"] = loss.LossReduction(True, False, 1.0, Scratch(), sums)
        arguments["options"] = options.SampleOptions(scaling_of(problem), target, results, upstream)
        steps.add_loops(loops, by_layout[layout], **arguments)
    return steps


sample_losses_and_grad = partial(sample_losses, with_gradient=True)

# --- a shard of the classes ------------------------------------------------------------------------------------------


def _arguments(problem: Problem) -> dict[str, Any]:
    """The arguments that both kernels take besides operands."""
    samples, n = problem.specs["logits"].shape
    return {"samples": samples, "n": n, "is_weighted": problem["weight"] is not None, "scaling": scaling_of(problem)}


def cross_entropy_shard(problem: Problem) -> Program:
    steps, (samples, n) = ProgramSteps(problem), problem.specs["logits"].shape
    softcap, temperature = problem.attributes["softcap"], problem.attributes["temperature"]
    kind = "capped" if softcap else "none" if temperature == 1 else "divided"
    buffer = steps.workspace.private(steps.lanes if kind == "none" else n + steps.lanes)
    unit_bytes = n * problem.specs["logits"].dtype.itemsize
    found = problem["statistics"]
    steps.add(options.STATISTICS[kind], samples, unit_bytes, found=found, buffer=buffer, **_arguments(problem))
    return steps


def cross_entropy_shard_grad(problem: Problem) -> Program:
    steps, (samples, n) = ProgramSteps(problem), problem.specs["logits"].shape
    kernel = options.GRADIENT["capped" if problem.attributes["softcap"] else "divided"]
    steps.add(kernel, samples if n else 0, **_arguments(problem))
    return steps
