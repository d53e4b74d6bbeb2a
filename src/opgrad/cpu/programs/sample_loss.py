"""Cross-entropy with all its options: what each row of logits gives, and the gradient of that, in one pass over them.

Labels are read and checked first; then a step writes the targets that do not depend on labels, if there are any.
"""

from typing import Any

from opgrad.contract.problem import Problem
from opgrad.contract.ranges import wrong_label
from opgrad.cpu.compiler.native import vector_lanes
from opgrad.cpu.compiler.parameters import Columns, Rows
from opgrad.cpu.kernels.cross_entropy.labels import LossReduction, Samples
from opgrad.cpu.kernels.cross_entropy.options import (
    Options,
    SampleResults,
    Scaling,
    Target,
    Upstream,
    kernels,
    write_targets,
)
from opgrad.cpu.programs.cross_entropy import label_steps
from opgrad.cpu.programs.layout import layout_of, loops_of, precision
from opgrad.cpu.programs.program import Program, Step
from opgrad.cpu.programs.workspace import Scratch, Workspace


def scaling_of(problem: Problem) -> Scaling:
    """The numbers by which logits become z."""
    softcap, temperature = problem.attributes["softcap"], problem.attributes["temperature"]
    return Scaling(1 / softcap, softcap / temperature) if softcap else Scaling(1 / temperature, 0.0)


def _targets(problem: Problem, workspace: Workspace) -> tuple[list[Step], str, Target]:
    """The step that writes the targets which do not depend on labels, their kind, and how kernels find them."""
    smoothing, q, weight = problem.attributes["label_smoothing"], problem["probabilities"], problem["weight"]
    if not smoothing and q is None:
        return [], "labels", Target(None, None, None, 1.0)
    base, factors = workspace.shared(problem.n), workspace.shared(problem.n)
    arguments = {"n": problem.n, "weight": weight or factors, "is_given": weight is not None}
    arguments |= {"constant": smoothing / max(problem.n, 1), "share": 1 - smoothing, "base": base, "factors": factors}
    steps = [Step(write_targets, 1, arguments)]
    if q is None:
        return steps, "smoothed", Target(base, factors, None, 1 - smoothing)
    return steps, "dense", Target(base, factors, Columns(q, q.outer, q.n), 0.0)


def _upstream(problem: Problem, workspace: Workspace) -> tuple[list[Step], Upstream]:
    """The gradients of the results; for those that are not given, a step writes their default: 1 for the loss, else 0.

    A default is written once, for a vector of samples, and has a step of 0.
    """
    width = vector_lanes(workspace.precision)
    zeros, ones = workspace.shared(width), workspace.shared(width)
    arguments = {"n": width, "weight": ones, "is_given": 0, "constant": 0.0, "share": 1.0, "base": zeros}
    defaults = {name: Rows(ones if name == "dloss" else zeros, 0) for name in Upstream._fields}
    given = {name: Rows(problem[name], 1) for name in Upstream._fields if problem[name] is not None}
    return [Step(write_targets, 1, {**arguments, "factors": ones})], Upstream(**{**defaults, **given})


def _program(problem: Problem, operator: str, with_gradient: bool) -> Program:
    workspace = Workspace(precision(problem))
    steps, classes, weights = label_steps(problem, workspace)
    more, kind, target = _targets(problem, workspace)
    steps, upstream = steps + more, None
    if with_gradient:
        more, upstream = _upstream(problem, workspace)
        steps += more
    if problem.outer * problem.inner:
        by_layout = kernels(problem.attributes["softcap"] != 0, kind, with_gradient)
        layout = layout_of(problem, by_layout)
        y = problem["dlogits" if with_gradient else "logits"]
        loops = loops_of(problem, layout, logits=problem["logits"], y=y)
        sums = workspace.shared(loops.step(by_layout[layout]).parts, "float64")  # of losses; they are not asked for
        results = SampleResults(*(problem[name] for name in SampleResults._fields))
        arguments: dict[str, Any] = {"samples": Samples(classes, weights, problem["loss"])}
        arguments["reduction"] = LossReduction(True, False, 1.0, Scratch(), sums)
        arguments["buffer"] = workspace.private(2 * vector_lanes(workspace.precision))
        arguments["options"] = Options(scaling_of(problem), target, results, upstream)
        steps.append(loops.step(by_layout[layout], **arguments))
    return Program(steps, workspace, wrong_label(problem, operator))


def sample_losses(problem: Problem) -> Program:
    return _program(problem, "sample_losses", with_gradient=False)


def sample_losses_and_grad(problem: Problem) -> Program:
    return _program(problem, "sample_losses_and_grad", with_gradient=True)
