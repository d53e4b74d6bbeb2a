"""The program of a divergence from a teacher: one step, whose units are rows."""

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.distillation import FORWARD, JENSEN_SHANNON, REVERSE, Options
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, shared_out
from opgrad.cpu.programs.workspace import Workspace


def softmax_divergence_and_grad(problem: Problem) -> Program:
    rows, n = problem.specs["logits"].shape
    if not rows:
        return Program(())
    beta, dloss = problem.attributes["beta"], problem["dloss"]
    workspace = Workspace(precision(problem))
    arguments = {
        "n": n,
        "options": Options(beta, 1 / problem.attributes["temperature"], int(dloss is not None)),
        "logits": problem["logits"],
        "teacher": problem["teacher_logits"],
        "dloss": problem["loss"] if dloss is None else dloss,
        "loss": problem["loss"],
        "dlogits": problem["dlogits"],
        "terms": workspace.private(n),
    }
    kernel = {0: FORWARD, 1: REVERSE}.get(beta, JENSEN_SHANNON)
    return Program([shared_out(kernel, rows, problem.bytes / rows, arguments)], workspace)
