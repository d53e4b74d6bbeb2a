"""Runs operators on arrays in a CUDA device's memory, whatever library they come from.

As for NumPy, a signature's plan is made once and kept. A warm call asks each array for its key, finds the plan,
makes the results and launches the kernels with nothing but addresses.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from opgrad.contract import Operator, Spec
from opgrad.contract.plain import is_plain, plain
from opgrad.contract.signature import Prepared, pairs, prepare
from opgrad.interop import Memory, arrays_of
from opgrad.locks import settling
from opgrad.native.arrays import one_or_tuple
from opgrad.native.overlap import check_overlap, touch

PLANS = 1024  # signatures kept for each library; the oldest goes first

# From what is no array of the library, or, such as a list, cannot be part of a key.
ERRORS = (AttributeError, TypeError, RuntimeError, ValueError)
Copies = Sequence[tuple[int, tuple[int, ...]]]  # operands by number, with the memory order of the copy


class Plan(Protocol):
    """A checked signature, ready to run."""

    def run(self, given: Mapping[str, Any]) -> Any:
        """Run on arrays of this signature, given by parameter name."""


class Runners:
    """The plans of one library's calls, by signature.

    `settle` sees the arguments of each new signature: it raises where no plan can be made for them, and returns
    them as the contract takes them, a library's own dtypes as NumPy's. `make` makes the plan.
    """

    def __init__(
        self,
        memory: Memory,
        settle: Callable[[Operator, Mapping[str, Any]], Mapping[str, Any]],
        make: Callable[[Any, Operator, Mapping[str, Any]], Plan] | None = None,
    ):
        self.memory, self.settle, self.make = memory, settle, make or DevicePlan
        self._plans: dict[Any, Plan] = {}

    def run(self, op: Operator, given: Mapping[str, Any]) -> Any:
        """Run an operator on arrays given by parameter name, all on one device, which is the current one."""
        try:
            plan = self._plans.get(self._key(op, given))
        except ERRORS:
            plan = None
        return (plan or self._settled(op, given)).run(given)

    def _settled(self, op: Operator, given: Mapping[str, Any]) -> Plan:
        """The plan of a call whose attributes may come in arrays; a new one, which is kept if its key can be."""
        settled = plain(op, given)
        try:
            key = self._key(op, settled)
            plan = self._plans.get(key)
        except ERRORS:
            return self._new_plan(op, settled)
        if plan is None:
            plan = self._new_plan(op, settled)
            if all(is_plain(settled[name]) for name in settled if name not in op.inputs and name != "out"):
                with settling:
                    if len(self._plans) >= PLANS:
                        del self._plans[next(iter(self._plans))]
                    self._plans[key] = plan
        return plan

    def _key(self, op: Operator, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arrays by their keys, all else by value and type, which tells 1 from True."""
        of = self.memory.key
        key: list[Any] = [op]  # the plain and the general forms of an operator have the same name
        for name, value in given.items():
            if name in op.inputs:
                key.append((name, None if value is None else of(value)))
            elif name != "out":
                key.append((name, value, type(value)))
            elif value is not None:
                key.append((name, *map(of, value)) if type(value) is tuple else (name, of(value)))
        return tuple(key)

    def _new_plan(self, op: Operator, given: Mapping[str, Any]) -> Plan:
        return self.make(self.memory, op, self.settle(op, given))


class Signature:
    """What the arrays of a call have in common with those of every call with its key: checked, laid out."""

    def __init__(self, memory: Memory, op: Operator, given: Mapping[str, Any], any_stride: bool):
        arrays = [given.get(name) for name in op.inputs]
        specs = [None if array is None else memory.spec(array) for array in arrays]
        attributes = self.attributes = {name: given[name] for name in op.attributes if name in given}
        self.brought = given.get("out") is not None
        out = [memory.spec(each) for each in as_tuple(given["out"])] if self.brought else None
        self.prepared: Prepared = prepare(op, specs, attributes, out, any_stride)
        self.names, self.specs = tuple(op.inputs), [*specs, *(out or ())]
        self.like = next(name for name in op.inputs if given.get(name) is not None)
        self.made: list[Spec] = []
        if not self.brought:
            self.made = [self._result_spec(memory, op, given, name) for name in op.results]
            self.prepared = prepare(op, specs, attributes, self.made, any_stride)
        self.makers = [memory.maker(spec, given[self.like]) for spec in self.made]

    def _result_spec(self, memory: Memory, op: Operator, given: Mapping[str, Any], name: str) -> Spec:
        """A result that the caller did not bring."""
        spec, order = self.prepared.results[name], self.prepared.problem.orders[name]
        model = model_of(op, name)
        strides = memory.strides(spec, order, None if model is None else given[model])
        return Spec(spec.shape, spec.dtype, strides)


def _check_aligned(memory: Memory, op: Operator, name: str, array: Any) -> None:
    """Raise ValueError for an array whose elements lie across words of memory: a device cannot read it, nor copy it."""
    size = memory.spec(array).dtype.itemsize
    if memory.address(array) % size:
        raise ValueError(
            f"{op.name}: {name} begins at an address that is no multiple of {size} bytes, the size of its elements, "
            "expected an aligned array"
        )


def model_of(op: Operator, result: str) -> str | None:
    """The argument for each of whose elements this result has an entry; None if there is none."""
    if op.kind == "slices" or op.results[result].role != "element":
        return None
    return next(name for name, tensor in op.inputs.items() if tensor.role == "element")


class DevicePlan:
    """A signature's program, compiled for the alignments of its arrays."""

    def __init__(self, memory: Memory, op: Operator, given: Mapping[str, Any]):
        signature = Signature(memory, op, given, any_stride=True)
        for name, array in arrays_of(op, given).items():
            _check_aligned(memory, op, name, array)
        if importlib.util.find_spec("triton") is None:
            raise ImportError(
                f'{op.name}: CUDA kernels need Triton, which is not installed: pip install "opgrad[cuda]"'
            )
        self.memory, self.op, self.signature = memory, op, signature
        self.copies = signature.prepared.copies
        self.pairs = pairs(signature.prepared) if signature.brought else []
        self.program = op.kernel("cuda")(signature.prepared.problem)
        self.scratch = None
        if self.program.scratch_bytes:
            spec = Spec((self.program.scratch_bytes,), np.dtype(np.uint8), (1,))
            self.scratch = memory.maker(spec, given[signature.like])
        self.finish = op.finish or one_or_tuple
        self.compiled: Any = None
        self.checks: Any = None

    def run(self, given: Mapping[str, Any]) -> Any:
        signature, memory = self.signature, self.memory
        operands = [given.get(name) for name in signature.names]
        if signature.brought:
            results: Sequence[Any] = as_tuple(given["out"])
            self._check_overlap([*operands, *results])
        else:
            results = [make() for make in signature.makers]
        operands += results
        pack(memory, self.copies, operands)
        self._launch(operands, given[signature.like])
        unpack(memory, self.copies, operands, results)
        return self.finish(tuple(results))

    def _check_overlap(self, operands: Sequence[Any]) -> None:
        """Raise ValueError if a result overlaps another operand in a way that is not allowed.

        Operands that span common bytes, which is rare, are settled element by element, as for NumPy.
        """
        addresses = [0 if each is None else self.memory.address(each) for each in operands]
        if any(touch(pair, addresses[pair.result], addresses[pair.other]) for pair in self.pairs):
            places = zip(addresses, self.signature.specs, strict=True)
            check_overlap(self.op, [None if spec is None else extent(address, spec) for address, spec in places])

    def _launch(self, operands: Sequence[Any], like: Any) -> None:
        memory = self.memory
        addresses = [0 if array is None else memory.address(array) for array in operands]
        scratch = self.scratch and self.scratch()
        base = 0 if scratch is None else memory.address(scratch)
        stream = memory.stream(like)
        if self.compiled is None:
            self._compile(addresses, base)
        if self.checks is not None:
            self.checks.run(addresses, base, stream)
            position, value = memory.words(scratch)
            if position >= 0:
                raise self.program.explain(position, value)
        self.compiled.run(addresses, base, stream)

    def _compile(self, addresses: Sequence[int], scratch: int) -> None:
        from opgrad.cuda.execute import Compiled, Program

        if self.program.checks and self.signature.prepared.problem.attributes.get("check"):
            self.checks = Compiled(Program(self.program.checks), addresses, scratch)
        self.compiled = Compiled(self.program, addresses, scratch)


def pack(memory: Memory, copies: Copies, operands: list[Any]) -> None:
    """Put copies in place of the operands that kernels cannot use where they lie."""
    for number, order in copies:
        operands[number] = memory.packed(operands[number], order)


def unpack(memory: Memory, copies: Copies, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Give the results that were computed in copies their elements; results are the last of the operands."""
    first = len(operands) - len(results)
    for number, _ in copies:
        if number >= first:
            memory.assign(results[number - first], operands[number])


def as_tuple(out: Any) -> tuple[Any, ...]:
    """The results in `out`."""
    return out if isinstance(out, tuple) else (out,)


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
