"""Softmax, log-softmax and their gradients: chooses the kernels for a shape, and reserves their working memory.

Each layout of opgrad.cpu.programs.layout has a file in cpu/kernels/softmax, with its plain kernels, its kernels in
place, which programs of stages use, and its kernels for calls with attributes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.kernels.fused.form import Form, GradientForm
from opgrad.cpu.kernels.fused.operands import Source, Switches
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops.rows import AHEAD
from opgrad.cpu.kernels.loops.transpose import group_tiles, tile_size
from opgrad.cpu.kernels.softmax import columns, groups, panels, rows, split, transposed
from opgrad.cpu.programs.fused import formulas, fusing, stages
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

VARIABLE: Final = "OPGRAD_FUSION"
FORWARD: Final = ("softmax", "log_softmax")
GRADIENTS: Final = ("softmax_grad", "log_softmax_grad")
# Of each operator the plain kernels by layout: one, or those of several steps.
PLAIN: Final[Mapping[str, Mapping[str, Any]]] = {
    "softmax": {
        "rows": rows.softmax_rows,
        "columns": columns.softmax_columns,
        "transposed": transposed.forward_transposed("softmax"),
        "groups": groups.softmax_groups,
        "split": split.forward(Form("softmax", "split"), is_plain=True),
    },
    "log_softmax": {
        "rows": rows.log_softmax_rows,
        "columns": columns.log_softmax_columns,
        "transposed": transposed.forward_transposed("log_softmax"),
        "groups": groups.log_softmax_groups,
        "split": split.forward(Form("log_softmax", "split"), is_plain=True),
    },
    **{
        operator: {
            "rows": rows.gradient_rows(operator),
            "columns": columns.gradient_columns(operator),
            "transposed": transposed.gradient_transposed(operator),
            "split": split.gradient(GradientForm(operator, "split")),
        }
        for operator in GRADIENTS
    },
}

PANELS: Final = {operator: panels.forward_panels(operator) for operator in FORWARD}


@cache
def in_place(operator: str, exact: bool = False) -> Mapping[str, Kernel]:
    """The kernels that work on buffers, by layout. exact: whether sums keep what is rounded off their terms."""
    both = {"rows": rows, "columns": columns, "transposed": transposed}
    if operator in GRADIENTS:
        return {name: layout.gradient_in_place(operator) for name, layout in both.items()}
    layouts = {**both, "groups": groups, "split": split}
    return {name: layout.forward_in_place(operator, exact) for name, layout in layouts.items()}


@cache
def fused(form: Form | GradientForm) -> tuple[Kernel, ...]:
    """The kernels, in order, of calls with attributes that have this form (opgrad.cpu.kernels.fused.form)."""
    forward, layout = form.operator in FORWARD, {"rows": rows, "columns": columns}.get(form.layout)
    if layout is None:
        return split.forward(form) if forward else split.gradient(form)
    return ((layout.forward_with_attributes if forward else layout.gradient_with_attributes)(form),)


def compiles_forms() -> bool:
    """Whether kernels are compiled for the form of a call: OPGRAD_FUSION is "now", the default, not "never".

    Raises ValueError for any other value.
    """
    choice = os.environ.get(VARIABLE, "now")
    if choice not in ("now", "never"):
        raise ValueError(f"{VARIABLE} is {choice!r}, expected one of now, never")
    return choice == "now"


def softmax(problem: Problem) -> Program:
    return _general("softmax", problem) if problem.is_general else _forward(problem, "softmax")


def log_softmax(problem: Problem) -> Program:
    return _general("log_softmax", problem) if problem.is_general else _forward(problem, "log_softmax")


def softmax_grad(problem: Problem) -> Program:
    return _general("softmax_grad", problem) if problem.is_general else _gradient(problem, PLAIN["softmax_grad"])


def log_softmax_grad(problem: Problem) -> Program:
    name = "log_softmax_grad"
    return _general(name, problem) if problem.is_general else _gradient(problem, PLAIN[name])


def _general(operator: str, problem: Problem) -> Program:
    found = fusing.program(operator, problem, fused) if compiles_forms() else None
    if operator in GRADIENTS:
        return found or stages.gradient(problem, in_place(operator))
    return found or stages.forward(problem, in_place(operator, formulas.is_exact(problem)))


def _forward(problem: Problem, operator: str) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    kernels = PLAIN[operator]
    layout = forward_layout(problem, kernels, operator == "log_softmax")
    stream = forward_streams(problem) and row_streams(problem, layout, "y")
    loops = loops_of(problem, layout, "y", stream, x=problem["x"], y=problem["y"])
    if layout == "split":
        return _split(problem, kernels[layout], loops, ("x",), "y")
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


def _split(problem: Problem, kernels: Sequence[Kernel], loops: Loops, operands: Sequence[str], result: str) -> Program:
    workspace, stream = Workspace(precision(problem)), loops.arguments["stream"]
    sources = tuple(Source(problem[name], problem.outer, 0, problem[name].outer, 1) for name in operands)
    arguments = {"sources": sources, result: loops.arguments[result], "switches": Switches(0, stream), "stream": stream}
    arguments |= dict.fromkeys(("numbers", "e", "kept"), 0) | {"results": None, "dropout": None}
    return Program(fusing.split_steps(problem, kernels, workspace, loops.units, arguments), workspace)


def _gradient(problem: Problem, kernels: Mapping[str, Any]) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    stream, workspace = gradient_streams(problem), Workspace(precision(problem))
    layout, ahead = gradient_layout(problem, kernels), AHEAD if stream else 0
    # Short float32 rows are combined in a buffer instead: there is little arithmetic behind which lines could be
    # fetched.
    stream = stream and (not is_sixteen_bits(problem["y"]) or row_streams(problem, layout, "dx"))
    operands = {name: problem[name] for name in ("dy", "y", "dx")}
    loops = loops_of(problem, layout, "dx", stream, gradient_lanes(problem, layout), **operands)
    if layout == "split":
        return _split(problem, kernels[layout], loops, ("dy", "y"), "dx")
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
