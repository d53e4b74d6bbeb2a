"""The tables of a checkpoint file of onnxruntime-training, and how they are read and written.

The file is a FlatBuffer with the identifier ODTC. `CHECKPOINT` describes its root table: a table is a mapping from
the names of its fields to their place and kind, and what is read and written is a dictionary by the same names.

Offsets in a damaged file may point anywhere, so every access is checked against the file's bounds; and they may
point to the same bytes again and again, so tables and texts together may not take more bytes than the file has.
"""

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from flatbuffers import Builder, encode, number_types
from flatbuffers.util import BufferHasIdentifier

from opgrad.training.files import mapped_files

IDENTIFIER = b"ODTC"
VERSION = 2
ALIGNMENT = 8
MOST_DIMENSIONS = 32  # of an array in NumPy 1
LARGEST = 2**31 - 1  # the most bytes of a FlatBuffer, whose offsets are signed 32-bit numbers


Values = dict[str, Any]
"""The fields of a table."""

Content: TypeAlias = bytes | memoryview
"""The bytes of a file."""

KINDS = {1: "f4", 2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 9: "?", 10: "f2", 11: "f8", 12: "u4", 13: "u8"}
ELEMENT_TYPES: dict[int, np.dtype[Any]] = {number: np.dtype(kind) for number, kind in KINDS.items()}
ELEMENT_TYPES[16] = np.dtype(ml_dtypes.bfloat16)
"""The dtypes of tensors, by their number in ONNX."""


class Damaged(Exception):
    """The file is damaged. The text begins with a verb: the file's name followed by it makes a sentence."""


# --- the tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A field of a table.

    index: its place in the table.
    kind: a type of numbers, str, bytes (an array of uint8), list (of int64), fields of a table, or a list of such.
    default: the number that a missing field stands for.
    required: whether a table without this field is damaged.
    """

    index: int
    kind: Any
    default: int = 0
    required: bool = False


Layout = Mapping[str, Field]

INT32, INT64 = number_types.Int32Flags, number_types.Int64Flags
FLOAT32, BOOL = number_types.Float32Flags, number_types.BoolFlags
NUMBERS = (INT32, INT64, FLOAT32, BOOL)

TENSOR: Layout = {
    "name": Field(0, str, required=True),
    "dims": Field(2, list, required=True),
    "element_type": Field(3, INT32),
    "data": Field(4, bytes),
    "offset": Field(6, INT64, default=-1),  # in the file beside this one, if there is no data
}
MODEL: Layout = {
    "trainable": Field(0, [TENSOR], required=True),
    "frozen": Field(1, [TENSOR], required=True),
    "nominal": Field(2, BOOL),
    "outside": Field(3, BOOL),
    "digest": Field(4, str),  # of the file beside this one, if it is part of its name; onnxruntime-training has none
}
MOMENTS: Layout = {"parameter": Field(0, str, required=True), "tensors": Field(1, [TENSOR], required=True)}
GROUP: Layout = {
    "name": Field(0, str, required=True),
    "step": Field(1, INT64),
    "learning_rate": Field(2, FLOAT32),
    "moments": Field(3, [MOMENTS], required=True),
}
INTEGER: Layout = {"name": Field(0, str, required=True), "value": Field(1, INT64)}
FLOAT: Layout = {"name": Field(0, str, required=True), "value": Field(1, FLOAT32)}
TEXT: Layout = {"name": Field(0, str, required=True), "value": Field(1, str, required=True)}
PROPERTIES: Layout = {"integers": Field(0, [INTEGER]), "floats": Field(1, [FLOAT]), "texts": Field(2, [TEXT])}
CHECKPOINT: Layout = {
    "version": Field(0, INT32),
    "model": Field(1, MODEL, required=True),
    "optimizers": Field(2, [GROUP]),
    "properties": Field(3, PROPERTIES),
}


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensors(root: Values) -> Iterator[Values]:
    model = root["model"]
    yield from (*model["trainable"], *model["frozen"])
    for group in root["optimizers"]:
        for moments in group["moments"]:
            yield from moments["tensors"]


def dtype(tensor: Values) -> np.dtype[Any]:
    """The dtype of a tensor, little endian."""
    number = tensor["element_type"]
    if number not in ELEMENT_TYPES:
        raise Damaged(f"is damaged, {tensor['name']!r} has the unknown element type {number}")
    return ELEMENT_TYPES[number].newbyteorder("<")


def element_type(dtype: np.dtype[Any]) -> int | None:
    """The number of a dtype in ONNX; None if it cannot be in a checkpoint."""
    return next((number for number, kind in ELEMENT_TYPES.items() if kind == dtype.newbyteorder("=")), None)


def nbytes(tensor: Values) -> int:
    """How many bytes a tensor of its shape takes."""
    dims = tensor["dims"]
    if len(dims) > MOST_DIMENSIONS or min(dims, default=0) < 0:
        raise Damaged(f"is damaged, {tensor['name']!r} has shape {tuple(dims[:MOST_DIMENSIONS])}")
    return math.prod(dims) * dtype(tensor).itemsize


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order, little endian: a view where they lie so in memory."""
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return little.reshape(-1).view(np.uint8)


def aligned(count: int) -> int:
    """The next multiple of 8 bytes, where an array of any dtype may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT


# --- reading ---------------------------------------------------------------------------------------------------------


def is_one(content: Content) -> bool:
    return len(content) >= 8 and bool(BufferHasIdentifier(content, 0, IDENTIFIER))


def decode(content: Content) -> Values:
    """The root table of a checkpoint file; arrays are views of `content`, absent fields without default are None.

    Raises Damaged if this is no checkpoint, or has another version, or if anything in it is wrong.
    """
    if not is_one(content):
        raise Damaged("is no checkpoint, expected the identifier ODTC at byte 4")
    try:
        reader = _Reader(content)
        version = reader.target(0, {"version": CHECKPOINT["version"]})["version"]
        if version != VERSION:
            raise Damaged(f"has version {version}, expected {VERSION}")
        return reader.target(0, CHECKPOINT)
    except _Wrong as wrong:
        raise Damaged(f"is truncated or damaged, {wrong}") from None


class _Wrong(Exception):
    """A fault found while reading; `decode` turns it into `Damaged`."""


class _Reader:
    """Reads tables within the bounds of the file."""

    def __init__(self, content: Content):
        if len(content) % 4:
            raise _Wrong(f"it has {len(content)} bytes, expected a multiple of 4")
        self.content = content
        self.left = len(content)

    def target(self, position: int, layout: Layout) -> Values:
        """The table whose offset stands at `position`."""
        return self.table(position + self.number(number_types.UOffsetTFlags, position), layout)

    def table(self, position: int, layout: Layout) -> Values:
        self.spend(4)
        places = position - self.number(number_types.SOffsetTFlags, position)
        size = self.number(number_types.VOffsetTFlags, places)
        values: Values = {}
        for name, field in layout.items():
            entry = 4 + 2 * field.index
            offset = self.number(number_types.VOffsetTFlags, places + entry) if entry + 2 <= size else 0
            if field.required and not offset:
                raise _Wrong(f"the table at byte {position} lacks its {name}")
            if offset:
                values[name] = self.value(position + offset, field.kind)
            elif field.kind in NUMBERS:
                values[name] = field.kind.py_type(field.default)
            else:
                values[name] = [] if isinstance(field.kind, list) else None
        return values

    def value(self, position: int, kind: Any) -> Any:
        if kind in NUMBERS:
            return self.number(kind, position)
        if isinstance(kind, Mapping):
            return self.target(position, kind)
        if kind is str:
            return self.text(position)
        if kind is bytes:
            return self.array(position, np.dtype(np.uint8))
        if kind is list:
            sizes = self.array(position, np.dtype("<i8"))
            self.spend(sizes.nbytes)
            return sizes.tolist()
        start, count = self.vector(position, 4)
        return [self.target(start + 4 * index, kind[0]) for index in range(count)]

    def array(self, position: int, dtype: np.dtype[Any]) -> np.ndarray:
        start, count = self.vector(position, dtype.itemsize)
        return mapped_files.array(self.content, dtype, count, start)

    def text(self, position: int) -> str:
        content = self.array(position, np.dtype(np.uint8))
        self.spend(content.size)
        try:
            return content.tobytes().decode()
        except UnicodeDecodeError:
            raise _Wrong(f"the text that byte {position} refers to is not in UTF-8") from None

    def vector(self, position: int, width: int) -> tuple[int, int]:
        """Where the elements of a vector start, and how many they are."""
        start = position + self.number(number_types.UOffsetTFlags, position)
        count = self.number(number_types.UOffsetTFlags, start)
        self.check(start + 4, count * width)
        return start + 4, count

    def number(self, kind: Any, position: int) -> Any:
        self.check(position, kind.bytewidth)
        return kind.py_type(encode.Get(kind.packer_type, self.content, position))

    def check(self, start: int, count: int) -> None:
        if start < 0 or start + count > len(self.content):
            raise _Wrong(f"it has {len(self.content)} bytes and refers to bytes {start} to {start + count}")

    def spend(self, count: int) -> None:
        """Count the bytes that tables, texts and shapes take: in a sound file no two of them overlap."""
        self.left -= count
        if self.left < 0:
            raise _Wrong("it refers to the same bytes several times")


# --- writing ---------------------------------------------------------------------------------------------------------


def size(values: Any) -> int:
    """How many bytes `encode` needs at most for these values, or for a part of them."""
    if isinstance(values, Mapping):
        return 64 + sum(map(size, values.values()))
    if isinstance(values, list):
        return 16 + sum(map(size, values))
    if isinstance(values, np.ndarray):
        return 16 + values.nbytes
    return 16 + len(values.encode()) if isinstance(values, str) else 8


def contents(values: Values) -> Iterator[memoryview]:
    """The content of a checkpoint file whose root table has these values; None stands for a field that is absent.

    Arrays may have any layout. A contiguous array is a piece without a copy; of others one copy is made at a time.
    """
    builder = _Builder(size(values))
    builder.Finish(_write_table(builder, CHECKPOINT, values), IDENTIFIER)
    return builder.pieces()


class _Builder(Builder):  # type: ignore[misc]  # flatbuffers declares no types
    """A builder that leaves room for arrays instead of copying them.

    Its buffer spans the whole file, but the pages that arrays would fill are never touched and so take no memory.
    """

    def __init__(self, size: int):
        super().__init__(0)
        self.Bytes = memoryview(mmap.mmap(-1, max(size, 1)))
        self.head = len(self.Bytes)
        self._arrays: list[tuple[int, np.ndarray]] = []  # from the last one in the file to the first

    def leave_room(self, array: np.ndarray) -> None:
        """Let an array be written here."""
        self.head -= array.nbytes
        self._arrays.append((self.head, array))

    def pieces(self) -> Iterator[memoryview]:
        """What was built, in order."""
        begin = self.Head()
        for start, array in reversed(self._arrays):
            yield self.Bytes[begin:start]
            yield raw(array).data
            begin = start + array.nbytes
        yield self.Bytes[begin:]


def _write_table(builder: Any, layout: Layout, values: Mapping[str, Any]) -> int:
    present = {name: value for name, value in values.items() if value is not None}
    places = {name: _write(builder, layout[name].kind, value) for name, value in present.items()}
    builder.StartObject(1 + max(field.index for field in layout.values()))
    for name, place in places.items():
        field = layout[name]
        if field.kind in NUMBERS:
            builder.PrependSlot(field.kind, field.index, place, field.kind.py_type(field.default))
        else:
            builder.PrependUOffsetTRelativeSlot(field.index, place, 0)
    return builder.EndObject()


def _write(builder: Any, kind: Any, value: Any) -> Any:
    """Write a value that a table refers to and return its place; a number, which a table contains, is itself."""
    if kind in NUMBERS:
        return value
    if isinstance(kind, Mapping):
        return _write_table(builder, kind, value)
    if kind is str:
        return builder.CreateString(value)
    if kind is bytes:
        builder.StartVector(1, value.nbytes, ALIGNMENT)
        builder.leave_room(value)
        return builder.EndVector()
    if kind is list:
        builder.StartVector(8, len(value), 8)
        for number in reversed(value):
            builder.PrependInt64(number)
        return builder.EndVector()
    offsets = [_write_table(builder, kind[0], item) for item in value]
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()
