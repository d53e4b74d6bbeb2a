"""The steps of sums into few of many elements: sorting the numbers by destination, and summing each one's numbers."""

from typing import Final

from opgrad.contract.problem import Problem
from opgrad.cpu.kernels.gather import AHEAD, Slices
from opgrad.cpu.kernels.scatter.radix_sort import (
    KEYS_BY_DIGIT,
    Sorted,
    sum_sorted,
)
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.program import Step, shared_out
from opgrad.cpu.programs.sort import Sorting
from opgrad.cpu.programs.workspace import Scratch, Workspace

MOST_BITS: Final = 11  # of a digit: the counts of a part, 8 KiB, stay in the first-level cache
FEW = 4  # elements for each number from which on this is used, since visiting every element costs more than sorting


def sorted_sum_steps(problem: Problem, workspace: Workspace, keys: Scratch, slices: Slices) -> list[Step]:
    """The steps that zero dx and add the slices of dy, whose destinations are the keys."""
    count, size, post = slices
    bits = max(1, (size - 1).bit_length())
    digit = -(-bits // -(-bits // MOST_BITS))  # as short as the number of passes allows
    sorting = Sorting(workspace, count, 1 << digit)
    order, other_order = (workspace.shared(count + AHEAD, "int32") for _ in range(2))
    source, target = Sorted(keys, order, 0), Sorted(workspace.shared(count, "int64"), other_order, 0)
    dx, dy = problem["dx"], problem["dy"]
    steps = [zero_step(dx, size * post, size * post * problem.specs["dx"].dtype.itemsize)]
    for shift in range(0, bits, digit):
        steps += sorting.steps(KEYS_BY_DIGIT, source._replace(shift=shift), target)
        source, target = target, source
    summing = {"source": source, "count": count, "post": post, "dy": dy, "dx": dx}
    steps.append(shared_out(sum_sorted, count, 2 * post * problem.specs["dy"].dtype.itemsize + 12, summing))
    return steps
