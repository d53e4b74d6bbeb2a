"""Answers a call of a public function in Python: finds or makes the plan, allocates the results and runs the plan.

A signature is the shapes, strides, dtypes and attributes of a call. Its arguments are checked and its plan is made at
the first call; later calls find the plan. Calls on arrays of other libraries go to `opgrad.call.owners`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from opgrad.call import owners
from opgrad.call.entries import Answered
from opgrad.call.functions import function_of
from opgrad.call.runners import HostRunner, as_tuple
from opgrad.contract import Array, Operator, Spec
from opgrad.contract.arrangement import contiguous
from opgrad.contract.declaration import HOST, Arrays, is_masked
from opgrad.contract.signature import is_plain, plain
from opgrad.cpu.compiler import INTERPRETING
from opgrad.cpu.plans import RUNNERS, Kept
from opgrad.cpu.runtime import pool
from opgrad.cpu.runtime.abi import ARRAYS, TUPLES, unlike


class ArrayMemory:
    """`contract.libraries.Memory` for NumPy's arrays."""

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

    def __init__(self, op: Operator, args: tuple[Any, ...], given: Mapping[str, Any]):
        readable = unlike().isdisjoint((ARRAYS, TUPLES))  # else native code cannot read addresses from arrays here
        super().__init__(ArrayMemory(), op, given, by_arrays=readable)
        positions = dict(zip(op.parameters, range(len(args)), strict=False))
        self.sources = [(positions.get(name), name) for name in op.arrays]
        self.can_be_native = False  # `_find` sets it if it keeps the runner

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.finish(tuple(self._called(args, kwargs)[1]))

    def answered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answered:
        """Run a call; return how it was answered."""
        operands, results = self._called(args, kwargs)
        return Answered(self, operands, results, kwargs.get("out") is None, self.finish(tuple(results)))

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Sequence[Any]]:
        out = kwargs.get("out")
        if out is not None:
            check_writeable(self.op, as_tuple(out))
        return self.computed([kwargs.get(name) if place is None else args[place] for place, name in self.sources], out)

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
            return owners.called(library, op, named, (entries, args, kwargs), runners)
        try:
            runner = runners.get(_key(args, kwargs))
        except (TypeError, ValueError):  # a list, or a memoryview, has no hash
            runner = None
        given_args, given_kwargs, given = args, kwargs, None
        if runner is None:
            given = named(args, kwargs)
            if owners.foreign(op, given):
                return owners.run(op, given)
            of, given = expanded(op, given)
            given = as_given(of, given)
            if not _is_plain(of, args, kwargs, given):
                args, kwargs = (), given
            runner = _find(runners, of, args, kwargs, given)
        if entries is None or not runner.can_be_native:
            return runner(args, kwargs)
        answered = runner.answered(args, kwargs)
        if given is not None and op.general is not None:
            answered = _as_called(op, answered, named(given_args, given_kwargs))
        entries.enter(answered, given_args, given_kwargs)
        return answered.answer

    function, entries = function_of(call)
    return function


def _as_called(op: Operator, answered: Answered, given: Mapping[str, Any]) -> Answered:
    """The same answer with its operands as the call gave them, so that an entry can find them among the arguments.

    A view that repeats an array is replaced by the array, and an array made from a record's numbers by the record. An
    array made from a plain number is kept, since every call of this signature has the same number. given: the call's
    arguments by name.
    """
    found: dict[str, Any] = {}
    owners.over_arrays(op, given, found.setdefault)
    operands, kept, numbers = list(answered.operands), [*answered.kept], op.general.numbers if op.general else {}
    for place, name in enumerate(answered.by.op.arrays):
        operand, source = operands[place], found.get(name)
        if name in numbers:
            operands[place] = given[numbers[name]]
        elif type(source) is np.ndarray and type(operand) is np.ndarray and _shows(operand, source):
            operands[place] = source
        elif operand is not None and name not in op.parameters and is_plain(source):
            kept.append(operand)  # it was made from a number, which is part of the signature
    return replace(answered, operands=operands, kept=kept)


def _shows(view: Array, array: Array) -> bool:
    return view.ctypes.data == array.ctypes.data and view.dtype == array.dtype


def _find(
    runners: Kept[Any], of: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
) -> ArrayRunner:
    """The runner that is kept for a call's signature, or a new one. It is kept if the signature can be a key."""
    if not _never_changes(args, kwargs):
        return ArrayRunner(of, args, given)
    key = _key(args, kwargs)
    runner: ArrayRunner | None = runners.get(key)
    if runner is None:
        runner = ArrayRunner(of, args, given)
        runners.keep(key, runner)
        runner.can_be_native = not (runner.plan.copies or INTERPRETING or unlike())
    return runner


def expanded(op: Operator, given: dict[str, Any], library: Arrays = HOST) -> tuple[Operator, dict[str, Any]]:
    """The operator that computes a call, and the arguments by that operator's names.

    library: whose arrays they are.
    """
    return op.general.expand(op, given, library) if op.general else (op, given)


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


def _is_plain(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the call can run on its own arguments: no array was converted, and all other values are immutable."""
    named = {**dict(zip(op.parameters, args, strict=False)), **kwargs}
    arrays = {name for name, value in named.items() if isinstance(value, np.ndarray | tuple | list)}
    own = all(named.get(name) is given.get(name) for name in arrays.union(op.arrays, ["out"]))
    return own and _never_changes(args, kwargs)


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
            given[name] = _as_array(op, name, value)
        elif isinstance(value, np.ndarray) and name != "out":
            given[name] = value.item() if value.ndim == 0 else tuple(value.tolist())
    if "out" in given:
        given["out"] = _as_out(op, given["out"])
    return dict(plain(op, given))


def _as_array(op: Operator, name: str, value: Any) -> Array:
    if type(value) is np.ndarray:
        return value
    if is_masked(value):
        raise TypeError(f"{op.name}: {name} is a masked array, expected an array without a mask")
    try:
        return np.asarray(value)
    except Exception as error:
        raise TypeError(f"{op.name}: {name} is {type(value).__name__}, expected an array") from error


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


def runner(op: Operator, given: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A function that runs the calls of one signature, made from example arguments; it takes the arrays by name."""
    return functools.partial(ArrayRunner(op, (), given), ())
