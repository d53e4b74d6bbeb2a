"""Finds the form of a softmax call with attributes, and makes the program of the kernel that is compiled for it.

Rare calls have no such kernel and run as programs of stages (opgrad.cpu.programs.fused.stages). A call is rare if an
operand's outer axes make three loops or more or its vectors are not contiguous, if its rows are short, or if it has too
many post-ops.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from opgrad.contract import layout
from opgrad.contract.problem import Problem
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.compiler.parameters import Columns, Rows, Strips
from opgrad.cpu.kernels.fused.chain import Link
from opgrad.cpu.kernels.fused.form import Form, GradientForm
from opgrad.cpu.kernels.fused.operands import (
    ColumnResults,
    Cut,
    Dropout,
    Memory,
    Results,
    Source,
    Switches,
)
from opgrad.cpu.kernels.loops import combine
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.softmax.split import STATS
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.fused import links
from opgrad.cpu.programs.fused.links import Formula
from opgrad.cpu.programs.layout import few, in_place_limits, keeps_column, spare_columns
from opgrad.cpu.programs.program import Program, Step, shared_out
from opgrad.cpu.programs.workspace import Workspace
from opgrad.fused.primitive import STATE, gradient_name
from opgrad.random import keep_threshold

KernelsOf = Callable[[Any], Sequence[Kernel]]  # from a form to its kernels
MOST_WORDS: Final = 36  # of operands, five each, and numbers, two a link; with all other words a kernel takes up to 64


class Lying(NamedTuple):
    """An operand's place at each outer index, its stride along n, and whether it is contiguous along vectors."""

    source: Source
    along: bool
    outer_loops: int


class Rare(Exception):
    """Raised for a call that has no kernel of this kind, and runs as a program of stages."""


def lying(problem: Problem, first: str, name: str) -> Lying:
    """Where the operand lies in memory. Raises Rare if kernels cannot read it there."""
    spec, order = problem.specs[name], problem.orders[first]
    places = [place for place, axis in enumerate(order) if axis in problem.attributes["axis"]]
    start, stop = places[0], places[-1] + 1
    outer, along_n, inner = (_steps(spec, group) for group in (order[:start], order[start:stop], order[stop:]))
    if len(outer) > 2 or len(along_n) > 1 or len(inner) > 1:
        raise Rare
    vectors, count = (inner[0], problem.inner) if problem.inner > 1 else (along_n[0], problem.n)
    if vectors[1] not in (0, 1) and count > 1:
        raise Rare
    far, period = (outer[0][1], outer[1][0]) if len(outer) == 2 else (0, max(problem.outer, 1))
    operand = replace(problem[name], dtype=links.storage(spec))
    along = vectors[1] == 1 or count == 1
    return Lying(Source(operand, period, far, outer[-1][1], along_n[0][1]), along, len(outer))


def _steps(spec: Any, axes: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of the fewest loops over these axes. Raises Rare for strides of no whole number of elements."""
    found = layout.steps(spec.shape, spec.strides, axes)
    if any(stride % spec.dtype.itemsize for _, stride in found):
        raise Rare
    return [(size, stride // spec.dtype.itemsize) for size, stride in found]


def rows_of(problem: Problem, first: str, name: str) -> Rows | None:
    """A result as rows; None if it is not wanted."""
    if name not in problem.specs:
        return None
    found = lying(problem, first, name)
    if not found.along or found.outer_loops > 1:
        raise Rare
    return Rows(found.source.data, found.source.near)


def columns_of(problem: Problem, first: str, name: str) -> Columns | None:
    """A result as columns; None if it is not wanted."""
    if name not in problem.specs:
        return None
    found = lying(problem, first, name)
    if not found.along or found.outer_loops > 1:
        raise Rare
    return Columns(found.source.data, found.source.near, found.source.step)


# --- forward ----------------------------------------------------------------------------------------------------------


def forward(operator: str, problem: Problem, kernels_of: KernelsOf) -> Program | None:
    """The program of a call of softmax or log_softmax; None if it is rare."""
    if not problem.outer * problem.n * problem.inner:
        return None
    try:
        return _forward(operator, problem, kernels_of)
    except Rare:
        return None


def _forward(operator: str, problem: Problem, kernels_of: KernelsOf) -> Program:
    groups, drops = (links.before(problem), links.after(problem)), bool(problem.attributes["dropout"])
    if problem.attributes["dropout"] == 0.0 and "mask" in problem.specs:
        raise Rare  # the mask is a result, but with probability 0 no link makes one
    precision = links.precision_of(problem, "x", ("y",))
    layout = layout_of(problem, precision, in_place_limits(vector_lanes(precision)).grouped)
    wanted = tuple(name for name in ("stats", "saved", "mask") if name in problem.specs)
    places = _places(problem, "x", ("x",), groups, drops, precision)
    form = Form(
        operator,
        layout,
        *_links(groups, places),
        drops,
        wanted,
        links.is_exact(problem),
    )
    sources = tuple(each.source for each in places.values())
    return _forward_program(problem, form, kernels_of(form), sources, _numbers(groups), precision)


def _forward_program(
    problem: Problem, form: Form, kernels: Sequence[Kernel], sources: Sequence[Source], numbers: Sequence[float],
    precision: str,
) -> Program:  # fmt: skip
    workspace, arguments = _arguments(problem, form, sources, numbers, precision)
    arguments["switches"] = Switches(problem.attributes["inf_as_zero"], partition.streams(problem.bytes))
    arguments["results"] = _results(problem, form)
    units = _loops(problem, form.layout, "x", "y", precision, arguments)
    if form.layout == "split":
        steps = split_steps(problem, kernels, workspace, units, arguments)
    else:
        steps = [shared_out(kernels[0], units, problem.bytes / units, arguments)]
    return Program(steps, workspace, name=f"fused, {form.layout}, {precision}")


def _results(problem: Problem, form: Form) -> Results | ColumnResults:
    stats = problem["stats"] if "stats" in problem.specs else None
    if form.layout == "columns":
        return ColumnResults(*(columns_of(problem, "x", name) for name in ("saved", "mask")), stats)
    return Results(*(rows_of(problem, "x", name) for name in ("saved", "mask")), stats and Rows(stats, 1))


def split_steps(
    problem: Problem, kernels: Sequence[Kernel], workspace: Workspace, units: int, arguments: dict[str, Any]
) -> list[Step]:
    """The steps over blocks of rows; of three steps the middle one is over rows, each of which is a part of its own."""
    sizes = {"partial": units} if len(kernels) == 2 else {"stats": STATS * units, "total": STATS * problem.outer}
    arguments |= {name: workspace.shared(count, "float64") for name, count in sizes.items()}
    arguments["cut"] = Cut(units // problem.outer, problem.n)
    steps = [shared_out(kernel, units, problem.bytes / units, arguments) for kernel in kernels]
    if len(kernels) == 3:
        steps[1] = Step(kernels[1], problem.outer, arguments)
    return steps


# --- backward ---------------------------------------------------------------------------------------------------------


def gradient(operator: str, problem: Problem, kernels_of: KernelsOf) -> Program | None:
    """The program of a call of softmax_grad or log_softmax_grad; None if it is rare."""
    if not problem.outer * problem.n * problem.inner:
        return None
    try:
        return _gradient(operator, problem, kernels_of)
    except Rare:
        return None


def _gradient(operator: str, problem: Problem, kernels_of: KernelsOf) -> Program:
    groups, drops = links.gradient(problem), bool(problem.attributes["dropout"])
    if any(gradient_name(name) in problem.specs for name in links.operands(groups[2])):
        raise Rare
    precision = links.precision_of(problem, "dy", ("y", "dx"))
    layout = layout_of(problem, precision, in_place_limits(vector_lanes(precision)).transposed)
    places = _places(problem, "dy", ("dy", "y"), groups, drops, precision)
    form = GradientForm(operator, layout, *_links(groups, places), drops)
    sources = tuple(each.source for each in places.values())
    return _gradient_program(problem, form, kernels_of(form), sources, _numbers(groups), precision)


def _gradient_program(
    problem: Problem, form: GradientForm, kernels: Sequence[Kernel], sources: Sequence[Source],
    numbers: Sequence[float], precision: str,
) -> Program:  # fmt: skip
    workspace, arguments = _arguments(problem, form, sources, numbers, precision)
    arguments["stream"] = partition.streams(problem.bytes)
    units = _loops(problem, form.layout, "dy", "dx", precision, arguments)
    if form.layout == "split":
        steps = split_steps(problem, kernels, workspace, units, arguments)
    else:
        steps = [shared_out(kernels[0], units, problem.bytes / units, arguments)]
    return Program(steps, workspace, name=f"fused, {form.layout}, {precision}")


# --- what they share --------------------------------------------------------------------------------------------------


def _places(
    problem: Problem, first: str, own: Sequence[str], groups: Sequence[Sequence[Formula]], drops: bool, precision: str
) -> dict[str, Lying]:
    """Where each operand lies, in the order in which forms count them. Raises Rare for what kernels do not take."""
    order, formulas = problem.orders[first], [each for group in groups for each in group]
    found = {name: lying(problem, first, name) for name in (*own, *links.operands(formulas))}
    if not all(found[name].along for name in own):
        raise Rare
    if drops and order != tuple(range(len(order))):
        raise Rare  # dropout counts elements in C order, which is not their order in memory
    if precision != "float64" and any(each.source.data.dtype == "float64" for each in found.values()):
        raise Rare  # one float64 array would make the whole kernel compute in float64
    if 5 * len(found) + 2 * len(formulas) > MOST_WORDS:
        raise Rare
    return found


def _links(groups: Sequence[Sequence[Formula]], places: Mapping[str, Lying]) -> Iterator[tuple[Link, ...]]:
    return (links.links(group, lambda name: places[name].along) for group in groups)


def _numbers(groups: Sequence[Sequence[Formula]]) -> tuple[float, ...]:
    return links.numbers(each for group in groups for each in group)


def layout_of(problem: Problem, precision: str, shortest: int) -> str:
    """The layout of a fused kernel, if rows are longer than the shortest. Raises Rare for one that has none."""
    if problem.inner > 1:
        if not keeps_column(problem.n, vector_lanes(precision)):
            raise Rare
        return "columns"
    if few(problem.outer, problem.n):
        return "split"
    if problem.n <= shortest:
        raise Rare
    return "rows"


def _arguments(
    problem: Problem, form: Any, sources: Sequence[Source], numbers: Sequence[float], precision: str
) -> tuple[Workspace, dict[str, Any]]:
    """Working memory, and the arguments that all fused kernels take."""
    width, workspace = vector_lanes(precision), Workspace(precision)
    size, buffer = (problem.n * width, 0) if form.layout == "columns" else (problem.n + width, combine.size(4))
    sizes = size, size, size if form.drops else 0, buffer
    if form.layout == "split":
        sizes = BLOCK, 0, BLOCK if form.drops else 0, 0
    memory = Memory(*(workspace.private(each) for each in sizes))
    probability = problem.attributes["dropout"]
    dropout = Dropout(problem[STATE], keep_threshold(probability)) if form.drops else Dropout(None, 0)
    found = {"n": problem.n, "sources": tuple(sources), "numbers": tuple(numbers) or 0, "dropout": dropout}
    return workspace, {**found, "memory": memory, "e": memory.e, "kept": memory.kept}


def _loops(problem: Problem, layout: str, first: str, result: str, precision: str, arguments: dict[str, Any]) -> int:
    """How many units there are. Adds the arguments about units and the result to `arguments`."""
    if layout == "columns":
        strips = partition.count(problem.inner + spare_columns(problem, result), vector_lanes(precision))
        arguments |= {"strips": Strips(strips, problem.inner), result: columns_of(problem, first, result)}
        return problem.outer * strips
    arguments[result] = rows_of(problem, first, result)
    return problem.outer * (partition.count(problem.n, BLOCK) if layout == "split" else 1)
