"""The program of a divergence from a teacher: one step, whose units are rows."""

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.distillation import FORWARD, JENSEN_SHANNON, REVERSE
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import Program


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
