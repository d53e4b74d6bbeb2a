"""Takes the values of large tensors out of their model and leaves placeholders.

Graphs are then copied, inferred and converted without these values, so that each is in memory once at most. Values in a
file of their own are mapped into memory.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.loading import Source, naming_outside, place_of, read_model, read_outside
from opgrad.onnx.graph.messages import FEW_BITS, copied, copied_without, is_large, packed_bytes, size_of, without_large
from opgrad.training.files import checkpoint_tables, mapped_files

HUGE = 1 << 20  # bytes; larger tensors are taken out of a model as soon as it is read
# If the huge tensors of a model have so many bytes in all, its sessions share their memory. Below, they are
# initializers of each session: onnxruntime then makes a second copy in another order, for faster kernels.
SHARED_FROM = 1 << 26
APART = "opgrad:apart"  # the file name in the external_data of a placeholder

BYTE = 8

Held: TypeAlias = TensorProto | np.ndarray
"""A tensor's values, apart from their model."""


def detach(model: onnx.ModelProto) -> dict[str, Held]:
    """Take the values out of large initializers, which become placeholders; returns them by name."""
    tensors, apart = _taken_out(model.graph, lambda each: _is_large(each) and not uses_external_data(each))
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    return apart


def without_huge(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Held]]:
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


def read_apart(path: Path, who: str) -> tuple[onnx.ModelProto, dict[str, Held]]:
    """A model from a file with placeholders for its huge initializers, and these by name, mapped if in other files.

    Raises what `read_model` raises.
    """
    model = read_model(path, who, outside=False)
    return model, taken_apart(model, path, who)


def taken_apart(model: onnx.ModelProto, path: Path, who: str) -> dict[str, Held]:
    """Take the values out of the huge initializers that a model keeps in other files, and read the smaller ones.

    model: changed; it has placeholders then. path: its file. Returns the values by name, mapped.
    """
    apart = dict[str, Held]()
    with naming_outside(path, who):
        for tensor in model.graph.initializer:
            if uses_external_data(tensor) and (found := _mapped(tensor, path.parent)) is not None:
                apart[tensor.name] = found
                tensor.CopyFrom(placeholder(tensor.name, tensor))
    read_outside(model, path, who, is_placeholder)
    return apart


def read_shared(source: Source, who: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model for a session, and the values of initializers that became inputs of it, by name; see `shared`."""
    return (read_model(source, who), {}) if isinstance(source, bytes) else shared(*read_apart(Path(source), who))


def shared(model: onnx.ModelProto, values: Mapping[str, Held]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A copy of a model for a session, and the values of initializers that became inputs of it, by name.

    If the huge ones among its placeholders are large in all, they become inputs: sessions of several models then share
    their memory. values: those of all placeholders.
    """
    held = {each.name: values[each.name] for each in model.graph.initializer if is_placeholder(each)}
    huge = {name: each for name, each in held.items() if nbytes_of(each) > HUGE}
    if sum(map(nbytes_of, huge.values())) < SHARED_FROM:
        return attached(model, held), {}
    small = {name: each for name, each in held.items() if name not in huge}
    return with_inputs(attached(model, small)), {name: array_of(each) for name, each in huge.items()}


def inputs_of_all(model: onnx.ModelProto, values: Mapping[str, Held]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """`shared` with all placeholders as inputs."""
    held = sorted(each.name for each in model.graph.initializer if is_placeholder(each))
    return with_inputs(model), {name: array_of(values[name]) for name in held}


def _mapped(tensor: TensorProto, folder: Path) -> np.ndarray | None:
    """The mapped values of a huge tensor in another file; None for other tensors."""
    place, kind = place_of(tensor, folder), _dtype(tensor)
    file = folder / place.location
    if kind is None or nbytes_of(tensor) <= HUGE:
        return None
    start, count = place.offset or 0, nbytes_of(tensor)
    if place.length not in (None, count):
        raise ValueError(f"{tensor.name!r} of {count} bytes is said to have {place.length}")
    if start + count > file.stat().st_size:
        raise ValueError(f"{place.location} has {file.stat().st_size} bytes, expected at least {start + count}")
    content = mapped_files.content(file, shared=True, follow=False)
    found = mapped_files.array(content, kind.newbyteorder("<"), count // kind.itemsize, start)
    found = found if found.flags.aligned else np.array(found)
    return found if tensor.data_type in FEW_BITS else found.reshape(tuple(tensor.dims))


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
        return -(-size_of(held) * FEW_BITS[held.data_type] // BYTE)
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
    """Whether the values of this initializer are apart."""
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
            tensor.CopyFrom(with_values(tensor, tensor.dims, apart[tensor.name]))
    return copy


def with_values(like: Any, dims: Iterable[int], held: Held) -> TensorProto:
    """A tensor with these values, and the name of another one, or of a declared value, and its type."""
    if isinstance(held, TensorProto):
        return held
    kind = like.data_type if isinstance(like, TensorProto) else like.type.tensor_type.elem_type
    return TensorProto(name=like.name, data_type=kind, dims=dims, raw_data=checkpoint_tables.raw(held).tobytes())


def tensor_of(name: str, held: Held) -> TensorProto:
    """A tensor of this name with its values."""
    if isinstance(held, TensorProto):
        return held
    kind = checkpoint_tables.element_type(held.dtype)
    return TensorProto(name=name, data_type=kind, dims=held.shape, raw_data=checkpoint_tables.raw(held).tobytes())


def array_of(held: Held) -> np.ndarray:
    """The values of a tensor, in its dtype: bfloat16 stays bfloat16, whichever onnx is installed.

    Of integers of which several lie in a byte these are the bytes, uint8 [n].
    """
    if isinstance(held, np.ndarray):
        return held
    kind = checkpoint_tables.ELEMENT_TYPES.get(held.data_type)
    if held.data_type in FEW_BITS:
        return packed_bytes(held)
    if kind is not None and held.raw_data:
        return np.frombuffer(held.raw_data, kind.newbyteorder("<")).reshape(tuple(held.dims)).astype(kind, copy=False)
    array = numpy_helper.to_array(held)
    return array if kind is None else array.astype(kind, copy=False)


def arrays_of(tensors: Iterable[TensorProto]) -> dict[str, np.ndarray]:
    """The values of tensors by name."""
    return {tensor.name: array_of(tensor) for tensor in tensors}
