"""The steps of elements picked along one axis, and of their sums; the kernels' file says what lines and strips are."""

import ctypes
import math

from opgrad.contract import Shape
from opgrad.contract.problem import Operand, Problem
from opgrad.cpu.compiler.memory import CACHE_LINE
from opgrad.cpu.kernels.loops.fold import CHUNK
from opgrad.cpu.kernels.scatter.along_axis import LineStrips, add_apart, add_in_place, copy_elements
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.elements import zero_step
from opgrad.cpu.programs.program import Step, shared_out
from opgrad.cpu.programs.workspace import Workspace

CACHED = 1 << 17  # bytes of a strip of x that stay in the second-level cache with all that goes through it
NARROW = 16  # lines of a strip at least, if there are so many side by side: a cache line of float32


class Lines:
    """Where the lines lie: `table` has the axes that choose a strip's first line, the last axis first.

    `run` lines lie side by side, in the indices' array (n of them on the axis) as in x (size of them). `steps` are the
    strides of the axis in both. `covers`: whether all lines of x have indices.
    """

    def __init__(self, x: Shape, indices: Shape, axis: int):
        self.n, self.size = indices[axis], x[axis]
        strides = [(math.prod(indices[each + 1 :]), math.prod(x[each + 1 :])) for each in range(len(x))]
        self.steps = strides[axis]
        self.run, first = 1, len(x)
        while first > axis + 1 and strides[first - 1] == (self.run, self.run):
            first -= 1
            self.run *= indices[first]
        others = [each for each in reversed(range(first)) if each != axis and indices[each] != 1]
        self.rows = math.prod(indices[each] for each in others)
        words = [word for each in others for word in (indices[each], *strides[each])]
        self.axes, self.table = len(others), (ctypes.c_int64 * len(words))(*words)
        self.covers = all(indices[each] == x[each] for each in range(len(x)) if each != axis)

    def strips(self, width: int) -> tuple[int, "LineStrips"]:
        """How many strips of `width` lines there are, and the kernels' argument about them."""
        strips = partition.count(self.run, width)
        address = ctypes.addressof(self.table)
        return self.rows * strips, LineStrips(
            strips, width, self.run, address, self.axes, self.n, self.size, *self.steps
        )


# --- forward -------------------------------------------------------------------------------------------------------


def copy_steps(problem: Problem, workspace: Workspace, lines: Lines) -> list[Step]:
    count = math.prod(problem.specs["indices"].shape)
    if not count:
        return []
    item = problem.specs["x"].dtype.itemsize
    strips, bundle = lines.strips(_width(lines, item))
    blocks = max(1, round(count * 2 * item / (strips * partition.MAX_PART_BYTES)))
    per_block = -(-lines.n // blocks)
    blocks = partition.count(lines.n, per_block)
    word = f"int{8 * item}"  # what is only copied is not converted
    arguments = {"indices": problem["indices"]} | {name: Operand(problem[name].number, word) for name in ("x", "y")}
    arguments |= {"lines": bundle, "per_block": per_block, "blocks": blocks, "asked": 0}
    if blocks == 1 and lines.run == 1 and lines.steps == (1, 1) and lines.size * item <= CACHED:
        each = -(-lines.size // lines.n)
        arguments["asked"] = each if each * item <= CACHE_LINE else 0
    unit_bytes = count / (strips * blocks) * (2 * item + problem.specs["indices"].dtype.itemsize)
    return [shared_out(copy_elements, strips * blocks, unit_bytes, arguments)]


def _width(lines: Lines, item: int) -> int:
    """How many lines make a strip."""
    return max(1, min(lines.run, max(NARROW, CACHED // (max(lines.size, 1) * item))))


# --- backward ------------------------------------------------------------------------------------------------------


def sum_steps(problem: Problem, workspace: Workspace, lines: Lines) -> list[Step]:
    """The steps that sum dy into dx."""
    spec, count = problem.specs["dx"], math.prod(problem.specs["dy"].shape)
    elements = math.prod(spec.shape)
    if not elements:
        return []
    zeros = [zero_step(problem["dx"], elements, elements * spec.dtype.itemsize)]
    if not count:
        return zeros
    strips, bundle = lines.strips(_width(lines, 4))
    arguments = {name: problem[name] for name in ("indices", "dy", "dx")} | {"lines": bundle}
    first = [] if lines.covers else zeros
    if lines.n == 1 or (lines.n <= CHUNK and spec.dtype.itemsize > 2):
        return [*first, shared_out(add_in_place, strips, problem.bytes / strips, arguments)]
    most = lines.size * bundle.width
    arguments |= {"total": workspace.private(most), "compensation": workspace.private(most), "most": most}
    arguments["stream"] = partition.streams(problem.bytes)
    return [*first, shared_out(add_apart, strips, problem.bytes / strips, arguments)]
