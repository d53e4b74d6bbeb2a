"""Entries, which describe calls of one signature to native code (`opgrad.call.calls`), and functions that have them.

A public function is an object that CPython calls through a pointer in it (vectorcall, PEP 590). After the first call
that native code can repeat, the pointer leads to the compiled `opgrad.call.calls.call`. Before that, on other
implementations of Python, and for a call that fits no entry, the object calls the Python function that it was made of.

An entry is made from a call that Python has answered. Each operand of that call is identified as an object: it is an
argument, an item of a sequence among the arguments, or an object that the plan keeps. If it is none of these, Python
has made it during the call, and Python goes on answering calls of this signature.
"""

import ctypes
import functools
import operator
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np

from opgrad.base.locks import settling
from opgrad.call import calls
from opgrad.call.calls import Functions, Value
from opgrad.contract import Spec
from opgrad.contract.signature import PLAIN, RECORDS, fields, is_plain
from opgrad.cpu.compiler.words import several, words
from opgrad.cpu.runtime import abi, pool, threads
from opgrad.cpu.runtime.abi import SUPPORTED
from opgrad.cpu.runtime.plan import FEW
from opgrad.cpu.runtime.system import address

MOST_ITEMS = 4096


class NotNative(Exception):
    """Raised if native code cannot answer calls of this signature, so that Python goes on answering them."""


class NoTensors:
    """How entries describe arrays of a library other than NumPy while no such library is known.

    PyTorch's `opgrad.call.libraries.torch_calls.TorchTensors` takes its place.
    """

    kinds: frozenset[type] = frozenset()  # the types of the library's arrays
    address = 0  # of the table about the library that native code reads

    def watchers(self, tensors: Sequence[Any]) -> int:
        """How many of the library's watchers are asked before a call on these tensors."""
        return 0


def flattened(values: Sequence[Any]) -> list[Any]:
    """The arguments, with each sequence replaced by its length and items, and each record by its type and fields."""
    flat: list[Any] = []
    for value in values:
        kind = type(value)
        if is_sequence(value):
            flat += [len(value), *flattened(value)]
        elif kind in RECORDS:
            flat += [
                kind,
                *flattened([getattr(value, each, None) for each in fields(kind) if each not in RECORDS[kind]]),
            ]
        else:
            flat.append(value)
    return flat


def is_sequence(value: Any) -> bool:
    """Whether native code may read a value's items: a list, a tuple, or a subclass of tuple in PLAIN."""
    return type(value) in (list, tuple) or (isinstance(value, tuple) and type(value) in PLAIN)


def _same(place: tuple[int, int]) -> Mapping[str, int]:
    return {"kind": calls.SAME, "other_container": place[0], "other_index": place[1]}


UNLOCKED_FROM = 1 << 16  # bytes moved; giving the interpreter's lock up and taking it again costs some 50 ns
MOST_VALUES = 16


@dataclass(frozen=True)
class Answered:
    """How Python has answered a call.

    by: the runner (`opgrad.call.arrays`) whose plan was run, or a function that was called with `operands`.
    operands: inputs and results in the plan's order, None for one that was left out. In place of a view that repeats an
        array stands that array, as the call was given it.
    results: the operands that are returned, in order. new: whether the call allocated them.
    answer: what was returned. kept: objects other than arguments that every such call uses. watched: whether, before
        each call, the arrays' library is asked whether it must see the call.
    """

    by: Any
    operands: Sequence[Any]
    results: Sequence[Any]
    new: bool
    answer: Any
    kept: Sequence[Any] = ()
    watched: bool = True


tensors: Any = NoTensors()  # replaced by PyTorch's when that is imported


def know(found: Any) -> None:
    """Allow entries for calls on the arrays of this library, too."""
    global tensors
    tensors = found


def signature_of(by: Any, values: Sequence[Any], names: Sequence[str]) -> Any:
    """A hashable key; two calls of one function that need different entries have different keys."""
    places: dict[int, int] = {}
    same: list[int] = []
    rest: list[Any] = []
    for value in flattened(values):
        same.append(places.setdefault(id(value), len(same)))
        rest.append((type(value), value if is_plain(value) else _layout(value)))
    return by, tuple(names), tuple(same), tuple(rest)


def _layout(value: Any) -> Any:
    """The shape and strides of an array.

    A plan cannot stand for them: a repeated array has the plan of its whole shape.
    """
    if type(value) is np.ndarray:
        return value.shape, value.strides
    return tensors.layout(value) if type(value) in tensors.kinds else None


class _Description:
    """The description of a call that Python has answered, for native code.

    places: the container and index of each array and sequence, by its id. arrays: how many the call has. used: how many
    of them are operands. kept: what native code reads, the entry among it, and objects whose addresses are compared;
    the list owns their memory.
    """

    def __init__(self, answered: Answered, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.answered, self.args, self.names, self.values = answered, args, list(kwargs), [*args, *kwargs.values()]
        self.tensors, self.flat, self.plan = tensors, flattened(self.values), getattr(answered.by, "plan", None)
        self.is_torch = any(type(each) in tensors.kinds for each in self.flat)
        self.places: dict[int, tuple[int, int]] = {}
        self.described: list[Value] = []
        self.kept: list[Any] = [answered.by, self.plan, answered.kept]
        self.containers, self.arrays, self.used = 1, 0, 0

    def at(self, block: Any) -> int:
        """The address of a block of memory, which is kept."""
        self.kept.append(block)
        return ctypes.addressof(block)

    # --- values: what the arguments must be ---

    def _describe(self, value: Any, container: int, index: int) -> None:
        """Append the description of a value, and those of its items or fields."""
        made = Value(container, index, **self._expected(value, container, index))
        self.described.append(made)
        if made.kind in (calls.TUPLE, calls.LIST):
            for place, item in enumerate(value):
                self._describe(item, made.inside, place)
        elif made.kind == calls.RECORD:
            for place, name in enumerate(fields(type(value))):
                if name not in RECORDS[type(value)]:
                    self._describe(getattr(value, name, None), made.inside, place)

    def _expected(self, value: Any, container: int, index: int) -> Mapping[str, int]:
        if is_sequence(value):
            return self._sequence(value, container, index)
        kind = type(value)
        if kind in RECORDS:
            names = fields(kind)
            if abi.words(id(value) + abi.FIELDS, len(names)) != [id(getattr(value, name, None)) for name in names]:
                raise NotNative  # its layout in memory is not the one that native code reads
            return {"kind": calls.RECORD, "type": id(kind), "inside": self._new_container()}
        is_tensor = kind in self.tensors.kinds
        if kind is not np.ndarray and not is_tensor:
            return self._number(value)
        self.arrays += 1
        place = self.places.setdefault(id(value), (container, index))
        if place != (container, index):
            return _same(place)
        self.kept.append(kind)
        if not is_tensor:
            is_written = not self.answered.new and any(value is result for result in self.answered.results)
            flags = abi.WRITEABLE if is_written else 0
            return {"kind": calls.ARRAY, "type": id(kind), "flags": flags, "layout": self._layout(value)}
        expected = self.tensors.of_value(value)
        if self.plan is not None and expected["records_grad"]:  # PyTorch has recorded what the plan did
            raise NotNative
        return {"kind": calls.TENSOR, **expected, "layout": self._layout(value)}

    def _layout(self, array: Any) -> int:
        """The address of the layout of an array or a tensor."""
        if type(array) in self.tensors.kinds:
            dtype, sizes = self.tensors.dtype(array), self.tensors.sizes(array)
        else:
            dtype, sizes = id(array.dtype), (*array.shape, *array.strides)
            self.kept.append(array.dtype)
        return self.at(calls.Layout(dtype, len(sizes) // 2, self.at(words(sizes))))

    def _new_container(self) -> int:
        self.containers += 1
        if self.containers > calls.CONTAINERS:
            raise NotNative
        return self.containers - 1

    def _sequence(self, value: Any, container: int, index: int) -> Mapping[str, int]:
        place = self.places.setdefault(id(value), (container, index))
        if value and place != (container, index):
            self.arrays += sum(id(each) in self.places for each in flattened(value))
            return _same(place)
        if len(value) > MOST_ITEMS:
            raise NotNative
        kind = type(value)
        self.kept.append(kind)
        which, inside = calls.LIST if kind is list else calls.TUPLE, self._new_container()
        return {"kind": which, "type": id(kind), "length": len(value), "inside": inside}

    def _number(self, value: Any) -> Mapping[str, int]:
        if not is_plain(value):
            raise NotNative
        kind = type(value)
        self.kept.append(value)
        expected = {"object": id(value), "type": id(kind)}
        if kind is float:
            return {"kind": calls.FLOAT, "bits": struct.unpack("q", struct.pack("d", value))[0], **expected}
        return {"kind": calls.EQUAL if kind in (int, str) else calls.OBJECT, **expected}

    # --- the entry ---

    def entry(self) -> calls.Entry:
        """The entry, which is kept, too."""
        answered, names = self.answered, [sys.intern(name) for name in self.names]
        if len(self.values) > MOST_VALUES:
            raise NotNative
        for index, value in enumerate(self.values):
            self._describe(value, 0, index)
        operands = [self._operand(number, operand) for number, operand in enumerate(answered.operands)]
        if self.used != self.arrays:  # an array that is no operand is an attribute's value, which may change
            raise NotNative
        found = calls.Entry(
            positional=len(self.args),
            named=len(names),
            names=self.at(words(map(id, names))),
            values=len(self.described),
            first_value=self.at(several(Value, self.described)),
            owner=id(self.kept),
            is_torch=self.is_torch,
            watchers=self.tensors.watchers(self.flat) if answered.watched else calls.NONE,
            operands=len(operands),
            first_operand=self.at(several(calls.Operand, operands)),
            order=self.at(words(range(len(operands)))),
            **(self._of_function() if self.plan is None else self._of_plan(self.plan)),
        )
        self.kept += names, found
        return found

    def _of_plan(self, plan: Any) -> dict[str, int]:
        answered, op = self.answered, self.answered.by.op
        lists = op.lists
        if plan.problem.copies or (op.finish is not None and not lists):
            raise NotNative
        if lists:
            same = True
        elif answered.new:
            found = answered.answer if isinstance(answered.answer, tuple) else (answered.answer,)
            same = len(found) == len(answered.results) and all(map(operator.is_, found, answered.results))
        else:  # PyTorch counts how often a tensor was written to
            same = not self.is_torch and any(value is answered.answer for value in self.values)
        if not same:  # the call returned anything but the plan's results
            raise NotNative
        if not self.is_torch:
            for spec, array in zip(answered.by.specs, answered.operands, strict=False):
                if spec is not None and type(array) is np.ndarray and not _is_still(array, spec):
                    raise NotNative  # another thread has given the array another shape since the plan was made for it
        out = calls.NONE
        if not answered.new and not lists:
            out = next((place for place, value in enumerate(self.values) if value is answered.answer), calls.NONE)
        return {
            "plan": plan.address,
            "shared": plan.parts_max > 1,
            "unlocked": plan.problem.bytes >= UNLOCKED_FROM,
            "trusted": answered.new,
            "out": out,
            "lists": lists,
            "results": len(answered.results) if out == calls.NONE else 0,
            "tables_from": pool.source(8 * calls.TABLES * len(answered.operands)),
        }

    def _of_function(self) -> dict[str, int]:
        answered = self.answered
        if len(answered.operands) > FEW:
            raise NotNative
        item, whole = calls.NONE, answered.results
        if isinstance(whole, tuple) and answered.answer is not whole:
            item = next((place for place, result in enumerate(whole) if result is answered.answer), calls.NONE)
        if item == calls.NONE and answered.answer is not whole:
            raise NotNative
        return {"apply": id(answered.by), "item": item}

    def _operand(self, number: int, operand: Any) -> calls.Operand:
        answered, by_plan = self.answered, self.plan is not None
        if operand is None and by_plan:
            return calls.Operand(calls.LEFT_OUT)
        if by_plan and answered.new and number >= len(answered.by.op.arrays):
            make = answered.by.makers[number - len(answered.by.op.arrays)]
            self.kept.append(make)
            empty = self.tensors.empty if self.is_torch else np.empty
            is_empty = isinstance(make, functools.partial) and make.func is empty  # as native code makes it, too
            return calls.Operand(calls.NEW, object=0 if is_empty else id(make), layout=self._layout(operand))
        if id(operand) in self.places:
            self.used += 1
            return calls.Operand(calls.ARGUMENT, *self.places[id(operand)])
        if any(operand is kept for kept in answered.kept) or (not by_plan and is_plain(operand)):
            self.kept.append(operand)
            return calls.Operand(calls.KEPT, object=id(operand))
        raise NotNative


def _is_still(array: Any, spec: Spec) -> bool:
    """Whether an array, broadcast to the shape of `spec`, has its strides and dtype."""
    try:
        shown = array if array.shape == spec.shape else np.broadcast_to(array, spec.shape)
    except ValueError:
        return False
    return (shown.strides, shown.dtype) == (spec.strides, spec.dtype)


class PythonFunction(abi.Function):
    """The public function as Python sees it: its name and methods, and the call that no native code answers."""

    _python: Callable[..., Any]
    _entries: "Entries"
    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._python(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return f"<function {self.__name__} at {id(self):#x}>"


_Type = abi.native_type(PythonFunction)


def function_of(python: Callable[..., Any]) -> tuple[Any, "Entries | None"]:
    """The public function made of a Python function, and its entries.

    Where native calls are impossible, `python`, None.
    """
    if not SUPPORTED:
        return python, None
    made = _Type()
    made._python = python
    made._entries = Entries(made, python)
    return made, made._entries


# --- entries -------------------------------------------------------------------------------------------------------


@functools.cache
def _c_functions() -> Functions:
    """What native calls call; it is never freed."""
    found = Functions(
        new_array=abi.numpy_function(abi.NEW_FROM_DESCR),
        array=abi.numpy_function(abi.ARRAY_TYPE),
        run=threads.run.address,
        value_error=id(ValueError),
        memory_error=id(MemoryError),
        **{name: address(ctypes.pythonapi, name) for name in Functions._fields if name.startswith("Py")},
    )
    abi.kept_forever(found)
    return found


class Entries:
    """The entries of one public function: those of the last `calls.SLOTS` signatures that native code can answer.

    The public function keeps this object and the Python function alive, since native code reads their addresses.
    """

    def __init__(self, function: Any, python: Callable[..., Any]):
        self.slots = (ctypes.c_int64 * calls.SLOTS)()
        self.table = calls.Table(python=id(python), team=threads.team_word(), entries=ctypes.addressof(self.slots))
        self.own = abi.own_words(function)
        self.own.table = self.table.address
        self.entered: list[tuple[Any, list[Any]]] = []  # signatures, and what owns their entries' memory
        self.refused: list[Any] = []  # signatures that are never native
        self.next = 0

    def enter(self, answered: Answered, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make an entry for calls of this signature, one of which Python has answered, if native code can answer them.

        It cannot if the layout of objects in memory differs from the one that it reads (`abi.unlike`). Nothing happens
        while another thread holds the lock `settling`: a later call of the signature makes the entry.
        """
        if abi.unlike():
            return
        signature = signature_of(answered.by, [*args, *kwargs.values()], list(kwargs))
        if signature in self.refused or any(signature == each for each, _ in self.entered) or not settling.begin():
            return
        try:
            description = _Description(answered, args, kwargs)
            entry = description.entry()
            self.table.functions, self.table.torch = _c_functions().address, tensors.address
            replaced: list[Any] = self.entered[self.next : self.next + 1]
            self.slots[self.next] = entry.address
            self.entered[self.next : self.next + 1] = [(signature, description.kept)]
            self.next = (self.next + 1) % calls.SLOTS
            self.own.vectorcall = calls.call.address
        except NotNative:
            replaced = self.refused[: -calls.SLOTS]
            self.refused = [*self.refused[-calls.SLOTS :], signature]
        finally:
            settling.end()
        del replaced  # after the lock is released, since freeing objects may run any code
