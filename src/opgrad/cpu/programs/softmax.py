"""Softmax, log-softmax and their gradients: chooses the kernels for a shape, and reserves their working memory.

The layouts of opgrad.cpu.programs.layout are in cpu/kernels/softmax. Calls with attributes have programs of
their own (opgrad.cpu.programs.fusing).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.kernels.loops.rows import AHEAD, buffer_size, group_size, group_tiles, tile_size
from opgrad.cpu.kernels.softmax import columns, rows, split
from opgrad.cpu.programs import fusing
from opgrad.cpu.programs import layout as layouts
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.plan import Program

FORWARD: Final = ("softmax", "log_softmax")
GRADIENTS: Final = ("softmax_grad", "log_softmax_grad")
# Of each operator the plain kernels by layout: one, or those of several steps.
PLAIN: Final[Mapping[str, Mapping[str, Any]]] = {
    "softmax": {
        "rows": rows.softmax_rows,
        "columns": columns.softmax_columns,
        **columns.forward_transposed("softmax"),
        "groups": rows.softmax_groups,
        "split": split.forward("softmax"),
    },
    "log_softmax": {
        "rows": rows.log_softmax_rows,
        "columns": columns.log_softmax_columns,
        **columns.forward_transposed("log_softmax"),
        "groups": rows.log_softmax_groups,
        "split": split.forward("log_softmax"),
    },
    **{
        operator: {
            "rows": rows.gradient_rows(operator),
            "columns": columns.gradient_columns(operator),
            **columns.gradient_transposed(operator),
            "split": split.gradient(operator),
        }
        for operator in GRADIENTS
    },
}

PANELS: Final = {operator: columns.forward_panels(operator) for operator in FORWARD}


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
    steps = ProgramSteps(problem)
    (_forward if operator in FORWARD else _gradient)(steps, operator)
    return steps.program()


def _forward(steps: ProgramSteps, operator: str) -> None:
    problem, kernels = steps.problem, PLAIN[operator]
    layout = layouts.forward_layout(problem, kernels, operator == "log_softmax")
    stream = layouts.forward_streams(problem) and layouts.row_streams(problem, layout, "y")
    loops = layouts.loops_of(problem, layout, "y", stream, x=problem["x"], y=problem["y"])
    kernel = kernels[layout]
    if layout == "split":
        steps.steps += fusing.split_steps(steps, kernel, loops.units, dict(loops.arguments))
        return
    if layout == "columns" and layouts.is_crowded(problem, columns.WIDTH):
        units, sizes = layouts.units_of(problem, "columns", columns.WIDTH, layouts.spare_columns(problem, "y", True))
        loops = replace(loops, units=units, unit_bytes=problem.bytes / units, arguments={**loops.arguments, **sizes})
        panel, kept = (steps.workspace.private(count * columns.WIDTH) for count in (problem.n, columns.KEPT))
        steps.add_loops(loops, PANELS[operator], panel=panel, kept=kept)
        return
    if kernel is columns.softmax_columns and not layouts.keeps_column(problem.n, loops.lanes):
        kernel = columns.softmax_long_columns
    # Rows through the cache: lines of the result are fetched early. Exponentials wait there where they lose no digits.
    if layout == "rows" and not stream and operator == "log_softmax":
        kernel = rows.log_softmax_rows_in_result
    elif layout == "rows" and not stream and problem["y"].dtype == steps.workspace.precision:
        kernel = rows.softmax_rows_in_result
    steps.add_loops(loops, kernel, **_memory(steps, kernel, layout, loops.lanes))


def _memory(steps: ProgramSteps, kernel: Kernel, layout: str, width: int) -> dict[str, Any]:
    """A kernel's private memory by parameter: exponentials, tiles, short rows that are put together. width: lanes."""
    n, private = steps.problem.n, steps.workspace.private
    size = n * steps.problem.inner
    sizes = {
        "rows": {"e": n + width, "done": n + width, "buffer": buffer_size(steps.item)},
        "columns": {"e": n * width, "done": n * width},
        "groups": {"tile": group_tiles(width), "e": (n + width) * width},
        "transposed": {
            **dict.fromkeys(("tile", "dy_tile", "y_tile"), tile_size(size, width)),
            "buffer": group_size(size * width, steps.item),
        },
    }["transposed" if layout == "interleaved" else layout]
    return {name: private(size) for name, size in sizes.items() if name in kernel.parameters}


def _gradient(steps: ProgramSteps, operator: str) -> None:
    problem, kernels, stream = steps.problem, PLAIN[operator], layouts.gradient_streams(steps.problem)
    layout = layouts.gradient_layout(problem, kernels)
    # In the cache, prefetches only cost time: rows of 200 float32 took 0.15 ns an element with them, 0.12 without.
    memory: dict[str, Any] = {"ahead": AHEAD if stream else 0} if layout == "rows" else {}
    # Short float32 rows are combined in a buffer instead: there is little arithmetic behind which lines could be
    # fetched.
    stream = stream and (not layouts.is_sixteen_bits(problem["y"]) or layouts.row_streams(problem, layout, "dx"))
    operands = {name: problem[name] for name in ("dy", "y", "dx")}
    loops = layouts.loops_of(problem, layout, "dx", stream, layouts.gradient_lanes(problem, layout), **operands)
    kernel = kernels[layout]
    if layout == "split":
        steps.steps += fusing.split_steps(steps, kernel, loops.units, dict(loops.arguments))
        return
    steps.add_loops(loops, kernel, **memory, **_memory(steps, kernel, layout, loops.lanes))
