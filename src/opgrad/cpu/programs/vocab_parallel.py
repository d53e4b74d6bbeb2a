"""Cross-entropy whose classes are split over processes: the statistics of a shard's rows, and their gradient."""

from typing import Any

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.cross_entropy.options import GRADIENT, STATISTICS
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.sample_loss import scaling_of
from opgrad.cpu.runtime.program import Program


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
    steps.add(STATISTICS[kind], samples, unit_bytes, found=found, buffer=buffer, **_arguments(problem))
    return steps.program()


def cross_entropy_shard_grad(problem: Problem) -> Program:
    steps, (samples, n) = ProgramSteps(problem), problem.specs["logits"].shape
    kernel = GRADIENT["capped" if problem.attributes["softcap"] else "divided"]
    steps.add(kernel, samples if n else 0, **_arguments(problem))
    return steps.program()
