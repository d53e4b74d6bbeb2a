"""Makes the program of a softmax call with attributes: finds its form, and where the kernel of that form finds arrays.

A kernel reads an array where it lies if its vectors are contiguous, or one number each, and takes any number of loops
over the other axes. Other arrays are copied first, in the order of the loops, without the axes along which they repeat;
results that a kernel cannot write are copied last.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

from opgrad.contract import DTYPES, Spec, arrangement
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Columns, Rows
from opgrad.cpu.kernels.fused import columns, rows, split, transposed
from opgrad.cpu.kernels.fused.chain import ALONG, Formula
from opgrad.cpu.kernels.fused.copying import copy_runs
from opgrad.cpu.kernels.fused.form import Form, GradientForm
from opgrad.cpu.kernels.fused.operands import (
    ALL_ARE_KEPT,
    ColumnResults,
    DropoutState,
    Memory,
    RowResults,
    Source,
)
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.rows import buffer_size
from opgrad.cpu.kernels.softmax.split import STATS
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.fused import formulas
from opgrad.cpu.programs.layout import Limits, gradient_limits, keeps_column, layout_of, spare_columns, units_of
from opgrad.cpu.runtime.program import Program, Scratch, Step, shared_out, streams
from opgrad.ops.reference.primitive import STATE, Applied, gradient_name
from opgrad.ops.reference.random import keep_threshold

LAYOUTS: Final[Mapping[str, Any]] = {"rows": rows, "columns": columns, "split": split, "transposed": transposed}


@cache
def kernels_of(form: Form | GradientForm) -> tuple[Kernel, ...]:
    """The kernels of a form, in the order of the steps."""
    layout = LAYOUTS[form.layout]
    made = layout.forward(form) if isinstance(form, Form) else layout.gradient(form)
    return made if isinstance(made, tuple) else (made,)


def program(operator: str, problem: Problem) -> Program:
    """The program of a call of softmax, log_softmax or one of their gradients with attributes."""
    # A row without elements still has a log-sum-exp, which is -inf.
    if not problem.outer * problem.inner or not (problem.n or "stats" in problem.specs):
        return Program((), name="nothing to do")
    return _FusedSteps(operator, problem).all_steps()


class Place(NamedTuple):
    """Where an array lies: its memory, and its strides in elements.

    outer: the size and stride of each loop over the outer index. along_n, along_vector: the strides along n, and from
    lane to lane of a vector.
    """

    memory: Any
    outer: Sequence[tuple[int, int]]
    along_n: int
    along_vector: int


def in_c_order(problem: Problem) -> Problem:
    """The problem with loops in C order, in which dropout counts elements."""
    name = next(iter(problem.specs))
    shape, axes = problem.specs[name].shape, problem.attributes["axis"]
    sizes = (math.prod(shape[: axes[0]]), math.prod(shape[each] for each in axes), math.prod(shape[axes[-1] + 1 :]))
    order = tuple(range(len(shape)))
    orders = dict.fromkeys(problem.orders, order)
    return replace(problem, outer=sizes[0], n=sizes[1], inner=sizes[2], orders=orders)


class _FusedSteps(ProgramSteps):
    """The steps of the program: copies of arrays, the kernels, copies of results."""

    def __init__(self, operator: str, problem: Problem):
        if formulas.drops(problem):
            problem = in_c_order(problem)
        self.operator, self.is_gradient = operator, "dy" in problem.specs
        self.own, self.result = (("dy", "y"), "dx") if self.is_gradient else (("x",), "y")
        dtypes = {problem.specs[name].dtype.name for name in (*self.own, self.result)}
        super().__init__(problem, "float64" if "float64" in dtypes else "float32")
        limits = gradient_limits(problem) if self.is_gradient else Limits(self.lanes)
        self.layout = layout_of(problem, ("split",), limits)
        self.order = problem.orders[self.own[0]]
        self.formulas = formulas.of_call(problem)  # in groups, as forms have them
        self.operands = [name for group in self.formulas for each in group for name in each.operands]
        self.after: list[tuple[Any, ...]] = []  # the copies of results, which follow the kernels

    # --- where arrays lie ---------------------------------------------------------------------------------------------

    def groups(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """The axes of the outer loops, of n, and of the lanes of columns, in the order of the loops."""
        places = [place for place, axis in enumerate(self.order) if axis in self.problem.attributes["axis"]]
        return self.order[: places[0]], self.order[places[0] : places[-1] + 1], self.order[places[-1] + 1 :]

    def place_of(self, name: str, memory: Any, spec: Spec) -> Place | None:
        """Where an array lies; None if kernels cannot read it there."""
        item, steps = spec.dtype.itemsize, arrangement.steps
        outer, n, inner = (steps(spec.shape, group, spec.strides) for group in self.groups())
        if not self.problem.n:
            n = [(0, 0)]  # nothing is read, and only the log-sum-exps of empty rows are written
        strides = [stride for _, stride in (*outer, *n, *inner)]
        if len(n) > 1 or len(inner) > 1 or any(stride % item for stride in strides):
            return None
        if spec.dtype.name == "float64" and self.workspace.precision == "float32":
            return None  # it would make the whole kernel compute in float64
        count, (_, stride) = (self.problem.inner, inner[0]) if self.problem.inner > 1 else (self.problem.n, n[0])
        is_one = count <= 1 or (name == "stats" and self.problem.inner == 1)
        vector = 1 if is_one else stride // item
        if vector not in ((0, 1) if name in self.operands else (1,)):
            return None
        return Place(memory, [(size, stride // item) for size, stride in outer], n[0][1] // item, vector)

    def copied(self, name: str, spec: Spec) -> tuple[Scratch, Spec]:
        """Memory for a copy of an array in the order of the loops; axes along which it repeats are left out."""
        outer, n, inner = self.groups()
        group = inner if self.problem.inner > 1 else n
        kept = {axis for axis in outer if spec.strides[axis]}
        for axes in (n, inner):
            repeats = not any(spec.strides[axis] for axis in axes)
            if not repeats or (axes == group and name not in self.operands):
                kept |= {*axes}
        dtype = spec.dtype
        if dtype.name == "float64" and self.workspace.precision == "float32":
            dtype = DTYPES["float32"]
        shape = tuple(size if axis in kept else 1 for axis, size in enumerate(spec.shape))
        strides = arrangement.contiguous(shape, self.order, dtype.itemsize)
        strides = tuple(stride if axis in kept else 0 for axis, stride in enumerate(strides))
        memory = self.workspace.shared(math.prod(shape), dtype.name)
        return memory, replace(spec, dtype=dtype, strides=strides)

    def copy(self, source: Any, source_spec: Spec, target: Any, target_spec: Spec, shape: Sequence[int]) -> None:
        """Add the step that copies an array of this shape."""
        *outer, (count, *steps) = arrangement.steps(tuple(shape), self.order, source_spec.strides, target_spec.strides)
        table = self.tables.add([word for loop in reversed(outer) for word in loop])
        self.add(
            copy_runs,
            math.prod(size for size, *_ in outer),
            axes=len(outer),
            table=table,
            count=count,
            x=_typed(source, source_spec),
            x_step=steps[0],
            y=_typed(target, target_spec),
            y_step=steps[1],
        )

    def read(self, name: str) -> Place:
        """Where kernels read an array: where it lies, or in a copy."""
        spec = self.problem.specs[name]
        found = self.place_of(name, _typed(self.problem[name], spec), spec)
        if found is not None:
            return found
        memory, copy = self.copied(name, spec)
        shape = [size if stride else 1 for size, stride in zip(spec.shape, copy.strides, strict=True)]
        self.copy(self.problem[name], spec, memory, copy, shape)
        return self._placed(name, memory, copy)

    def written(self, name: str) -> Place | None:
        """Where kernels write a result, with one outer loop; None if the result is not wanted."""
        if name not in self.problem.specs:
            return None
        spec = self.problem.specs[name]
        found = self.place_of(name, self.problem[name], spec)
        if found is not None and len(found.outer) == 1:
            return found
        memory, copy = self.copied(name, spec)
        self.after.append((memory, copy, self.problem[name], spec, spec.shape))
        return self._placed(name, memory, copy)

    def _placed(self, name: str, memory: Any, copy: Spec) -> Place:
        found = self.place_of(name, _typed(memory, copy), copy)
        assert found is not None
        return found

    def source(self, place: Place) -> Source:
        loops = [word for loop in reversed(place.outer) for word in loop]
        return Source(place.memory, self.tables.add([place.along_n, len(place.outer), *loops]))

    def result_of(self, name: str) -> Any:
        """A result as rows or columns; None if it is not wanted."""
        place = self.written(name)
        if place is None:
            return None
        step = place.outer[0][1]
        rows = self.layout != "columns" or name == "stats"
        return Rows(place.memory, step) if rows else Columns(place.memory, step, place.along_n)

    # --- the form and its kernels -------------------------------------------------------------------------------------

    def all_steps(self) -> Program:
        places = {name: self.read(name) for name in (*self.own, *self.operands)}
        sources = {name: self.source(place) for name, place in places.items()}
        groups = [tuple(self._formula(each, places) for each in group) for group in self.formulas]
        given: list[Any] = [sources[name] for name in self.own]
        given += [tuple(sources[name] for each in group for name in each.operands) or 0 for group in self.formulas]
        numbers = (tuple(one for each in group for one in (each.alpha, each.beta)) or 0 for group in self.formulas)
        drops, specs = formulas.drops(self.problem), self.problem.specs
        form: Form | GradientForm
        wanted: list[Place] = []
        if self.is_gradient:
            names = [gradient_name(each.operands[-1]) if each.operands else "" for each in self.formulas[2]]
            wanted = [place for name in names if (place := self.written(name))]
            given.append(tuple(map(self.source, wanted)) or 0)
            form = GradientForm(self.operator, self.layout, *groups, drops, tuple(name in specs for name in names))
        else:
            results = tuple(name for name in ("stats", "saved", "mask") if name in specs)
            form = Form(self.operator, self.layout, *groups, drops, results, formulas.is_exact(self.problem))
        packed = [(self.problem.outer, self.problem.n)], 1
        is_packed = all((each.outer, each.along_vector) == packed for each in (*places.values(), *wanted))
        self.add_kernels(form, is_packed, sources=tuple(given), numbers=tuple(numbers))
        for each in self.after:
            self.copy(*each)
        return self.program(f"fused, {self.layout}, {self.workspace.precision}")

    def _formula(self, applied: Applied, places: dict[str, Place]) -> Formula:
        """The formula for which kernels are compiled; dropout's operand is no array."""
        along = tuple(places[name].along_vector == 1 for name in applied.operands)
        return Formula(applied.name, (ALONG,) if applied.name == "dropout" else along)

    def add_kernels(self, form: Form | GradientForm, is_packed: bool, **arguments: Any) -> None:
        """Add the kernels' steps. is_packed: whether the rows of all arrays but the results lie without gaps."""
        problem, kernels = self.problem, kernels_of(form)
        keeps = self.layout != "columns" or keeps_column(problem.n, self.lanes)
        stream = streams(problem.bytes) and keeps
        units, sizes = units_of(problem, self.layout, self.lanes, spare_columns(problem, self.result, stream))
        arguments |= sizes
        memory = self.memory(form.drops, stream)
        arguments |= {"n": problem.n, "stream": stream, "memory": memory, "dropout": self.dropout(form.drops)}
        arguments["inf_as_zero"] = problem.attributes.get("inf_as_zero", 0)
        results = [self.result_of(self.result)]
        arguments[self.result] = results[0]
        if not self.is_gradient:
            kind = ColumnResults if self.layout == "columns" else RowResults
            results += [self.result_of(name) for name in ("saved", "mask")]
            arguments["results"] = kind(*results[1:], self.result_of("stats"))
        if self.layout == "transposed":
            arguments["packed"] = is_packed and all(each is None or each.step == problem.n for each in results)
        if self.layout == "split":
            self.steps += split_steps(self, kernels, units, arguments)
        else:
            self.steps.append(shared_out(kernels[0], units, problem.bytes / units, arguments))

    def memory(self, drops: bool, stream: bool) -> Memory:
        """Private memory. A row or strip takes it twice, for one that waits; strips that are written at once, once."""
        private, n, width = self.workspace.private, self.problem.n, self.lanes
        size = {"rows": n + width, "split": BLOCK}.get(self.layout, (n + 1) * width)
        second = (n + width) * width if self.layout == "transposed" else size
        arrays = 2 if self.layout == "transposed" and self.is_gradient else 1  # the gradient of softmax, and y
        e, second = private(arrays * size), arrays * second
        is_one = self.layout == "split" or (self.layout == "columns" and not stream)
        done, kept = e if is_one else private(second), private(size if drops else 0)
        return Memory(e, done, kept, private(buffer_size(4) if self.layout == "rows" else 0))

    def dropout(self, drops: bool) -> DropoutState:
        probability = self.problem.attributes["dropout"]
        threshold = keep_threshold(probability) if probability else ALL_ARE_KEPT
        return DropoutState(self.problem[STATE] if drops else None, threshold)


def _typed(memory: Any, spec: Spec) -> Any:
    """The memory under the name by which a kernel gets its dtype: as int32, its elements would be used as indices."""
    return replace(memory, dtype="int32_number" if spec.dtype.name == "int32" else spec.dtype.name)


def split_steps(steps: ProgramSteps, kernels: Sequence[Kernel], units: int, arguments: dict[str, Any]) -> list[Step]:
    """The steps over blocks of rows; of three steps the middle one is over rows, each of which is a part of its own."""
    problem, shared = steps.problem, steps.workspace.shared
    sizes = {"partial": units} if len(kernels) == 2 else {"stats": STATS * units, "total": STATS * problem.outer}
    arguments |= {name: shared(count, "float64") for name, count in sizes.items()}
    found = [shared_out(kernel, units, problem.bytes / units, arguments) for kernel in kernels]
    if len(kernels) == 3:
        found[1] = Step(kernels[1], problem.outer, arguments)
    return found
