"""The programs of the gradients of pooling, and the tables of windows."""

import math
from typing import Final

import numpy as np

from opgrad.contract import Array
from opgrad.contract.signature import Problem, wrong_maximum
from opgrad.cpu.kernels import pooling as kernels
from opgrad.cpu.kernels.loops.weighted import Along
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.gather import check
from opgrad.cpu.programs.resize import add_rows, along
from opgrad.cpu.runtime.program import Program, Tables, units_per_part
from opgrad.ops.reference.windows import MOST_AXES, WindowAxis, average_pool_axes

ONE_WINDOW: Final = WindowAxis(1, 1, 1)


def max_pool_grad(problem: Problem) -> Program:
    shape, windows = problem.attributes["shape"], math.prod(problem.specs["dy"].shape[2:])
    planes, size = math.prod(shape[:2]), math.prod(shape[2:])
    if not planes or not size + windows:
        return Program(())
    steps, per_part = ProgramSteps(problem), units_per_part(planes, problem.bytes / planes)
    sizes = (*(1,) * (2 + MOST_AXES - len(shape)), *shape[2:])
    kernel, memory = kernels.add_to_maxima, {}
    if problem["dx"].dtype in ("float16", "bfloat16"):
        kernel, private = kernels.add_to_maxima_apart, steps.workspace.private
        memory = {"sums": private(size), "addends": private(windows)}
    check(steps, kernels.check_planes, planes, per_part, windows=windows, size=size)
    columns_first = problem.attributes["storage_order"]
    steps.add_parts(kernel, planes, per_part, windows=windows, sizes=sizes, columns_first=columns_first, **memory)
    return steps.program(explain=wrong_maximum(problem, "max_pool_grad"))


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


def _new_rows(axis: WindowAxis) -> Array:
    """Whether the windows of each element differ from those of the element before."""
    element, window = _windows(axis)
    lists = [window[element == i].tobytes() for i in range(axis.size)]
    return np.array([i == 0 or lists[i] != lists[i - 1] for i in range(axis.size)], np.int64)


def average_pool_grad(problem: Problem) -> Program:
    """Windows side by side along a row are added as vectors; of others, a table names those of each element."""
    shape = problem.attributes["shape"]
    if not math.prod(shape):
        return Program(())
    along, padding = average_pool_axes(problem.attributes), problem.attributes["count_include_pad"]
    deep, high, wide = (ONE_WINDOW,) * (MOST_AXES - len(along)) + along
    steps = ProgramSteps(problem)
    depth, height = (_along(each, padding, steps.tables) for each in (deep, high))
    if wide.stride > 1 and wide.count > 1:
        axes = depth, height, _along(wide, padding, steps.tables)
        add_rows(steps, math.prod(shape[:2]), axes, False, problem["dy"], problem["dx"])
        return steps.program()
    shares, longest = _shares(wide, padding), max(wide.count, wide.size)
    memory = {name: steps.workspace.private(longest) for name in ("sums", "line", "chunk")}
    same, add_table = bool((shares == shares[:1]).all()), steps.tables.add
    row = wide.size, wide.count, wide.kernel, wide.dilation, wide.begin
    width = kernels.RowWindows(*row, add_table(shares, "float64"), same)
    new_rows = add_table(_new_rows(high))
    steps.add(
        kernels.share_out, math.prod(shape[:-1]), depth=depth, height=height, width=width, new_rows=new_rows, **memory
    )
    return steps.program()
