"""Makes the program of a softmax call with attributes: finds its form, and where the kernel of that form finds arrays.

Each element goes through formulas, in order:

Forward    logit_scale, where | softmax | result_scale, dropout, post-ops, out_scale
Gradient   the same way back from dy, with the post-ops' inputs computed again from y | softmax | logit_scale

Each is an `Applied`, as post-ops are: with the names of its operands and with its numbers.

A kernel reads an array where it lies if its vectors are contiguous, or one number each, and takes any number of loops
over the other axes. Other arrays are copied first, in the order of the loops, without the axes along which they repeat;
results that a kernel cannot write are copied last.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

from opgrad.contract import DTYPES, Spec, arrangement
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Columns, Rows
from opgrad.cpu.kernels.fused import columns, rows
from opgrad.cpu.kernels.fused import form as forms
from opgrad.cpu.kernels.loops.fold import BLOCK
from opgrad.cpu.kernels.loops.rows import buffer_size
from opgrad.cpu.kernels.softmax.split import STATS
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.layout import Limits, gradient_limits, keeps_column, layout_of, spare_columns, units_of
from opgrad.cpu.runtime.plan import Program, Scratch, Step, shared_out, streams
from opgrad.ops.reference.dropout import keep_threshold, kept_scale
from opgrad.ops.reference.primitive import SCALARS, STATE, Applied, gradient_name

LEAST: Final = 1e-37
# The attributes with which a call is a plain one.
PLAIN: Final[Mapping[str, Any]] = {**SCALARS, "dropout": None, "post_ops": (), "accumulation": "any"}


def plain_rows(problem: Problem) -> Problem:
    """A plain problem of rows, with the attributes of a call that has none."""
    specs = {}
    for name, spec in problem.specs.items():
        strides = problem[name].outer * spec.dtype.itemsize, spec.dtype.itemsize
        specs[name] = replace(spec, shape=(problem.outer, problem.n), strides=strides)
    return replace(problem, specs=specs, orders=dict.fromkeys(specs, (0, 1)), attributes={"axis": (1,), **PLAIN})


def formulas_of_call(problem: Problem) -> tuple[list[Applied], ...]:
    """The groups of formulas of a call as its form has them: before softmax and behind it, or a gradient's five.

    A softmax of attention may have a bias, which is added last. The result's scale and the output's are one factor
    unless post-ops stand between. In a gradient the scales commute with what follows, but the post-ops' operands have
    their gradients before.
    """
    attributes, specs, applied = problem.attributes, problem.specs, [*problem.attributes["post_ops"]]
    scale, logits = attributes["result_scale"], _times(factors(attributes["logit_scale"]))
    scaled = _times(factors(scale)) if applied else []
    last = _times(quotient(1.0 if applied else scale, attributes["out_scale"]))
    dropped = [Applied("dropout", kept_scale(attributes["dropout"]))] if drops_elements(problem) else []
    if "dy" in specs:
        masked = [Applied("where", operands=("where",))] if "where" in specs else []
        return last, [*scaled, *dropped] if applied else [], applied, [*scaled, *dropped, *masked], logits
    if "where" in specs:
        logits.append(Applied("where", float("-inf"), operands=("where",)))
    if "bias" in specs:
        logits.append(Applied("add", operands=("bias",)))
    return logits, [*scaled, *dropped, *applied, *last]


def _times(by: Sequence[float]) -> list[Applied]:
    return [Applied("times", factor) for factor in by if factor != 1.0]


def quotient(scale: float, divisor: float) -> list[float]:
    """Factors of scale / divisor that are normal in float32 too: 0 / 1e-40 is 0, but 0 * (1 / 1e-40) would be NaN."""
    if scale == 0.0 or LEAST < abs(scale / divisor) < 1 / LEAST:
        return [scale / divisor]
    return [*factors(scale), *(1.0 / each for each in factors(divisor))]


def factors(scale: float) -> list[float]:
    if scale == 0.0 or LEAST < abs(scale) < 1 / LEAST:
        return [scale]
    root = math.sqrt(abs(scale))
    return [*factors(root), *factors(math.copysign(root, scale))]


def drops_elements(problem: Problem) -> bool:
    """Whether elements are dropped, or the mask of those that are kept is a result though none is dropped."""
    return bool(problem.attributes["dropout"]) or "mask" in problem.specs


# The functions that make the kernels of a form, by layout: one kernel, or those of several steps.
FORWARD: Final[Mapping[str, Callable[[forms.Form], Any]]] = {
    "rows": rows.forward_rows,
    "columns": columns.forward_columns,
    "split": rows.forward_split,
    "transposed": rows.forward_transposed,
}
GRADIENTS: Final[Mapping[str, Callable[[forms.GradientForm], Any]]] = {
    "rows": rows.gradient_rows,
    "columns": columns.gradient_columns,
    "split": rows.gradient_split,
    "transposed": rows.gradient_transposed,
}


@cache
def kernels_of(form: forms.Form | forms.GradientForm) -> tuple[Kernel, ...]:
    """The kernels of a form, in the order of the steps."""
    made = FORWARD[form.layout](form) if isinstance(form, forms.Form) else GRADIENTS[form.layout](form)
    return made if isinstance(made, tuple) else (made,)


def program(operator: str, problem: Problem) -> Program:
    """The program of a call of softmax, log_softmax or one of their gradients with attributes."""
    # A row without elements still has a log-sum-exp, which is -inf.
    if not problem.outer * problem.inner or not (problem.n or "stats" in problem.specs):
        return Program()
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


class _FusedSteps(ProgramSteps):
    """The steps of the program: copies of arrays, the kernels, copies of results."""

    def __init__(self, operator: str, problem: Problem):
        if drops_elements(problem):  # dropout counts elements in C order: so do the loops
            shape, axes = problem.specs[next(iter(problem.specs))].shape, problem.attributes["axis"]
            outer, inner = math.prod(shape[: axes[0]]), math.prod(shape[axes[-1] + 1 :])
            orders, n = dict.fromkeys(problem.orders, tuple(range(len(shape)))), math.prod(shape[each] for each in axes)
            problem = replace(problem, outer=outer, n=n, inner=inner, orders=orders)
        self.operator, self.is_gradient = operator, "dy" in problem.specs
        self.own, self.result = (("dy", "y"), "dx") if self.is_gradient else (("x",), "y")
        dtypes = {problem.specs[name].dtype.name for name in (*self.own, self.result)}
        super().__init__(problem, "float64" if "float64" in dtypes else "float32")
        limits = gradient_limits(problem) if self.is_gradient else Limits(self.lanes)
        self.layout = layout_of(problem, ("split",), limits)
        self.order = problem.orders[self.own[0]]
        self.formulas = formulas_of_call(problem)  # in groups, as forms have them
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
            columns.copy_runs,
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

    def source(self, place: Place) -> forms.Source:
        loops = [word for loop in reversed(place.outer) for word in loop]
        return forms.Source(place.memory, self.tables.add([place.along_n, len(place.outer), *loops]))

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
        groups = [tuple(_formula(each, places) for each in group) for group in self.formulas]
        given: list[Any] = [sources[name] for name in self.own]
        given += [tuple(sources[name] for each in group for name in each.operands) or 0 for group in self.formulas]
        numbers = (tuple(one for each in group for one in (each.alpha, each.beta)) or 0 for group in self.formulas)
        drops, specs = drops_elements(self.problem), self.problem.specs
        form: forms.Form | forms.GradientForm
        wanted: list[Place] = []
        if self.is_gradient:
            names = [gradient_name(each.operands[-1]) if each.operands else "" for each in self.formulas[2]]
            wanted = [place for name in names if (place := self.written(name))]
            given.append(tuple(map(self.source, wanted)) or 0)
            form = forms.GradientForm(
                self.operator, self.layout, *groups, drops, tuple(name in specs for name in names)
            )
        else:
            results = tuple(name for name in ("stats", "saved", "mask") if name in specs)
            # Sums keep what is rounded off their terms: for 2 ulp in place of 4, and where a sum is a result.
            exact = self.problem.attributes["accumulation"] == "strict" or "stats" in specs
            form = forms.Form(self.operator, self.layout, *groups, drops, results, exact)
        packed = [(self.problem.outer, self.problem.n)], 1
        is_packed = all((each.outer, each.along_vector) == packed for each in (*places.values(), *wanted))
        self.add_kernels(form, is_packed, sources=tuple(given), numbers=tuple(numbers))
        for each in self.after:
            self.copy(*each)
        self.name = f"fused, {self.layout}, {self.workspace.precision}"
        return self

    def add_kernels(self, form: forms.Form | forms.GradientForm, is_packed: bool, **arguments: Any) -> None:
        """Add the kernels' steps. is_packed: whether the rows of all arrays but the results lie without gaps."""
        problem, kernels = self.problem, kernels_of(form)
        keeps = self.layout != "columns" or keeps_column(problem.n, self.lanes)
        stream = streams(problem.bytes) and keeps
        units, sizes = units_of(problem, self.layout, self.lanes, spare_columns(problem, self.result, stream))
        probability = problem.attributes["dropout"]
        threshold = keep_threshold(probability) if probability else forms.ALL_ARE_KEPT
        dropout = forms.DropoutState(problem[STATE] if form.drops else None, threshold)
        # A row or strip takes its memory twice, for one that waits; strips that are written at once, once.
        n, width, private = problem.n, self.lanes, self.workspace.private
        size = {"rows": n + width, "split": BLOCK}.get(self.layout, (n + 1) * width)
        second = (n + width) * width if self.layout == "transposed" else size
        arrays = 2 if self.layout == "transposed" and self.is_gradient else 1  # the gradient of softmax, and y
        is_one = self.layout == "split" or (self.layout == "columns" and not stream)
        e = private(arrays * size)
        done, kept = e if is_one else private(arrays * second), private(size if form.drops else 0)
        memory = forms.Memory(e, done, kept, private(buffer_size(4) if self.layout == "rows" else 0))
        arguments |= {"n": n, "stream": stream, "memory": memory, "dropout": dropout, **sizes}
        arguments["inf_as_zero"] = problem.attributes.get("inf_as_zero", 0)
        results = [self.result_of(self.result)]
        arguments[self.result] = results[0]
        if not self.is_gradient:
            kind = forms.ColumnResults if self.layout == "columns" else forms.RowResults
            results += [self.result_of(name) for name in ("saved", "mask")]
            arguments["results"] = kind(*results[1:], self.result_of("stats"))
        if self.layout == "transposed":
            arguments["packed"] = is_packed and all(each is None or each.step == problem.n for each in results)
        if self.layout == "split":
            self.steps += split_steps(self, kernels, units, arguments)
        else:
            self.steps.append(shared_out(kernels[0], units, problem.bytes / units, arguments))


def _formula(applied: Applied, places: dict[str, Place]) -> forms.Formula:
    """The formula for which kernels are compiled; dropout's operand is no array."""
    along = tuple(places[name].along_vector == 1 for name in applied.operands)
    return forms.Formula(applied.name, (forms.ALONG,) if applied.name == "dropout" else along)


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
