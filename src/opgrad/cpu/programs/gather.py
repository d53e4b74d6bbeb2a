"""The programs of gather and its gradient, and their steps, which scatter's programs use, too."""

import math
from typing import Any, Final

from opgrad.contract import DTYPES
from opgrad.contract.problem import Operand, Problem
from opgrad.contract.ranges import wrong_index
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import gather as kernels
from opgrad.cpu.kernels.gather import Slices
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.sort import HOT, MOST_SORTED
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.sort import Sorting
from opgrad.cpu.programs.workspace import Scratch, Workspace

INDICES_PER_PART = 1 << 13
SOON: Final = 3  # slices between a prefetch and its use where slices are copied, at least
SOON_BYTES: Final = 4096  # and at least so many bytes, since short slices are copied faster than memory answers
NEAR: Final = 1 << 19  # bytes of x that the second-level cache holds, so that its slices need no prefetch
PIECES: Final = 128  # the most pieces into which the addends of a hot slice are cut,
SHORTEST_PIECE: Final = 256  # each of at least so many slices of dy,
FEW_COLUMNS: Final = 4096  # if slices have at most so many columns; others are cut into strips of columns


def checking(kernel: Kernel, workspace: Workspace, units: int, per_part: int, arguments: dict[str, Any]) -> list[Step]:
    """The steps in which every part looks for a wrong index, and the first one is reported."""
    parts = partition.count(units, per_part)
    arguments = {**arguments, "parts": parts, "found": workspace.shared(parts, "int64"), "status": Scratch()}
    return [Step(kernel, units, arguments, per_part), Step(kernels.report_indices, 1, arguments)]


def index_steps(problem: Problem, workspace: Workspace, size: int, name: str = "indices") -> list[Step]:
    """The steps that check the indices, the operand of this name."""
    count = math.prod(problem.specs[name].shape)
    arguments = {"size": size, "indices": problem[name]}
    return checking(kernels.check_indices, workspace, count, INDICES_PER_PART, arguments)


def gather(problem: Problem) -> Program:
    shape, axis = problem.specs["x"].shape, problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count, workspace = math.prod(problem.specs["indices"].shape), Workspace()
    steps = index_steps(problem, workspace, size) + copy_steps(problem, workspace, pre, Slices(count, size, post))
    return Program(steps, workspace, wrong_index(problem, "gather", size))


def copy_steps(problem: Problem, workspace: Workspace, pre: int, slices: Slices) -> list[Step]:
    """The step that copies slices of x to y, none if there is nothing to copy."""
    x, y = problem["x"], problem["y"]
    item = DTYPES[x.dtype].itemsize
    slice_bytes, units = slices.post * item, pre * slices.count
    traffic = 2 * units * slice_bytes
    if not traffic:
        return []
    words = 0 if slice_bytes % 4 else slice_bytes // 4
    arguments = {
        "slices": slices,
        "item": item,
        "words": words,
        "buffer": workspace.private(combine.size(4), "float32"),
    }
    arguments |= {"x": Operand(x.number, "float32"), "y": Rows(Operand(y.number, "float32"), words)}
    arguments |= {"indices": problem["indices"]}
    near = pre * slices.size * slice_bytes <= NEAR
    soon = 0 if near else max(SOON, SOON_BYTES // slice_bytes)
    arguments |= {"soon": soon, "stream": partition.streams(traffic)}
    return [shared_out(kernels.copy_slices, units, 2 * slice_bytes, arguments)]


def hot_steps(
    problem: Problem, workspace: Workspace, pre: int, slices: Slices, arguments: dict[str, Any]
) -> list[Step]:
    """The steps that sum the slices of dx that many slices go to.

    Where there are few columns, all of them of a piece of the addends: pieces stay in the second-level cache, and
    memory is read from end to end (65536 equal indices, slices of 256 numbers: 2.0 ms by strips, 1.7 by pieces; in
    bfloat16 1.35 and 0.66; Zen 5, 2 threads).
    """
    count, _, post = slices
    pieces = max(1, min(PIECES, count // SHORTEST_PIECE)) if pre * post <= FEW_COLUMNS else 1
    width = post if pieces > 1 else kernels.WIDE * vector_lanes(workspace.precision)
    strips = partition.count(post, width)
    sums = workspace.shared(pre * HOT * pieces * post) if pieces > 1 else problem["dx"]
    arguments = {**arguments, "pieces": pieces, "width": width, "strips": strips, "sums": sums}
    summing = Step(kernels.sum_hot_slices, pre * pieces * strips, arguments)
    return [summing, Step(kernels.add_pieces, pre, arguments)] if pieces > 1 else [summing]


def gather_grad(problem: Problem) -> Program:
    shape, axis = problem.attributes["shape"], problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count, workspace = math.prod(problem.specs["indices"].shape), Workspace(precision(problem))
    steps = index_steps(problem, workspace, size)
    if pre * size * post:
        check_count("gather_grad", count)
        steps += sum_steps(problem, workspace, pre, Slices(count, size, post))
    return Program(steps, workspace, wrong_index(problem, "gather_grad", size))


def check_count(operator: str, count: int) -> None:
    """Raise NotImplementedError if there are more slices than can be sorted."""
    if count > MOST_SORTED:
        raise NotImplementedError(f"{operator}: indices name {count} slices, expected at most {MOST_SORTED} on the CPU")


def sum_steps(problem: Problem, workspace: Workspace, pre: int, slices: Slices) -> list[Step]:
    """The steps that sort and sum."""
    count, size, post = slices
    if not count:
        elements = pre * size * post
        return [zero_step(problem["dx"], elements, elements * DTYPES[problem["dx"].dtype].itemsize)]
    sorting, order = Sorting(workspace, count, size), workspace.shared(count + kernels.AHEAD, "int32")
    ranges = max(1, min(size, round(problem.bytes / (pre * partition.MAX_PART_BYTES))))
    units = pre * ranges
    arguments = {"slices": slices, "dy": problem["dy"], "dx": problem["dx"], "order": order}
    arguments |= {"starts": sorting.starts, "hot": sorting.hot, "ranges": ranges}
    arguments |= {"per_range": -(-size // ranges), "stream": partition.streams(problem.bytes)}
    return [
        *sorting.steps(kernels.SLICES_BY_TARGET, problem["indices"], order),
        shared_out(kernels.sum_slices, units, problem.bytes / units, arguments),
        *hot_steps(problem, workspace, pre, slices, arguments),
    ]
