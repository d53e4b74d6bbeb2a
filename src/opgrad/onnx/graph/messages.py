"""Messages of ONNX: domains, names, types, copies, and tensors that are too large to be copied."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper

MICROSOFT = "com.microsoft"
CLASSICAL = "ai.onnx.ml"
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *HALVES)
M = TypeVar("M")


def comparable(element_type: int, label: int) -> int:
    """The type in which labels are compared with this one: theirs, or int64 where int32 does not hold it."""
    is_held = element_type != TensorProto.INT32 or -(2**31) <= label < 2**31
    return element_type if is_held else TensorProto.INT64


def copied(message: M) -> M:
    """A copy of a message."""
    copy: Any = type(message)()
    copy.CopyFrom(message)
    return copy


def copied_without(message: M, field: str) -> M:
    """A copy of a message without one of its fields, which is not copied at any time."""
    copy: Any = type(message)()
    given: Any = message
    for each, value in given.ListFields():
        if each.name == field:
            continue
        if hasattr(value, "extend"):
            getattr(copy, each.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(copy, each.name).CopyFrom(value)
        else:
            setattr(copy, each.name, value)
    return copy


def keep(values: Any, kept: list[Any]) -> None:
    """Set the messages of a repeated field; they may be some of those that it holds."""
    copies = [copied(each) for each in kept]
    del values[:]
    values.extend(copies)


def names_of(text: str) -> frozenset[str]:
    """The names in a text, separated by blanks and line breaks."""
    return frozenset(text.split())


def free_name(name: str, taken: set[str]) -> str:
    """A name that is not taken yet; it is added to `taken`."""
    found, number = name, 1
    while found in taken:
        found, number = f"{name}_token_{number}", number + 1
    taken.add(found)
    return found


def domain_of(node: onnx.NodeProto) -> str:
    """The domain of a node; that of ai.onnx is empty."""
    return "" if node.domain == "ai.onnx" else node.domain


def declared_types(graph: onnx.GraphProto) -> dict[str, TypeProto]:
    """The types that a graph declares, by name: of its inputs, initializers and outputs, and of other values."""
    found = {each.name: each.type for each in (*graph.input, *graph.output, *graph.value_info)}
    for each in graph.initializer:
        found[each.name] = helper.make_tensor_type_proto(each.data_type, each.dims)
    for sparse in graph.sparse_initializer:
        found[sparse.values.name] = helper.make_tensor_type_proto(sparse.values.data_type, sparse.dims)
    return found


def attribute_of(attribute: onnx.AttributeProto) -> tuple[str, Any]:
    """The name and the value of an attribute, text decoded."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, list):
        return attribute.name, [each.decode() if isinstance(each, bytes) else each for each in value]
    return attribute.name, value.decode() if isinstance(value, bytes) else value


def opset_of(model: onnx.ModelProto) -> int:
    """The version of ai.onnx that a model imports."""
    return next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1)


def import_microsoft(model: onnx.ModelProto) -> None:
    """Import com.microsoft into a model, unless it is imported already."""
    if all(each.domain != MICROSOFT for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


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
