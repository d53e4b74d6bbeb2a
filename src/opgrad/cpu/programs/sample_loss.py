"""Cross-entropy with all its options: what each row of logits gives, and the gradient of that, in one pass over them.

Labels are read and checked first; then a step writes the targets that do not depend on labels, if there are any.
"""

from typing import Any

from opgrad.contract.signature import Problem, wrong_label
from opgrad.cpu.compiler.parameters import Columns, Rows
from opgrad.cpu.kernels.cross_entropy.loss import LossReduction, Samples
from opgrad.cpu.kernels.cross_entropy.options import (
    SampleOptions,
    SampleResults,
    Scaling,
    Target,
    Upstream,
    kernels,
    write_targets,
)
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.cross_entropy import add_labels
from opgrad.cpu.programs.layout import layout_of, loops_of
from opgrad.cpu.runtime.program import Program, Scratch


def scaling_of(problem: Problem) -> Scaling:
    """The numbers by which logits become z."""
    softcap, temperature = problem.attributes["softcap"], problem.attributes["temperature"]
    return Scaling(1 / softcap, softcap / temperature) if softcap else Scaling(1 / temperature, 0.0)


def _add_targets(steps: ProgramSteps) -> tuple[str, Target]:
    """Add the step that writes the targets which do not depend on labels; returns their kind, and where they are."""
    problem, shared = steps.problem, steps.workspace.shared
    smoothing, q, weight = problem.attributes["label_smoothing"], problem["probabilities"], problem["weight"]
    if not smoothing and q is None:
        return "labels", Target(None, None, None, 1.0)
    base, factors, share = shared(problem.n), shared(problem.n), 1 - smoothing
    written = {"weight": weight or factors, "is_given": weight is not None, "base": base, "factors": factors}
    steps.add_parts(write_targets, n=problem.n, constant=smoothing / max(problem.n, 1), share=share, **written)
    if q is None:
        return "smoothed", Target(base, factors, None, share)
    return "dense", Target(base, factors, Columns(q, q.outer, q.n), 0.0)


def _add_upstream(steps: ProgramSteps) -> Upstream:
    """The gradients of the results; for those that are not given, a step writes their default: 1 for the loss, else 0.

    A default is written once, for a vector of samples, and has a step of 0.
    """
    problem, width = steps.problem, steps.lanes
    zeros, ones = steps.workspace.shared(width), steps.workspace.shared(width)
    written = {"weight": ones, "is_given": 0, "base": zeros, "factors": ones}
    steps.add_parts(write_targets, n=width, constant=0.0, share=1.0, **written)
    defaults = {name: Rows(ones if name == "dloss" else zeros, 0) for name in Upstream._fields}
    given = {name: Rows(problem[name], 1) for name in Upstream._fields if problem[name] is not None}
    return Upstream(**{**defaults, **given})


def _program(problem: Problem, operator: str, with_gradient: bool) -> Program:
    steps = ProgramSteps(problem)
    samples = Samples(*add_labels(steps), problem["loss"])
    kind, target = _add_targets(steps)
    upstream = _add_upstream(steps) if with_gradient else None
    if problem.outer * problem.inner:
        by_layout = kernels(problem.attributes["softcap"] != 0, kind, with_gradient)
        layout = layout_of(problem, by_layout)
        y = problem["dlogits" if with_gradient else "logits"]
        loops = loops_of(problem, layout, logits=problem["logits"], y=y)
        # The sums of losses are not asked for.
        sums = steps.workspace.shared(loops.step(by_layout[layout]).parts, "float64")
        results = SampleResults(*(problem[name] for name in SampleResults._fields))
        arguments: dict[str, Any] = {"samples": samples, "buffer": steps.workspace.private(2 * steps.lanes)}
        arguments["reduction"] = LossReduction(True, False, 1.0, Scratch(), sums)
        arguments["options"] = SampleOptions(scaling_of(problem), target, results, upstream)
        steps.add_loops(loops, by_layout[layout], **arguments)
    return steps.program(explain=wrong_label(problem, operator))


def sample_losses(problem: Problem) -> Program:
    return _program(problem, "sample_losses", with_gradient=False)


def sample_losses_and_grad(problem: Problem) -> Program:
    return _program(problem, "sample_losses_and_grad", with_gradient=True)
