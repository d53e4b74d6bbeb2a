"""Softmax, log-softmax and their gradients: chooses the kernels for a shape, and reserves their working memory.

Each layout of opgrad.cpu.programs.layout has a file with its plain kernels, and with its kernels in place, which
programs of stages use. The files fused_*.py make the kernels for calls with attributes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.kernels.fused.form import Form, GradientForm
from opgrad.cpu.kernels.fused.operands import Source, Switches
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops.columns import nothing
from opgrad.cpu.kernels.loops.transpose import group_tiles, tile_size
from opgrad.cpu.kernels.softmax import (
    columns,
    fused_columns,
    fused_gradients,
    groups,
    rows,
    split,
    transposed,
    variants,
)
from opgrad.cpu.kernels.softmax.reductions import GRADIENTS
from opgrad.cpu.programs.fused import fusing, stages
from opgrad.cpu.programs.layout import (
    Loops,
    forward_layout,
    forward_streams,
    gradient_limits,
    gradient_streams,
    is_sixteen_bits,
    keeps_column,
    layout_of,
    loops_of,
    precision,
    row_streams,
    spare_columns,
)
from opgrad.cpu.programs.program import Program
from opgrad.cpu.programs.workspace import Workspace
from opgrad.native import background

InPlace = Mapping[bool, Mapping[str, Kernel]]
SOFTMAX = {
    "rows": rows.softmax_rows,
    "columns": columns.softmax_columns,
    "transposed": transposed.softmax_transposed,
    "groups": groups.softmax_groups,
    "split": split.forward(Form("softmax", "split"), is_plain=True),
}
LOG_SOFTMAX = {
    "rows": rows.log_softmax_rows,
    "columns": columns.log_softmax_columns,
    "transposed": transposed.log_softmax_transposed,
    "groups": groups.log_softmax_groups,
    "split": split.forward(Form("log_softmax", "split"), is_plain=True),
}


def _in_place(operator: str, of_lines: Callable[..., Any], of_group: Callable[..., Any]) -> InPlace:
    """The kernels in place, which work on buffers, by whether sums are exact, and then by layout."""

    def kernels(exact: bool) -> dict[str, Kernel]:
        variant = variants.COLUMNS_IN_PLACE[exact]
        lines = of_lines(variant, nothing)
        return {
            "rows": rows.forward_in_place(operator, exact),
            "split": split.forward_in_place(operator, exact),
            "columns": columns.columns_in_place(lines),
            "transposed": transposed.transposed_in_place(lines),
            "groups": groups.groups_in_place(of_group(variant)),
        }

    return {exact: kernels(exact) for exact in (False, True)}


SOFTMAX_IN_PLACE = _in_place("softmax", columns.softmax_lines, groups.softmax_group)
LOG_SOFTMAX_IN_PLACE = _in_place("log_softmax", columns.log_softmax_lines, groups.log_softmax_group)


def _gradient_kernels(operator: str) -> tuple[dict[str, Any], ...]:
    """The plain kernels of dx = formula(dy, y, sum(term(dy, y))), and those in place."""
    term, formula = GRADIENTS[operator]
    plain = {
        "rows": rows.gradient_rows(operator),
        "columns": columns.gradient_columns(term, formula),
        "transposed": transposed.gradient_transposed(term, formula),
        "split": split.gradient(GradientForm(operator, "split")),
    }
    in_place = {
        "rows": rows.gradient_in_place(operator),
        "columns": columns.gradient_columns_in_place(term, formula),
        "transposed": transposed.gradient_transposed_in_place(term, formula),
    }
    return plain, in_place


SOFTMAX_GRAD, SOFTMAX_GRAD_IN_PLACE = _gradient_kernels("softmax_grad")
LOG_SOFTMAX_GRAD, LOG_SOFTMAX_GRAD_IN_PLACE = _gradient_kernels("log_softmax_grad")


def _of_columns(form: GradientForm) -> tuple[Kernel, ...]:
    return fused_gradients.of_columns(form, GRADIENTS[form.operator])


FUSED: Mapping[tuple[str, str], Callable[[Any], tuple[Kernel, ...]]] = {
    ("softmax", "rows"): lambda form: (rows.forward_with_attributes(form),),
    ("softmax", "columns"): fused_columns.softmax,
    ("softmax", "split"): split.forward,
    ("log_softmax", "split"): split.forward,
    ("log_softmax", "rows"): lambda form: (rows.forward_with_attributes(form),),
    ("log_softmax", "columns"): fused_columns.log_softmax,
    ("softmax_grad", "rows"): lambda form: (rows.gradient_with_attributes(form),),
    ("softmax_grad", "columns"): _of_columns,
    ("softmax_grad", "split"): split.gradient,
    ("log_softmax_grad", "split"): split.gradient,
    ("log_softmax_grad", "rows"): lambda form: (rows.gradient_with_attributes(form),),
    ("log_softmax_grad", "columns"): _of_columns,
}


@cache
def fused(form: Any) -> tuple[Kernel, ...]:
    """The kernels, in order, of calls with attributes that have this form (opgrad.cpu.kernels.fused.form)."""
    kernels = FUSED[form.operator, form.layout](form)
    for number, each in enumerate(kernels):
        each.made = __name__, fused.__name__, (form,), number
    return kernels


def softmax(problem: Problem) -> Program:
    return _forward_of("softmax", problem, SOFTMAX, SOFTMAX_IN_PLACE)


def log_softmax(problem: Problem) -> Program:
    return _forward_of("log_softmax", problem, LOG_SOFTMAX, LOG_SOFTMAX_IN_PLACE)


def softmax_grad(problem: Problem) -> Program:
    return _gradient_of("softmax_grad", problem, SOFTMAX_GRAD, SOFTMAX_GRAD_IN_PLACE)


def log_softmax_grad(problem: Problem) -> Program:
    return _gradient_of("log_softmax_grad", problem, LOG_SOFTMAX_GRAD, LOG_SOFTMAX_GRAD_IN_PLACE)


def _forward_of(operator: str, problem: Problem, plain: Mapping[str, Any], in_place: InPlace) -> Program:
    if not problem.is_general:
        return _forward(problem, plain, operator == "log_softmax")
    by_stages = partial(stages.forward, problem, in_place[stages.is_exact(problem)])
    return background.chosen(fusing.forward(operator, problem, fused), by_stages)


def _gradient_of(operator: str, problem: Problem, plain: Mapping[str, Any], in_place: Mapping[str, Kernel]) -> Program:
    if not problem.is_general:
        return _gradient(problem, plain)
    return background.chosen(fusing.gradient(operator, problem, fused), partial(stages.gradient, problem, in_place))


def _forward(problem: Problem, kernels: Mapping[str, Any], logarithm: bool) -> Program:
    if not problem.outer * problem.n * problem.inner:
        return Program(())
    layout = forward_layout(problem, kernels, logarithm)
    stream = forward_streams(problem) and row_streams(problem, layout, "y")
    loops = loops_of(problem, layout, spare_columns(problem, "y", stream), stream, x=problem["x"], y=problem["y"])
    workspace = Workspace(precision(problem))
    if layout == "split":
        return _split(problem, kernels[layout], loops, ("x",), "y")
    memory = _private(workspace, layout, problem.n) if kernels[layout].takes_private else {}
    return Program((loops.step(kernels[layout], **memory),), workspace)


def _private(workspace: Workspace, layout: str, n: int) -> dict[str, Any]:
    """The private memory of a forward kernel: tiles of transposed rows, the exponentials of this row and the last."""
    width = vector_lanes(workspace.precision)
    if layout == "transposed":
        return {"tile": workspace.private(tile_size(n, width))} | _waiting(workspace, n)
    if layout == "groups":
        return {"tile": workspace.private(group_tiles(width)), "e": workspace.private((n + width) * width)}
    if layout == "rows":
        return {"e": workspace.private(n + width), "done": workspace.private(n + width)}
    keep = keeps_column(n, width)
    strip = n * width if keep else width
    return {"e": workspace.private(strip), "done": workspace.private(strip), "keep": keep}


def _combining(workspace: Workspace) -> dict[str, Any]:
    return {"buffer": workspace.private(combine.size(np.dtype(workspace.precision).itemsize))}


def _waiting(workspace: Workspace, n: int) -> dict[str, Any]:
    """The private buffer in which a group of rows waits to be written."""
    size = combine.group_size(n * vector_lanes(workspace.precision), np.dtype(workspace.precision).itemsize)
    return {"buffer": workspace.private(size)}


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
    sixteen_bits = is_sixteen_bits(problem["y"])
    layout = layout_of(problem, kernels, gradient_limits(sixteen_bits))
    # Short float32 rows are combined in a buffer instead: there is little arithmetic behind which lines could be
    # fetched.
    stream = stream and (not sixteen_bits or row_streams(problem, layout, "dx"))
    operands = {name: problem[name] for name in ("dy", "y", "dx")}
    loops = loops_of(problem, layout, spare_columns(problem, "dx", stream), stream, **operands)
    if layout == "split":
        return _split(problem, kernels[layout], loops, ("dy", "y"), "dx")
    memory = {}
    if layout == "rows":
        memory = _combining(workspace)
    elif layout == "transposed":
        size = tile_size(problem.n, vector_lanes(workspace.precision))
        memory = {"dy_tile": workspace.private(size), "y_tile": workspace.private(size)}
        memory |= _waiting(workspace, problem.n)
    return Program((loops.step(kernels[layout], **memory),), workspace)
