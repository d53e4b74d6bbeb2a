"""Writes models piece by piece, so that at most one tensor is in memory a second time."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.base.writing import created, flush, naming, new_file
from opgrad.onnx.graph.messages import copied
from opgrad.training.files.checkpoint_tables import raw
from opgrad.training.files.tensor_values import Held, array_of, is_placeholder, nbytes_of

VALUES = "weights.data"  # the file with large tensors that are no parameters, from which both models map them
LARGEST_MODEL = 2**31 - 1  # bytes of a message of protobuf
ALIGNMENT = 4096  # bytes; a tensor in a file of values begins at a multiple of it, so that it can be mapped
# The numbers of fields in ONNX's protobuf messages.
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9


class ValuesFile(AbstractContextManager["ValuesFile"]):
    """A file with tensors' values, each once, to which several models may refer.

    path: the file, which is not there yet.
    """

    def __init__(self, path: Path):
        self._path, self._places = path, dict[tuple[int, int], dict[str, int]]()
        self._file = created(path)

    def place(self, held: Held) -> dict[str, str | int]:
        """Write the values of a tensor unless they are there already; returns the entries of ONNX's external_data.

        Values are the same ones if they are the same memory, which the caller keeps.
        """
        key = (held.ctypes.data, held.nbytes) if isinstance(held, np.ndarray) else (id(held), 0)
        if key not in self._places:
            with naming(self._path):
                self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT)
                content = raw(array_of(held)).data
                self._places[key] = {"offset": self._file.tell(), "length": content.nbytes}
                self._file.write(content)
        return {"location": self._path.name, **self._places[key]}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file, which is flushed to the disk first if all values were written."""
        with naming(self._path), self._file:
            if kind is None:
                flush(self._file)


def model_bytes(model: onnx.ModelProto, values: Mapping[str, Held]) -> int:
    """An upper bound of the bytes of a model with the values of its placeholders."""
    own = [each.name for each in model.graph.initializer if is_placeholder(each)]
    return model.ByteSize() + sum(nbytes_of(values[name]) + 16 for name in own)


def write_model(
    model: onnx.ModelProto, values: Mapping[str, Held], path: Path, outside: ValuesFile | None = None
) -> None:
    """Write a model into a file that is not there yet.

    values: those of its placeholders, by name. outside: the file for them; None: they go into the model's file.
    """
    if outside is not None:
        model = copied(model)
        for tensor in model.graph.initializer:
            if is_placeholder(tensor):
                del tensor.external_data[:]
                for key, value in outside.place(values[tensor.name]).items():
                    tensor.external_data.add(key=key, value=str(value))
    new_file(path, _pieces(model, values))


def _pieces(model: onnx.ModelProto, values: Mapping[str, Held]) -> Iterator[bytes | memoryview]:
    """The protobuf encoding of a model with the values of its placeholders, in pieces, without a copy of the model."""
    if not any(map(is_placeholder, model.graph.initializer)):
        yield model.SerializeToString(deterministic=True)
        return
    (before, after), (first, last) = _around(model, GRAPH), _around(model.graph, INITIALIZER)
    heads = [_head(each, values) for each in model.graph.initializer]
    filled = [nbytes_of(values[each.name]) if is_placeholder(each) else 0 for each in model.graph.initializer]
    sizes = [len(head) + size for head, size in zip(heads, filled, strict=True)]
    starts = [_start(INITIALIZER, size) for size in sizes]
    yield before + _start(GRAPH, len(first) + sum(map(len, starts)) + sum(sizes) + len(last)) + first
    for tensor, start, head in zip(model.graph.initializer, starts, heads, strict=True):
        yield start + head
        if is_placeholder(tensor):
            yield raw(array_of(values[tensor.name])).data
    yield last + after


def _around(message: Any, number: int) -> tuple[bytes, bytes]:
    """The bytes of the fields of a message before field `number`, and the bytes of those behind it."""
    parts = []
    for kept in (range(number), range(number + 1, 1 << 29)):
        part = type(message)()
        part.CopyFrom(message)
        for field, _ in message.ListFields():
            if field.number not in kept:
                part.ClearField(field.name)
        parts.append(part.SerializeToString(deterministic=True))
    return parts[0], parts[1]


def _head(tensor: TensorProto, values: Mapping[str, Held]) -> bytes:
    """The bytes of a tensor; for a placeholder the bytes before its values."""
    if not is_placeholder(tensor):
        return tensor.SerializeToString(deterministic=True)
    named = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return named.SerializeToString(deterministic=True) + _start(RAW_DATA, nbytes_of(values[tensor.name]))


def _start(number: int, size: int) -> bytes:
    """The bytes before a field of `size` bytes: its tag, with the wire type 2, and the size."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(number: int) -> bytes:
    """A number as a varint of protobuf: groups of seven bits, the lowest first."""
    groups: list[int] = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
