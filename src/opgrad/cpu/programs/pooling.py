"""The programs of the gradients of pooling and of resizing, and their tables of windows and weights.

Resizing passes over dy. The kernel takes planes of three axes: depth, height and width. An axis is either resized, or
its size stays. Neighbouring axes whose sizes stay are merged into one, which may be one of the three. If a plane cannot
hold all resized axes, they are taken in several passes, the last axes first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from opgrad.contract import Array
from opgrad.contract.signature import Problem, wrong_maximum
from opgrad.cpu.kernels import pooling as kernels
from opgrad.cpu.kernels.pooling import PIECE, ROWS, Along, gather_rows
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.indexing import check
from opgrad.cpu.runtime.plan import Program, Tables, units_per_part
from opgrad.ops.pooling import Resized, resized_axes
from opgrad.ops.reference.windows import MOST_AXES, WindowAxis, average_pool_axes

# --- resizing --------------------------------------------------------------------------------------------------------

AXES: Final = 3  # of a plane


def resize_grad(problem: Problem) -> Program:
    """Each pass takes the last resized axes that are left. All passes but the last one write to working memory."""
    x, y = problem.specs["x"].shape, problem.specs["dy"].shape
    steps = ProgramSteps(problem)
    if not math.prod(x) or not math.prod(y):
        steps.clear("dx")
        return steps
    resized = resized_axes("resize_grad", x, y, problem.attributes)
    source, sizes = problem["dy"], list(y)
    passes = _passes(len(x), sorted(resized))
    for axes in passes:
        for axis in axes:
            sizes[axis] = x[axis]
        last = axes is passes[-1]
        target = problem["dx"] if last else steps.workspace.shared(math.prod(sizes))
        before = [y[axis] if axis in axes else size for axis, size in enumerate(sizes)]
        _add_pass(steps, before, {axis: resized[axis] for axis in axes}, source, target)
        source = target
    return steps


def _passes(rank: int, axes: Sequence[int]) -> list[list[int]]:
    """The resized axes of each pass, the last axes first: as many as fit a plane with merged axes between them."""
    left, found = list(axes), list[list[int]]()
    while left:
        taken = [left.pop()]
        while left and _slots(rank, [left[-1], *taken]) <= AXES:
            taken.insert(0, left.pop())
        found.append(taken)
    return found or [[]]


def _slots(rank: int, axes: Sequence[int]) -> int:
    """How many axes a plane has if these are resized: they themselves, and the merged axes between and behind them."""
    gaps = sum(after - axis > 1 for axis, after in zip(axes, [*axes[1:], rank], strict=True))
    return len(axes) + gaps


def _add_pass(steps: ProgramSteps, sizes: Sequence[int], resized: Mapping[int, Resized], dy: Any, dx: Any) -> None:
    """Add the step from an array of these sizes to one where some axes have those of x."""
    first, tables = min(resized, default=0), steps.tables
    slots, planes = _slots_of(sizes, first, resized, tables), math.prod(sizes[:first])
    row = _stays(math.prod(sizes[max(resized, default=-1) + 1 :]), tables) if len(sizes) - 1 not in resized else None
    width, same = (row, True) if row else (slots.pop(), False)
    if not slots and not same:
        together = math.gcd(planes, ROWS)  # rows of several planes read a table together
        slots, planes = [_stays(together, tables)], planes // together
    depth, height = [*(_stays(1, tables) for _ in range(AXES - 1 - len(slots))), *slots]
    add_rows(steps, planes, (depth, height, width), same, dy, dx)


def add_rows(steps: ProgramSteps, planes: int, axes: tuple[Along, Along, Along], same: bool, dy: Any, dx: Any) -> None:
    """Add the step that sums the elements of planes along these axes. same: whether the last of them stays as it is."""
    (depth, height, width), private = axes, steps.workspace.private
    piece = min(PIECE, width.count) if same else width.count
    pieces = -(-width.count // piece)
    units = planes * depth.size * -(-height.size // ROWS) * pieces
    elements = planes * (depth.count * height.count * width.count + depth.size * height.size * width.size)
    arguments = {"depth": depth, "height": height, "width": width, "same": same, "pieces": pieces, "piece": piece}
    arguments |= {"dy": dy, "dx": dx, "sums": private(ROWS * piece), "chunk": private(piece)}
    arguments["lines"] = private(ROWS * (1 if same else width.size))
    steps.add(gather_rows, units, elements * steps.item / units, **arguments)


def _slots_of(sizes: Sequence[int], first: int, resized: Mapping[int, Resized], tables: Tables) -> list[Along]:
    """The axes of a plane from the first resized one to the last one; the axes between two of them are merged."""
    slots, between = list[Along](), 1
    for axis in range(first, max(resized, default=-1) + 1):
        if axis not in resized:
            between *= sizes[axis]
            continue
        slots += [_stays(between, tables)] if between > 1 else []
        slots.append(_gathered(resized[axis], tables))
        between = 1
    return slots


def _gathered(axis: Resized, tables: Tables) -> Along:
    """Which elements of dy an element of dx takes, and with which weights.

    Places beyond an end of the axis all mean its last element there, so their weights are added up.
    """
    pairs = axis.places * axis.count + np.arange(axis.count)[:, None]
    every, of = np.unique(pairs, return_inverse=True)
    weights = np.bincount(of.ravel(), axis.weights.ravel())
    places, o = np.divmod(every, axis.count)
    counts = weights != 0
    return along(axis.size, axis.count, (places[counts], o[counts], weights[counts]), tables)


def _stays(size: int, tables: Tables) -> Along:
    """An axis whose size stays: each element takes itself."""
    every = np.arange(size)
    return along(size, size, (every, every, np.ones(size)), tables)


def along(size: int, count: int, pairs: tuple[Array, Array, Array], tables: Tables) -> Along:
    """The kernels' description of an axis, whose tables are added to `tables`.

    pairs: three arrays of the same length: an element of the result, one of its sources, and that source's weight.
    """
    elements, sources, weights = pairs
    order = elements.argsort(kind="stable")
    starts = elements[order].searchsorted(range(size + 1))
    addresses = tables.add(starts), tables.add(sources[order]), tables.add(weights[order], "float64")
    return Along(size, count, *addresses)


# --- pooling ---------------------------------------------------------------------------------------------------------

ONE_WINDOW: Final = WindowAxis(1, 1, 1)


def max_pool_grad(problem: Problem) -> Program:
    shape, windows = problem.attributes["shape"], math.prod(problem.specs["dy"].shape[2:])
    planes, size = math.prod(shape[:2]), math.prod(shape[2:])
    if not planes or not size + windows:
        return Program()
    steps, per_part = ProgramSteps(problem), units_per_part(planes, problem.bytes / planes)
    sizes = (*(1,) * (2 + MOST_AXES - len(shape)), *shape[2:])
    kernel, memory = kernels.add_to_maxima, {}
    if problem["dx"].dtype in ("float16", "bfloat16"):
        kernel, private = kernels.add_to_maxima_apart, steps.workspace.private
        memory = {"sums": private(size), "addends": private(windows)}
    check(steps, kernels.check_planes, planes, per_part, windows=windows, size=size)
    columns_first = problem.attributes["storage_order"]
    steps.add_parts(kernel, planes, per_part, windows=windows, sizes=sizes, columns_first=columns_first, **memory)
    steps.explain = wrong_maximum(problem)
    return steps


def _shares(axis: WindowAxis, count_padding: bool) -> Array:
    """1 / elements of each window."""
    first = np.arange(axis.count) * axis.stride - axis.begin
    low = np.maximum(-(first // axis.dilation), 0)
    beyond = axis.size + (axis.end if count_padding else 0) - first
    elements = np.minimum(axis.kernel, -(-beyond // axis.dilation)) - (0 if count_padding else low)
    return 1.0 / np.maximum(elements, 1).astype(np.float64)


def _windows(axis: WindowAxis) -> tuple[Array, Array]:
    """Elements of the axis, and windows that they are in."""
    window, k = np.divmod(np.arange(axis.count * axis.kernel), axis.kernel)
    element = window * axis.stride - axis.begin + k * axis.dilation
    inside = (element >= 0) & (element < axis.size)
    return element[inside], window[inside]


def _along(axis: WindowAxis, padding: bool, tables: Tables) -> Along:
    """The kernels' description of an axis; its tables are appended to `tables`."""
    element, window = _windows(axis)
    return along(axis.size, axis.count, (element, window, _shares(axis, padding)[window]), tables)


def average_pool_grad(problem: Problem) -> Program:
    """Windows side by side along a row are added as vectors; of others, a table names those of each element."""
    shape = problem.attributes["shape"]
    if not math.prod(shape):
        return Program()
    along, padding = average_pool_axes(problem.attributes), problem.attributes["count_include_pad"]
    deep, high, wide = (ONE_WINDOW,) * (MOST_AXES - len(along)) + along
    steps = ProgramSteps(problem)
    depth, height = (_along(each, padding, steps.tables) for each in (deep, high))
    if wide.stride > 1 and wide.count > 1:
        axes = depth, height, _along(wide, padding, steps.tables)
        add_rows(steps, math.prod(shape[:2]), axes, False, problem["dy"], problem["dx"])
        return steps
    shares, longest = _shares(wide, padding), max(wide.count, wide.size)
    memory = {name: steps.workspace.private(longest) for name in ("sums", "line", "chunk")}
    same, add_table = bool((shares == shares[:1]).all()), steps.tables.add
    row = wide.size, wide.count, wide.kernel, wide.dilation, wide.begin
    width = kernels.RowWindows(*row, add_table(shares, "float64"), same)
    element, window = _windows(high)
    lists = [window[element == i].tobytes() for i in range(high.size)]
    # Whether the windows of each element differ from those of the element before.
    new_rows = add_table(np.array([i == 0 or lists[i] != lists[i - 1] for i in range(high.size)], np.int64))
    steps.add(
        kernels.share_out, math.prod(shape[:-1]), depth=depth, height=height, width=width, new_rows=new_rows, **memory
    )
    return steps
