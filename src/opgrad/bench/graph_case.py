"""The arrays of a cell that measures an operator of training graphs: a large example of opgrad.testing.examples."""

from functools import partial
from typing import Any

import numpy as np

import opgrad
from opgrad.bench.cells import Cell
from opgrad.bench.memories import MEMORIES
from opgrad.bench.ways import GIVEN, NEW, WAYS, Call
from opgrad.contract import FLOATS, Array
from opgrad.contract.signature import prepare
from opgrad.native.arrays import as_given, form, spec_of
from opgrad.testing.accuracy import error_in_ulp
from opgrad.testing.examples import examples, expected

Value = Any
IN_PLACE = "optimizer"  # the family whose calls write over their arguments


class GraphCase:
    """One of an operator's large examples with memory for its results: `values` are the call's arguments by name."""

    ways = WAYS

    def __init__(self, cell: Cell):
        self.op, self.dtype, self.empty = cell.op, cell.dtype, MEMORIES[cell.memory]
        example = examples(cell.op, cell.dtype, large=True)[cell.workload.example]
        self.values = {name: self._placed(value) for name, value in example.arguments.items()}
        general, named = form(cell.op, dict(self.values))
        given = as_given(general, named)
        specs = [spec_of(given.get(name)) for name in general.arrays]
        attributes = {name: given[name] for name in general.attributes if name in given}
        prepared = prepare(general, specs, attributes)
        self.results = {name: self.empty(spec.shape, spec.dtype) for name, spec in prepared.results.items()}
        self.moved = prepared.problem.bytes
        self.given = self.values
        if self.op.family == IN_PLACE:
            self._share()

    def _share(self) -> None:
        """Results in the memory of copies of the arrays that they take over, as an optimizer is used."""
        self.given = dict(self.values)
        for result, (source, *_) in self.op.in_place.items():
            self.given[source] = copies = self._placed(self.values[source])
            self.results |= {f"{result}[{i}]": copy for i, copy in enumerate(copies)}

    def _placed(self, value: Value) -> Value:
        """A value with a copy in the cell's memory in place of each array."""
        if isinstance(value, list):
            return [self._placed(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        made = self.empty(value.shape, value.dtype)
        made[...] = value
        return made

    @property
    def label(self) -> str:
        """The shapes of the arrays, equal ones counted."""
        shapes = ["x".join(map(str, array.shape)) or "1" for value in self.values.values() for array in _arrays(value)]
        counted = {shape: shapes.count(shape) for shape in shapes}
        return ", ".join(f"{count} of {shape}" if count > 1 else shape for shape, count in counted.items())

    def call(self, way: str = GIVEN) -> Call:
        """The operator on these arrays, called as a user would."""
        if way == NEW:
            return partial(getattr(opgrad, self.op.name), **self.values)
        out: Any = tuple(self.results.values())
        several = self.op.general is not None and any(tensor.several for tensor in self.op.results.values())
        out = list(out) if several else out if len(out) > 1 else out[0]
        return partial(getattr(opgrad, self.op.name), **self.given, out=out)

    def traffic(self) -> int:
        """Each input and each result once."""
        return self.moved

    def error(self) -> float:
        """The worst error of the results in ulp; infinite if an integer or a truth value is wrong."""
        if self.op.family == IN_PLACE:
            self._share()  # earlier calls have changed the copies
            self.call()()
        exact = expected(self.op, self.values)
        return max(_error(got, right) for got, right in zip(self.results.values(), exact, strict=True))


def _arrays(value: Value) -> list[Array]:
    found = value if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, np.ndarray)]


def _error(got: Array, exact: Array) -> float:
    if got.dtype.name in FLOATS:
        return error_in_ulp(got, exact)
    return 0.0 if np.array_equal(got, exact) else float("inf")
