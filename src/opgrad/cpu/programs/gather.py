"""The programs of gather and its gradient, and their steps, which the programs of `scatter` use, too."""

import math
from typing import Any, Final

from opgrad.contract.signature import Operand, Problem, wrong_index
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import gather as kernels
from opgrad.cpu.kernels.gather import Slices
from opgrad.cpu.kernels.loops.rows import buffer_size
from opgrad.cpu.kernels.sort import HOT, MOST_SORTED
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.sort import Sorting
from opgrad.cpu.runtime.program import MAX_PART_BYTES, Program, Scratch, ceil_div, streams

INDICES_PER_PART = 1 << 13
# Where slices are copied, a slice is prefetched at least so many slices, and at least so many bytes, before its use:
# short slices are copied faster than memory answers.
SOON: Final = 3
SOON_BYTES: Final = 4096
NEAR: Final = 1 << 19  # bytes of x that the second-level cache holds, so that its slices need no prefetch
# Threads share a hot slice by pieces of its addends if slices have at most FEW_COLUMNS columns, otherwise by strips of
# columns. There are at most PIECES pieces, of at least SHORTEST_PIECE slices of dy each.
PIECES: Final = 128
SHORTEST_PIECE: Final = 256
FEW_COLUMNS: Final = 4096


def check(steps: ProgramSteps, kernel: Kernel, units: int, per_part: int, **arguments: Any) -> None:
    """Add the steps in which every part looks for a wrong index, and the first one is reported."""
    parts = ceil_div(units, per_part)
    found = steps.workspace.shared(parts, "int64")
    steps.add_parts(kernel, units, per_part, **arguments, found=found)
    steps.add_parts(kernels.report_indices, parts=parts, found=found, status=Scratch(), **arguments)


def check_indices(steps: ProgramSteps, size: int, name: str = "indices") -> None:
    """Add the steps that check the indices into an axis of this size. name: of the operand that holds them."""
    indices = steps.problem[name]
    count = math.prod(steps.problem.specs[name].shape)
    check(steps, kernels.check_indices, count, INDICES_PER_PART, size=size, indices=indices)


def gather(problem: Problem) -> Program:
    steps, shape, axis = ProgramSteps(problem), problem.specs["x"].shape, problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    check_indices(steps, size)
    copy_slices(steps, pre, Slices(math.prod(problem.specs["indices"].shape), size, post))
    return steps.program(explain=wrong_index(problem, "gather", size))


def copy_slices(steps: ProgramSteps, pre: int, slices: Slices) -> None:
    """Add the step that copies slices of x to y."""
    x, y, item = steps.problem["x"], steps.problem["y"], steps.problem.specs["x"].dtype.itemsize
    slice_bytes, units = slices.post * item, pre * slices.count
    if not units * slice_bytes:
        return
    words = 0 if slice_bytes % 4 else slice_bytes // 4
    near = pre * slices.size * slice_bytes <= NEAR
    steps.add(
        kernels.copy_slices,
        units,
        2 * slice_bytes,
        slices=slices,
        item=item,
        words=words,
        x=Operand(x.number, "float32"),
        y=Rows(Operand(y.number, "float32"), words),
        soon=0 if near else max(SOON, SOON_BYTES // slice_bytes),
        buffer=steps.workspace.private(buffer_size(4), "float32"),
        stream=streams(2 * units * slice_bytes),
    )


def gather_grad(problem: Problem) -> Program:
    steps, shape, axis = ProgramSteps(problem), problem.attributes["shape"], problem.attributes["axis"].start
    pre, size, post = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count = math.prod(problem.specs["indices"].shape)
    check_indices(steps, size)
    if pre * size * post:
        check_count("gather_grad", count)
        sum_slices(steps, pre, Slices(count, size, post))
    return steps.program(explain=wrong_index(problem, "gather_grad", size))


def check_count(operator: str, count: int) -> None:
    """Raise NotImplementedError if there are more slices than can be sorted."""
    if count > MOST_SORTED:
        raise NotImplementedError(f"{operator}: indices name {count} slices, expected at most {MOST_SORTED} on the CPU")


def sum_slices(steps: ProgramSteps, pre: int, slices: Slices) -> None:
    """Add the steps that sort the slices of dy by where they go, and sum them."""
    count, size, _ = slices
    if not count:
        steps.clear("dx")
        return
    sorting, order = Sorting(steps, count, size), steps.workspace.shared(count + kernels.AHEAD, "int32")
    ranges = max(1, min(size, round(steps.problem.bytes / (pre * MAX_PART_BYTES))))
    arguments = {"slices": slices, "order": order, "starts": sorting.starts, "hot": sorting.hot}
    sorting.add(kernels.SLICES_BY_TARGET, steps.problem["indices"], order)
    steps.add(kernels.sum_slices, pre * ranges, ranges=ranges, per_range=-(-size // ranges), **arguments)
    sum_hot_slices(steps, pre, slices, arguments)


def sum_hot_slices(steps: ProgramSteps, pre: int, slices: Slices, arguments: dict[str, Any]) -> None:
    """Add the steps that sum the slices of dx that many slices go to.

    Where there are few columns, all of them of a piece of the addends: pieces stay in the second-level cache, and
    memory is read from end to end (65536 equal indices, slices of 256 numbers: 2.0 ms by strips, 1.7 by pieces; in
    bfloat16 1.35 and 0.66; Zen 5, 2 threads).
    """
    count, _, post = slices
    pieces = max(1, min(PIECES, count // SHORTEST_PIECE)) if pre * post <= FEW_COLUMNS else 1
    width = post if pieces > 1 else kernels.WIDE * steps.lanes
    strips = ceil_div(post, width)
    sums = steps.workspace.shared(pre * HOT * pieces * post) if pieces > 1 else steps.problem["dx"]
    arguments = {**arguments, "pieces": pieces, "width": width, "strips": strips, "sums": sums}
    steps.add_parts(kernels.sum_hot_slices, pre * pieces * strips, **arguments)
    if pieces > 1:
        steps.add_parts(kernels.add_pieces, pre, **arguments)
