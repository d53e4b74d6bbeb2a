"""Finds the form of a softmax call with attributes, and makes the program of the kernel that is compiled for it.

Rare calls have no such kernel and run as programs of stages (opgrad.cpu.programs.fused.stages). A call is rare if an
operand's outer axes make three loops or more or its vectors are not contiguous, if its rows are short, or if it has too
many post-ops.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from opgrad.contract import arrangement
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.decorators import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Columns, Rows
from opgrad.cpu.kernels.fused.chain import Formula
from opgrad.cpu.kernels.fused.form import Form, GradientForm
from opgrad.cpu.kernels.fused.operands import (
    ColumnResults,
    DropoutState,
    RowCut,
    RowMemory,
    RowResults,
    Source,
    Switches,
)
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.softmax.split import STATS
from opgrad.cpu.programs.fused import formulas
from opgrad.cpu.programs.layout import keeps_column, layout_in_buffers, spare_columns, units_of
from opgrad.cpu.runtime import partition
from opgrad.cpu.runtime.program import Program, Step, shared_out
from opgrad.cpu.runtime.workspace import Workspace
from opgrad.ops.reference.primitive import STATE, Applied, gradient_name
from opgrad.ops.reference.random import keep_threshold

KernelsOf = Callable[[Any], Sequence[Kernel]]  # from a form to its kernels
# Words of operands, five each, and numbers, two a formula; with all other words a kernel takes up to 64.
MOST_WORDS: Final = 36


class Placement(NamedTuple):
    """An operand's place at each outer index, its stride along n, and whether it is contiguous along vectors."""

    source: Source
    along: bool
    outer_loops: int


class Rare(Exception):
    """Raised for a call that has no kernel of this kind, and runs as a program of stages."""


def placement_of(problem: Problem, name: str) -> Placement:
    """Where the operand lies in memory. Raises Rare if kernels cannot read it there."""
    spec, order = problem.specs[name], problem.orders["dy" if "dy" in problem.specs else "x"]
    places = [place for place, axis in enumerate(order) if axis in problem.attributes["axis"]]
    start, stop = places[0], places[-1] + 1
    outer, along_n, inner = (_steps(spec, group) for group in (order[:start], order[start:stop], order[stop:]))
    if len(outer) > 2 or len(along_n) > 1 or len(inner) > 1:
        raise Rare
    vectors, count = (inner[0], problem.inner) if problem.inner > 1 else (along_n[0], problem.n)
    if vectors[1] not in (0, 1) and count > 1:
        raise Rare
    far, period = (outer[0][1], outer[1][0]) if len(outer) == 2 else (0, max(problem.outer, 1))
    operand = replace(problem[name], dtype=formulas.storage(spec))
    along = vectors[1] == 1 or count == 1
    return Placement(Source(operand, period, far, outer[-1][1], along_n[0][1]), along, len(outer))


def _steps(spec: Any, axes: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of the fewest loops over these axes. Raises Rare for strides of no whole number of elements."""
    found = arrangement.steps(spec.shape, axes, spec.strides)
    if any(stride % spec.dtype.itemsize for _, stride in found):
        raise Rare
    return [(size, stride // spec.dtype.itemsize) for size, stride in found]


# --- the program ------------------------------------------------------------------------------------------------------


def program(operator: str, problem: Problem, kernels_of: KernelsOf) -> Program | None:
    """The program of a call of softmax, log_softmax or one of their gradients; None if it is rare."""
    if not problem.outer * problem.n * problem.inner:
        return None
    try:
        return _program(operator, problem, kernels_of)
    except Rare:
        return None


def _program(operator: str, problem: Problem, kernels_of: KernelsOf) -> Program:
    own, result = (("dy", "y"), "dx") if "dy" in problem.specs else (("x",), "y")
    precision = formulas.precision_of(problem, (*own, result))
    layout = layout_of(problem, precision)
    groups = formulas.of_call(problem)
    places = _places(problem, own, groups, precision)
    form = _form(
        operator, problem, layout, [formulas.for_kernels(each, lambda name: places[name].along) for each in groups]
    )
    kernels, stream = kernels_of(form), partition.streams(problem.bytes)
    workspace, arguments = _arguments(problem, form, precision)
    arguments["sources"] = tuple(each.source for each in places.values())
    arguments["numbers"] = formulas.numbers(each for group in groups for each in group) or 0
    arguments |= {"stream": stream, "switches": Switches(problem.attributes.get("inf_as_zero", 0), stream)}
    arguments |= {"results": _results(problem, layout), result: result_of(problem, result, layout)}
    units, sizes = units_of(problem, layout, vector_lanes(precision), spare_columns(problem, result, stream))
    arguments |= sizes
    if layout == "split":
        steps = split_steps(problem, kernels, workspace, units, arguments)
    else:
        steps = [shared_out(kernels[0], units, problem.bytes / units, arguments)]
    return Program(steps, workspace, name=f"fused, {layout}, {precision}")


def _form(operator: str, problem: Problem, layout: str, groups: Sequence[tuple[Formula, ...]]) -> Form | GradientForm:
    """The form of a call with these groups of formulas. Raises Rare for results that its kernels do not have."""
    probability = problem.attributes["dropout"]
    if "dy" in problem.specs:
        if any(gradient_name(name) in problem.specs for name in problem.specs):
            raise Rare
        return GradientForm(operator, layout, *groups, bool(probability))
    if probability == 0.0 and "mask" in problem.specs:
        raise Rare  # with probability 0 no formula makes the mask
    wanted = tuple(name for name in ("stats", "saved", "mask") if name in problem.specs)
    return Form(operator, layout, *groups, bool(probability), wanted, formulas.is_exact(problem))


def _results(problem: Problem, layout: str) -> RowResults | ColumnResults:
    """The results besides y of a forward call."""
    saved, mask, stats = (result_of(problem, name, layout) for name in ("saved", "mask", "stats"))
    return (ColumnResults if layout == "columns" else RowResults)(saved, mask, stats)


def result_of(problem: Problem, name: str, layout: str) -> Any:
    """A result as columns or rows, the log-sum-exp as numbers one behind the other; None if it is not wanted."""
    if name not in problem.specs:
        return None
    if name == "stats":
        return problem[name] if layout == "columns" else Rows(problem[name], 1)
    source, along, outer_loops = placement_of(problem, name)
    if not along or outer_loops > 1:
        raise Rare
    if layout == "columns":
        return Columns(source.data, source.near, source.step)
    return Rows(source.data, source.near)


def _places(
    problem: Problem, own: Sequence[str], groups: Sequence[Sequence[Applied]], precision: str
) -> dict[str, Placement]:
    """Where each operand lies, in the order in which forms count them. Raises Rare for what kernels do not take."""
    order, applied = problem.orders[own[0]], [each for group in groups for each in group]
    found = {name: placement_of(problem, name) for name in (*own, *formulas.operands(applied))}
    if not all(found[name].along for name in own):
        raise Rare
    if problem.attributes["dropout"] and order != tuple(range(len(order))):
        raise Rare  # dropout counts elements in C order, which is not their order in memory
    if precision != "float64" and any(each.source.data.dtype == "float64" for each in found.values()):
        raise Rare  # one float64 array would make the whole kernel compute in float64
    if 5 * len(found) + 2 * len(applied) > MOST_WORDS:
        raise Rare
    return found


def layout_of(problem: Problem, precision: str) -> str:
    """The layout of a fused kernel. Raises Rare for rows that stages transpose or group, and for long columns."""
    width, layouts = vector_lanes(precision), ("split",) if "dy" in problem.specs else ("split", "groups")
    found = layout_in_buffers(problem, layouts, width)
    if found in ("transposed", "groups") or (found == "columns" and not keeps_column(problem.n, width)):
        raise Rare
    return found


def _arguments(problem: Problem, form: Any, precision: str) -> tuple[Workspace, dict[str, Any]]:
    """Working memory, and the arguments about it."""
    width, workspace = vector_lanes(precision), Workspace(precision)
    size, buffer = (problem.n * width, 0) if form.layout == "columns" else (problem.n + width, combine.size(4))
    sizes = size, size, size if form.drops else 0, buffer
    if form.layout == "split":
        sizes = BLOCK, 0, BLOCK if form.drops else 0, 0
    memory = RowMemory(*(workspace.private(each) for each in sizes))
    probability = problem.attributes["dropout"]
    dropout = DropoutState(problem[STATE], keep_threshold(probability)) if form.drops else DropoutState(None, 0)
    return workspace, {"n": problem.n, "dropout": dropout, "memory": memory, "e": memory.e, "kept": memory.kept}


def split_steps(
    problem: Problem, kernels: Sequence[Kernel], workspace: Workspace, units: int, arguments: dict[str, Any]
) -> list[Step]:
    """The steps over blocks of rows; of three steps the middle one is over rows, each of which is a part of its own."""
    sizes = {"partial": units} if len(kernels) == 2 else {"stats": STATS * units, "total": STATS * problem.outer}
    arguments |= {name: workspace.shared(count, "float64") for name, count in sizes.items()}
    arguments["cut"] = RowCut(units // problem.outer, problem.n)
    steps = [shared_out(kernel, units, problem.bytes / units, arguments) for kernel in kernels]
    if len(kernels) == 3:
        steps[1] = Step(kernels[1], problem.outer, arguments)
    return steps
