"""Large constants are set aside while a graph is inferred, converted or checked, none of which needs their values."""

import math
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.messages import copied_without

LARGE = 1024  # elements; a tensor with more is never a shape or a list of axes


# The bits of the integers of which several lie in a byte.
FEW_BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4}


def size_of(tensor: TensorProto) -> int:
    """The number of elements."""
    return math.prod(tensor.dims)


def packed_bytes(tensor: TensorProto) -> np.ndarray:
    """The bytes in which a tensor keeps integers of `FEW_BITS`, uint8 [n]."""
    return np.frombuffer(tensor.raw_data or np.array(tensor.int32_data, np.uint8).tobytes(), np.uint8)


def is_large(tensor: TensorProto) -> bool:
    """Whether a tensor has so many elements that no shape depends on its values."""
    return size_of(tensor) > LARGE


def without_large(graph: onnx.GraphProto, chosen: Callable[[TensorProto], bool] = is_large) -> onnx.GraphProto:
    """A copy of a graph in which the chosen initializers are inputs; their values are not copied."""
    copy, given = copied_without(graph, "initializer"), {each.name for each in graph.input}
    for tensor in graph.initializer:
        if not chosen(tensor):
            copy.initializer.append(tensor)
        elif tensor.name not in given:
            copy.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return copy
