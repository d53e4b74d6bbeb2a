"""Cross-entropy whose classes are split over processes: the statistics of a shard's rows, and their gradient."""

from typing import Any

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import vector_lanes
from opgrad.cpu.kernels.cross_entropy.shards import GRADIENT, STATISTICS, Classes
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, shared_out
from opgrad.cpu.programs.sample_loss import scaling_of
from opgrad.cpu.programs.workspace import Workspace


def _arguments(problem: Problem) -> dict[str, Any]:
    """The arguments that both kernels take."""
    samples, n = problem.specs["logits"].shape
    weight = problem["weight"]
    arguments: dict[str, Any] = {"samples": samples, "n": n, "logits": problem["logits"], "labels": problem["labels"]}
    arguments["classes"] = Classes(problem.attributes["first"], weight, weight is not None)
    return arguments | {"scaling": scaling_of(problem)}


def cross_entropy_shard(problem: Problem) -> Program:
    samples, n = problem.specs["logits"].shape
    workspace, softcap = Workspace(precision(problem)), problem.attributes["softcap"]
    kind = "capped" if softcap else "none" if problem.attributes["temperature"] == 1 else "divided"
    width = vector_lanes(workspace.precision)
    arguments = {**_arguments(problem), "found": problem["statistics"], "moment": problem.attributes["moment"]}
    arguments["buffer"] = workspace.private(width if kind == "none" else n + width)
    unit_bytes = n * DTYPES[problem["logits"].dtype].itemsize
    return Program([shared_out(STATISTICS[kind], samples, unit_bytes, arguments)] if samples else [], workspace)


def cross_entropy_shard_grad(problem: Problem) -> Program:
    samples, n = problem.specs["logits"].shape
    if not samples * n:
        return Program(())
    arguments = {**_arguments(problem), "factors": problem["factors"], "dlogits": problem["dlogits"]}
    arguments["stream"] = partition.streams(problem.bytes)
    kernel = GRADIENT["capped" if problem.attributes["softcap"] else "divided"]
    return Program([shared_out(kernel, samples, problem.bytes / samples, arguments)])
