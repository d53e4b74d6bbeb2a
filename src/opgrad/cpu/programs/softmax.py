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
from opgrad.cpu.runtime.plan import Program, streams

FORWARD: Final = ("softmax", "log_softmax")
GRADIENTS: Final = ("softmax_grad", "log_softmax_grad")
# Of each operator the plain kernels by layout: one, or those of several steps.
PLAIN: Final[Mapping[str, Mapping[str, Any]]] = {
    **{
        operator: {
            "rows": rows.forward_rows(operator),
            "columns": columns.forward_columns(operator, is_kept=operator == "softmax"),
            **columns.forward_transposed(operator),
            "periodic": columns.forward_periodic(operator, is_kept=operator == "softmax"),
            "groups": rows.forward_groups(operator),
            "split": split.forward(operator),
        }
        for operator in FORWARD
    },
    **{
        operator: {
            "rows": rows.gradient_rows(operator),
            "columns": columns.gradient_columns(operator),
            **columns.gradient_transposed(operator),
            "periodic": columns.gradient_periodic(operator),
        }
        for operator in GRADIENTS
    },
}

IN_RESULT: Final = {operator: rows.forward_in_result(operator) for operator in FORWARD}
RECOMPUTED: Final = {
    "columns": columns.forward_columns("softmax", is_kept=False),
    "periodic": columns.forward_periodic("softmax", is_kept=False),
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
        return Program()
    if operator in GRADIENTS and problem.inner == 1 and layouts.few(problem.outer, problem.n):
        return fusing.program(operator, fusing.plain_rows(problem))
    steps = ProgramSteps(problem)
    (_forward if operator in FORWARD else _gradient)(steps, operator)
    return steps


def _forward(steps: ProgramSteps, operator: str) -> None:
    problem, kernels = steps.problem, PLAIN[operator]
    layout = layouts.forward_layout(problem, kernels, operator == "log_softmax")
    stream = layouts.row_streams(problem, layout, "y") and streams(layouts.weight(problem))
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
    kept = operator == "softmax"
    side_by_side = {"columns": loops.lanes, "periodic": problem.inner}.get(layout, 0)
    if kept and not layouts.keeps_column(problem.n, side_by_side):
        kernel, kept = RECOMPUTED[layout], False
    # Rows through the cache: lines of the result are fetched early. Exponentials wait there where they lose no digits.
    if layout == "rows" and not stream and (not kept or problem["y"].dtype == steps.workspace.precision):
        kernel = IN_RESULT[operator]
    steps.add_loops(loops, kernel, **_memory(steps, kernel, layout, loops.lanes, kept))


def _memory(steps: ProgramSteps, kernel: Kernel, layout: str, width: int, kept: bool = False) -> dict[str, Any]:
    """A kernel's private memory by parameter: exponentials, if they are kept, tiles, short rows that are put together.

    width: lanes.
    """
    n, private = steps.problem.n, steps.workspace.private
    size, of_row, of_strip = n * steps.problem.inner, (n + width) * kept, n * width * kept
    period = steps.problem.inner * width
    sizes = {
        "rows": {"e": of_row, "done": of_row, "buffer": buffer_size(steps.item)},
        "columns": {"e": of_strip, "done": of_strip},
        "groups": {"tile": group_tiles(width), "e": of_row * width},
        "periodic": {
            "e": (size + period) * kept,
            **dict.fromkeys(("rest", "largest", "total"), period),
            **dict.fromkeys(("first", "second"), 2 * period),
        },
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
    steps.add_loops(loops, kernel, **memory, **_memory(steps, kernel, layout, loops.lanes))
