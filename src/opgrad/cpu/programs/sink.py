"""The programs of softmax with a sink: rows, and the sums of the sink's gradient by heads."""

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels.sink import soften, soften_back, sum_parts
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import Program


def sink_softmax(problem: Problem) -> Program:
    steps, (batches, heads, length, n) = ProgramSteps(problem), problem.specs["x"].shape
    steps.add(soften, batches * heads * length, heads=heads, length=length, n=n)
    return steps.program()


def sink_softmax_grad(problem: Problem) -> Program:
    steps, (batches, heads, length, n) = ProgramSteps(problem), problem.specs["dy"].shape
    rows, sizes = batches * heads * length, {"heads": heads, "length": length}
    parts = steps.workspace.shared(max(rows, 1))
    steps.add(soften_back, rows, **sizes, n=n, parts=parts)
    steps.add_parts(sum_parts, heads, **sizes, batches=batches, parts=parts)
    return steps.program()
