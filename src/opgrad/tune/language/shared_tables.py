"""Tables that share their bytes with the last product's weights: the same memory in another shape, without a copy."""

from collections.abc import Mapping

import numpy as np
import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FEW_BITS, keep
from opgrad.onnx.graph.nodes import read_by
from opgrad.training.files.tensor_values import Held, array_of, is_placeholder, placeholder, tensor_of


def reshaped(model: onnx.ModelProto, values: Mapping[str, Held]) -> dict[str, Held]:
    """Replace each Reshape of a stored tensor by that tensor in the other shape; onnxruntime would make a copy.

    model: changed. values: those of its placeholders. Returns the values with those of new placeholders.
    """
    graph, found = Graph(model), dict(values)
    for node in list(model.graph.node):
        tensor = graph.initializers.get(node.input[0]) if node.op_type == "Reshape" and node.input else None
        shape = graph.constant(node.input[1]) if tensor is not None else None
        if tensor is None or shape is None or tensor.data_type in FEW_BITS:
            continue
        held = found[tensor.name] if is_placeholder(tensor) else tensor
        sizes = [tensor.dims[place] if size == 0 else int(size) for place, size in enumerate(shape.tolist())]
        array: np.ndarray = array_of(held).reshape(sizes)
        name = node.output[0]
        if is_placeholder(tensor):
            found[name] = array
        model.graph.initializer.append(placeholder(name, array) if name in found else tensor_of(name, array))
        model.graph.node.remove(node)
    read = read_by(model.graph.node)
    keep(model.graph.initializer, [each for each in model.graph.initializer if each.name in read])
    return found
