"""Writes the records of a call's values, with which `opgrad.call.objects` compares the values of later calls."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrad.call import calls, objects
from opgrad.call.objects import array_words
from opgrad.contract.plain import PLAIN, RECORDS, fields, is_plain
from opgrad.cpu.runtime import abi

MOST_ITEMS = 4096


class NotNative(Exception):
    """Raised if native code cannot answer calls of this signature, so that Python goes on answering them."""


class Tensors:
    """How entries describe arrays of a library other than NumPy: PyTorch's by `opgrad.call.libraries.torch_calls`."""

    kinds: frozenset[type] = frozenset()  # the types of the library's arrays
    address = 0  # of the table about the library that native code reads

    def layout(self, tensor: Any) -> Any:
        """A hashable description of a tensor; tensors that differ in it need different entries."""
        return None

    def of_value(self, tensor: Any) -> list[int]:
        """The words of an argument's record of kind `objects.TENSOR`."""
        raise NotNative

    def of_result(self, tensor: Any) -> list[int]:
        """The words from which `objects.new_tensor` makes a result."""
        raise NotNative

    def is_plainly_made(self, make: Any) -> bool:
        """Whether native code can make a result that Python makes with this function."""
        return False

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


class Values:
    """The records of a call's arguments, and where the arrays among them are found.

    places: the container and index of each array and sequence, by its id. fields_at: the container number of each
    record's fields, by the record's id. arrays: how many there are. kept: objects whose addresses are compared,
    which must therefore stay alive.
    """

    def __init__(self, tensors: Tensors, by_plan: bool, written: Sequence[Any]):
        self.tensors, self.by_plan, self.written = tensors, by_plan, written
        self.places: dict[int, tuple[int, int]] = {}
        self.fields_at: dict[int, int] = {}
        self.records: list[list[int]] = []
        self.kept: list[Any] = []
        self.containers, self.arrays = 1, 0

    def record(self, value: Any, container: int, index: int) -> None:
        """Append the record of a value, and those of its items or fields."""
        words = self._expected(value, container, index)
        self.records.append([calls.EXPECTED + len(words) - 1, container, index, *words])
        if words[0] in (objects.TUPLE, objects.LIST):
            for place, item in enumerate(value):
                self.record(item, words[3], place)
        elif words[0] == objects.RECORD:
            self._fields(value, words[2])

    def _expected(self, value: Any, container: int, index: int) -> list[int]:
        if is_sequence(value):
            return self._sequence(value, container, index)
        kind = type(value)
        if kind in RECORDS:
            return self._fields_of(value)
        is_tensor = kind in self.tensors.kinds
        if kind is not np.ndarray and not is_tensor:
            return self._number(value)
        self.arrays += 1
        place = self.places.setdefault(id(value), (container, index))
        if place != (container, index):
            return [objects.SAME, *place]
        self.kept.append(kind)
        if is_tensor:
            words = self.tensors.of_value(value)
            if self.by_plan and words[objects.OF_GRAD]:  # PyTorch has recorded what the plan did
                raise NotNative
            return [objects.TENSOR, *words]
        self.kept.append(value.dtype)
        return [objects.AN_ARRAY, *array_words(value, writeable=any(value is each for each in self.written))]

    def _fields_of(self, value: Any) -> list[int]:
        """The words for a record. Raises NotNative if its layout in memory is not the one that native code reads."""
        names, kind = fields(type(value)), type(value)
        words = (ctypes.c_int64 * len(names)).from_address(id(value) + abi.FIELDS)
        if list(words) != [id(getattr(value, name, None)) for name in names]:
            raise NotNative
        container = self._new_container()
        self.fields_at[id(value)] = container
        return [objects.RECORD, id(kind), container]

    def _fields(self, value: Any, container: int) -> None:
        for place, name in enumerate(fields(type(value))):
            if name in RECORDS[type(value)]:
                self.records.append([calls.EXPECTED + 1, container, place, objects.INTEGER, id(int)])
            else:
                self.record(getattr(value, name, None), container, place)

    def _new_container(self) -> int:
        self.containers += 1
        if self.containers > calls.CONTAINERS:
            raise NotNative
        return self.containers - 1

    def _sequence(self, value: Any, container: int, index: int) -> list[int]:
        place = self.places.setdefault(id(value), (container, index))
        if value and place != (container, index):
            self.arrays += sum(id(each) in self.places for each in flattened(value))
            return [objects.SAME, *place]
        if len(value) > MOST_ITEMS:
            raise NotNative
        kind = type(value)
        self.kept.append(kind)
        return [objects.LIST if kind is list else objects.TUPLE, id(kind), len(value), self._new_container()]

    def _number(self, value: Any) -> list[int]:
        if not is_plain(value):
            raise NotNative
        kind = type(value)
        self.kept.append(value)
        if kind is float:
            return [objects.FLOAT, id(value), id(kind), *struct.unpack("q", struct.pack("d", value))]
        return [objects.EQUAL, id(value), id(kind)] if kind in (int, str) else [objects.OBJECT, id(value)]
