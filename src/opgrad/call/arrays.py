"""Public functions: their calls are answered in Python by the plan of their signature, which the first of them makes.

A signature is the shapes, strides, dtypes and attributes of a call. Its arguments are checked and its plan is made at
the first call; later calls find the plan. Calls on arrays of other libraries go to `opgrad.call.owners`.

A `Runner` runs the calls of one signature, whatever library their arrays come from: it finds operands, makes results,
and runs the plan. It reaches a library's arrays through a `contract.declaration.Memory`. No NumPy array is made of a
tensor, but for the check that raises an error: PyTorch never again resizes a tensor of which NumPy has had a view, not
even in place of a result (`out=`), and sharded training resizes its parameters in every step.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from opgrad.call import owners
from opgrad.call.entries import Answered, function_of
from opgrad.contract import Array, Operator, Spec, declared
from opgrad.contract.arrangement import contiguous
from opgrad.contract.declaration import HOST, Arrays, Memory, array_of, is_masked, no_array
from opgrad.contract.signature import is_plain, plain, prepare
from opgrad.cpu.plans import RUNNERS, Kept, plan_for
from opgrad.cpu.runtime import pool
from opgrad.cpu.runtime.abi import ARRAYS, TUPLE_ITEMS, TUPLES, unlike
from opgrad.cpu.runtime.plan import NO_MEMORY, OVERLAP, REPORT, check_overlap, execute
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
        self.problem = prepare(op, specs, attributes, brought, any_stride)
        self.makers: list[Callable[[], Any]] = []
        if brought is None:
            made = [self._made(name, given) for name in op.results]
            if made != [self.problem.specs[name] for name in op.results]:
                self.problem = prepare(op, specs, attributes, made, any_stride)
            self.makers = [memory.maker(spec, arrays and arrays[self.like]) for spec in made]
        self.copies = self.problem.copies
        self.specs = [self.problem.specs.get(name) for name in (*op.inputs, *op.results)]

    def _made(self, name: str, given: Mapping[str, Any]) -> Spec:
        """A result that calls do not bring, with the strides that its library gives it."""
        spec, order = self.problem.results[name], self.problem.orders[name]
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
        if not self.copies:
            self.execute(operands, new)
            return operands, results
        if not new:
            self.check_overlap(operands)
        for number, order in self.copies:  # kernels cannot use the strides of these operands
            operands[number] = self.memory.packed(operands[number], order)
        self.execute(operands, trusted=True)
        for number, _ in self.copies:
            if number >= len(arrays):
                self.memory.assign(results[number - len(arrays)], operands[number])
        return operands, results

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
        self.plan = plan_for(self.problem)
        self.address, self.threads = self.plan.address, self.plan.parts_max > 1
        self.nowhere = sum(1 for spec in self.specs if spec is None or 0 in spec.shape)
        self.table = ctypes.c_int64 * (len(self.specs) + REPORT)  # operands' addresses, then what a kernel reports

    def run(self, given: Mapping[str, Any]) -> Any:
        return self.answered(given).answer

    def answered(self, arguments: Mapping[str, Any]) -> Answered:
        """Run a call; return how it was answered."""
        out = arguments.get("out")
        operands, results = self.computed([arguments.get(name) for name in self.op.inputs], out)
        return Answered(self, operands, results, out is None, self.finish(tuple(results)))

    def execute(self, operands: Sequence[Any], trusted: bool) -> None:
        """Run the plan in native code, with threads.

        Raises ValueError for a tensor whose memory its library has given back.
        """
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


def as_tuple(out: Any) -> tuple[Any, ...]:
    """The results in `out`."""
    return out if isinstance(out, tuple) else (out,)


def one_or_tuple(results: tuple[Any, ...]) -> Any:
    """What a call returns, unless its operator has a `finish` of its own: the only result, or a tuple of all."""
    return results[0] if len(results) == 1 else results


def extent(address: int, spec: Spec) -> np.ndarray[Any, Any]:
    """A NumPy array at an address, at which NumPy does not look; whose memory it is does not notice, and keeps it."""
    if 0 in spec.shape:
        return np.empty(spec.shape, spec.dtype)
    place = {"data": (address, False), "shape": spec.shape, "strides": spec.strides}
    bits = {"version": 3, "typestr": f"<u{spec.dtype.itemsize}", **place}
    return np.asarray(SimpleNamespace(__array_interface__=bits)).view(spec.dtype)


class ArrayMemory:
    """`contract.declaration.Memory` for NumPy's arrays."""

    @staticmethod
    def spec(array: Array) -> Spec:
        return Spec(array.shape, array.dtype, array.strides)

    @staticmethod
    def address(array: Array) -> int:
        return array.ctypes.data

    @staticmethod
    def strides(spec: Spec, order: tuple[int, ...], model: Array | None) -> tuple[int, ...]:
        return contiguous(spec.shape, order, spec.dtype.itemsize)

    @staticmethod
    def maker(spec: Spec, like: Array) -> Callable[[], Array]:
        return pool.maker(spec)

    @staticmethod
    def packed(array: Array, order: tuple[int, ...]) -> Array:
        return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))

    assign = staticmethod(np.copyto)


def spec_of(array: Array | None) -> Spec | None:
    """An array as the checks see it."""
    return None if array is None else ArrayMemory.spec(array)


class ArrayRunner(HostRunner):
    """Runs the calls of a public function on NumPy's arrays that have one signature."""

    def __init__(self, op: Operator, arguments: Mapping[str, Any]):
        readable = unlike().isdisjoint((ARRAYS, TUPLES))  # else native code cannot read addresses from arrays here
        super().__init__(ArrayMemory(), op, arguments, by_arrays=readable)
        self.can_be_native = False  # `_find` sets it if it keeps the runner

    def answered(self, arguments: Mapping[str, Any]) -> Answered:
        if arguments.get("out") is not None:
            check_writeable(self.op, as_tuple(arguments["out"]))
        return super().answered(arguments)

    def views(self, operands: Sequence[Any]) -> Sequence[Any]:
        return operands


def check_writeable(op: Operator, outputs: Sequence[Array]) -> None:
    """Raise ValueError if one of the arrays in `out` is read-only."""
    for name, array in zip(op.results, outputs, strict=True):
        if not array.flags.writeable:
            raise ValueError(f"{op.name}: out for {name} is read-only, expected a writable array")


def dispatcher(op: Operator) -> Callable[..., Any]:
    """The public function of an operator. It answers a call by the entry of its signature, or else by its runner."""
    runners = Kept[Any](RUNNERS)  # what answers calls, by signature, whatever library their arrays come from
    named = namer(op)
    first = op.arrays[0] if op.arrays else op.parameters[0]
    place = op.parameters.index(first)

    def call(*args: Any, **kwargs: Any) -> Any:
        for name, other in op.instead.items():
            if kwargs.pop(name, False):
                return other(op.name, function, *args, **kwargs)
        library = owners.known.get(type(args[place] if len(args) > place else kwargs.get(first)))
        if library is not None:
            own = getattr(library, "called", None)
            return own(op, named, entries, runners, args, kwargs) if own else owners.run(op, named(args, kwargs))
        try:
            runner: Any = runners.get(_key(args, kwargs))
        except (TypeError, ValueError):  # a list, or a memoryview, has no hash
            runner = None
        is_new = runner is None  # else such a call has been checked
        called = named(args, kwargs) if is_new else dict(zip(op.parameters, args, strict=False)) | kwargs
        arguments = called
        if is_new:
            if owners.foreign(op, called):
                return owners.run(op, called)
            of, arguments = expanded(op, called)
            arguments = as_given(of, arguments)
            runner = _find(runners, of, args, kwargs, called, arguments)
        if entries is None or not runner.can_be_native:
            return runner.run(arguments)
        answered = runner.answered(arguments)
        if is_new and op.general is not None:
            answered = _as_called(op, answered, called)
        entries.enter(answered, args, kwargs)
        return answered.answer

    function, entries = function_of(call)
    return function


def _as_called(op: Operator, answered: Answered, called: Mapping[str, Any]) -> Answered:
    """The same answer with its operands as the call gave them, so that an entry can find them among the arguments.

    A view that repeats an array is replaced by the array. An array made from a plain number is kept, since every call
    of this signature has the same number. called: the call's arguments by name.
    """
    sources: dict[str, Any] = {}
    owners.over_arrays(op, called, sources.setdefault)
    operands, kept = list(answered.operands), [*answered.kept]
    for place, name in enumerate(answered.by.op.arrays):
        operand, source = operands[place], sources.get(name)
        if (
            type(source) is np.ndarray
            and type(operand) is np.ndarray
            and (operand.ctypes.data, operand.dtype) == (source.ctypes.data, source.dtype)
        ):
            operands[place] = source
        elif operand is not None and name not in op.parameters and is_plain(source):
            kept.append(operand)  # it was made from a number, which is part of the signature
    return replace(answered, operands=operands, kept=kept)


def _find(
    runners: Kept[Any], of: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    called: Mapping[str, Any], arguments: Mapping[str, Any],
) -> ArrayRunner:  # fmt: skip
    """The runner that is kept for a call's signature, or a new one. It is kept if the signature can be a key.

    called: the call's arguments by name. arguments: these as the operator takes them.
    """
    arrays = {name for name, value in called.items() if isinstance(value, np.ndarray | tuple | list)}
    is_own = all(called.get(name) is arguments.get(name) for name in arrays.union(of.arrays, ["out"]))
    if not (is_own and _never_changes(args, kwargs)):  # an array was converted, or a value may change
        args, kwargs = (), arguments
        if not _never_changes(args, kwargs):
            return ArrayRunner(of, arguments)
    key = _key(args, kwargs)
    runner: ArrayRunner | None = runners.get(key)
    if runner is None:
        runner = ArrayRunner(of, arguments)
        runners.keep(key, runner)
        runner.can_be_native = not (runner.copies or unlike())
    return runner


def expanded(op: Operator, given: dict[str, Any], library: Arrays = HOST) -> tuple[Operator, dict[str, Any]]:
    """The operator that computes a call, and the arguments by that operator's names.

    library: whose arrays they are.
    """
    general = op.general
    if general is None:
        return op, given
    if general.by_keywords and given.keys().isdisjoint(general.keywords) and _have_one_dtype(op, given):
        return op, given
    return general.expand(op, given, library)


def _have_one_dtype(op: Operator, given: Mapping[str, Any]) -> bool:
    """Whether the arrays of a call, `out` among them, have one dtype, which is one of those declared."""
    arrays = [given.get(name) for name in op.inputs]
    arrays += [] if given.get("out") is None else [given["out"]]
    names = {str(getattr(array, "dtype", "")) for array in arrays}
    return len(names) == 1 and names.issubset(op.inputs[op.arrays[0]].dtypes)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The signature of a call; TypeError if something in it cannot be part of a key, such as a list.

    Arrays give three or more entries, all else a value and its type, so the two are never confused.
    """
    key: list[Any] = [(a.shape, a.strides, a.dtype) if type(a) is np.ndarray else (a, type(a)) for a in args]
    for name, value in kwargs.items():
        kind = type(value)
        if kind is np.ndarray:
            key.append((name, value.shape, value.strides, value.dtype))
        elif kind is tuple and name == "out" and all(type(each) is np.ndarray for each in value):
            key.append((name, kind, *[(each.shape, each.strides, each.dtype) for each in value]))
        else:
            key.append((name, value, kind))
    return tuple(key)


def _never_changes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's signature may be the key of a plan: all its values but arrays are immutable."""
    out = kwargs.get("out")
    arrays = out if type(out) is tuple else ()
    values = [*args, *(value for name, value in kwargs.items() if name != "out" or not arrays), *arrays]
    return all(type(value) is np.ndarray or is_plain(value) for value in values)


def _shown(signature: inspect.Signature) -> inspect.Signature:
    """A signature as people read it: annotations hold what is checked, and docstrings say it in words."""
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def namer(op: Operator) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A function that gives a call's arguments by name; `Signature.bind` does the same but takes six times as long."""
    signature = inspect.signature(op.reference)
    positional = sum(1 for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY)
    required = frozenset(name for name, each in signature.parameters.items() if each.default is each.empty)
    every = frozenset(signature.parameters)

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(zip(op.parameters, args, strict=False))
        given.update(kwargs)
        complete = required.issubset(given) and every.issuperset(given)
        if not complete or len(args) > positional or len(given) < len(args) + len(kwargs):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{op.name}: {error}") from None
        return given

    return named


def as_given(op: Operator, named: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name: arrays as NumPy arrays, attributes as plain values."""
    given = dict(named)
    for name, value in named.items():
        if name in op.inputs and value is not None:
            if is_masked(value):
                raise TypeError(f"{op.name}: {name} is a masked array, expected an array without a mask")
            try:
                given[name] = value if type(value) is np.ndarray else array_of(value)
            except Exception as error:
                raise no_array(f"{op.name}: {name}", value, error) from error
        elif isinstance(value, np.ndarray) and name != "out":
            given[name] = value.item() if value.ndim == 0 else tuple(value.tolist())
    if "out" in given:
        given["out"] = _as_out(op, given["out"])
    return dict(plain(op, given))


def _as_out(op: Operator, out: Any) -> Any:
    """None, an array, or a tuple with an array for each result."""
    several = len(op.results) > 1
    if out is None:
        return None
    arrays = out if several else (out,)
    if not isinstance(arrays, tuple) or len(arrays) != len(op.results):
        raise TypeError(f"{op.name}: out is {type(out).__name__}, expected a tuple of {len(op.results)} arrays")
    for name, array in zip(op.results, arrays, strict=True):
        if not isinstance(array, np.ndarray) or is_masked(array):
            raise TypeError(f"{op.name}: out for {name} is {type(array).__name__}, expected a NumPy array")
    if all(type(array) is np.ndarray for array in arrays):
        return out
    return tuple(array.view(np.ndarray) for array in arrays) if several else out.view(np.ndarray)


F = TypeVar("F", bound=Callable[..., Any])


def public(function: F) -> F:
    """The public function of an operator, whose calls run kernels.

    function: that of a declaration in `opgrad.ops`, whose signature and docstring the public one has.
    """
    return cast(F, public_function(function.__name__))


@functools.cache
def public_function(name: str) -> Callable[..., Any]:
    """The public function of a declared operator, by the operator's name."""
    op = declared()[name]
    made = functools.wraps(op.reference)(dispatcher(op))
    made.__signature__ = _shown(inspect.signature(op.reference))  # type: ignore[attr-defined]
    made.__module__ = "opgrad"  # where people find it, and pickle
    return made
