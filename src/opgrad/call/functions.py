"""Public functions: objects whose repeated calls are answered in native code, and all other calls in Python.

CPython calls such an object through a pointer in it (vectorcall, PEP 590). After the first call that native code can
repeat, the pointer leads to the compiled `opgrad.call.calls.call`. Before that, on other implementations of Python,
and for a call that fits no entry, the object calls the Python function that it was made of.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from opgrad.base.locks import settling
from opgrad.call import calls, entries
from opgrad.call.entries import Answered, Entry, NotNative, signature_of
from opgrad.call.objects import Functions
from opgrad.cpu.runtime import abi, threads
from opgrad.cpu.runtime.abi import SUPPORTED


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


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


PYTHON_FUNCTIONS = {
    "vectorcall": "PyObject_Vectorcall",
    "take": "Py_IncRef",
    "drop": "Py_DecRef",
    "save_thread": "PyEval_SaveThread",
    "restore_thread": "PyEval_RestoreThread",
    "equals": "PyObject_RichCompareBool",
    "clear": "PyErr_Clear",
    "is_error": "PyErr_ExceptionMatches",
    "occurred": "PyErr_Occurred",
    "new_tuple": "PyTuple_New",
    "set_item": "PyTuple_SetItem",
    "new_list": "PyList_New",
    "set_list_item": "PyList_SetItem",
    "get_attribute": "PyObject_GetAttr",
    "get_item": "PyDict_GetItem",
    "as_int64": "PyLong_AsLongLong",
}


@functools.cache
def _c_functions() -> Functions:
    """What native calls call; it is never freed."""
    found = Functions(
        new_array=abi.numpy_function(abi.NEW_FROM_DESCR),
        array=abi.numpy_function(abi.ARRAY_TYPE),
        run=threads.run.address,
        value_error=id(ValueError),
        memory_error=id(MemoryError),
        **{each: _address(getattr(ctypes.pythonapi, name)) for each, name in PYTHON_FUNCTIONS.items()},
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
        self.entered: list[tuple[Any, Entry]] = []
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
            replaced = self._enter(signature, Entry(answered, args, kwargs))
        except NotNative:
            replaced = self.refused[: -calls.SLOTS]
            self.refused = [*self.refused[-calls.SLOTS :], signature]
        finally:
            settling.end()
        del replaced  # after the lock is released, since freeing objects may run any code

    def _enter(self, signature: Any, entry: Entry) -> Any:
        self.table.functions, self.table.torch = _c_functions().address, entries.tensors.address
        replaced = self.entered[self.next : self.next + 1]
        self.slots[self.next] = entry.address
        self.entered[self.next : self.next + 1] = [(signature, entry)]
        self.next = (self.next + 1) % calls.SLOTS
        self.own.vectorcall = calls.call.address
        return replaced
