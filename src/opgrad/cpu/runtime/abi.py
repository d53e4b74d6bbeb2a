"""The memory layouts of objects of CPython, NumPy and PyTorch that native code reads; each is tested before its use.

The headers of CPython and NumPy compile these offsets into every extension, so they change rarely, and never within a
release. A tensor's shape, dtype and address come from the C interface that PyTorch keeps stable for compiled models.
Two offsets are found by search: that of the tensor in its Python object, and that of the dispatch keys in the tensor.
The search compares the words of some tensors with the values that Python shows of them.

Before the first call every layout is compared with live objects. A layout that differs is not used: Python answers the
calls, with the same results, and one RuntimeWarning says so.
"""

import ctypes
import functools
import os
import struct
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from opgrad.base.locks import settling
from opgrad.cpu.compiler.words import Structure, at, structure
from opgrad.cpu.runtime.system import system

# An object begins with its reference count and its type; the fields of its type follow. All offsets are in bytes.
HEADER: Final = object.__basicsize__
TYPE: Final = HEADER - 8
FIELDS: Final = HEADER  # the first field of an object with slots
VALUE: Final = HEADER  # the value of a float
SIZE: Final = HEADER  # the length of a tuple or a list
TUPLE_ITEMS: Final = tuple.__basicsize__  # the items end a tuple; in 3.14 its hash lies before them
LIST_ITEMS: Final = HEADER + 8  # a list has the address of its items
# An ndarray's data, dimensions' number and places, strides' place, dtype, flags; the base stands between the last two.
# Reading them takes some 10 ns an array; `ndarray.ctypes` alone takes 0.6 µs.
DATA, RANK, SHAPE, STRIDES, DTYPE, FLAGS = HEADER, HEADER + 8, HEADER + 16, HEADER + 24, HEADER + 40, HEADER + 48
WRITEABLE: Final = 0x400  # the flag

PLAIN_HEADER = 16  # bytes of HEADER in CPython with its lock
READABLE = sys.implementation.name == "cpython" and struct.calcsize("P") == 8 and sys.byteorder == "little"
# Native calls hold the interpreter's lock while they compare, and know objects as they are with it.
SUPPORTED = READABLE and not sysconfig.get_config_var("Py_GIL_DISABLED") and PLAIN_HEADER == HEADER


def kept_forever(*things: Any) -> None:
    """Keep these objects until the process ends, since native code reads them until then."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def words(address: int, count: int) -> list[int]:
    """`count` int64 words at an address that can be read."""
    return list((ctypes.c_int64 * count).from_address(address))


# --- functions that CPython calls through a pointer in them: vectorcall, PEP 590 -------------------------------------


class Function:
    """The base class of public functions, an object with attributes.

    `native_type` adds words in memory for native code.
    """


OWN_WORDS: Final = Function.__basicsize__


@structure
class OwnWords(Structure):
    """The words of a public function's object, behind those of its base class."""

    vectorcall: int  # where a call begins, which CPython reads
    table: int


COUNT: Final = (1 << 63) - 1  # the bits of the vectorcall argument `nargsf` that hold the number of arguments
T_PYSSIZET, READONLY, TP_MEMBERS = 19, 1, 72
DEFAULT, HAVE_VECTORCALL = 1 << 18, 1 << 11


def c_structure(**fields: Any) -> Any:
    """A class of C structures with fields of these names and types."""
    return type("CStructure", (ctypes.Structure,), {"_fields_": [*fields.items()]})


# PyMemberDef, PyType_Slot and PyType_Spec.
_Member = c_structure(
    name=ctypes.c_char_p, type=ctypes.c_int, offset=ctypes.c_ssize_t, flags=ctypes.c_int, doc=ctypes.c_char_p
)
_Slot = c_structure(slot=ctypes.c_int, value=ctypes.c_void_p)
_Spec = c_structure(
    name=ctypes.c_char_p, basicsize=ctypes.c_int, itemsize=ctypes.c_int, flags=ctypes.c_uint,
    slots=ctypes.POINTER(_Slot),
)  # fmt: skip


F = TypeVar("F", bound=Function)


def native_type(base: type[F]) -> type[F]:
    """The subclass whose objects have `OwnWords`; the class itself if native calls are impossible.

    Python code cannot make such a type, so C's function that makes types of a specification is called.
    """
    if not SUPPORTED:
        return base
    place = OWN_WORDS + OwnWords._fields.index("vectorcall") * 8
    members = (_Member * 2)(_Member(b"__vectorcalloffset__", T_PYSSIZET, place, READONLY, None))
    slots = (_Slot * 2)(_Slot(TP_MEMBERS, ctypes.addressof(members)))
    size = OWN_WORDS + ctypes.sizeof(OwnWords)
    spec = _Spec(f"{base.__module__}.{base.__name__}".encode(), size, 0, DEFAULT | HAVE_VECTORCALL, slots)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object)(
        ("PyType_FromSpecWithBases", ctypes.pythonapi)
    )
    made: type[F] = make(ctypes.addressof(spec), (base,))
    kept_forever(members, spec, slots)
    return made


def own_words(function: Function) -> OwnWords:
    """Those of an object whose type `native_type` has made."""
    return at(OwnWords, id(function) + OWN_WORDS)


# --- NumPy's C interface ---------------------------------------------------------------------------------------------

VERSIONS = (0x01000009, 0x02000000)  # of NumPy's binary interface, whose functions' places are known here
GET_VERSION, ARRAY_TYPE, NEW_FROM_DESCR, SET_HANDLER = 0, 2, 94, 304  # places in its table of functions, with a type
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def numpy_function(place: int) -> int:
    """The address of a function, or of a type, in the table of NumPy's C interface, where its place never changes."""
    core: Any = np._core if hasattr(np, "_core") else np.core
    return (ctypes.c_size_t * (place + 1)).from_address(_pointer(core._multiarray_umath._ARRAY_API, None))[place]


# --- trials ----------------------------------------------------------------------------------------------------------

OBJECTS, FLOATS, TUPLES, LISTS, ARRAYS = "objects", "floats", "tuples", "lists", "NumPy's arrays"
CALLS, NUMPY_FUNCTIONS = "calls of functions (vectorcall)", "NumPy's C functions"


def _word(value: Any, place: int) -> int | None:
    """A word inside of an object; None if the object ends before."""
    return words(id(value) + place, 1)[0] if 0 <= place <= value.__sizeof__() - 8 else None


def _are_at(address: int | None, expected: Sequence[int]) -> bool:
    """Whether these words are at an address, which may be None or unreadable."""
    packed = struct.pack(f"{len(expected)}q", *expected)
    return address is not None and system().copy_of(address, len(packed)) == packed


def _try_objects() -> bool:
    values = 1.5, 10**9, "text", (1, 2), [1], object(), np.zeros(2)
    return all(_word(value, TYPE) == id(type(value)) for value in values)


def _try_floats() -> bool:
    return all(_word(x, VALUE) == struct.unpack("q", struct.pack("d", x))[0] for x in (1.5, -0.0, 1e300, float("inf")))


def _try_tuples() -> bool:
    values = (), ("a",), (1.5, "b", None)
    return all(
        _word(value, SIZE) == len(value)
        and [_word(value, TUPLE_ITEMS + 8 * number) for number in range(len(value))] == list(map(id, value))
        for value in values
    )


def _try_lists() -> bool:
    values: list[list[Any]] = [[], ["a"], [1.5, "b", None]]
    return all(
        _word(value, SIZE) == len(value) and (not value or _are_at(_word(value, LIST_ITEMS), list(map(id, value))))
        for value in values
    )


def _try_arrays() -> bool:
    whole = np.zeros((4, 5, 6), np.float32)
    fixed = whole[1]
    fixed.flags.writeable = False
    return all(map(_is_array_as_known, (np.zeros(3), whole[::-1, 1:, ::2], whole.T, fixed, np.zeros((), "i8"))))


def _is_array_as_known(array: Any) -> bool:
    rank, flags = _word(array, RANK), _word(array, FLAGS)
    return (
        rank is not None
        and flags is not None
        and (_word(array, DATA), _word(array, DTYPE)) == (array.ctypes.data, id(array.dtype))
        and rank & 0xFFFFFFFF == array.ndim
        and bool(flags & WRITEABLE) == array.flags.writeable
        and _are_at(_word(array, SHAPE), array.shape)
        and _are_at(_word(array, STRIDES), array.strides)
    )


def _try_calls() -> bool:
    """Call an object by vectorcall, and compare the arguments that native code gets with those that were passed."""
    if Function.__basicsize__ != OWN_WORDS:
        return False
    seen: list[tuple[int, ...]] = []

    def call(function: int, arguments: int, count: int, names: int) -> Any:
        seen.append((function, count & COUNT, *words(arguments, 3), *words(names + TUPLE_ITEMS, 1)))
        return seen

    native = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    kept = native(call)
    made: Any = native_type(Function)()
    own_words(made).vectorcall = ctypes.cast(kept, ctypes.c_void_p).value or 0
    name = sys.intern("given")
    given = 1.5, "text", [1]
    answer = made(*given[:2], **{name: given[2]})
    own_words(made).vectorcall = 0
    return answer is seen and seen == [(id(made), 2, *map(id, given), id(name))]


def _try_numpy_functions() -> bool:
    version = ctypes.CFUNCTYPE(ctypes.c_uint)(numpy_function(GET_VERSION))
    return numpy_function(ARRAY_TYPE) == id(np.ndarray) and version() in VERSIONS


TRIALS: dict[str, Callable[[], bool]] = {
    OBJECTS: _try_objects,
    FLOATS: _try_floats,
    TUPLES: _try_tuples,
    LISTS: _try_lists,
    ARRAYS: _try_arrays,
    NUMPY_FUNCTIONS: _try_numpy_functions,
    CALLS: _try_calls,
}


@functools.cache
def unlike() -> frozenset[str]:
    """The names in TRIALS of layouts that differ from the ones here, and must not be used."""
    with settling:
        if not READABLE:
            return frozenset(TRIALS)
        found: set[str] = set()
        for name, trial in TRIALS.items():
            if name != CALLS or (SUPPORTED and not found):
                try:
                    holds = trial()
                except (AttributeError, TypeError, ValueError, SystemError):  # a field or a function that is not there
                    holds = False
                found |= set() if holds else {name}
        if found:
            python = f"{sys.implementation.name} {sys.version.split()[0]}"
            warn(f"{', '.join(sorted(found))} of {python} and NumPy {np.__version__}")
        return frozenset(found)


def warn(what: str) -> None:
    """Warn that native code does not use a layout."""
    warnings.warn(
        f"opgrad: {what} do not lie in memory as they are known: calls are answered in Python, with the same results, "
        "and take some microseconds more",
        RuntimeWarning,
        stacklevel=2,
    )


# --- PyTorch ---------------------------------------------------------------------------------------------------------

WORDS = 24  # of a tensor, at least
LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so")
# Functions of PyTorch's by the names that native code gives them; those of C++ have had several names.
TORCH_FUNCTIONS = {
    "get_dim": ("aoti_torch_get_dim",),
    "get_sizes": ("aoti_torch_get_sizes",),
    "get_strides": ("aoti_torch_get_strides",),
    "get_dtype": ("aoti_torch_get_dtype",),
    "get_data": ("aoti_torch_get_data_ptr",),
    "records_grad": ("aoti_torch_grad_mode_is_enabled",),
    "empty": ("aoti_torch_empty_strided",),
    "wrap": ("_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE"),
    "delete": ("aoti_torch_delete_tensor_object",),
}


class TensorLayout(NamedTuple):
    """The places of a tensor in its Python object, of dispatch keys in a tensor, in bytes; addresses of functions."""

    handle: int
    keys: int
    functions: dict[str, int]

    def read(self, function: str, tensor: Any) -> int:
        """The result of a function "get_…" for a tensor. Raises LookupError if the function fails."""
        getter = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(self.functions[function])
        found = ctypes.c_int64()
        if getter(id(tensor) + self.handle, ctypes.addressof(found)):
            raise LookupError
        return found.value


def tensor_layout(torch: ModuleType | Any) -> TensorLayout:
    """The layout of the tensors of this PyTorch, after a test.

    Raises LookupError, AttributeError, OSError or RuntimeError if something is missing or is not as Python has it.
    """
    tensors = _tensors(torch)
    handles = [tensor._cdata for tensor in tensors]
    handle = _place([words(id(each), type(each).__basicsize__ // 8) for each in tensors], handles)
    raw = [torch._C._dispatch_keys(each).raw_repr() for each in tensors]
    signed = [word - ((word >> 63) << 64) for word in raw]
    keys = _place([words(each, WORDS) for each in handles], signed)
    found = TensorLayout(handle, keys, {each: _function(torch, names) for each, names in TORCH_FUNCTIONS.items()})
    if not _is_read_rightly(found, tensors[1]):
        raise LookupError
    return found


def _tensors(torch: Any) -> list[Any]:
    """Tensors whose dispatch keys differ."""
    plain = torch.zeros(3, 4, device="cpu")
    with torch.inference_mode():
        inferred = torch.zeros(2, dtype=torch.int64, device="cpu")
    kinds = [plain, plain.t()[1:], torch._neg_view(plain), plain.to_sparse(), torch.empty(2, device="meta"), inferred]
    return [*kinds, torch.nn.Parameter(plain)]


def _place(each: Sequence[Sequence[int]], wanted: Sequence[int]) -> int:
    """The only offset in bytes at which each tensor has its wanted word.

    Raises LookupError if there is not exactly one.
    """
    shortest = min(map(len, each))
    places = [i for i in range(shortest) if all(w[i] == x for w, x in zip(each, wanted, strict=True))]
    if len(places) != 1:
        raise LookupError
    return 8 * places[0]


def _function(torch: Any, names: Sequence[str]) -> int:
    """The address of a function of PyTorch's that has one of these names. Raises AttributeError if there is none."""
    for library in _libraries(str(Path(torch.__file__).parent / "lib")):
        for name in names:
            if hasattr(library, name):
                return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise AttributeError(names[0])


@functools.cache
def _libraries(folder: str) -> list[ctypes.CDLL]:
    return [ctypes.CDLL(os.path.join(folder, name), mode=os.RTLD_NOLOAD) for name in LIBRARIES]


def _is_read_rightly(layout: TensorLayout, tensor: Any) -> bool:
    """Whether the C functions give the same values of a tensor as Python."""
    rank = layout.read("get_dim", tensor)
    return (
        rank == tensor.dim()
        and _are_at(layout.read("get_sizes", tensor), tensor.shape)
        and _are_at(layout.read("get_strides", tensor), tensor.stride())
        and layout.read("get_data", tensor) == tensor.data_ptr()
    )
