"""Structures of int64 words: Python makes them, compiled code reads and writes their fields by name.

A structure is a ctypes structure, whose fields are the annotations of its class:

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
