"""The arrays of a cell, our call on them, the bytes that it must move, and the error of what it wrote."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import opgrad
from opgrad.bench.cells import Cell
from opgrad.bench.memories import MEMORIES
from opgrad.bench.ways import GIVEN, WAYS, Call
from opgrad.contract import Array, Operator, Shape, Spec
from opgrad.contract.signature import prepare
from opgrad.testing.accuracy import error_in_ulp, reference
from opgrad.testing.arguments import Numpy, Source, arguments, called

CHECKED = 1 << 19  # elements of a result that are compared with the reference


class Case:
    """A cell with its memory, in NumPy arrays.

    values: the arguments by name. results: memory for the results by name; everybody writes there who can.
    What concerns the library that arrays are of stands in `source`, `empty`, `spec` and `numpy`.
    """

    def __init__(self, cell: Cell):
        workload = cell.workload
        self.op, self.dtype, self.shape = cell.op, cell.dtype, workload.shape
        self.memory = cell.memory
        self.axis = int(workload.attributes.get("axis", 0 if cell.op.kind == "slices" else -1))
        indices = (workload.indices,) if workload.indices else ()
        self.values = arguments(
            cell.op,
            workload.shape,
            cell.dtype,
            indices=indices,
            equal=workload.equal,
            source=self.source,
            forward=self.forward,
            **workload.attributes,
        )
        arrays = [self.values.get(name) for name in self.op.arrays]
        specs = [None if array is None else self.spec(array) for array in arrays]
        attributes = {name: self.values[name] for name in self.op.attributes if name in self.values}
        results = prepare(self.op, specs, attributes).results
        self.results = {name: self.empty(spec.shape, spec.dtype) for name, spec in results.items()}

    def source(self, seed: int) -> Source:
        return Numpy(seed, self.empty)

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        return MEMORIES[self.memory](shape, dtype)

    def forward(self, op: Operator, given: dict[str, Any]) -> Sequence[Any]:
        """What a gradient keeps from its forward operator, in the cell's memory."""
        return [self.placed(array) for array in called(op, given)]

    def placed(self, array: Any) -> Any:
        """A copy of an array in the cell's memory."""
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def spec(self, array: Any) -> Spec:
        return Spec(array.shape, array.dtype)

    def numpy(self, array: Any) -> Array:
        """What is in an array."""
        return np.asarray(array)

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be called."""
        return WAYS

    @property
    def arrays(self) -> dict[str, Any]:
        """The array arguments and the results by name."""
        return {name: self.values[name] for name in self.op.arrays if name in self.values} | self.results

    def call(self, way: str = GIVEN) -> Call:
        """The operator on these arrays, called as a user would."""
        given = dict(self.values)
        leading = []
        for name in self.op.parameters:
            if name not in given:
                break
            leading.append(given.pop(name))
        function = getattr(opgrad, self.op.name)
        return partial(function, *leading, **given, **self.out(way))

    def out(self, way: str) -> dict[str, Any]:
        """The argument `out` of a call that works this way."""
        out = tuple(self.results.values())
        return {"out": out if len(out) > 1 else out[0]} if way == GIVEN else {}

    def traffic(self) -> int:
        """The fewest bytes that must move: each input once, each result once.

        Of the array that gather picks from, no more is read than is written.
        """
        written = sum(array.nbytes for array in self.results.values())
        read = {name: int(self.values[name].nbytes) for name in self.op.arrays if name in self.values}
        if self.op.name == "gather":
            read["x"] = min(read["x"], written)
        return written + sum(read.values())

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
        axis, step = self._sampling()
        given = {name: self.values[name] for name in self.op.arrays if name in self.values}
        values = self.values | {name: self._taken(name, array, axis, step) for name, array in given.items()}
        if "shape" in values and step > 1:
            values["shape"] = (*self.shape[:-1], len(range(0, self.shape[-1], step)))
        for name, expected in reference(self.op, values).items():
            of_each = self.op.results[name].role == "element"
            if of_each or step == 1:
                mean = self.op.kind == "classes" and name == "dlogits" and step > 1
                share = self._sampled_share(values) if mean else 1.0
                yield error_in_ulp(self._taken(name, self.results[name], axis, step), expected * share)

    def _sampling(self) -> tuple[int, int]:
        """An axis, the first or the last, along which results do not depend on each other, and the step along it."""
        first = self.axis % len(self.shape) == 0
        axis = -1 if self.op.kind == "slices" or (self.op.kind == "rows" and first) else 0
        dependent = self.op.kind in ("slices", "rows") and self.axis % len(self.shape) == axis % len(self.shape)
        step = 1 if dependent else max(1, min(self.shape[axis], math.prod(self.shape) // CHECKED))
        return axis, step

    def _taken(self, name: str, array: Any, axis: int, step: int) -> Array:
        """The sample of an argument or a result."""
        role = {**self.op.inputs, **self.op.results}[name].role
        if step == 1 or role == "alone" or name == "indices" or not array.ndim:
            return self.numpy(array)
        return self.numpy(array[(slice(None),) * (axis % array.ndim) + (slice(None, None, step),)])

    def _sampled_share(self, values: Mapping[str, Any]) -> float:
        """The sample's share of the whole: the mean over all samples divides by more than that of a few."""
        return math.prod(values["labels"].shape) / math.prod(self.values["labels"].shape)
