"""Cross-entropy with all its options: what each row of logits gives, and the gradient of that, in one pass over them.

Labels are read and checked first (`opgrad.cpu.kernels.cross_entropy.labels`). `rows` and `columns` have the kernels.
"""

from typing import Any

from opgrad.contract.problem import Operand, Problem
from opgrad.contract.ranges import wrong_label
from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.parameters import Float, Pointer
from opgrad.cpu.kernels.cross_entropy.labels import Samples
from opgrad.cpu.kernels.cross_entropy.sample_columns import by_columns
from opgrad.cpu.kernels.cross_entropy.sample_formulas import CAPPED, STRAIGHT, Results, Scale, Target, Upstream
from opgrad.cpu.kernels.cross_entropy.sample_rows import by_rows
from opgrad.cpu.programs.cross_entropy import label_steps
from opgrad.cpu.programs.layout import layout_of, loops_of, precision
from opgrad.cpu.programs.program import Program, Step
from opgrad.cpu.programs.workspace import Scratch, Workspace

UPSTREAM = ("dloss", "dlse", "dlse_square", "dlog_prob", "dentropy")


@kernel
def write_targets(n, weight: Pointer, is_given, share: Float, base: Pointer, factors: Pointer):
    """Each class's part of the smoothed targets, and its weight."""
    for i in range(n):
        factor = v.load_one(weight, i) if is_given else v.number(weight, 1.0)
        v.store_one(base, i, factor * share)
        v.store_one(factors, i, factor)


KERNELS = {
    (bend, gradient): {"rows": by_rows(bend, gradient), "columns": by_columns(bend, gradient)}
    for bend in (STRAIGHT, CAPPED)
    for gradient in (False, True)
}


def target_step(problem: Problem, workspace: Workspace) -> tuple[list[Step], dict[str, Any]]:
    """The step that spreads what labels are smoothed by, where a kernel reads it, and the kernel's arguments."""
    smoothing, q = problem.attributes["label_smoothing"], problem["probabilities"]
    base = factors = Scratch(dtype=workspace.precision)
    steps = []
    if smoothing or q is not None:
        base, factors = workspace.shared(problem.n), workspace.shared(problem.n)
        arguments = {"n": problem.n, "weight": problem["weight"] or factors, "is_given": problem["weight"] is not None}
        arguments |= {"share": smoothing / max(problem.n, 1), "base": base, "factors": factors}
        steps.append(Step(write_targets, 1, arguments))
    place = (q.outer, q.n) if q is not None else (0, 0)
    target = Target(base, factors, q or base, *place, q is not None, smoothing > 0, 1 - smoothing)
    return steps, {"target": target}


def _program(problem: Problem, operator: str, gradient: bool) -> Program:
    workspace = Workspace(precision(problem))
    steps, classes, weights = label_steps(problem, workspace)
    more_steps, arguments = target_step(problem, workspace)
    steps += more_steps
    softcap, temperature = problem.attributes["softcap"], problem.attributes["temperature"]
    kernels = KERNELS[CAPPED if softcap else STRAIGHT, gradient]
    scale = Scale(1 / softcap, softcap / temperature) if softcap else Scale(1 / temperature, 0.0)
    results = Results(*[problem[name] for name in Results._fields])
    arguments |= {"samples": Samples(classes, weights, weights), "scale": scale, "results": results}
    if gradient:
        given = [problem[name] for name in UPSTREAM]
        bits = sum(1 << place for place, each in enumerate(given) if each is not None)
        arguments["upstream"] = Upstream(*[weights if each is None else each for each in given], bits)
    if problem.outer * problem.inner:
        layout = layout_of(problem, kernels)
        operands: dict[str, Operand] = {"logits": problem["logits"]}
        if gradient:
            operands["y"] = problem["dlogits"]
        steps.append(loops_of(problem, layout, **operands).step(kernels[layout], **arguments))
    return Program(steps, workspace, wrong_label(problem, operator))


def sample_losses(problem: Problem) -> Program:
    return _program(problem, "sample_losses", gradient=False)


def sample_losses_and_grad(problem: Problem) -> Program:
    return _program(problem, "sample_losses_and_grad", gradient=True)
