"""The types and sizes of a model's values, by onnx's shape inference in bounded memory, also for unknown operators.

With data propagation onnx computes shapes from the values of other arrays. It then takes every array of one axis for a
shape and stores 200 bytes for each element, however long the array is. So a first run without data propagation finds
the long arrays; in the second run, with it, each long array has a symbolic size, so that onnx stores no elements.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper, shape_inference

from opgrad.onnx.graph.large import LARGE, without_large
from opgrad.onnx.graph.messages import copied_without, declared_types, domain_of, keep, opset_of
from opgrad.onnx.graph.nodes import rename_inputs
from opgrad.onnx.graph.opset import raise_opset
from opgrad.onnx.graph.ranks import more_ranks
from opgrad.onnx.graph.sizes import VAGUE, forget_vague, known, sizes_in
from opgrad.onnx.graph.stand_ins import stand_ins

KNOWN_BEST = 17  # older models are inferred as this opset: onnx propagates the data of more of its operators
LONG = "opgrad.size."  # the prefix of the symbolic size of a long array
# Operators whose inputs hold the sizes of the result, and the places of these inputs.
SIZE_GIVEN = {"ConstantOfShape": (0,), "Expand": (1,), "Tile": (1,), "Reshape": (1,), "Range": (0, 1, 2)}
Types: TypeAlias = dict[str, TypeProto.Tensor]


def shapes_given(node: onnx.NodeProto) -> Iterator[str]:
    """The names of the inputs that hold the sizes of a node's result."""
    places = SIZE_GIVEN.get(node.op_type, ()) if not domain_of(node) else ()
    return (node.input[place] for place in places if place < len(node.input) and node.input[place])


def infer(model: onnx.ModelProto, constants: Callable[[Types], Mapping[str, np.ndarray]]) -> tuple[Types, Types]:
    """The types of the tensors of a model's graph, by name, as far as they can be inferred, and those in sequences.

    constants: a function that gets the types known so far and returns the constants among the `shapes_given`, by name.

    Returns the types of the tensors, and for each sequence of tensors the type of these.
    """
    stand_in = _stand_in(model)
    with suppress(NotImplementedError):  # onnx propagates the data of fewer operators of older opsets
        raise_opset(stand_in, KNOWN_BEST)
    own = {tensor.name: _type_of(tensor) for tensor in model.graph.initializer}
    found, sequences = _inferred(stand_in, False)
    first = found | own
    given = constants(first)
    if given:
        _give(stand_in, given)
        first = _inferred(stand_in, False)[0] | own
    if ranks := more_ranks(model.graph.node, first):
        keep(stand_in.graph.value_info, [each for each in stand_in.graph.value_info if each.name not in ranks])
        values = (helper.make_value_info(name, TypeProto(tensor_type=each)) for name, each in ranks.items())
        stand_in.graph.value_info.extend(values)
        first = _inferred(stand_in, False)[0] | own
    _hide(stand_in, {name: each for name, each in first.items() if _is_long(each)})
    try:
        second, made_up = _inferred(stand_in, True)
    except MemoryError:
        return first, sequences
    for name, each in first.items():
        if name not in second or not second[name].HasField("shape"):
            forget_vague(each)  # onnx makes up names for unknown sizes; the second run uses them for other sizes
    found = {**first, **{name: _merged(each, first.get(name)) for name, each in second.items()}, **own}
    _forget([*found.values(), *sequences.values()], [*made_up.values(), *sequences.values()])
    return found, sequences


def _forget(types: Iterable[TypeProto.Tensor], of: Iterable[TypeProto.Tensor]) -> None:
    """Remove the names that onnx made up for sizes in `of`, tensors of sequences that need not be equal, from types."""
    names = {size.dim_param for each in of for size in each.shape.dim if VAGUE.fullmatch(size.dim_param)} - {""}
    for size in (size for each in types if names for size in each.shape.dim):
        if size.dim_param in names:
            size.Clear()


def _inferred(model: onnx.ModelProto, data_prop: bool) -> tuple[Types, Types]:
    """The types of tensors, and those of the tensors in sequences. ValueError if they contradict each other."""
    try:
        found = declared_types(shape_inference.infer_shapes(model, data_prop=data_prop).graph)
    except shape_inference.InferenceError as error:
        raise ValueError(f"the model's types contradict each other: {str(error).splitlines()[0]}") from None
    sequences = {name: each.sequence_type.elem_type.tensor_type for name, each in found.items()}
    tensors = {name: each.tensor_type for name, each in found.items() if not each.HasField("sequence_type")}
    return tensors, {name: each for name, each in sequences.items() if each.elem_type}


def _is_long(declared: TypeProto.Tensor) -> bool:
    """Whether an array of one axis is too long to be a shape or a list of axes."""
    sizes = known(sizes_in(declared))
    return sizes is not None and len(sizes) == 1 and sizes[0] > LARGE


def _type_of(tensor: TensorProto) -> TypeProto.Tensor:
    return helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type


def _merged(found: TypeProto.Tensor, before: TypeProto.Tensor | None) -> TypeProto.Tensor:
    """The second run's type of a value, with the symbolic sizes of long arrays as numbers again.

    Sizes that only the first run knew are taken from it.
    """
    dims = before.shape.dim if before is not None and len(before.shape.dim) == len(found.shape.dim) else found.shape.dim
    for dim, other in zip(found.shape.dim, dims, strict=True):
        if dim.dim_param.startswith(LONG):
            dim.dim_value = int(dim.dim_param.removeprefix(LONG))
        elif other.HasField("dim_value"):
            dim.dim_value = other.dim_value
    return before if before is not None and not found.HasField("shape") else found


def _give(model: onnx.ModelProto, constants: Mapping[str, np.ndarray]) -> None:
    """Let nodes read constants in place of the shapes that other nodes compute."""
    graph = model.graph
    names = {name: f"{LONG}constant.{name}" for name in constants}
    graph.initializer.extend(numpy_helper.from_array(value, names[name]) for name, value in constants.items())
    for node in graph.node:
        rename_inputs(node, {name: names[name] for name in shapes_given(node) if name in names})


def _hide(model: onnx.ModelProto, long: Types) -> None:
    """Let nodes read, in place of each long array, a new input whose size is symbolic."""
    names = {}
    for name, declared in long.items():
        size = f"{LONG}{declared.shape.dim[0].dim_value}"
        names[name] = f"{size}.{name}"
        model.graph.input.append(helper.make_tensor_value_info(names[name], declared.elem_type, [size]))
    for node in model.graph.node:
        rename_inputs(node, names)


def _stand_in(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the same shapes for onnx's inference.

    Large constants are inputs of it, and operators that onnx does not know are replaced by ones with equal shapes.
    """
    graph, opset = without_large(model.graph), opset_of(model)
    del graph.node[:]
    graph.node.extend(other for node in model.graph.node for other in stand_ins(node, opset))
    result = copied_without(model, "graph")
    result.graph.CopyFrom(graph)
    for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
        forget_vague(value.type.tensor_type)
    return result
