"""Words of memory: loads, stores, atomics and calls in native functions, and structures of int64 words.

Addresses and counts are int64. The operations have a meaning only inside a compiled function, which
`opgrad.cpu.compiler.lowering` gives them. They are plain functions so that a warm start never imports Numba.

A structure is a ctypes structure, whose fields are the annotations of its class. Python makes it; compiled code reads
and writes its fields by name:

    @structure
    class Operand(Structure):
        container: int
        index: int

    operand = at(Operand, address)  # in Python and in compiled code alike
    operand.index
"""

import ctypes
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from opgrad.cpu.compiler import only_compiled

CACHE_LINE = 64  # bytes


def load_word(address: int, index: int) -> int: ...  # the int64 at `address + 8 * index`
def load_i32(address: int, index: int) -> int: ...  # the int32 at `address + 4 * index`, as int64
def load_u8(address: int, index: int) -> int: ...  # the byte at `address + index`, as int64
def load_f64(address: int, index: int) -> float: ...  # the float64 at `address + 8 * index`
def store_word(address: int, index: int, value: int) -> None: ...
def store_i32(address: int, index: int, value: int) -> None: ...  # the low 32 bits
def store_u8(address: int, index: int, value: int) -> None: ...  # the low 8 bits
def store_f64(address: int, index: int, value: float) -> None: ...
def copy_bytes(target: int, source: int, count: int) -> None: ...  # between addresses that do not overlap
# The address of int64 words on the stack, 64-byte aligned, with whatever was there; a constant count.
def stack_words(count: int) -> int: ...


# The address that this process has given this name (`machine_code.give_name`), before the function is linked: for
# functions which are called from C with nothing that leads to their memory.
def named_address(name: str) -> int: ...


# Call the C function at `address` with int64 arguments; its int64 result.
def call_address(address: int, *arguments: int) -> int: ...


# --- on the int64 at an address, sequentially consistent -----------------------------------------------------------


def atomic_load(address: int) -> int: ...
def atomic_store(address: int, value: int) -> None: ...
def atomic_add(address: int, value: int) -> int: ...  # what stood there before
# Write `value` if `expected` stands there, in one step; whether it did.
def atomic_swap_if(address: int, expected: int, value: int) -> bool: ...


# --- control -------------------------------------------------------------------------------------------------------


def spin_hint() -> None: ...  # tells the core that this is a waiting loop
def store_fence() -> None: ...  # makes non-temporal stores visible before any later store


only_compiled(globals())


S = TypeVar("S", bound="Structure")


class Structure(ctypes.Structure):
    """The base class of structures."""

    _fields: ClassVar[tuple[str, ...]] = ()  # the names of the fields, which the digests of compiled code contain

    @property
    def address(self) -> int:
        """Where it lies; in compiled code, too."""
        return ctypes.addressof(self)

    @property
    def words(self) -> list[int]:
        """Its fields' values in order."""
        return [getattr(self, name) for name in self._fields]


def structure(kind: type[S]) -> type[S]:
    """Decorate a class whose annotations are the fields of a structure."""
    kind._fields = tuple(inspect.get_annotations(kind))
    kind._fields_ = [(name, ctypes.c_int64) for name in kind._fields]
    return kind


def at(kind: type[S], address: int, number: int = 0) -> S:
    """The structure at an address, or one of those behind it."""
    return kind.from_address(address + number * ctypes.sizeof(kind))


def behind(found: Structure) -> int:
    """The address behind a structure."""
    return found.address + ctypes.sizeof(found)


def place(found: Structure, field: str) -> int:
    """The address of a field, for atomic accesses; in compiled code the name is a constant."""
    return found.address + int(getattr(type(found), field).offset)


def several(kind: type[S], found: Iterable[S]) -> Any:
    """Structures one behind the other, of which `at` finds each by its number."""
    block = tuple(found)
    return (kind * len(block))(*block)


def words(values: Iterable[int]) -> Any:
    """A block of int64 words."""
    block = tuple(values)
    return (ctypes.c_int64 * len(block))(*block)


for operation in (at, behind, place):
    operation.is_operation = True  # type: ignore[attr-defined]  # compiled code has its own form of it
