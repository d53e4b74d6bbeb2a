"""Takes the values of large tensors out of their model and leaves placeholders; writes models with these values.

Graphs are then copied, inferred and converted without these values, so that each is in memory once at most. Values in a
file of their own are mapped into memory. Models are written piece by piece, with one tensor in memory a second time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.base.files import created, flush, naming, new_file
from opgrad.onnx.graph.loading import Source, naming_outside, place_of, read_model, read_outside
from opgrad.onnx.graph.messages import FEW_BITS, copied, copied_without, is_large, packed_bytes, size_of, without_large
from opgrad.training.files import checkpoint_tables, mapped_files
from opgrad.training.files.checkpoint_tables import raw

HUGE = 1 << 20  # bytes; larger tensors are taken out of a model as soon as it is read
# If the huge tensors of a model have so many bytes in all, its sessions share their memory. Below, they are
# initializers of each session: onnxruntime then makes a second copy in another order, for faster kernels.
SHARED_FROM = 1 << 26
APART = "opgrad:apart"  # the file name in the external_data of a placeholder

Held: TypeAlias = TensorProto | np.ndarray
"""A tensor's values, apart from their model."""

Apart: TypeAlias = tuple[onnx.ModelProto, dict[str, Held]]
"""A model with placeholders, and their values by name."""

Fed: TypeAlias = tuple[onnx.ModelProto, dict[str, np.ndarray]]
"""A model, and the values of inputs that are no batch's, by name."""


def detach(model: onnx.ModelProto) -> dict[str, Held]:
    """Take the values out of large initializers, which become placeholders; returns them by name."""
    tensors, apart = _taken_out(model.graph, lambda each: _is_large(each) and not uses_external_data(each))
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    return apart


def without_huge(model: onnx.ModelProto) -> Apart:
    """A copy of a model with placeholders for its huge initializers, and these initializers by name, not copied."""
    tensors, apart = _taken_out(model.graph, lambda each: _is_large(each) and nbytes_of(each) > HUGE)
    copy = copied_without(model, "graph")
    copy.graph.CopyFrom(copied_without(model.graph, "initializer"))
    copy.graph.initializer.extend(tensors)
    return copy, apart


def _taken_out(
    graph: onnx.GraphProto, chosen: Callable[[TensorProto], bool]
) -> tuple[list[TensorProto], dict[str, Held]]:
    """The initializers with placeholders for the chosen ones, and these by name."""
    apart: dict[str, Held] = {each.name: each for each in graph.initializer if chosen(each)}
    return [placeholder(each.name, each) if each.name in apart else each for each in graph.initializer], apart


def read_apart(path: Path) -> Apart:
    """A model from a file with placeholders for its huge initializers, and these by name, mapped if in other files.

    Raises what `read_model` raises.
    """
    model = read_model(path, outside=False)
    return model, taken_apart(model, path)


def taken_apart(model: onnx.ModelProto, path: Path) -> dict[str, Held]:
    """Take the values out of the huge initializers that a model keeps in other files, and read the smaller ones.

    model: changed; it has placeholders then. path: its file. Returns the values by name, mapped.
    """
    apart = dict[str, Held]()
    with naming_outside(path):
        for tensor in model.graph.initializer:
            if not uses_external_data(tensor):
                continue
            place, kind = place_of(tensor, path.parent), _dtype(tensor)
            if kind is None or nbytes_of(tensor) <= HUGE:
                continue
            file, start, count = path.parent / place.location, place.offset or 0, nbytes_of(tensor)
            if place.length not in (None, count):
                raise ValueError(f"{tensor.name!r} of {count} bytes is said to have {place.length}")
            if start + count > file.stat().st_size:
                raise ValueError(f"{place.location} has {file.stat().st_size} bytes, expected at least {start + count}")
            content = mapped_files.content(file, shared=True, follow=False)
            found = mapped_files.array(content, kind.newbyteorder("<"), count // kind.itemsize, start)
            found = found if found.flags.aligned else np.array(found)
            apart[tensor.name] = found if tensor.data_type in FEW_BITS else found.reshape(tuple(tensor.dims))
            tensor.CopyFrom(placeholder(tensor.name, tensor))
    read_outside(model, path, is_placeholder)
    return apart


def read_shared(source: Source) -> Fed:
    """A model for a session, and the values of initializers that became inputs of it, by name; see `shared`."""
    return (read_model(source), {}) if isinstance(source, bytes) else shared(*read_apart(Path(source)))


def shared(model: onnx.ModelProto, values: Mapping[str, Held], every: bool = False) -> Fed:
    """A copy of a model for a session, and the values of initializers that became inputs of it, by name.

    Huge placeholders that are large in all become inputs, whose memory sessions share. values: of all placeholders.
    every: whether all become inputs.
    """
    held = {each.name: values[each.name] for each in model.graph.initializer if is_placeholder(each)}
    huge = {name: each for name, each in held.items() if every or nbytes_of(each) > HUGE}
    if not every and sum(map(nbytes_of, huge.values())) < SHARED_FROM:
        return attached(model, held), {}
    small = {name: each for name, each in held.items() if name not in huge}
    return with_inputs(attached(model, small)), {name: array_of(each) for name, each in huge.items()}


def _is_large(tensor: TensorProto) -> bool:
    return is_large(tensor) and _dtype(tensor) is not None


def _dtype(tensor: TensorProto) -> "np.dtype[Any] | None":
    """The dtype of a tensor's array; None for a type that has none."""
    if tensor.data_type in FEW_BITS:
        return np.dtype(np.uint8)
    return checkpoint_tables.ELEMENT_TYPES.get(tensor.data_type)


def nbytes_of(held: Held) -> int:
    """The number of bytes of a tensor whose element type checkpoints have, or one of a few bits."""
    if isinstance(held, np.ndarray):
        return held.nbytes
    if held.data_type in FEW_BITS:
        return -(-size_of(held) * FEW_BITS[held.data_type] // 8)
    return size_of(held) * checkpoint_tables.ELEMENT_TYPES[held.data_type].itemsize


def placeholder(name: str, held: Held) -> TensorProto:
    """An initializer of the type and shape of these values, without them."""
    if isinstance(held, TensorProto):
        empty = TensorProto(name=name, data_type=held.data_type, dims=held.dims)
    else:
        empty = TensorProto(name=name, data_type=checkpoint_tables.element_type(held.dtype), dims=held.shape)
    empty.data_location = TensorProto.EXTERNAL
    empty.external_data.add(key="location", value=APART)
    return empty


def is_placeholder(tensor: TensorProto) -> bool:
    return uses_external_data(tensor) and tensor.external_data[0].value == APART


def with_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in which its placeholders are inputs."""
    copy = copied_without(model, "graph")
    copy.graph.CopyFrom(without_large(model.graph, is_placeholder))
    return copy


def attached(model: onnx.ModelProto, apart: Mapping[str, Held]) -> onnx.ModelProto:
    """A copy of a model with these values of its placeholders."""
    copy = copied(model)
    for tensor in copy.graph.initializer:
        if tensor.name in apart and is_placeholder(tensor):
            tensor.CopyFrom(tensor_of(tensor.name, apart[tensor.name], tensor.data_type, tensor.dims))
    return copy


def tensor_of(name: str, held: Held, kind: int | None = None, dims: Iterable[int] | None = None) -> TensorProto:
    """A tensor of this name with its values. kind, dims: None: those of the array."""
    if isinstance(held, TensorProto):
        return held
    kind = checkpoint_tables.element_type(held.dtype) if kind is None else kind
    dims, content = held.shape if dims is None else dims, checkpoint_tables.raw(held).tobytes()
    return TensorProto(name=name, data_type=kind, dims=dims, raw_data=content)


def array_of(held: Held) -> np.ndarray:
    """The values of a tensor, in its dtype: bfloat16 stays bfloat16, whichever onnx is installed.

    Of integers of which several lie in a byte these are the bytes, uint8 [n].
    """
    if isinstance(held, np.ndarray):
        return held
    dtype = checkpoint_tables.ELEMENT_TYPES.get(held.data_type)
    if held.data_type in FEW_BITS:
        return packed_bytes(held)
    if dtype is not None and held.raw_data:
        return np.frombuffer(held.raw_data, dtype.newbyteorder("<")).reshape(tuple(held.dims)).astype(dtype, copy=False)
    array = numpy_helper.to_array(held)
    return array if dtype is None else array.astype(dtype, copy=False)


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

    def place(self, held: Held) -> dict[str, Any]:
        """Write the values of a tensor unless they are there already; returns the arguments of `refer`.

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
                refer(tensor, **outside.place(values[tensor.name]))
    new_file(path, _pieces(model, values))


def write_whole(model: onnx.ModelProto, values: Mapping[str, Held], path: Path, beside: bool = False) -> None:
    """`write_model`; beyond 2 GiB, or if `beside`, the values go into a file of its name with ".data" appended."""
    own = [each.name for each in model.graph.initializer if is_placeholder(each)]
    if beside or model.ByteSize() + sum(nbytes_of(values[name]) + 16 for name in own) > LARGEST_MODEL:
        with ValuesFile(path.with_name(f"{path.name}.data")) as outside:
            write_model(model, values, path, outside)
    else:
        write_model(model, values, path)


def refer(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Let the values of a tensor be these bytes of a file."""
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


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
