"""The steps of sums into few of many elements: sorting the numbers by destination, and summing each one's numbers."""

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.gather import AHEAD, Slices
from opgrad.cpu.kernels.scatter.radix_sort import (
    DIGIT,
    DIGITS,
    Sorted,
    count_digits,
    move_digits,
    scan_digits,
    sum_sorted,
)
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.gather import SORTING_PARTS
from opgrad.cpu.programs.program import Step, shared_out
from opgrad.cpu.programs.workspace import Scratch, Workspace

FEW = 4  # elements for each number from which on this is used, since visiting every element costs more than sorting


def sorted_sum_steps(problem: Problem, workspace: Workspace, keys: Scratch, slices: Slices) -> list[Step]:
    """The steps that zero dx and add the slices of dy, whose destinations are the keys."""
    count, size, post = slices
    per_part = -(-count // max(1, min(SORTING_PARTS, count >> 14)))
    parts = partition.count(count, per_part)
    order, moved_order = (workspace.shared(count + AHEAD, "int32") for _ in range(2))
    source, moved = Sorted(keys, order), Sorted(workspace.shared(count, "int64"), moved_order)
    sorting = {"parts": parts, "counts": workspace.shared(parts * DIGITS, "int32")}
    dx, dy = problem["dx"], problem["dy"]
    steps = [zero_step(dx, size * post, size * post * problem.specs["dx"].dtype.itemsize)]
    for shift in range(0, max(1, (size - 1).bit_length()), DIGIT):
        arguments = sorting | {"source": source, "moved": moved, "shift": shift}
        counting, moving = (Step(kernel, count, arguments, per_part) for kernel in (count_digits, move_digits))
        steps += [counting, Step(scan_digits, 1, arguments), moving]
        source, moved = moved, source
    summing = {"source": source, "count": count, "post": post, "dy": dy, "dx": dx}
    steps.append(shared_out(sum_sorted, count, 2 * post * problem.specs["dy"].dtype.itemsize + 12, summing))
    return steps
