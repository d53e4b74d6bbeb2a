"""The arrays of a cell, our call on them, the bytes that it must move, and the error of what it wrote."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import opgrad
from opgrad.accuracy import error_in_ulp, reference
from opgrad.arrays import plan
from opgrad.bench.cells import Cell
from opgrad.contract import Array, Spec
from opgrad.sample import aligned, arguments

CHECKED = 1 << 19  # elements of a result that are compared with the reference


class Case:
    """A cell with its memory.

    values: the arguments by name. results: memory for the results by name; everybody writes there who can.
    """

    def __init__(self, cell: Cell):
        workload = cell.workload
        self.op, self.dtype, self.shape = cell.op, cell.dtype, workload.shape
        self.axis = int(workload.attributes.get("axis", 0 if cell.op.kind == "slices" else -1))
        indices = (workload.indices,) if workload.indices else ()
        self.values = arguments(
            cell.op, workload.shape, cell.dtype, indices=indices, equal=workload.equal, **workload.attributes
        )
        self.results = self._memory()

    def _memory(self) -> dict[str, Array]:
        arrays = [self.values.get(name) for name in self.op.arrays]
        specs = [None if array is None else Spec(array.shape, array.dtype) for array in arrays]
        attributes = {name: self.values[name] for name in self.op.attributes if name in self.values}
        made = plan(self.op, specs, attributes).results
        named = zip(self.op.results, made, strict=True)
        return {name: aligned(spec.shape, spec.dtype) for name, spec in named}

    @property
    def arrays(self) -> dict[str, Array]:
        """The array arguments and the results by name."""
        return {name: self.values[name] for name in self.op.arrays if name in self.values} | self.results

    def call(self) -> Callable[[], object]:
        """The operator on these arrays, called as a user would."""
        out = tuple(self.results.values())
        given = dict(self.values)
        leading = []
        for name in self.op.parameters:
            if name not in given:
                break
            leading.append(given.pop(name))
        function = getattr(opgrad, self.op.name)
        return partial(function, *leading, **given, out=out if len(out) > 1 else out[0])

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
        return max(self._errors())

    def _errors(self) -> Iterator[float]:
        take, step = self._sampling()
        values = {
            name: take(value) if name in self.op.inputs and self.op.inputs[name].role != "alone" else value
            for name, value in self.values.items()
        }
        for name, expected in reference(self.op, values).items():
            of_each = self.op.results[name].role == "element"
            if of_each or step == 1:
                mean = self.op.kind == "classes" and name == "dlogits" and step > 1
                share = self._sampled_share(values) if mean else 1.0
                yield error_in_ulp(take(self.results[name]), expected * share)

    def _sampling(self) -> tuple[Callable[[Array], Array], int]:
        """How to take rows, every step-th, along an axis that is not reduced."""
        shape = self.shape
        axis = len(shape) - 1 if self.op.kind == "rows" and self.axis % len(shape) == 0 else 0
        whole = self.op.kind == "slices" or (self.op.kind == "rows" and len(shape) == 1)
        step = 1 if whole else max(1, min(shape[axis], math.prod(shape) // CHECKED))
        picked = (slice(None),) * axis + (slice(None, None, step),)
        return lambda array: array[picked] if array.ndim > axis else array, step

    def _sampled_share(self, values: Mapping[str, Any]) -> float:
        """The sample's share of the whole: the mean over all samples divides by more than that of a few."""
        return float(values["labels"].size / self.values["labels"].size)
