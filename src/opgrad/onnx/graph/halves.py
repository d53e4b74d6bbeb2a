"""Graphs of float16 and bfloat16 that compute in float32, with weights stored as they are.

onnxruntime's CPU loads no arithmetic of bfloat16, and computes with float16 in generic code. Stored weights are cast
where they are read; what is computed of them is float32.
"""

from collections.abc import Collection, Iterable

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, inliner, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.messages import HALVES, free_name, keep, size_of
from opgrad.onnx.graph.nodes import model_nodes, names_in, read_by, rename_inputs, subgraphs

LOADED_AS_FLOATS = (TensorProto.BFLOAT16,)  # types that onnxruntime's CPU stores and casts, but computes nothing with
# Attributes that name the type of a result, or the one in which it is computed.
TYPED = ("to", "dtype", "output_dtype", "output_type", "stash_type", "softmax_precision", "precision")


def has_halves(model: onnx.ModelProto, kinds: Collection[int] = HALVES) -> bool:
    """Whether a graph computes anything in float16 or bfloat16, or takes or stores it. kinds: which of the two."""
    graph = model.graph
    values = {each.type.tensor_type.elem_type for each in (*graph.input, *graph.output, *graph.value_info)}
    stored = {each.data_type for each in graph.initializer}
    typed = (_typed(each, kinds) for node in model_nodes(model) for each in node.attribute)
    return not {*values, *stored}.isdisjoint(kinds) or any(typed)


def compute_in_float32(model: onnx.ModelProto, widened: Collection[str] = ()) -> bool:
    """Let a graph compute in float32 what it computes in float16 and bfloat16; whether it had any.

    model: changed; its functions are inlined. Outputs of these types become float32. Inputs and initializers keep
    theirs, and are cast where they are read, but for single numbers and the inputs named in `widened`, which become
    float32. A graph that computes in float32 already stays as it is.
    """
    if not has_halves(model):
        return False
    if model.functions:
        model.CopyFrom(inliner.inline_local_functions(model))
    graph, taken = model.graph, names_in(model.graph)
    _widen(each for each in graph.input if each.name in widened)
    # Turn initializers that are one number into float32: what recognizes nodes by their constants still sees them.
    for tensor in graph.initializer:
        if tensor.data_type in HALVES and size_of(tensor) == 1 and not uses_external_data(tensor):
            _widen_tensor(tensor)
    stored = [each.name for each in graph.initializer if each.data_type in HALVES]
    stored += [each.name for each in graph.input if _is_half(each) and each.name not in stored]
    _widen(each for each in graph.output if each.name not in stored)
    for node in graph.node:
        _of_node(node)
    readers = [node for node in graph.node if not _casts_to_float32(node)]
    read = read_by(readers)
    names = {name: free_name(f"{name}.float32", taken) for name in stored if name in read}
    for node in readers:
        rename_inputs(node, names)
    to = TensorProto.FLOAT
    casts = [helper.make_node("Cast", [name], [new], f"{new}/Cast", to=to) for name, new in names.items()]
    keep(graph.node, [*casts, *graph.node])
    del graph.value_info[:]
    return True


def without_casts(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Let what read casts of these values to float32 read the values, which are float32 themselves."""
    casts = [node for node in graph.node if _casts_to_float32(node) and node.input[0] in names]
    read = {node.output[0]: node.input[0] for node in casts}
    keep(graph.node, [node for node in graph.node if not node.output or node.output[0] not in read])
    for node in graph.node:
        rename_inputs(node, read)


def in_float32(array: np.ndarray) -> np.ndarray:
    """An array of float16 or bfloat16 as float32, exactly; any other array as it is."""
    return array.astype(np.float32) if is_half(array.dtype) else array


def rounded(array: np.ndarray, kind: int, what: str) -> np.ndarray:
    """An array of float32 in the type of this TensorProto.DataType if that is a half; any other array as it is.

    what: the array, for messages. Raises ValueError if float16 cannot hold one of the numbers.
    """
    if kind not in HALVES or array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        found = array.astype(helper.tensor_dtype_to_np_dtype(kind))
    if (lost := np.isinf(found) & np.isfinite(array)).any():
        raise ValueError(f"{what} has {array[lost][0]:g}, which {found.dtype.name} cannot hold")
    return found


def is_half(dtype: "np.dtype[np.generic]") -> bool:
    """Whether a dtype is float16 or bfloat16."""
    return dtype.name in ("float16", "bfloat16")


def _is_half(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type in HALVES


def _widen(values: Iterable[onnx.ValueInfoProto]) -> None:
    for each in values:
        if _is_half(each):
            each.type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_tensor(tensor: TensorProto) -> None:
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _typed(attribute: AttributeProto, kinds: Collection[int] = HALVES) -> bool:
    """Whether an attribute says a half: as the type of a result, or as a tensor."""
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type in kinds
    return attribute.name in TYPED and attribute.type == AttributeProto.INT and attribute.i in kinds


def _casts_to_float32(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and any(each.name == "to" and each.i == TensorProto.FLOAT for each in node.attribute)


def _of_node(node: onnx.NodeProto) -> None:
    """Let attributes of a node, and the graphs inside of it, say float32 where they say a half."""
    for each in filter(_typed, node.attribute):
        if each.type == AttributeProto.TENSOR:
            _widen_tensor(each.t)
        else:
            each.i = TensorProto.FLOAT
    for body in subgraphs(node):
        _widen((*body.input, *body.output, *body.value_info))
        for tensor in body.initializer:
            if tensor.data_type in HALVES:
                _widen_tensor(tensor)
        for inner in body.node:
            _of_node(inner)
