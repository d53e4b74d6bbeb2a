"""Runs the calls of one signature, whatever library their arrays come from: it finds operands, makes results, runs.

A library's arrays are reached through a `contract.libraries.Memory`. No NumPy array is made of a tensor, but for the
check that raises an error: PyTorch never again resizes a tensor of which NumPy has had a view, not even in place of a
result (`out=`), and sharded training resizes its parameters in every step.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from opgrad.contract import Operator, Spec
from opgrad.contract.declaration import Memory
from opgrad.contract.signature import prepare
from opgrad.cpu.compiler import INTERPRETING
from opgrad.cpu.compiler.structures import at
from opgrad.cpu.plans import plan_for
from opgrad.cpu.runtime.abi import TUPLE_ITEMS
from opgrad.cpu.runtime.plan import NO_MEMORY, OVERLAP, REPORT, Plan, check_overlap, execute, run_steps
from opgrad.cpu.runtime.threads import threads_for


def model_of(op: Operator, result: str) -> str | None:
    """The argument for each of whose elements this result has an entry; None if there is none."""
    if op.kind == "slices" or op.results[result].role != "element":
        return None
    return next((name for name, tensor in op.inputs.items() if tensor.role == "element"), None)


ABSENT = np.empty(0)  # passed in place of an operand that was left out; no kernel reads it


class Runner:
    """Runs the calls of one signature: results are made, and operands copied where kernels cannot use them.

    specs: those of all operands, results last; None for an operand that is left out. makers: of the results, unless
    the call brings them. like: the first array that a call brings.
    """

    def __init__(self, memory: Memory, op: Operator, given: Mapping[str, Any], any_stride: bool = False):
        arrays = [given.get(name) for name in op.inputs]
        specs = [None if array is None else memory.spec(array) for array in arrays]
        attributes = {name: given[name] for name in op.attributes if name in given}
        brought = None if given.get("out") is None else [memory.spec(each) for each in as_tuple(given["out"])]
        self.memory, self.op, self.finish = memory, op, op.finish or one_or_tuple
        self.like = next((place for place, array in enumerate(arrays) if array is not None), 0)
        self.prepared = prepare(op, specs, attributes, brought, any_stride)
        self.makers: list[Callable[[], Any]] = []
        if brought is None:
            made = [self._made(name, given) for name in op.results]
            if made != [self.prepared.problem.specs[name] for name in op.results]:
                self.prepared = prepare(op, specs, attributes, made, any_stride)
            self.makers = [memory.maker(spec, arrays and arrays[self.like]) for spec in made]
        self.copies = self.prepared.copies
        self.specs = [self.prepared.problem.specs.get(name) for name in (*op.inputs, *op.results)]

    def _made(self, name: str, given: Mapping[str, Any]) -> Spec:
        """A result that calls do not bring, with the strides that its library gives it."""
        spec, order = self.prepared.results[name], self.prepared.problem.orders[name]
        model = model_of(self.op, name)
        return replace(spec, strides=self.memory.strides(spec, order, None if model is None else given[model]))

    def run(self, given: Mapping[str, Any]) -> Any:
        """Run on arrays of this signature, given by parameter name."""
        _, results = self.computed([given.get(name) for name in self.op.inputs], given.get("out"))
        return self.finish(tuple(results))

    def computed(self, arrays: Sequence[Any], out: Any) -> tuple[list[Any], Sequence[Any]]:
        """Run on these arrays, None for one that is left out; returns all operands, and the results among them."""
        new = out is None
        results: Sequence[Any] = [make() for make in self.makers] if new else as_tuple(out)
        operands = [*arrays, *results]
        if self.copies:
            self._on_copies(operands, results, trusted=new)
        else:
            self.execute(operands, new)
        return operands, results

    def _on_copies(self, operands: list[Any], results: Sequence[Any], trusted: bool) -> None:
        """Run on copies of the operands whose strides kernels cannot use, and copy such results back."""
        if not trusted:
            self.check_overlap(operands)
        inputs, memory = len(operands) - len(results), self.memory
        for number, order in self.copies:
            operands[number] = memory.packed(operands[number], order)
        self.execute(operands, trusted=True)
        for number, _ in self.copies:
            if number >= inputs:
                memory.assign(results[number - inputs], operands[number])

    def execute(self, operands: Sequence[Any], trusted: bool) -> None:
        """Run the kernels. Raises an exception if a kernel reports bad input.

        trusted: whether the results are known to overlap nothing.
        """
        raise NotImplementedError

    def addresses(self, operands: Sequence[Any]) -> list[int]:
        """Where the operands lie, 0 for one that is left out."""
        address_of = self.memory.address
        return [0 if each is None else address_of(each) for each in operands]

    def check_overlap(self, operands: Sequence[Any]) -> None:
        """Raise ValueError if a result overlaps another operand in a way that is not allowed."""
        check_overlap(self.op, self.views(operands))

    def views(self, operands: Sequence[Any]) -> Sequence[Any]:
        """NumPy arrays in the memory of the operands, of which their library does not know."""
        places = zip(self.addresses(operands), self.specs, strict=True)
        return [None if spec is None else extent(address, spec) for address, spec in places]


class HostRunner(Runner):
    """Runs the calls of one signature on the CPU.

    by_arrays: whether the operands are NumPy arrays, from which native code reads their addresses.
    """

    def __init__(self, memory: Memory, op: Operator, given: Mapping[str, Any], by_arrays: bool = False):
        super().__init__(memory, op, given)
        self.by_arrays, self.complete = by_arrays, None not in self.specs
        self.plan = plan_for(self.prepared)
        self.address, self.threads = self.plan.address, self.plan.parts_max > 1
        self.nowhere = sum(1 for spec in self.specs if spec is None or 0 in spec.shape)
        self.table = ctypes.c_int64 * (len(self.specs) + REPORT)  # operands' addresses, then what a kernel reports

    def execute(self, operands: Sequence[Any], trusted: bool) -> None:
        """Run the plan in native code, with threads.

        Raises ValueError for a tensor whose memory its library has given back.
        """
        if INTERPRETING:
            self._interpret(operands, trusted)
            return
        run, context = threads_for() if self.threads else (0, 0)
        arrays: tuple[Any, ...] = ()
        if self.by_arrays:
            table = self.table()
            arrays = tuple(operands if self.complete else [ABSENT if each is None else each for each in operands])
        else:
            addresses = self.addresses(operands)
            if addresses.count(0) > self.nowhere:
                raise self._lost(addresses)
            table = self.table(*addresses)
        place, count = ctypes.addressof(table), len(operands)
        items, report = id(arrays) + TUPLE_ITEMS if arrays else 0, place + 8 * count
        status = execute.call(self.address, place, items, count, trusted, run, context, report)
        if status == OVERLAP:
            self.check_overlap(operands)
            self.execute(operands, trusted=True)
        elif status:
            raise self.plan.error(None if status == NO_MEMORY else table[count:])

    def _lost(self, addresses: Sequence[int]) -> ValueError:
        named = zip((*self.op.arrays, *self.op.results), self.specs, addresses, strict=True)
        name = next(name for name, spec, address in named if spec and not address and 0 not in spec.shape)
        return ValueError(f"{self.op.name}: {name} has no memory, expected an array whose storage is allocated")

    def _interpret(self, operands: Sequence[Any], trusted: bool) -> None:
        """Run the plan in Python, with every access of a kernel checked."""
        from opgrad.cpu.compiler import interpret

        if not trusted:
            self.check_overlap(operands)
        if report := interpret.run(_run_steps, self.plan, self.views(operands)):
            raise self.plan.error(report)


def _run_steps(plan: int, *rest: Any) -> int:
    return run_steps(at(Plan, plan), *rest)


def as_tuple(out: Any) -> tuple[Any, ...]:
    """The results in `out`."""
    return out if isinstance(out, tuple) else (out,)


def one_or_tuple(results: tuple[Any, ...]) -> Any:
    """What a call returns, unless its operator has a `finish` of its own: the only result, or a tuple of all."""
    return results[0] if len(results) == 1 else results


class _Extent:
    """An array's place and strides for NumPy, which does not look at what lies there."""

    def __init__(self, address: int, spec: Spec):
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": spec.shape,
            "strides": spec.strides,
            "typestr": f"<u{spec.dtype.itemsize}",
        }


def extent(address: int, spec: Spec) -> np.ndarray[Any, Any]:
    """A NumPy array at an address; whose memory it is does not notice, and has to keep it."""
    if 0 in spec.shape:
        return np.empty(spec.shape, spec.dtype)
    return np.asarray(_Extent(address, spec)).view(spec.dtype)
