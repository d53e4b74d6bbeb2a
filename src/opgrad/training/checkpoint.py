"""Read the parameters out of a checkpoint file of onnxruntime-training.

The file is a FlatBuffer with the identifier ODTC. Its tables, with the index of each field used here:

    root       0 version (int32)      1 model state (table)
    state      0 trainable (tensors)  1 frozen (tensors)
    tensor     0 name (string)        2 dims (int64s)    3 element type of ONNX (int32)    4 data (bytes)

Offsets in a damaged file may point anywhere, so every access is checked against the file's bounds.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from flatbuffers import number_types
from flatbuffers.table import Table
from flatbuffers.util import BufferHasIdentifier
from onnx.helper import tensor_dtype_to_np_dtype

IDENTIFIER = b"ODTC"
VERSION = 2


@dataclass(frozen=True)
class OptimizerGroup:
    """The state of an optimizer.

    step: the number of steps done.
    learning_rate: the learning rate that a schedule starts from, float32 in the file.
    moments: the moments of every trainable parameter, by the parameter's name and by their own: "momentum0" and
        "momentum1" for AdamW, none for SGD.
    """

    step: int
    learning_rate: float
    moments: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    trainable: the parameters that have gradients, by name.
    frozen: the parameters that have none, by name.
    optimizers: the state of the optimizer, by the name of its group, "group0"; empty if it was not saved.
    properties: numbers and texts that the user put in.
    nominal: True if the parameters are known by name only; their arrays are then empty.
    """

    trainable: dict[str, np.ndarray]
    frozen: dict[str, np.ndarray]
    optimizers: dict[str, OptimizerGroup] = field(default_factory=dict)
    properties: dict[str, int | float | str] = field(default_factory=dict)
    nominal: bool = False

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name."""
        return self.trainable | self.frozen


def write_checkpoint(checkpoint: Checkpoint, path: str | PathLike[str], *, external_data: bool | None = None) -> None:
    """Write a checkpoint file that onnxruntime-training 1.19 reads, too.

    checkpoint: what the file shall hold.
    path: the file.
    external_data: whether the values of the parameters go into a second file, `path` with ".data" behind it.
        Default: only if they are too many for one file.
    """
    raise NotImplementedError("write_checkpoint: not there yet")


def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Read the parameters of a checkpoint file written by onnxruntime-training 1.19.

    path: the file.
    Returns a `Checkpoint` whose arrays are read-only views of the file's bytes.
    Raises OSError if the file cannot be read, ValueError if it is no checkpoint, truncated or damaged, and
    NotImplementedError if it has another version or keeps its data outside.
    """
    data = Path(path).read_bytes()
    if len(data) < 8 or not BufferHasIdentifier(data, 0, IDENTIFIER):
        raise ValueError(f"read_checkpoint: {path} is no checkpoint, expected the identifier ODTC at byte 4")
    try:
        return _read(data)
    except _Damaged as damage:
        raise ValueError(f"read_checkpoint: {path} is truncated or damaged, {damage}") from None
    except NotImplementedError as lack:
        raise NotImplementedError(f"read_checkpoint: {path} {lack}") from None


class _Damaged(Exception):
    """What is wrong with the file."""


def _read(data: bytes) -> Checkpoint:
    if len(data) % 4:
        raise _Damaged(f"it has {len(data)} bytes, expected a multiple of 4")
    root = _Record.at(data, 0)
    version = root.integer(0)
    if version != VERSION:
        raise NotImplementedError(f"has version {version}, expected {VERSION}")
    state = root.record(1)
    trainable, frozen = (dict(map(_tensor, state.records(field))) for field in (0, 1))
    if len(trainable.keys() | frozen.keys()) < state.length(0) + state.length(1):
        raise _Damaged("it names a parameter twice")
    return Checkpoint(trainable, frozen)


def _tensor(record: "_Record") -> tuple[str, np.ndarray]:
    name = record.text(0)
    dims = record.array(2, np.dtype(np.int64)).tolist()
    if not record.position_of(4):
        raise NotImplementedError(f"keeps the data of {name!r} outside the file, expected it inside")
    try:
        dtype = tensor_dtype_to_np_dtype(record.integer(3))
    except KeyError:
        raise _Damaged(f"{name!r} has the unknown element type {record.integer(3)}") from None
    content = record.array(4, np.dtype(np.uint8))
    if min(dims, default=1) < 0 or math.prod(dims) * dtype.itemsize != content.size:
        raise _Damaged(f"{name!r} has shape {tuple(dims)} and {content.size} bytes of {dtype}")
    return name, content.view(dtype).reshape(dims)


class _Record(Table):  # type: ignore[misc]
    """One table of the file, read within the file's bounds."""

    Bytes: bytes
    Pos: int

    def __init__(self, data: bytes, position: int):
        super().__init__(data, position)
        self._check(position, 4)
        self.vtable = position - self._number(number_types.SOffsetTFlags, position)
        self.vtable_size = self._number(number_types.VOffsetTFlags, self.vtable)
        self._check(self.vtable, self.vtable_size)

    @classmethod
    def at(cls, data: bytes, position: int) -> "_Record":
        """The table whose offset stands at `position`."""
        return cls(data, position + int.from_bytes(data[position : position + 4], "little"))

    def position_of(self, field: int) -> int:
        """Where a field of this table stands; 0 if it is absent."""
        entry = 4 + 2 * field
        if entry + 2 > self.vtable_size:
            return 0
        offset = self._number(number_types.VOffsetTFlags, self.vtable + entry)
        return self.Pos + offset if offset else 0

    def integer(self, field: int) -> int:
        position = self.position_of(field)
        return self._number(number_types.Int32Flags, position) if position else 0

    def record(self, field: int) -> "_Record":
        position = self.position_of(field)
        if not position:
            raise _Damaged(f"the table at byte {self.Pos} lacks field {field}")
        self._check(position, 4)
        return self.at(self.Bytes, position)

    def length(self, field: int) -> int:
        """The number of elements of a vector field; 0 if it is absent."""
        return self._vector(field)[1]

    def records(self, field: int) -> Iterator["_Record"]:
        start, count = self._vector(field)
        self._check(start, 4 * count)
        return (self.at(self.Bytes, start + 4 * index) for index in range(count))

    def array(self, field: int, dtype: np.dtype[Any]) -> np.ndarray:
        start, count = self._vector(field)
        self._check(start, count * dtype.itemsize)
        return np.frombuffer(self.Bytes, dtype, count, start)

    def text(self, field: int) -> str:
        try:
            return self.array(field, np.dtype(np.uint8)).tobytes().decode()
        except UnicodeDecodeError:
            raise _Damaged(f"the name at byte {self._vector(field)[0]} is no text") from None

    def _vector(self, field: int) -> tuple[int, int]:
        """Where the elements of a vector field start, and how many they are."""
        position = self.position_of(field)
        if not position:
            return 0, 0
        start = position + self._number(number_types.UOffsetTFlags, position)
        return start + 4, self._number(number_types.UOffsetTFlags, start)

    def _number(self, kind: Any, position: int) -> int:
        self._check(position, kind.bytewidth)
        return int(self.Get(kind, position))

    def _check(self, start: int, count: int) -> None:
        if start < 0 or start + count > len(self.Bytes):
            raise _Damaged(f"it has {len(self.Bytes)} bytes and refers to bytes {start} to {start + count}")
