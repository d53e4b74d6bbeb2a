"""Large tensors apart from their model, so that graphs are copied, inferred and converted without them."""

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnxruntime.messages import copied
from opgrad.training import odtc

LARGE = 1024  # elements, beyond what the graph's shapes can depend on
APART = "apart"  # where a placeholder says that its values are


def detach(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """Take the values out of large initializers, which become placeholders; returns them by name."""
    graph, apart = model.graph, {}
    tensors = list(graph.initializer)
    if not any(map(_is_large, tensors)):
        return {}
    del graph.initializer[:]
    for tensor in tensors:
        if _is_large(tensor) and not uses_external_data(tensor):
            apart[tensor.name] = tensor
            graph.initializer.append(_placeholder(tensor))
        else:
            graph.initializer.append(tensor)
    return apart


def _is_large(tensor: TensorProto) -> bool:
    return size_of(tensor) > LARGE


def size_of(tensor: TensorProto) -> int:
    """The number of elements."""
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count


def _placeholder(tensor: TensorProto) -> TensorProto:
    empty = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    empty.data_location = TensorProto.EXTERNAL
    empty.external_data.add(key="location", value=APART)
    return empty


def is_placeholder(tensor: TensorProto) -> bool:
    """Whether the values of this initializer are apart."""
    return uses_external_data(tensor) and tensor.external_data[0].value == APART


def attached(model: onnx.ModelProto, apart: dict[str, TensorProto]) -> onnx.ModelProto:
    """A copy of a model with its values."""
    copy = copied(model)
    for tensor in copy.graph.initializer:
        if is_placeholder(tensor):
            tensor.CopyFrom(apart[tensor.name])
    return copy


def array_of(tensor: TensorProto) -> np.ndarray:
    """The values of a tensor, in its dtype: bfloat16 stays bfloat16, whichever onnx is installed."""
    kind = odtc.ELEMENT_TYPES.get(tensor.data_type)
    if kind is not None and tensor.raw_data:
        return (
            np.frombuffer(tensor.raw_data, kind.newbyteorder("<")).reshape(tuple(tensor.dims)).astype(kind, copy=False)
        )
    array = numpy_helper.to_array(tensor)
    return array if kind is None else array.astype(kind, copy=False)


def arrays_of(tensors: Iterable[TensorProto]) -> dict[str, np.ndarray]:
    """The values of tensors by name."""
    return {tensor.name: array_of(tensor) for tensor in tensors}
