"""The programs of softmax with a sink: rows, and the sums of the sink's gradient by heads."""

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.sink import soften, soften_back, sum_parts
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Workspace


def sink_softmax(problem: Problem) -> Program:
    batches, heads, length, n = problem.specs["x"].shape
    rows = batches * heads * length
    if not rows:
        return Program(())
    arguments = {"heads": heads, "length": length, "n": n}
    arguments |= {name: problem[name] for name in ("x", "sink", "y", "lse")}
    return Program([shared_out(soften, rows, problem.bytes / rows, arguments)])


def sink_softmax_grad(problem: Problem) -> Program:
    batches, heads, length, n = problem.specs["dy"].shape
    if not heads:
        return Program(())
    rows, workspace = batches * heads * length, Workspace(precision(problem))
    arguments = {"heads": heads, "length": length, "n": n, "batches": batches}
    arguments |= {name: problem[name] for name in ("dy", "y", "lse", "sink", "dx", "dsink")}
    arguments["parts"] = workspace.shared(max(rows, 1))
    steps = [shared_out(soften_back, rows, problem.bytes / rows, arguments)] if rows else []
    return Program([*steps, Step(sum_parts, heads, arguments)], workspace)
