"""Public functions: objects that are called natively where a call is like one before, and by Python otherwise.

CPython calls such an object through a pointer in it (vectorcall, PEP 590), which is set to the compiled
`opgrad.cpu.runtime.calls.call` once the first call has shown what it needs. Before that, on other Pythons, and for
whatever native code does not know, the Python function behind it is called. Types with such a pointer can only be made
in C, or as here by the C function that makes types of a specification.
"""

import ctypes
import functools
import struct
import sys
import sysconfig
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import numpy as np

from opgrad.contract.plain import is_plain
from opgrad.cpu.runtime import calls, parallel
from opgrad.cpu.runtime.execute import MAX_OPERANDS, known
from opgrad.locks import settling
from opgrad.memory import numpy_function

UNLOCKED_FROM = 1 << 16  # bytes of traffic: giving the interpreter's lock up and taking it again costs some 50 ns
MOST_VALUES = 16
# Objects are laid out as calls.py reads them in CPython with its lock, on 64 bits.
SUPPORTED = (
    sys.implementation.name == "cpython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
    and struct.calcsize("P") == 8
    and sys.byteorder == "little"
)


class PythonFunction(calls.Function):
    """The part that is Python's: how a public function looks, and what it does where no native code is reached."""

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


# --- the type ------------------------------------------------------------------------------------------------------


class _Member(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("offset", ctypes.c_ssize_t),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _Slot(ctypes.Structure):
    _fields_ = [("slot", ctypes.c_int), ("value", ctypes.c_void_p)]


class _Spec(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("basicsize", ctypes.c_int),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(_Slot)),
    ]


T_PYSSIZET, READONLY, TP_MEMBERS = 19, 1, 72
DEFAULT, HAVE_VECTORCALL = 1 << 18, 1 << 11


def _native_type() -> type[PythonFunction]:
    """The subclass of PythonFunction whose objects have the words that CPython and `calls.call` read."""
    offset = calls.OWN_WORDS + 8 * calls.VECTORCALL
    members = (_Member * 2)(_Member(b"__vectorcalloffset__", T_PYSSIZET, offset, READONLY, None))
    slots = (_Slot * 2)(_Slot(TP_MEMBERS, ctypes.addressof(members)))
    size = calls.OWN_WORDS + 8 * calls.OWN
    spec = _Spec(b"opgrad.functions.NativeFunction", size, 0, DEFAULT | HAVE_VECTORCALL, slots)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object)(
        ("PyType_FromSpecWithBases", ctypes.pythonapi)
    )
    made: type[PythonFunction] = make(ctypes.addressof(spec), (PythonFunction,))
    _keep(members, spec, slots)
    return made


def _keep(*things: Any) -> None:
    """Never free these: native code reads them as long as the process lives."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_Type = _native_type() if SUPPORTED else None


def function_of(python: Callable[..., Any]) -> tuple[Any, "Entries | None"]:
    """The public function in front of a Python function, and its entries; itself where there is no native way."""
    if _Type is None:
        return python, None
    made = _Type()
    made._python = python
    made._entries = Entries(made, python)
    return made, made._entries


# --- entries -------------------------------------------------------------------------------------------------------


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _c_functions() -> list[int]:
    """Where `calls.call` finds the C functions of Python and NumPy, and our `run`; in the order of its words."""
    python = ctypes.pythonapi
    names = [
        "PyObject_Vectorcall", "Py_IncRef", "Py_DecRef", "PyEval_SaveThread", "PyEval_RestoreThread",
        "PyObject_RichCompareBool", "PyErr_Clear", "PyTuple_New", "PyTuple_SetItem",
    ]  # fmt: skip
    new_array, array = numpy_function(94), numpy_function(2)  # PyArray_NewFromDescr, PyArray_Type
    return [*(_address(getattr(python, name)) for name in names), new_array, array, parallel.run.address]


_functions: Any = None


def _table_of_c_functions() -> int:
    global _functions
    if _functions is None:
        found = _c_functions()
        _functions = (ctypes.c_int64 * calls.C_FUNCTIONS)(*found)
        _keep(_functions)
    return ctypes.addressof(_functions)


class Entries:
    """What one public function knows natively: a place for each of some signatures, the last ones met.

    Belongs to the public function, as the Python function does: native code has their addresses.
    """

    def __init__(self, function: Any, python: Callable[..., Any]):
        words = calls.ENTRIES + calls.SLOTS
        self.table = (ctypes.c_int64 * words)()
        self.own = (ctypes.c_int64 * calls.OWN).from_address(id(function) + calls.OWN_WORDS)
        self.table[calls.PYTHON], self.table[calls.TEAM] = id(python), parallel.team_word()
        self.own[calls.TABLE] = ctypes.addressof(self.table)
        self.entered: list[Any] = []
        self.next = 0

    def enter(self, runner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let calls like this one, which `runner` has answered, be native from now on, if they can be.

        Nothing happens while another thread settles something: a later call enters.
        """
        if runner in self.entered or runner.entry is False or not settling.begin():
            return
        try:
            replaced = self._enter(runner, args, kwargs)
        finally:
            settling.end()
        del replaced  # behind the lock, since what it frees may run any code

    def _enter(self, runner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if runner.entry is None:
            runner.entry = _can_be_native(runner, args, kwargs) and Entry(runner, args, kwargs)
        if not runner.entry:
            return None
        if not self.own[calls.VECTORCALL]:
            self.table[calls.FUNCTIONS] = _table_of_c_functions()
        replaced = self.entered[self.next : self.next + 1]
        self.table[calls.ENTRIES + self.next] = runner.entry.address
        self.entered[self.next : self.next + 1] = [runner]
        self.next = (self.next + 1) % calls.SLOTS
        self.own[calls.VECTORCALL] = calls.call.address
        return replaced


def _can_be_native(runner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether calls of this signature are such that native code can answer them."""
    values = [*args, *kwargs.values()]
    return (
        runner.is_simple
        and len(runner.op.arrays) + len(runner.op.results) <= MAX_OPERANDS
        and len(values) <= MOST_VALUES
        and all(type(value) is np.ndarray or is_plain(value) for value in values)
    )


class Entry:
    """The words of one signature, as `opgrad.cpu.runtime.calls` reads them, and all that they point to."""

    def __init__(self, runner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self._values = [*args, *kwargs.values()]
        self._names = [sys.intern(name) for name in kwargs]
        self._memory = runner.working_memory() if runner.plan.scratch_bytes else (None, calls.NO_MEMORY)
        self._makers = [None if _is_plainly_made(make) else make for make in runner.makers]
        words = self._words(runner, len(args))
        self._kept = (ctypes.c_int64 * len(words))(*words)
        self.address = ctypes.addressof(self._kept)
        # The caller's arrays go; their dtypes stay, whose addresses are compared.
        self._values = [value.dtype if type(value) is np.ndarray else value for value in self._values]

    def _words(self, runner: Any, positional: int) -> list[int]:
        out = self._place("out", positional)
        made = [] if out != calls.NONE else list(zip(self._makers, runner.plan.results, strict=True))
        operands = [self._operand(place, name, positional) for place, name in runner.sources]
        operands += [out] if out != calls.NONE else [calls.FIRST_RESULT - number for number in range(len(made))]
        names = [0] * positional + [id(name) for name in self._names]
        values = [
            word
            for place, (name, value) in enumerate(zip(names, self._values, strict=True))
            for word in _value_record(name, value, writeable=place == out)
        ]
        results = [word for make, spec in made for word in _result_record(make, spec)]
        header = {
            calls.POSITIONAL: positional,
            calls.NAMED: len(self._names),
            calls.RUNNER: id(runner),
            calls.PLAN: runner.plan.address,
            calls.MEMORY: self._memory[1],
            calls.SHARED: runner.threads,
            calls.UNLOCKED: runner.plan.bytes_moved >= UNLOCKED_FROM,
            calls.OUT: out,
            calls.OPERANDS: len(operands),
            calls.RESULTS: len(made),
            calls.VALUES_AT: calls.ENTRY,
            calls.OPERANDS_AT: calls.ENTRY + len(values),
            calls.RESULTS_AT: calls.ENTRY + len(values) + len(operands),
        }
        return [*(int(header[word]) for word in range(calls.ENTRY)), *values, *operands, *results]

    def _place(self, name: str, positional: int) -> int:
        """The number of a value by its keyword; NONE if it is left out, or None."""
        place = positional + self._names.index(name) if name in self._names else calls.NONE
        return calls.NONE if place != calls.NONE and self._values[place] is None else place

    def _operand(self, place: int | None, name: str, positional: int) -> int:
        if place is None:
            return self._place(name, positional)
        return calls.NONE if self._values[place] is None else place


def _value_record(name: int, value: Any, writeable: bool) -> list[int]:
    kind = type(value)
    if kind is np.ndarray:
        what, words = calls.KNOWN_ARRAY, known(value, writeable)
    elif kind is float:
        what, words = calls.FLOAT, [id(value), id(kind), *struct.unpack("q", struct.pack("d", value))]
    elif kind in (int, str):
        what, words = calls.EQUAL, [id(value), id(kind)]
    else:
        what, words = calls.OBJECT, [id(value)]
    return [calls.WHAT + len(words), name, what, *words]


def _result_record(make: Any, spec: Any) -> list[int]:
    words = [id(make) if make else 0, id(spec.dtype), len(spec.shape), *spec.shape]
    return [1 + len(words), *words]


def _is_plainly_made(make: Any) -> bool:
    """Whether a result is made by np.empty alone, which native code does as well."""
    return isinstance(make, functools.partial) and make.func is np.empty
