"""Softmax, log-softmax and their gradients: chooses the kernels for a shape, and reserves their working memory.

Each layout of opgrad.cpu.programs.layout has a file in cpu/kernels/softmax. Calls with attributes have programs of
their own (opgrad.cpu.programs.fused).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops.rows import AHEAD
from opgrad.cpu.kernels.loops.transpose import group_tiles, tile_size
from opgrad.cpu.kernels.softmax import columns, groups, panels, rows, split, transposed
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.fused import fusing
from opgrad.cpu.programs.layout import (
    Loops,
    forward_layout,
    forward_streams,
    gradient_lanes,
    gradient_layout,
    gradient_streams,
    is_crowded,
    is_sixteen_bits,
    keeps_column,
    loops_of,
    precision,
    row_streams,
    spare_columns,
    units_of,
)
from opgrad.cpu.runtime.program import Program
from opgrad.cpu.runtime.workspace import Workspace

FORWARD: Final = ("softmax", "log_softmax")
GRADIENTS: Final = ("softmax_grad", "log_softmax_grad")
# Of each operator the plain kernels by layout: one, or those of several steps.
PLAIN: Final[Mapping[str, Mapping[str, Any]]] = {
    "softmax": {
        "rows": rows.softmax_rows,
        "columns": columns.softmax_columns,
        "transposed": transposed.forward_transposed("softmax"),
        "groups": groups.softmax_groups,
        "split": split.forward("softmax"),
    },
    "log_softmax": {
        "rows": rows.log_softmax_rows,
        "columns": columns.log_softmax_columns,
        "transposed": transposed.forward_transposed("log_softmax"),
        "groups": groups.log_softmax_groups,
        "split": split.forward("log_softmax"),
    },
    **{
        operator: {
            "rows": rows.gradient_rows(operator),
            "columns": columns.gradient_columns(operator),
            "transposed": transposed.gradient_transposed(operator),
            "split": split.gradient(operator),
        }
        for operator in GRADIENTS
    },
}

PANELS: Final = {operator: panels.forward_panels(operator) for operator in FORWARD}


def softmax(problem: Problem) -> Program:
    return _program("softmax", problem)


def log_softmax(problem: Problem) -> Program:
    return _program("log_softmax", problem)


def softmax_grad(problem: Problem) -> Program:
    return _program("softmax_grad", problem)


def log_softmax_grad(problem: Problem) -> Program:
    return _program("log_softmax_grad", problem)


def _program(operator: str, problem: Problem) -> Program:
    if problem.is_general:
        return fusing.program(operator, problem)
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    return (_forward if operator in FORWARD else _gradient)(problem, operator)


def _forward(problem: Problem, operator: str) -> Program:
    kernels = PLAIN[operator]
    layout = forward_layout(problem, kernels, operator == "log_softmax")
    stream = forward_streams(problem) and row_streams(problem, layout, "y")
    loops = loops_of(problem, layout, "y", stream, x=problem["x"], y=problem["y"])
    if layout == "split":
        return _split(problem, kernels[layout], loops)
    kernel, workspace = kernels[layout], Workspace(precision(problem))
    if layout == "columns" and is_crowded(problem, panels.WIDTH):
        return _in_panels(problem, PANELS[operator], loops, workspace)
    if kernel is columns.softmax_columns and not keeps_column(problem.n, loops.lanes):
        kernel = columns.softmax_long_columns
    if layout == "rows" and not stream:
        kernel = _through_the_cache(kernel, problem)
    memory = _private(workspace, layout, problem.n, loops.lanes) if kernel.takes_private else {}
    return Program((loops.step(kernel, **memory),), workspace)


def _through_the_cache(kernel: Kernel, problem: Problem) -> Kernel:
    """The kernel of rows that fetches lines of the result early. Exponentials wait there where they lose no digits."""
    if kernel is rows.log_softmax_rows:
        return rows.log_softmax_rows_in_result
    return rows.softmax_rows_in_result if problem["y"].dtype == precision(problem) else kernel


def _private(workspace: Workspace, layout: str, n: int, width: int) -> dict[str, Any]:
    """The private memory of a forward kernel: tiles of transposed rows, the exponentials of this row and the last.

    width: the elements of a vector.
    """
    if layout == "transposed":
        return {"tile": workspace.private(tile_size(n, width))} | _waiting(workspace, n)
    if layout == "groups":
        return {"tile": workspace.private(group_tiles(width)), "e": workspace.private((n + width) * width)}
    size = n * width if layout == "columns" else n + width
    return {"e": workspace.private(size), "done": workspace.private(size)}


def _waiting(workspace: Workspace, n: int) -> dict[str, Any]:
    """The private buffer in which a group of rows waits to be written."""
    size = combine.group_size(n * vector_lanes(workspace.precision), np.dtype(workspace.precision).itemsize)
    return {"buffer": workspace.private(size)}


def _in_panels(problem: Problem, kernel: Kernel, loops: Loops, workspace: Workspace) -> Program:
    units, sizes = units_of(problem, "columns", panels.WIDTH, spare_columns(problem, "y", True))
    unit_bytes, arguments = problem.bytes / units, {**loops.arguments, **sizes}
    loops = replace(loops, units=units, unit_bytes=unit_bytes, arguments=arguments)
    panel, kept = workspace.private(problem.n * panels.WIDTH), workspace.private(panels.KEPT * panels.WIDTH)
    return Program((loops.step(kernel, panel=panel, kept=kept),), workspace)


def _split(problem: Problem, kernels: Sequence[Kernel], loops: Loops) -> Program:
    steps = ProgramSteps(problem)
    steps.steps += fusing.split_steps(steps, kernels, loops.units, dict(loops.arguments))
    return steps.program()


def _gradient(problem: Problem, operator: str) -> Program:
    kernels = PLAIN[operator]
    stream, workspace = gradient_streams(problem), Workspace(precision(problem))
    layout, ahead = gradient_layout(problem, kernels), AHEAD if stream else 0
    # Short float32 rows are combined in a buffer instead: there is little arithmetic behind which lines could be
    # fetched.
    stream = stream and (not is_sixteen_bits(problem["y"]) or row_streams(problem, layout, "dx"))
    operands = {name: problem[name] for name in ("dy", "y", "dx")}
    loops = loops_of(problem, layout, "dx", stream, gradient_lanes(problem, layout), **operands)
    if layout == "split":
        return _split(problem, kernels[layout], loops)
    memory = {}
    if layout == "rows":
        # In the cache, prefetches only cost time: rows of 200 float32 took 0.15 ns an element with them, 0.12 without.
        memory = {"buffer": workspace.private(combine.size(np.dtype(workspace.precision).itemsize))}
        memory["ahead"] = ahead
    elif layout == "transposed":
        size = tile_size(problem.n, vector_lanes(workspace.precision))
        memory = {"dy_tile": workspace.private(size), "y_tile": workspace.private(size)}
        memory |= _waiting(workspace, problem.n)
    return Program((loops.step(kernels[layout], **memory),), workspace)
