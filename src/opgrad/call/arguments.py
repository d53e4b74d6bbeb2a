"""Describes a call's values, with which `opgrad.call.objects` compares the values of later calls."""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opgrad.call import calls, objects
from opgrad.call.objects import Value
from opgrad.contract.signature import PLAIN, RECORDS, fields, is_plain
from opgrad.cpu.compiler.structures import words
from opgrad.cpu.runtime import abi

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


class Values:
    """The values of a call's arguments, and where the arrays among them are found.

    places: the container and index of each array and sequence, by its id. fields_at: the container number of each
    record's fields, by the record's id. arrays: how many there are. kept: what native code reads, and objects whose
    addresses are compared, which must therefore stay alive.
    """

    def __init__(self, tensors: Any, by_plan: bool, written: Sequence[Any]):
        self.tensors, self.by_plan, self.written = tensors, by_plan, written
        self.places: dict[int, tuple[int, int]] = {}
        self.fields_at: dict[int, int] = {}
        self.described: list[Value] = []
        self.kept: list[Any] = []
        self.containers, self.arrays = 1, 0

    def describe(self, value: Any, container: int, index: int) -> None:
        """Append the description of a value, and those of its items or fields."""
        made = Value(container, index, **self._expected(value, container, index))
        self.described.append(made)
        if made.kind in (objects.TUPLE, objects.LIST):
            for place, item in enumerate(value):
                self.describe(item, made.inside, place)
        elif made.kind == objects.RECORD:
            self._fields(value, made.inside)

    def _expected(self, value: Any, container: int, index: int) -> Mapping[str, int]:
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
            return _same(place)
        self.kept.append(kind)
        if is_tensor:
            found = self.tensors.of_value(value)
            if self.by_plan and found["records_grad"]:  # PyTorch has recorded what the plan did
                raise NotNative
            return {"kind": objects.TENSOR, **found, **self._layout(self.tensors.sizes(value))}
        self.kept.append(value.dtype)
        flags = abi.WRITEABLE if any(value is each for each in self.written) else 0
        found = {"kind": objects.ARRAY, "type": id(kind), "dtype": id(value.dtype), "flags": flags}
        return {**found, **self._layout((*value.shape, *value.strides))}

    def _layout(self, sizes: Sequence[int]) -> dict[str, int]:
        """The fields for sizes and strides."""
        self.kept.append(words(sizes))
        return {"rank": len(sizes) // 2, "sizes": ctypes.addressof(self.kept[-1])}

    def _fields_of(self, value: Any) -> Mapping[str, int]:
        """The fields for a record. Raises NotNative if its layout in memory is not the one that native code reads."""
        names, kind = fields(type(value)), type(value)
        if abi.words(id(value) + abi.FIELDS, len(names)) != [id(getattr(value, name, None)) for name in names]:
            raise NotNative
        container = self._new_container()
        self.fields_at[id(value)] = container
        return {"kind": objects.RECORD, "type": id(kind), "inside": container}

    def _fields(self, value: Any, container: int) -> None:
        for place, name in enumerate(fields(type(value))):
            if name in RECORDS[type(value)]:
                self.described.append(Value(container, place, objects.INTEGER, type=id(int)))
            else:
                self.describe(getattr(value, name, None), container, place)

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
        which, inside = objects.LIST if kind is list else objects.TUPLE, self._new_container()
        return {"kind": which, "type": id(kind), "length": len(value), "inside": inside}

    def _number(self, value: Any) -> Mapping[str, int]:
        if not is_plain(value):
            raise NotNative
        kind = type(value)
        self.kept.append(value)
        found = {"object": id(value), "type": id(kind)}
        if kind is float:
            return {"kind": objects.FLOAT, "bits": struct.unpack("q", struct.pack("d", value))[0], **found}
        return {"kind": objects.EQUAL if kind in (int, str) else objects.OBJECT, **found}


def _same(place: tuple[int, int]) -> Mapping[str, int]:
    return {"kind": objects.SAME, "other_container": place[0], "other_index": place[1]}
