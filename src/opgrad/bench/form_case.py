"""The arrays of a cell that measures a form of softmax, our call on them, its traffic and its error."""

import math
import os
from collections.abc import Iterator
from functools import partial

import numpy as np

import opgrad
from opgrad.bench import case as plain
from opgrad.bench.cells import PLANS, Cell
from opgrad.bench.forms import FORMS, leading
from opgrad.bench.measure import CALL, KERNEL
from opgrad.bench.ways import GIVEN, WAYS, Call
from opgrad.contract import DTYPES, Array
from opgrad.contract.signature import prepare
from opgrad.cpu.compiler.memory import call_address
from opgrad.cpu.compiler.native import native
from opgrad.native import background
from opgrad.native.arrays import form, spec_of
from opgrad.native.plan import execute
from opgrad.native.plans import Plan, plan
from opgrad.native.threads import threads_for
from opgrad.testing.accuracy import error_in_ulp, reference
from opgrad.testing.arguments import Numpy, arguments

os.environ.setdefault(background.VARIABLE, background.NOW)  # what calls come to is measured, not how they begin


class FormCase(plain.Case):
    """A form of softmax with its memory: `values` are all of the call's arguments, `results` all that it returns.

    `general` is the operator that the call stands for, `given` its arguments.
    """

    def __init__(self, cell: Cell):
        workload = cell.workload
        sources, _, target = cell.dtype.partition("->")
        dtypes = sources.split(",")
        self.cell, self.op, self.shape = cell, cell.op, workload.shape
        self.dtype, self.axis = dtypes[0], int(workload.attributes.get("axis", -1))
        self.memory = cell.memory
        self.values = arguments(
            cell.op, workload.shape, "float32", source=self.source, forward=self.forward, **workload.attributes
        )
        for name, dtype in zip(cell.op.arrays, dtypes * len(cell.op.arrays), strict=False):
            self.values[name] = self._converted(self.values[name], dtype)
        self.values |= FORMS[workload.form](Numpy(1, self.empty), workload.shape)
        if target:
            self.values["out_dtype"] = target
        self.general, self.given = form(cell.op, dict(self.values))
        attributes = {name: self.given[name] for name in self.general.attributes if name in self.given}
        specs = [spec_of(self.given[name]) for name in self.general.arrays]
        prepared = prepare(self.general, specs, attributes)
        self.results = {name: self.empty(spec.shape, spec.dtype) for name, spec in prepared.results.items()}
        self.moved = prepared.problem.bytes

    @property
    def ways(self) -> tuple[str, ...]:
        """A plan writes into memory that is given and nowhere else."""
        return (GIVEN,) if self.cell.workload.group == PLANS else WAYS

    def call(self, way: str = GIVEN) -> Call:
        """The function on these arrays as a user would call it, or its plan."""
        function = super().call(way)
        if self.cell.workload.group != PLANS:
            return function
        inputs = [self.values[name] for name in self.op.arrays]
        planned = opgrad.plan(getattr(opgrad, self.op.name), **self.values, **self.out(GIVEN))
        return partial(planned, *inputs, **self.out(GIVEN))

    def beside(self) -> dict[str, Call]:
        """What a plan is compared with: the plain call, and the kernel run by native code alone."""
        return {CALL: super().call(), KERNEL: Kernel(self)} if self.cell.workload.group == PLANS else {}

    def _converted(self, array: Array, dtype: str) -> Array:
        """The array, or its numbers in another dtype, in the cell's memory."""
        return array if array.dtype.name == dtype else self.placed(array.astype(DTYPES[dtype]))

    def traffic(self) -> int:
        """Each input once, of what broadcasts only what it has, and each result once, all in their own dtypes."""
        return self.moved

    def _errors(self) -> Iterator[float]:
        """Of the first rows: where dropout drops depends on an element's place."""
        rows = max(1, plain.CHECKED * self.shape[0] // math.prod(self.shape))
        values = {name: leading(value, rows, len(self.shape)) for name, value in self.values.items()}
        values |= {name: values[name].astype(np.float64) for name in self.op.arrays}
        if "post_ops" in values:
            values["post_ops"] = [leading(each, rows, len(self.shape)) for each in values["post_ops"]]
        for name, exact in reference(self.general, values).items():
            yield _error(self.results[name][:rows], exact)


class Kernel:
    """A call that runs the plan of a case several times, in native code, and does nothing else."""

    runs = 64  # beside which the call of a C function from Python counts for 20 ns

    def __init__(self, case: FormCase):
        arrays = [case.given[name] for name in case.general.arrays] + list(case.results.values())
        self.arrays, self.plan = arrays, self._plan(case)
        self.operands = np.array([array.ctypes.data for array in arrays])
        self._addresses = execute.address, self.plan.address, self.operands.ctypes.data

    @staticmethod
    def _plan(case: FormCase) -> Plan:
        op, given = case.general, case.given
        attributes = {name: given[name] for name in op.attributes if name in given}
        return plan(op, [spec_of(given[name]) for name in op.arrays], attributes)

    def __call__(self) -> None:
        threads = threads_for() if self.plan.parts_max > 1 else (0, 0)
        _repeat.call(self.runs, *self._addresses, *threads)


@native(6)
def _repeat(count: int, run_plan: int, plan: int, operands: int, run: int, context: int) -> int:
    """Run a plan so many times: what it takes without the call of a C function from Python."""
    for _ in range(count):
        call_address(run_plan, plan, operands, 0, 0, 1, run, context, 0)
    return 0


def _error(got: Array, exact: Array) -> float:
    """In ulp; for integers in units, for truth values infinite if one is wrong."""
    if got.dtype.kind == "b":
        return 0.0 if np.array_equal(got, exact) else math.inf
    if got.dtype.kind in "iu":
        limits = np.iinfo(got.dtype)
        return float(np.max(np.abs(got - np.clip(exact, limits.min, limits.max))))
    return error_in_ulp(got, exact)
