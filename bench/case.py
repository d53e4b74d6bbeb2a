"""The arrays of a cell, our call on them, the bytes that it must move, and the error of what it wrote."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

import opgrad
from bench.cells import SWEEP, Cell, large_cases
from bench.measure import GIVEN, WAYS, Call
from opgrad.call.arrays import as_given, expanded, spec_of
from opgrad.cli.examples import examples, expected
from opgrad.cli.examples.arguments import ArraySource, Numpy, arguments, called, error_in_ulp, reference
from opgrad.contract import Array, Operator, Shape, Spec
from opgrad.contract.signature import Problem, prepare

CHECKED = 1 << 19  # elements of a result that are compared with the reference
IN_PLACE = "optimizer"  # the family whose calls write over their arguments


def signature(
    op: Operator, given: Mapping[str, Any], spec: Callable[[Any], Spec | None] = spec_of
) -> tuple[list[Spec | None], dict[str, Any]]:
    """The arrays of a call as the checks see them, and its attributes. spec: describes an array."""
    specs = [None if given.get(name) is None else spec(given[name]) for name in op.arrays]
    return specs, {name: given[name] for name in op.attributes if name in given}


class Case:
    """A cell with its memory, in NumPy arrays.

    values, written: the call's arguments by name, and those of a call with results in memory that is given.
    results: memory for the results by name; everybody writes there who can. traffic: the fewest bytes that must move,
    each input once and each result once.
    What concerns the library that arrays are of stands in `source`, `empty`, `placed`, `numpy` and `prepared`.
    """

    def __init__(self, cell: Cell):
        self.cell, self.op, self.shape = cell, cell.op, cell.workload.shape
        self.dtype, self.positional = cell.dtype, cell.op.parameters
        self.axis = int(cell.workload.attributes.get("axis", 0 if cell.op.kind == "slices" else -1))
        # How it can be called: what the sweep measures writes into memory that is given and nowhere else.
        self.ways: tuple[str, ...] = (GIVEN,) if cell.workload.group == SWEEP else WAYS
        self.values = self.written = self.arguments(cell)
        prepared = self.prepared()
        self.results = {name: self.empty(spec.shape, spec.dtype) for name, spec in prepared.results.items()}
        self.traffic: int = prepared.bytes
        if self.op.name == "gather":  # of the array that it picks from, no more is read than is written
            self.traffic -= max(0, int(self.values["x"].nbytes - self.results["y"].nbytes))

    def arguments(self, cell: Cell) -> dict[str, Any]:
        """The arguments of the call by name."""
        workload = cell.workload
        of_slices = {"indices": (workload.indices,) if workload.indices else (), "equal": workload.equal}
        made: Any = {"source": self.source, "forward": self.forward, **of_slices, **workload.attributes}
        return arguments(cell.op, workload.shape, cell.dtype, **made)

    def prepared(self) -> Problem:
        """The checked call."""
        op, named = expanded(self.op, dict(self.values))
        return prepare(op, *signature(op, as_given(op, named)))

    def source(self, seed: int) -> ArraySource:
        return Numpy(seed, self.empty)

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def forward(self, op: Operator, given: dict[str, Any]) -> Sequence[Any]:
        """What a gradient keeps from its forward operator."""
        return [self.placed(array) for array in called(op, given)]

    def placed(self, value: Any) -> Any:
        """A value with a copy in place of each array."""
        if isinstance(value, list):
            return [self.placed(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        made = self.empty(value.shape, value.dtype)
        made[...] = value
        return made

    def numpy(self, array: Any) -> Array:
        """What is in an array."""
        return np.asarray(array)

    @property
    def arrays(self) -> dict[str, Any]:
        """The array arguments and the results by name."""
        return {name: self.values[name] for name in self.op.arrays if name in self.values} | self.results

    @property
    def label(self) -> str:
        """The workload as tables write it."""
        return self.cell.workload.label

    def call(self, way: str = GIVEN) -> Call:
        """The operator on these arrays, called as a user would."""
        given = dict(self.written if way == GIVEN else self.values)
        leading = [given.pop(name) for name in takewhile(given.__contains__, self.positional)]
        return partial(getattr(opgrad, self.op.name), *leading, **given, **self.out(way))

    def out(self, way: str) -> dict[str, Any]:
        """The argument `out` of a call that works this way."""
        out = list(self.results.values())
        several = self.op.general is not None and any(tensor.several for tensor in self.op.results.values())
        return {"out": out if several else tuple(out) if len(out) > 1 else out[0]} if way == GIVEN else {}

    def error(self) -> float:
        """The worst error in ulp of the results as they stand, on a sample of rows if they are large."""
        if all(tensor.role == "sample" for tensor in self.op.results.values()):
            return error_in_ulp(self.numpy(self.results["loss"]), self._mean_loss())
        return max(self._errors())

    def _mean_loss(self) -> Array:
        """The reference's mean over all samples, from a few at a time: no sample of them has the same mean."""
        logits, labels = self.values["logits"], self.values["labels"]
        pieces = max(1, logits.size // CHECKED)
        total = np.zeros(())
        for some, theirs in zip(np.array_split(logits, pieces), np.array_split(labels, pieces), strict=True):
            values = self.values | {"logits": some, "labels": theirs, "reduction": "sum"}
            total += reference(self.op, values)["loss"]
        return total / labels.size

    def _errors(self) -> Iterator[float]:
        # An axis, the first or the last, along which results do not depend on each other, and the step along it.
        first = self.axis % len(self.shape) == 0
        axis = -1 if self.op.kind == "slices" or (self.op.kind == "rows" and first) else 0
        dependent = self.op.kind in ("slices", "rows") and self.axis % len(self.shape) == axis % len(self.shape)
        step = 1 if dependent else max(1, min(self.shape[axis], math.prod(self.shape) // CHECKED))
        given = {name: self.values[name] for name in self.op.arrays if name in self.values}
        values = self.values | {name: self._taken(name, array, axis, step) for name, array in given.items()}
        if "shape" in values and step > 1:
            values["shape"] = (*self.shape[:-1], len(range(0, self.shape[-1], step)))
        for name, exact in reference(self.op, values).items():
            of_each = self.op.results[name].role == "element"
            if of_each or step == 1:
                if self.op.kind == "classes" and name == "dlogits" and step > 1:
                    # The mean over all samples divides by more than that of a few.
                    exact = exact * (math.prod(values["labels"].shape) / math.prod(self.values["labels"].shape))
                yield error_in_ulp(self._taken(name, self.results[name], axis, step), exact)

    def _taken(self, name: str, array: Any, axis: int, step: int) -> Array:
        """The sample of an argument or a result."""
        role = {**self.op.inputs, **self.op.results}[name].role
        if step == 1 or role == "alone" or name == "indices" or not array.ndim:
            return self.numpy(array)
        return self.numpy(array[(slice(None),) * (axis % array.ndim) + (slice(None, None, step),)])


class GraphCase(Case):
    """An operator of training graphs on one of its large cases, with memory for its results."""

    def arguments(self, cell: Cell) -> dict[str, Any]:
        example = examples(cell.op, cell.dtype, cases=large_cases(cell.op.name))[cell.workload.example]
        return {name: self.placed(value) for name, value in example.arguments.items()}

    def __init__(self, cell: Cell):
        super().__init__(cell)
        self.positional = ()
        if self.op.family == IN_PLACE:
            self.share()

    def share(self) -> None:
        """Results in the memory of copies of the arrays that they take over, as an optimizer is used."""
        self.written = dict(self.values)
        for result, (source, *_) in self.op.in_place.items():
            self.written[source] = copies = self.placed(self.values[source])
            self.results |= {f"{result}[{i}]": copy for i, copy in enumerate(copies)}

    @property
    def label(self) -> str:
        """The shapes of the arrays, equal ones counted."""
        values = [each for value in self.values.values() for each in (value if isinstance(value, list) else [value])]
        shapes = ["x".join(map(str, each.shape)) or "1" for each in values if isinstance(each, np.ndarray)]
        counted = {shape: shapes.count(shape) for shape in shapes}
        return ", ".join(f"{count} of {shape}" if count > 1 else shape for shape, count in counted.items())

    def error(self) -> float:
        """The worst error of the results in ulp; infinite if an integer or a truth value is wrong."""
        if self.op.family == IN_PLACE:
            self.share()  # earlier calls have changed the copies
            self.call()()
        found = [
            (0.0 if np.array_equal(got, right) else math.inf) if got.dtype.kind in "biu" else error_in_ulp(got, right)
            for got, right in zip(self.results.values(), expected(self.op, self.values), strict=True)
        ]
        return max(found)
